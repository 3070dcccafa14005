"""Pushes through a buffer on each rank's simulated GPU, run by :func:`tests.distributed.launch.run_ranks`."""

import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.extras.gpu_buffer import transfer as gpu_buffer
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.sync import map_memory, read_slots
from tests.extras.gpu_buffer.test_transfer import HostBuffers
from tests.rollout.engines import setup_of, source_of

NBYTES = 2000


class Process:
    """The engine's process, whose two workers read the buffers of both ranks; ``fault`` is the command that fails."""

    def __init__(self):
        self.ready = Future()
        self.ready.set_result({})
        self.fault, self.version, self.commands = None, None, []
        self.loaded, self._parts, self._buffers = {}, {}, []

    def command(self, kind, **fields):
        reply = Future()
        self.commands.append(kind)
        try:
            if kind == self.fault:
                raise RunError(f"no {kind}")
            getattr(self, kind)(**fields)
            reply.set_result({})
        except RuntimeError as error:
            reply.set_exception(error)
        return reply

    def results(self, futures, description):
        return [future.result() for future in futures]

    def change_state(self, change):
        change()

    def open_buffers(self, buffers):
        self._buffers = [map_memory(message["path"], message["nbytes"]) for message in buffers]
        assert len(self._buffers) == 2
        for buffer in self._buffers:
            gpu_buffer.check_probe(buffer)

    def load_part(self, layout, is_first):
        self._parts = {} if is_first else self._parts
        first, second = (dict(read_slots(buffer, layout)) for buffer in self._buffers)
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name])  # both ranks have filled their buffers
            self._parts[name] = tensor.clone()

    def finish_parts(self, version):
        self.loaded, self.version = self._parts, version

    def load(self, weights, version, in_flight, cut):
        memory = map_memory(weights["path"], weights["nbytes"])
        self.loaded = {name: tensor.clone() for name, tensor in read_slots(memory, weights["layout"])}
        self.version = version

    def close(self):
        pass


def parameters(version, rank):
    """Yield parameters, for each of which all four ranks wait, as for those that FSDP gathers."""
    draw = torch.Generator().manual_seed(version)
    for index, size in enumerate((5, 10, 10, 30, 10, 10)):  # of 100 to 3,600 bytes
        tensor = torch.randn(size, size, generator=draw)
        dist.all_reduce(torch.ones(1))
        if rank % 2:
            time.sleep(0.05)
        yield f"w{index}", tensor


def push(folder):
    """Return what two engines of two ranks have loaded after each push, of which some fail on one rank or engine."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    buffers = HostBuffers(rank)
    gpu_buffer.allocate, gpu_buffer.exported = buffers.allocate, buffers.exported
    gpu_buffer.push_within_gpu = partial(gpu_buffer.push_within_gpu, nbytes=NBYTES)
    inner, process = VLLMEngine(tensor_parallel_size=2, push_within_gpu=True), Process()
    inner.start = lambda setup: setattr(inner, "_process", process)
    engine = SharedEngine(inner, 2)
    engine.start(setup_of(source_of(), Path(folder, str(rank))))

    def result_of(version):
        try:
            engine.update_weights(parameters(version, rank), version)
        except RuntimeError as error:
            return str(error)
        expected = {}
        if rank % 2 == 0:
            draw = torch.Generator().manual_seed(version)
            expected = {
                f"w{i}": torch.randn(size, size, generator=draw) for i, size in enumerate((5, 10, 10, 30, 10, 10))
            }
        same = process.loaded.keys() == expected.keys()
        return same and all(torch.equal(process.loaded[name], expected[name]) for name in expected)

    results = [result_of(1)]
    commands = sorted(set(process.commands))
    process.fault = "load_part" if rank == 2 else None
    results.append(result_of(2))  # ranks 0 and 1 finish although the engine of the others fails
    process.fault = None
    if rank == 3:  # the engine of ranks 2 and 3 then gets weights through the host
        gpu_buffer.allocate = _no_memory
    results += [result_of(version) for version in (3, 4, 5)]
    dist.destroy_process_group()
    return {
        "results": results,
        "push ranks": engine.traits.push_ranks,
        "commands": commands,
        "last": process.commands[-1:],
        "sizes": buffers.sizes[:2],
    }


def _no_memory(nbytes):
    raise RuntimeError("CUDA out of memory")
