"""Functions as tools: results, mistakes of the policy, failures, schemas."""

import asyncio
import threading
import time

import pytest

from lightning_rlhf.data.chat import tool_schemas
from lightning_rlhf.environments import Reply, StatefulTools, ToolCall, Tools, Turn
from lightning_rlhf.environments.host import Call, Spec
from lightning_rlhf.environments.hosts import ProcessHost
from lightning_rlhf.environments.live import digest_of
from tests.environments import worlds


def double(x: float) -> float:
    """Return the double of a number.

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


def test_turn_without_a_call_ends_the_conversation():
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


def test_malformed_call_is_a_mistake():
    reply, contents = step(malformed="call 1: no JSON")
    assert contents == ["Error: the tool call could not be read: call 1: no JSON"]
    assert reply.metrics == {"tool_errors": 1.0}


def test_integer_is_accepted_as_a_number():
    assert step(ToolCall("double", {"x": 2}))[1] == ["4"]


def test_other_exception_is_a_failure_of_the_environment():
    with pytest.raises(RuntimeError, match="the tool is broken"):
        step(ToolCall("crash", {}))


def test_results_can_be_user_messages():
    (message,) = Tools([worlds.add], role="user").step(Turn("", (ToolCall("add", {"a": 1, "b": 2}),))).messages
    assert message == {"role": "user", "content": "3"}


def test_schemas_are_derived_from_functions():
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
def test_invalid_functions_are_rejected_as_tools(functions, message):
    with pytest.raises(ValueError, match=message):
        Tools(functions)


def test_function_without_a_description_has_no_schema():
    with pytest.raises(ValueError, match="the tool untyped has no schema for the chat template"):
        _ = Tools([untyped]).schemas


# -- time limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [worlds.sleep, worlds.sleep_async])
@pytest.mark.parametrize("limit", [0.2, {"sleep": 0.2, "sleep_async": 0.2}])
def test_too_long_tool_call_is_a_message(function, limit):
    instance, name = Tools([worlds.sleep, worlds.sleep_async], timeout_s=limit), function.__name__
    began = time.monotonic()
    reply = instance.step(Turn("", (ToolCall(name, {"seconds": 30}), ToolCall(name, {"seconds": 0}))))
    assert time.monotonic() - began < 5
    contents = [message["content"] for message in reply.messages]
    assert contents == [f"Error: {name} took longer than its time limit of 0.2 s", "slept"]
    assert reply.metrics == {"tool_errors": 1.0}


def test_time_limit_works_in_a_worker_process():
    host = ProcessHost(Spec(Tools, {"functions": [worlds.sleep], "timeout_s": 0.2}), 30.0, 1)
    try:
        digest = digest_of(host.call(Call("k", {}, 0)).result(30))
        turn = Turn("", (ToolCall("sleep", {"seconds": 30}),))
        reply = host.call(Call("k", {}, 0, (turn,), (digest,))).result(10)
        assert reply.messages[0]["content"] == "Error: sleep took longer than its time limit of 0.2 s"
    finally:
        host.close()


def test_tool_has_no_separate_limit_by_default():
    instance = Tools([worlds.sleep, worlds.add], timeout_s={"add": 0.01})
    assert instance.step(Turn("", (ToolCall("sleep", {"seconds": 0.1}),))).messages[0]["content"] == "slept"


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0, "timeout_s of a tool must be positive, got 0"),
        ({"add": -1}, "timeout_s of a tool must be positive, got -1"),
        ({"ad": 1}, "timeout_s has a limit for 'ad', but the tools are add"),
    ],
)
def test_invalid_limits_are_rejected(limit, message):
    with pytest.raises(ValueError, match=message):
        Tools([worlds.add], timeout_s=limit)


def test_limit_in_a_thread_is_rejected():
    errors = []

    def run():
        try:
            Tools([worlds.add], timeout_s=1.0).step(Turn("", (ToolCall("add", {"a": 1, "b": 2}),)))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == ["time limits of tools need worker processes: set timeout_s of the environment, too"]


# -- tools with a state -----------------------------------------------------------------------------------------------

ROW = {"balances": {"a": 3, "b": 0}, "wanted": {"a": 1, "b": 2}}


def test_methods_of_an_object_are_stateful_tools():
    instance = StatefulTools(worlds.Bank)
    instance.reset(ROW, 7)
    move = ToolCall("transfer", {"source": "a", "target": "b", "amount": 2}, "c")
    reply = instance.step(
        Turn("", (move, ToolCall("balance", {"account": "a"}), ToolCall("balance", {"account": "x"})))
    )
    assert [message["content"] for message in reply.messages] == ["done", "1", "Error: no account 'x'"]
    assert reply.messages[0]["tool_call_id"] == "c"
    assert (reply.reward, reply.done, reply.metrics) == (0.0, False, {"tool_errors": 1.0})
    assert instance.finish(Turn("")) == 1.0  # a limit ends the conversation
    assert instance.step(Turn("ready")) == Reply("", 1.0, True, {})
    assert instance._object.seed == 7
    assert ROW["balances"] == {"a": 3, "b": 0}


@pytest.mark.parametrize("name", ["_audit", "reward", "close", "done", "__init__", "balances"])
def test_hooks_and_private_methods_are_not_tools(name):
    instance = StatefulTools(worlds.Bank)
    instance.reset(ROW, 0)
    (message,) = instance.step(Turn("", (ToolCall(name, {}),))).messages
    assert message["content"] == f"Error: there is no tool {name!r}, only balance, transfer"


def test_object_may_end_the_conversation_and_read_the_last_text():
    instance = StatefulTools(worlds.Counter, role="user")
    instance.reset({}, 0)
    add = ToolCall("add", {})
    assert instance.step(Turn("abc", (add, ToolCall("twice", {"x": 4})))) == Reply(
        [{"role": "user", "content": "1"}, {"role": "user", "content": "8"}], metrics={"tool_errors": 0.0}
    )
    last = instance.step(Turn("abcde", (add, add)))
    assert (last.done, last.reward) == (True, 0.5)


def test_schemas_of_a_class_are_those_of_its_methods():
    schemas = StatefulTools("tests.environments.worlds:Bank", {"fee": 1}).schemas
    assert schemas == tool_schemas([worlds.Bank]) == tool_schemas(["tests.environments.worlds:Bank"])
    assert [schema["function"]["name"] for schema in schemas] == ["balance", "transfer"]
    assert schemas[1]["function"]["parameters"]["required"] == ["source", "target"]
    assert [schema["function"]["name"] for schema in StatefulTools(worlds.Counter).schemas] == ["add", "twice"]


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (worlds.add, {}, "factory of StatefulTools must be a class"),
        (dict, {}, "dict has no public method that could be a tool"),
        (worlds.Bank, {"fees": 1}, "Bank: got an unexpected keyword argument 'fees'; only row, seed and arguments"),
        (worlds.Misbehaves, {"log": 1, "seed": 2}, "Misbehaves: got an unexpected keyword argument 'seed'"),
    ],
)
def test_invalid_classes_are_rejected_as_tools(factory, arguments, message):
    with pytest.raises(ValueError, match=message):
        StatefulTools(factory, arguments)


def test_every_conversation_has_a_separate_object_even_in_a_new_process(tmp_path):
    row = {**ROW, "log": str(tmp_path / "log")}
    spec = Spec(StatefulTools, {"factory": "tests.environments.worlds:Bank", "arguments": {"fee": 1}})
    move, ask = (Turn("", (call,)) for call in (
        ToolCall("transfer", {"source": "a", "target": "b"}), ToolCall("balance", {"account": "a"}),
    ))  # fmt: skip
    digests = []
    for host in (ProcessHost(spec, 30.0, 1), ProcessHost(spec, 30.0, 1)):  # the second repeats the turns
        try:
            digests = digests or [digest_of(host.call(Call("k", row, 0)).result(30))]
            if len(digests) == 1:
                digests.append(digest_of(host.call(Call("k", row, 0, (move,), tuple(digests))).result(30)))
            reply = host.call(Call("k", row, 0, (move, ask), tuple(digests))).result(30)
            assert reply.messages[0]["content"] == "1"
            other = host.call(Call("other", row, 0, (ask,), tuple(digests[:1]))).result(30)
            assert other.messages[0]["content"] == "3"
            host.release("k")
            deadline = time.monotonic() + 10
            while not (tmp_path / "log").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (tmp_path / "log").read_text() == "closed\n"
            (tmp_path / "log").unlink()
        finally:
            host.close()
