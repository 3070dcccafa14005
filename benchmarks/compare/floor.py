"""Time of the matrix products of an update: ``python -m benchmarks.compare.floor MODEL TOKENS RESPONSE_TOKENS [mkl]``.

Each product of a layer and of the head is measured now, forward and backward, on one thread, by the library that
lightning-rlhf uses here, or by MKL. Norms, activations, attention's softmax and the optimizer are not included.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.functional.products import linear

ROWS = 2048  # tokens of a measured product
REPEATS = 5


def seconds_per_token(inputs: int, outputs: int) -> float:
    """Measure a linear layer, forward and backward; return seconds per token."""
    x, weight, gradient = torch.randn(ROWS, inputs), torch.randn(outputs, inputs), torch.randn(ROWS, outputs)
    seconds = 0.0
    for product in (lambda: linear(x, weight), lambda: linear(gradient, weight.T), lambda: linear(gradient.T, x.T)):
        product()
        times = []
        for _ in range(REPEATS):
            started = time.process_time()
            product()
            times.append(time.process_time() - started)
        seconds += statistics.median(times)
    return seconds / ROWS


def layers_of(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return inputs and outputs of the linear layers of a transformer layer; products with equal inputs are joined."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width * config["num_key_value_heads"] // config["num_attention_heads"]
    return [(width, width + 2 * keys), (width, width), (width, 2 * inner), (inner, width)]


def main(model: str, tokens: str, response_tokens: str, library: str = "") -> None:
    """Print the seconds of the layers for all tokens, and of the head for those of responses."""
    torch.backends.mkldnn.enabled = library != "mkl"
    config = json.loads((Path(model) / "config.json").read_text())
    layer = sum(seconds_per_token(*shape) for shape in layers_of(config))
    head = seconds_per_token(config["hidden_size"], config["vocab_size"])
    layers = config["num_hidden_layers"] * layer * float(tokens)
    print(json.dumps({"layers": layers, "head": head * float(response_tokens)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
