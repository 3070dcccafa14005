"""How the critic learns from returns."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.ranges import check_range


@dataclass(frozen=True)
class ClippedValueLoss:
    """Squared error of the critic, with the change of the value bounded.

        L = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    The formula is the one in OpenAI's baselines.

    Args:
        clip_range: c, reward units, positive. None is plain squared error.
    """

    clip_range: float | None = 0.5

    def __post_init__(self) -> None:
        check_range("value clip_range", self.clip_range, "positive or null")

    def __call__(
        self, values: Float[Tensor, "..."], old_values: Float[Tensor, "..."], returns: Float[Tensor, "..."]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and diagnostics of each token.

        Args:
            values: values of the current critic, with gradient.
            old_values: values of the critic before the first update.

        Returns:
            loss: (...) per token, squared reward units.
            diagnostics: per token, 1 where the clipped branch won (``clip_fraction``).
        """
        error = (values - returns) ** 2
        if self.clip_range is None:
            return error / 2, {"clip_fraction": torch.zeros_like(error)}
        # Not old + clamp(new - old): rounding would make some values differ from themselves and count as clipped.
        bounded = torch.clamp(values, old_values - self.clip_range, old_values + self.clip_range)
        bounded_error = (bounded - returns) ** 2
        clipped = (bounded_error > error).to(error.dtype).detach()
        return torch.maximum(error, bounded_error) / 2, {"clip_fraction": clipped}
