"""Pushes to an engine on the same GPU: the complete protocol with a real engine and host memory as the buffer."""

import contextlib
import inspect
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from lightning_rlhf.callbacks.loop.rollout_settings import check_overlap
from lightning_rlhf.extras.gpu_buffer import transfer as gpu_buffer
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm import engine as vllm_engine
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.sync import map_memory
from lightning_rlhf.types import SamplingParams
from tests.distributed.launch import run_ranks
from tests.rollout.engines import largest_gap, parameters_of, prompts_of, pushed, setup_of, source_of

needs_vllm = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=())


class HostBuffers:
    """Replaces the allocation and the export of buffers on a GPU.

    Args:
        rank: rank of this process, whose buffer the engine's worker with this number must map.
    """

    def __init__(self, rank=0):
        self.rank, self.sizes, self.files = rank, [], []

    def allocate(self, nbytes):
        file = os.memfd_create("buffer")
        os.truncate(file, nbytes)
        self.sizes.append(nbytes)
        self.files.append(file)
        return map_memory(self.path, nbytes)

    @property
    def path(self):
        return f"/proc/{os.getpid()}/fd/{self.files[-1]}"

    def exported(self, buffer):
        return {"path": self.path, "nbytes": len(buffer), "gpu": self.rank}


@pytest.fixture
def buffers(monkeypatch):
    made = HostBuffers()
    monkeypatch.setattr(gpu_buffer, "allocate", made.allocate)
    monkeypatch.setattr(gpu_buffer, "exported", made.exported)
    yield made
    for file in made.files:
        os.close(file)


def sized(monkeypatch, nbytes):
    """Use push buffers of this size."""
    monkeypatch.setattr(gpu_buffer, "push_within_gpu", partial(gpu_buffer.push_within_gpu, nbytes=nbytes))


@contextlib.contextmanager
def started(directory, source, fault):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BUFFER_FAULT", str(fault))
        receiver = {"worker_extension_cls": "tests.extras.gpu_buffer.memory_receiver.MemoryReceiver"}
        engine = VLLMEngine(push_within_gpu=True, arguments=receiver)
        engine.start(setup_of(source, directory))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def buffer_fault(tmp_path_factory):
    file = tmp_path_factory.mktemp("fault") / "fault"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def tied(tmp_path_factory, buffer_fault):
    with started(tmp_path_factory.mktemp("engine"), source_of(), buffer_fault) as engine:
        yield engine


def answers(engine, count=8):
    prompts = prompts_of(count)
    return prompts, generate(engine, prompts, SAMPLING, list(range(count)))


def same(left, right):
    return all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in zip(left, right, strict=True))


@needs_vllm
@pytest.mark.slow
def test_weights_pushed_in_parts_equal_those_pushed_through_the_host(tied, engines, buffers, monkeypatch):
    # A layer has 7 matrices of 8 to 24 KiB, so that it is in several parts; the embedding has 15 KiB.
    for version, nbytes in enumerate([4096, 40_000, 1 << 28]):
        source = source_of(seed=version + 5)
        sized(monkeypatch, nbytes)
        actor = pushed(tied, source, version)
        pushed(engines.tied, source, version)
        prompts, result = answers(tied)
        assert same(result, answers(engines.tied)[1])
        assert largest_gap(actor, prompts, result) < 1e-4
        assert {answer.policy_version for answer in result} == {version}
        assert tied.first_difference(parameters_of(actor)) is None
    assert buffers.sizes == [4096, 61 * 64 * 4, 64 * 64 * 4, 96 * 64 * 4, 40_000, 1 << 28]  # the first one grows


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("map", "CUDA error: invalid device context"), ("bytes", "the buffer of the trainer has other bytes")],
)
def test_engine_that_cannot_map_the_buffer_gets_weights_through_the_host(
    tied, engines, buffers, buffer_fault, caplog, monkeypatch, kind, reason
):
    monkeypatch.setattr(tied, "_maps_buffers", True)
    buffer_fault.write_text(kind)
    try:
        pushed(tied, source_of(seed=12), 12)
        pushed(tied, source_of(seed=13), 13)
    finally:
        buffer_fault.write_text("")
    pushed(engines.tied, source_of(seed=13), 13)
    assert same(answers(tied)[1], answers(engines.tied)[1])
    warnings = [record.getMessage() for record in caplog.records if "push_within_gpu fails" in record.message]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert len(buffers.sizes) == 1  # the second push does not try again


@needs_vllm
@pytest.mark.slow
def test_lost_parameters_and_errors_between_two_parts_are_detected(
    engines, buffers, buffer_fault, tmp_path, monkeypatch
):
    source = source_of(seed=3, model_type="qwen2", tie_word_embeddings=False)
    sized(monkeypatch, 10_000)
    with started(tmp_path, source, buffer_fault) as engine:
        actor = pushed(engine, source, 1)
        pushed(engines.untied, source, 1)
        assert same(answers(engine)[1], answers(engines.untied)[1])
        unread = ("model.layers.0.mlp.gate_proj.bias", torch.ones(96))  # vLLM ignores biases that its model lacks
        assert engine.first_difference([*parameters_of(actor), unread]) == "model.layers.0.mlp.gate_proj.bias"
        try:
            for kind, error in (("load", "out of memory"), ("death", "died: exit code 3")):
                buffer_fault.write_text(kind)
                with pytest.raises(RuntimeError, match=error):
                    pushed(engine, source, 2)
        finally:
            buffer_fault.write_text("")


@pytest.mark.slow
@needs_vllm
def test_ranks_of_two_engines_push_together_also_after_failures(tmp_path):
    output = run_ranks("tests.extras.gpu_buffer.joint_pushes:push", 4, str(tmp_path))
    for rank, result in enumerate(output):
        assert result["push ranks"] == 1  # all ranks read the weights, also for an engine that has no buffers
        assert result["sizes"] == [2000, 3648]
        failed = "no load_part" if rank > 1 else True
        assert result["results"] == [True, failed, True, True, True]
    assert output[0]["commands"] == output[2]["commands"] == ["finish_parts", "load_part", "open_buffers"]
    assert [result["last"] for result in output] == [["finish_parts"], [], ["load"], []]


def test_push_needs_only_the_memory_of_the_buffer(buffers, monkeypatch):
    commands = []
    parameters = [(f"w{i}", torch.full((10, 10), float(i))) for i in range(20)] + [("large", torch.ones(2000))]
    reason = gpu_buffer.push_within_gpu(
        parameters, 3, lambda kind, **fields: commands.append((kind, fields)), RankGroup(1), 2000
    )
    assert reason is None
    assert buffers.sizes == [2000, 8000]
    kinds = [kind for kind, _ in commands]
    assert kinds == ["open_buffers", *["load_part"] * 5, "open_buffers", "load_part", "finish_parts"]
    parts = [fields["layout"] for kind, fields in commands if kind == "load_part"]
    assert [slot["name"] for part in parts for slot in part] == [name for name, _ in parameters]
    assert all(part[0]["offset"] == 0 for part in parts)
    first = [fields["is_first"] for kind, fields in commands if kind == "load_part"]
    assert first == [True, False, False, False, False, False]
    assert commands[-1] == ("finish_parts", {"version": 3})


def test_message_has_the_values_with_which_torch_maps_a_buffer(monkeypatch):
    monkeypatch.setattr(gpu_buffer, "gpu_identifier", lambda device: f"GPU of {device}")
    buffer = torch.empty(64, dtype=torch.uint8)
    shared = (0, b"handle", 64, 512, b"counter", 7, b"event", True)
    monkeypatch.setattr(torch.storage.TypedStorage, "_share_cuda_", lambda storage: shared)
    monkeypatch.setattr(torch.UntypedStorage, "device", SimpleNamespace(type="cuda"))
    message = gpu_buffer.exported(buffer)
    monkeypatch.undo()

    monkeypatch.setattr(gpu_buffer, "gpu_identifier", lambda device: "GPU of cpu")
    result = {}
    monkeypatch.setattr(gpu_buffer, "rebuild_cuda_tensor", lambda **arguments: result.update(arguments))
    gpu_buffer.opened([{**message, "gpu": "GPU of rank 0"}, message], torch.device("cuda", 1))
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert sorted(result) == sorted(names)
    _, handle, size, offset, *counter, event, waits = shared
    assert [result[name] for name in names[6:]] == [1, handle, size, offset, False, *counter, event, waits]
    assert result["tensor_size"] == torch.Size([64])
    monkeypatch.setattr(gpu_buffer, "gpu_identifier", lambda device: "another")
    with pytest.raises(RuntimeError, match="the trainer's weights are on GPU GPU of cpu, the engine on another"):
        gpu_buffer.opened([message], torch.device("cuda", 1))


def test_unsupported_settings_are_rejected(monkeypatch):
    monkeypatch.setattr(vllm_engine, "vllm_installed", lambda: True)
    engine = VLLMEngine(push_within_gpu=True)
    with pytest.raises(
        ValueError, match="push_within_gpu needs a GPU, but torch finds none on this machine: remove it"
    ):
        engine.check(SAMPLING)
    for item in (engine, SharedEngine(engine, ranks=2)):
        with pytest.raises(ValueError, match="remove push_within_gpu, or set max_staleness to 0"):
            check_overlap(item, 1)
        check_overlap(item, 0)
