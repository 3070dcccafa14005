"""Record the divergences of TRL for fixed distributions. README.md has the command."""

import importlib.metadata
from typing import Any

import torch
from make_golden import write
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

SEED = 20261126
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TOKENS, VOCABULARY, WIDTH, TOP = 5, 9, 4, 3
generator = torch.Generator().manual_seed(SEED)


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers of three decimals, which the file stores exactly."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).round(decimals=3)


def record_whole(inputs: dict[str, torch.Tensor], beta: float) -> dict[str, Any]:
    """Return the divergence of each token, and the gradients of their weighted sum."""
    hidden, weight = (inputs[name].float().requires_grad_() for name in ("hidden", "weight"))
    teacher = (inputs["teacher_hidden"].float(), inputs["teacher_weight"].float(), None)
    divergence, entropy = ChunkedDivergenceFunction.apply(hidden, weight, None, *teacher, beta, 2.0, 1.0, 4.0, 0.5)
    (divergence * inputs["token_weights"].float()).sum().backward()
    return {
        "beta": beta,
        "divergence": divergence.detach(),
        "entropy": entropy,
        "hidden_gradient": hidden.grad,
        "weight_gradient": weight.grad,
    }


def record_top(inputs: dict[str, torch.Tensor], beta: float) -> dict[str, Any]:
    """Return the divergence of each token over the teacher's most likely tokens and the rest."""
    student = (inputs["hidden"] @ inputs["weight"].T).log_softmax(-1)
    teacher = (inputs["teacher_hidden"] @ inputs["teacher_weight"].T).log_softmax(-1)
    top = teacher.topk(TOP, dim=-1)
    valid = torch.ones_like(top.indices, dtype=torch.bool)
    events, mask = _add_tail_bucket(student.gather(-1, top.indices), valid)
    expected, _ = _add_tail_bucket(top.values, valid)
    return {"beta": beta, "divergence": _jsd_divergence(events, expected, beta, mask).sum(-1)}


def main() -> None:
    """Write distillation.json next to this file."""
    inputs = {
        "hidden": normal(TOKENS, WIDTH),
        "weight": normal(VOCABULARY, WIDTH),
        "teacher_hidden": normal(TOKENS, WIDTH + 1),
        "teacher_weight": normal(VOCABULARY, WIDTH + 1),
        "token_weights": normal(TOKENS).abs(),
    }
    source = {
        "package": "trl",
        "version": importlib.metadata.version("trl"),
        "command": "python tests/golden/make_distillation.py",
        "seed": SEED,
    }
    settings = {"temperature": 2.0, "softcap": 4.0, "teacher_scale": 0.5, "top_k": TOP}
    whole, top = ([record(inputs, beta) for beta in BETAS] for record in (record_whole, record_top))
    write("distillation", {"source": source, "settings": settings, "inputs": inputs, "whole": whole, "top": top})


if __name__ == "__main__":
    main()
