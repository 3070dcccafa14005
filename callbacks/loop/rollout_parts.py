"""The parts of a RolloutLoop, and the order in which the features of rollouts wrap each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rlhf.callbacks.loop.checks import tensor_ranks
from lightning_rlhf.callbacks.loop.engine_comparison import PushChecks, check_first_rows
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings
from lightning_rlhf.callbacks.loop.run_engine import RunEngine
from lightning_rlhf.data.resumable import ResumableLoader
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.vocabulary import vocab_size
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.function import TrainerState
from lightning_rlhf.rollout.ahead import Ahead, RestoredCompletions, RestoringSampler
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.conversations import EnvironmentSampler, conversation_sampler
from lightning_rlhf.rollout.dynamic_sampling import DynamicSampling, WithContrast
from lightning_rlhf.rollout.greedy import WithGreedy
from lightning_rlhf.rollout.sampler import ResponseSampler, Sampling
from lightning_rlhf.rollout.source import OnPolicy, RolloutSource, Source
from lightning_rlhf.rollout.weights import EngineWeights
from lightning_rlhf.types import PromptBatch, Rollout


@dataclass(frozen=True)
class RolloutParts:
    """Parts of the rollouts of a run.

    Args:
        sampler: sampler of the responses.
        weights: weights of the engine.
        checks: comparisons of engine and actor that are not finished.
        source: function of the prompts and the step that returns the rollout of a step.
        teacher_prompts: :class:`~lightning_rlhf.extras.algorithms.teacher_prompts.TeacherPrompts` of a teacher that has
            other prompts than the student; None without them.
    """

    sampler: ResponseSampler
    weights: EngineWeights
    checks: PushChecks
    source: OnPolicy | Ahead
    clock: Clock
    teacher_prompts: Any = None

    @property
    def ahead(self) -> Ahead | None:
        """Requests for later steps; None if responses are requested in the step that trains on them."""
        return self.source if isinstance(self.source, Ahead) else None


def make_sampler(settings: RolloutSettings, trainer: Trainer, module: RLHFModule, engine: RunEngine) -> ResponseSampler:
    """Return the sampler of the responses, or of conversations with the environment.

    Raises:
        ValueError: the tokenizer, its chat template or the prompts do not allow conversations.
    """
    data = trainer.datamodule
    conversations = None if settings.environment is None else conversation_sampler(settings.environment, data)
    tokenizer = data.tokenizer
    arguments: dict[str, Any] = {
        "engine": engine.engine,
        "tokenizer": tokenizer,
        "max_tokens": settings.max_response_tokens,
        "max_length": engine.max_length,
        "stop_token_ids": tuple(dict.fromkeys([*data.end_tokens, *settings.further_ends(module)])),
        "vocabulary": vocab_size(module.sources["actor"]),
        "never_sampled": module.image_tokens,
    }
    if conversations is None:
        return ResponseSampler(**arguments)
    return EnvironmentSampler(**arguments, conversations=conversations)


def make_parts(
    settings: RolloutSettings,
    trainer: Trainer,
    module: RLHFModule,
    engine: RunEngine,
    sampler: ResponseSampler,
) -> RolloutParts:
    """Make the parts of the rollouts: each feature wraps the source before it.

    Args:
        settings: settings of the rollouts.
        sampler: sampler of the responses.
    """
    roles, device = module.role_strategy, trainer.strategy.root_device
    clock = Clock()
    compare = partial(check_first_rows, engine.engine, module, settings.check_rows, settings.max_logprob_diff)
    weights = EngineWeights(engine.engine, roles, device, dtype=engine.matrix_dtype, compare=compare, clock=clock)
    checks = PushChecks(sampler, module, settings.check_rows, settings.max_logprob_diff)
    restored = RestoredCompletions()
    training = engine.engine.training_sampler(sampler)
    sampled = RolloutSource(
        sampler=RestoringSampler(training, restored, engine.engine) if settings.max_staleness else training,
        sampling=Sampling(settings.group_size, settings.temperature, limits=settings.limits),
        executor=settings.reward_executor,
        weights=weights,
        roles=roles,
        progress=lambda step, prompts: TrainerState(step, trainer.max_steps, float(prompts.epoch)),
        clock=clock,
    )
    source: Source = sampled
    teacher_prompts = None
    if settings.teacher_prompt is not None:
        offered = the_offered("teacher_prompts")
        teacher_prompts = offered.teacher_prompts(settings, trainer, module)
        source = offered.WithTeacherPrompts(source, teacher_prompts, roles)
    if settings.given_responses is not None:
        given = the_offered("given_responses").with_given_responses
        source = given(source, settings.given_responses, settings, trainer, clock)
    if module.advantages.needs_greedy:
        source = WithGreedy(source, replace(sampled, sampling=Sampling(1, 0.0)))
    if settings.dynamic_sampling is not None:
        source = with_contrast(source, settings.dynamic_sampling, module, engine)
    rollouts: OnPolicy | Ahead = OnPolicy(source, weights)
    if settings.max_staleness:
        rollouts = Ahead(
            source,
            weights,
            restored,
            checks,
            upcoming=partial(upcoming_batches, trainer, settings.max_staleness),
            max_staleness=settings.max_staleness,
            waits_before_push=settings.environment is not None and not engine.engine.traits.mixes_versions,
            clock=clock,
        )
    return RolloutParts(sampler, weights, checks, rollouts, clock=clock, teacher_prompts=teacher_prompts)


def with_contrast(source: Source, settings: DynamicSampling, module: RLHFModule, engine: RunEngine) -> Source:
    """Return a source that generates in rounds of another one."""
    in_turns = engine.engine.traits.ranks > tensor_ranks(module.trainer, module) or "reward_model" in module.sources
    return WithContrast(
        source,
        settings,
        module.data_ranks,
        module.trainer.strategy.root_device,
        in_turns=in_turns,
        total_reward=partial(total_reward, module),
    )


@torch.no_grad()
def total_reward(module: RLHFModule, rollout: Rollout) -> Tensor:
    """Return the (B,) rewards with the score of the module's reward model, where the rollout is. All ranks."""
    with module.trainer.precision_plugin.forward_context():
        return module.total_reward(rollout.to(module.device)).to(rollout.reward.device)


def upcoming_batches(trainer: Trainer, count: int) -> Iterator[tuple[int, PromptBatch]]:
    """Yield (step, prompts of this rank) of the next training batches, fewer where the run ends before.

    Args:
        trainer: trainer at the start of a training batch.
        count: number of batches after this one.

    Raises:
        ValueError: the training data loader is not a ResumableLoader, so later batches are unknown.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, ResumableLoader):
        raise UsageError(
            f"max_staleness requests the prompts of later steps, which needs the data loader of PromptDataModule, got "
            f"{type(loader).__name__}: set max_staleness to 0, or do not override train_dataloader"
        )
    size = int(trainer.num_training_batches)
    for ahead in range(1, count + 1):
        epochs, batch = divmod(trainer.fit_loop.batch_idx + ahead, size)
        epoch, step = trainer.current_epoch + epochs, trainer.global_step + ahead
        if 0 <= trainer.max_steps <= step or (trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch):
            return
        yield step, loader.batch_at(epoch, batch)
