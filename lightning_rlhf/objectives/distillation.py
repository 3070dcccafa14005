"""Divergence of a student's distributions from a teacher's."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlhf.expected_errors import UsageError


@dataclass(frozen=True)
class Divergence:
    """Generalized Jensen-Shannon divergence of the student's token distributions p from the teacher's q.

    With m = beta q + (1 - beta) p:  D = beta KL(q || m) + (1 - beta) KL(p || m), nats;  beta = 0: KL(q || p);
    beta = 1: KL(p || q). Both are distributions at the temperature of the sampling. The formula is computed by
    :func:`~lightning_rlhf.functional.divergence.distillation_scores`.
    See "On-Policy Distillation of Language Models", Agarwal et al. 2023, equation 1 and section 3.

    Args:
        beta: interpolation, in [0, 1]. 0, the forward KL, makes the student cover all that the teacher may write; 1, the
            reverse KL, makes it avoid what the teacher would not write.
        top_k: number of the teacher's most likely tokens that are compared one by one, all others as one event; None
            compares all tokens.
        memory_mb: memory of the logits and of their gradients at a time, MiB, at least 1; more of it makes large
            vocabularies faster on a GPU.
    """

    beta: float = 1.0
    top_k: int | None = None
    memory_mb: int = 150

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise UsageError(f"beta of a divergence must be in [0, 1], got {self.beta}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k of a divergence must be at least 1 or null, got {self.top_k}")
        if self.memory_mb < 1:
            raise UsageError(f"memory_mb of a divergence must be at least 1, got {self.memory_mb}")
