"""Environments of OpenEnv servers: a fake server with the same wire format, and the real one if it is installed."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_rlhf.environments import Reply, Turn
from lightning_rlhf.environments.host import Call, Fault, Spec
from lightning_rlhf.environments.live import digest_of
from lightning_rlhf.environments.loop_host import LoopHost
from lightning_rlhf.extras.environments.openenv import OpenEnv

websockets = pytest.importorskip("websockets", reason="needs websockets")
PYTHON = os.environ.get("LIGHTNING_RLHF_OPENENV_PYTHON")


class FakeServer:
    """The messages of `/ws` in `openenv/core/env_server/http_server.py` of openenv 0.10.0.

    `reset` and `step` are answered by `{"type": "observation", "data": {"observation": {...}, "reward": ..., "done":
    ...}}`, errors by `{"type": "error", "data": {"message": ..., "code": ...}}`, `close` by the end of the connection.
    """

    def __init__(self):
        self.received, self.paths, self.closed = [], [], 0
        self.full = False

    async def __call__(self, connection):
        from websockets.exceptions import ConnectionClosed

        self.paths.append(connection.request.path)
        if self.full:
            data = {"message": "at capacity: 1/1 sessions", "code": "CAPACITY_REACHED", "max_sessions": 1}
            await connection.send(json.dumps({"type": "error", "data": data}))
            return
        try:
            async for raw in connection:
                message = json.loads(raw)
                self.received.append(message)
                if message["type"] == "close":
                    return
                answer = self.answer(message)
                if answer is None:
                    return
                await connection.send(answer if isinstance(answer, str) else json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            self.closed += 1

    def answer(self, message):
        if message["type"] == "reset":
            seed = message["data"]["seed"]
            return observation({"text": f"seed {seed}", "metadata": {}}, None, False)
        text = message["data"]["command"]
        special = {
            "leave": None,
            "garbage": "{",
            "deep": "[" * 100_000,
            "list": "[1]",
            "wrong": {"type": "error", "data": {"message": "no such room", "code": "EXECUTION_ERROR"}},
            "invalid": {
                "type": "error",
                "data": {
                    "message": "Invalid message",
                    "code": "VALIDATION_ERROR",
                    "errors": [{"type": "missing", "loc": ["move"]}],
                },
            },
            "long": {"type": "error", "data": {"message": "x" * 10**7, "code": "y" * 10**6, "errors": ["z" * 10**6]}},
            "other": observation({"board": 3}, 0.0, False),
            "board": observation({"text": [1, "ä"]}, 1, False),
            "empty": observation({"text": None}, True, True),
            "nan": observation({"text": ""}, "much", True),
        }
        return special[text] if text in special else observation({"text": f"you {text}"}, 0.25, text == "end")


def observation(fields, reward, done):
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


@contextmanager
def served(handler):
    """Serve a handler on a free port in a thread; yield the address."""
    from websockets.asyncio.server import serve

    loop, started = asyncio.new_event_loop(), threading.Event()
    ports = []

    async def run():
        async with serve(handler, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            stop = asyncio.Event()
            ports.append(stop)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(ports[1].set)
        thread.join(10)
        loop.close()


@pytest.fixture
def server():
    handler = FakeServer()
    with served(handler) as url:
        handler.url = url
        yield handler


def play(environment, *texts, seed=7):
    """Return the replies of an environment to reset and some turns, and close it."""

    async def run():
        try:
            return [await environment.reset(seed=seed), *[await environment.step(text=text) for text in texts]]
        finally:
            await environment.close()

    return asyncio.run(run())


def wait_until_closed(server, count):
    """Wait until a server has read the last messages of some connections."""
    deadline = time.monotonic() + 10
    while server.closed < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_session_on_a_server(server):
    environment = OpenEnv(f"{server.url}/", action="command", observation="text")
    assert play(environment, "walk", "board", "empty", "end", seed=2**31 + 7) == [
        Reply("seed 7"),
        Reply("you walk", 0.25),
        Reply('[1, "ä"]', 1.0),
        Reply("", 1.0, True),
        Reply("you end", 0.25, True),
    ]
    assert server.paths == ["/ws"]
    assert server.received[0] == {"type": "reset", "data": {"seed": 7}}
    assert server.received[1] == {"type": "step", "data": {"command": "walk"}}
    wait_until_closed(server, 1)
    assert server.received[-1] == {"type": "close"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave", r"the OpenEnv server http://127.0.0.1:\d+ closed the connection: .*1000"),
        ("garbage", r"the OpenEnv server http://127.0.0.1:\d+ sent a message that is not JSON"),
        ("deep", r"the OpenEnv server http://127.0.0.1:\d+ sent a message that is not JSON"),
        ("list", r"replied to 'step' without the field 'text' of an observation: \[1\]"),
        ("wrong", r"the OpenEnv server http://127.0.0.1:\d+ rejected 'step': no such room \(EXECUTION_ERROR\)$"),
        ("invalid", r"rejected 'step': Invalid message \(VALIDATION_ERROR\): .*\"missing\", \"loc\": \[\"move\"\]"),
        ("other", r"without the field 'text' of an observation: .*\"board\": 3"),
    ],
)
def test_failures_include_the_address_of_the_server(server, text, message):
    with pytest.raises(RuntimeError, match=message):
        play(OpenEnv(server.url, "command", "text"), text)


def test_long_server_errors_are_cut(server):
    with pytest.raises(RuntimeError, match=r"rejected 'step': x{1000} ") as caught:
        play(OpenEnv(server.url, "command", "text"), "long")
    assert len(str(caught.value)) < 3000


def test_server_without_a_free_session_is_reported(server):
    server.full = True
    with pytest.raises(RuntimeError, match=r"rejected 'reset': at capacity: 1/1 sessions \(CAPACITY_REACHED\)"):
        play(OpenEnv(server.url, "command", "text"))


def test_unreachable_server_is_reported():
    with pytest.raises(RuntimeError, match=r"the OpenEnv server http://127.0.0.1:9 cannot be reached: .*"):
        play(OpenEnv("http://127.0.0.1:9", "command", "text"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", ""])
def test_addresses_have_a_scheme_and_a_host(url):
    with pytest.raises(ValueError, match="url of OpenEnv must begin with http://, https://, ws:// or wss://"):
        OpenEnv(url, "command", "text")


def test_secure_servers_use_secure_websockets():
    assert OpenEnv("https://a.example/env/", "command", "text")._address == "wss://a.example/env/ws"


def conversation(host, key, *texts, seed=3):
    """Return the replies of a host to one conversation."""
    replies, turns = [host.call(Call(key, {}, seed)).result(30)], ()
    for text in texts:
        turns += (Turn(text),)
        digests = tuple(digest_of(reply) for reply in replies)
        replies.append(host.call(Call(key, {}, seed, turns, digests)).result(30))
    return replies


def test_conversations_of_a_run_have_separate_sessions(server):
    host = LoopHost(Spec(OpenEnv, {"url": server.url, "action": "command", "observation": "text"}), 10.0, 4)
    try:
        first = conversation(host, "a", "go", "stay")
        assert [reply.messages for reply in first] == ["seed 3", "you go", "you stay"]
        assert conversation(host, "b", "leave")[-1].kind == "error"
        assert conversation(host, "c", "nan")[-1].kind == "invalid"
        host.release("a")
        wait_until_closed(server, 3)
        assert (len(server.paths), server.closed) == (3, 3)
        assert conversation(host, "d", "go")[-1].messages == "you go"  # open when the host is closed
    finally:
        host.close()


# -- the real server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_server():
    if PYTHON is None:
        pytest.skip("needs LIGHTNING_RLHF_OPENENV_PYTHON, the Python of an environment with openenv 0.10")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(__file__).with_name("openenv_server.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([PYTHON, str(program), str(port)], env=environment)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_game_on_the_real_server(real_server):
    spec = Spec(OpenEnv, {"url": real_server, "action": "guess", "observation": "text"})
    host = LoopHost(spec, 30.0, 4)
    try:
        first, second = conversation(host, "a", "6", "2", seed=3), conversation(host, "b", "5", seed=5)
        assert first == [Reply("guess 0..7"), Reply("<", 0.0), Reply(">", 0.0)]
        assert second[-1] == Reply("", 1.0, True)
        full = conversation(host, "c")[0]  # two sessions are open, as many as the server allows
        assert isinstance(full, Fault)
        assert "CAPACITY_REACHED" in full.message
        host.release("a")
        host.release("b")
        time.sleep(1)
        beyond, invalid = (conversation(host, key, text)[-1] for key, text in (("d", "9"), ("e", "six")))
        assert f"the OpenEnv server {real_server} rejected 'step': out of range (EXECUTION_ERROR)" in beyond.message
        assert "Invalid message (VALIDATION_ERROR)" in invalid.message
        assert "valid integer" in invalid.message
        wrong = LoopHost(Spec(OpenEnv, {**spec.arguments, "observation": "txt"}), 30.0, 1)
        assert "without the field 'txt'" in conversation(wrong, "f")[0].message
        wrong.close()
    finally:
        host.close()
