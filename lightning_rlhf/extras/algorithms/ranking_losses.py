"""Losses of reward models from rankings of two or more answers to a prompt, with ties."""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from lightning_rlhf.ranges import check_ranges

MOST_TIED = 10  # 2^10 sets of tied answers are summed over


class RankingLoss(ABC):
    """Loss of a ranking from the scores of its answers. Rankings of different lengths share a batch."""

    @abstractmethod
    def __call__(self, scores: Tensor, ranks: Tensor) -> Tensor:
        """Loss of each ranking.

        Args:
            scores: (B, K) scores of the answers; anything finite where the rank is 0.
            ranks: (B, K) int64, rank of each answer, 1 for the best. Equal ranks are a tie, 0 is no answer. Each row
                has answers of at least two ranks.

        Returns:
            (B,) nats.
        """

    def check(self, ranks: Sequence[int]) -> None:  # noqa: B027 (most losses allow all rankings)
        """Raise for a ranking whose loss cannot be computed.

        Args:
            ranks: rank of each of its answers.

        Raises:
            ValueError: the loss does not allow these ranks.
        """


@dataclass(frozen=True)
class AllPairsLoss(RankingLoss):
    """Mean loss over all pairs of answers of different rank, so that each prompt has the same weight.

        L = 1 / |P| * sum over (i, j) in P of pair(s_i, s_j),    P = {(i, j): answer i is ranked above j}

    Without ties these are the K (K - 1) / 2 pairs of "Training language models to follow instructions with human
    feedback", Ouyang et al. 2022, eq. 1. Tied answers are not compared with each other. Two answers have the loss of
    their pair.

    Args:
        pair: loss of a pair from its scores.
    """

    pair: PairwiseLoss = field(default_factory=PairwiseLoss)

    @override
    def __call__(self, scores: Tensor, ranks: Tensor) -> Tensor:
        """Nats."""
        above = is_above(ranks)
        ranking, better, worse = above.nonzero(as_tuple=True)
        losses = self.pair(scores[ranking, better], scores[ranking, worse])
        of_pairs = scores.new_zeros(above.shape).masked_scatter(above, losses)
        return of_pairs.sum(dim=(1, 2)) / above.sum(dim=(1, 2))


@dataclass(frozen=True)
class PlackettLuceLoss(RankingLoss):
    """Negative log-likelihood of a ranking under Plackett and Luce: choose the best answer, then the best of the rest.

        L = -sum_i log( exp(s_i) / sum of exp(s_j) over answer i and all that are ranked below it )
            + center_coef * (2 mean(s))^2

    It is the sum over all choices, so a longer ranking weighs more. See "The Analysis of Permutations", Plackett 1975,
    and "Individual Choice Behavior", Luce 1959. Two answers have the loss of :class:`PairwiseLoss`.

    Tied answers are a ranking that leaves their order open: the loss is -log of the probability that they come, in any
    order, after all better and before all worse answers. It is exact, a sum over the sets of tied answers that are
    already chosen. The order of ties at the end costs nothing. See "Learning-to-Rank with Partitioned Preference: Fast
    Estimation for the Plackett-Luce Model", Ma et al. 2021, who write the same probability as an integral.

    Args:
        center_coef: weight of the term that keeps scores around 0, at least 0. 0 switches it off.
    """

    center_coef: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, center_coef="at least 0")

    @override
    def check(self, ranks: Sequence[int]) -> None:
        """Raise if more than 10 answers above others are tied, because the sum over their sets would be large."""
        ties = Counter(ranks)
        tied = max((ties[rank] for rank in ties.keys() - {max(ties)}), default=1)
        if tied > MOST_TIED:
            raise UsageError(
                f"a ranking has {tied} tied answers above others, and PlackettLuceLoss allows at most {MOST_TIED}: use "
                f"AllPairsLoss, which does not compare them, or ranks with fewer ties"
            )

    @override
    def __call__(self, scores: Tensor, ranks: Tensor) -> Tensor:
        """Nats."""
        ranks, order = ranks.sort(dim=1, stable=True)  # answers with the same rank side by side
        scores = scores.gather(1, order)
        above = is_above(ranks)
        lowest = torch.finfo(scores.dtype).min
        below = scores.unsqueeze(1).expand(above.shape).masked_fill(~above, lowest).logsumexp(dim=2)
        lead = scores - below  # log of an answer's odds against all that are ranked below it
        ties = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).sum(dim=2)
        terms = torch.zeros_like(scores)
        has_worse = above.any(dim=2)
        for tied in ties[has_worse].unique().tolist():
            of_ties = has_worse & (ties == tied)
            logprobs = logprob_first(lead[of_ties].view(-1, tied))
            # The term of a tie is stored at the first of its answers.
            at_first = torch.cat([logprobs.unsqueeze(1), logprobs.new_zeros(len(logprobs), tied - 1)], dim=1)
            terms = terms.masked_scatter(of_ties, at_first)
        answers = ranks > 0
        mean = scores.masked_fill(~answers, 0).sum(dim=1) / answers.sum(dim=1)
        return -terms.sum(dim=1) + self.center_coef * (2 * mean) ** 2


def is_above(ranks: Tensor) -> Tensor:
    """Return (B, K, K) whether the first of two answers is ranked above the second, from (B, K) ranks, 0 for none."""
    first, second = ranks.unsqueeze(2), ranks.unsqueeze(1)
    return (first > 0) & (first < second)


def logprob_first(lead: Tensor) -> Tensor:
    """Return (N,) the log-probability that m answers are all chosen before any other, in whatever order.

        p(S) = sum over i in S of w_i / (1 + sum of w_j over S) * p(S without i),    p(nothing) = 1,  w = exp(lead)

    S are those of the m answers that are still to choose.

    Args:
        lead: (N, m) score of each answer minus the log of the sum of exp(score) over all others than these m.
    """
    if lead.shape[1] == 1:
        return logsigmoid(lead.squeeze(1))
    logprobs = lead.new_zeros(len(lead), 1)
    for members, without in _subsets(lead.shape[1]):
        leads = lead[:, members]
        total = torch.logaddexp(leads.logsumexp(dim=2, keepdim=True), leads.new_zeros(()))
        logprobs = (leads - total + logprobs[:, without]).logsumexp(dim=2)
    return logprobs.squeeze(1)


@cache
def _subsets(count: int) -> list[tuple[list[tuple[int, ...]], list[list[int]]]]:
    """Return, for each size, the subsets of some things, and the position of each subset without one of its members.

    The position is that among the subsets of the size before.
    """
    result = []
    positions: dict[tuple[int, ...], int] = {(): 0}
    for size in range(1, count + 1):
        subsets = list(itertools.combinations(range(count), size))
        without = [[positions[(*each[:i], *each[i + 1 :])] for i in range(size)] for each in subsets]
        result.append((subsets, without))
        positions = {subset: position for position, subset in enumerate(subsets)}
    return result
