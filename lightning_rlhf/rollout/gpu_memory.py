"""Division of a GPU's memory between trainer and engine."""

from __future__ import annotations

import torch


def reserved_gpu_bytes(total: int) -> int:
    """Return the bytes of a GPU that trainer and engine leave free: CUDA contexts, NCCL, CUDA graphs, log-softmax.

    Neither counts these in its fraction. A context takes about 0.5 GiB, NCCL 0.5 to 2 GiB. vLLM measures its memory
    without log-probs, whose float32 copy of the logits takes 0.6 GiB for 1,024 sequences and a vocabulary of 152k. An
    allowance, not measured.

    Args:
        total: bytes of the GPU.
    """
    return min(4 << 30, total // 16)


def limit_gpu_memory(device: torch.device, engine_fraction: float) -> None:
    """Free cached GPU memory, and limit this process to the part that the engine on the same GPU does not use.

    Without the limit, the trainer could use memory that vLLM has not allocated yet, so that the engine runs out of
    memory instead of the trainer. :func:`reserved_gpu_bytes` are kept free.

    Args:
        device: device of the trainer; a CPU is ignored.
        engine_fraction: fraction of the GPU's memory that the engine uses, in [0, 1]; 0 removes the limit.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        reserved = reserved_gpu_bytes(total) / total if engine_fraction else 0.0
        torch.cuda.set_per_process_memory_fraction(max(0.0, 1.0 - engine_fraction - reserved), device)
