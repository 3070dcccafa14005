"""Python functions as tools of the policy."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from lightning_rlhf.environments.protocol import Environment, Message, Reply, ToolCall, ToolError, Turn
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.references import load_function

_PLAIN_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (int, float),
    bool: (bool,),
    list: (list,),
    dict: (dict,),
}


class Tools(Environment):
    """Runs the tool calls of each turn, and ends the conversation at a turn without a call.

    A call that cannot be parsed, an unknown tool, wrong arguments and a ``ToolError`` are mistakes of the policy: it
    receives a message and may try again. Any other exception of a function is a failure of the environment.

    Args:
        functions: functions, or their references ``file.py:name`` or ``module:name``. Type hints and a docstring in
            Google style with an ``Args`` section become the schema for the chat template.
        role: role of the messages with results; ``user`` for a chat template that has no tools.
    """

    def __init__(self, functions: Sequence[str | Callable[..., Any]], role: Literal["tool", "user"] = "tool") -> None:
        if role not in ("tool", "user"):
            raise UsageError(f"role must be tool or user, got {role!r}")
        self.role = role
        if not functions:
            raise UsageError("Tools needs at least one function")
        loaded = [load_function(function) if isinstance(function, str) else function for function in functions]
        self.functions = {function.__name__: function for function in loaded}
        if len(self.functions) < len(loaded):
            raise UsageError(f"tools need different names, got {[function.__name__ for function in loaded]}")

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions.

        Raises:
            ValueError: a function has no docstring, or an argument has no type hint or no description.
        """
        from lightning_rlhf.data.chat import tool_schemas  # imports transformers, which workers do not need

        return tool_schemas(list(self.functions.values()))

    def step(self, turn: Turn) -> Reply:
        """Run the calls of a turn."""
        if turn.malformed is not None:
            message = {"role": self.role, "content": f"Error: the tool call could not be read: {turn.malformed}"}
            return Reply([message], metrics={"tool_errors": 1.0})
        if not turn.calls:
            return Reply(done=True)
        results = [self._result(call) for call in turn.calls]
        return Reply([message for message, _ in results], metrics={"tool_errors": float(sum(e for _, e in results))})

    def _result(self, call: ToolCall) -> tuple[Message, bool]:
        """Return the message with a call's result, and whether the call was a mistake of the policy."""
        try:
            text, is_error = self._run(call), False
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        identity = {"name": call.name, "tool_call_id": call.id} if self.role == "tool" else {}
        return {"role": self.role, **identity, "content": text}, is_error

    def _run(self, call: ToolCall) -> str:
        function = self.functions.get(call.name)
        if function is None:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(sorted(self.functions))}")
        check_arguments(function, call.arguments)
        result = function(**call.arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


async def _awaited(result: Any) -> Any:
    return await result


def check_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Validate the arguments of a call by the signature of a function.

    Raises:
        ToolError: an argument is missing, unknown, or of another type than its hint.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"{function.__name__}: {error}") from None
    hints = typing.get_type_hints(function)
    for name, value in arguments.items():
        hint = hints.get(name)
        accepted = _PLAIN_TYPES.get(typing.get_origin(hint) or hint)
        if accepted is None:
            continue
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            shown = getattr(hint, "__name__", str(hint))
            raise ToolError(f"{function.__name__}: {name} must be of type {shown}, got {type(value).__name__}")
