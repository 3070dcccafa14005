"""Settings of the rollouts of a run, and their validation against module, data and strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Trainer

from lightning_rlhf.callbacks.loop.checks import tensor_ranks
from lightning_rlhf.callbacks.loop.validation import AnswerExtractor
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.tokenizers import generation_ends
from lightning_rlhf.entry_points import offered, the_offered
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.positions import check_positions
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.ranges import check_ranges
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import ENVIRONMENT, RewardFunction
from lightning_rlhf.rollout.choose import named_engine
from lightning_rlhf.rollout.dynamic_sampling import DynamicSampling
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.given_responses import GivenResponses
from lightning_rlhf.rollout.scorer import check_reward_functions
from lightning_rlhf.run_checks import check_group_size, check_loops, check_minibatch_size, check_val_metric
from lightning_rlhf.types import SamplingLimits

log = logging.getLogger(__name__)
NO_REWARD = "no reward is configured: set RolloutLoop.rewards, RolloutLoop.environment or the module's reward_model"
TeacherPrompt = str | Callable[..., Sequence[Any]]
_TEXTS_ONLY = ("teacher_prompt", "given_responses")  # settings that work without images


@dataclass(frozen=True)
class ValidationSamples:
    """How responses to validation prompts are sampled, in addition to a greedy one.

    Args:
        number: responses per prompt, at least 1.
        temperature: divisor of the logits, positive.
        top_p: probability of the most likely tokens to keep together, in (0, 1]. 1 keeps all.
        top_k: number of most likely tokens to keep. 0 keeps all.
        min_p: smallest probability to keep, as a fraction of the largest one, in [0, 1]. 0 keeps all.
        max_response_tokens: longest response, the greedy one too. None takes that of training.
    """

    number: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, number="at least 1", temperature="positive", max_response_tokens="at least 1 or null")
        assert self.limits is not None

    @property
    def limits(self) -> SamplingLimits:
        """Limits of the sampled tokens."""
        return SamplingLimits(self.top_p, self.top_k, self.min_p)


@dataclass(eq=False, repr=False)
class RolloutSettings:
    """Settings of the rollouts of a run; see :class:`RolloutLoop` for their meaning."""

    rewards: list[RewardFunction] | None = None
    engine: RolloutEngine | Literal["auto", "vllm", "transformers"] = "auto"
    group_size: int = 1
    max_response_tokens: int = 256
    temperature: float = 1.0
    val_samples: int | ValidationSamples = 1
    val_metric: str | None = None
    val_answer: AnswerExtractor | None = None
    validate_at_ends: bool = True
    check_rows: int = 4
    max_logprob_diff: float | None = None
    stop_token_ids: list[int] | None = None
    dynamic_sampling: DynamicSampling | None = None
    max_staleness: int = 0
    environment: EnvironmentSettings | None = None
    teacher_prompt: TeacherPrompt | None = None
    given_responses: GivenResponses | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, group_size="at least 1", max_response_tokens="at least 1")
        check_ranges(self, check_rows="at least 0", max_staleness="at least 0")
        check_ranges(self, temperature="positive", max_logprob_diff="positive or null")
        if isinstance(self.val_samples, int):
            check_ranges(self, val_samples="at least 1")
        chosen = self.val_samples
        self.val_sampling: ValidationSamples = ValidationSamples(chosen) if isinstance(chosen, int) else chosen
        self.limits = SamplingLimits(self.top_p, self.top_k, self.min_p)
        self.engine = named_engine(self.engine)
        rewards = self.rewards or []
        self.rewards = [each if isinstance(each, RewardFunction) else RewardFunction(each) for each in rewards]
        self.reward_executor = RewardExecutor(self.rewards)

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of a response, in training or validation."""
        return max(self.max_response_tokens, self.val_sampling.max_response_tokens or 0)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward by its name."""
        weights = {reward.label: reward.weight for reward in self.reward_executor.functions}
        if self.environment is None:
            return weights
        return {**weights, ENVIRONMENT: self.environment.weight}

    def further_ends(self, module: RLHFModule) -> list[int]:
        """Return the tokens that end responses in addition to the tokenizer's: the source's and the option's."""
        return [*generation_ends(getattr(module.sources["actor"], "path", None)), *(self.stop_token_ids or [])]

    def prompts_per_step(self, data: PromptDataModule) -> int:
        """Return the number of prompts that a step trains on."""
        return data.batch_size if self.dynamic_sampling is None else self.dynamic_sampling.prompts_per_step

    def check(self, trainer: Trainer, module: RLHFModule) -> None:
        """Validate the settings against module and data, and call the rewards once; warn about doubtful settings.

        Raises:
            ValueError: the settings are incompatible.
        """
        data, rewards = trainer.datamodule, self.reward_executor.functions
        if not isinstance(module, RLHFModule) or not isinstance(data, PromptDataModule):
            raise UsageError("RolloutLoop needs an RLHFModule (PPOModule, ...) and a PromptDataModule")
        callbacks: list[Any] = trainer.callbacks
        count = sum(getattr(callback, "provides_rollouts", False) for callback in callbacks)
        check_loops(type(module).__name__, count, provided=True)
        labels = list(self.reward_weights)
        if not labels and "reward_model" not in module.sources and module.advantages.needs_rewards:
            raise UsageError(NO_REWARD)
        if self.environment is not None and ENVIRONMENT in [reward.label for reward in rewards]:
            raise UsageError(
                f"a reward cannot be called {ENVIRONMENT!r}, the name of the environment's: use another name"
            )
        if self.teacher_prompt is not None and module.teacher_sources is None:
            raise UsageError(
                f"teacher_prompt is set, but {type(module).__name__} has no teacher: remove it, or use "
                f"DistillationModule"
            )
        check_texts_only(vars(self), data)
        if self.given_responses is not None:
            the_offered("given_responses").check_given(self, self.given_responses, trainer, module)
        self._check_validation(data, labels)
        if not any(getattr(callback, "writes_metrics", False) for callback in callbacks):
            log.info(
                "The Trainer lacks the default callbacks, so this run has no metrics.csv, report or health checks: use "
                "callbacks=lightning_rlhf.callbacks.complete([...])"
            )
        warnings = [data.ignored_tools, data.end_token_warning(self.further_ends(module))]
        if self.environment is None and not trainer.fast_dev_run:
            warnings.append(data.length_warning(self.max_response_tokens))
        for warning in filter(None, warnings):
            log.warning(warning)
        if self.dynamic_sampling is not None:
            weights, ranks = self.reward_weights, module.data_ranks.size
            scored = "reward_model" in module.sources
            self.dynamic_sampling.check(
                data.batch_size, self.group_size, weights, module.advantages, ranks, scored=scored
            )
        check_batch_sizes(module, data, self.prompts_per_step(data), self.group_size)
        roles = {f"the {name}": source for name, source in module.sources.items()}
        check_positions(roles, data.longest_text_tokens, self.longest_response, module.has_pairs)
        check_reward_functions(rewards, self.reward_executor, data, self.environment)
        if self.environment is None and not trainer.fast_dev_run:
            for warnings_of in offered("reward_warnings"):
                for warning in warnings_of(rewards, data):
                    log.warning(warning)

    def _check_validation(self, data: PromptDataModule, labels: list[str]) -> None:
        """Validate the settings of validations; warn of a metric without data.

        Raises:
            ValueError: the metric is not a reward, or conversations should have another length.
        """
        check_val_metric(self.val_metric, labels)
        if self.environment is not None and self.longest_response > self.max_response_tokens:
            raise UsageError(
                f"val_samples has max_response_tokens {self.longest_response}, but conversations with an environment "
                f"have the limits of training: remove it"
            )
        if self.val_metric is not None and "val" not in data.reports:
            log.warning("val_metric is %r, but there is no validation data: set data.init_args.val", self.val_metric)

    def check_engine(self, trainer: Trainer, module: RLHFModule) -> None:
        """Validate the engine of the configuration, if it is chosen there; warn about uncorrected staleness.

        Raises:
            ValueError: ranks that have the same prompts have different engines.
        """
        splitting = tensor_ranks(trainer, module)
        if not isinstance(self.engine, str) and self.engine.traits.ranks % splitting:
            raise UsageError(
                f"{splitting} ranks split the actor between them and have the same prompts, so they must share one "
                f"engine: set engine: auto, or wrap it in SharedEngine with ranks: {splitting}"
            )
        is_corrected = module.correction.level is not None or module.correction.bypass
        if self.max_staleness and module.needs_current_rollouts and not is_corrected:
            log.warning(
                "max_staleness is %d, so responses are from older weights, and the module does not correct for that: "
                "set correction of the module to RolloutCorrection with level token or sequence",
                self.max_staleness,
            )


def check_texts_only(settings: Mapping[str, Any], data: PromptDataModule) -> None:
    """Validate that no setting works with texts only if prompts or messages of the environment have images.

    Args:
        settings: settings of RolloutLoop by their names.
        data: data module that was set up.

    Raises:
        ValueError: there are images, and one of these settings is set.
    """
    environment = settings.get("environment")
    if data.image_store is None and not getattr(environment, "max_images", 0):
        return
    for name in _TEXTS_ONLY:
        if settings.get(name) is not None:
            raise UsageError(f"{name} works without images: remove it, or the images of the data and environment")
    if getattr(environment, "is_agent", False):
        raise UsageError("agents work with prompts without images: use an environment, or data without images")


def check_overlap(engine: RolloutEngine, max_staleness: int) -> None:
    """Validate that the engine can generate while the module learns; warn if it generates before instead.

    Args:
        max_staleness: argument of RolloutLoop.

    Raises:
        ValueError: the engine sleeps while the module learns, or gets weights only while it is idle.
    """
    name = type(engine).__name__
    if max_staleness and engine.traits.sleeps:
        raise UsageError(
            f"with max_staleness {max_staleness}, {name} generates while the module learns, so it cannot sleep then: "
            f"remove sleep_while_learning, or set max_staleness to 0"
        )
    if max_staleness and engine.traits.needs_idle_push:
        raise UsageError(
            f"with max_staleness {max_staleness}, weights are pushed while {name} generates: remove push_within_gpu, "
            f"or set max_staleness to 0"
        )
    if max_staleness and not engine.traits.overlaps:
        log.warning(
            "max_staleness %d saves no time with %s, which generates in the trainer's process", max_staleness, name
        )


def check_batch_sizes(module: RLHFModule, data: PromptDataModule, prompts: int, group_size: int) -> None:
    """Validate the batch arithmetic of a step; warn about a policy loss that is only correct for one update.

    Args:
        data: data module of the run.
        prompts: prompts that a step trains on.
        group_size: responses per prompt.

    Raises:
        ValueError: mini-batches do not divide a step, or a rank would have no prompt or response.
    """
    if module.advantages.needs_groups:
        check_group_size(type(module.advantages).__name__, group_size)
    responses = prompts * group_size
    module.expect_responses(responses)
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
