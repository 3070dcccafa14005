"""RecordedEngine: gives a run the responses of an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.recorded_rollouts.recorder import digest_of, step_file
from lightning_rlhf.rollout.ahead import (
    RestoredCompletions,
    RestoredResponses,
    RestoringSampler,
    unpacked_completions,
)
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine
from lightning_rlhf.rollout.generation import OnFinished, PendingCompletions
from lightning_rlhf.rollout.sampler import Sampler, Sampling
from lightning_rlhf.types import Completion, PromptBatch, SamplingParams, TokenPrompt

_Key = tuple[int, float, int]  # responses per prompt, temperature, number of the prompt in the data


class RecordedEngine(RolloutEngine):
    """Gives each step the responses that RolloutRecorder has kept of the same step of another run.

    ``lightning-rlhf fit --rollouts-from RUN`` sets it, with ``check_rows: 0``, because the weights that sampled the
    responses are not the run's own, and without validations, because nothing is generated. Data, ``batch_size``,
    ``group_size``, ``temperature`` and the seed must be those of the recorded run, up to its last step.

    Args:
        run: directory of the recorded run.
    """

    def __init__(self, run: str) -> None:
        self.run = Path(run)
        if not step_file(self.run, 0).is_file():
            raise UsageError(
                f"{run!r} has no recorded responses of the first step ({step_file(self.run, 0)}): add the callback "
                f"RolloutRecorder to the run whose steps you want to repeat"
            )

    @property
    @override
    def traits(self) -> EngineTraits:
        return EngineTraits(overlaps=True, mixes_versions=True, reads_images=True)

    @override
    def training_sampler(self, sampler: Sampler) -> Sampler:
        return RecordedSampler(sampler, RestoredCompletions(), self, self.run)

    @override
    def start(self, setup: EngineSetup) -> None:
        pass

    @override
    def wait(self) -> str:
        return f"responses of {self.run}"

    @override
    def return_experts(self) -> None:
        pass  # they are recorded if the recorded run used them

    @override
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in parameters:  # a gather of all ranks
            pass

    @override
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        raise UsageError(
            f"RecordedEngine has the responses of training steps only: set check_rows: 0 and validate_at_ends: false "
            f"of RolloutLoop and trainer.limit_val_batches: 0, as --rollouts-from {self.run} does"
        )


@dataclass(frozen=True)
class RecordedSampler(RestoringSampler):
    """Returns the recorded completions of a step; see :class:`RecordedEngine`.

    Args:
        run: directory of the recorded run.
    """

    run: Path
    _steps: dict[int, dict[_Key, tuple[str, list[Completion]]]] = field(default_factory=dict)

    @override
    def sample(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        step: int,
        version: int,
        on_finished: OnFinished | None = None,
        in_background: bool = False,
    ) -> PendingCompletions:
        of_step = self._read(step)
        completions = []
        for prompt in prompts:
            digest, of_prompt = of_step.get((sampling.samples, sampling.temperature, prompt.index), ("", []))
            if digest != digest_of(prompt.token_ids):
                raise self._missing(step, sampling, of_step, is_other=bool(digest))
            completions += of_prompt
        return RestoredResponses(lambda: completions)

    def _read(self, step: int) -> dict[_Key, tuple[str, list[Completion]]]:
        """Return the recorded completions of a step.

        Raises:
            UsageError: the step was not recorded.
        """
        if step not in self._steps:
            path = step_file(self.run, step)
            if not path.is_file():
                raise UsageError(
                    f"{self.run} has no recorded responses of step {step + 1}: set trainer.max_steps to {step}"
                )
            parts: list[dict[str, Any]] = torch.load(path, weights_only=True)
            for earlier in [each for each in self._steps if each < step - 1]:
                del self._steps[earlier]
            self._steps[step] = {
                (samples, temperature, index): (digest, completions)
                for part in parts
                for digest, ((_, samples, temperature, index), completions) in zip(
                    part["prompts"], unpacked_completions(part), strict=True
                )
            }
        return self._steps[step]

    def _missing(self, step: int, sampling: Sampling, of_step: dict[_Key, Any], is_other: bool) -> UsageError:
        """Return the error of a prompt without recorded responses."""
        groups = {key[:2] for key in of_step}
        if is_other or (sampling.samples, sampling.temperature) in groups:
            return UsageError(
                f"a prompt of step {step + 1} is not that of the step recorded in {self.run}: use its data, "
                f"batch_size, sampler, seed_everything and tokenizer"
            )
        sizes = " or ".join(f"group_size {samples} at temperature {value:g}" for samples, value in sorted(groups))
        return UsageError(
            f"step {step + 1} recorded in {self.run} has {sizes}, but this run has group_size {sampling.samples} at "
            f"temperature {sampling.temperature:g}: use the same"
        )
