"""Tools of a server of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_rlhf.environments.protocol import Environment, Message, Reply, ToolCall, Turn
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError


class MCP(Environment):
    """Runs the tool calls of each turn on an MCP server, and ends the conversation at a turn without a call.

    Every conversation has a separate connection, and a server that is started by a command runs once for each of
    them. The configuration alone names servers; rows of the data cannot.

    Args:
        tools: names of the tools that the policy may call.
        url: address of the server, such as ``http://127.0.0.1:9000/mcp``.
        command: command with arguments that starts a server, which communicates over its standard streams.
        variables: environment variables of the command, in addition to a few that every server gets.
        role: role of the messages with results; ``user`` for a chat template that has no tools.
    """

    def __init__(
        self,
        tools: Sequence[str],
        url: str | None = None,
        command: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        role: Literal["tool", "user"] = "tool",
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
            return asyncio.run(self._schemas())
        except UsageError:
            raise
        except Exception as error:  # the package groups the errors of its tasks
            raise RunError(f"the MCP server {self._url or ' '.join(self._command)} cannot be used: {error}") from error

    async def _schemas(self) -> list[dict[str, Any]]:
        async with self._client() as client:
            known = {tool.name: tool for tool in (await client.list_tools()).tools}
        if missing := [name for name in self._tools if name not in known]:
            raise UsageError(f"the MCP server has no tool {missing[0]!r}, only {', '.join(sorted(known))}")
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": known[name].description or "",
                    "parameters": known[name].input_schema,
                },
            }
            for name in self._tools
        ]

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
        identity = {"name": call.name, "tool_call_id": call.id} if self._role == "tool" else {}
        if call.name not in self._tools:
            text, is_error = f"there is no tool {call.name!r}, only {', '.join(sorted(self._tools))}", True
        else:
            result = await self._answer(call)
            text, is_error = "\n".join(getattr(part, "text", "") for part in result.content), bool(result.is_error)
        return {"role": self._role, **identity, "content": f"Error: {text}" if is_error else text}, is_error

    async def _answer(self, call: ToolCall) -> Any:
        """Pass a call to the task with the connection, which a single task must open, use and close."""
        if self._connection is None:
            self._requests = asyncio.Queue()
            self._connection = asyncio.get_running_loop().create_task(self._connect(self._requests))
        assert self._requests is not None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((call, answer))
        await asyncio.wait({answer, self._connection}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._connection.result()  # raises its error
            raise RunError("the connection to the MCP server has ended")
        return answer.result()

    async def _connect(self, requests: asyncio.Queue[tuple[ToolCall, asyncio.Future[Any]] | None]) -> None:
        async with self._client() as client:
            while (request := await requests.get()) is not None:
                call, answer = request
                result = await client.call_tool(call.name, call.arguments)
                if not answer.done():
                    answer.set_result(result)

    def _client(self) -> Any:
        if self._url is not None:
            return _mcp().Client(self._url)
        program, *arguments = self._command
        parameters = _mcp().StdioServerParameters(command=program, args=arguments, env=self._variables or None)
        return _mcp().Client(_mcp().stdio_client(parameters))

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None and self._requests is not None:
            self._requests.put_nowait(None)
            with contextlib.suppress(Exception):  # the call that met it has reported it
                await self._connection


def _mcp() -> Any:
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise MissingPackageError("MCP needs the package mcp: run pip install 'lightning-rlhf[mcp]'") from error
    return mcp
