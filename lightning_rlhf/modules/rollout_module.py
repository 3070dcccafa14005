"""From a rollout to experience: what the actor, the reference and the reward model say of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.batching.sequences import join
from lightning_rlhf.functional.diagnostics import gradient_power
from lightning_rlhf.functional.logprobs import TokenScores
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.types import Experience, PromptBatch, Rollout


class RolloutModule(RoleModule):
    """Receives rollouts and asks its models about them. :class:`~lightning_rlhf.modules.base.RLHFModule` then learns.

    Args:
        actor: the policy.
        ref: the frozen reference; None where no KL term has a weight. One that is the source of an actor with LoRA is
            the actor without its adapters, and no second copy is loaded.
        reward_model: a scalar model; None uses reward functions only.
        advantages: from rewards to advantages.
        correction: of what the engine's log-probabilities differ from the actor's.
        kl_reward: KL to the reference subtracted from each token's reward.
        score_shaping: what becomes of the reward model's score.
        micro_batch_tokens: most padded tokens in one forward pass.
        max_grad_norm: gradients of each role are clipped to this global norm; None leaves them.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        ref: str | ModelSource | None,
        reward_model: str | ModelSource | None,
        advantages: AdvantageEstimator,
        correction: RolloutCorrection,
        kl_reward: KLTerm,
        score_shaping: ScoreShaping,
        micro_batch_tokens: int,
        max_grad_norm: float | None,
    ) -> None:
        super().__init__(micro_batch_tokens, max_grad_norm)
        self.take_sources(actor=actor, ref=ref, reward_model=reward_model)
        self.has_ref = ref is not None
        if advantages.needs_critic and "critic" not in self.trained_roles:
            raise ValueError(
                f"{type(advantages).__name__} needs a critic, which {type(self).__name__} does not have: "
                f"take PPOModule, or an estimator without critic such as GRPO"
            )
        if advantages.needs_sum_pi_squared and correction.bypass:
            raise ValueError(
                f"{type(advantages).__name__} asks the actor about every response, which bypass leaves out: "
                f"take another correction"
            )
        if not advantages.reads_total_reward and (reward_model is not None or kl_reward.coef > 0):
            raise ValueError(
                f"{type(advantages).__name__} looks at its own reward keys only, so that neither a reward_model nor "
                f"kl_reward would teach anything: leave them out; kl_loss works"
            )
        self.advantages, self.correction = advantages, correction
        self.kl_reward, self.kl_coef = kl_reward, kl_reward.coef
        self.score_shaping = score_shaping
        self.last_rollout: Rollout | None = None  # that was learnt from, for callbacks
        self._rollout: Rollout | None = None
        self._greedy: Rollout | None = None

    @property
    def known_roles(self) -> set[str]:
        """Names of the roles that say something of a rollout, whether or not they have a model of their own."""
        return {*self.sources, *(["ref"] if self.has_ref else [])}

    # -- rollouts come in -------------------------------------------------------------------------------------

    def receive(self, rollout: Rollout, greedy: Rollout | None = None) -> None:
        """Take over the rollout of this batch; the only way experience enters the module.

        The callback that calls this before each training and validation step says so by a class attribute
        ``hands_over_rollouts = True``, as RolloutLoop does; without one the module refuses to run.

        Args:
            rollout: to learn from.
            greedy: one greedy response to each prompt, in the order of the groups, for estimators that need them.
        """
        self._rollout = rollout.to(self.device)
        self._greedy = None if greedy is None else greedy.to(self.device)

    def take_rollout(self) -> tuple[Rollout, Rollout | None]:
        """Give up the rollout of this batch, and the greedy one if there is one.

        Raises:
            RuntimeError: nobody handed one over.
        """
        if self._rollout is None:
            raise RuntimeError(
                f"{type(self).__name__} has no rollout for this batch: "
                f"the callback that hands them over must call receive() before each step"
            )
        taken, self._rollout, self._greedy = (self._rollout, self._greedy), None, None
        self.last_rollout = taken[0]
        return taken

    # -- from what happened to what to learn ------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, rollout: Rollout, greedy: Rollout | None = None) -> Experience:
        """Ask every model about a rollout and work out rewards and advantages."""
        old = self.old_scores(rollout)
        mask = rollout.response_mask & rollout.kept.unsqueeze(1)
        reduce, engine = self.roles.sum_over_ranks, rollout.rollout_logprobs
        weights, kept, mismatch = self.correction(old.logprobs, engine, mask, reduce, self.roles.max_over_ranks)
        self.measured = {} if self.correction.bypass else mismatch
        ref_logprobs = old.logprobs
        if self.has_ref:
            ref_logprobs = self.by_rows(partial(self.actor_scores, "ref"), rollout)[0]
        reward = self.total_reward(rollout)
        token_rewards = self.token_rewards(rollout, reward, old.logprobs, ref_logprobs)
        values, final_values = self.values(rollout)
        inputs = AdvantageInputs(
            token_rewards,
            mask,
            rollout.group,
            values,
            final_values,
            rollout.rewards,
            None if greedy is None else self.total_reward(greedy)[rollout.group],
            old.sum_pi_squared,
            old.logprobs,
            weights,
        )
        # What was rejected still says what the response earned, so the estimator is given its tokens too.
        advantages, returns = (values.masked_fill(~kept, 0) for values in self.advantages(inputs, reduce))
        if old.sum_pi_squared is not None:
            self.measured |= gradient_power(advantages, old.logprobs, old.sum_pi_squared, kept, weights, reduce)
        return Experience(
            rollout, reward, old.logprobs, ref_logprobs, values, token_rewards, advantages, returns,
            kept, weights, torch.zeros_like(kept),
        )  # fmt: skip

    def old_scores(self, rollout: Rollout) -> TokenScores:
        """What the actor says of the responses before the first update; or the engine said, if that is taken for it."""
        if self.correction.bypass:
            return TokenScores(rollout.rollout_logprobs, torch.zeros_like(rollout.rollout_logprobs))
        squares = self.advantages.needs_sum_pi_squared
        return TokenScores(*self.by_rows(partial(self.actor_scores, "actor", squares=squares), rollout))

    def token_rewards(self, rollout: Rollout, reward: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """(B, T) the reward at the policy's last token, less the KL penalty of each of its tokens."""
        mask = rollout.response_mask
        kl = self.kl_reward(logprobs, ref_logprobs, mask, logprobs)
        # What an environment wrote behind the policy's last token is passed over, and so would be its reward.
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1, keepdim=True)
        return (-self.kl_coef * kl).scatter_add(1, last, reward.unsqueeze(1))

    def values(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """(B, T) the critic's values, and (B,) those behind truncated responses; zeros without a critic."""
        return torch.zeros_like(rollout.rollout_logprobs), None

    def total_reward(self, rollout: Rollout) -> Tensor:
        """(B,) what the reward functions gave plus the shaped score of the reward model."""
        if "reward_model" not in self.sources:
            return rollout.reward
        return rollout.reward + self.score_shaping(self.scores(rollout), rollout.truncated)

    @torch.no_grad()
    def scores(self, rollout: Rollout) -> Tensor:
        """(B,) the reward model's score of each whole response, normalised but not shaped."""

        def at_end(rows: Rollout) -> tuple[Tensor]:
            input_ids, _ = join(rows)
            return (self.roles.role("reward_model")(input_ids, (rows.total_lengths - 1).unsqueeze(1)),)

        scores: Tensor = self.by_rows(at_end, rollout)[0].squeeze(1)
        return scores

    def actor_scores(self, role: str, rollout: Rollout, squares: bool = False) -> TokenScores:
        """What a language-model role says of the sampled tokens, (B, T) each.

        Without a model of its own, the reference is the actor with its adapters switched off.
        """
        input_ids, index = join(rollout)
        adapters = role != "ref" or "ref" in self.sources
        model = self.roles.role(role if adapters else "actor")
        scores: TokenScores = model(
            input_ids, index, rollout.response_ids, rollout.response_mask, rollout.temperature, squares, adapters
        )
        return scores

    # -- models -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse a run without rollouts."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(getattr(callback, "hands_over_rollouts", False) for callback in callbacks):
            raise ValueError(
                f"{type(self).__name__} learns from rollouts, and no callback hands them over: "
                f"add lightning_rlhf.callbacks.RolloutLoop to trainer.callbacks"
            )

    def build_role(self, name: str) -> nn.Module:
        """The language models of actor and reference, the scalar model of the reward model."""
        source = self.sources[name]
        return source.scalar() if name == "reward_model" else source.causal()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """Score one validation rollout; the RolloutLoop handed it over and makes the metrics."""
        rollout, _ = self.take_rollout()
        return {"scores": self.scores(rollout)} if "reward_model" in self.sources else {}
