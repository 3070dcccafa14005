"""Loss of reward models from preference pairs."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class PairwiseLoss:
    """Bradley-Terry loss of preference pairs, with margin and centring.

        L = -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2

    See "Training language models to follow instructions with human feedback", Ouyang et al. 2022, eq. 1, for the margin
    "Llama 2", Touvron et al. 2023, eq. 2, and for centring "Helping or Herding?", Eisenstein et al. 2023.

    Args:
        center_coef: weight of the term that keeps scores around 0, at least 0. 0 switches it off.
    """

    center_coef: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, center_coef="at least 0")

    def __call__(
        self, chosen: Float[Tensor, "B"], rejected: Float[Tensor, "B"], margin: Float[Tensor, "B"] | None = None
    ) -> Float[Tensor, "B"]:
        """Loss of each pair.

        Args:
            chosen: scores of the preferred answers.
            rejected: scores of the others.
            margin: number subtracted from the difference of the scores, score units; None is 0.

        Returns:
            Nats.
        """
        difference = chosen - rejected if margin is None else chosen - rejected - margin
        return -logsigmoid(difference) + self.center_coef * (chosen + rejected) ** 2
