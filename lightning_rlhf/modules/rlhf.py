"""RLHFModule: receives a rollout, evaluates it with its models, and updates the actor on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rlhf.batching.shares import balanced_shares, shuffled
from lightning_rlhf.calls.references import as_function
from lightning_rlhf.expected_errors import NonFiniteError, RunError, UsageError
from lightning_rlhf.functional.allowed_tokens import of_all_ranks
from lightning_rlhf.functional.diagnostics import gradient_power
from lightning_rlhf.functional.logprobs import ActorScores, TokenScores
from lightning_rlhf.functional.masked import rewards_at_tokens
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.causal import LimitedTokens
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.evaluation import EngineScores, Evaluation, OldScores, SeparatePass
from lightning_rlhf.modules.first_forward import FirstForward
from lightning_rlhf.modules.metrics import MeanAccumulator, StepUpdates, UpdateResult, describe
from lightning_rlhf.modules.micro_batches import SummedLoss
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.objectives.aggregation import Aggregation, TokenMean
from lightning_rlhf.objectives.base import (
    AdvantageEstimator,
    AdvantageInputs,
    AnyPolicyLoss,
    FunctionLoss,
    PolicyLoss,
    PolicyTokens,
    approx_kl,
    log_ratio_of,
)
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus
from lightning_rlhf.ranges import check_range, check_ranges
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.run_checks import check_loops
from lightning_rlhf.types import AllowedTokens, Experience, PromptBatch, Rollout, StepRollout, TensorBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedStep:
    """Results of a training step, for callbacks.

    Args:
        experience: responses of this rank, with all inputs of the losses.
        roles: names of the roles that were trained; without the actor during critic warm-up.
        actor_updates: number of optimizer steps of the actor.
        kl_to_ref: KL of the rollout to the reference over all ranks, nats per response; None without a reference.
        times: seconds of the parts ``evaluate`` and ``update`` on this rank.
    """

    experience: Experience
    roles: tuple[str, ...]
    actor_updates: int
    kl_to_ref: float | None
    times: dict[str, float]


class RLHFModule(RoleModule):
    """Trains a policy on rollouts, with the advantages, loss and aggregation that you choose.

    GRPOModule and most other algorithms are this class with other defaults. You can pass your own parts as arguments,
    or write a subclass with other defaults. If these parts cannot express your loss, override :meth:`losses`. A
    :class:`~lightning_rlhf.callbacks.RolloutLoop` callback makes the rollouts and passes them to :meth:`receive`.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        ref: frozen policy that the KL terms compare with. None takes the actor's source. It is loaded only if something
            uses it, such as a KL term with a weight above 0.
        reward_model: scalar model that scores each whole response. Its score is added to the rewards of your reward
            functions. None uses reward functions only.
        advantages: how rewards become advantages, for example ``GRPO``.
        policy_loss: loss of each token from its log-probabilities and advantage. You can also pass a function of
            ``PolicyTokens`` that returns the (B, T) losses, or its reference, such as ``losses.py:my_loss``.
        aggregation: how the losses of tokens become one loss, and so how much long responses count.
        correction: importance weights for the gap between the engine's and the actor's log-probabilities. None only
            measures the gap.
        optimizer: factory that makes the actor's optimizer from its parameters.
        lr_scheduler: factory of its scheduler, stepped once per rollout. None keeps the rate constant.
        kl_reward: KL to the reference, subtracted from each token's reward. A
            :class:`~lightning_rlhf.callbacks.KLControl` callback can adapt its weight.
        kl_loss: KL to the reference, added to the loss.
        score_shaping: how the reward model's score is clipped and weighted before it counts as a reward.
        ent_coef: weight of the entropy bonus, at least 0.
        update_epochs: how many times each rollout is trained on, at least 1.
        minibatch_size: responses per optimizer step over all ranks, at least 1. None takes all responses of a step.
        micro_batch_tokens: most tokens in one forward pass. Lower it if the GPU runs out of memory. None chooses by the
            memory of the device: 2,048 on a CPU, 4,096 on a GPU of 24 GiB, 16,384 from 70 GiB on.
        packing: whether the texts of a forward pass form one row without padding, with the prompt of several responses
            only once. This changes results by rounding only. If our tests have not compared the architecture with
            padding, the run does so at its start, and uses padding if the results differ.
        keep_groups: whether all responses to a prompt stay in the same mini-batch, so that updates, too, read the
            prompt only once. Without it, mini-batches are drawn from all responses, and two responses to the same
            prompt are rarely in the same row. With it, each update sees fewer different prompts.
        max_grad_norm: each role's gradient is clipped to this global norm. None does not clip.
        target_kl: bound of KL(old || new), in nats per token, as the mean over a mini-batch and all ranks. The first
            mini-batch that exceeds it ends the step's updates. You see how many were made in ``policy/updates``. None
            makes all updates.
    """

    trained_roles: tuple[str, ...] = ("actor",)
    reads = PromptBatch
    needs_ref = False  # whether the loss itself compares with the reference, so that it is always loaded
    has_entropy_bonus = True  # whether the loss uses ent_coef
    accepts_given_responses = False  # whether the loss is defined for responses that no policy sampled
    needs_current_rollouts = True  # whether responses of older weights need a correction
    last_rollout: Rollout | None = None  # the last one that was received, for callbacks
    last_step: TrainedStep | None = None  # the last training step, for callbacks

    def __init__(
        self,
        actor: str | ModelSource,
        ref: str | ModelSource | None = None,
        reward_model: str | ModelSource | None = None,
        advantages: AdvantageEstimator = ReinforcePlusPlus(),
        policy_loss: AnyPolicyLoss = ClippedPolicyLoss(),
        aggregation: Aggregation = TokenMean(),
        correction: RolloutCorrection | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        kl_reward: KLTerm = KLTerm(),
        kl_loss: KLTerm = KLTerm(estimator="k3"),
        score_shaping: ScoreShaping = ScoreShaping(),
        ent_coef: float = 0.0,
        update_epochs: int = 1,
        minibatch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        packing: bool = True,
        keep_groups: bool = False,
        max_grad_norm: float | None = 1.0,
        target_kl: float | None = None,
    ) -> None:
        super().__init__(micro_batch_tokens, max_grad_norm, packing)
        if advantages.needs_ref and ref is None:
            raise UsageError("the advantages are log-ratios of a teacher: set ref to its directory or hub id")
        self.has_ref = self.needs_ref or advantages.needs_ref or kl_reward.coef > 0 or kl_loss.coef > 0
        ref = (actor if ref is None else ref) if self.has_ref else None
        self.set_sources(actor=actor, ref=ref, reward_model=reward_model)
        self.advantages = advantages
        self.policy_loss = as_policy_loss(policy_loss)
        self.aggregation = aggregation
        self.correction = RolloutCorrection() if correction is None else correction
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.kl_reward = kl_reward
        self.kl_coef = kl_reward.coef
        self.kl_loss = kl_loss
        self.score_shaping = score_shaping
        self.ent_coef = ent_coef
        self.update_epochs = update_epochs
        check_range("minibatch_size", minibatch_size, "at least 1 or null")
        self.takes_whole_steps = minibatch_size is None
        self.minibatch_size = minibatch_size or 0  # expect_responses sets the number of all
        self.keep_groups = keep_groups
        self.target_kl = target_kl
        self.added_losses: list[SummedLoss] = []  # of callbacks; (B, T) losses of the tokens of some rows
        self._received: StepRollout | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raise ValueError for arguments out of range or that do not fit each other; warn about useless KL losses."""
        estimator, policy_loss = type(self.advantages).__name__, type(self.policy_loss).__name__
        check_ranges(self, update_epochs="at least 1", ent_coef="at least 0")
        if self.advantages.needs_critic and "critic" not in self.trained_roles:
            raise UsageError(
                f"{estimator} needs a critic, which {type(self).__name__} does not have: use PPOModule, or an "
                f"estimator without critic such as GRPO"
            )
        if self.advantages.needs_sum_pi_squared and self.correction.bypass:
            raise UsageError(
                f"{estimator} evaluates the actor on every response, which bypass leaves out: use another correction"
            )
        if not self.advantages.reads_total_reward and ("reward_model" in self.sources or self.kl_reward.coef > 0):
            raise UsageError(
                f"{estimator} uses only its own reward keys, so reward_model and kl_reward would have no effect: "
                f"remove them; kl_loss works"
            )
        if self.correction.bypass and self.correction.level is not None and self.policy_loss.uses_ratio:
            raise UsageError(
                f"with bypass, the ratio of {policy_loss} is the importance weight already: use ReinforceLoss, or "
                f"level null"
            )
        if self.kl_loss.coef > 0 and self.kl_loss.estimator == "k1" and not self.kl_loss.importance:
            log.warning("kl_loss with estimator k1 has no effect: its expected gradient is zero. Use k2 or k3")
        if self.kl_loss.coef > 0 and self.kl_loss.estimator == "abs":
            log.warning(
                "kl_loss with estimator abs has the sign of a rounding error as gradient where actor and reference are "
                "equal, as in the first update. Use abs+, k2 or k3"
            )

    # -- the step ---------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Update the roles on the rollout of this batch. The batch itself is not used."""
        clock = time.perf_counter
        started = clock()
        evaluation = self.evaluate(self.pop_rollout())
        self.expect_finite(evaluation.experience)
        evaluated = clock()
        updates = StepUpdates()
        for minibatch in self.minibatches(evaluation.experience):
            denominator = self.denominator(minibatch)
            losses = evaluation.old_scores.losses(self.losses())
            results = {role: self.update(role, minibatch, loss, denominator) for role, loss in losses.items()}
            updates.add(results)
            if self.exceeds_target_kl(results):
                break
        evaluation = evaluation.completed()
        times = {"evaluate": evaluated - started - evaluation.reward_wait, "update": clock() - evaluated}
        self.finish_rollout(evaluation, updates, times)

    def expect_finite(self, experience: Experience) -> None:
        """Raise if rewards would make an update that is not finite, before any role is updated. All ranks.

        Raises:
            FloatingPointError: a token in the loss gets a reward, advantage or return that is not finite.
        """
        token_values = torch.stack([experience.advantages, experience.returns]).isfinite().all(0)
        # NaN stands for no reward, which other objectives than rewards do not need.
        is_finite = (token_values & ~experience.reward.isinf().unsqueeze(1)) | ~experience.mask
        count = int(self.data_ranks.sum((~is_finite).any(1).sum()))
        if count:
            models = ["reward_model"] if "reward_model" in self.sources else []
            names = ", ".join([*experience.rollout.rewards, *models])
            raise NonFiniteError(
                f"rewards, advantages or returns of {count} responses are not finite at step "
                f"{self.trainer.global_step}; no weights were changed. Look at the rewards of this step ({names})"
            )

    def finish_rollout(self, evaluation: Evaluation, updates: StepUpdates, times: dict[str, float]) -> None:
        """Log the metrics of a step and set :attr:`last_step`. All ranks.

        Args:
            evaluation: evaluation of the rollout, after all updates.
            times: seconds of ``evaluate`` and ``update`` on this rank.
        """
        experience = evaluation.experience
        roles = {*self.sources, *(["ref"] if self.has_ref else [])}
        metrics = self.rollout_metrics(experience, roles)
        learned = int(self.data_ranks.sum(experience.mask.any().sum()))
        if not learned and metrics.get("reward/missing_fraction") == 1 and self.trainer.is_global_zero:
            log.warning("Step %d: no response has a reward, so none is learned from", self.trainer.global_step + 1)
            self._warn_of_early_stopping()
        metrics |= {**evaluation.metrics, **updates.means.means(self.data_ranks), "kl/coef": self.kl_coef}
        if self.correction.bypass:  # old and rollout log-probs are both the engine's
            del metrics["rollout/logprob_diff_mean"], metrics["rollout/logprob_diff_max"]
        metrics["policy/updates"] = updates.counts["actor"]  # without those left out
        metrics |= {f"time/{part}_s": seconds for part, seconds in times.items()}
        self.last_step = TrainedStep(
            experience=experience,
            roles=tuple(self.losses()),
            actor_updates=updates.counts["actor"],
            kl_to_ref=metrics.get("kl/ref"),
            times=times,
        )
        self.finish_step(metrics, bar=("reward/mean", "kl/ref", *(f"reward/{n}" for n in experience.rollout.rewards)))

    def _warn_of_early_stopping(self) -> None:
        """Log that a callback of Lightning takes a missing mean of rewards for a reason to end the run."""
        for callback in self.trainer.early_stopping_callbacks:
            monitor = callback.monitor
            if isinstance(callback, EarlyStopping) and callback.check_finite and monitor.startswith("reward/"):
                log.warning("EarlyStopping ends the run because %s is NaN: set check_finite: false", monitor)

    def rollout_metrics(self, experience: Experience, roles: set[str]) -> dict[str, float]:
        """Return the metrics of a rollout, reduced over ranks. All ranks.

        If you use neither reward functions nor a reward model, metrics of rewards are left out.

        Args:
            experience: rows of this rank.
            roles: names of the roles that exist.
        """
        metrics = describe(experience, roles, self.data_ranks)
        if experience.rollout.rewards or "reward_model" in self.sources:
            return metrics
        return {name: value for name, value in metrics.items() if not name.startswith(("reward/", "group/"))}

    def minibatches(self, experience: Experience) -> Iterator[Any]:
        """Yield this rank's rows of shuffled mini-batches, ``update_epochs`` times the whole rollout. All ranks.

        Mini-batches are drawn from the responses of all ranks, so they do not depend on how many ranks you use. Rows
        are distributed so that all ranks get about the same number of tokens. Mini-batches without a token to learn
        from are left out, because momentum alone would change the weights.
        """
        ranks = self.data_ranks
        if ranks.size > 1:  # all ranks' rows are kept in host memory
            experience = experience.map(lambda rows: ranks.gather(rows).cpu())
        rows: Any = self.select_training_rows(experience[experience.rollout.position.argsort(stable=True)])
        size = self.minibatch_size * len(rows) // len(experience)  # a row may contain several responses
        for epoch in range(self.update_epochs):
            order = shuffled(rows, self.order_seed(epoch), self.keep_groups)
            parts = order.split(size)
            if experience.rollout.is_given is not None:  # fewer responses than planned, at least one for each rank
                parts = order.tensor_split(min(len(parts), len(order) // ranks.size))
            for number, minibatch in enumerate(parts):
                shares = balanced_shares(rows.total_lengths.cpu()[minibatch].tolist(), ranks.size)
                own_rows = rows[minibatch[shares[ranks.rank]]].to(self.device)
                seed = derive_seed(self.order_seed(epoch, ranks.rank), "chosen", number)
                if self.data_ranks.sum(own_rows.mask.sum()):
                    yield self.with_selected_tokens(own_rows, seed)

    def order_seed(self, epoch: int, rank: int = 0) -> int:
        """Return the seed that shuffles the rows in an epoch of this step."""
        return derive_seed(run_seed(), "minibatches", self.trainer.global_step, rank, epoch)

    @classmethod
    def replaces(cls, *methods: str) -> bool:
        """Check whether this subclass overrides any of these methods."""
        return any(getattr(cls, method) is not getattr(RLHFModule, method) for method in methods)

    @property
    def selects_rows(self) -> bool:
        """Whether :meth:`select_training_rows` returns anything but the responses of the rollout."""
        return self.replaces("select_training_rows")

    def select_training_rows(self, experience: Experience) -> TensorBatch:
        """Return the rows that mini-batches are drawn from: all responses, unless you override this. All ranks.

        Args:
            experience: responses of all ranks, in the same order on every rank. Every rank must select the same rows.
        """
        return experience

    @torch.no_grad()
    def with_selected_tokens(self, minibatch: Experience, seed: int) -> Experience:
        """Mark the tokens of a mini-batch that the policy loss selects, if it selects any. All ranks."""
        if not self.policy_loss.selects_tokens:
            return minibatch
        scores = self.evaluated_actor(minibatch.rollout)
        tokens = PolicyTokens.of(scores.logprobs, minibatch.old_logprobs, minibatch.advantages, minibatch.mask)
        selected_tokens = self.policy_loss.select_tokens(
            tokens, scores.entropy, torch.Generator().manual_seed(seed), self.data_ranks
        )
        return replace(minibatch, selected_tokens=selected_tokens)

    def denominator(self, minibatch: Any) -> Tensor:
        """Count what summed losses are divided by, as a tensor of shape (). All ranks."""
        return self.aggregation.denominator(minibatch.mask, self.data_ranks)

    def aggregated(self, losses: Tensor, rows: Experience) -> Tensor:
        """Return the weighted sum of the tokens' losses, as a tensor of shape (), before :meth:`update` divides it."""
        return (losses.masked_fill(~rows.mask, 0) * self.aggregation.weights(rows.mask).to(losses.dtype)).sum()

    def losses(self) -> dict[str, SummedLoss]:
        """Return the summed loss of each role to update, in the order of the updates."""
        return {"actor": self.actor_loss}

    def actor_loss(self, rows: Experience, means: MeanAccumulator) -> Tensor:
        """Compute policy loss, entropy bonus and KL loss, summed over the tokens of some rows."""
        return self.policy_objective(rows, self.update_scores(rows), means)

    def update_scores(self, rows: Experience) -> ActorScores:
        """Return the actor's scores of the rows in an update, with gradient."""
        return self.actor_scores("actor", rows.rollout)

    def policy_objective(self, rows: Experience, scores: ActorScores, means: MeanAccumulator) -> Tensor:
        """Compute the loss of :meth:`actor_loss` from scores that :meth:`update_scores` returned."""
        losses = self.policy_losses(rows, scores, means)
        for added in self.added_losses:
            losses = losses + added(rows, means)
        return self.aggregated(losses, rows)

    def policy_losses(self, rows: Experience, scores: ActorScores, means: MeanAccumulator) -> Tensor:
        """Return the sum of policy loss, entropy bonus and KL loss of each token, (B, T)."""
        logprobs, mask = scores.logprobs, rows.mask
        policy, diagnostics = self.policy_loss(
            logprobs,
            rows.old_logprobs,
            rows.advantages,
            mask,
            selected_tokens=rows.selected_tokens,
            rollout_logprobs=rows.rollout.rollout_logprobs,
        )
        loss = policy = policy * self.importance_weights(logprobs, rows, means)
        if self.ent_coef > 0:
            loss = loss - self.ent_coef * scores.entropy
        if self.kl_loss.coef > 0:
            kl = self.kl_loss(logprobs, rows.ref_logprobs, mask, rows.old_logprobs)
            loss = loss + self.kl_loss.coef * kl
            means.add("loss/kl", kl, mask)
        means.add_approx_kl(diagnostics.pop("approx_kl"), mask)
        named = {"loss/policy": policy, "policy/entropy": scores.entropy}
        for name, values in (named | {f"policy/{name}": values for name, values in diagnostics.items()}).items():
            means.add(name, values, mask)
        return loss

    def importance_weights(self, logprobs: Tensor, rows: Experience, means: MeanAccumulator) -> Tensor:
        """Return the weights of the policy loss, (B, T). With bypass, compute them here from the current actor."""
        if not self.correction.bypass:
            return rows.weights
        engine, of_rows = rows.rollout.rollout_logprobs, self.corrected_rows(rows.rollout).unsqueeze(1)
        mask, sampled = rows.mask & of_rows, rows.rollout.response_mask & of_rows
        weights, accepted = self.correction.of_rows(logprobs.detach(), engine, mask)
        means.add("rollout_corr/weight_mean", weights, mask)
        means.add_rejected(accepted, mask)
        means.add("rollout_corr/kl_k1", engine - logprobs, sampled)
        means.add("rollout_corr/kl_k3", approx_kl(log_ratio_of(logprobs, engine)), sampled)
        return torch.where(of_rows, weights * accepted, 1.0)

    def exceeds_target_kl(self, results: dict[str, UpdateResult]) -> bool:
        """Check whether KL(old || new) of the actor's update exceeds ``target_kl``, the same on all ranks. All ranks.

        Raises:
            RuntimeError: you set ``target_kl``, but the actor's loss did not measure KL(old || new).
        """
        if self.target_kl is None or "actor" not in results or not results["actor"].stepped:
            return False
        kl = results["actor"].means.approx_kl(self.data_ranks)
        if kl is None:
            raise RunError(
                f"target_kl is {self.target_kl}, but the actor's loss of {type(self).__name__} does not measure a KL: "
                f"call means.add_approx_kl(kl, mask) in it, or set target_kl to null"
            )
        return kl > self.target_kl

    # -- from rollout to experience ---------------------------------------------------------------------------

    def expect_responses(self, number: int) -> None:
        """Set ``minibatch_size`` to the number of responses of a step, over all ranks, unless you configured it."""
        if self.takes_whole_steps:
            self.minibatch_size = number

    def receive(self, received: StepRollout | Rollout) -> None:
        """Take the rollout of this batch. This is where all training data enter the module.

        If you write a callback that calls this before each training and validation step, give it the class attribute
        ``provides_rollouts = True``, like RolloutLoop. Without such a callback, :meth:`setup` raises.

        Args:
            received: rollout of this rank, alone or with what else belongs to the step.
        """
        if isinstance(received, Rollout):
            received = StepRollout(received)
        if self.takes_whole_steps:
            self.expect_responses(int(self.data_ranks.sum(torch.tensor(len(received.rollout), device=self.device))))
        greedy = None if received.greedy is None else received.greedy.to(self.device)
        self._received = StepRollout(received.rollout.to(self.device), greedy, received.rewards)

    @property
    def teacher_sources(self) -> list[ModelSource] | None:
        """Sources of the models that read the prompts of RolloutLoop's ``teacher_prompt``. Without a teacher, None."""
        return None

    @property
    def waits_for_rewards(self) -> bool:
        """Whether rewards of the received rollout are still being computed."""
        return self._received is not None and self._received.rewards is not None

    def pop_rollout(self) -> StepRollout:
        """Return the rollout of this batch and forget it.

        Raises:
            RuntimeError: :meth:`receive` was not called for this batch.
        """
        if self._received is None:
            raise RunError(
                f"{type(self).__name__} has no rollout for this batch: a callback must call receive() before each step"
            )
        received, self._received = self._received, None
        self.last_rollout = received.rollout
        return received

    @torch.no_grad()
    def evaluate(self, received: StepRollout) -> Evaluation:
        """Compute log-probs, values, rewards and advantages of a rollout. All ranks."""
        ranks, rollout = self.data_ranks, received.rollout
        old_scores = self.old_scores(rollout)
        old = old_scores.evaluate(rollout)
        rollout = (received := received.evaluated(old.logprobs, self._allowed(rollout, old))).rollout
        of_ref = partial(self.actor_scores, "ref")
        ref_logprobs = self.micro_batches.map(of_ref, rollout)[0] if self.has_ref else old.logprobs
        values, final_values = self.values(rollout)
        started = time.perf_counter()
        rollout, reward_metrics = received.with_rewards()
        self.last_rollout = rollout
        waited = time.perf_counter() - started
        reward = self.total_reward(rollout)
        greedy_reward = None if received.greedy is None else self.total_reward(received.greedy)[rollout.group]
        policy_mask = rollout.response_mask & self.learned_rows(rollout, reward, greedy_reward).unsqueeze(1)
        weights, mask, metrics = self.corrected(old.logprobs, rollout, policy_mask)
        token_rewards = self.token_rewards(rollout, _without_missing(reward), old.logprobs, ref_logprobs)
        inputs = AdvantageInputs(
            token_rewards=token_rewards,
            mask=policy_mask,  # a rejected token still shows what its response earned
            group=rollout.group,
            values=values,
            final_values=final_values,
            rewards=rollout.rewards,
            greedy_reward=None if greedy_reward is None else _without_missing(greedy_reward),
            sum_pi_squared=old.sum_pi_squared,
            logprobs=old.logprobs if self.advantages.needs_sum_pi_squared or self.advantages.needs_ref else None,
            weights=weights,
            ref_logprobs=ref_logprobs if self.advantages.needs_ref else None,
            source=rollout.source,
        )
        advantages, returns = (values.masked_fill(~mask, 0) for values in self.advantages(inputs, ranks))
        metrics = reward_metrics | ({} if self.correction.bypass else metrics)
        if old.sum_pi_squared is not None:
            metrics |= gradient_power(advantages, old.logprobs, old.sum_pi_squared, mask, weights=weights, ranks=ranks)
        experience = Experience(
            rollout=rollout,
            reward=reward,
            old_logprobs=old.logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            token_rewards=token_rewards,
            advantages=advantages,
            returns=returns,
            mask=mask,
            weights=weights,
            selected_tokens=torch.zeros_like(mask),
            entropies=None if self.correction.bypass else old.entropy,
        )
        return Evaluation(experience, metrics, old_scores, reward_wait=waited)

    def _allowed(self, rollout: Rollout, old: TokenScores) -> AllowedTokens | None:
        """Return the tokens that limits allowed, from the engine or the actor's old scores. All ranks.

        With bypass, which has no old scores, each update finds those that the engine has not returned.
        """
        if not rollout.limits or (self.correction.bypass and self._finds_allowed(rollout)):
            return rollout.allowed
        allowed = rollout.allowed if old.allowed is None else old.allowed
        assert allowed is not None
        return of_all_ranks(allowed, self.data_ranks)

    def learned_rows(self, rollout: Rollout, reward: Tensor, greedy_reward: Tensor | None = None) -> Tensor:
        """Return which responses to learn from, (B,) bool: included ones with the reward that they need.

        A missing reward is not a reward of 0: the response counts in no group, baseline, mean or loss.

        Args:
            rollout: rows of this rank.
            reward: (B,) total reward, NaN for responses without one.
            greedy_reward: (B,) total reward of the greedy response to each prompt, or None if nothing needs it.
        """
        learned = rollout.included & self.has_reward(rollout, reward)
        return learned if greedy_reward is None else learned & ~greedy_reward.isnan()

    def has_reward(self, rollout: Rollout, reward: Tensor) -> Tensor:
        """Return which responses got the reward that their objective needs, (B,) bool. Some objectives need none."""
        return self.advantages.has_reward(reward, rollout.rewards)

    def corrected_rows(self, rollout: Rollout) -> Tensor:
        """Return the responses for which the gap between trainer and engine is measured and corrected, (B,) bool."""
        return rollout.sampled_rows

    def corrected(self, logprobs: Tensor, rollout: Rollout, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return the importance weights, the mask without rejected tokens, and metrics of the gap. All ranks.

        Args:
            logprobs: (B, T) log-probabilities of the actor before the first update.
            rollout: rows of this rank.
            mask: (B, T) bool, the tokens to learn from.
        """
        rows = self.corrected_rows(rollout).unsqueeze(1)
        weights, kept, metrics = self.correction(logprobs, rollout.rollout_logprobs, mask & rows, self.data_ranks)
        return torch.where(rows, weights, mask.to(weights.dtype)), torch.where(rows, kept, mask), metrics

    def old_scores(self, rollout: Rollout) -> OldScores:
        """Return the source of the actor's scores before the first update. All ranks."""
        if self.correction.bypass:
            return EngineScores()
        first = None
        is_simple = self.reuses_first_forward and rollout.is_given is None and not self._finds_allowed(rollout)
        if is_simple and self.losses().get("actor") == self.actor_loss:
            first = FirstForward.of_step(self, rollout, self.order_seed(0))
        return first or SeparatePass(self.evaluated_actor)

    def _finds_allowed(self, rollout: Rollout) -> bool:
        """Return whether the actor finds the tokens that limits allow, on any rank. All ranks."""
        unknown = torch.tensor(float(rollout.allowed is None), device=self.device)
        return bool(rollout.limits) and self.data_ranks.max(unknown).item() > 0

    @property
    def reuses_first_forward(self) -> bool:
        """Whether nothing needs the old log-probs of the first mini-batch before its update."""
        return not (
            self.update_epochs > 1
            or self.kl_reward.coef > 0
            or not self.correction.only_measures
            or self.advantages.needs_sum_pi_squared
            or self.advantages.needs_ref
            or self.policy_loss.selects_tokens
            or self.selects_rows
            or self.replaces("actor_loss", "minibatches", "old_scores", "token_rewards")
        )

    def evaluated_actor(self, rollout: Rollout) -> TokenScores:
        """Return the actor's scores of a rollout, (B, T) each, for losses and advantages. All ranks."""
        score = partial(self.actor_scores, "actor", squares=self.advantages.needs_sum_pi_squared)
        return TokenScores(*self.micro_batches.map(score, rollout))

    def token_rewards(self, rollout: Rollout, reward: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Put rewards at the last token of a response, or of its turn, and subtract each token's KL penalty, (B, T)."""
        kl = self.kl_reward(logprobs, ref_logprobs, rollout.response_mask, logprobs)
        steps = None if rollout.conversation is None else rollout.conversation.step_rewards
        return rewards_at_tokens(reward, rollout.response_mask, steps) - self.kl_coef * kl

    def values(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Return the critic's values, (B, T), and its values after truncated responses, (B,). Zeros without critic."""
        return torch.zeros_like(rollout.rollout_logprobs), None

    def total_reward(self, rollout: Rollout) -> Tensor:
        """Add the reward model's shaped score to the reward of the reward functions, (B,). All ranks.

        NaN marks a response without a reward. The reward model scores all responses except those with a failed reward.
        """
        if "reward_model" not in self.sources:
            return rollout.reward
        scores = self.score_shaping(self.scores(rollout), rollout.truncated)
        if not scores.isfinite().all():
            raise NonFiniteError("a score of the reward model is not finite; no weights were changed")
        total = _without_missing(rollout.reward) + scores
        return total if rollout.skipped is None else total.masked_fill(rollout.skipped, torch.nan)

    @torch.no_grad()
    def scores(self, rollout: Rollout) -> Tensor:
        """Return the reward model's score of each whole response, (B,), normalised but not shaped. All ranks."""

        def at_end(rows: Rollout) -> tuple[Tensor]:
            input_ids, _, packing = self.layout.lay_out(rows)
            ends = (rows.total_lengths - 1).unsqueeze(1)
            images = self.layout.images_of(rows)
            return (self.role_strategy.role("reward_model")(input_ids, ends, packing, images),)

        scores: Tensor = self.micro_batches.map(at_end, rollout)[0].squeeze(1)
        return scores

    def actor_scores(self, role: str, rollout: Rollout, squares: bool = False) -> TokenScores:
        """Return log-probs and entropies of the sampled tokens under a language-model role, (B, T) each.

        Args:
            role: ``actor`` or ``ref``. A reference without its own model is the actor without its adapters.
            rollout: rows to evaluate.
            squares: whether to return the sum of squared probabilities too.
        """
        scores: TokenScores = self.call_language_model(role, rollout, squares=squares)
        return scores

    def call_language_model(self, role: str, rollout: Rollout, mask: Tensor | None = None, **options: Any) -> Any:
        """Run a language-model role on the tokens of some rows. You get what :meth:`.CausalLM.forward` returns.

        Args:
            role: name of the role. One without its own model is the actor without its adapters.
            rollout: rows to evaluate.
            mask: (B, T) bool, the tokens to evaluate. None takes all that the policy sampled.
            **options: further arguments of the model.
        """
        input_ids, index, packing = self.layout.lay_out(rollout)
        adapters = role in self.sources
        limits: Any = rollout.allowed
        if limits is None and rollout.limits:
            limits = LimitedTokens(rollout.limits, rollout.sampled_rows.unsqueeze(1))
        return self.role_strategy.role(role if adapters else "actor")(
            input_ids,
            index,
            rollout.response_ids,
            rollout.response_mask if mask is None else mask,
            temperature=rollout.temperature,
            adapters=adapters,
            packing=packing,
            images=self.layout.images_of(rollout),
            limits=limits,
            experts=rollout.experts if role == "actor" else None,
            **options,
        )

    # -- models -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Raise if no callback provides rollouts."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        provided = any(getattr(callback, "provides_rollouts", False) for callback in callbacks)
        check_loops(type(self).__name__, int(provided), provided)

    def build_role(self, name: str) -> nn.Module:
        """Build a scalar model for the reward model, and language models for actor and reference."""
        if name == "reward_model":
            self.sources[name].expect_head()
            return self.sources[name].scalar()
        return self.sources[name].causal()

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """Return the optimizer and scheduler factories of the actor."""
        return self.optimizer, self.lr_scheduler

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return the reward model's scores of the validation rollout, if you use one. RolloutLoop logs the metrics."""
        rollout = self.pop_rollout().rollout
        if "reward_model" in self.sources:
            return {"scores": self.scores(rollout)}
        return {}


def as_policy_loss(loss: AnyPolicyLoss) -> PolicyLoss:
    """Return a policy loss.

    Args:
        loss: policy loss, a function of :class:`PolicyTokens`, or the reference of one, such as ``losses.py:my_loss``.

    Raises:
        ValueError: the function was not found, or is a class.
    """
    if isinstance(loss, PolicyLoss):
        return loss
    function = as_function(loss)
    if not callable(function):
        raise UsageError(f"policy_loss must be a policy loss, a function or its reference, got {function!r}")
    if isinstance(function, type):
        raise UsageError(f"policy_loss: {function.__name__} is a class: set class_path to it, or pass an object of it")
    return FunctionLoss(function)


def _without_missing(reward: Tensor) -> Tensor:
    """Replace missing rewards by 0; infinite ones remain, so that the check before the update finds them."""
    return reward.where(~reward.isnan(), 0.0)
