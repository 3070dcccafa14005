"""Record the masks of TRL's policy losses for fixed inputs. README.md has the command."""

import importlib.metadata
from types import SimpleNamespace

import torch
from make_golden import write
from trl import GRPOTrainer

SEED = 20261127
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
generator = torch.Generator().manual_seed(SEED)


def normal(scale: float, *shape: int) -> torch.Tensor:
    """Return random numbers of three decimals, which the file stores exactly."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)


def record_off_policy(threshold: float) -> dict[str, object]:
    """Return which responses are kept."""
    logprobs, advantages = -normal(1.5, 3, 5).abs(), normal(1.0, 3, 1) - 0.5
    rollout_logprobs = (logprobs + 0.3 + normal(0.6, 3, 5)).round(decimals=3)
    keep = GRPOTrainer.get_off_policy_mask(advantages, logprobs, rollout_logprobs, MASK, threshold)
    inputs = {"logprobs": logprobs, "rollout_logprobs": rollout_logprobs, "advantages": advantages, "mask": MASK}
    return {**inputs, "threshold": threshold, "keep": keep}


def record_high_entropy(fraction: float) -> dict[str, object]:
    """Return which tokens are kept; the trainer has only the attribute that the method uses."""
    entropies = normal(1.0, 3, 5).abs()
    one_process = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)
    keep = GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=one_process), entropies, MASK, 1 - fraction)
    return {"entropies": entropies, "mask": MASK, "fraction": fraction, "keep": keep.int()}


def main() -> None:
    """Write policy_masks.json next to this file."""
    source = {
        "package": "trl",
        "version": importlib.metadata.version("trl"),
        "command": "python tests/golden/make_policy_masks.py",
        "seed": SEED,
        "differs": "TRL keeps tokens from the quantile of the entropies on, here the count is rounded down: the "
        "fractions give the same tokens with 9 in the mask",
    }
    off_policy = [record_off_policy(threshold) for threshold in (0.05, 0.05, 0.2, 0.5)]
    high_entropy = [record_high_entropy(fraction) for fraction in (0.35, 0.6, 0.8)]
    write("policy_masks", {"source": source, "off_policy": off_policy, "high_entropy": high_entropy})


if __name__ == "__main__":
    main()
