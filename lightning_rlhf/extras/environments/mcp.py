"""Tools of a server of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_rlhf.environments.protocol import Environment, Message, Reply, ToolCall, Turn
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError
from lightning_rlhf.extras.environments.tools import time_limits
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import BadImage, ImageSettings

_LARGEST_RESPONSE = 10_000_000  # bytes
_LARGEST_SCHEMA = 100_000  # characters
_LIST_SECONDS = 60.0  # time in which a server must list its tools
_MOST_PAGES = 100  # of the list of tools


class MCP(Environment):
    """Runs the tool calls of each turn on an MCP server, and ends the conversation at a turn without a call.

    Every conversation gets a separate connection, and a server that a command starts runs once for each of them. You
    name the server in the configuration. Rows of the data cannot.

    Args:
        tools: names of the tools that the policy may call.
        url: address of the server, such as ``http://127.0.0.1:9000/mcp``.
        command: command with arguments that starts a server, which communicates over its standard streams.
        variables: environment variables of the command, in addition to a few that every server gets.
        role: role of the messages with results. Use ``user`` if your chat template knows no tools.
        timeout_s: time limit of a call of a tool, seconds, or one for each tool by name. After it, the policy reads an
            error. None is limited only by ``timeout_s`` of the environment, which ends the conversation.
        images: whether the policy gets the images of results. They need ``max_images`` of the environment. Otherwise a
            note takes their place.
    """

    def __init__(
        self,
        tools: Sequence[str],
        url: str | None = None,
        command: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        role: Literal["tool", "user"] = "tool",
        timeout_s: float | Mapping[str, float] | None = None,
        images: bool = False,
    ) -> None:
        if (url is None) == (command is None):
            raise UsageError("MCP needs either the url of a server or the command that starts one")
        if not tools:
            raise UsageError("MCP needs the names of the tools that the policy may call, got none")
        self._tools = list(tools)
        self._url = url
        self._command = list(command or [])
        self._variables = dict(variables or {})
        self._role = role
        self._images = images
        self._limits = time_limits(timeout_s, self._tools)
        self._name = url or " ".join(self._command)
        self._requests: asyncio.Queue[tuple[ToolCall, asyncio.Future[Any]] | None] | None = None
        self._connection: asyncio.Task[None] | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template, from the server.

        Raises:
            ValueError: the server does not have one of the tools.
            RuntimeError: the server cannot be reached.
        """
        try:
            return asyncio.run(asyncio.wait_for(self._schemas(), _LIST_SECONDS))
        except UsageError:
            raise
        except TimeoutError as error:
            reason = f"it did not list its tools within {_LIST_SECONDS:g} s"
            raise RunError(f"the MCP server {self._name} cannot be used: {reason}") from error
        except Exception as error:  # the package groups the errors of its tasks
            raise RunError(f"the MCP server {self._name} cannot be used: {_causes(error)}") from error

    async def _schemas(self) -> list[dict[str, Any]]:
        known: dict[str, Any] = {}
        async with self._client() as client:
            cursor = None
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                known |= {tool.name: tool for tool in page.tools}
                cursor = page.next_cursor
                if cursor is None:
                    break
        if missing := [name for name in self._tools if name not in known]:
            names = ", ".join(sorted(known))[:1000]
            raise UsageError(f"the MCP server has no tool {missing[0]!r}, only {names}")
        return [self._schema(known[name]) for name in self._tools]

    def _schema(self, tool: Any) -> dict[str, Any]:
        """Return the schema of a tool, if it is not too long."""
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        length = len(json.dumps(function))
        if length > _LARGEST_SCHEMA:
            raise UsageError(
                f"the MCP server {self._name} describes the tool {tool.name!r} with {length} characters, at most "
                f"{_LARGEST_SCHEMA} are allowed"
            )
        return {"type": "function", "function": function}

    async def step(self, turn: Turn) -> Reply:
        """Run the calls of a turn."""
        if turn.malformed is not None:
            content = f"Error: the tool call could not be read: {turn.malformed}"
            return Reply([{"role": self._role, "content": content}], metrics={"tool_errors": 1.0})
        if not turn.calls:
            return Reply(done=True)
        results = [await self._result(call) for call in turn.calls]
        return Reply([message for message, _ in results], metrics={"tool_errors": float(sum(e for _, e in results))})

    async def _result(self, call: ToolCall) -> tuple[Message, bool]:
        """Return the message with a call's result, and whether the call was a mistake of the policy."""
        identity = {}
        if self._role == "tool":
            identity = {"name": call.name, "tool_call_id": call.id}
        parts: list[Any]
        if call.name not in self._tools:
            parts, is_error = [f"there is no tool {call.name!r}, only {', '.join(sorted(self._tools))}"], True
        else:
            limit = self._limits.get(call.name)
            try:
                result = await asyncio.wait_for(self._answer(call), limit)
                parts, is_error = [self._part(part) for part in result.content], bool(result.is_error)
            except TimeoutError:
                parts, is_error = [f"{call.name} took longer than its time limit of {limit:g} s"], True
        pairs = zip(parts, [*parts[1:], None], strict=True)  # successive texts are separate lines
        parts = [f"{part}\n" if isinstance(part, str) and isinstance(after, str) else part for part, after in pairs]
        content: str | list[Any] = parts
        if all(isinstance(part, str) for part in parts):
            content = "".join(parts)
        if is_error:
            content = f"Error: {content}" if isinstance(content, str) else ["Error: ", *content]
        return {"role": self._role, **identity, "content": content}, is_error

    def _part(self, part: Any) -> str | dict[str, Any]:
        """Return a part of a result as text, or as an image where the policy gets images."""
        if not self._images or getattr(part, "type", "") != "image":
            return _text_of(part)
        try:
            image = read_image(f"data:{part.mime_type};base64,{part.data}", ImageSettings(), None)
        except BadImage as error:
            return f"(an image was left out: {error.kind})"
        return {"type": "image", "image": image}

    async def _answer(self, call: ToolCall) -> Any:
        """Pass a call to the task with the connection, which a single task must open, use and close."""
        if self._connection is None:
            self._requests = asyncio.Queue()
            self._connection = asyncio.get_running_loop().create_task(self._connect(self._requests))
        assert self._requests is not None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((call, answer))
        try:
            await asyncio.wait({answer, self._connection}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                error = self._connection.exception()
                reason = "the connection has ended"
                if error is not None:
                    reason = _causes(error)
                raise RunError(f"the MCP server {self._name} failed: {reason}") from error
        finally:
            answer.cancel()  # at a time limit
        return answer.result()

    async def _connect(self, requests: asyncio.Queue[tuple[ToolCall, asyncio.Future[Any]] | None]) -> None:
        async with self._client() as client:
            while (request := await requests.get()) is not None:
                call, answer = request
                calling = asyncio.ensure_future(client.call_tool(call.name, call.arguments))
                answer.add_done_callback(partial(_cancel, calling))  # at a time limit
                await asyncio.wait([calling])
                if not answer.done():
                    answer.set_result(calling.result())

    def _client(self) -> Any:
        if self._url is not None:
            return _mcp().Client(_http_transport(self._url))
        if shutil.which(self._command[0]) is None:
            raise UsageError(f"the program {self._command[0]!r} of the MCP server was not found")
        limited = ["-I", str(Path(__file__).with_name("line_limit.py")), str(_LARGEST_RESPONSE), *self._command]
        parameters = _mcp().StdioServerParameters(command=sys.executable, args=limited, env=self._variables or None)
        return _mcp().Client(_mcp().stdio_client(parameters))

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None and self._requests is not None:
            self._requests.put_nowait(None)
            with contextlib.suppress(Exception):  # the call that met it has reported it
                await self._connection


def _cancel(calling: asyncio.Future[Any], _: asyncio.Future[Any]) -> None:
    calling.cancel()


def _text_of(part: Any) -> str:
    """Return the text of a part of a result, or a note in place of an image, for example."""
    text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
    if isinstance(text, str):
        return text
    kind = str(getattr(part, "type", "unknown"))[:100]
    if kind == "text":
        return ""
    return f"(a result of type {kind} was left out: only texts can be read)"


def _causes(error: BaseException) -> str:
    """Describe the errors in a group of errors."""
    inner = getattr(error, "exceptions", ())  # of ExceptionGroup, of Python 3.11 or of a package
    if inner:
        return "; ".join(map(_causes, inner))[:2000]
    return f"{type(error).__name__}: {error}"[:1000]


@contextlib.asynccontextmanager
async def _http_transport(url: str) -> AsyncIterator[Any]:
    """Connect to a server over HTTP, with a limit of the length of its responses."""
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async def limit(response: Any) -> None:
        if response.headers.get("content-type", "").startswith("application/json"):
            response.stream = _bounded(response.stream)

    client = create_mcp_http_client()
    client.event_hooks = {"response": [limit]}
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


def _bounded(stream: Any) -> Any:
    """Return a stream of bytes that raises an error when it becomes too long."""
    from httpx2 import AsyncByteStream

    class Bounded(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in stream:
                size += len(part)
                if size > _LARGEST_RESPONSE:
                    raise RunError(f"it sent a response of more than {_LARGEST_RESPONSE} bytes")
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _mcp() -> Any:
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise MissingPackageError("MCP needs the package mcp: run pip install 'lightning-rlhf[mcp]'") from error
    return mcp
