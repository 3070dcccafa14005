"""One engine for two ranks: each gets its own answers, equal requests are computed once, faults reach both ranks."""

import os

import pytest
import torch

from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.rollout.engine import EngineSetup, divided_threads, visible_gpu
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from tests.distributed.launch import run_ranks
from tests.rollout.shared_ranks import FakeEngine

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_two_ranks_share_an_engine():
    first, second = run_ranks("tests.rollout.shared_ranks:share", 2)
    assert first["ready"] == second["ready"] == "a stand-in, shared by 2 ranks"
    assert first["taken"] == second["taken"] == first["compared"] == second["compared"] == 3
    assert first["devices"] == ["4", "5"]
    assert second["devices"] is None  # it starts none
    assert first["threads"] == 6  # those of both ranks
    assert first["own"] == [[[1, 0], 7], [[2, 2, 2, 1], 7]]
    assert second["own"] == [[[11, 0], 7]]
    assert first["same"] == second["same"] == [[5, 8], [6, 9]]
    assert (first["other_seeds"], second["other_seeds"]) == ([[5, 0]], [[5, 1]])
    assert (first["one_has_none"], second["one_has_none"]) == ([], [[5, 3]])
    assert first["difference"] == second["difference"] == "w0"
    generated = [[[1], [2, 2, 2], [11]], [[5], [6]], [[5], [5]], [[5]]]
    submitted = [[[7], [8]], "update", [[5]]]
    assert first["calls"] == ["start", "wait", "update", *generated, *submitted, "difference", "close"]
    for rank, (before, after, refused, overlaps) in enumerate((first["submitted"], second["submitted"])):
        assert (before, after) == ([[7 + rank, 1], 7], [[5, 2], 8])
        assert "must have equal sampling parameters" in refused
        assert not overlaps
    assert second["calls"] == ["close"]


@pytest.mark.slow
def test_two_ranks_share_the_environments_of_their_conversations():
    first, second = run_ranks("tests.rollout.shared_ranks:converse", 2)
    a = 4  # the token of the letter that environments write
    assert [(turns, len(ids)) for turns, ids, _ in first["different"]] == [(1, 2), (3, 20)]
    assert [(turns, len(ids)) for turns, ids, _ in second["different"]] == [(2, 8)]
    assert second["different"] == [[2, [6, 4, a, 6, 6, 4, a, 5], 7]]
    assert first["same"] == second["same"]
    assert (first["none"], len(second["none"])) == ([], 1)
    assert (first["calls"] > 0, second["calls"]) == (True, 0)


@pytest.mark.slow
def test_fault_of_the_first_rank_raises_the_same_error_on_both():
    first, second = run_ranks("tests.rollout.shared_ranks:fail", 2)
    assert first.pop("update") == second.pop("update") == "RuntimeError: NaN is not a weight"
    assert first.pop("taken") == second.pop("taken") == 3  # the parameters of both are exhausted
    for what in ("generate", "wait", "difference"):
        assert first[f"{what} EngineDied"] == "EngineDied: it burnt down"
        assert first[f"{what} ValueError"] == "ValueError: no such thing"
        assert first.pop(f"{what} ZeroDivisionError") == "ZeroDivisionError: by zero"
        assert second.pop(f"{what} ZeroDivisionError") == "RunError: ZeroDivisionError: by zero"
    assert "must have equal sampling parameters" in first["sampling"]
    assert first["lives on"] == "nothing"
    assert first["three"] == "UsageError: 3 ranks cannot share an engine in a run of 2: use a divisor of 2"
    assert first["hosts"] == (
        "UsageError: the 2 ranks of a shared engine must be on one machine, but they are on a, b: use fewer ranks, or "
        "vLLM servers (VLLMServerEngine with ranks: 2)"
    )
    assert first == second


@pytest.mark.slow
def test_ended_rank_raises_an_error_without_a_long_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("ERROR_FILE", str(tmp_path / "told"))
    with pytest.raises(FileNotFoundError):  # both ranks end without an answer
        run_ranks("tests.rollout.shared_ranks:lose", 2)
    seconds, message = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < 20
    assert message.startswith("EngineDied: one of the ranks 0 to 1, which share an engine, has ended: ")


def test_engine_that_cannot_be_shared_is_rejected():
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        SharedEngine(FakeEngine(), 1)
    with pytest.raises(ValueError, match=r"SharedEngine can serve several ranks .*: set ranks=4"):
        SharedEngine(SharedEngine(FakeEngine(), 2), 4)
    with pytest.raises(ValueError, match=r"VLLMServerEngine can serve several ranks .*: set ranks=2"):
        SharedEngine(VLLMServerEngine("http://127.0.0.1:1"), 2)
    with pytest.raises(RuntimeError, match="not running"):
        SharedEngine(FakeEngine(), 2).wait()
    assert (
        SharedEngine(FakeEngine(), 4).traits.ranks == VLLMServerEngine("http://127.0.0.1:1", ranks=4).traits.ranks == 4
    )
    assert FakeEngine().traits.ranks == 1


def test_single_process_cannot_share_an_engine(tmp_path):
    engine = SharedEngine(FakeEngine(), 2)
    with pytest.raises(ValueError, match="2 ranks cannot share an engine in a run of 1"):
        engine.start(EngineSetup(tmp_path, "float32", 10, tmp_path / "log"))


@pytest.mark.parametrize(
    ("visible", "device", "names"),
    [
        (None, "cpu", ()),
        (None, "cuda:2", ("2",)),
        (None, "cuda", ("0",)),
        ("4,6,7", "cuda:1", ("6",)),
        ("GPU-a1, GPU-b2", "cuda:1", ("GPU-b2",)),
    ],
)
def test_device_name_is_the_one_that_child_processes_use(monkeypatch, visible, device, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu(torch.device(device)) == names


@pytest.fixture
def child_environment(monkeypatch, tmp_path):
    """Return the environment of the engine's process for the given devices."""
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: True)
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.EngineProcess", lambda *args: args)

    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')

    def child_environment(devices, size, **options):
        engine = VLLMEngine(tensor_parallel_size=size, **options)
        engine.start(EngineSetup(tmp_path, "float32", 10, tmp_path / "log", devices, threads=3))
        return {**os.environ, **engine._process[2]}

    return child_environment


def test_engine_sees_only_its_own_gpus(child_environment):
    assert child_environment(("6",), 1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert child_environment(("4", "5"), 2)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert child_environment(("4", "5"), 1)["CUDA_VISIBLE_DEVICES"] == "4"  # the trainer splits tensors, it does not
    assert "CUDA_VISIBLE_DEVICES" not in child_environment((), 2)


def test_single_process_gives_all_gpus_to_its_engine_and_more_are_rejected(child_environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert child_environment(("0",), 2)["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ValueError, match="tensor_parallel_size 3 needs 3 GPUs, but this engine has 2"):
        child_environment(("0",), 3)
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"this engine has 1: .*SharedEngine\(VLLMEngine\(tensor_parallel_size=2\)"):
        child_environment(("0",), 2)


def test_engine_on_cpus_uses_the_threads_of_the_setup_by_default(child_environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert child_environment((), 1)["OMP_NUM_THREADS"] == "3"
    assert child_environment((), 1, cpu_threads=2)["OMP_NUM_THREADS"] == "2"
    assert child_environment((), 2)["OMP_NUM_THREADS"] == "1"  # for each of two workers
    assert VLLMEngine().traits.shares_cores
    assert not VLLMEngine(cpu_threads=2).traits.shares_cores
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not VLLMEngine().traits.shares_cores


@pytest.mark.parametrize(
    ("available", "take_turns", "threads"),
    [(1, True, (1, 1)), (1, False, (1, 1)), (8, True, (8, 8)), (2, False, (1, 1)), (5, False, (3, 2))],
)
def test_threads_are_divided_only_if_trainer_and_engine_compute_simultaneously(available, take_turns, threads):
    assert divided_threads(available, take_turns) == threads


def test_workers_of_an_engine_on_cpus_are_not_bound_to_cores_by_default(child_environment, monkeypatch):
    assert child_environment((), 2)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert child_environment((), 2)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
