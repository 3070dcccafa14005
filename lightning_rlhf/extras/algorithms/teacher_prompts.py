"""Prompts of a teacher that differ from those of the student, as with worked examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings, TeacherPrompt
from lightning_rlhf.calls.private import private
from lightning_rlhf.calls.references import arguments_of, as_function
from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.completeness import check_complete
from lightning_rlhf.data.messages import holds_messages, messages_of
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.function import CONVERSATION_COLUMNS, GENERATED_COLUMNS
from lightning_rlhf.rollout.source import SampledRollout, Source, StepRequests
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import PaddedPrompts, Prompt, PromptBatch, Rollout


@dataclass(frozen=True)
class TeacherPrompts:
    """Makes the prompt of the teacher for each response.

    Args:
        make: column of the data, or a function of the same arguments as a reward function. Both give a text or chat
            messages for each response.
        data: data module of the run, which tokenizes prompts.
        max_tokens: longest prompt of the teacher with a response; None without a limit.
        has_environment: whether the responses are conversations with an environment.

    Raises:
        ValueError: the column or the function does not exist, or the function needs other arguments.
    """

    make: TeacherPrompt
    data: PromptDataModule
    max_tokens: int | None
    has_environment: bool = False

    def __post_init__(self) -> None:
        columns = self.data.column_names
        if self._column is not None:
            return
        if isinstance(self.make, str) and not set(":.") & set(self.make):
            raise UsageError(
                f"teacher_prompt must be a column of the data or a function such as prompts.py:make, got "
                f"{self.make!r}; the columns are {columns}"
            )
        offered = [*GENERATED_COLUMNS, "messages", *(CONVERSATION_COLUMNS if self.has_environment else ()), *columns]
        try:
            arguments_of(as_function(self.make), dict.fromkeys(offered))
        except TypeError as error:
            raise UsageError(f"teacher_prompt: {error}") from error

    @property
    def _column(self) -> str | None:
        """Name of the column with the prompts; None if a function makes them."""
        if isinstance(self.make, str) and self.make in self.data.column_names:
            return self.make
        return None

    def add(self, rollout: Rollout, prompts: Sequence[Prompt], columns: Mapping[str, Sequence[Any]]) -> Rollout:
        """Return a rollout with the prompts of the teacher.

        Args:
            rollout: B responses.
            prompts: N prompts of the student, each of B / N responses.
            columns: values that reward functions can have as arguments, B each.

        Raises:
            RuntimeError: the function failed, or a prompt is missing, neither text nor messages, or too long.
        """
        values = self._values(columns)
        if len(values) != len(rollout):
            raise RunError(f"teacher_prompt returned {len(values)} prompts for {len(rollout)} responses")
        samples = len(rollout) // len(prompts)
        ids = [self._ids(value, row, prompts[row // samples]) for row, value in enumerate(values)]
        for row, (prompt, length) in enumerate(zip(ids, rollout.response_lengths.tolist(), strict=True)):
            if self.max_tokens is not None and len(prompt) + length > self.max_tokens:
                raise RunError(
                    f"the teacher's prompt of response {row} has {len(prompt)} tokens and the response {length}, but "
                    f"the teacher accepts only {self.max_tokens}: make the prompt shorter"
                )
        prompt_ids, prompt_lengths = pad_right(ids)
        return replace(rollout, teacher=PaddedPrompts(prompt_ids, prompt_lengths).to(rollout.prompt_ids.device))

    def _values(self, columns: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
        """Return the texts or messages of all responses."""
        if self._column is not None:
            return columns[self._column]
        function = as_function(self.make)
        try:
            return list(function(**private(arguments_of(function, columns))))
        except Exception as error:
            raise RunError(f"teacher_prompt failed: {type(error).__name__}: {error}") from error

    def _ids(self, value: Any, row: int, prompt: Prompt) -> list[int]:
        """Return the tokens of the teacher's prompt of a response; it has the tools of the student's prompt."""
        text = value
        if holds_messages(value):
            tools = list(prompt.tools) or self.data.tools
            chat = Chat(self.data.tokenizer, tools, self.data.chat_template_kwargs)
            try:
                messages = messages_of(value, "teacher's prompt", self.data.roles)
                text = chat.render_prompt(messages, "teacher's prompt")
                check_complete(chat, messages, "teacher's prompt", generation=True)
            except BadRow as error:
                raise RunError(f"teacher_prompt of response {row}: {error}") from error
        ids = self.data.tokenize(text) if isinstance(text, str) else []
        if not ids:
            raise RunError(f"teacher_prompt of response {row} must be a text or messages, got {value!r:.80}")
        return ids


@dataclass(frozen=True)
class WithTeacherPrompts(Source):
    """Adds the prompts of the teacher to the rollouts of another source.

    Args:
        source: source of the responses, with one request for a step.
        prompts: prompts of the teacher.
        roles: strategy of the run.
    """

    source: Source
    prompts: TeacherPrompts
    roles: RoleStrategy

    @override
    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        return self.source.request(prompts, step, in_background)

    @override
    def collect(self, requests: StepRequests) -> SampledRollout:
        sampled = self.source.collect(requests)

        def with_prompts() -> Rollout:
            columns = requests.scorer.columns(requests.completions())
            return self.prompts.add(sampled.rollout, requests.prompts.prompts, columns)

        return replace(sampled, rollout=self.roles.run_on_group_leader(with_prompts))


def teacher_prompts(settings: RolloutSettings, trainer: Trainer, module: RLHFModule) -> TeacherPrompts:
    """Return the prompts of a teacher for the rollouts of a run, whose ``teacher_prompt`` is set."""
    assert settings.teacher_prompt is not None
    limits = [max_positions(model.hf_config()) for model in module.teacher_sources or ()]
    limit = min((each for each in limits if each is not None), default=None)
    has_environment = settings.environment is not None
    data = trainer.datamodule  # type: ignore[attr-defined]
    return TeacherPrompts(settings.teacher_prompt, data, limit, has_environment)
