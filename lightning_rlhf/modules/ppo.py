"""PPO: an actor, and a critic that predicts the return of each token."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.loading import ModelSource, as_source
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.micro_batches import SummedLoss
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.objectives.resampling import ScoreResampling
from lightning_rlhf.objectives.value_losses import ClippedValueLoss
from lightning_rlhf.ranges import check_range
from lightning_rlhf.types import Experience, Rollout


class PPOModule(RLHFModule):
    """Proximal policy optimization with a learned critic (Schulman et al. 2017; for language, Ouyang et al. 2022).

    The critic predicts the return at each token, so you train two models.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        critic: initial weights of the critic: ``reward_model`` or ``actor`` for that role's source, else a source. None
            takes the reward model if there is one, else the actor.
        critic_optimizer: factory that makes the critic's optimizer from its parameters.
        critic_lr_scheduler: factory of its scheduler, stepped once per rollout. None keeps the rate constant.
        value_loss: loss of each token from its value and return.
        vf_coef: weight of the value loss, positive.
        critic_warmup_steps: how many of the first rollouts update only the critic, at least 0.
        advantages: how rewards and values become advantages.
        resampling: draws the responses to train on by their rewards (PF-PPO). None takes each once.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    trained_roles = ("actor", "critic")

    def __init__(
        self,
        actor: str | ModelSource,
        critic: str | ModelSource | None = None,
        critic_optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01),
        critic_lr_scheduler: LRSchedulerCallable | None = None,
        value_loss: ClippedValueLoss = ClippedValueLoss(),
        vf_coef: float = 1.0,
        critic_warmup_steps: int = 0,
        advantages: AdvantageEstimator = GAE(),
        resampling: ScoreResampling | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, **kwargs)
        if not advantages.needs_critic:
            raise UsageError(
                f"{type(self).__name__} needs an advantage estimator with a critic such as GAE, got "
                f"{type(advantages).__name__}: use the module of that algorithm, or RLHFModule"
            )
        check_range("vf_coef", vf_coef, "positive")
        check_range("critic_warmup_steps", critic_warmup_steps, "at least 0")
        start = critic or ("reward_model" if "reward_model" in self.sources else "actor")
        if start == "reward_model" and start not in self.sources:
            raise UsageError("critic: reward_model needs a reward_model to start from; give one, or set critic: actor")
        if start in ("actor", "reward_model"):
            self.sources["critic"] = self.sources[start]
        else:
            self.sources["critic"] = as_source(start)
        self.critic_optimizer, self.critic_lr_scheduler = critic_optimizer, critic_lr_scheduler
        self.value_loss = value_loss
        self.vf_coef = vf_coef
        self.critic_warmup_steps = critic_warmup_steps
        self.resampling = resampling

    @property
    def selects_rows(self) -> bool:
        """Whether ``resampling`` or a subclass leaves out or repeats responses."""
        is_own = type(self).select_training_rows is not PPOModule.select_training_rows
        return is_own or self.resampling is not None

    def select_training_rows(self, experience: Experience) -> Experience:
        """Return all responses, or those that ``resampling`` draws."""
        if self.resampling is None:
            return experience
        seed = derive_seed(run_seed(), "resampling", self.trainer.global_step, 0)
        rows = experience.mask.any(dim=1).nonzero().squeeze(1)
        if not len(rows):
            return experience
        reward, generator = experience.reward[rows], torch.Generator().manual_seed(seed)
        return experience[rows[self.resampling(reward, generator, len(experience))]]

    def losses(self) -> dict[str, SummedLoss]:
        """Return the losses of critic and actor; only the critic's during warm-up."""
        is_warm_up = self.trainer.global_step < self.critic_warmup_steps
        return {"critic": self.critic_loss, **({} if is_warm_up else super().losses())}

    def critic_loss(self, rows: Experience, means: MeanAccumulator) -> Tensor:
        """Compute the value loss, summed over the tokens of some rows."""
        losses, diagnostics = self.value_loss(self.critic_values(rows.rollout)[0], rows.values, rows.returns)
        means.add("loss/value", losses, rows.mask)
        means.add("value/clip_fraction", diagnostics["clip_fraction"], rows.mask)
        return self.vf_coef * self.aggregated(losses, rows)

    def critic_values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return (B, T) the critic's value before each response token, and (B,) after the last one."""
        input_ids, index, packing = self.layout.lay_out(rollout)
        after_last = (rollout.total_lengths - 1).unsqueeze(1)
        positions, images = torch.cat([index, after_last], dim=1), self.layout.images_of(rollout)
        values = self.role_strategy.role("critic")(input_ids, positions, packing, images)
        return values[:, :-1], values[:, -1]

    def values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return the values before the update, 0 where the mask is False, and those after truncated responses."""
        values, final_values = self.micro_batches.map(self.critic_values, rollout)
        return values.masked_fill(~rollout.response_mask, 0), final_values.masked_fill(~rollout.truncated, 0)

    def build_role(self, name: str) -> nn.Module:
        """Build the scalar model of the critic, or another role's model."""
        if name == "critic":
            return self.sources[name].scalar()
        return super().build_role(name)

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """Return the optimizer and scheduler factories of a role."""
        if name == "critic":
            return self.critic_optimizer, self.critic_lr_scheduler
        return super().optimizer_of(name)
