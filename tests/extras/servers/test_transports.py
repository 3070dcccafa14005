"""Pushes of weights to one server: the order of their requests, and the transports."""

import functools
import socket
import sys
import types
from abc import ABC, abstractmethod
from contextlib import nullcontext

import pytest
import torch

from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.extras.servers.client import VLLMServer
from lightning_rlhf.extras.servers.push import (
    NCCLTransport,
    SharedMemoryTransport,
    WeightPush,
    _chunk_source,
    _rendezvous,
)
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.extras.servers.several import PARAMETERS, SAMPLING


def test_push_waits_for_requests_and_clears_the_prefix_cache(engine, stub):
    engine.update_weights(PARAMETERS, 8)
    paths = stub.paths()[-7:]
    assert paths == [
        "/pause?mode=wait",
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/reset_prefix_cache",
        "/finish_weight_update",
        "/resume",
    ]
    assert stub.paths().count("/init_weight_transfer_engine") == 1
    assert stub.requested[-6][1]["new_version"].startswith("unfinished run ")
    assert stub.requested[-2][1]["weight_version"].endswith(", version 8")
    assert engine.first_difference(PARAMETERS) is None
    assert engine.first_difference([("w", torch.zeros(2, 3)), PARAMETERS[1]]) == "w"


def test_push_to_a_server_that_reads_images_keeps_them_and_resets_their_features(stub):
    push = WeightPush(SharedMemoryTransport(), has_images=True)
    push([VLLMServer(stub.url, None, 20)], PARAMETERS, "7")
    push.close()
    paths = stub.paths()
    assert paths[0] == "/pause?mode=wait&clear_cache=false"
    assert paths.index("/reset_prefix_cache") < paths.index("/reset_encoder_cache")
    assert paths.index("/reset_encoder_cache") < paths.index("/finish_weight_update")


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_failed_push_is_repeated_up_to_max_restarts(engine, stub, path, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.extras.servers.servers._RETRY_SECONDS", 0.02)
    stub.answers[path] = 500, {"error": {"message": "out of cheese"}}
    with pytest.raises(EngineDied, match=f"failed at {path}: out of cheese"):
        engine.update_weights(PARAMETERS, 8)
    assert stub.paths()[-1] == "/resume"
    assert stub.paths().count(path) == 5  # the first push, the second one, and three after failures
    assert stub.version.startswith("unfinished run ")
    with pytest.raises(EngineDied, match=f"failed at {path}: out of cheese"):
        generate(engine, [[5]], SAMPLING, [0])


def test_update_that_failed_is_ended_before_the_next_one(stub):
    push, server = WeightPush(SharedMemoryTransport()), VLLMServer(stub.url, None, 10)
    steps = ["/start_weight_update", "/update_weights", "/finish_weight_update"]

    def steps_of(label):
        stub.requested.clear()
        failed = push([server], PARAMETERS, label)
        return [path for path in stub.paths() if path in steps], bool(failed)

    assert steps_of("one") == (steps, False)
    stub.answers["/update_weights"] = 500, {"error": {"message": "out of memory"}}
    assert steps_of("two") == (steps[:2], True)
    stub.answers["/update_weights"] = 200, {"message": "done"}
    assert steps_of("three") == ([steps[0], steps[2], *steps], False)
    assert steps_of("four") == (steps, False)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [((500, {"error": {"message": "gone"}}), None), ((400, {"error": {"message": "no"}}), RunError)],
)
def test_failed_server_is_disconnected_before_the_next_part_is_sent(stub, answer, raised, monkeypatch):
    events = []

    class Parts(SharedMemoryTransport):
        def parts(self, parameters):
            for number in range(2):
                events.append(number)
                yield super().last_weights() if number else next(super().parts(parameters))

        def disconnect(self, server):
            events.append("disconnected")

    stub.answers["/update_weights"] = answer
    with pytest.raises(raised) if raised else nullcontext():
        WeightPush(Parts())([VLLMServer(stub.url, None, 10)], PARAMETERS, "one")
    assert events == ([0, "disconnected"] if raised else [0, "disconnected", 1])


@pytest.mark.parametrize("error", [ModuleNotFoundError("vllm"), OSError("no address"), KeyboardInterrupt()])
def test_server_continues_after_a_push_that_ends_with_any_error(stub, monkeypatch, error):
    def connect(transport, server):
        raise error

    monkeypatch.setattr(SharedMemoryTransport, "connect", connect)
    with pytest.raises(type(error)):
        WeightPush(SharedMemoryTransport())([VLLMServer(stub.url, None, 10)], PARAMETERS, "one")
    assert stub.paths()[-1] == "/resume"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rendezvous_has_the_address_family_of_the_server(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no address {address}")
        listening.listen()
        server = types.SimpleNamespace(host=address, port=listening.getsockname()[1])
        assert _rendezvous(server)[0] == address


def test_parameters_are_exhausted_even_if_the_server_is_gone(engine, stub, monkeypatch):
    monkeypatch.setattr(engine._running, "longest_wait", 0.5)
    stub.close()
    parameters = iter(PARAMETERS)
    with pytest.raises(EngineDied, match="cannot be reached"):
        engine.update_weights(parameters, 8)
    assert list(parameters) == []


def test_kept_prefix_cache_raises(engine, stub):
    stub.answers["/reset_prefix_cache"] = 200, {"success": False}
    with pytest.raises(RuntimeError, match="kept the prefix cache"):
        engine.update_weights(PARAMETERS, 8)


def test_unfinished_push_of_another_trainer_is_ended_first(engine, stub):
    refused = []

    def start(body):
        if refused:
            return 200, {"message": "done"}
        refused.append(body)
        return 500, {"error": {"message": "a weight update is already active"}}

    stub.answers["/start_weight_update"] = start
    engine.update_weights(PARAMETERS, 8)
    assert stub.paths()[-7:-3] == [
        "/start_weight_update",
        "/finish_weight_update",
        "/start_weight_update",
        "/update_weights",
    ]
    assert stub.requested[-6][1] == {}  # no version


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # what vLLM calls deprecated as it is imported
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_parameters_are_sent_by_nccl_in_chunks_within_one_update(stub, monkeypatch):
    """vLLM's trainer side as far as it runs without a GPU: everything except the group and the broadcast."""
    from vllm.distributed.weight_transfer import nccl_engine

    groups, sent = [], []
    stub.answers["/get_world_size"] = 200, {"world_size": 2}
    monkeypatch.setattr("lightning_rlhf.extras.servers.push._CHUNK_BYTES", 24)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", groups.append)
    monkeypatch.setattr(
        nccl_engine.NCCLTrainerWeightTransferEngine,
        "_broadcast",
        lambda self, source, meta: sent.append([(name, tensor.tolist()) for name, tensor in source]),
    )
    push, servers = WeightPush(NCCLTransport()), [VLLMServer(stub.url, None, 10)]
    push(servers, [*PARAMETERS, ("c", torch.zeros(1).bfloat16())], "one")
    push(servers, PARAMETERS[:1], "two")
    assert sent == [
        [("w", [[0, 1, 2], [3, 4, 5]])],
        [("b", [1, 1]), ("c", [0])],
        [("w", [[0, 1, 2], [3, 4, 5]])],
    ]
    bodies = dict(stub.requested)
    assert (groups[0].world_size, groups[0].master_address, len(groups)) == (3, "127.0.0.1", 1)
    assert bodies["/init_weight_transfer_engine"]["init_info"]["rank_offset"] == 1
    updates = [body["update_info"] for path, body in stub.requested if path == "/update_weights"]
    assert updates[1] == {"names": ["b", "c"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2], [1]]}
    assert [path for path in stub.paths() if "finish" in path or "start" in path] == [
        "/start_weight_update",
        "/finish_weight_update",
    ] * 2
    assert stub.version == "two"


class SourceOf032(ABC):
    """The abstract methods of ``WeightSource`` in vLLM 0.32."""

    @abstractmethod
    def metadata(self): ...

    @abstractmethod
    def __iter__(self): ...

    def read(self):
        return self.metadata(), list(self)


class SourceOf033(ABC):
    """The abstract methods of ``WeightSource`` in vLLM 0.33, where ``metadata`` must be a cached property."""

    def __init_subclass__(cls):
        if not isinstance(cls.__dict__["metadata"], functools.cached_property):
            raise TypeError("metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self): ...

    def iter_full(self):
        raise NotImplementedError

    def read(self):
        return self.metadata, list(self.iter_full())


@pytest.mark.parametrize("source", [SourceOf032, SourceOf033])
def test_chunk_is_a_weight_source_of_each_supported_vllm(source, monkeypatch):
    base = types.SimpleNamespace(ParamMeta=lambda *fields: fields, WeightSource=source)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    for pairs in (PARAMETERS, []):
        metadata, tensors = _chunk_source(pairs).read()
        assert metadata == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
        assert tensors == pairs


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # what vLLM calls deprecated as it is imported
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_server_extension_is_registered_once_reads_only_memory_and_requires_a_configured_key(monkeypatch):
    import importlib

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lightning_rlhf.extras.servers import plugin

    assert issubclass(WeightTransferEngineFactory._registry["shared_memory"](), plugin.SharedMemoryTransfer)
    importlib.reload(plugin)  # vLLM would raise if the name were taken twice
    for path in ("/etc/passwd", "/proc/1/fd/../../../etc/passwd", "/proc/self/mem"):
        with pytest.raises(ValueError, match="the path of the weights must be"):
            plugin.SharedMemoryUpdate(path, 1, [])
    assert plugin.SharedMemoryUpdate("/proc/12/fd/3", 1, []).nbytes == 1
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="needs a key in the environment variable VLLM_API_KEY"):
        plugin.GuardedRoutes(None)
