"""How strongly the actor is held to the reference, in the reward or in the loss, and how that changes."""

from dataclasses import dataclass

from lightning_rlhf.functional.kl import KLEstimator


@dataclass(frozen=True)
class KLTerm:
    """A KL term: its weight and its estimator.

    Args:
        coef: weight, at least 0; 0 switches the term off.
        estimator: see :func:`lightning_rlhf.functional.kl.kl_estimate`. In the reward, k1 is unbiased; in the loss,
            k1 has gradient zero in expectation, so k2 or k3 is meant there.
    """

    coef: float = 0.0
    estimator: KLEstimator = "k1"

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"KL coef must be at least 0, got {self.coef}")
        if self.estimator not in ("k1", "k2", "k3", "abs"):
            raise ValueError(f"KL estimator must be one of k1, k2, k3, abs, got {self.estimator!r}")


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the KL coefficient so that the measured KL approaches a target.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(responses / horizon, 1)).
    See "Fine-Tuning Language Models from Human Preferences", Ziegler et al. 2019, section 2.2.
    The last factor is theirs for batches within a horizon, and keeps larger ones from making the coefficient negative.

    Args:
        target: wanted KL to the reference, nats per response, positive.
        horizon: responses over which the coefficient changes by at most a fifth, positive.
    """

    target: float
    horizon: int = 10000

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(f"target and horizon must be positive, got target={self.target}, horizon={self.horizon}")

    def __call__(self, coef: float, kl: float, num_responses: int) -> float:
        """The next coefficient.

        Args:
            coef: the present coefficient.
            kl: measured KL, nats per response.
            num_responses: responses it was measured on.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * min(num_responses / self.horizon, 1.0))
