"""How a reward model learns from pairs."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairwiseLoss:
    """Bradley-Terry loss of preference pairs, with margin and centring.

    L = -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2.
    See "Training language models to follow instructions with human feedback", Ouyang et al. 2022, eq. 1;
    margin: "Llama 2", Touvron et al. 2023, eq. 2; centring: "Helping or Herding?", Eisenstein et al. 2023.

    Args:
        center_coef: weight of the term that keeps scores around 0, at least 0; 0 switches it off.
    """

    center_coef: float = 0.0

    def __post_init__(self) -> None:
        if not self.center_coef >= 0:
            raise ValueError(f"center_coef must be at least 0, got {self.center_coef}")

    def __call__(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
        """Loss of each pair.

        Args:
            chosen: (B,) scores of the preferred answers.
            rejected: (B,) scores of the others.
            margin: (B,) by how much the preferred answer is better, score units; None is 0.

        Returns:
            (B,) nats.
        """
        difference = chosen - rejected if margin is None else chosen - rejected - margin
        return -logsigmoid(difference) + self.center_coef * (chosen + rejected) ** 2
