"""Seconds and memory of a distillation loss: ``python -m benchmarks.compare.divergence LIBRARY TOKENS VOCABULARY``.

LIBRARY is ``ours``, ``trl``, or ``trl-tiles`` with the fastest tiles on a CPU. Prints JSON with the CPU seconds of a
forward and backward pass, the median of three after one, and the megabytes by which the peak of resident memory rises.
All have float32 weights of student and teacher and gradients of hidden states and head.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.head_memory import peak

WIDTH = 896
BETA = 0.5
TILE = 512, 2048  # tokens and tokens of the vocabulary, the fastest of the four tried on a CPU
TURNS = 4


def ours(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Return the summed divergence by lightning-rlhf."""
    from lightning_rlhf.extras.algorithms.divergence import TeacherHead, distillation_scores

    targets = torch.zeros(len(hidden), dtype=torch.long)
    ones = torch.ones(len(hidden), dtype=torch.float64)
    teacher = TeacherHead(teacher_hidden, teacher_weight)
    return distillation_scores(hidden, weight, None, targets, teacher, ones, beta=BETA).loss


def trl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Return the summed divergence by TRL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    function: Any = ChunkedDivergenceFunction
    divergence, _ = function.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, BETA)
    total: Tensor = divergence.sum()
    return total


def trl_tiles(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Return the summed divergence by TRL with other tiles, which take less time and memory on a CPU."""
    from trl.kernels import chunked_divergence

    chunked_divergence.TOKEN_CHUNK_SIZE, chunked_divergence.VOCAB_CHUNK_SIZE = TILE
    return trl(hidden, weight, teacher_hidden, teacher_weight)


LIBRARIES: dict[str, Callable[..., Tensor]] = {"ours": ours, "trl": trl, "trl-tiles": trl_tiles}


def main(library: str, tokens: int, vocabulary: int) -> None:
    """Measure one library, and print the result."""
    torch.manual_seed(0)
    loss = LIBRARIES[library]
    states = [torch.randn(tokens, WIDTH, requires_grad=i == 0) for i in range(2)]
    heads = [torch.randn(vocabulary, WIDTH).mul_(0.05).requires_grad_(i == 0) for i in range(2)]
    few = [part[:8].detach().requires_grad_(part.requires_grad) for part in (*states, *heads)]
    loss(few[0], few[2], few[1], few[3]).backward()  # libraries load
    before = peak()
    seconds, value = [], 0.0
    for _ in range(TURNS):
        states[0].grad = heads[0].grad = None
        began = time.process_time()
        total = loss(states[0], heads[0], states[1], heads[1])
        total.backward()
        seconds.append(time.process_time() - began)
        value = float(total.detach()) / tokens
    of_gradients = (heads[0].numel() + states[0].numel()) * 4 / 2**20
    result = {"seconds": statistics.median(seconds[1:]), "mb": round(peak() - before - of_gradients), "loss": value}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
