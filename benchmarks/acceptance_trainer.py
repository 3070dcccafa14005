"""Points 13 to 19 of the acceptance: the packed path of training, the head, CUDA IPC, and FSDP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.acceptance_measurements import GIB, Figures, Worker, peak_bytes, synchronize, timed
from lightning_rlhf.batching.packing import PackedLengths
from lightning_rlhf.extras.gpu_buffer import transfer as gpu_buffer
from lightning_rlhf.functional.logprobs import chunked_token_scores
from lightning_rlhf.functional.masked import discounted_sums
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.packed_attention import packed_attention
from lightning_rlhf.modules.optimizers import use_fused_kernels
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.vllm.sync import Slot, map_memory
from lightning_rlhf.strategies.activations import ActivationOffload
from tests.distributed.launch import free_port

# Query heads, key heads, their width, width of the values
_HEADS = ((8, 8, 64, 64), (28, 4, 128, 128), (8, 8, 192, 128), (4, 2, 256, 256))
_SEVEN_BILLION = {
    "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 8, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
_SMALL = _SEVEN_BILLION | {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def dtype_on(device: str) -> torch.dtype:
    """Return bfloat16 for a GPU, whose kernels for packed rows need it, and float32 for a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def attention(device: str, folder: Path) -> Figures:
    """Compare packed attention and its gradients on the device with float32 on the CPU: within 2 %, in 16 cases."""
    unit = 64 if device == "cuda" else 8
    layouts = {
        "one prompt": (PackedLengths((5 * unit,), ((3 * unit, 4 * unit, 2 * unit),)), None),
        "three prompts": (PackedLengths((5 * unit, 3 * unit, unit), ((unit, 2 * unit), (1,), (unit, unit))), None),
        "whole texts": (PackedLengths((6 * unit, 4 * unit, 9 * unit), ((), (), ())), None),
        "window": (PackedLengths((5 * unit, 7 * unit), ((3 * unit, 4 * unit), (6 * unit,))), 4 * unit),
    }
    worst: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for name, (lengths, window) in layouts.items():
        for heads in _HEADS:
            inputs = _attention_inputs(lengths, heads, generator)
            runs = [_attention(*inputs, lengths, window, where, dtype) for where, dtype in (
                ("cpu", torch.float32), (device, dtype_on(device)),
            )]  # fmt: skip
            gaps = [float((there - here).norm() / here.norm()) for here, there in zip(*runs, strict=True)]
            worst[f"{name}, heads {heads}"] = max(gaps)
    case = max(worst, key=lambda name: worst[name])
    return {"ok": worst[case] < 2e-2, "largest_relative_difference": worst[case], "case": case, "cases": len(worst)}


def _attention_inputs(
    lengths: PackedLengths, heads: tuple[int, int, int, int], generator: torch.Generator
) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values in bfloat16, and the gradient of the output."""
    queries, keys, width, value = heads
    shapes = ((queries, width), (keys, width), (keys, value))
    inputs = [torch.randn(1, n, lengths.tokens, w, generator=generator).bfloat16() for n, w in shapes]
    return inputs, torch.randn(1, lengths.tokens, queries, value, generator=generator)


def _attention(
    inputs: list[Tensor], upstream: Tensor, lengths: PackedLengths, window: int | None, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values, in float32 on the CPU."""
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
    output = packed_attention(
        nn.Module(),
        *leaves,
        None,
        scaling=inputs[0].shape[-1] ** -0.5,
        sliding_window=window,
        is_causal=True,
        packed_lengths=lengths,
    )[0]
    (output.float() * upstream.to(device)).sum().backward()
    return [
        tensor.float().cpu() for tensor in (output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))
    ]


def attention_speed(device: str, folder: Path) -> Figures:
    """Measure forward and backward of a 7B model's attention over 16,384 packed tokens, with and without prompts."""
    part = 1 if device == "cuda" else 32
    layouts = {
        "10_texts_of_1536": PackedLengths((1536 // part,) * 10, ((),) * 10),
        "2_prompts_of_512_with_8_responses_of_960": PackedLengths((512 // part,) * 2, ((960 // part,) * 8,) * 2),
    }
    figures: Figures = {}
    for name, lengths in layouts.items():
        shapes = [(1, heads, lengths.tokens, 128) for heads in (28, 4, 4)]
        query, key, value = (
            torch.randn(shape, device=device, dtype=dtype_on(device), requires_grad=True) for shape in shapes
        )

        def run(
            query: Tensor = query, key: Tensor = key, value: Tensor = value, lengths: PackedLengths = lengths
        ) -> None:
            options: Any = {"scaling": 128**-0.5, "is_causal": True, "packed_lengths": lengths}
            packed_attention(nn.Module(), query, key, value, None, **options)[0].sum().backward()

        seconds = timed(device, run, 5)
        before = peak_bytes(device, reset=True)
        run()
        figures[name] = {"ms": round(1e3 * seconds, 2), "peak_gib": round((peak_bytes(device) - before) / GIB, 2)}
    return {"ok": True, **figures}


def head(device: str, folder: Path) -> Figures:
    """Measure the head of a 0.5B and a 7B model by the size of its chunks; all give the same log-probabilities."""
    sizes = (
        {"0.5B": (151_936, 896, 8192), "7B": (152_064, 3584, 8192)} if device == "cuda" else {"small": (2000, 64, 256)}
    )
    figures: Figures = {}
    same = True
    for name, (vocabulary, width, tokens) in sizes.items():
        states = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = (0.02 * torch.randn(vocabulary, width, device=device)).bfloat16().requires_grad_()
        targets = torch.randint(0, vocabulary, (tokens,), device=device)
        first: Tensor | None = None
        for mib in (16, 64, 256, 1024, 2048):

            def score(mib: int = mib, inputs: tuple[Tensor, ...] = (states, weight, targets)) -> Tensor:
                return chunked_token_scores(inputs[0], inputs[1], None, inputs[2], chunk_bytes=mib << 20).logprobs

            seconds = timed(device, lambda score=score: score().sum().backward(), 2)
            logprobs = score().detach()
            first = logprobs if first is None else first
            same &= bool((logprobs - first).abs().max() < 0.05)
            before = peak_bytes(device, reset=True)
            score().sum().backward()
            figures[f"{name}_{mib}_mib"] = {
                "forward_backward_s": round(seconds, 4),
                "tflops": round(8 * tokens * vocabulary * width / seconds / 1e12, 1),
                "peak_gib": round((peak_bytes(device) - before) / GIB, 2),
            }
    return {"ok": same, **figures}


def ipc(device: str, folder: Path) -> Figures:
    """Push tensors by ``gpu_buffer`` to another process: the same bits, a buffer that grows, GB/s, memory that remains.

    On a CPU, the buffer is in shared memory.
    """
    context = processes.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive_parts, args=(theirs, device), daemon=True)
    receiver.start()
    sums, parts = list[int](), list[int]()

    def execute(kind: str, **fields: Any) -> None:
        if kind == "finish_parts":
            return
        ours.send((kind, fields))
        if not ours.poll(60):
            raise RuntimeError(f"the other process did not answer {kind}")
        reply = ours.recv()
        if isinstance(reply, str):
            raise RuntimeError(reply)
        sums.extend(reply)
        parts.append(len(reply))

    tensors, seconds = _layers_of_7b(device), list[float]()
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    with _buffers_of(device):
        for _ in range(2):
            sums.clear()
            synchronize(device)
            began = time.perf_counter()
            nbytes = 1 << 20 if device == "cpu" else 256 << 20
            reason = gpu_buffer.push_within_gpu(iter(tensors), 1, execute, RankGroup(1), nbytes)
            seconds.append(time.perf_counter() - began)
    ours.send(None)
    receiver.join(20)
    gigabytes = sum(tensor.nbytes for _, tensor in tensors) / 1e9
    figures: Figures = {"reason": reason, "gb": round(gigabytes, 3), "parts": len(parts)}
    figures["gb_s_first_and_second"] = [round(gigabytes / each, 2) for each in seconds]
    if device == "cuda":
        figures["free_memory_lost_mib"] = (free - torch.cuda.mem_get_info()[0]) >> 20
    return {"ok": reason is None and sums == [_sum_of_bytes(tensor) for _, tensor in tensors], **figures}


def _layers_of_7b(device: str) -> list[tuple[str, Tensor]]:
    """Return tensors with the shapes of a 7B model's layers in bfloat16; on a CPU, 1,000 times smaller ones."""
    shapes: list[tuple[int, ...]] = [(152_064, 3584)]
    for _ in range(12):
        shapes += [(18_944, 3584), (3584, 18_944), (3584,), (4608, 3584)]
    if device == "cpu":
        shapes = [tuple(max(1, size // 32) for size in shape) for shape in shapes]
    return [(f"w{i}", torch.randn(shape, device=device).bfloat16()) for i, shape in enumerate(shapes)]


def _sum_of_bytes(tensor: Tensor) -> int:
    return int(tensor.reshape(-1).view(torch.uint8).long().sum())


@contextmanager
def _buffers_of(device: str) -> Iterator[None]:
    """Use the real buffers on a GPU; on a CPU, files in shared memory stand in for them."""
    if device == "cuda":
        yield
        return
    paths: list[str] = []

    def allocate(nbytes: int) -> Tensor:
        file = os.memfd_create("acceptance")
        os.truncate(file, nbytes)
        paths.append(f"/proc/{os.getpid()}/fd/{file}")
        return map_memory(paths[-1], nbytes)

    def exported(buffer: Tensor) -> dict[str, Any]:
        return {"path": paths[-1], "nbytes": len(buffer)}

    with patch.multiple(gpu_buffer, allocate=allocate, exported=exported):
        yield


def _receive_parts(pipe: Any, device: str) -> None:
    """Map buffers in the other process, and send back the sum of the bytes of each parameter."""
    torch.zeros(1, device=device)
    buffer = torch.empty(0)
    while (message := pipe.recv()) is not None:
        kind, fields = message
        try:
            if kind == "open_buffers":
                sent = fields["buffers"]
                buffer = torch.empty(0)
                on_gpu = device == "cuda"
                buffer = gpu_buffer.opened(sent, torch.device(device, 0)) if on_gpu else map_memory(**sent[0])
                gpu_buffer.check_probe(buffer)
                pipe.send([])
            else:
                copies = [Slot(**slot).view(buffer).clone() for slot in fields["layout"]]
                gpu_buffer.wait_for(buffer)
                pipe.send([_sum_of_bytes(copy) for copy in copies])
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def layers(device: str, folder: Path) -> Figures:
    """Train eight layers of a 7B model under FSDP2 in one process, as a step does: packed rows, shared prompts, AdamW.

    Reports the fraction of an H100's peak, seconds of AdamW on the GPU and on the host, memory, and waits of the host.
    """
    options = {"rank": 0, "world_size": 1, "init_method": f"tcp://127.0.0.1:{free_port()}"}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    try:
        return _layers(device)
    finally:
        dist.destroy_process_group()


def _layers(device: str) -> Figures:
    source = FromConfig(_SEVEN_BILLION if device == "cuda" else _SMALL, seed=0)
    worker = Worker(device, source=source, rows=16, lengths=(512, 960), per_prompt=8)
    mesh = init_device_mesh(device, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in worker.model.lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(worker.model, mesh=mesh, mp_policy=mixed)
    adam = torch.optim.AdamW(worker.model.parameters(), lr=1e-6)
    use_fused_kernels(adam)
    seconds = worker.seconds(worker.forward_backward)
    figures: Figures = {
        "tokens": worker.tokens,
        "tokens_per_s": round(worker.tokens / seconds),
        "share_of_989_tflops": round(worker.operations() / seconds / 989e12, 4),
        "adamw_s": round(worker.seconds(adam.step, 2), 4),
        "adamw_is_fused": bool(adam.param_groups[0].get("fused")),
        "host_waits_of_a_micro_batch": worker.host_waits(),
    }
    before = peak_bytes(device, reset=True)
    worker.forward_backward()
    figures["peak_gib_above_weights"] = round((peak_bytes(device) - before) / GIB, 2)
    finite = all(bool(parameter.isfinite().all()) for parameter in worker.model.parameters())
    return {"ok": finite and figures["adamw_is_fused"], **figures}


def activation_offload(device: str, folder: Path) -> Figures:
    """Compare memory, seconds and gradients of eight layers of a 7B model with their activations on GPU and host."""
    source = FromConfig(_SEVEN_BILLION if device == "cuda" else _SMALL, seed=0, dtype="bfloat16")
    worker = Worker(device, source=source, rows=8, lengths=(512, 960), per_prompt=8)
    figures: Figures = {"tokens": worker.tokens}
    sums, peaks = {}, {}
    for place in ("gpu", "host"):
        offload = ActivationOffload(torch.device(device), worker.model.parameters())
        with nullcontext() if place == "gpu" else offload:
            worker.model.zero_grad()
            peak_bytes(device, reset=True)
            before = peak_bytes(device)  # now what is allocated
            figures[f"on_{place}_s"] = round(timed(device, worker.forward_backward, 1), 3)
        peaks[place] = peak_bytes(device) - before
        figures[f"on_{place}_gib_above_weights"] = round(peaks[place] / GIB, 2)
        sums[place] = [float(p.grad.double().square().sum()) for p in worker.model.parameters() if p.grad is not None]
    figures["same_gradients"] = sums["gpu"] == sums["host"]
    return {"ok": figures["same_gradients"] and (device == "cpu" or peaks["host"] < 0.7 * peaks["gpu"]), **figures}


def loops(device: str, folder: Path) -> Figures:
    """Measure the sums of rewards over the tokens of a rank's responses, which a loop in Python computes."""
    figures: Figures = {}
    for rows, tokens in ((128, 1024), (64, 20_480)) if device == "cuda" else ((4, 32),):
        rewards = torch.randn(rows, tokens, device=device)
        mask = torch.ones_like(rewards, dtype=torch.bool)
        run = partial(discounted_sums, rewards, mask, 0.99)
        figures[f"{rows}_responses_of_{tokens}_s"] = round(timed(device, run, 1), 4)
    return {"ok": True, **figures}
