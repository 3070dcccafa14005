"""RLHFModule: actor, reference and reward model under one roof, and the step that learns from a rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_rlhf.batching.shares import balanced_shares
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.rollout_metrics import describe
from lightning_rlhf.modules.rollout_module import RolloutModule
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.objectives.aggregation import Aggregation, TokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss, approx_kl, log_ratio_of
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.seeding import derive_seed, run_seed
from lightning_rlhf.tensor_batch import TensorBatch
from lightning_rlhf.types import Experience, PromptBatch

log = logging.getLogger(__name__)


class RLHFModule(RolloutModule):
    """Learns from rollouts that a :class:`~lightning_rlhf.callbacks.RolloutLoop` hands over by :meth:`receive`.

    An algorithm is an advantage estimator, a policy loss and an aggregation; give others, or subclass this with other
    defaults. What needs more overrides :meth:`losses`.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        ref: the frozen policy that KL is measured to; None starts from the actor's own source. Loaded only where a
            KL term has a weight.
        reward_model: a scalar model whose score of each whole response is a reward; None uses reward functions only.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        aggregation: from the losses of tokens to one loss.
        correction: of what the engine's log-probabilities differ from the actor's; None only measures.
        actor_optimizer: makes the actor's optimizer from its parameters.
        actor_lr_scheduler: makes its scheduler, stepped once per rollout; None keeps the rate.
        kl_reward: KL to the reference subtracted from each token's reward. Its weight may be steered by a
            :class:`~lightning_rlhf.callbacks.KLControl` callback.
        kl_loss: KL to the reference added to the loss; estimator k1 is warned of, because its gradient is noise there.
        score_shaping: what becomes of the reward model's score.
        ent_coef: weight of the entropy bonus, at least 0.
        update_epochs: passes over each rollout, at least 1.
        minibatch_size: responses per optimizer step, over all ranks, at least 1.
        micro_batch_tokens: most padded tokens in one forward pass.
        max_grad_norm: gradients of each role are clipped to this global norm; None leaves them.
        target_kl: the updates still to come on a rollout are left out once the mean of KL(old || new), in nats per
            token, over a mini-batch and all ranks exceeds this; it is measured before that mini-batch's own update,
            which is still made; ``policy/updates`` in the log counts what was made. None never stops.
    """

    trained_roles: tuple[str, ...] = ("actor",)
    reads = PromptBatch
    learns_from_ref = False  # whether the loss itself compares with the reference, so that it is always loaded
    experience: Experience  # of the last step, for callbacks
    actor_updates = 0  # in the last step
    step_seconds: dict[str, float] | None = None  # of the last step's evaluation and update, where they were measured
    actor_learns = True  # in the last step; False while a critic warms up

    def __init__(
        self,
        actor: str | ModelSource,
        ref: str | ModelSource | None = None,
        reward_model: str | ModelSource | None = None,
        advantages: AdvantageEstimator = ReinforcePlusPlus(),
        policy_loss: PolicyLoss = ClippedPolicyLoss(),
        aggregation: Aggregation = TokenMean(),
        correction: RolloutCorrection | None = None,
        actor_optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01),
        actor_lr_scheduler: LRSchedulerCallable | None = None,
        kl_reward: KLTerm = KLTerm(),
        kl_loss: KLTerm = KLTerm(estimator="k3"),
        score_shaping: ScoreShaping = ScoreShaping(),
        ent_coef: float = 0.0,
        update_epochs: int = 1,
        minibatch_size: int = 64,
        micro_batch_tokens: int = 16384,
        max_grad_norm: float | None = 1.0,
        target_kl: float | None = None,
    ) -> None:
        correction = RolloutCorrection() if correction is None else correction
        needs_ref = self.learns_from_ref or kl_reward.coef > 0 or kl_loss.coef > 0
        super().__init__(
            actor,
            (actor if ref is None else ref) if needs_ref else None,
            reward_model,
            advantages,
            correction,
            kl_reward,
            score_shaping,
            micro_batch_tokens,
            max_grad_norm,
        )
        for name, value in (("update_epochs", update_epochs), ("minibatch_size", minibatch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if ent_coef < 0:
            raise ValueError(f"ent_coef must be at least 0, got {ent_coef}")
        if correction.bypass and correction.level is not None and policy_loss.uses_ratio:
            raise ValueError(
                f"with bypass, the ratio of {type(policy_loss).__name__} is the importance weight already: "
                f"take ReinforceLoss, or level null"
            )
        self.policy_loss, self.aggregation = policy_loss, aggregation
        self.actor_optimizer, self.actor_lr_scheduler = actor_optimizer, actor_lr_scheduler
        self.kl_loss, self.ent_coef = kl_loss, ent_coef
        self.update_epochs, self.minibatch_size, self.target_kl = update_epochs, minibatch_size, target_kl

    # -- the step ---------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Learn from one rollout."""
        started = time.perf_counter()
        experience = self.experience = self.evaluate(*self.take_rollout())
        evaluated = time.perf_counter()
        sums, updates = Sums(), 0
        for minibatch in self.minibatches(experience):
            if not self.roles.sum_over_ranks(minibatch.mask.sum()):
                continue  # on every rank: nothing to learn, and momentum alone would move the weights
            of_minibatch = Sums()
            for role, loss in self.losses().items():
                norm = self.update(role, minibatch, loss, self.denominator(minibatch), of_minibatch)
                of_minibatch.add(f"grad_norm/{role}", norm)
                updates += role == "actor"
            sums.merge(of_minibatch)
            if self.strayed(of_minibatch):
                break
        metrics = {
            **describe(experience, self.known_roles, self.roles.sum_over_ranks, self.roles.max_over_ranks),
            **self.measured,
            **self.reduced(sums),
            "kl/coef": self.kl_coef,
        }
        if self.correction.bypass:  # both are the engine's
            del metrics["rollout/logprob_diff_mean"], metrics["rollout/logprob_diff_max"]
        metrics["policy/updates"] = self.actor_updates = updates  # fewer where target_kl stopped them
        self.step_seconds = {"evaluate": evaluated - started, "update": time.perf_counter() - evaluated}
        metrics |= {f"time/{part}_s": seconds for part, seconds in self.step_seconds.items()}
        rewards = [f"reward/{name}" for name in experience.rollout.rewards]
        self.finish_step(metrics, bar=("reward/mean", "kl/ref", *rewards))

    def minibatches(self, experience: Experience) -> Iterator[Any]:
        """This rank's rows of shuffled mini-batches, the rollout gone through ``update_epochs`` times. All ranks.

        A mini-batch is drawn from the responses of all ranks, so it is the same one whatever their number, and dealt
        out anew, so that all ranks have about as much to do.
        """
        if self.roles.data_ranks > 1:  # all ranks' rows are kept where there is room for them
            experience = experience.map(lambda rows: self.roles.gather_over_ranks(rows).cpu())
        learnt: Any = self.learnt_from(experience[experience.rollout.place.argsort(stable=True)])
        size = self.minibatch_size * len(learnt) // len(experience)  # a row may stand for several responses
        for epoch in range(self.update_epochs):
            step = ("minibatches", self.trainer.global_step)
            generator = torch.Generator().manual_seed(derive_seed(run_seed(), *step, 0, epoch))
            order = torch.randperm(len(learnt), generator=generator)
            for number, rows in enumerate(order.split(size)):
                lengths = learnt.total_lengths.cpu()[rows].tolist()
                shares = balanced_shares(lengths, self.roles.data_ranks)
                share = learnt[rows[shares[self.roles.data_rank]]].to(self.device)
                chosen = derive_seed(derive_seed(run_seed(), *step, self.roles.data_rank, epoch), "chosen", number)
                yield self.with_choice(share, chosen)

    def learnt_from(self, experience: Experience) -> TensorBatch:
        """The responses to draw mini-batches from: all of them; subclasses may choose others, or pairs. All ranks.

        Args:
            experience: of the responses of all ranks, in one order; every rank must make the same of it.
        """
        return experience

    @torch.no_grad()
    def with_choice(self, minibatch: Experience, seed: int) -> Experience:
        """The mini-batch with the tokens that the policy loss wants to treat specially, if it does."""
        if not self.policy_loss.chooses_tokens:
            return minibatch
        logprobs = self.by_rows(partial(self.actor_scores, "actor"), minibatch.rollout)[0]
        generator = torch.Generator().manual_seed(seed)
        tensors = logprobs, minibatch.old_logprobs, minibatch.advantages, minibatch.mask
        chosen = self.policy_loss.choose(*tensors, generator, self.roles.sum_over_ranks)
        return replace(minibatch, chosen=chosen)

    def denominator(self, minibatch: Any) -> Tensor:
        """What summed losses are divided by, over all ranks."""
        return self.aggregation.denominator(minibatch.mask, self.roles.sum_over_ranks)

    def aggregated(self, losses: Tensor, rows: Experience) -> Tensor:
        """Weighted sum of the tokens' losses; :meth:`update` divides it."""
        return (losses.masked_fill(~rows.mask, 0) * self.aggregation.weights(rows.mask).to(losses.dtype)).sum()

    def losses(self) -> dict[str, Callable[[Any, Sums], Tensor]]:
        """For each role to update, in that order: the summed loss of some rows, which adds metrics of them."""
        return {"actor": self.actor_loss}

    def actor_loss(self, rows: Experience, sums: Sums) -> Tensor:
        """Policy loss, entropy bonus and KL loss, summed over the tokens of some rows."""
        logprobs, entropy, _ = self.actor_scores("actor", rows.rollout)
        policy, diagnostics = self.policy_loss(logprobs, rows.old_logprobs, rows.advantages, rows.mask, rows.chosen)
        diagnostics = {"approx_kl": approx_kl(log_ratio_of(logprobs, rows.old_logprobs)), **diagnostics}
        policy = policy * self.importance_weights(logprobs, rows, sums)
        loss = policy - self.ent_coef * entropy
        if self.kl_loss.coef > 0:
            kl = self.kl_loss(logprobs, rows.ref_logprobs, rows.mask, rows.old_logprobs)
            loss = loss + self.kl_loss.coef * kl
            sums.add("loss/kl", kl, rows.mask)
        sums.add("loss/policy", policy, rows.mask)
        sums.add("policy/entropy", entropy, rows.mask)
        sums.add_approx_kl(diagnostics.pop("approx_kl"), rows.mask)
        for name, values in diagnostics.items():
            sums.add(f"policy/{name}", values, rows.mask)
        return self.aggregated(loss, rows)

    def importance_weights(self, logprobs: Tensor, rows: Experience, sums: Sums) -> Tensor:
        """(B, T) what multiplies the policy loss: worked out with the experience, or where that asked no actor, now."""
        if not self.correction.bypass:
            return rows.weights
        engine = rows.rollout.rollout_logprobs
        weights, kept = self.correction.of_rows(logprobs.detach(), engine, rows.mask)
        sums.add("rollout_corr/weight_mean", weights, rows.mask)
        sums.add("rollout_corr/rejected_fraction", (~kept).float(), rows.mask)
        sums.add("rollout_corr/kl_k1", engine - logprobs, rows.rollout.response_mask)
        sums.add("rollout_corr/kl_k3", approx_kl(log_ratio_of(logprobs, engine)), rows.rollout.response_mask)
        return weights * kept

    def strayed(self, of_minibatch: Sums) -> bool:
        """Whether the policy has moved beyond ``target_kl``; reduced first, so every rank gets the same answer.

        Raises:
            RuntimeError: there is a target, and the loss of the actor measured no KL.
        """
        if self.target_kl is None or not self.actor_learns:
            return False
        kl = of_minibatch.approx_kl(self.roles.sum_over_ranks)
        if kl is None:
            raise RuntimeError(
                f"target_kl is {self.target_kl}, and the actor's loss of {type(self).__name__} measures no KL: call "
                f"sums.add_approx_kl(kl, mask) in it, or set target_kl to null"
            )
        return kl > self.target_kl

    # -- models -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Say what is legal and useless."""
        super().setup(stage)
        if self.kl_loss.coef > 0 and self.kl_loss.estimator == "k1" and not self.kl_loss.importance:
            log.warning(
                "kl_loss with estimator k1 does not hold the actor, its gradient is zero on average: take k2 or k3"
            )

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """The actor's."""
        return self.actor_optimizer, self.actor_lr_scheduler
