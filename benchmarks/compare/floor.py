"""Processor seconds of the matrix products of a step: ``python -m benchmarks.compare.floor TOKENS``.

The rate is that of products with the shapes of the model's layers, forward and backward, measured now. Norms,
activations, attention's softmax and the optimizer are not included.
"""

import json
import sys
import time

import torch
from torch.nn import functional

from benchmarks.compare.task import ARCHITECTURE

WIDTH = int(ARCHITECTURE["hidden_size"])  # type: ignore[call-overload]
INNER = int(ARCHITECTURE["intermediate_size"])  # type: ignore[call-overload]
LAYERS = int(ARCHITECTURE["num_hidden_layers"])  # type: ignore[call-overload]
ROWS = 2048


def rate() -> float:
    """Return the operations per processor second of a linear layer, forward and backward."""
    x, weight, gradient = torch.randn(ROWS, WIDTH), torch.randn(INNER, WIDTH), torch.randn(ROWS, INNER)
    seconds = 0.0
    for product in (lambda: functional.linear(x, weight), lambda: gradient @ weight, lambda: gradient.T @ x):
        product()
        times = []
        for _ in range(9):
            started = time.process_time()
            product()
            times.append(time.process_time() - started)
        seconds += sorted(times)[4]
    return 3 * 2 * ROWS * WIDTH * INNER / seconds


def forward_operations(tokens: int) -> float:
    """Return the operations of the layers in a forward pass; those of the head are below 1 %."""
    keys = WIDTH // 2
    layer = WIDTH * (WIDTH + 2 * keys) + WIDTH * WIDTH + 3 * WIDTH * INNER
    return 2.0 * LAYERS * layer * tokens


def main(tokens: str) -> None:
    """Print the seconds of a forward pass, and of a forward and a backward pass."""
    seconds = forward_operations(int(tokens)) / rate()
    print(json.dumps({"forward": seconds, "update": 3 * seconds}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
