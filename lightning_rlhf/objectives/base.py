"""Base classes of advantage estimators and policy losses. Subclass these for new ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: B responses of at most T tokens.

    Args:
        token_rewards: reward of each token, reward units: the response's reward at its last policy token, less every
            token's KL penalty.
        mask: True on policy tokens, False on padding and on tokens that an environment wrote.
        group: number of the prompt, from 0. All responses to a prompt are on one rank.
        values: value of the critic before each token, reward units. None without a critic.
        final_values: value of the critic after the last token of a response that the length limit cut, 0 for others.
            None unless the estimator bootstraps.
        rewards: name to (B,), what each reward function gave, unweighted, NaN where it did not apply.
        greedy_reward: reward of the greedy response to the same prompt. None unless ``needs_greedy``.
        sum_pi_squared: sum over the vocabulary of the squared probabilities. None unless ``needs_sum_pi_squared``.
        logprobs: log-probabilities of the actor before the first update. None unless ``needs_sum_pi_squared`` or
            ``needs_ref``.
        weights: importance weights of a rollout correction. None without one.
        ref_logprobs: log-probabilities of the frozen reference. None unless ``needs_ref``.
        source: number of the source of each prompt. None if the data name no sources.
    """

    token_rewards: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    group: Int[Tensor, B]
    values: Float[Tensor, "B T"] | None = None
    final_values: Float[Tensor, B] | None = None
    rewards: dict[str, Tensor] = field(default_factory=dict)
    greedy_reward: Float[Tensor, B] | None = None
    sum_pi_squared: Float[Tensor, "B T"] | None = None
    logprobs: Float[Tensor, "B T"] | None = None
    weights: Float[Tensor, "B T"] | None = None
    ref_logprobs: Float[Tensor, "B T"] | None = None
    source: Int[Tensor, B] | None = None

    def __post_init__(self) -> None:
        if not self.token_rewards.is_floating_point():
            raise UsageError(
                f"token_rewards must be of a floating-point dtype, got {self.token_rewards.dtype}: advantages have its "
                f"dtype, and integers would cut them off"
            )

    def of_rows(self, rows: Bool[Tensor, B]) -> AdvantageInputs:
        """Return the inputs of some responses, with groups numbered from 0.

        Args:
            rows: rows to keep. Keep all responses to a prompt or none.
        """

        def chosen(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: values[rows] for name, values in value.items()}
            return value[rows] if isinstance(value, Tensor) else value

        fields = {name: chosen(value) for name, value in vars(self).items()}
        return AdvantageInputs(**{**fields, "group": fields["group"].unique(return_inverse=True)[1]})

    @property
    def reward(self) -> Float[Tensor, B]:
        """Sum of each response's token rewards."""
        return self.token_rewards.masked_fill(~self.mask, 0).sum(dim=1)


class AdvantageEstimator(ABC):
    """Estimates advantages, usually from rewards.

    To write your own, subclass this as a frozen dataclass and declare the inputs that you need by class attributes:
    ``needs_critic``, ``needs_groups``, ``needs_greedy``, ``needs_sum_pi_squared``, ``needs_ref``. If it needs the rows
    of other processes, such as a mean over the whole batch, ``ranks.sum(tensor)`` adds over them.
    """

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False  # at least two responses to each prompt
    needs_greedy: ClassVar[bool] = False  # a greedy response to each prompt, judged like the others
    needs_sum_pi_squared: ClassVar[bool] = False
    needs_ref: ClassVar[bool] = False  # log-probabilities of the reference
    needs_rewards: ClassVar[bool] = True  # False: without rewards, there is something to learn from, too
    reads_total_reward: ClassVar[bool] = True  # False: only ``rewards``, so that reward model and KL penalty are unseen

    def has_reward(self, reward: Float[Tensor, B], rewards: Mapping[str, Tensor]) -> Bool[Tensor, B]:
        """Mark the responses that come with everything the estimator reads, (B,) bool. It sees no others.

        Args:
            reward: total reward, NaN for responses without one.
            rewards: (B,) rewards by name, NaN where one did not apply.
        """
        return ~reward.isnan() if self.needs_rewards else torch.ones_like(reward, dtype=torch.bool)

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """Advantages and returns.

        Args:
            inputs: responses of this rank.
            ranks: ranks that hold the other rows.

        Returns:
            advantages: (B, T), 0 where the mask is False.
            returns: (B, T), targets of a critic, 0 where the mask is False.
        """


@dataclass(frozen=True)
class PolicyTokens:
    """Inputs of a policy loss: B responses of at most T tokens, all values 0 where the mask is False.

    Args:
        logprobs: log-probabilities of the actor, with gradient.
        old_logprobs: log-probabilities of the actor before the first update.
        advantages: advantages from the estimator, positive for tokens to make more likely.
        mask: the tokens to learn from.
        selected_tokens: rows of the result of :meth:`PolicyLoss.select_tokens`. False without selection.
        rollout_logprobs: log-probabilities of the engine that sampled the tokens.
    """

    logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    selected_tokens: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected_tokens: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> PolicyTokens:
        """Fill tensors with 0 outside of the mask and clamp log-probabilities to [-1e4, 1e4]; NaN inside stays NaN.

        They are filled before anything is computed, because infinity times a gradient of 0 is NaN, and clamped, so
        that an impossible token has no infinite loss. Without ``rollout_logprobs``, those are ``old_logprobs``.
        """
        old = old_logprobs.masked_fill(~mask, 0).clamp(-1e4, 1e4)
        rollout = old if rollout_logprobs is None else rollout_logprobs.masked_fill(~mask, 0).clamp(-1e4, 1e4)
        return cls(
            logprobs=logprobs.masked_fill(~mask, 0).clamp(-1e4, 1e4),
            old_logprobs=old,
            advantages=advantages.masked_fill(~mask, 0),
            mask=mask,
            selected_tokens=torch.zeros_like(mask) if selected_tokens is None else selected_tokens,
            rollout_logprobs=rollout,
        )

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """Log of the importance ratio, clamped to [-20, 20]."""
        return log_ratio_of(self.logprobs, self.old_logprobs)


class PolicyLoss(ABC):
    """Turns log-probabilities and advantages into one loss per token. The module aggregates them."""

    uses_ratio: ClassVar[bool] = True  # whether exp(logprobs - old_logprobs) is part of the loss
    selects_tokens: ClassVar[bool] = False  # whether select_tokens() is called for each mini-batch
    # Whether a ratio is that of a whole response, which is clipped far more often than that of a token.
    weighs_responses: ClassVar[bool] = False

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and diagnostics of each token. This is the method that you write in a subclass.

        Returns:
            loss: (B, T); values outside the mask don't count.
            diagnostics: names to (B, T) float without gradient, averaged over tokens as ``policy/<name>``.
        """

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected_tokens: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and diagnostics of each token; see :class:`PolicyTokens` for the arguments.

        Values where the mask is False are ignored. The diagnostics contain an estimate of KL(old || new), named
        ``approx_kl``.
        """
        optional = {"selected_tokens": selected_tokens, "rollout_logprobs": rollout_logprobs}
        tokens = PolicyTokens.of(logprobs, old_logprobs, advantages, mask, **optional)
        losses, diagnostics = self.token_losses(tokens)
        return losses, {**diagnostics, "approx_kl": approx_kl(tokens.log_ratio)}

    def select_tokens(
        self,
        tokens: PolicyTokens,
        entropies: Float[Tensor, "B T"],
        generator: torch.Generator,
        ranks: DataRanks = ONE_RANK,
    ) -> Bool[Tensor, "B T"]:
        """Choose the tokens of a whole mini-batch that the loss treats differently.

        Args:
            tokens: tokens of the mini-batch, with the log-probabilities at its start, without gradient.
            entropies: entropies of the actor's distributions at the mini-batch's start, nats, without gradient.
            generator: random generator, seeded differently on each rank.
            ranks: ranks that hold the other rows.
        """
        raise NotImplementedError


# A policy loss, a function of PolicyTokens that returns the (B, T) losses, or its reference, such as losses.py:my_loss.
AnyPolicyLoss = PolicyLoss | str | Callable[[PolicyTokens], Tensor]


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """A plain function as policy loss.

    Args:
        function: function of :class:`PolicyTokens` that returns the (B, T) loss of each token, or that and a dictionary
            of (B, T) diagnostics; see :meth:`PolicyLoss.token_losses`.
    """

    function: Callable[[PolicyTokens], Tensor | tuple[Tensor, dict[str, Tensor]]]

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PolicyLoss.token_losses`.

        Raises:
            ValueError: the function does not return one loss for each token.
        """
        returned = self.function(tokens)
        if isinstance(returned, tuple) and len(returned) == 2:
            losses, diagnostics = returned
        else:
            losses, diagnostics = (returned, {})
        if not isinstance(losses, Tensor) or losses.shape != tokens.logprobs.shape:
            shown = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise UsageError(
                f"policy_loss: {self.name} must return a tensor with the loss of each token, shape "
                f"{tuple(tokens.logprobs.shape)}, got {shown}"
            )
        if not isinstance(diagnostics, dict):
            raise UsageError(
                f"policy_loss: the diagnostics of {self.name} must be a dictionary of tensors, got "
                f"{type(diagnostics).__name__}"
            )
        if tokens.logprobs.requires_grad and not losses.requires_grad:
            raise UsageError(
                f"policy_loss: the losses of {self.name} have no gradient: compute them from tokens.logprobs or "
                f"tokens.log_ratio"
            )
        return losses, diagnostics

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return getattr(self.function, "__name__", repr(self.function))


def log_ratio_of(logprobs: Float[Tensor, ...], old_logprobs: Float[Tensor, ...], bound: float = 20.0) -> Tensor:
    """Log of the importance ratio, clamped: beyond exp(20) a ratio overflows, and 0 times infinity is NaN.

    Args:
        logprobs: log-probabilities of the current actor.
        old_logprobs: log-probabilities of the actor before the first update.
        bound: largest absolute value, nats.
    """
    return (logprobs - old_logprobs).clamp(-bound, bound)


@torch.no_grad()
def approx_kl(log_ratio: Tensor) -> Tensor:
    """KL(old || new) of each token by k3: exp(x) - 1 - x of the log-ratio x; at least 0, nats."""
    return torch.expm1(log_ratio) - log_ratio
