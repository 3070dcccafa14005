"""Memory of log-probabilities: ``python -m benchmarks.compare.head_memory VOCABULARY``; prints megabytes."""

import sys
from pathlib import Path

import torch

from lightning_rlhf.functional.logprobs import chunked_token_scores

TOKENS = 4096
WIDTH = 128


def main(vocabulary: int) -> None:
    """Print how much the peak of resident memory rises in an update, without the gradient of the weight."""
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=True)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    targets = torch.randint(vocabulary, (TOKENS,))
    chunked_token_scores(hidden[:8], weight[:8], None, targets[:8] % 8).logprobs.sum().backward()  # libraries load
    before = peak()
    chunked_token_scores(hidden, weight, None, targets).logprobs.sum().backward()
    print(round(peak() - before - vocabulary * WIDTH * 4 / 2**20))


def peak() -> float:
    """Return the peak of resident memory in MB; unlike that of getrusage, it does not begin with the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
