"""Record the losses of TRL's trainers for pairs with and without a reference. README.md has the command."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import torch
from make_golden import write
from make_preferences import lengths, masked, normal, pair_loss
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer

PAIRS, TOKENS = 5, 6


def record_anchored(kind: str, beta: float) -> dict[str, Any]:
    """Return the mean loss of some pairs, and its gradient."""
    counts = lengths(2 * PAIRS)
    ref = masked(-normal(1.5, 2 * PAIRS, TOKENS).abs(), counts)
    logprobs = (ref + masked(normal(0.7, 2 * PAIRS, TOKENS), counts)).round(decimals=3).requires_grad_()
    loss, _ = pair_loss(logprobs, ref, counts, kind, beta, 0.0)
    loss.backward()
    return {
        "kind": kind,
        "beta": beta,
        "logprobs": logprobs.detach(),
        "ref": ref,
        "loss": loss.detach(),
        "gradient": logprobs.grad,
    }


def record_without_reference(kind: str, beta: float, margin: float) -> dict[str, Any]:
    """Return the loss of each pair from mean log-probabilities, and the gradients of their sum."""
    chosen, rejected = ((-normal(1.0, PAIRS).abs() - 0.01).requires_grad_() for _ in range(2))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        beta=beta,
        label_smoothing=0.0,
        loss_type="simpo",
        simpo_gamma=margin,
    )
    losses: Tensor
    if kind == "simpo":
        losses, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    else:
        losses = -ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected))
    inputs = {"kind": kind, "beta": beta, "margin": margin, "chosen": chosen.detach(), "rejected": rejected.detach()}
    return {**inputs, "losses": losses.detach(), "chosen_gradient": gradients[0], "rejected_gradient": gradients[1]}


def main() -> None:
    """Write reference_free.json next to this file."""
    source = {
        "package": "trl",
        "version": importlib.metadata.version("trl"),
        "command": "python tests/golden/make_reference_free.py",
        "differs": "TRL's odds ratio loss computes in float32",
    }
    anchored = [record_anchored(kind, beta) for kind in ("apo_zero", "apo_down") for beta in (0.1, 0.7)]
    free = [record_without_reference("simpo", 2.0, 1.0), record_without_reference("simpo", 0.7, 0.0)]
    free += [record_without_reference("orpo", beta, 0.0) for beta in (0.1, 1.0)]
    write("reference_free", {"source": source, "anchored": anchored, "without_reference": free})


if __name__ == "__main__":
    main()
