"""Parsers of tool calls in the turns of a policy."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.environments.protocol import ToolCall
from lightning_rlhf.expected_errors import UsageError


@dataclass(frozen=True)
class ParsedTurn:
    """Text and tool calls of a turn.

    Args:
        text: text without the calls.
        calls: tool calls, in order.
        malformed: description of the first call that could not be parsed; None if all could.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None


class ToolCallParser(ABC):
    """Base class of parsers."""

    @abstractmethod
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        """Parse a complete turn.

        Args:
            text: text of the turn with special tokens, without its end token.
            tokenizer: tokenizer of the run.
        """


@dataclass(frozen=True)
class JSONToolCalls(ToolCallParser):
    """Calls as JSON objects between two markers: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.

    Each call must be complete and be nothing but an object with ``name`` and ``arguments``, and ``id`` if any. If one
    is not, no call of the turn is accepted, so that the policy repeats all of them.

    Args:
        start: text before a call.
        end: text after a call; a turn may end with a stop token instead.
        end_optional: whether the last call of a turn may lack the end marker, because the marker is a stop token.
    """

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    end_optional: bool = False

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise UsageError(f"markers of tool calls must not be empty, got {self.start!r} and {self.end!r}")

    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        """See :class:`ToolCallParser`."""
        before, *parts = text.split(self.start)
        calls, malformed = [], None
        for number, part in enumerate(parts):
            body, end, rest = part.partition(self.end)
            if not end and not (self.end_optional and number == len(parts) - 1):
                malformed = malformed or f"call {number + 1} has no {self.end}"
            before += rest
            try:
                calls.append(call_of(json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_object)))
            except (ValueError, RecursionError) as error:
                malformed = malformed or f"call {number + 1}: {error}"
        return ParsedTurn(before.strip(), () if malformed else tuple(calls), malformed)


@dataclass(frozen=True)
class MarkedToolCalls(ToolCallParser):
    """Calls of one tool with one text argument between two markers, for small models: ``<call>12+34</call>``.

    Args:
        tool: name of the tool.
        argument: name of its argument.
        start: text before a call.
        end: text after a call; the last call of a turn may lack it if it is a stop token.
    """

    tool: str
    argument: str
    start: str = "<call>"
    end: str = "</call>"

    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        """See :class:`ToolCallParser`."""
        before, *parts = text.split(self.start)
        bodies = [part.partition(self.end) for part in parts]
        calls = tuple(ToolCall(self.tool, {self.argument: body}) for body, _, _ in bodies)
        return ParsedTurn("".join([before, *(rest for _, _, rest in bodies)]), calls)


@dataclass(frozen=True)
class TokenizerToolCalls(ToolCallParser):
    """Calls in the format of the tokenizer's response template (``tokenizer.parse_response`` of transformers)."""

    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        """See :class:`ToolCallParser`."""
        try:
            message = tokenizer.parse_response(text)
        except Exception as error:  # a template has its own regular expressions
            return ParsedTurn(text, malformed=f"{type(error).__name__}: {error}")
        try:
            calls = tuple(call_of(call.get("function", call)) for call in message.get("tool_calls") or [])
        except ValueError as error:
            return ParsedTurn(str(message.get("content") or ""), malformed=str(error))
        return ParsedTurn(str(message.get("content") or ""), calls)


def call_of(value: Any) -> ToolCall:
    """Convert a JSON value to a tool call.

    Raises:
        ValueError: it is not an object with ``name``, ``arguments`` and at most ``id``.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UsageError("a call must be an object with the tool's 'name' and its 'arguments'")
    if unknown := sorted(value.keys() - {"name", "arguments", "id"}):
        raise UsageError(f"a call has 'name', 'arguments' and 'id', got {unknown[0]!r}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise UsageError(f"'arguments' must be an object, got {type(arguments).__name__}")
    return ToolCall(value["name"], arguments, str(value.get("id", "")))


def _refuse_constant(name: str) -> Any:
    raise UsageError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert an object; a key that occurs twice would otherwise hide the first value."""
    keys = [key for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise UsageError(f"the key {repeated[0]!r} occurs twice")
    return dict(pairs)
