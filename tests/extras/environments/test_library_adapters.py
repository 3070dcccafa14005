"""Environments of other libraries: fakes with their interfaces, and the libraries themselves where installed."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psutil
import pytest

from lightning_rlhf.environments import Reply, ToolCall, Turn
from lightning_rlhf.environments.host import Call, Fault, Spec
from lightning_rlhf.environments.live import digest_of
from lightning_rlhf.environments.loop_host import LoopHost
from lightning_rlhf.expected_errors import MissingPackageError
from lightning_rlhf.extras.environments import line_limit
from lightning_rlhf.extras.environments import mcp as mcp_adapter
from lightning_rlhf.extras.environments.gymnasium import Gymnasium, TextArena
from lightning_rlhf.extras.environments.mcp import MCP
from lightning_rlhf.extras.environments.peers import SkyRLEnvironment, TRLEnvironment
from lightning_rlhf.extras.environments.reasoning_gym import ReasoningGym, score
from tests.http_stand_in import HTTPStandIn

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


class Counter:
    """The interface of gymnasium, with the suffix of gem."""

    action_space = type("Discrete", (), {"n": 3, "contains": staticmethod(lambda action: 0 <= action < 3)})()

    def __init__(self, start):
        self.value, self.closed = start, False

    def reset(self, *, seed=None, options=None):
        self.value += seed % 5
        return self.value, {"suffix": "!"}

    def step(self, action):
        self.value += action
        return self.value, 0.5 * action, self.value > 6, False, {}

    def close(self):
        self.closed = True


def make_counter(id, start):
    assert id == "Counter"
    return Counter(start)


def test_gymnasium_interface():
    instance = Gymnasium("Counter", f"{__name__}:make_counter", {"start": 1})
    assert instance.reset(seed=7) == Reply("3!")
    assert instance.step(" 2 ") == Reply("5", 1.0, False)
    assert instance.step("two") == Reply("invalid action", metrics={"invalid_actions": 1.0})
    assert instance.step("9") == instance.step("two")  # no such action
    assert instance.step("2") == Reply("7", 1.0, True)
    instance.close()
    assert instance._environment.closed
    ends = Gymnasium("Counter", f"{__name__}:make_counter", {"start": 1}, action=float, invalid=None, observation=hex)
    assert ends.reset(seed=0).messages == "0x1!"
    assert ends.step("x").done


def test_gymnasium_environment():
    pytest.importorskip("gymnasium", reason="needs gymnasium")
    instance = Gymnasium("FrozenLake-v1", arguments={"is_slippery": False})
    assert instance.reset(seed=2**40).messages == "0"
    replies = [instance.step(action) for action in "112212"]
    assert (replies[-1].reward, replies[-1].done) == (1.0, True)
    instance.close()


def test_missing_gymnasium_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lightning-rlhf\[gymnasium\]'"):
        Gymnasium("FrozenLake-v1")


def test_textarena_game():
    pytest.importorskip("textarena", reason="needs textarena")
    instance = TextArena("GuessTheNumber-v0")
    assert "guess" in instance.reset(seed=3).messages.lower()
    low, high = 1, 20
    for _ in range(10):
        guess = (low + high) // 2
        reply = instance.step(f"[{guess}]")
        if reply.done:
            break
        low, high = (guess + 1, high) if "higher" in reply.messages.lower().split("[game]")[-1] else (low, guess - 1)
    instance.close()
    assert (reply.reward, reply.done) == (1.0, True)


def test_reasoning_gym_dataset():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    rows = [row for _, row in ReasoningGym("chain_sum", 4, seed=1).rows()]
    assert rows == [row for _, row in ReasoningGym("chain_sum", 4, seed=1).rows()]
    entries, names = [row["entry"] for row in rows], [row["dataset"] for row in rows]
    assert score([row["answer"] for row in rows], entries, names) == [1.0] * 4
    assert max(score(["none"] * 4, entries, names)) < 0.1


class Shop:
    """An environment for TRL's environment_factory."""

    def reset(self, money):
        self.bought = []
        return f"You have {money} coins."

    def buy(self, item: str) -> str:
        """Request an item.

        Args:
            item: the thing to buy
        """
        self.bought.append(item)
        return f"bought {item}"

    def get_reward(self):
        return len(self.bought) / 2

    def _private(self):
        raise AssertionError


def test_trl_environment():
    instance = TRLEnvironment(Shop)
    assert [schema["function"]["name"] for schema in instance.schemas] == ["buy"]
    assert instance.reset({"prompt": "shop", "money": 3}) == "You have 3 coins."
    reply = instance.step(Turn("", (ToolCall("buy", {"item": "tea"}), ToolCall("_private", {}))))
    assert [message["content"] for message in reply.messages] == [
        "bought tea",
        "Error: there is no tool '_private', only buy",
    ]
    assert (reply.reward, reply.done) == (0.5, False)
    assert instance.step(Turn("thanks")) == Reply(done=True)


class Maths:
    """The interface of skyrl_gym's BaseTextEnv."""

    def __init__(self, env_config=None, extras=None):
        self.answer, self.closed = extras["answer"], False

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "think"}], {}

    def step(self, action):
        done = action == self.answer
        observations = [] if done else [{"role": "user", "content": "wrong"}]
        return {
            "observations": observations,
            "reward": float(done),
            "done": done,
            "metadata": {"tries": 1, "kind": "x"},
        }

    def close(self):
        self.closed = True


def test_skyrl_environment():
    instance = SkyRLEnvironment(f"{__name__}:Maths", extras="info")
    assert instance.reset({"prompt": "1+1", "info": {"answer": "2"}}) == Reply([{"role": "user", "content": "think"}])
    assert instance.step("3") == Reply([{"role": "user", "content": "wrong"}], 0.0, False, {"tries": 1.0})
    assert instance.step("2") == Reply([], 1.0, True, {"tries": 1.0})
    instance.close()
    assert instance._environment.closed


# -- MCP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["add"]}, "either the url"),
        ({"tools": ["add"], "url": "u", "command": ["c"]}, "either the url"),
        ({"tools": [], "url": "u"}, "got none"),
    ],
)
def test_mcp_server_is_logged_once_with_its_tools(arguments, message):
    with pytest.raises(ValueError, match=message):
        MCP(**arguments)


def test_missing_mcp_server_is_reported():
    pytest.importorskip("mcp", reason="needs mcp")
    with pytest.raises(RuntimeError, match=r"the MCP server http://127.0.0.1:9/mcp cannot be used"):
        _ = MCP(["add"], url="http://127.0.0.1:9/mcp").schemas


@pytest.mark.slow
def test_tools_of_an_mcp_server():
    pytest.importorskip("mcp", reason="needs mcp")
    (schema,) = MCP(["add"], command=SERVER).schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    with pytest.raises(ValueError, match="the MCP server has no tool 'sub', only add, die, secret"):
        _ = MCP(["sub"], command=SERVER).schemas
    host = LoopHost(Spec(MCP, {"tools": ["add", "die"], "command": SERVER}), 30.0, 4)
    try:
        digest = digest_of(host.call(Call("a", {}, 0)).result(30))
        calls = (ToolCall("add", {"a": 2, "b": 3}, "c"), ToolCall("add", {"a": "x"}), ToolCall("secret", {}))
        reply = host.call(Call("a", {}, 0, (Turn("", calls),), (digest,))).result(30)
        right, wrong, hidden = [message["content"] for message in reply.messages]
        assert (right, hidden) == ("5", "Error: there is no tool 'secret', only add, die")
        assert wrong.startswith("Error: ")
        assert reply.metrics == {"tool_errors": 2.0}
        dead = host.call(Call("b", {}, 0)).result(30)
        dead = host.call(Call("b", {}, 0, (Turn("", (ToolCall("die", {}),)),), (digest_of(dead),))).result(40)
        assert isinstance(dead, Fault)
        host.release("a")
    finally:
        host.close()


def test_turn_without_a_call_ends_the_conversation_with_an_mcp_server():
    instance = MCP(["add"], url="http://127.0.0.1:9/mcp")
    assert asyncio.run(instance.step(Turn("5"))) == Reply(done=True)
    malformed = asyncio.run(instance.step(Turn("", malformed="call 1: no JSON")))
    assert malformed.messages[0]["content"] == "Error: the tool call could not be read: call 1: no JSON"


HOSTILE = [sys.executable, str(Path(__file__).with_name("hostile_mcp_server.py"))]


def called(mode, timeout_s=None):
    """Return the message of a tool call to a misbehaving server, or the error."""
    pytest.importorskip("mcp", reason="needs mcp")

    async def run():
        instance = MCP(["act"], command=[*HOSTILE, mode], timeout_s=timeout_s)
        try:
            return (await instance.step(Turn("", (ToolCall("act", {}),)))).messages[0]["content"]
        finally:
            await instance.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("well", "done"),
        ("image", "a\n(a result of type image was left out: only texts can be read)"),
        ("resource", "inside"),
    ],
)
def test_mcp_results_become_texts(mode, text):
    assert called(mode) == text


def test_too_long_mcp_call_is_a_message():
    assert called("slow", timeout_s=0.3) == "Error: act took longer than its time limit of 0.3 s"


def test_ended_mcp_server_is_reported_with_the_cause():
    with pytest.raises(RuntimeError, match=r"the MCP server .*hostile_mcp_server.py exit failed: .*[Cc]losed"):
        called("exit")


def test_mcp_server_that_writes_endlessly_is_ended():
    began, before = time.monotonic(), psutil.Process().memory_info().rss
    with pytest.raises(RuntimeError, match=r"the MCP server .*hostile_mcp_server.py endless failed"):
        called("endless")
    assert time.monotonic() - began < 15
    assert psutil.Process().memory_info().rss - before < 100e6


def test_server_that_writes_a_too_long_line_is_ended_and_others_keep_their_exit_code():
    def run(limit, program):
        command = [sys.executable, line_limit.__file__, str(limit), sys.executable, "-c", program]
        return subprocess.run(command, input="abc\n", capture_output=True, text=True, timeout=20)

    good = run(4, "import sys; print(input()); print(input() if 0 else 'de', end=''); sys.exit(5)")
    assert (good.stdout, good.returncode) == ("abc\nde", 5)
    long = run(3, "print(input()); input()")
    assert (long.stdout, long.returncode) == ("", 1)
    assert "the MCP server wrote a line of more than 3 bytes, and was ended" in long.stderr


def test_mcp_tools_on_later_pages_are_found():
    pytest.importorskip("mcp", reason="needs mcp")
    (schema,) = MCP(["act"], command=[*HOSTILE, "pages"]).schemas
    assert schema["function"]["description"] == "acts"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("long", r"endless_name describes the tool 'act' with 300\d+ characters, at most 100000 are allowed"),
        ("silent", r"the MCP server .* silent cannot be used: it did not list its tools within 0.5 s"),
    ],
)
def test_mcp_tool_descriptions_are_limited(mode, message, monkeypatch):
    pytest.importorskip("mcp", reason="needs mcp")
    monkeypatch.setattr(mcp_adapter, "_LIST_SECONDS", 0.5 if mode == "silent" else 30.0)
    with pytest.raises((ValueError, RuntimeError), match=message.replace("endless_name", ".* long")):
        _ = MCP(["act"], command=[*HOSTILE, mode]).schemas


def test_missing_mcp_command_is_reported():
    pytest.importorskip("mcp", reason="needs mcp")
    with pytest.raises(ValueError, match="the program 'no-such-program' of the MCP server was not found"):
        _ = MCP(["act"], command=["no-such-program"]).schemas


@contextlib.contextmanager
def http_server(answer):
    """Serve POST requests with a function of the handler; yield the address."""
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_POST": answer, "log_message": lambda *_: None})
    server = HTTPStandIn(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    finally:
        server.shutdown()
        server.server_close()


def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://127.0.0.1:9/other")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def endless(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(3000):
            handler.wfile.write(b"x" * 65536)


@pytest.mark.parametrize(
    ("answer", "cause"), [(redirect, "Redirect"), (endless, "sent a response of more than 10000000 bytes")]
)
def test_misbehaving_mcp_server_over_http_is_reported_with_the_cause(answer, cause):
    pytest.importorskip("mcp", reason="needs mcp")
    with (
        http_server(answer) as url,
        pytest.raises(RuntimeError, match=rf"(?s)the MCP server {url} cannot be used: .*{cause}"),
    ):
        _ = MCP(["act"], url=url).schemas
