"""Functions as tools: results, mistakes of the policy, failures, schemas."""

import asyncio

import pytest

from lightning_rlhf.environments import ToolCall, Tools, Turn
from tests.environments import worlds


def double(x: float) -> float:
    """Double a number.

    Args:
        x: number
    """
    return 2 * x


async def wait(name: str) -> dict:
    """Wait.

    Args:
        name: name
    """
    await asyncio.sleep(0)
    return {"name": name, "ready": True}


def untyped(x):
    return x


def step(*calls, **turn):
    reply = Tools([worlds.add, worlds.lookup, double, wait, worlds.crash]).step(Turn("", tuple(calls), **turn))
    return reply, [message["content"] for message in reply.messages]


def test_results_are_messages_in_the_order_of_the_calls():
    reply, contents = step(
        ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("lookup", {"key": "k"}), ToolCall("wait", {"name": "é"})
    )
    assert contents == ["3", "v", '{"name": "é", "ready": true}']
    assert reply.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"}
    assert (reply.done, reply.reward, reply.metrics) == (False, 0.0, {"tool_errors": 0.0})


def test_a_turn_without_a_call_ends_the_conversation():
    reply, contents = step()
    assert reply.done
    assert contents == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("sub", {}), "Error: there is no tool 'sub', only add, crash, double, lookup, wait"),
        (ToolCall("add", {"a": 1}), "Error: add: missing a required argument: 'b'"),
        (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "Error: add: got an unexpected keyword argument 'c'"),
        (ToolCall("add", {"a": "1", "b": 2}), "Error: add: a must be of type int, got str"),
        (ToolCall("add", {"a": True, "b": 2}), "Error: add: a must be of type int, got bool"),
        (ToolCall("add", {"a": 1.5, "b": 2}), "Error: add: a must be of type int, got float"),
        (ToolCall("lookup", {"key": ["k"]}), "Error: lookup: key must be of type str, got list"),
        (ToolCall("lookup", {"key": "x"}), "Error: no entry 'x'"),
    ],
)
def test_mistakes_of_the_policy_are_messages(call, message):
    reply, contents = step(call)
    assert contents == [message]
    assert not reply.done
    assert reply.metrics == {"tool_errors": 1.0}


def test_a_malformed_call_is_a_mistake():
    reply, contents = step(malformed="call 1: no JSON")
    assert contents == ["Error: the tool call could not be read: call 1: no JSON"]
    assert reply.metrics == {"tool_errors": 1.0}


def test_an_integer_is_a_number():
    assert step(ToolCall("double", {"x": 2}))[1] == ["4"]


def test_another_exception_is_a_failure_of_the_environment():
    with pytest.raises(RuntimeError, match="the tool is broken"):
        step(ToolCall("crash", {}))


def test_results_as_messages_of_the_user():
    (message,) = Tools([worlds.add], role="user").step(Turn("", (ToolCall("add", {"a": 1, "b": 2}),))).messages
    assert message == {"role": "user", "content": "3"}


def test_schemas():
    schema = Tools(["tests.environments.worlds:add"]).schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "first number"}


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "at least one function"),
        ([worlds.add, worlds.add], "tools need different names"),
        (["tests.environments.worlds:ad"], "'ad' was not found"),
    ],
)
def test_functions_that_cannot_be_tools(functions, message):
    with pytest.raises(ValueError, match=message):
        Tools(functions)


def test_a_function_without_a_description_has_no_schema():
    with pytest.raises(ValueError, match="the tool untyped has no schema for the chat template"):
        _ = Tools([untyped]).schemas
