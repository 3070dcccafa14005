"""Parsers of tool calls in the turns of a policy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.calls.references import arguments_of, as_function
from lightning_rlhf.environments.parsing import ParsedTurn, ToolCallParser
from lightning_rlhf.environments.protocol import ToolCall
from lightning_rlhf.expected_errors import RunError, UsageError


@dataclass(frozen=True)
class JSONToolCalls(ToolCallParser):
    """Finds calls as JSON between two markers: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.

    Each call must be complete, and be nothing but an object with ``name`` and ``arguments``, and ``id`` if any. If one
    call of a turn is not, none is accepted, so that the policy repeats all of them.

    Args:
        start: text before a call.
        end: text after a call. A turn may end with a stop token instead.
        end_optional: whether the last call of a turn may lack the end marker, because the marker is a stop token.
    """

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    end_optional: bool = False

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise UsageError(f"markers of tool calls must not be empty, got {self.start!r} and {self.end!r}")

    @override
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        before, *parts = text.split(self.start)
        calls, malformed = [], None
        for number, part in enumerate(parts):
            body, end, rest = part.partition(self.end)
            if not end and not (self.end_optional and number == len(parts) - 1):
                malformed = malformed or f"call {number + 1} has no {self.end}"
            before += rest
            try:
                calls.append(call_of(json.loads(body, **STRICT_JSON)))
            except (ValueError, RecursionError) as error:
                malformed = malformed or f"call {number + 1}: {error}"
        return ParsedTurn(before.strip(), () if malformed else tuple(calls), malformed)

    @override
    def example(self, call: ToolCall) -> str:
        return f"{self.start}{json.dumps({'name': call.name, 'arguments': call.arguments})}{self.end}"


@dataclass(frozen=True)
class MarkedToolCalls(ToolCallParser):
    """Finds calls of one tool with one text argument between two markers, for small models: ``<call>12+34</call>``.

    Args:
        tool: name of the tool.
        argument: name of its argument.
        start: text before a call.
        end: text after a call. If it is a stop token, the last call of a turn may lack it.
    """

    tool: str
    argument: str
    start: str = "<call>"
    end: str = "</call>"

    @override
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        before, *parts = text.split(self.start)
        bodies = [part.partition(self.end) for part in parts]
        calls = tuple(ToolCall(self.tool, {self.argument: body}) for body, _, _ in bodies)
        return ParsedTurn("".join([before, *(rest for _, _, rest in bodies)]), calls)

    @override
    def example(self, call: ToolCall) -> str | None:
        if call.name == self.tool:
            return f"{self.start}{call.arguments.get(self.argument, '')}{self.end}"
        return None

    def check(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Validate that the environment has the tool, and the tool the argument."""
        functions = [schema["function"] for schema in tools]
        arguments = {
            function["name"]: list((function.get("parameters") or {}).get("properties") or {}) for function in functions
        }
        if arguments and self.tool not in arguments:
            raise UsageError(f"MarkedToolCalls calls the tool {self.tool!r}, but the tools are {', '.join(arguments)}")
        if arguments and self.argument not in arguments[self.tool]:
            names = ", ".join(arguments[self.tool]) or "absent"
            raise UsageError(
                f"MarkedToolCalls sets the argument {self.argument!r} of {self.tool}, but its arguments are {names}"
            )


@dataclass(frozen=True)
class TokenizerToolCalls(ToolCallParser):
    """Finds calls with the tokenizer's response template (``tokenizer.parse_response`` of transformers).

    The template reads a turn without its prompt, so it must not depend on text that the chat template adds to the
    prompt, such as an opening ``<think>``.
    """

    def check(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Validate that the tokenizer has a response template."""
        if getattr(tokenizer, "response_template", None) is None:
            raise UsageError(
                "TokenizerToolCalls reads tool calls with the tokenizer's response_template, but this tokenizer has "
                "none: use JSONToolCalls, or a tokenizer with a response template"
            )

    @override
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        try:
            message = tokenizer.parse_response(text, prefix="")
            calls = tuple(call_of(call.get("function", call)) for call in message.get("tool_calls") or [])
        except (ValueError, KeyError) as error:  # of transformers for texts that it cannot parse, and of call_of
            return ParsedTurn(text, malformed=str(error))
        return ParsedTurn(str(message.get("content") or ""), calls)


@dataclass(frozen=True)
class FunctionToolCalls(ToolCallParser):
    """Finds calls with your own function, in the trainer's process and without a time limit.

    Your function takes ``text``, the text of a turn, and may take ``tokenizer``. It returns a list of calls, each a
    ``ToolCall`` or a dictionary with ``name`` and ``arguments``. It may also return a tuple of the text without calls
    and this list. Raise ValueError for a malformed call, and the policy reads your message. Any other exception ends
    the run.

    Args:
        function: the function, or its reference ``file.py:name`` or ``module:name``.
    """

    function: str | Callable[..., Any]

    def __post_init__(self) -> None:
        try:
            arguments_of(self._loaded, {"text": "", "tokenizer": None})
        except TypeError as error:
            raise UsageError(f"parser of tool calls {self.function!r}: {error}") from error

    @cached_property
    def _loaded(self) -> Callable[..., Any]:
        return as_function(self.function)

    @override
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        try:
            result = self._loaded(**arguments_of(self._loaded, {"text": text, "tokenizer": tokenizer}))
        except (ValueError, RecursionError) as error:
            return ParsedTurn(text, malformed=str(error) or "no reason was given")
        except Exception as error:
            raise RunError(
                f"parser of tool calls {self.function!r} raised {type(error).__name__}: {error}, for the turn "
                f"{text[:200]!r}; it must raise ValueError for a malformed call"
            ) from error
        if isinstance(result, tuple) and len(result) == 2:
            rest, calls = result
        else:
            rest, calls = (text, result)
        known = isinstance(calls, list) and all(isinstance(call, dict | ToolCall) for call in calls)
        if not isinstance(rest, str) or not known:
            raise UsageError(
                f"parser of tool calls {self.function!r} returned {repr(result)[:200]}, expected a list of calls, each "
                f"a ToolCall or a dictionary, or a tuple of a text and this list"
            )
        try:
            return ParsedTurn(rest, tuple(call_of(vars(c) if isinstance(c, ToolCall) else c) for c in calls))
        except ValueError as error:
            return ParsedTurn(rest, malformed=str(error))


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


def _finite(text: str) -> float:
    """Convert a number with a fraction or an exponent."""
    number = float(text)
    if not math.isfinite(number):
        raise UsageError(f"{text} is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert an object; a key that occurs twice would otherwise hide the first value."""
    keys = [key for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise UsageError(f"the key {repeated[0]!r} occurs twice")
    return dict(pairs)


STRICT_JSON: dict[str, Any] = {
    "parse_constant": _refuse_constant,
    "parse_float": _finite,
    "object_pairs_hook": _object,
}  # JSON without what Python adds to it
