"""Checks of a run: the module of a callback, settings and data of rollouts, log-probs of engine and actor."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.positions import check_positions
from lightning_rlhf.modules.rlhf import RLHFModule, TrainedStep
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import CONVERSATION_COLUMNS, ENVIRONMENT, RewardFunction, check_rewards
from lightning_rlhf.rollout.engine import RolloutEngine, engine_dtype
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.run_checks import check_group_size, check_loops, check_minibatch_size, check_val_metric
from lightning_rlhf.types import Rollout

log = logging.getLogger(__name__)
_MEAN_SHARE = 1 / 20  # bound of the mean difference of log-probs, as a fraction of the bound for 99 of 100 tokens
# Bounds for 99 of 100 tokens and of the mean, nats. Those of float32 on a GPU were not measured. On a CPU, SmolLM2-135M
# in bf16-mixed differs from the engine's bfloat16 by 0.037 to 0.057 on average, and by 0.23 or more if one of the
# matrices of its layers is lost.
_BOUNDS = {("float32", "cpu"): (1e-3, 5e-5), ("bfloat16", "cpu"): (1.0, 0.1), ("float32", "cuda"): (1e-2, 5e-4)}
_BFLOAT16_BOUNDS = (1.0, 0.05)


def check_at_least(least: float, **values: float) -> None:
    """Validate the lower bound of arguments.

    Raises:
        ValueError: a value is smaller than ``least``.
    """
    for name, value in values.items():
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")


def tensor_ranks(trainer: Trainer, module: RLHFModule) -> int:
    """Return the number of ranks that split each tensor of a model and have the same prompts."""
    return trainer.world_size // module.data_ranks.size


def check_module(callback: Callback, module: LightningModule, kind: type[LightningModule]) -> None:
    """Validate the class of the module that a callback is used with.

    Raises:
        ValueError: the module is not derived from ``kind``.
    """
    if not isinstance(module, kind):
        raise UsageError(
            f"{type(callback).__name__} needs a lightning_rlhf {kind.__name__} (PPOModule, GRPOModule, ...), got "
            f"{type(module).__name__}: remove the callback"
        )


def last_step_of(callback: Callback, module: RLHFModule) -> TrainedStep:
    """Return the last training step of a module, for a callback that needs it.

    Raises:
        RuntimeError: the module's ``training_step`` has not set it.
    """
    if module.last_step is None:
        raise RunError(
            f"{type(callback).__name__} needs the results of the step, but training_step of {type(module).__name__} "
            f"does not set last_step: call finish_rollout in it, or remove the callback"
        )
    return module.last_step


def check_reward_functions(
    rewards: list[RewardFunction],
    executor: RewardExecutor,
    data: PromptDataModule,
    environment: EnvironmentSettings | None = None,
) -> None:
    """Validate reward functions against the first rows of the data, and call them once; warn about missing columns.

    Arguments and errors are those of :func:`call_reward_functions`.
    """
    call_reward_functions(rewards, executor, data, environment)
    for reward in rewards:
        for line in missing_columns(reward, data):
            log.warning("%s", line)


def call_reward_functions(
    rewards: list[RewardFunction],
    executor: RewardExecutor,
    data: PromptDataModule,
    environment: EnvironmentSettings | None = None,
) -> None:
    """Validate reward functions against the first rows of the data, and call them once.

    Args:
        rewards: reward functions of the run; may be empty.
        executor: executor of these functions.
        data: data module that was set up.
        environment: environment of the run, whose conversations are then passed to the functions, too.

    Raises:
        ValueError: names of rewards are not valid, a column is missing, or a function cannot be called.
    """
    firsts = [examples[:2] for examples in data.examples.values() if examples]
    batches = [data.collate(rows, list(range(len(rows))), [], 0) for rows in firsts]
    columns = sorted({name for batch in batches for name in batch.columns})
    check_rewards(rewards, columns, [] if environment is None else CONVERSATION_COLUMNS)
    for batch in batches[:1]:
        Scorer(batch, executor, data.tokenizer, samples=3 - len(batch), environment=environment).dry_run()


def missing_columns(reward: RewardFunction, data: PromptDataModule) -> list[str]:
    """Return a line for each column that a reward function needs and some rows lack."""
    lines = []
    for name, examples in data.examples.items():
        report = data.reports[name]
        lines += reward.missing_columns([row.columns for row in examples], report.name, report.locations)
    return lines


def reward_weights(loop: Any) -> dict[str, float]:
    """Return the weight of each reward of a RolloutLoop by its name."""
    weights = {reward.label: reward.weight for reward in loop.rewards}
    return weights if loop.environment is None else {**weights, ENVIRONMENT: loop.environment.weight}


def check_rollouts(loop: Any, trainer: Trainer, module: RLHFModule) -> None:
    """Validate loop, module, data and strategy; warn about doubtful settings.

    Args:
        loop: RolloutLoop of the run, whose module imports this one.
        trainer: trainer of the run.
        module: module of the run.

    Raises:
        ValueError: the settings are incompatible.
    """
    data = trainer.datamodule
    if not isinstance(module, RLHFModule) or not isinstance(data, PromptDataModule):
        raise UsageError("RolloutLoop needs an RLHFModule (PPOModule, ...) and a PromptDataModule")
    callbacks: list[Any] = trainer.callbacks
    count = sum(getattr(callback, "provides_rollouts", False) for callback in callbacks)
    check_loops(type(module).__name__, count, provided=True)
    labels = list(reward_weights(loop))
    if not labels and "reward_model" not in module.sources:
        raise UsageError(
            "no reward is configured: set RolloutLoop.rewards, RolloutLoop.environment or the module's reward_model"
        )
    if loop.environment is not None and ENVIRONMENT in [reward.label for reward in loop.rewards]:
        raise UsageError(f"a reward cannot be called {ENVIRONMENT!r}, the name of the environment's: use another name")
    check_val_metric(loop.val_metric, labels)
    if loop.val_metric is not None and "val" not in data.reports:
        log.warning("val_metric is %r, but there is no validation data: set data.init_args.val", loop.val_metric)
    if not any(getattr(callback, "writes_metrics", False) for callback in callbacks):
        log.info(
            "The Trainer lacks the default callbacks, so this run has no metrics.csv, report or health checks: use "
            "callbacks=lightning_rlhf.callbacks.complete([...])"
        )
    for warning in filter(None, (data.ignored_tools, data.end_token_warning(loop.stop_token_ids))):
        log.warning(warning)
    if loop.dynamic_sampling is not None:
        weights, ranks = reward_weights(loop), module.data_ranks.size
        loop.dynamic_sampling.check(data.batch_size, loop.group_size, weights, module.advantages, ranks)
    check_batch_sizes(module, data, loop.prompts_per_step(data), loop.group_size)
    roles = {f"the {name}": source for name, source in module.sources.items()}
    check_positions(roles, data.longest_text, loop.max_response_tokens, module.has_pairs)
    check_reward_functions(loop.rewards, loop.reward_executor, data, loop.environment)
    splitting = tensor_ranks(trainer, module)
    if loop.chosen_engine is not None and loop.chosen_engine.ranks % splitting:
        raise UsageError(
            f"{splitting} ranks split the actor between them and have the same prompts, so they must share one "
            f"engine: set engine: auto, or wrap it in SharedEngine with ranks: {splitting}"
        )
    if loop.max_staleness and module.correction.level is None and not module.correction.bypass:
        log.warning(
            "max_staleness is %d, so responses are from older weights, and the module does not correct for that: set "
            "correction of the module to RolloutCorrection with level token or sequence",
            loop.max_staleness,
        )


def check_overlap(engine: RolloutEngine, max_staleness: int) -> None:
    """Validate that the engine can generate while the module learns; warn if it generates before instead.

    Args:
        engine: engine of the run.
        max_staleness: argument of RolloutLoop.

    Raises:
        ValueError: the engine sleeps while the module learns, or gets weights only while it is idle.
    """
    name = type(engine).__name__
    if max_staleness and engine.sleeps:
        raise UsageError(
            f"with max_staleness {max_staleness}, {name} generates while the module learns, so it cannot sleep then: "
            f"remove sleep_while_learning, or set max_staleness to 0"
        )
    if max_staleness and engine.needs_idle_push:
        raise UsageError(
            f"with max_staleness {max_staleness}, weights are pushed while {name} generates: remove push_within_gpu, "
            f"or set max_staleness to 0"
        )
    if max_staleness and not engine.overlaps:
        log.warning(
            "max_staleness %d saves no time with %s, which generates in the trainer's process", max_staleness, name
        )


def check_batch_sizes(module: RLHFModule, data: PromptDataModule, prompts: int, group_size: int) -> None:
    """Validate the batch arithmetic of a step; warn about a policy loss that is only correct for one update.

    Args:
        module: module of the run.
        data: data module of the run.
        prompts: prompts that a step trains on.
        group_size: responses per prompt.

    Raises:
        ValueError: mini-batches do not divide a step, or a rank would have no prompt or response.
    """
    if module.advantages.needs_groups:
        check_group_size(type(module.advantages).__name__, group_size)
    responses = prompts * group_size
    updates = responses / module.minibatch_size * module.update_epochs
    if updates > 1 and not module.policy_loss.uses_ratio and module.correction.level is None:
        log.warning("%s is correct for one update per rollout, this run makes %g", module.policy_loss, updates)
    check_minibatch_size(prompts, group_size, module.minibatch_size)
    ranks = module.data_ranks.size
    if data.batch_size < ranks or module.minibatch_size < ranks:
        raise UsageError(
            f"batch_size {data.batch_size} and minibatch_size {module.minibatch_size} count over all {ranks} ranks: "
            f"both must be at least {ranks}"
        )


@torch.no_grad()
def actor_logprobs(module: RLHFModule, rollout: Rollout) -> Tensor:
    """Return the (B, T) log-probs of the responses of a rollout under the actor's current weights. All ranks."""
    with module.trainer.precision_plugin.forward_context():
        return module.actor_scores("actor", rollout.to(module.device)).logprobs


def check_engine(engine: RolloutEngine, module: RLHFModule, rollout: Rollout, max_logprob_diff: float | None) -> None:
    """Raise an error if the engine does not compute the same log-probabilities as the actor. All ranks.

    Args:
        engine: engine with the actor's weights.
        module: module with the actor.
        rollout: responses of the engine.
        max_logprob_diff: argument of :func:`check_gaps`.

    Raises:
        RuntimeError: a bound is exceeded on any rank.
    """
    gaps = (actor_logprobs(module, rollout).cpu() - rollout.rollout_logprobs.cpu()).abs()
    check_gaps(engine, module, gaps[rollout.response_mask.cpu()], max_logprob_diff, module.trainer.global_step)


def check_first_rows(
    engine: RolloutEngine, module: RLHFModule, rows: int, max_logprob_diff: float | None, rollout: Rollout
) -> None:
    """Compare log-probs of engine and actor on the first responses of a rollout; see :func:`check_engine`.

    Args:
        engine: engine with the actor's weights.
        module: module with the actor.
        rows: number of responses; 0 compares none.
        max_logprob_diff: argument of :func:`check_gaps`.
        rollout: responses of the engine.
    """
    if rows:
        check_engine(engine, module, rollout[list(range(min(rows, len(rollout))))], max_logprob_diff)


def check_gaps(
    engine: RolloutEngine, module: RLHFModule, gaps: Tensor, max_logprob_diff: float | None, version: int
) -> None:
    """Raise an error if log-probabilities of engine and actor differ too much. All ranks.

    Only the mean and the 99th percentile are bounded: among millions of tokens in bfloat16, some differ by more than a
    nat, while a lost weight changes most tokens.

    Args:
        engine: engine, to which the actor's current weights were pushed.
        module: module with the actor.
        gaps: (N,) absolute differences of the log-probs of engine and actor of this rank's tokens, nats.
        max_logprob_diff: bound of the 99th percentile, nats; the bound of the mean is a twentieth of it. None selects
            both by dtype and device.
        version: version of the policy that both computed with: the number of steps before its push.

    Raises:
        RuntimeError: a bound is exceeded on any rank; the message names the first parameter that differs.
    """
    # Reduced over ranks, so that all ranks raise or none does.
    mean, percentile, largest = module.data_ranks.max(gap_statistics(gaps).to(module.device)).tolist()
    dtype = engine_dtype(str(module.trainer.precision), module.sources["actor"].dtype)
    bound, mean_bound = _BOUNDS.get((dtype, module.device.type), _BFLOAT16_BOUNDS)
    if max_logprob_diff is not None:
        bound, mean_bound = max_logprob_diff, max_logprob_diff * _MEAN_SHARE
    if mean <= mean_bound and percentile <= bound:
        return
    roles = module.role_strategy
    parameters = roles.iter_adapters("actor") if engine.swaps_adapters else roles.iter_full_params("actor")
    name = engine.first_difference(parameters)
    deque(parameters, maxlen=0)  # gathering needs every rank for every parameter
    if name:
        cause = f"the first parameter that differs is {name}"
    else:
        cause = (
            "all weights of the last push were transferred correctly, so the engine damaged them or computes "
            "differently: set precision to 32-true to compare, or raise max_logprob_diff of RolloutLoop (the mean is "
            "allowed a twentieth of it)"
        )
    raise RunError(
        f"engine and actor have the same weights, but after the push of step {version} their log-probabilities of the "
        f"same tokens differ by {mean:.3g} nats on average (allowed: {mean_bound:g}) and {percentile:.3g} at the 99th "
        f"percentile (allowed: {bound:g}, max_logprob_diff), {largest:.3g} at most: {cause}"
    )


def gap_statistics(gaps: Tensor) -> Tensor:
    """Return mean, 99th percentile and maximum of the differences; infinity if one of them is NaN.

    With fewer than a hundred tokens, the percentile is the maximum.

    Args:
        gaps: (N,) absolute differences of the tokens, nats; may be empty.
    """
    gaps = torch.cat([gaps.double().nan_to_num(nan=torch.inf), gaps.new_zeros(1, dtype=torch.float64)])
    count = len(gaps) - 1  # without the 0, which was added for an empty rollout
    ordered = gaps.sort(descending=True).values
    return torch.stack([gaps.sum() / max(count, 1), ordered[count // 100], ordered[0]])
