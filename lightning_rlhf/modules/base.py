"""RLHFModule: actor, reference and reward model under one roof, and the step that learns from a rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rlhf.batching.micro import token_budget_batches
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.models.loading import ModelSource, as_source
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.modules.rollout_metrics import describe
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.seeding import derive_seed, run_seed
from lightning_rlhf.types import Experience, PromptBatch, Rollout

log = logging.getLogger(__name__)


class RLHFModule(RoleModule):
    """Learns from rollouts that a :class:`~lightning_rlhf.callbacks.RolloutLoop` hands over by :meth:`receive`.

    Subclass it for a new algorithm: override the defaults, :meth:`advantages_of`, or :meth:`losses`.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        ref: the frozen policy that KL is measured to; None starts from the actor's own source. Loaded only where a
            KL term has a weight.
        reward_model: a scalar model whose score of each whole response is a reward; None uses reward functions only.
        advantages: from token rewards and values to advantages and returns.
        policy_loss: from log-probabilities and advantages to a loss per token.
        actor_optimizer: makes the actor's optimizer from its parameters.
        actor_lr_scheduler: makes its scheduler, stepped once per rollout; None keeps the rate.
        kl_reward: KL to the reference subtracted from each token's reward. Its weight may be steered by a
            :class:`~lightning_rlhf.callbacks.KLControl` callback.
        kl_loss: KL to the reference added to the loss; estimator k1 is warned of, because its gradient is noise there.
        score_shaping: what becomes of the reward model's score.
        ent_coef: weight of the entropy bonus, at least 0.
        update_epochs: passes over each rollout, at least 1.
        minibatch_size: responses per optimizer step, at least 1.
        micro_batch_tokens: most padded tokens in one forward pass.
        max_grad_norm: gradients of each role are clipped to this global norm; None leaves them.
        target_kl: the updates still to come on a rollout are left out once the mean of KL(old || new), in nats per
            token, over a mini-batch and all ranks exceeds this; it is measured before that mini-batch's own update,
            which is still made; ``policy/updates`` in the log counts what was made. None never stops.
    """

    trained_roles: tuple[str, ...] = ("actor",)
    experience: Experience  # of the last step, for callbacks
    actor_learns = True  # in the last step; False while a critic warms up

    def __init__(
        self,
        actor: str | ModelSource,
        ref: str | ModelSource | None = None,
        reward_model: str | ModelSource | None = None,
        advantages: GAE = GAE(),
        policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(),
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
        super().__init__(micro_batch_tokens, max_grad_norm)
        for name, value in (("update_epochs", update_epochs), ("minibatch_size", minibatch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if ent_coef < 0:
            raise ValueError(f"ent_coef must be at least 0, got {ent_coef}")
        self.sources = {"actor": as_source(actor)}
        if kl_reward.coef > 0 or kl_loss.coef > 0:
            self.sources["ref"] = self.sources["actor"] if ref is None else as_source(ref)
        if reward_model is not None:
            self.sources["reward_model"] = as_source(reward_model)
        self.frozen_roles = tuple(name for name in ("ref", "reward_model") if name in self.sources)
        self.advantages, self.policy_loss = advantages, policy_loss
        self.actor_optimizer, self.actor_lr_scheduler = actor_optimizer, actor_lr_scheduler
        self.kl_reward, self.kl_loss, self.kl_coef = kl_reward, kl_loss, kl_reward.coef
        self.score_shaping, self.ent_coef = score_shaping, ent_coef
        self.update_epochs, self.minibatch_size, self.target_kl = update_epochs, minibatch_size, target_kl
        self._rollout: Rollout | None = None

    # -- the step ---------------------------------------------------------------------------------------------

    def receive(self, rollout: Rollout) -> None:
        """Take over the rollout of this batch; the only way experience enters the module.

        The callback that calls this before each training and validation step says so by a class attribute
        ``hands_over_rollouts = True``, as RolloutLoop does; without one the module refuses to run.
        """
        self._rollout = rollout.to(self.device)

    def take_rollout(self) -> Rollout:
        """Give up the rollout of this batch.

        Raises:
            RuntimeError: nobody handed one over.
        """
        if self._rollout is None:
            raise RuntimeError(
                f"{type(self).__name__} has no rollout for this batch: "
                f"the callback that hands them over must call receive() before each step"
            )
        rollout, self._rollout = self._rollout, None
        return rollout

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Learn from one rollout."""
        started = time.perf_counter()
        experience = self.experience = self.evaluate(self.take_rollout())
        evaluated = time.perf_counter()
        sums, updates = Sums(), 0
        for minibatch in self.minibatches(experience):
            of_minibatch = Sums()
            for role, loss in self.losses(of_minibatch).items():
                norm = self.update(role, minibatch, loss, denominator=minibatch.mask.sum())
                of_minibatch.add(f"grad_norm/{role}", norm)
                updates += role == "actor"
            sums.merge(of_minibatch)
            if self.strayed(of_minibatch):
                break
        metrics = {**describe(experience, self.roles.sum_over_ranks), **self.reduced(sums), "kl/coef": self.kl_coef}
        metrics["policy/updates"] = updates  # fewer where target_kl stopped them
        if "ref" not in self.sources:
            del metrics["kl/ref"]  # 0 would read as no drift
        metrics |= {"time/evaluate_s": evaluated - started, "time/update_s": time.perf_counter() - evaluated}
        rewards = [f"reward/{name}" for name in experience.rollout.rewards]
        self.finish_step(metrics, bar=("reward/mean", "kl/ref", *rewards))

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """Shuffled mini-batches, the rollout gone through ``update_epochs`` times."""
        for epoch in range(self.update_epochs):
            seed = derive_seed(run_seed(), "minibatches", self.trainer.global_step, self.global_rank, epoch)
            order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed))
            for rows in order.split(self.minibatch_size):
                yield experience[rows]

    def losses(self, sums: Sums) -> dict[str, Any]:
        """The summed loss of some rows for each role to update, in that order; metrics are added to ``sums``."""
        return {"actor": partial(self.actor_loss, sums=sums)}

    def actor_loss(self, rows: Experience, sums: Sums) -> Tensor:
        """Policy loss, entropy bonus and KL loss, summed over the tokens of some rows."""
        logprobs, entropy = self.actor_logprobs("actor", rows.rollout)
        policy, diagnostics = self.policy_loss(logprobs, rows.old_logprobs, rows.advantages)
        loss = policy - self.ent_coef * entropy
        if self.kl_loss.coef > 0:
            kl = kl_estimate(logprobs, rows.ref_logprobs, self.kl_loss.estimator)
            loss = loss + self.kl_loss.coef * kl
            sums.add("loss/kl", kl, rows.mask)
        sums.add("loss/policy", policy, rows.mask)
        sums.add("policy/entropy", entropy, rows.mask)
        for name, values in diagnostics.items():
            sums.add("kl/approx" if name == "approx_kl" else f"policy/{name}", values, rows.mask)
        return loss.masked_fill(~rows.mask, 0).sum()

    def strayed(self, of_minibatch: Sums) -> bool:
        """Whether the policy has moved beyond ``target_kl``; reduced first, so every rank gets the same answer."""
        if self.target_kl is None:
            return False
        return self.reduced(of_minibatch).get("kl/approx", 0.0) > self.target_kl

    # -- from what happened to what to learn ------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, rollout: Rollout) -> Experience:
        """Ask every model about a rollout and work out rewards and advantages."""
        old_logprobs, _ = self.by_rows(partial(self.actor_logprobs, "actor"), rollout)
        ref_logprobs = old_logprobs
        if "ref" in self.sources:
            ref_logprobs, _ = self.by_rows(partial(self.actor_logprobs, "ref"), rollout)
        mask = rollout.response_mask
        kl = kl_estimate(old_logprobs, ref_logprobs, self.kl_reward.estimator).masked_fill(~mask, 0)
        token_rewards = -self.kl_coef * kl
        # On the policy's last token: what an environment wrote behind it is passed over, and so would be its reward.
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1, keepdim=True)
        reward = self.total_reward(rollout)
        token_rewards.scatter_add_(1, last, reward.unsqueeze(1))
        values = self.values(rollout)
        advantages, returns = self.advantages_of(rollout, token_rewards, values)
        return Experience(rollout, reward, old_logprobs, ref_logprobs, values, token_rewards, advantages, returns)

    def advantages_of(self, rollout: Rollout, token_rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns, (B, T) each."""
        return self.advantages(token_rewards, values, rollout.response_mask, self.roles.sum_over_ranks)

    def values(self, rollout: Rollout) -> Tensor:
        """(B, T) the critic's values; zeros without one."""
        return torch.zeros_like(rollout.rollout_logprobs)

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

        return self.by_rows(at_end, rollout)[0].squeeze(1)

    def actor_logprobs(self, role: str, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities of the sampled tokens under a language-model role, and entropies."""
        input_ids, index = join(rollout)
        mask = rollout.response_mask
        return self.roles.role(role)(input_ids, index, rollout.response_ids, mask, rollout.temperature)

    def by_rows(self, function: Any, rollout: Rollout) -> tuple[Tensor, ...]:
        """Apply a function of a rollout to micro-batches of it and put the results back in order."""
        parts = token_budget_batches(rollout.total_lengths, self.micro_batch_tokens)
        outputs = [function(rollout[rows]) for rows in parts]
        back = torch.argsort(torch.cat(parts))
        return tuple(torch.cat(column)[back.to(column[0].device)] for column in zip(*outputs, strict=True))

    # -- models -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse a run without rollouts, and models that read other token ids, before any of them is loaded."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(getattr(callback, "hands_over_rollouts", False) for callback in callbacks):
            raise ValueError(
                f"{type(self).__name__} learns from rollouts, and no callback hands them over: "
                f"add lightning_rlhf.callbacks.RolloutLoop to trainer.callbacks"
            )
        if self.kl_loss.coef > 0 and self.kl_loss.estimator == "k1":
            log.warning(
                "kl_loss with estimator k1 does not hold the actor, its gradient is zero on average: take k2 or k3"
            )
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        check_vocabularies({f"the {name}": source for name, source in self.sources.items()}, tokenizer)

    def build_role(self, name: str) -> nn.Module:
        """The language models of actor and reference, the scalar model of the reward model."""
        source = self.sources[name]
        return source.scalar() if name == "reward_model" else source.causal()

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """The actor's."""
        return self.actor_optimizer, self.actor_lr_scheduler

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """Score one validation rollout; the RolloutLoop handed it over and makes the metrics."""
        rollout = self.take_rollout()
        return {"scores": self.scores(rollout)} if "reward_model" in self.sources else {}
