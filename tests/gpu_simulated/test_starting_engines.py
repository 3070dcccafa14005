"""Engines on GPUs start before any role is built, so that vLLM measures only its own memory.

vLLM's memory accounting runs against a simulated GPU of 80 GiB that trainer and engine share.
"""

import importlib.util
import logging
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from lightning_rlhf.callbacks.loop import rollout_loop, run_engine
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rollout import weights
from lightning_rlhf.rollout.engine import EngineTraits
from lightning_rlhf.rollout.gpu_memory import limit_gpu_memory
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.rollout.vllm.receiver import WeightReceiver
from lightning_rlhf.rollout.vllm.sync import Slot, WeightSender
from tests.callbacks.conftest import ROWS, Run
from tests.gpu_simulated.pretend import CUDA, pretended_cuda
from tests.stand_ins import ScriptedEngine

GIB = 1 << 30
SHARE = 0.4
pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")


class Card:
    """A GPU whose memory use is simulated, in bytes."""

    total = 80 * GIB

    def __init__(self):
        self.trainer = self.engine = self.peak = 0

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.engine}

    def get_memory_info(self, device=None):
        return self.total - self.trainer - self.engine, self.total

    def memory_reserved(self, device=None):
        return self.engine

    def nothing(self, device=None):
        return None

    empty_cache = reset_peak_memory_stats = nothing


@pytest.fixture
def card(monkeypatch):
    card = Card()
    for name in ("memory_stats", "get_memory_info", "memory_reserved", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, getattr(card, name))
    return card


@pytest.fixture
def accounting(monkeypatch):
    """vLLM's module ``mem_utils``, loaded without the rest of vLLM."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    platform = types.SimpleNamespace(is_integrated_gpu=lambda index: False, current_device=lambda: 0)
    for name, content in (
        ("vllm", {"__path__": []}),
        ("vllm.utils", {"__path__": [str(folder / "utils")]}),
        ("vllm.logger", {"init_logger": logging.getLogger}),
        ("vllm.platforms", {"current_platform": platform}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.utils.mem_constants", "vllm.utils.mem_utils"):
        spec = importlib.util.spec_from_file_location(name, folder / "utils" / f"{name.rpartition('.')[2]}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


class Measuring(ScriptedEngine):
    """Sizes its cache between ``start`` and ``wait`` like vLLM's worker: 14 GiB of weights and 2 of activations."""

    def __init__(self, card, accounting):
        super().__init__(["a"], None)
        self.card, self.accounting, self.cache = card, accounting, None

    def start(self, setup):
        super().start(setup)
        self.before = self.accounting.MemorySnapshot(device=torch.device("cuda", 0))

    def wait(self):
        if self.cache is None:
            requested = math.ceil(self.before.total_memory * SHARE)
            self.card.engine = 14 * GIB
            with self.accounting.memory_profiling(self.before, weights_memory=self.card.engine) as profile:
                self.card.peak = self.card.engine + 2 * GIB
            self.cache = (requested - profile.non_kv_cache_memory) / GIB
            self.calls.append("ready")
        return "measured"


@pytest.fixture
def started(card, accounting, monkeypatch, tmp_path):
    """Start a run; returns its engine, and the events in their order."""

    def started(gibibytes_of_a_role, devices):
        card.trainer = card.engine = card.peak = 0
        engine = Measuring(card, accounting)
        monkeypatch.setattr(run_engine, "visible_gpu", lambda device: devices)
        run = Run(tmp_path, loop={"engine": engine, "validate_at_ends": False}, trainer={"max_steps": 0})
        build = run.module.build_role

        def build_role(name):
            card.trainer += gibibytes_of_a_role * GIB
            engine.calls.append(f"build {name}")
            return build(name)

        run.module.build_role = build_role
        engine.tokenizer = run.engine.tokenizer
        run.fit()
        return engine

    return started


def test_engine_is_ready_before_any_role_is_built_on_gpus(started):
    assert started(7, ("0",)).calls[:4] == ["start", "ready", "build actor", "build critic"]


def test_engine_starts_while_roles_are_built_on_cpus(started):
    assert started(7, ()).calls[:4] == ["start", "build actor", "build critic", "ready"]


@pytest.mark.slow
def test_cache_size_does_not_depend_on_the_trainer(started):
    assert {started(size, ("0",)).cache for size in (0, 3, 7, 20)} == {SHARE * 80 - 16}


@pytest.mark.slow
def test_cache_size_would_depend_on_the_trainer_if_roles_were_built_meanwhile(started):
    assert [started(size, ()).cache for size in (0, 3, 7, 20)] == pytest.approx([16, 10, 2, -24])


def test_vllm_computes_the_cache_size_like_this_file():
    source = Path(importlib.util.find_spec("vllm").origin).with_name("v1") / "worker" / "gpu_worker.py"
    assert "self.requested_memory\n            - profile_result.non_kv_cache_memory" in source.read_text()
    assert "assert init_free_memory >= free_gpu_memory" in source.read_text()


# -- memory after the start --------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """The calls of torch.cuda's allocator, in order."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, device: calls.append(round(f, 6)))
    return calls


@pytest.mark.parametrize(
    ("gib", "fraction", "limit"),
    [(80, 0.4, 0.55), (16, 0.4, 0.5375), (80, 0.0, 1.0), (80, 0.97, 0.0), (141, 0.9, 0.071631)],
)
def test_trainer_memory_is_limited_to_the_part_outside_of_engine_contexts_and_nccl(
    cuda, monkeypatch, gib, fraction, limit
):
    card = types.SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    limit_gpu_memory(torch.device("cuda", 0), fraction)
    limit_gpu_memory(torch.device("cpu"), fraction)
    assert cuda == ["empty", limit]


class Sharing(ScriptedEngine):
    traits = EngineTraits(gpu_fraction=0.4)

    def sleep(self):
        self.calls.append("sleep")


class Sleeping(Sharing):
    traits = EngineTraits(gpu_fraction=0.4, sleeps=True)


def limits(monkeypatch, kind, tmp_path):
    """Return the calls of an engine in a run of two steps with a validation, and the limits of the trainer's memory."""
    run = Run(tmp_path, trainer={"max_steps": 2}, loop={"validate_at_ends": True})
    engine = kind(run.engine.texts, run.engine.tokenizer)
    run.loop.engine = engine
    monkeypatch.setattr(run_engine, "visible_gpu", lambda device: ("0",))
    for module in (rollout_loop, run_engine, weights):
        monkeypatch.setattr(module, "limit_gpu_memory", lambda device, fraction: engine.calls.append(fraction))
    learn = run.module.training_step
    run.module.training_step = lambda *batch: (engine.calls.append("learn"), learn(*batch))[1]
    run.fit()
    return [call for call in engine.calls if not str(call).startswith("generate")]


def test_awake_engine_keeps_its_share_permanently(monkeypatch, tmp_path):
    calls = limits(monkeypatch, Sharing, tmp_path)
    step = [0.4, "update_weights 0", "learn", 0.4, "update_weights 1", "learn"]
    assert calls == ["start", 0.4, *step, "close", 0.0]


def test_sleeping_engine_frees_all_memory_during_training_and_receives_every_push(monkeypatch, tmp_path):
    calls = limits(monkeypatch, Sleeping, tmp_path)
    step = [0.4, "update_weights 0", "sleep", 0.0, "learn", 0.4, "update_weights 1", "sleep", 0.0, "learn"]
    assert calls == ["start", 0.4, "sleep", 0.0, *step, "close", 0.0]


def test_sleeping_engine_receives_the_same_weights_again_after_a_validation(monkeypatch, tmp_path):
    run = Run(tmp_path, data={"val": InMemory(ROWS)}, trainer={"max_steps": 1})
    engine = Sleeping(run.engine.texts, run.engine.tokenizer)
    run.loop.engine = engine
    run.fit()
    pushes = [call for call in engine.calls if call.startswith(("update", "sleep"))]
    assert pushes == ["update_weights 0", "sleep", "update_weights 0", "sleep", "update_weights 1", "sleep"]


# -- vLLM's sleep mode ------------------------------------------------------------------------------------------------


class FakeLLM:
    """The methods of ``vllm.LLM`` that sleeping uses; records the order of their calls."""

    def __init__(self):
        self.calls = []

    def sleep(self, level=1, mode="abort"):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags=None):
        self.calls.append(f"wake {tags}")
        return tags == ["kv_cache"]

    def collective_rpc(self, method, kwargs=None):
        self.calls.append(method)
        return [None]  # of its one worker

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


@pytest.fixture
def core(monkeypatch):
    """An engine core around a fake LLM."""
    for name, names in (
        ("vllm", ("LLM", "SamplingParams", "TokensPrompt")),
        ("vllm.lora", ()),
        ("vllm.lora.request", ("LoRARequest",)),
        ("vllm.sampling_params", ("RequestOutputKind",)),
        ("vllm.v1", ()),
        ("vllm.v1.engine", ("FinishReason",)),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(names, object))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "lightning_rlhf.rollout.vllm.core", raising=False)
    from lightning_rlhf.rollout.vllm.core import VLLMCore

    core = VLLMCore.__new__(VLLMCore)
    core._llm, core._version, core._asleep, core._adapter = FakeLLM(), -1, False, None
    core._images = {}
    core._engine = types.SimpleNamespace(has_unfinished_requests=lambda: False, set_weight_version=lambda version: None)
    yield core
    sys.modules.pop("lightning_rlhf.rollout.vllm.core", None)


def test_weights_are_woken_before_the_push_and_the_cache_after_it(core):
    core.load({}, 0)
    core.sleep()
    core.sleep()
    core.load({}, 1)
    awake = ["receive_weights", "reset"]
    assert core._llm.calls == [
        *awake, "sleep 2", "wake ['weights']", "receive_weights", "wake ['kv_cache']", "reset",
    ]  # fmt: skip


def test_weights_in_parts_wake_a_sleeping_engine_once(core):
    core.sleep()
    core.open_buffers({})
    core.load_part([], is_first=True)
    core.load_part([], is_first=False)
    core.finish_parts(1)
    core.load_part([], is_first=True)
    core.finish_parts(2)
    parts = ["open_buffers", "wake ['weights']", "load_part", "load_part", "finish_parts", "wake ['kv_cache']", "reset"]
    assert core._llm.calls == ["sleep 2", *parts, "load_part", "finish_parts", "reset"]


def test_engine_that_stays_asleep_raises(core):
    core.sleep()
    core._llm.wake_up = lambda tags: False
    with pytest.raises(RuntimeError, match="vLLM did not wake up"):
        core.load({}, 1)


def signature(path, name):
    """Return the parameters of a function of vLLM, read from its source without importing it."""
    import ast

    tree = ast.parse((Path(importlib.util.find_spec("vllm").origin).parent / path).read_text())
    result = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for argument in result[0].args.args]


def test_vllm_has_the_methods_for_sleeping_and_reloading():
    assert signature("entrypoints/llm.py", "sleep")[:2] == ["self", "level"]
    assert signature("entrypoints/llm.py", "wake_up") == ["self", "tags"]
    assert signature("v1/worker/gpu_worker.py", "wake_up") == ["self", "tags"]
    worker = (Path(importlib.util.find_spec("vllm").origin).parent / "v1/worker/gpu_worker.py").read_text()
    assert "with set_current_vllm_config(self.vllm_config):\n            self.model_runner.reload_weights(" in worker
    runner = (Path(importlib.util.find_spec("vllm").origin).parent / "v1/worker/gpu_model_runner.py").read_text()
    resets = "self.reset_lora_state()\n        self.reset_encoder_cache()\n        self.reset_mm_cache()\n\n    def "
    assert resets in runner  # of reload_weights, which finish_parts of WeightReceiver repeats
    tags = (Path(importlib.util.find_spec("vllm").origin).parent / "entrypoints/llm.py").read_text()
    assert '("weights", "kv_cache", "scheduling")' in tags


class Worker(WeightReceiver):
    """A worker of vLLM, whose own ``reload_weights`` wraps that of its model runner."""

    def __init__(self):
        self.model_runner, self.loaded = types.SimpleNamespace(model=torch.nn.Module()), None
        self.device = torch.device("cpu")

    def reload_weights(self, weights_iterator):
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


def test_weights_are_loaded_by_the_method_of_the_worker():
    sender, worker = WeightSender(), Worker()
    worker.receive_weights(**sender.write([("a", torch.tensor([1.0, 2.0]))]))
    assert worker.loaded["a"].tolist() == [1.0, 2.0]
    sender.close()


@pytest.fixture
def locks(monkeypatch):
    """The calls of CUDA's page locking; ``fails_at`` is the number of the first failing call."""
    state = types.SimpleNamespace(calls=[], locked={}, fails_at=99)

    def register(pointer, nbytes, flags):
        state.calls.append("lock")
        if len(state.calls) > state.fails_at:
            return 2
        assert pointer % 4096 == nbytes % 4096 == 0
        assert not any(begin < pointer + nbytes and pointer < begin + size for begin, size in state.locked.items())
        state.locked[pointer] = nbytes
        return 0

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=state.locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: state.calls.append("synchronize"))

    def ones(*sizes, device=None, real=torch.ones):
        if device != "cuda":
            return real(*sizes, device=device)
        state.calls.append("kernel")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    return state


def weights_of(version, device, sizes=(3, 700_000, 5, 400_000, 7)):
    for number, size in enumerate(sizes):
        yield f"w{number}", torch.full((size,), float(version + number)).to(device)


@pytest.mark.parametrize(("device", "fails_at"), [(CUDA, 99), (CUDA, 0), (CUDA, 2), ("cpu", 99)])
def test_gpu_weights_are_pushed_through_page_locked_memory_from_the_first_push(locks, caplog, device, fails_at):
    locks.fails_at = fails_at
    sender, worker = WeightSender(), Worker()
    with pretended_cuda():
        for version in (1, 2):
            message = sender.write(weights_of(version, device))
            if device == CUDA and fails_at == 99:
                views = [Slot(**slot).view(sender._shared.bytes) for slot in message["layout"]]
                for view in views:  # a copy may not cross the border of two locked pieces
                    begin, end = view.data_ptr(), view.data_ptr() + view.nbytes
                    assert any(base <= begin and end <= base + size for base, size in locks.locked.items())
                assert locks.calls == ["lock"] * 3 + ["synchronize"] * version
            else:
                assert not locks.locked
                assert locks.calls.count("lock") == (0 if device == "cpu" else fails_at + 1)
                assert locks.calls.count("synchronize") == (
                    device == CUDA and fails_at > 0
                )  # before pages are unlocked
                assert locks.calls.count("kernel") == (device == CUDA)  # which takes the error of the failed call
            worker.receive_weights(**message)
            assert {name: float(tensor.unique()) for name, tensor in worker.loaded.items()} == {
                f"w{number}": version + number for number in range(5)
            }
    assert os.stat(message["path"]).st_size == message["nbytes"] < 8 << 20
    sender.close()
    assert not locks.locked
    assert ("could not lock it (error 2)" in caplog.text) == (fails_at != 99)
