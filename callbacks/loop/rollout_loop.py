"""RolloutLoop: has the engine generate the rollout of each step, and passes it to the module."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loop.rollout_parts import RolloutParts, make_parts, make_sampler
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings, ValidationSamples
from lightning_rlhf.callbacks.loop.rollout_validation import RolloutValidation, ValidationSettings
from lightning_rlhf.callbacks.loop.run_engine import RunEngine
from lightning_rlhf.callbacks.loop.step_metrics import rollout_metrics
from lightning_rlhf.callbacks.loop.validation import Validation
from lightning_rlhf.compat import is_taking_snapshot
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.gpu_memory import limit_gpu_memory
from lightning_rlhf.rollout.sampler import ResponseSampler
from lightning_rlhf.rollout.source import SampledRollout, conversations_of
from lightning_rlhf.rollout.weights import check_finite
from lightning_rlhf.strategies import ranks
from lightning_rlhf.types import ConversationRecord, PromptBatch, Rollout, SamplingParams

log = logging.getLogger(__name__)
_FAST_DEV_TOKENS = 16
_REQUESTS = "lightning_rlhf_requests"  # name in checkpoints
# Methods whose overrides may read rewards before RLHFModule.evaluate() has added them.
_READ_REWARDS = ("receive", "pop_rollout", "evaluate", "training_step")


class RolloutLoop(RolloutSettings, Callback):
    """Generates responses with the newest weights before each training step and passes them to the module.

    Here you set what is generated, how it is rewarded, and how you validate. For example, with ``group_size`` 8 and a
    ``batch_size`` of 32 in the data, a step trains on 256 responses.

    Args:
        rewards: reward functions. May be empty if the module has a reward model. In Python you can pass plain
            functions, which become a ``RewardFunction`` with its defaults.
        engine: engine that generates. ``auto`` takes vLLM if it runs here, else transformers, and logs why.
        group_size: responses per prompt, at least 1.
        max_response_tokens: longest response, at least 1.
        temperature: temperature of training samples, positive.
        val_samples: responses per prompt that validation samples at temperature 1, in addition to a greedy one. You can
            also give :class:`~.rollout_settings.ValidationSamples`, for another temperature, limits and length.
        val_metric: name of the reward that is at least 1 for correct responses. Adds ``val/fraction_correct_...``,
            ``val/pass@k``, and the fraction of response pairs that the reward model orders correctly. None leaves them
            out.
        val_answer: function that returns the answer of each completion, or None for a completion without an answer. In
            YAML, a dotted path. Adds ``val/..._maj@k``, the reward of the most frequent answer of k samples. None uses
            the ``pred`` in the dictionaries that a reward function returns: that of ``val_metric``, else the first one.
        validate_at_ends: whether to validate before the first and after the last step.
        check_rows: responses of each rollout for which the log-probs of engine and actor are compared after each sync.
            0 disables the check. With ``max_staleness``, the last tokens of the latest responses, at most 16 of each,
            are compared for every push. The actor evaluates them at the push, the engine once it has loaded the
            weights, unless ``unfinished`` loads the next weights first. ``rollout/logprob_diff_mean`` then also
            contains the change of the weights in these steps.
        max_logprob_diff: largest difference between engine and actor for 99 of 100 tokens, nats. Above it the run ends,
            and also if the mean over all tokens is more than a twentieth of it. None is 1e-3 in float32 on a CPU. In
            bfloat16 and on a GPU, None logs a mean difference above 0.1 (in float32 0.0005) if the engine holds the
            actor's weights, and ends the run from 0.5 (0.05) on. Raise it for a mixture of experts, because its routers
            amplify rounding.
        stop_token_ids: tokens that end a response in addition to the tokenizer's end token.
        dynamic_sampling: replaces prompts if all their responses get the same reward. None trains on every prompt.
        max_staleness: how many steps older the weights that sampled a token may be than the weights that the step
            starts from, at least 0. With 0, generation and learning take turns. With k, the engine generates the
            responses of the next k steps while the module learns. The documentation has a page on it.
        environment: environment that replies to the policy, so that a response becomes a conversation of several turns.
            ``max_response_tokens`` then counts all turns and the messages between them. None: responses of one turn.
        teacher_prompt: prompt for the teacher of a DistillationModule, for example one with worked examples. You give a
            column of the data with text or messages, or a function with the same arguments as a reward function, which
            returns one for each response. ``conversations`` contains the messages of an environment. A text is
            tokenized as it is. Messages are rendered by the chat template, with the tools of the data module but
            without the tools of a row. None gives the teacher the student's prompt.
        given_responses: prompts with responses from the data, for distillation and demonstrations. None samples all
            responses.
        top_p: probability of the most likely tokens to sample from together (nucleus sampling), in (0, 1]. 1 samples
            from all. With this and the next two options, the trainer too computes log-probs over the tokens that could
            be sampled, so that ratios stay exact. The page on engines describes what that costs.
        top_k: number of most likely tokens to sample from. 0 samples from all.
        min_p: smallest probability of a token to sample, as a fraction of the largest one, in [0, 1]. 0 samples from
            all.
    """

    provides_rollouts = True
    max_response_tokens: int
    val_sampling: ValidationSamples
    _configured: tuple[int, ValidationSamples] | None = None  # during fast_dev_run, whose responses are shorter

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: RunEngine | None = None
        self._sampler: ResponseSampler | None = None
        self._parts: RolloutParts | None = None
        self._validation: RolloutValidation | None = None
        self.tokens_per_s = 0.0  # generated in the last step, over all ranks
        self.sampled: SampledRollout | None = None  # of the last step, with its requests and what is not trained on
        self.conversations: dict[int, ConversationRecord] = {}  # of the last step, by position among its responses

    # -- one step ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int) -> None:
        """Sync weights, generate, score, and pass the rollout to the module."""
        parts = self.parts
        parts.clock.start_step()
        sampled = parts.source(batch, trainer.global_step)
        check_finite(sampled.rollout)
        parts.weights.let_engine_sleep()
        sampled = replace(sampled, rollout=self._with_all_images(sampled.rollout))
        sampled = self._with_rewards(sampled, pl_module)
        pl_module.receive(sampled)
        self._log(sampled, pl_module)

    def _with_all_images(self, rollout: Rollout) -> Rollout:
        """Return a rollout with the images that environments of all ranks wrote, because ranks exchange rows."""
        if self.environment is None or not self.environment.max_images or rollout.images is None:
            return rollout
        of_ranks = ranks.from_all_ranks(dict(rollout.images.written))
        written = {number: image for images in of_ranks for number, image in images.items()}
        return replace(rollout, images=replace(rollout.images, written=written))

    def _with_rewards(self, sampled: SampledRollout, module: RLHFModule) -> SampledRollout:
        """Return the rollout with its rewards, or with pending ones, for which the module waits in ``evaluate``."""
        if sampled.rewards is None or not self.reward_executor.overlaps or module.replaces(*_READ_REWARDS):
            return sampled.scored()
        return replace(sampled, rewards=replace(sampled.rewards, earlier=sampled.reward_sums))

    def _log(self, sampled: SampledRollout, module: RLHFModule) -> None:
        self.sampled, self.conversations = sampled, conversations_of(sampled.requests)
        engine = self.parts.sampler.engine
        restarted = engine.restarted if engine.traits.restarts else None
        metrics = rollout_metrics(sampled, module, self.parts.clock, self.max_staleness, restarted)
        self.tokens_per_s = metrics.get("rollout/tokens_per_s", self.tokens_per_s)
        module.log_step("rollout", metrics)

    # -- start and end ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate the run, start the engine, and make the parts of the rollouts."""
        if trainer.fast_dev_run:
            self._configured = self.max_response_tokens, self.val_sampling
            self.max_response_tokens = min(self.max_response_tokens, _FAST_DEV_TOKENS)
            self.val_sampling = replace(self.val_sampling, max_response_tokens=None)
        self.check(trainer, pl_module)
        self.check_engine(trainer, pl_module)
        trainer.num_sanity_val_steps = 0  # the validation before training is more thorough
        sampling = SamplingParams(self.longest_response, self.temperature, self.limits)
        self._engine = RunEngine(self.engine, trainer, pl_module, sampling, self.max_staleness)
        self._sampler = make_sampler(self, trainer, pl_module, self._engine)
        self._parts = make_parts(self, trainer, pl_module, engine=self._engine, sampler=self._sampler)
        self._engine.start(trainer)
        if self._engine.uses_gpu:
            self._parts.weights.let_engine_sleep()
        self._add_validation(trainer)

    def _add_validation(self, trainer: Any) -> None:
        """Add the callback that validates after this one, in place of that of an earlier run."""
        if self._validation in trainer.callbacks:
            trainer.callbacks.remove(self._validation)
        settings = ValidationSettings(
            samples=self.val_sampling,
            rewards=list(self.reward_weights),
            metric=self.val_metric,
            answer=self.val_answer,
            at_ends=self.validate_at_ends,
        )
        self._validation = RolloutValidation(settings, self.parts, self.reward_executor)
        trainer.callbacks.insert(trainer.callbacks.index(self) + 1, self._validation)

    def on_fit_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Wait for the engine, if :meth:`setup` has not."""
        assert self._engine is not None
        self._engine.wait()

    def teardown(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Close the engine and the rewards, and remove the limit of GPU memory."""
        self._close()
        limit_gpu_memory(trainer.strategy.root_device, 0.0)

    def on_exception(self, trainer: Trainer, pl_module: RLHFModule, exception: BaseException) -> None:
        """Close the engine and the rewards; no CUDA calls, which would fail after a CUDA error."""
        self._close()

    def _close(self) -> None:
        if self._configured is not None:  # a later run with this callback has whole responses
            self.max_response_tokens, self.val_sampling = self._configured
            self._configured = None
        # Responses that arrive until the engine is closed would start processes of rewards again.
        for part in (self._engine, self._sampler, self.reward_executor, *self.reward_executor.functions):
            if part is not None:
                part.close()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: RLHFModule, checkpoint: dict[str, Any]) -> None:
        """Add the responses that were requested for later steps, whose weights a resumed run does not have."""
        if (ahead := self.parts.ahead) is not None:
            ahead.take_snapshot()
            if not is_taking_snapshot():
                checkpoint[_REQUESTS] = ahead.snapshot_state()

    def complete_snapshot(self, checkpoint: dict[str, Any]) -> None:
        """Wait for the requested responses and add them to the last checkpoint that was not written at once."""
        if (ahead := self.parts.ahead) is not None:
            checkpoint[_REQUESTS] = ahead.snapshot_state()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: RLHFModule, checkpoint: dict[str, Any]) -> None:
        """Store the responses for later steps."""
        if (ahead := self.parts.ahead) is not None:
            ahead.restored.load(checkpoint.get(_REQUESTS, []))

    # -- for other callbacks ----------------------------------------------------------------------------------

    @property
    def parts(self) -> RolloutParts:
        """Parts of the rollouts, from :meth:`setup`."""
        assert self._parts is not None
        return self._parts

    @property
    def running_engine(self) -> RolloutEngine | None:
        """Engine of the run; None before :meth:`setup`."""
        return None if self._engine is None else self._engine.engine

    @property
    def engine_description(self) -> str:
        """Description of the engine; empty before it is ready."""
        return "" if self._engine is None else self._engine.description

    @property
    def validation(self) -> Validation | None:
        """The last validation; None before it."""
        return None if self._validation is None else self._validation.validation

    @property
    def validation_samples(self) -> list[dict[str, Any]]:
        """Prompts of the last validation with their greedy responses and rewards."""
        return [] if self.validation is None else self.validation.samples
