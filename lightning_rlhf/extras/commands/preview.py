"""One conversation with made-up turns, to show the messages of an environment before a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.environments.protocol import ToolCall
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.rollout.conversation_loop import ConversationRequest
from lightning_rlhf.rollout.conversations import conversation_sampler
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine, finished
from lightning_rlhf.rollout.generation import CompletionCheck
from lightning_rlhf.types import Completion, SamplingParams, TokenPrompt

_MAX_TOKENS = 100_000  # more than a preview has
_ANY_VOCABULARY = 1 << 31  # larger than that of any tokenizer


class _MadeUpTurns(RolloutEngine):
    """Engine whose turns are given; the last one is repeated."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = turns

    def start(self, setup: EngineSetup) -> None:
        """Start nothing: there is no model."""

    def wait(self) -> str:
        """Return a description."""
        return "made-up turns"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Ignore the weights: there is no model."""

    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Return the next turn, for one prompt."""
        turn = self._turns[0] if len(self._turns) == 1 else self._turns.pop(0)
        return finished([Completion(turn, [0.0] * len(turn), "stop", 0).cut(sampling[0].max_tokens)])


def example_calls(settings: EnvironmentSettings) -> list[str]:
    """Return texts of turns: for each tool of an environment, one that calls it with made-up arguments.

    Tools whose calls the parser cannot write, for which its ``example`` returns None, are left out.
    """
    if settings.parser is None:
        return []
    functions = [schema["function"] for schema in settings.schemas]
    calls = [
        ToolCall(function["name"], {name: _example_value(part) for name, part in _properties(function).items()})
        for function in functions
    ]
    return [text for call in calls if (text := settings.parser.example(call)) is not None]


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    return dict((function.get("parameters") or {}).get("properties") or {})


def _example_value(schema: Any) -> Any:
    """Return a value of the type in a JSON schema, by default a text."""
    if not isinstance(schema, dict):  # true allows any value
        return "1"
    if schema.get("enum"):
        return schema["enum"][0]
    values = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    kind = next((str(kind) for kind in kinds if kind != "null"), "string")
    return values.get(kind, "1")


def preview(settings: EnvironmentSettings, data: PromptDataModule, texts: Sequence[str]) -> Completion:
    """Generate a conversation for the first prompt of the training data.

    Args:
        settings: environment of the run.
        data: data module that was set up.
        texts: texts of the turns, at least one; the last one is repeated.

    Returns:
        The conversation; ``sampled`` marks the made-up turns.

    Raises:
        ValueError: the chat template does not allow conversations.
        RuntimeError: the environment failed.
    """
    tokenizer = data.tokenizer
    sampler = conversation_sampler(settings, data)
    batch = data.collate(data.examples["train"][:1], numbers=[0], positions=[0], epoch=0)
    request = ConversationRequest(
        prompt=batch.prompts[0],
        seed=0,
        turn_seeds=tuple(range(settings.max_turns)),
        sampling=SamplingParams(_MAX_TOKENS),
    )
    turns = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    try:
        check = CompletionCheck(_MAX_TOKENS, 0, _ANY_VOCABULARY)
        return sampler(_MadeUpTurns(turns), [request], on_finished=None, check=check)[0]
    finally:
        sampler.close()
