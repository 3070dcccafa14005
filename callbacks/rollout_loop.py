"""RolloutLoop: syncs weights, generates, scores and passes rollouts to the module."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.compat import is_taking_snapshot, run_validation
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.models.vocabulary import vocab_size
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rollout.collect import Collector
from lightning_rlhf.rollout.conversations import conversation_sampler
from lightning_rlhf.rollout.engine import (
    EngineDied,
    EngineSetup,
    RolloutEngine,
    divided_threads,
    engine_dtype,
    limit_gpu_memory,
    visible_gpu,
)
from lightning_rlhf.types import Completion, PromptBatch, Rollout, SamplingParams

from .checks import check_at_least, check_engine, check_overlap, check_rollouts, reward_weights
from .clock import sum_over_ranks
from .dynamic_sampling import DynamicSampling
from .push_checks import PushChecks
from .rollout_requests import RequestsAhead, RolloutRequest, conversations_of, upcoming_batches
from .sampling import ResponseSampler, StepRollouts, choose_run_engine, make_engine_directory
from .validation import Answer, Validation, averages_weights, sources_in

log = logging.getLogger(__name__)
_FAST_DEV_TOKENS = 16
_BAR_METRICS = ("val/share_correct_greedy", "val/share_correct_sampled")
_REQUESTS = "lightning_rlhf_requests"  # name in checkpoints


class RolloutLoop(Callback):
    """Generates with the newest weights before each training step and passes the rollout to the module.

    Args:
        rewards: reward functions; may be empty if the module has a reward model. In Python, a plain function is wrapped
            in a ``RewardFunction`` with its defaults.
        engine: engine that generates; ``auto`` chooses vLLM if it runs here, else transformers, and logs the reason.
        group_size: responses per prompt, at least 1.
        max_response_tokens: longest response, at least 1.
        temperature: temperature of training samples, positive. Top-p and top-k are not supported: engines then report
            probabilities over the remaining tokens, the trainer over all, so that importance ratios would be wrong.
        val_samples: responses per prompt sampled at temperature 1 in validation, in addition to a greedy one.
        val_metric: name of the reward that is at least 1 for correct responses, for ``val/share_correct_...``,
            ``val/pass@k``, and the fraction of response pairs that the reward model orders correctly; None without.
        val_answer: function that returns the answer of each completion, or None for a completion without an answer; a
            dotted path in YAML. It adds ``val/..._maj@k``, the reward of the most frequent answer of k samples.
        validate_at_ends: whether to validate before the first and after the last step.
        check_rows: number of responses of each rollout whose log-probs under engine and actor are compared after each
            sync; 0 disables the check.
        max_logprob_diff: bound of that difference for 99 of 100 tokens, nats; the mean over all tokens must be at most
            a twentieth of it. None is 1e-3 in float32 on a CPU, 1e-2 on a GPU; 1 in bfloat16, where the mean may be
            0.1 on a CPU. Raise it for a mixture of experts, whose routers amplify rounding.
        stop_token_ids: tokens that end a response in addition to the tokenizer's end token.
        dynamic_sampling: replaces prompts whose responses all have the same reward; None trains on every prompt.
        max_staleness: number of steps by which the weights that sampled a token may be older than those that the step
            starts from, at least 0. With 0, generation and learning take turns. With k, the engine generates the
            responses of the next k steps while the module learns; docs/rollouts.md describes the schedule.
        environment: environment that replies to the policy, so that a response is a conversation of several turns;
            ``max_response_tokens`` then counts all turns and the messages between them. None: responses of one turn.
    """

    provides_rollouts = True
    validation: Validation | None = None  # the last one

    def __init__(
        self,
        rewards: list[RewardFunction] | None = None,
        engine: RolloutEngine | Literal["auto"] = "auto",
        group_size: int = 1,
        max_response_tokens: int = 256,
        temperature: float = 1.0,
        val_samples: int = 1,
        val_metric: str | None = None,
        val_answer: Answer | None = None,
        validate_at_ends: bool = True,
        check_rows: int = 4,
        max_logprob_diff: float | None = None,
        stop_token_ids: list[int] | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        max_staleness: int = 0,
        environment: EnvironmentSettings | None = None,
    ) -> None:
        check_at_least(1, group_size=group_size, max_response_tokens=max_response_tokens, val_samples=val_samples)
        check_at_least(0, check_rows=check_rows, max_staleness=max_staleness)
        if not temperature > 0:
            raise UsageError(f"temperature must be positive, got {temperature}")
        if max_logprob_diff is not None and not max_logprob_diff > 0:
            raise UsageError(f"max_logprob_diff must be positive or null, got {max_logprob_diff}")
        self.rewards = [own if isinstance(own, RewardFunction) else RewardFunction(own) for own in rewards or []]
        self.reward_executor = RewardExecutor(self.rewards)
        self.group_size = group_size
        self.max_response_tokens = max_response_tokens
        self.temperature = temperature
        self.val_samples = val_samples
        self.val_metric = val_metric
        self.val_answer = val_answer
        self.validate_at_ends = validate_at_ends
        self.check_rows = check_rows
        self.max_logprob_diff = max_logprob_diff
        self.stop_token_ids = list(stop_token_ids or [])
        self.dynamic_sampling = dynamic_sampling
        self.max_staleness = max_staleness
        self.environment = environment
        self._engine_choice = engine
        self.engine: RolloutEngine | None = None
        self.engine_description = ""
        self.tokens_per_s = 0.0  # generated in the last step, over all ranks
        self._threads: int | None = None  # of this process before the engine got some of them
        self._synced_step: int | None = None  # step whose weights the engine has
        self._validated_step: int | None = None
        self._sampler: ResponseSampler | None = None
        self._ahead = RequestsAhead()
        self._push_checks = PushChecks()
        self.conversations = conversations_of([])  # of the last step, by position among its responses

    # -- start and end ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate the run and start the engine; on GPUs, wait for it before the models load.

        vLLM measures the free memory of its GPU at two moments, so nothing else may use the GPU in between.
        """
        if trainer.fast_dev_run:
            self.max_response_tokens = min(self.max_response_tokens, _FAST_DEV_TOKENS)
        check_rollouts(self, trainer, pl_module)
        self._synced_step = self._validated_step = None  # the callback may have been used in an earlier run
        self._ahead, self._push_checks = RequestsAhead(), PushChecks()
        self.engine_description = ""
        trainer.num_sanity_val_steps = 0  # the validation before training is more thorough
        tokenizer = trainer.datamodule.tokenizer
        source = pl_module.sources["actor"]
        dtype, device = engine_dtype(str(trainer.precision), source.dtype), trainer.strategy.root_device
        longest = trainer.datamodule.max_tokens + self.max_response_tokens
        longest = min(longest, max_positions(source.hf_config()) or longest)  # prompts were checked to fit the model
        self.engine = choose_run_engine(self._engine_choice, trainer, pl_module, dtype, longest)
        self._matrix_dtype = getattr(torch, self.engine.matrix_dtype(dtype))
        self.engine.check(SamplingParams(self.max_response_tokens, self.temperature))
        check_overlap(self.engine, self.max_staleness)
        directory = make_engine_directory(trainer, source)
        self._sampler = ResponseSampler(
            engine=self.engine,
            tokenizer=tokenizer,
            max_tokens=self.max_response_tokens,
            max_length=longest,
            stop_token_ids=(tokenizer.eos_token_id, *self.stop_token_ids),
            vocabulary=vocab_size(source),
            conversations=conversation_sampler(self.environment, trainer.datamodule) if self.environment else None,
        )
        own_threads, threads = divided_threads(torch.get_num_threads(), take_turns=not self.max_staleness)
        setup = EngineSetup(
            model=directory,
            dtype=dtype,
            max_tokens=longest,
            log=directory.with_suffix(".log"),
            devices=visible_gpu(device),
            lora=source.lora,
            threads=threads,
        )
        self.engine.start(setup)
        if self.engine.shares_cores:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(own_threads)
        if setup.devices:
            self.engine_description = self.engine.wait()
            trainer.strategy.barrier("rollout engines")
            limit_gpu_memory(device, self.engine.gpu_share)
            self._let_engine_sleep(device)

    @property
    def chosen_engine(self) -> RolloutEngine | None:
        """Engine of the configuration; None if :meth:`setup` chooses it."""
        return None if self._engine_choice == "auto" else self._engine_choice

    def prompts_per_step(self, data: PromptDataModule) -> int:
        """Return the number of prompts that a step trains on."""
        return data.batch_size if self.dynamic_sampling is None else self.dynamic_sampling.prompts_per_step

    def on_fit_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Wait for the engine, if :meth:`setup` has not."""
        assert self.engine is not None
        self.engine_description = self.engine_description or self.engine.wait()

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Validate before the first step."""
        if self.validate_at_ends and trainer.global_step == 0 and not trainer.fast_dev_run:
            run_validation(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Validate after the last step, if its validation has not just run."""
        if self.validate_at_ends and self._validated_step != trainer.global_step and not trainer.fast_dev_run:
            run_validation(trainer)

    def teardown(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Close the engine and the rewards, and remove the limit of GPU memory."""
        self._close()
        limit_gpu_memory(trainer.strategy.root_device, 0.0)

    def _close(self) -> None:
        threads, self._threads = self._threads, None
        torch.set_num_threads(threads or torch.get_num_threads())
        self.reward_executor.close()
        if self.engine is not None:
            self.engine.close()
        if self._sampler is not None:
            self._sampler.close()
        for reward in self.rewards:
            reward.close()

    def on_exception(self, trainer: Trainer, pl_module: RLHFModule, exception: BaseException) -> None:
        """Close the engine and the rewards; no CUDA calls, which would fail after a CUDA error."""
        self._close()

    # -- one step ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int) -> None:
        """Sync weights, generate, score, and pass the rollout to the module."""
        step = trainer.global_step
        rollouts = StepRollouts(self._responses, self.reward_executor, self._ahead, trainer, pl_module)
        clock = rollouts.clock
        if step not in self._ahead or self._synced_step is None:
            with clock("time/sync_s"):
                self.sync_weights(trainer, pl_module)
        rollouts.requests = self._ahead.pop(step) or self._requests(rollouts, batch)
        with clock("time/generate_s"):
            self._ahead.wait(rollouts.requests)
        metrics: dict[str, float] = {}
        if self.max_staleness:
            metrics |= self._ahead.idle_shares()
            with clock("time/sync_s"):
                self.sync_weights(trainer, pl_module)
            self._check_pushes(rollouts)
            for later_step, prompts in upcoming_batches(trainer, batch_idx, self.max_staleness):
                if later_step not in self._ahead:
                    self._ahead.add(self._requests(rollouts, prompts, later_step))
        rollout, greedy, counts = self._rollout(rollouts, batch)
        self.conversations = conversations_of(rollouts.requests)
        with clock("time/check_s"):
            if rollouts.are_current:
                self.verify(pl_module, rollout)
        if not rollout.rollout_logprobs.isfinite().all():
            raise RunError("the engine returned log-probabilities that are not finite: its weights are damaged")
        self._let_engine_sleep(pl_module.device)
        pl_module.receive(rollout, greedy, *([rollouts.score] if rollouts.scoring else []))
        metrics |= counts | rollouts.metrics(rollout, self.max_staleness)
        self.tokens_per_s = metrics.get("rollout/tokens_per_s", self.tokens_per_s)
        pl_module.log_step("rollout", metrics)

    @property
    def _responses(self) -> ResponseSampler:
        assert self._sampler is not None
        return self._sampler

    @property
    def _version(self) -> int:
        assert self._synced_step is not None
        return self._synced_step

    def _requests(self, rollouts: StepRollouts, batch: PromptBatch, step: int | None = None) -> list[RolloutRequest]:
        """Request the responses to a batch, or to the first prompts of it that dynamic sampling generates.

        Args:
            rollouts: rollouts of the current step.
            batch: prompts of this rank.
            step: later step that trains on the responses; None for the current step.
        """
        first, request = batch, partial(rollouts.request, version=self._version, step=step)
        if self.dynamic_sampling is not None:
            first = batch[: self.dynamic_sampling.prompts_per_step // rollouts.module.data_ranks.size]
        requests = [request(first, self.group_size, self.temperature)]
        if rollouts.module.advantages.needs_greedy:
            requests.append(request(batch, 1, 0.0))
        return requests

    def _rollout(self, rollouts: StepRollouts, batch: PromptBatch) -> tuple[Rollout, Rollout | None, dict[str, float]]:
        """Return the rollout, the greedy rollout if the estimator needs it, and metrics of dynamic sampling."""
        module, ranks = rollouts.module, rollouts.module.data_ranks
        generate = partial(rollouts.rollout, version=self._version)
        if self.dynamic_sampling is None:
            rollout = generate(batch, self.group_size, self.temperature, overlap=True)
            return rollout, generate(batch, 1, 0.0) if module.advantages.needs_greedy else None, {}
        generate = partial(generate, samples=self.group_size, temperature=self.temperature)
        rollout, counts = self.dynamic_sampling(batch, generate, ranks.size, rollouts.any_rank)
        return rollout, None, self.dynamic_sampling.metrics(sum_over_ranks(counts, ranks, module.device))

    def _check_pushes(self, rollouts: StepRollouts) -> None:
        """Compare engine and actor for the push whose responses this step uses, and begin that for the newest push.

        In the first step, the responses are from the newest push, and are compared directly.
        """
        if self.check_rows and not rollouts.are_current:
            with rollouts.clock("time/check_s"):
                module, version = rollouts.module, self._version
                self._push_checks.finish(self._responses, module, self.max_logprob_diff, version - self.max_staleness)
                self._push_checks.begin(self._responses, module, rollouts.requests[0], self.check_rows, version)

    def sync_weights(self, trainer: Trainer, module: RLHFModule) -> None:
        """Copy the actor's weights to the engine, unless it has them; the version is the number of steps taken."""
        if self._synced_step != trainer.global_step:
            assert self.engine is not None
            if self.environment is not None and not self.engine.mixes_versions:
                self._ahead.wait_for_all()  # the turns of a conversation are from the same weights
            roles, version = module.role_strategy, trainer.global_step
            limit_gpu_memory(module.device, self.engine.gpu_share)
            if not self.engine.swaps_adapters:
                self.engine.update_weights(roles.iter_full_params("actor", self._matrix_dtype), version)
            else:
                if self._synced_step is None:
                    self.engine.update_weights(roles.iter_base_params("actor"), version)
                self.engine.update_adapters(roles.iter_adapters("actor"), version)
            self._synced_step = trainer.global_step

    def _let_engine_sleep(self, device: torch.device) -> None:
        """Let the engine sleep if it can, and let the trainer use all GPU memory until the next sync."""
        assert self.engine is not None
        if self.engine.sleeps:
            self.engine.sleep()
            self._synced_step = None  # sleep discards the weights
            limit_gpu_memory(device, 0.0)

    def verify(self, module: RLHFModule, rollout: Rollout) -> None:
        """Compare log-probs of engine and actor on a few responses, to find damaged weights before the update.

        Raises:
            RuntimeError: they differ by more than ``max_logprob_diff``; the message names the first such parameter.
        """
        if self.check_rows:
            assert self.engine is not None
            rows = rollout[list(range(min(self.check_rows, len(rollout))))]
            check_engine(self.engine, module, rows, self.max_logprob_diff)

    # -- validation -------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Sync weights and reset the metrics."""
        self._ahead.wait_for_all()  # responses must not be continued with an average of weights
        if self._push_checks or not averages_weights(trainer):
            self.sync_weights(trainer, pl_module)
        self._push_checks.finish(self._responses, pl_module, self.max_logprob_diff, trainer.global_step)
        self._validated_step = trainer.global_step
        self.validation = Validation(
            self.val_samples,
            rewards=list(reward_weights(self)),
            metric=self.val_metric,
            answer=self.val_answer,
            sources=sources_in(trainer.datamodule),
            scored="reward_model" in pl_module.sources,
        )

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Generate and score a greedy response and samples of each prompt, with the same seeds in every validation."""
        assert self.validation is not None
        if averages_weights(trainer) and batch_idx == 0:  # Lightning has replaced the actor's weights by the average
            self._synced_step = None
            self.sync_weights(trainer, pl_module)
        size = self.val_samples
        roles, tokenizer = pl_module.role_strategy, trainer.datamodule.tokenizer
        state = TrainerState(trainer.global_step, trainer.max_steps, float(trainer.current_epoch))
        collector = Collector(batch, self.reward_executor, tokenizer, 1 + size, state, environment=self.environment)
        generate = partial(self._responses.generate, batch, "validation", version=self._version)

        def score(first: int, number: int, completion: Completion) -> None:
            samples = size if first else 1
            if roles.is_group_leader:
                collector.add(number // samples * (1 + size) + first + number % samples, completion)

        greedy = generate(samples=1, temperature=0.0, on_finished=partial(score, 0))
        sampled = generate(samples=size, temperature=1.0, on_finished=partial(score, 1))
        ordered = [c for i in range(len(batch)) for c in (greedy[i], *sampled[i * size : (i + 1) * size])]
        rollout, _ = roles.run_on_group_leader(partial(collector.rollout, ordered, 1.0))
        self.validation.add(batch, rollout, tokenizer, sampled, greedy)
        if self.max_staleness > 1 and batch_idx == 0:
            self.verify(pl_module, rollout[[i for i in range(len(rollout)) if i % (1 + size)]])
        pl_module.receive(rollout)

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
            self._synced_step = None
        self._let_engine_sleep(pl_module.device)
        for name, value in self.validation.metrics(pl_module.data_ranks).items():
            pl_module.log(name, value, prog_bar=name in _BAR_METRICS, batch_size=1)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: RLHFModule, checkpoint: dict[str, Any]) -> None:
        """Add the responses that were requested for later steps, whose weights a resumed run does not have."""
        if self.max_staleness:
            self._ahead.take_snapshot()
            if not is_taking_snapshot():
                checkpoint[_REQUESTS] = self._ahead.snapshot_state()

    def complete_snapshot(self, checkpoint: dict[str, Any]) -> None:
        """Wait for the requested responses and add them to the last checkpoint that was not written at once.

        If the engine has ended, the checkpoint has none, and a resumed run requests them again.
        """
        if self.max_staleness:
            try:
                checkpoint[_REQUESTS] = self._ahead.snapshot_state()
            except EngineDied:
                log.warning(
                    "The checkpoint has no responses for later steps: the engine ended before they were finished."
                )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: RLHFModule, checkpoint: dict[str, Any]) -> None:
        """Store the responses for later steps."""
        self._ahead.load_state(checkpoint.get(_REQUESTS, []))

    @property
    def validation_samples(self) -> list[dict[str, Any]]:
        """Prompts of the last validation with their greedy responses and rewards."""
        return [] if self.validation is None else self.validation.samples
