"""Losses of policies from preference pairs or single judgements."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class DirectLoss(ABC):
    """Loss of a pair from the log-ratios of its two answers, log pi(y|x) - log ref(y|x), nats.

    ``beta`` times the log-ratio is the reward that the policy gives the answer. See "Direct Preference Optimization:
    Your Language Model is Secretly a Reward Model", Rafailov et al. 2023, eq. 5.

    Args:
        beta: strength of the pull to the reference, positive.
        length_normalized: whether each log-ratio is divided by the answer's number of tokens, so that long and short
            answers count the same.
    """

    uses_reference: ClassVar[bool] = True  # False: log-probs of the policy take the place of log-ratios
    needs_supervised: ClassVar[bool] = False  # True: its paper adds the supervised loss of the preferred answer

    beta: float = 0.1
    length_normalized: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, beta="positive")

    @abstractmethod
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Loss of each pair.

        Args:
            chosen: (B,) log-ratios of the preferred answers, summed over tokens or averaged if
                ``length_normalized``.
            rejected: (B,) log-ratios of the rejected answers.

        Returns:
            (B,).
        """


@dataclass(frozen=True)
class DPOLoss(DirectLoss):
    """Direct preference optimization: the Bradley-Terry loss of the rewards that the policy implies.

        L = -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)
        d = chosen - rejected, s = label_smoothing

    See Rafailov et al. 2023, eq. 7. With s > 0 you get conservative DPO ("A note on DPO with noisy preferences",
    Mitchell 2023), and with ``length_normalized`` the variant of "Tulu 3", Lambert et al. 2024.

    Args:
        label_smoothing: fraction of pairs that you assume to have swapped labels, in [0, 0.5).
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, label_smoothing="in [0, 0.5)")

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Nats."""
        reward = self.beta * (chosen - rejected)
        return -(1 - self.label_smoothing) * logsigmoid(reward) - self.label_smoothing * logsigmoid(-reward)


@dataclass(frozen=True)
class RobustDPOLoss(DPOLoss):
    """DPO for noisy labels: in expectation over the noise, it equals DPO over correct labels.

        L = (-(1 - s) log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s)

    See "Provably Robust DPO: Aligning Language Models with Noisy Feedback", Chowdhury et al. 2024.
    """

    label_smoothing: float = 0.1

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Nats."""
        reward, share = self.beta * (chosen - rejected), self.label_smoothing
        return (share * logsigmoid(-reward) - (1 - share) * logsigmoid(reward)) / (1 - 2 * share)


@dataclass(frozen=True)
class HingeLoss(DirectLoss):
    """The hinge instead of the logistic: pairs with rewards that are 1 apart teach nothing more.

        L = max(0, 1 - beta d)

    See "SLiC-HF", Zhao et al. 2023, and with the log-ratios "Statistical Rejection Sampling Improves Preference
    Optimization", Liu et al. 2023.
    """

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - self.beta * (chosen - rejected)).relu()


@dataclass(frozen=True)
class IPOLoss(DirectLoss):
    """Identity preference optimization: moves the log-ratios 1 / (2 beta) apart, and no further.

        L = (d - 1 / (2 beta))^2

    See "A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al. 2023, eq. 17, where
    beta is tau. The paper takes log-ratios of whole answers. TRL takes means over tokens, as the paper's authors
    advised.
    """

    length_normalized: bool = True

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Squared nats."""
        return (chosen - rejected - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class APOZeroLoss(DirectLoss):
    """Anchored preference optimization for preferred answers that are better than the policy's.

        L = 1 - sigmoid(beta chosen) + sigmoid(beta rejected)

    The preferred answer becomes more likely, the other less. See "Anchored Preference Optimization and Contrastive
    Revisions: Addressing Underspecification in Alignment", D'Oosterlinck et al. 2024, equation 7.
    """

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """In [0, 2]."""
        return 1 - (self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()


@dataclass(frozen=True)
class APODownLoss(DirectLoss):
    """Anchored preference optimization for preferred answers that are worse than the policy's.

        L = sigmoid(beta chosen) + 1 - sigmoid(beta (chosen - rejected))

    Both answers become less likely, the rejected one more so. See D'Oosterlinck et al. 2024, equation 8.
    """

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """In [0, 2]."""
        return (self.beta * chosen).sigmoid() + 1 - (self.beta * (chosen - rejected)).sigmoid()


@dataclass(frozen=True)
class SimPOLoss(DirectLoss):
    """Simple preference optimization: the reward is the mean log-probability of a token, without a reference.

        L = -log sigmoid(beta (chosen - rejected) - margin)

    See "SimPO: Simple Preference Optimization with a Reference-Free Reward", Meng et al. 2024, equation 6, where the
    margin is gamma. The paper's learning rates are 3e-7 to 1e-6.

    Args:
        margin: a pair teaches less once its rewards differ by more than this, reward units, at least 0.
    """

    uses_reference: ClassVar[bool] = False

    beta: float = 2.0
    length_normalized: bool = True
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, margin="at least 0")

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Nats."""
        return -logsigmoid(self.beta * (chosen - rejected) - self.margin)


@dataclass(frozen=True)
class ORPOLoss(DirectLoss):
    """Odds ratio preference optimization, without reference: raises the preferred answer's odds above the other's.

        L = -beta log sigmoid(log odds(chosen) - log odds(rejected))
        log odds = l - log(1 - exp(l)), l = mean log-probability of a token

    The paper adds the supervised loss of the preferred answer. You get it with ``sft_coef: 1`` of DPOModule. See "ORPO:
    Monolithic Preference Optimization without Reference Model", Hong et al. 2024, equations 6 and 7, where beta is
    lambda.
    """

    uses_reference: ClassVar[bool] = False
    needs_supervised: ClassVar[bool] = True

    length_normalized: bool = True

    @override
    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Nats."""
        return -self.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log-probabilities, which are clamped below 0, where the odds are infinite."""
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))


@dataclass(frozen=True)
class KTOLoss:
    """Kahneman-Tversky optimization: each response is a gain or a loss against a reference point.

        L = w_desirable (1 - sigmoid(beta (r - z)))      answers to give
        L = w_undesirable (1 - sigmoid(beta (z - r)))    other answers

    r is the log-ratio, and z >= 0 the policy's KL to the reference.
    See "KTO: Model Alignment as Prospect Theoretic Optimization", Ethayarajh et al. 2024, eqs. 7 and 8.

    Args:
        beta: strength of the hold on the reference, positive.
        desirable_weight: weight of desirable responses, positive. In the paper, weight times count is about equal for
            both kinds.
        undesirable_weight: weight of the other responses, positive.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} must be positive, got {value}")

    def __call__(self, log_ratio: Tensor, desirable: Tensor, kl: Tensor) -> Tensor:
        """Loss of each answer.

        Args:
            log_ratio: (B,) summed over the answer's tokens, nats.
            desirable: (B,) bool.
            kl: () KL of the policy to the reference, without gradient, at least 0, nats.

        Returns:
            (B,) in [0, the larger weight].
        """
        gain = torch.where(desirable, log_ratio - kl, kl - log_ratio)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight).to(gain.dtype)
        return weight * (1 - (self.beta * gain).sigmoid())


@dataclass(frozen=True)
class REBELLoss:
    """Squared error between two responses' difference in reward and the difference that the policy's log-ratios imply.

        L = ((first - second) / eta - (reward_1 - reward_2))^2

    See "REBEL: Reinforcement Learning via Regressing Relative Rewards", Gao et al. 2024, eq. 1. The authors' code
    minimises eta^2 L, with the same minimum.

    Args:
        eta: size of the policy's step, nats per reward unit, positive. If one response's reward is larger by 1 than the
            other's, its relative probability should rise by a factor of exp(eta).
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, eta="positive")

    def __call__(self, first: Tensor, second: Tensor, reward_difference: Tensor) -> Tensor:
        """Loss of each pair.

        Args:
            first: (B,) log-ratios of the first responses to the policy that sampled them, summed over tokens, nats.
            second: (B,) log-ratios of the second responses.
            reward_difference: (B,) reward of the first response minus that of the second, reward units.

        Returns:
            (B,) squared reward units.
        """
        return ((first - second) / self.eta - reward_difference) ** 2
