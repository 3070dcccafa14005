"""RolloutLoop: push weights, generate, judge, hand over. Everything that touches the world outside the module."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from lightning_rlhf.compat import run_validation
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.models.loading import save_architecture
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.models.vocabulary import vocab_size
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.executor import MetricSums, RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.collect import Collector
from lightning_rlhf.rollout.engine import (
    CompletionCheck,
    EngineSetup,
    OnFinished,
    RolloutEngine,
    engine_dtype,
    limit_gpu_memory,
    visible_gpu,
)
from lightning_rlhf.seeding import derive_seed, run_seed
from lightning_rlhf.types import Completion, PromptBatch, Rollout, SamplingParams

from .clock import Clock, max_over_ranks, means_over_ranks, sum_over_ranks
from .dynamic_sampling import DynamicSampling
from .engine_check import compare
from .rollout_checks import check_run, tensor_ranks
from .validation import Answer, Validation, sources_in

log = logging.getLogger(__name__)
_FAST_DEV_TOKENS = 16


class RolloutLoop(Callback):
    """Generates with the newest weights before each training step and hands the module a rollout.

    Args:
        rewards: functions that judge completions; may be empty where the module has a reward model. From Python a plain
            function does too: it becomes a ``RewardFunction`` with the defaults.
        engine: what generates; ``auto`` takes vLLM where it runs, else transformers, and says why.
        group_size: responses per prompt, at least 1.
        max_response_tokens: longest response, at least 1.
        temperature: of training samples, positive. Top-p and top-k are not offered: engines then report probabilities
            over the tokens they kept, the trainer knows them over all, so that no ratio of the two would be right.
        val_samples: responses per prompt sampled at temperature 1 in validation, beside one greedy one.
        val_metric: name of the reward that says whether a validation response is correct (at least 1); from it come
            ``val/greedy``, ``val/sampled``, ``val/pass@k``, and how well the reward model orders right and wrong. None:
            no reward says so, and only each one's own metrics are logged.
        val_answer: from validation completions to the answers they give, None where one gives none; in YAML by its
            dotted path. With it, ``val/..._maj@k`` tells what the answer that most of k samples give earns.
        validate_at_ends: whether to validate before the first and after the last step, so that progress can be told.
        check_rows: responses of each rollout whose log-probabilities under engine and actor are compared right after
            the push; 0 switches the check off.
        max_logprob_diff: largest difference that passes, nats: 99 of 100 tokens must differ by no more, and the mean
            of all by no more than a twentieth of it. None is 1e-3 in float32 on a CPU, 1e-2 in float32 on a GPU, 1 in
            bfloat16. Raise it for a mixture of experts, whose routers magnify rounding.
        stop_token_ids: tokens that end a response beside the tokenizer's end token, as chat models have them.
        dynamic_sampling: replaces prompts whose responses all earn the same; None learns from every prompt.
    """

    provides_rollouts = True

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
    ) -> None:
        least = {"group_size": 1, "max_response_tokens": 1, "val_samples": 1, "check_rows": 0}
        for name, given in zip(least, (group_size, max_response_tokens, val_samples, check_rows), strict=True):
            if given < least[name]:
                raise ValueError(f"{name} must be at least {least[name]}, got {given}")
        if not temperature > 0:
            raise ValueError(f"training samples need a positive temperature, got {temperature}")
        if max_logprob_diff is not None and not max_logprob_diff > 0:
            raise ValueError(f"max_logprob_diff must be positive or null, got {max_logprob_diff}")
        self.rewards = [own if isinstance(own, RewardFunction) else RewardFunction(own) for own in rewards or []]
        self._engine_choice = engine
        self.reward_executor = RewardExecutor(self.rewards)
        self.group_size, self.max_response_tokens, self.temperature = group_size, max_response_tokens, temperature
        self.validate_at_ends = validate_at_ends
        self.check_rows, self.max_logprob_diff = check_rows, max_logprob_diff
        self.val_samples, self.val_metric, self.val_answer = val_samples, val_metric, val_answer
        self.stop_token_ids = list(stop_token_ids or [])
        self.dynamic_sampling = dynamic_sampling
        self.engine: RolloutEngine | None = None
        self.engine_description = ""
        self._pushed: int | None = None
        self.tokens_per_s = 0.0  # generated in the last step, over all ranks
        self._vocabulary = 0  # tokens of the actor
        self._validated: int | None = None
        self._stop_token_ids: tuple[int, ...] = ()
        self._validation: Validation | None = None

    # -- start and end ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate the run, then start the engine: on a CPU it gets ready while the models load, on GPUs before them.

        vLLM sizes its cache by the free memory of its GPU at two moments, so nothing else may use the GPU in between.
        """
        if trainer.fast_dev_run:
            self.max_response_tokens = min(self.max_response_tokens, _FAST_DEV_TOKENS)
        check_run(self, trainer, pl_module)
        self._pushed = self._validated = None  # of an earlier run with the same callback
        self.engine_description = ""
        trainer.num_sanity_val_steps = 0  # the validation before training shows as much
        tokenizer = trainer.datamodule.tokenizer
        self._stop_token_ids = (tokenizer.eos_token_id, *self.stop_token_ids)
        source = pl_module.sources["actor"]
        reason = "chosen in the configuration"
        dtype, device = engine_dtype(str(trainer.precision), source.dtype), trainer.strategy.root_device
        if self._engine_choice == "auto":
            actor = source.hf_config()
            self.engine, reason = choose_engine(actor, tensor_ranks(trainer, pl_module), dtype, trainer.world_size)
        else:
            self.engine = self._engine_choice
        log.info("Rollouts by %s: %s.", type(self.engine).__name__, reason)
        sampling = SamplingParams(self.max_response_tokens, self.temperature)
        self.engine.check(sampling)
        directory = Path(trainer.default_root_dir) / "engine" / f"rank{trainer.global_rank}"
        save_architecture(source, directory)
        longest = trainer.datamodule.max_tokens + self.max_response_tokens
        self._vocabulary = vocab_size(source)
        longest = min(longest, max_positions(source.hf_config()) or longest)  # check_run saw that all prompts fit
        setup = EngineSetup(directory, dtype, longest, directory.with_suffix(".log"), visible_gpu(device), source.lora)
        self.engine.start(setup)
        if setup.devices:
            self.engine_description = self.engine.wait()
            trainer.strategy.barrier("rollout engines")
            limit_gpu_memory(device, self.engine.gpu_share)
            self._rest(device)

    def prompts_per_step(self, data: PromptDataModule) -> int:
        """Prompts that a step learns from."""
        return data.batch_size if self.dynamic_sampling is None else self.dynamic_sampling.prompts_per_step

    def on_fit_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Wait for the engine, unless :meth:`setup` has done so."""
        assert self.engine is not None
        self.engine_description = self.engine_description or self.engine.wait()

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Measure where training begins."""
        if self.validate_at_ends and trainer.global_step == 0 and not trainer.fast_dev_run:
            run_validation(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Measure where it ended, unless that has just been done."""
        if self.validate_at_ends and self._validated != trainer.global_step and not trainer.fast_dev_run:
            run_validation(trainer)

    def teardown(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """End the engine and the rewards, and remove the limit of GPU memory."""
        self._close()
        limit_gpu_memory(trainer.strategy.root_device, 0.0)

    def _close(self) -> None:
        self.reward_executor.close()
        if self.engine is not None:
            self.engine.close()
        for reward in self.rewards:
            reward.close()

    def on_exception(self, trainer: Trainer, pl_module: RLHFModule, exception: BaseException) -> None:
        """End the engine and the rewards; after an error of CUDA any other call to it would fail too."""
        self._close()

    # -- one step ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int) -> None:
        """One rollout."""
        clock, tokens, told, roles = Clock(), 0, list[MetricSums](), pl_module.role_strategy
        ranks = pl_module.data_ranks
        with clock("time/sync_s"):
            self.push_weights(trainer, pl_module)

        def roll(prompts: PromptBatch, samples: int, temperature: float) -> Rollout:
            nonlocal tokens
            collector = self._collector(trainer, prompts, samples)
            with clock("time/generate_s"):
                take = collector.add if roles.is_group_leader else None
                completions = self._generate(prompts, "train", prompts.epoch, samples, temperature, take)
            tokens += sum(len(completion.token_ids) for completion in completions)
            with clock("time/reward_s"):  # what is left to do
                rollout, scores = roles.run_on_group_leader(partial(collector.rollout, completions, temperature))
            told.append(scores.metrics)
            return rollout

        sample = partial(roll, samples=self.group_size, temperature=self.temperature)
        metrics = dict[str, float]()
        if self.dynamic_sampling is None:
            rollout = sample(batch)
        else:
            together = self.engine is not None and self.engine.ranks > tensor_ranks(trainer, pl_module)
            anyone = partial(self._anyone, pl_module) if together else bool
            rollout, counts = self.dynamic_sampling(batch, sample, ranks.size, anyone)
            metrics = self.dynamic_sampling.metrics(sum_over_ranks(counts, ranks, pl_module.device))
        greedy = roll(batch, 1, 0.0) if pl_module.advantages.needs_greedy else None
        with clock("time/check_s"):
            self.verify(pl_module, rollout)
        if not rollout.rollout_logprobs.isfinite().all():
            raise RuntimeError("the engine returned log-probabilities that are not finite: its weights are damaged")
        self._rest(pl_module.device)
        pl_module.receive(rollout, greedy)
        metrics |= max_over_ranks(clock.seconds, ranks, pl_module.device)  # the slowest rank is waited for
        total = sum_over_ranks({"tokens": float(tokens)}, ranks, pl_module.device)["tokens"]
        metrics["rollout/tokens_per_s"] = self.tokens_per_s = total / metrics["time/generate_s"]
        metrics |= means_over_ranks(told if roles.is_group_leader else [])
        pl_module.log_step("rollout", metrics)

    def _anyone(self, module: RLHFModule, wants: bool) -> bool:
        """Whether any rank wants to go on; all of them then do, because they ask a shared engine together."""
        return bool(module.data_ranks.max(torch.tensor(float(wants), device=module.device)))

    def push_weights(self, trainer: Trainer, module: RLHFModule) -> None:
        """Give the engine the actor's weights, unless it has them; the version is the number of steps taken."""
        if self._pushed != trainer.global_step:
            assert self.engine is not None
            roles, version = module.role_strategy, trainer.global_step
            limit_gpu_memory(module.device, self.engine.gpu_share)
            if not self.engine.swaps_adapters:
                self.engine.update_weights(roles.iter_full_params("actor"), version)
            else:
                if self._pushed is None:
                    self.engine.update_weights(roles.iter_base_params("actor"), version)
                self.engine.update_adapters(roles.iter_adapters("actor"), version)
            self._pushed = trainer.global_step

    def _rest(self, device: torch.device) -> None:
        """Send an engine that can to sleep, and let the trainer use all GPU memory until the next push."""
        assert self.engine is not None
        if self.engine.sleeps:
            self.engine.sleep()
            self._pushed = None  # it has lost its weights
            limit_gpu_memory(device, 0.0)

    def _generate(
        self,
        batch: PromptBatch,
        purpose: str,
        epoch: int,
        samples: int,
        temperature: float,
        finished: OnFinished | None,
    ) -> list[Completion]:
        """``samples`` completions of each prompt, next to each other, every one from a seed of its own."""
        assert self.engine is not None
        prompts = [ids for ids in batch.token_ids for _ in range(samples)]
        seeds = [derive_seed(run_seed(), purpose, epoch, i, k) for i in batch.indices for k in range(samples)]
        sampling = SamplingParams(self.max_response_tokens, temperature, stop_token_ids=self._stop_token_ids)
        assert self._pushed is not None
        check = CompletionCheck(self.max_response_tokens, self._pushed, self._vocabulary)
        completions = self.engine.generate(prompts, sampling, seeds, check.before(finished))
        check.check_all(completions, len(prompts))
        return completions

    def _collector(self, trainer: Trainer, batch: PromptBatch, size: int) -> Collector:
        state = TrainerState(trainer.global_step, trainer.max_steps, float(trainer.current_epoch))
        return Collector(batch, self.reward_executor, trainer.datamodule.tokenizer, size, state)

    def verify(self, module: RLHFModule, rollout: Rollout) -> None:
        """Compare engine and actor on a few responses, so that a lost or garbled weight is seen before it teaches.

        Raises:
            RuntimeError: they differ by more than the bound; the message names the first parameter that differs.
        """
        if self.check_rows:
            assert self.engine is not None
            rows = rollout[list(range(min(self.check_rows, len(rollout))))]
            compare(self.engine, module, rows, self.max_logprob_diff)

    # -- validation -------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Begin to gather."""
        if not _averages(trainer):
            self.push_weights(trainer, pl_module)
        self._validated = trainer.global_step
        names, scored = [reward.label for reward in self.rewards], "reward_model" in pl_module.sources
        given = (names, self.val_metric, self.val_answer, sources_in(trainer.datamodule), scored)
        self._validation = Validation(self.val_samples, *given)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: RLHFModule, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One greedy response and some samples of each prompt; the same seeds at every validation."""
        assert self._validation is not None
        if _averages(trainer) and batch_idx == 0:  # the average has just taken the weights' place
            self._pushed = None
            self.push_weights(trainer, pl_module)
        size, roles = self.val_samples, pl_module.role_strategy
        collector = self._collector(trainer, batch, 1 + size)

        def take(first: int, number: int, completion: Completion) -> None:
            samples = size if first else 1
            if roles.is_group_leader:
                collector.add(number // samples * (1 + size) + first + number % samples, completion)

        greedy = self._generate(batch, "validation", 0, 1, 0.0, partial(take, 0))
        sampled = self._generate(batch, "validation", 0, size, 1.0, partial(take, 1))
        ordered = [c for i in range(len(batch)) for c in (greedy[i], *sampled[i * size : (i + 1) * size])]
        rollout, _ = roles.run_on_group_leader(partial(collector.rollout, ordered, 1.0))
        self._validation.add(batch, rollout, trainer.datamodule.tokenizer)
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
        """Keep the reward model's scores."""
        assert self._validation is not None
        if "scores" in outputs:
            self._validation.add_scores(outputs["scores"])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Log what was measured."""
        assert self._validation is not None
        if _averages(trainer):  # the weights are about to come back
            self._pushed = None
        self._rest(pl_module.device)
        for name, value in self._validation.metrics(pl_module.data_ranks).items():
            shown = name in ("val/greedy", "val/sampled")
            pl_module.log(name, value, prog_bar=shown, batch_size=1)

    @property
    def validation_samples(self) -> list[dict[str, Any]]:
        """Prompts of the last validation with their greedy responses and rewards."""
        return [] if self._validation is None else self._validation.samples


def _averages(trainer: Trainer) -> bool:
    """Whether a callback puts averaged weights in the place of the actor's while the run validates."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
