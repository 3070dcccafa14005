"""Record the results of verl for fixed inputs, as reference values of tests. README.md has the command."""

import datetime
import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from torch import Tensor
from verl.trainer.ppo import core_algos

SHAPE = (4, 7)
SEED = 20261121


def make_inputs() -> dict[str, Tensor]:
    """Return random numbers of three decimals, which the file stores exactly."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(scale: float, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)

    old_logprobs = -normal(1.5, *SHAPE).abs()
    values = normal(1.0, *SHAPE)
    return {
        # A full row, a short one, one with two holes (tokens of an environment), one of a single token.
        "mask": torch.tensor(
            [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]],
            dtype=torch.float64,
        ),
        "old_logprobs": old_logprobs,
        # Ratios from about 0.2 to 6: both clips and the dual clip bind.
        "logprobs": (old_logprobs + normal(0.8, *SHAPE)).round(decimals=3),
        # |d| < 2.5: verl clamps k3 to [-10, 10] besides its exponent, we do not; here neither clamp binds.
        "ref_logprobs": (old_logprobs + normal(0.8, *SHAPE).clamp(-2.4, 2.4)).round(decimals=3),
        "rewards": normal(1.0, *SHAPE),
        "advantages": normal(1.0, *SHAPE),
        "old_values": values,
        "values": (values + normal(0.5, *SHAPE)).round(decimals=3),
        "returns": normal(1.5, *SHAPE),
        "logits": normal(3.0, 5, 6),
        "targets": torch.tensor([0, 5, 2, 2, 4]),
    }


def per_token(aggregate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss of each token, from a function that only returns the mean over a mask."""
    losses = torch.empty(SHAPE, dtype=torch.float64)
    for cell in range(losses.numel()):
        mask = torch.zeros(losses.numel(), dtype=torch.float64)
        mask[cell] = 1
        losses.view(-1)[cell] = aggregate(mask.view(SHAPE)).detach()
    return losses


def record_policy_loss(inputs: dict[str, Tensor], **arguments: float) -> dict[str, Any]:
    """Return token losses, the gradient of their masked mean and the clip fractions."""
    logprobs = inputs["logprobs"].clone().requires_grad_()

    def compute(mask: Tensor) -> tuple[Tensor, ...]:
        return core_algos.compute_policy_loss.__wrapped__(
            inputs["old_logprobs"], logprobs, inputs["advantages"], mask, **arguments
        )

    loss, clip_fraction, _, dual_clip_fraction = compute(inputs["mask"])
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {
        "arguments": arguments,
        "token_losses": per_token(lambda mask: compute(mask)[0]),
        "gradient_of_mean": gradient,
        "clip_fraction": clip_fraction,
        "dual_clip_fraction": dual_clip_fraction,
    }


def record_value_loss(inputs: dict[str, Tensor], clip_range: float) -> dict[str, Any]:
    """Return token losses, the gradient of their masked mean and the clip fraction."""
    values = inputs["values"].clone().requires_grad_()

    def compute(mask: Tensor) -> tuple[Tensor, ...]:
        return core_algos.compute_value_loss(values, inputs["returns"], inputs["old_values"], mask, clip_range)

    loss, clip_fraction = compute(inputs["mask"])
    (gradient,) = torch.autograd.grad(loss, values)
    return {
        "clip_range": clip_range,
        "token_losses": per_token(lambda mask: compute(mask)[0]),
        "gradient_of_mean": gradient,
        "clip_fraction": clip_fraction,
    }


def record_gae(inputs: dict[str, Tensor], gamma: float, lam: float) -> dict[str, Any]:
    """Return whitened advantages, and returns."""
    advantages, returns = core_algos.compute_gae_advantage_return(
        inputs["rewards"], inputs["old_values"], inputs["mask"], gamma, lam
    )
    return {"gamma": gamma, "lam": lam, "advantages": advantages, "returns": returns}


def record_adaptive_kl() -> list[dict[str, float]]:
    """Return coefficients after one update each: far below, just below, at, just above and far above the target."""
    records = []
    for kl in (0.0, 5.5, 6.0, 6.7, 40.0):
        controller = core_algos.AdaptiveKLController(init_kl_coef=0.05, target_kl=6.0, horizon=1000)
        controller.update(kl, 64)
        records.append({"coef": 0.05, "target": 6.0, "horizon": 1000, "kl": kl, "responses": 64}
                       | {"next": float(controller.value)})  # fmt: skip
    return records


def make_outputs(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return all results of verl that this library computes too."""
    never = 1e9  # verl's dual clip cannot be switched off; no ratio reaches this bound
    pairs = inputs["logprobs"], inputs["ref_logprobs"]
    return {
        "gae": [record_gae(inputs, 1.0, 0.95), record_gae(inputs, 0.9, 0.7)],
        "masked_whiten": verl_functional.masked_whiten(inputs["rewards"], inputs["mask"]),
        "kl": {kind: core_algos.kl_penalty(*pairs, kind) for kind in ("k1", "k2", "k3", "abs")},
        "policy_loss": [
            record_policy_loss(inputs, cliprange=0.2, clip_ratio_c=never),
            record_policy_loss(inputs, cliprange=0.2, cliprange_low=0.1, cliprange_high=0.4, clip_ratio_c=never),
            record_policy_loss(inputs, cliprange=0.2, clip_ratio_c=1.5),
        ],
        "value_loss": [record_value_loss(inputs, 0.5), record_value_loss(inputs, 0.2)],
        "adaptive_kl": record_adaptive_kl(),
        "token_logprobs": verl_functional.logprobs_from_logits_naive(inputs["logits"], inputs["targets"]),
        "token_entropy": verl_functional.entropy_from_logits(inputs["logits"]),
    }


def write(name: str, record: dict[str, Any]) -> None:
    """Write a record next to this file, every row of numbers on one line."""
    text = json.dumps(record, indent=1, default=Tensor.tolist)
    one_line_per_row = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    Path(__file__).with_name(f"{name}.json").write_text(one_line_per_row + "\n")


def main() -> None:
    """Write verl.json next to this file."""
    inputs = make_inputs()
    source = {
        "package": "verl",
        "version": importlib.metadata.version("verl"),
        "torch": torch.__version__,
        "command": "python tests/golden/make_golden.py",
        "seed": SEED,
        "date": datetime.date.today().isoformat(),
    }
    write("verl", {"source": source, "inputs": inputs, "outputs": make_outputs(inputs)})


if __name__ == "__main__":
    main()
