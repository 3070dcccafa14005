"""Validation of a run with RolloutLoop, before anything is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.models.positions import check_positions
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.function import RewardFunction, check_rewards
from lightning_rlhf.rollout.collect import Collector
from lightning_rlhf.types import PromptBatch

if TYPE_CHECKING:
    from .rollout_loop import RolloutLoop

log = logging.getLogger(__name__)


def check_run(loop: RolloutLoop, trainer: Trainer, module: RLHFModule) -> None:
    """Validate loop, module, data and strategy; warn about doubtful settings.

    Raises:
        ValueError: they do not fit together.
    """
    data = trainer.datamodule
    if not isinstance(module, RLHFModule) or not isinstance(data, PromptDataModule):
        raise ValueError("RolloutLoop needs an RLHFModule (PPOModule, ...) and a PromptDataModule")
    if not loop.rewards and "reward_model" not in module.sources:
        raise ValueError("no reward is configured: set RolloutLoop.rewards or the module's reward_model")
    check_rewards(loop.rewards, sorted({name for batch in _first_prompts(data) for name in batch.columns}))
    for reward in loop.rewards:
        for line in missing_columns(reward, data):
            log.warning("%s", line)
    if loop.val_metric is not None and loop.val_metric not in [reward.label for reward in loop.rewards]:
        labels = [reward.label for reward in loop.rewards]
        raise ValueError(f"val_metric must be the name of a reward, one of {labels}, got {loop.val_metric!r}")
    if module.advantages.needs_groups and loop.group_size < 2:
        raise ValueError(
            f"{type(module.advantages).__name__} compares the responses to one prompt: "
            f"group_size must be at least 2, got {loop.group_size}"
        )
    if loop.dynamic_sampling is not None:
        loop.dynamic_sampling.check(data.batch_size, loop.group_size, loop.rewards, module.advantages)
    responses = (prompts := loop.prompts_per_step(data)) * loop.group_size
    updates = responses / module.minibatch_size * module.update_epochs
    if updates > 1 and not module.policy_loss.uses_ratio and module.correction.level is None:
        log.warning("%s is correct for one update per rollout, this run makes %g", module.policy_loss, updates)
    if responses % module.minibatch_size:
        fitting = [size for size in range(1, responses + 1) if responses % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - module.minibatch_size))
        raise ValueError(
            f"minibatch_size {module.minibatch_size} does not divide the {responses} responses of a step "
            f"({prompts} prompts x group_size {loop.group_size}); {nearest} would"
        )
    roles = {f"the {name}": source for name, source in module.sources.items()}
    check_positions(roles, data.longest_text, loop.max_response_tokens)
    _check_ranks(loop, data, module)
    for batch in _first_prompts(data)[:1]:
        Collector(batch, loop.reward_executor, data.tokenizer, size=3 - len(batch)).dry_run()
    splitting = tensor_ranks(trainer, module)
    if loop._engine_choice != "auto" and loop._engine_choice.ranks % splitting:
        raise ValueError(
            f"{splitting} ranks split the actor between them and hold the same prompts, so they must share one engine: "
            f"set engine: auto, or wrap it in SharedEngine with ranks: {splitting}"
        )


def _first_prompts(data: PromptDataModule) -> list[PromptBatch]:
    """Return the first two prompts of the training data, then of the validation data."""
    firsts = [examples[:2] for examples in data.examples.values() if examples]
    return [data.collate(rows, list(range(len(rows))), [], 0) for rows in firsts]


def missing_columns(reward: RewardFunction, data: PromptDataModule) -> list[str]:
    """Return a line for each column that a reward function needs and some rows lack."""
    parts = [(data.reports[name], examples) for name, examples in data.examples.items()]
    lines = [
        reward.missing_columns([row.columns for row in rows], report.name, report.locations) for report, rows in parts
    ]
    return [line for part in lines for line in part]


def tensor_ranks(trainer: Trainer, module: RLHFModule) -> int:
    """Return the number of ranks that split each tensor of a model and have the same prompts."""
    return trainer.world_size // module.data_ranks.size


def _check_ranks(loop: RolloutLoop, data: PromptDataModule, module: RLHFModule) -> None:
    """Raise if a rank would have no prompt in a batch, or no response in a mini-batch."""
    ranks = module.data_ranks.size
    if data.batch_size < ranks or module.minibatch_size < ranks:
        raise ValueError(
            f"batch_size {data.batch_size} and minibatch_size {module.minibatch_size} count over all {ranks} ranks: "
            f"give at least {ranks} of each"
        )
    if loop.dynamic_sampling is not None and (
        data.batch_size % ranks or loop.dynamic_sampling.prompts_per_step % ranks
    ):
        raise ValueError(
            f"with dynamic sampling {ranks} ranks share batch_size {data.batch_size} and prompts_per_step "
            f"{loop.prompts_per_step(data)} equally: give multiples of {ranks}"
        )
