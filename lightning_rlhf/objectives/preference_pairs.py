"""Which two of the responses to a prompt make a pair to learn from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs


@dataclass(frozen=True)
class BestAgainstWorst(AdvantageEstimator):
    """1 for the response of each prompt with the highest reward, -1 for the one with the lowest, 0 for all others.

    Of several equal ones the first is taken; where all rewards are equal, none is.
    See "Direct Language Model Alignment from Online AI Feedback", Guo et al. 2024, section 3, with two responses.
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :class:`AdvantageEstimator`; both results are the marks."""
        reward = inputs.reward
        marks = torch.zeros_like(reward)
        for number in inputs.group.unique():
            rows = (inputs.group == number).nonzero().squeeze(1)
            best, worst = rows[reward[rows].argmax()], rows[reward[rows].argmin()]
            if reward[best] > reward[worst]:
                marks[best], marks[worst] = 1, -1
        spread = marks.unsqueeze(1) * inputs.mask
        return spread, spread
