"""Python functions, and methods of an object for each conversation, as tools of the policy."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import signal
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from lightning_rlhf.calls.references import arguments_of, as_function
from lightning_rlhf.data.tool_methods import tool_methods
from lightning_rlhf.environments.protocol import Environment, Message, Reply, ToolCall, ToolError, Turn, is_picture
from lightning_rlhf.expected_errors import UsageError

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

    Use it if your tools are plain functions. A function returns a text, an image of Pillow, a list of texts and images,
    or another value, which becomes JSON. If the policy writes a call that cannot be parsed, names an unknown tool,
    passes wrong arguments or causes a ``ToolError``, it receives a message and may try again. Any other exception of a
    function is a failure of the environment.

    If your environment defines its own ``step``, you can use the class for the calls alone:
    ``Tools([self.transfer]).step(turn)`` returns a ``Reply`` with the results.

    Args:
        functions: functions, or their references ``file.py:name`` or ``module:name``. Type hints and a docstring in
            Google style with an ``Args`` section become the schema for the chat template.
        role: role of the messages with results. Use ``user`` if your chat template knows no tools.
        timeout_s: time limit of a call of a function, seconds, or one for each function by name. After it, the policy
            reads an error. A function that ignores it is ended by ``timeout_s`` of the environment, which must be
            longer. None, or a name that is missing: no other limit.
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        role: Literal["tool", "user"] = "tool",
        timeout_s: float | Mapping[str, float] | None = None,
    ) -> None:
        if role not in ("tool", "user"):
            raise UsageError(f"role must be tool or user, got {role!r}")
        self.role = role
        if not functions:
            raise UsageError("Tools needs at least one function")
        loaded = [as_function(function) for function in functions]
        self.functions = {function.__name__: function for function in loaded}
        if len(self.functions) < len(loaded):
            raise UsageError(f"tools need different names, got {[function.__name__ for function in loaded]}")
        self._limits = time_limits(timeout_s, list(self.functions))

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
            content, is_error = self._run(call), False
        except ToolError as error:
            content, is_error = f"Error: {error}", True
        identity = {}
        if self.role == "tool":
            identity = {"name": call.name, "tool_call_id": call.id}
        return {"role": self.role, **identity, "content": content}, is_error

    def _run(self, call: ToolCall) -> str | list[Any]:
        function = self.functions.get(call.name)
        if function is None:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(sorted(self.functions))}")
        check_arguments(function, call.arguments)
        with _limited(call.name, self._limits.get(call.name)):
            result = function(**call.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        if is_picture(result):
            return [result]
        if isinstance(result, list | tuple) and any(map(_is_image, result)):
            return [part if _is_image(part) or _is_text(part) else _as_text(part) for part in result]
        return _as_text(result)


class StatefulTools(Environment):
    """Runs tool calls as methods of an object. Every conversation gets its own.

    Use it if your tools share a state, such as a game board or a file system. The public methods of the class are the
    tools, with type hints and docstrings as for :class:`Tools`. Results must depend only on the row, the seed and the
    calls, so that a conversation can be repeated.

    You may add three methods that are not tools:

    - ``reward()`` returns the reward when the conversation ends, at a turn without a call or at a limit. It may take
      the arguments ``text`` and ``turn`` of the last turn.
    - ``done()`` returns after each turn whether the conversation ends.
    - ``close()`` releases resources.

    Args:
        factory: class, or its reference ``file.py:name`` or ``module:name``. Its constructor may take ``row`` and
            ``seed``, as :meth:`Environment.reset` gets them.
        arguments: further arguments of the constructor.
        role: as for :class:`Tools`.
        timeout_s: as for :class:`Tools`.
    """

    def __init__(
        self,
        factory: str | type,
        arguments: Mapping[str, Any] | None = None,
        role: Literal["tool", "user"] = "tool",
        timeout_s: float | Mapping[str, float] | None = None,
    ) -> None:
        owner = as_function(factory)
        if not isinstance(owner, type):
            raise UsageError(f"factory of StatefulTools must be a class, got {factory!r}")
        self._names = list(tool_methods(owner))
        if not self._names:
            raise UsageError(f"{owner.__name__} has no public method that could be a tool")
        self._owner = owner
        self._arguments = dict(arguments or {})
        parameters = inspect.signature(owner).parameters
        self._offered = [name for name in ("row", "seed") if name in parameters and name not in self._arguments]
        try:
            inspect.signature(owner).bind(**self._arguments, **dict.fromkeys(self._offered))
        except TypeError as error:
            raise UsageError(f"{owner.__name__}: {error}; only row, seed and arguments are passed") from error
        self._role: Literal["tool", "user"] = role
        self._limits = time_limits(timeout_s, self._names)
        self._object: Any = None
        self._tools: Tools | None = None

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the methods, for the chat template; errors are those of :attr:`Tools.schemas`."""
        from lightning_rlhf.data.chat import tool_schemas  # imports transformers, which workers do not need

        return tool_schemas([self._owner])

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Make the object of the conversation."""
        offered = {"row": row, "seed": seed}
        self._object = self._owner(**self._arguments, **{name: offered[name] for name in self._offered})
        self._tools = Tools([getattr(self._object, name) for name in self._names], self._role, self._limits)

    def step(self, turn: Turn) -> Reply:
        """Run the calls of a turn; the conversation ends without a call, or if the object is done."""
        assert self._tools is not None
        reply = self._tools.step(turn)
        if not reply.done and not (hasattr(self._object, "done") and self._object.done()):
            return reply
        return Reply(reply.messages, self._reward(turn), True, reply.metrics)

    def finish(self, turn: Turn) -> float:
        """Return the reward of a conversation that a limit has ended."""
        return self._reward(turn)

    def _reward(self, turn: Turn) -> float:
        if not hasattr(self._object, "reward"):
            return 0.0
        return float(self._object.reward(**arguments_of(self._object.reward, {"turn": turn, "text": turn.text})))

    def close(self) -> None:
        """Close the object."""
        if hasattr(self._object, "close"):
            self._object.close()


def _as_text(result: Any) -> str:
    """Return a result as text: a text itself, or the JSON of another value."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> str:
    """Return another value than those of JSON as text.

    Raises:
        ValueError: it is an image.
    """
    if is_picture(value):
        raise UsageError("a tool returned an image inside of another value: return it alone, or in a list of texts")
    return str(value)


def _is_image(part: Any) -> bool:
    """Return whether a part of a result is an image, or a part of a message with one."""
    return is_picture(part) or (isinstance(part, Mapping) and part.get("type") in ("image", "image_url"))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


class _TooLong(BaseException):
    """Exception in a function that takes too long; ``except Exception`` in the function does not catch it."""


def time_limits(timeout_s: float | Mapping[str, float] | None, names: Sequence[str]) -> dict[str, float]:
    """Return the time limits of tools by name, in seconds; those without a limit are missing.

    Args:
        timeout_s: limit of all tools, or of each by name.
        names: names of the tools.

    Raises:
        UsageError: a limit is not positive, or there is no tool of its name.
    """
    limits = timeout_s if isinstance(timeout_s, Mapping) else dict.fromkeys(names, timeout_s)
    if unknown := sorted(limits.keys() - set(names)):
        raise UsageError(f"timeout_s has a limit for {unknown[0]!r}, but the tools are {', '.join(names)}")
    if wrong := [limit for limit in limits.values() if limit is not None and not limit > 0]:
        raise UsageError(f"timeout_s of a tool must be positive, got {wrong[0]}")
    return {name: limit for name, limit in limits.items() if limit is not None}


@contextlib.contextmanager
def _limited(name: str, seconds: float | None) -> Iterator[None]:
    """Limit the time of a function by a signal, which interrupts Python code and most waits.

    Raises:
        ToolError: it took longer.
        UsageError: this thread receives no signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("time limits of tools need worker processes: set timeout_s of the environment, too")
    previous = signal.signal(signal.SIGALRM, _raise_too_long)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TooLong:
        raise ToolError(f"{name} took longer than its time limit of {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, previous)


def _raise_too_long(number: int, frame: Any) -> None:
    raise _TooLong


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
