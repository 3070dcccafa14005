"""Responses of the data in place of sampled ones, as demonstrations or for distillation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from lightning_rlhf.batching.sequences import concatenate
from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.columns import source_of
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.source import Requests, SampledRollout, Source, assemble
from lightning_rlhf.types import Completion, PromptBatch, Rollout

_SEEDS = 1 << 63  # number of seeds


@dataclass(frozen=True)
class GivenResponses:
    """Which prompts of a step have a response of the data instead of sampled ones.

    A prompt with a given response has that one response, for any group size. The end token is appended to it.

    Args:
        column: column of the data with the response, a text.
        on_policy: fraction of the prompts whose responses are sampled, in [0, 1], drawn again in each epoch; or such a
            fraction for each source of prompts. The responses to prompts of other sources are sampled.

    Raises:
        ValueError: a fraction is out of range.
    """

    column: str = "completion"
    on_policy: float | dict[str, float] = 0.0

    def __post_init__(self) -> None:
        fractions = self.on_policy if isinstance(self.on_policy, dict) else {"": self.on_policy}
        for source, fraction in fractions.items():
            if not 0 <= fraction <= 1:
                of_source = f" of the source {source!r}" if source else ""
                raise UsageError(f"on_policy{of_source} of given_responses must be in [0, 1], got {fraction}")

    def fraction(self, source: str | None) -> float:
        """Return the fraction of the prompts of a source whose responses are sampled."""
        if isinstance(self.on_policy, dict):
            return self.on_policy.get(source or "", 1.0)
        return self.on_policy

    def check(self, data: PromptDataModule, max_response_tokens: int) -> None:
        """Validate that the training rows have the responses.

        Raises:
            ValueError: a source or the column does not exist, or a response is missing or too long.
        """
        if isinstance(self.on_policy, dict) and (unknown := sorted(self.on_policy.keys() - set(data.source_names))):
            raise UsageError(
                f"on_policy of given_responses has the source {unknown[0]!r}, but the rows have "
                f"{data.source_names[:8]} in the column source or data_source"
            )
        for number, row in enumerate(data.examples["train"]):
            if self.fraction(source_of(row.columns)) == 1:
                continue
            text = row.columns.get(self.column)
            if not isinstance(text, str) or not text:
                raise UsageError(
                    f"training row {number} has no response in the column {self.column!r}, got {text!r:.80}: set "
                    f"column of given_responses to one of {data.column_names}"
                )
            if text != text.encode(errors="replace").decode():
                raise UsageError(f"the given response of training row {number} is not valid Unicode: {text!r:.80}")
            tokens = len(data.ids(text)) + 1
            if tokens > max_response_tokens:
                raise UsageError(
                    f"the given response of training row {number} has {tokens} tokens with its end token, more than "
                    f"max_response_tokens {max_response_tokens}: raise that, or shorten or remove the row"
                )

    def numbers(self, prompts: PromptBatch) -> list[int]:
        """Return the numbers of the prompts of a batch whose responses are given."""
        numbers = []
        for number, index in enumerate(prompts.indices):
            columns = {name: values[number] for name, values in prompts.columns.items()}
            draw = derive_seed(run_seed(), "given", prompts.epoch, index) / _SEEDS
            if draw >= self.fraction(source_of(columns)):
                numbers.append(number)
        return numbers


@dataclass(frozen=True)
class WithGiven(Source):
    """Adds the given responses to the sampled ones of another source.

    Args:
        source: source of the sampled responses, with one request for a step.
        responses: prompts whose responses are given.
        data: data module of the run, which tokenizes responses.
        samples: responses per prompt of the source.
        temperature: temperature of the sampling.
        rewards: names of all rewards, which given responses do not have.
        clock: clock of the step.
        has_environment: whether the sampled responses are conversations with an environment.
        is_agent: whether that is an agent.
    """

    source: Source
    responses: GivenResponses
    data: PromptDataModule
    samples: int
    temperature: float
    rewards: Sequence[str]
    clock: Clock
    has_environment: bool = False
    is_agent: bool = False
    _ends: dict[bool, int] = field(default_factory=dict)  # end token of texts and of messages

    def start(self, prompts: PromptBatch, step: int, in_background: bool = False) -> Requests:
        """Request the responses that are not given; see :meth:`Source.start`."""
        sampled, _ = self._divided(prompts)
        return replace(self.source.start(sampled, step, in_background), prompts=prompts)

    def finish(self, requests: Requests) -> SampledRollout:
        """See :meth:`Source.finish`; waits for the rewards."""
        sampled, others = self._divided(requests.prompts)
        if not len(sampled):  # ranks that share an engine wait together
            with self.clock("time/generate_s"):
                requests.wait()
            with self.clock("time/reward_s"):  # 0: all ranks log the same times
                pass
            return SampledRollout(self._rollout(others, requests.requests[0].step), requests=requests.requests)
        result = self.source.finish(replace(requests, prompts=sampled)).scored()
        if not len(others):
            return replace(result, rollout=replace(result.rollout, is_given=torch.zeros_like(result.rollout.truncated)))
        rollouts = [
            replace(result.rollout, is_given=torch.zeros_like(result.rollout.truncated)),
            self._rollout(others, requests.requests[0].step).to(result.rollout.prompt_ids.device),
        ]
        return replace(result, rollout=concatenate(rollouts))

    def _divided(self, prompts: PromptBatch) -> tuple[PromptBatch, PromptBatch]:
        """Return the prompts whose responses are sampled, and the others."""
        numbers = set(self.responses.numbers(prompts))
        return (
            prompts.take([number for number in range(len(prompts)) if number not in numbers]),
            prompts.take(sorted(numbers)),
        )

    def _rollout(self, prompts: PromptBatch, step: int) -> Rollout:
        """Return the given responses to some prompts, at least one, without rewards."""
        completions = []
        for number, text in enumerate(prompts.columns[self.responses.column]):
            ids = [*self.data.ids(text), self._end(bool(prompts.messages and prompts.messages[number]))]
            completions.append(Completion(ids, [0.0] * len(ids), "stop", step))
        rollout = assemble(prompts, completions, self.temperature)
        missing = torch.full((len(prompts),), math.nan)
        return replace(
            rollout,
            rewards=dict.fromkeys(self.rewards, missing),
            reward=torch.zeros_like(missing),
            position=rollout.position * self.samples,
            is_given=torch.ones_like(rollout.truncated),
            step_rewards=torch.zeros(rollout.response_ids.shape) if self.has_environment else None,
            text_starts=torch.zeros_like(rollout.response_mask) if self.is_agent else None,
        )

    def _end(self, in_messages: bool) -> int:
        """Return the token that ends a response."""
        if in_messages not in self._ends:
            end = self.data.tokenizer.eos_token_id
            if in_messages:
                chat = Chat(self.data.tokenizer, self.data.tools, self.data.chat_template_kwargs)
                end = chat.end_of_turn() or end
            self._ends[in_messages] = end
        return self._ends[in_messages]
