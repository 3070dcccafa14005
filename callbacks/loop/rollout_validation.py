"""RolloutValidation: greedy and sampled responses to the validation prompts, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.callbacks.loop.rollout_parts import RolloutParts
from lightning_rlhf.callbacks.loop.rollout_settings import ValidationSamples
from lightning_rlhf.callbacks.loop.validation import AnswerExtractor, Validation, averages_weights, sources_in
from lightning_rlhf.compat import run_validation
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import TrainerState
from lightning_rlhf.rollout.assemble import assemble
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.types import Completion, PromptBatch, Rollout, StepRollout

_BAR_METRICS = ("val/fraction_correct_greedy", "val/fraction_correct_sampled")


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of the validations of a run; see RolloutLoop.

    Args:
        samples: how responses are sampled.
        rewards: names of all rewards.
        metric: name of the reward that is at least 1 for correct responses; None without one.
        answer: function that returns the answers of completions; None without one.
        at_ends: whether to validate before the first and after the last step.
    """

    samples: ValidationSamples
    rewards: list[str]
    metric: str | None
    answer: AnswerExtractor | None
    at_ends: bool


class RolloutValidation(Callback):
    """Generates and scores responses to the validation prompts, with the same seeds in every validation.

    RolloutLoop adds it to the trainer's callbacks.

    Args:
        settings: settings of the validations.
        parts: parts of the rollouts of the run.
        executor: executor of the reward functions.
    """

    def __init__(self, settings: ValidationSettings, parts: RolloutParts, executor: RewardExecutor) -> None:
        self.settings = settings
        self.validation: Validation | None = None  # the last one
        self._parts = parts
        self._executor = executor
        self._validated_step: int | None = None
        # Values of the first validation of the run, see Validation.table, and the names of their columns.
        self._first: Tensor | None = None
        self._first_columns: list[str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the first validation."""
        if self._first is None:
            return {}
        return {"first": self._first, "columns": self._first_columns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of the first validation."""
        self._first = state_dict.get("first")
        self._first_columns = state_dict.get("columns")

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Validate before the first step."""
        if self.settings.at_ends and trainer.global_step == 0 and not trainer.fast_dev_run:
            run_validation(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Validate after the last step, if its validation has not just run."""
        if self.settings.at_ends and self._validated_step != trainer.global_step and not trainer.fast_dev_run:
            run_validation(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Sync weights and reset the metrics."""
        if self._parts.ahead is not None:
            self._parts.ahead.wait_for_completions()  # responses must not be continued with an average of weights
        if self._parts.checks or not averages_weights(trainer):
            self._parts.weights.sync(trainer.global_step)
        self._parts.checks.check_until(trainer.global_step)
        self._validated_step = trainer.global_step
        self.validation = Validation(
            self.settings.samples.number,
            rewards=self.settings.rewards,
            metric=self.settings.metric,
            answer=self.settings.answer,
            sources=sources_in(trainer.datamodule),
            scored="reward_model" in pl_module.sources,
            image_tokens=pl_module.image_tokens,
        )

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Generate and score a greedy response and samples of each prompt, and pass them to the module."""
        assert self.validation is not None
        if averages_weights(trainer) and batch_idx == 0:  # Lightning has replaced the actor's weights by the average
            self._parts.weights.pushed = None
            self._parts.weights.sync(trainer.global_step)
        rollout, sampled, greedy = self._responses(trainer, pl_module, batch)
        self.validation.add(batch, rollout, self._parts.sampler.tokenizer, sampled, greedy)
        ahead = self._parts.ahead
        if ahead is not None and ahead.max_staleness > 1 and batch_idx == 0:
            size = 1 + self.settings.samples.number
            self._parts.weights.check(rollout[[i for i in range(len(rollout)) if i % size]])  # the sampled ones
        pl_module.receive(StepRollout(rollout))

    def _responses(
        self, trainer: Trainer, module: RLHFModule, batch: PromptBatch
    ) -> tuple[Rollout, list[Completion], list[Completion]]:
        """Return the rollout of greedy and sampled responses to each prompt, the sampled ones and the greedy ones."""
        assert self.validation is not None
        chosen, roles = self.settings.samples, module.role_strategy
        samples = chosen.number
        state = TrainerState(trainer.global_step, trainer.max_steps, float(trainer.current_epoch))
        environment = self._parts.sampler.environment
        tokenizer = self._parts.sampler.tokenizer
        scorer = Scorer(batch, self._executor, tokenizer, 1 + samples, state=state, environment=environment)

        def score(first: int, count: int, number: int, completion: Completion) -> None:
            if roles.is_group_leader:
                scorer.add(number // count * (1 + samples) + first + number % count, completion)

        def completions(first: int, sampling: Sampling) -> list[Completion]:
            on_finished = partial(score, first, sampling.samples)
            version = self._parts.weights.version
            return self._parts.sampler.sample(batch, sampling, trainer.global_step, version, on_finished).result()

        longest = chosen.max_response_tokens
        greedy = completions(0, Sampling(1, 0.0, "validation", max_tokens=longest))
        sampled = completions(1, Sampling(samples, chosen.temperature, "validation", chosen.limits, longest))
        ordered = [c for i in range(len(batch)) for c in (greedy[i], *sampled[i * samples : (i + 1) * samples])]

        def scored() -> tuple[Rollout, dict[str, list[str | None]]]:
            assembled = assemble(batch, ordered, chosen.temperature, environment, chosen.limits)
            rewards = scorer.score(ordered)
            rollout = scorer.add_rewards(assembled, rewards)
            if self._parts.teacher_prompts is not None:
                rollout = self._parts.teacher_prompts.add(rollout, batch.prompts, scorer.columns(ordered))
            return rollout, rewards.answers

        rollout, answers = roles.run_on_group_leader(scored)
        self.validation.add_answers(answers)
        return rollout, sampled, greedy

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: RLHFModule,
        outputs: dict[str, Tensor],
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Store the reward model's scores."""
        assert self.validation is not None
        if "scores" in outputs:
            self.validation.add_scores(outputs["scores"])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Log the metrics of the validation."""
        assert self.validation is not None
        if averages_weights(trainer):  # Lightning will restore the actor's weights
            self._parts.weights.pushed = None
        self._parts.weights.let_engine_sleep()
        metrics = self.validation.metrics(pl_module.data_ranks, self._comparable())
        if self._first is None and not trainer.sanity_checking:
            self._first = self.validation.table(pl_module.data_ranks).cpu()
            self._first_columns = self.validation.columns
        for name, value in metrics.items():
            pl_module.log(name, value, prog_bar=name in _BAR_METRICS, batch_size=1)

    def _comparable(self) -> Tensor | None:
        """Return the values of the first validation; None before it, or if it had other rewards or samples."""
        assert self.validation is not None
        columns = self.validation.columns
        if self._first is None or self._first.shape[1] != len(columns):
            return None
        if self._first_columns not in (None, columns):  # None in a checkpoint of an earlier version
            return None
        return self._first
