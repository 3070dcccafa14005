"""Hosts of environments: limits, ends, processes."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from lightning_rlhf.calls.workers import WorkerPool
from lightning_rlhf.environments import Environment, Reply, Turn
from lightning_rlhf.environments.host import Call, Fault, Spec
from lightning_rlhf.environments.hosts import ProcessHost, ThreadHost, make_host
from lightning_rlhf.environments.live import digest_of
from lightning_rlhf.environments.loop_host import LoopHost
from tests.environments import worlds


@pytest.fixture
def host():
    """Create hosts and close them."""
    hosts = []

    def host(factory, timeout_s=30.0, concurrency=2, **arguments):
        hosts.append(make_host(Spec(factory, arguments), timeout_s, concurrency))
        return hosts[-1]

    yield host
    for item in hosts:
        item.close()


def talk(host, key, *texts, row=None, seed=0):
    """Send turns sequentially and return the replies."""
    turns, digests, replies = [], [], []
    for text in (None, *texts):
        if text is not None:
            turns.append(Turn(text, number=len(turns)))
        replies.append(host.call(Call(key, row or {}, seed, tuple(turns), tuple(digests))).result(60))
        if isinstance(replies[-1], Fault):
            break
        digests.append(digest_of(replies[-1]))
    return replies


def test_kind_of_environment_and_its_limit_select_the_host(host):
    assert isinstance(host(worlds.Echo), ProcessHost)
    assert isinstance(host(worlds.Echo, timeout_s=None), ThreadHost)
    assert isinstance(host(worlds.SlowEcho), LoopHost)
    assert isinstance(host(worlds.SlowEcho, timeout_s=None), LoopHost)


@pytest.mark.parametrize(("factory", "timeout_s"), [(worlds.Echo, 30.0), (worlds.Echo, None), (worlds.SlowEcho, 30.0)])
def test_conversations_have_separate_environments(host, factory, timeout_s):
    instance = host(factory, timeout_s)
    assert talk(instance, "a", "xyz", "uv")[1:] == [Reply("xy"), Reply("uv")]
    assert talk(instance, "b", "123")[1:] == [Reply("12")]
    instance.release("a")
    assert talk(instance, "a", "q")[1:] == [Reply("q")]


@pytest.mark.slow
def test_too_long_call_ends_only_its_process(host):
    instance = host(worlds.Misbehaves, timeout_s=1.0, concurrency=1)
    good = [Turn("ab"), Turn("cd", number=1), Turn("ef", number=2)]
    row, digests = {"fault": ""}, []
    for count in range(3):
        reply = instance.call(Call("good", row, 0, tuple(good[:count]), tuple(digests))).result(30)
        digests.append(digest_of(reply))
        assert talk(instance, f"bad {count}", "x", "y", row={"fault": "hang"})[-1].kind == "timeout"
    assert reply == Reply("cd")
    assert instance.call(Call("good", row, 0, tuple(good), tuple(digests))).result(30) == Reply("ef")


class Slow(Environment):
    def step(self, turn):
        time.sleep(60 if turn.text == "hang" else 0.6)
        return turn.text


@pytest.mark.slow
def test_call_that_waits_for_one_that_is_ended_may_repeat_its_conversation(host):
    instance = host(Slow, timeout_s=1.0, concurrency=1)
    talk(instance, "bad")
    waiting, digests = [Turn("a"), Turn("b", number=1), Turn("c", number=2)], []
    for count in range(3):
        digests.append(digest_of(instance.call(Call("good", {}, 0, tuple(waiting[:count]), tuple(digests))).result(30)))
    bad = instance.call(Call("bad", {}, 0, (Turn("hang"),), ()))
    good = instance.call(Call("good", {}, 0, tuple(waiting), tuple(digests)))
    assert bad.result(30).kind == "timeout"
    assert good.result(30) == Reply("c")


@pytest.mark.slow
def test_closed_host_leaves_no_processes(host):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    instance = host(worlds.Harmless, concurrency=3)
    for number in range(6):
        talk(instance, f"c{number}", "a", "b", row={"act": "fork"})
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert started
    instance.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert [child for child in alive if "sleep" in " ".join(child.cmdline())] == []
    assert len(alive) <= 1  # the resource tracker of multiprocessing


def test_number_of_processes_is_limited(host):
    instance = host(Pid, concurrency=2)
    calls = [instance.call(Call(str(i), {}, 0)) for i in range(8)]
    assert len({call.result(60).messages for call in calls}) <= 2


class Pid(Environment):
    """Replies with the id of its process."""

    def reset(self):
        time.sleep(0.05)
        return str(os.getpid())


class Sleeps(Environment):
    """Waits in one of several ways, which a turn selects."""

    async def step(self, text):
        if text == "await":
            await asyncio.sleep(3600)
        if text == "block":
            time.sleep(3.0)
        if text == "forever":
            time.sleep(8.0)
        if text == "exit":
            raise SystemExit(1)
        if text == "cancel":
            raise asyncio.CancelledError
        return text


@pytest.mark.parametrize(("text", "kind"), [("await", "timeout"), ("exit", "error"), ("cancel", "error")])
def test_failing_async_environment_does_not_affect_others(host, text, kind):
    instance = host(Sleeps, timeout_s=0.5)
    calls = [Call("good", {}, 0), Call("bad", {}, 0)]
    digests = tuple(digest_of(instance.call(call).result(10)) for call in calls)
    bad = instance.call(Call("bad", {}, 0, (Turn(text),), digests[:1]))
    good = instance.call(Call("good", {}, 0, (Turn("a"),), digests[:1]))
    assert good.result(10) == Reply("a")
    assert bad.result(10).kind == kind
    assert text != "exit" or bad.result().message == "raised SystemExit: 1"


class Closes(Sleeps):
    """Writes its seed to a file shortly after it is closed."""

    def __init__(self, log):
        self.log = log

    async def reset(self, seed):
        self.seed = seed

    async def close(self):
        await asyncio.sleep(0.05)
        with open(self.log, "a") as log:
            log.write(f"{self.seed} ")


def test_async_environments_are_closed_with_their_loop(host, tmp_path):
    """One that is being closed, one with a running call, and an idle one."""
    instance = host(Closes, log=str(tmp_path / "log"))
    digests = [digest_of(instance.call(Call(str(seed), {}, seed)).result(10)) for seed in range(3)]
    call = instance.call(Call("1", {}, 1, (Turn("await"),), digests[:1]))
    instance.release("0")
    instance.close()
    deadline = time.monotonic() + 10
    while not (tmp_path / "log").exists() or len((tmp_path / "log").read_text().split()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "1", "2"]
    assert not call.done()


def test_async_environment_that_blocks_its_loop_is_abandoned(host):
    instance = host(Sleeps, timeout_s=0.2)
    digest = digest_of(instance.call(Call("bad", {}, 0)).result(10))
    call = instance.call(Call("bad", {}, 0, (Turn("block"),), (digest,)))
    while not call.done():
        time.sleep(0.1)
        instance.end_overdue()
    assert call.result() == Fault("timeout", "blocked its event loop for longer than 0.2 s")
    assert talk(instance, "next", "a")[-1] == Reply("a")


def test_calls_waiting_for_a_blocked_loop_are_repeated_in_a_new_one(host):
    instance = host(Sleeps, timeout_s=0.3, concurrency=1)
    digest = digest_of(instance.call(Call("bad", {}, 0)).result(10))
    bad = instance.call(Call("bad", {}, 0, (Turn("forever"),), (digest,)))
    time.sleep(0.1)
    good = instance.call(Call("good", {}, 0))
    while not (bad.done() and good.done()):
        time.sleep(0.1)
        instance.end_overdue()
    assert bad.result().kind == "timeout"
    assert good.result() == Reply()
    assert instance.call(Call("good", {}, 0, (Turn("a"),), (digest,))).result(10) == Reply("a")


def test_number_of_simultaneous_async_calls_is_limited(host):
    instance = host(Counting, concurrency=3)
    Counting.running = Counting.most = 0
    calls = [instance.call(Call(str(i), {}, 0)) for i in range(9)]
    assert all(call.result(10) == Reply() for call in calls)
    assert Counting.most == 3


class Counting(Environment):
    """Counts simultaneous calls."""

    running = most = 0

    async def reset(self):
        Counting.running += 1
        Counting.most = max(Counting.most, Counting.running)
        await asyncio.sleep(0.02)
        Counting.running -= 1

    async def step(self, text):
        return text


class FailsToClose(Environment):
    """Raises an error when it is closed; without one, waits until it is cancelled."""

    def __init__(self, error=None):
        self.error = error

    async def close(self):
        if self.error is not None:
            raise self.error
        await asyncio.sleep(3600)

    def step(self, text):
        return text


class FailsToCloseInLoop(FailsToClose):
    """Does the same with an ``async`` step."""

    async def step(self, text):
        return text


def test_close_that_is_cancelled_at_its_limit_is_not_an_error_of_the_environment(host, capfd):
    instance = host(FailsToCloseInLoop, timeout_s=0.2)
    talk(instance, "a", "x")
    instance.release("a")
    assert instance.call(Call("b", {}, 0)).result(10) == Reply()  # the release has begun
    instance.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
@pytest.mark.parametrize("timeout_s", [30.0, None])
def test_error_while_an_environment_is_closed_does_not_end_the_run(host, timeout_s, error):
    instance = host(FailsToClose, timeout_s=timeout_s, error=error)
    assert talk(instance, "a", "x")[1:] == [Reply("x")]
    assert talk(instance, "b", "x")[1:] == [Reply("x")]
    instance.release("a")
    assert talk(instance, "c", "x")[1:] == [Reply("x")]
    instance.close()


class KeepsItsLoop(Environment):
    """Returns an awaitable result from a method that is not async."""

    loops: ClassVar[list] = []

    def step(self, text):
        return self.answer(text)

    async def answer(self, text):
        KeepsItsLoop.loops.append(asyncio.get_running_loop())
        return text


def test_event_loop_of_a_thread_is_used_again_and_closed_with_its_thread(host):
    instance = host(KeepsItsLoop, timeout_s=None, concurrency=1)
    assert talk(instance, "a", "x", "y")[1:] == [Reply("x"), Reply("y")]
    first, second = KeepsItsLoop.loops
    assert first is second
    assert not first.is_closed()
    instance.close()
    end = time.monotonic() + 10
    while not first.is_closed() and time.monotonic() < end:
        time.sleep(0.01)
    assert first.is_closed()


def test_broken_pool_that_starts_no_process_is_a_failure(host, monkeypatch):
    def fail(*arguments, **options):
        raise BrokenProcessPool("no process")

    monkeypatch.setattr(WorkerPool, "schedule", fail)
    fault = host(worlds.Echo).call(Call("a", {}, 0)).result(10)
    assert fault == Fault("died", "has no worker process: no process")


class Interrupts(Environment):
    """Raises KeyboardInterrupt if its row requests it."""

    def __init__(self, at="step"):
        if at == "made":
            raise KeyboardInterrupt("made")
        self.at = at

    def reset(self):
        if self.at == "reset":
            raise KeyboardInterrupt("reset")

    def step(self, text):
        raise KeyboardInterrupt("step")


class InterruptsLoop(Interrupts):
    """Raises KeyboardInterrupt in an ``async`` step."""

    async def step(self, text):
        raise KeyboardInterrupt("step")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("at", ["made", "reset", "step"])
@pytest.mark.parametrize(
    ("factory", "timeout_s"), [(Interrupts, 30.0), (Interrupts, None), (InterruptsLoop, 30.0), (InterruptsLoop, None)]
)
def test_interrupt_raised_by_an_environment_is_its_failure(host, factory, timeout_s, at):
    instance = host(factory, timeout_s, at=at)
    digests = (digest_of(Reply()),) if at == "step" else ()
    if at == "step":
        assert instance.call(Call("a", {}, 0)).result(10) == Reply()
    fault = instance.call(Call("a", {}, 0, (Turn("x"),) if digests else (), digests)).result(10)
    assert (fault.kind, fault.message) == ("error", f"raised KeyboardInterrupt: {at}")
    again = instance.call(Call("b", {}, 0)).result(10)
    assert again == Reply() if at == "step" else again.kind == "error"


class Exhausted:
    """Raises StopIteration."""

    def step(self, text):
        return next(iter([]))


class ExhaustedLoop(Exhausted):
    """Raises StopIteration in an ``async`` reset."""

    async def reset(self, row):
        pass


@pytest.mark.parametrize("factory", [Exhausted, ExhaustedLoop])
def test_stop_iteration_of_an_environment_is_its_failure(host, factory):
    fault = host(factory, None).call(Call("a", {}, 0, (Turn("x"),), (digest_of(Reply()),))).result(10)
    assert (fault.kind, fault.message) == ("error", "raised RunError: StopIteration")


STARTS_SOMETIMES = """
import os
from pathlib import Path

if Path(__file__).with_name("broken").exists():
    os._exit(3)


class Echo:
    def step(self, text):
        return text
"""


def test_process_that_cannot_start_is_a_failure_and_a_later_call_starts_another(tmp_path, monkeypatch):
    (tmp_path / "world.py").write_text(STARTS_SOMETIMES)
    (tmp_path / "broken").touch()
    instance = ProcessHost(Spec(f"{tmp_path / 'world.py'}:Echo"), 30.0, 1)
    try:
        began = time.monotonic()
        first = [instance.call(Call(str(i), {}, 0)) for i in range(4)]
        faults = [call.result(60) for call in first]
        assert {fault.kind for fault in faults} == {"died"}
        assert "if __name__ == '__main__'" in faults[0].message
        assert time.monotonic() - began < 30
        (tmp_path / "broken").unlink()
        assert talk(instance, "a", "xyz")[1:] == [Reply("xyz")]
    finally:
        instance.close()


class RaisesLong(Environment):
    """Raises an error with a very long text."""

    def step(self, text):
        raise ValueError("x" * 10**7 + "y")


class RaisesLongInLoop(RaisesLong):
    """Raises such an error in an ``async`` step."""

    async def step(self, text):
        raise ValueError("x" * 10**7 + "y")


@pytest.mark.parametrize(("factory", "timeout_s"), [(RaisesLong, 30.0), (RaisesLong, None), (RaisesLongInLoop, 30.0)])
def test_messages_and_tracebacks_of_failures_are_cut_in_the_middle(host, factory, timeout_s):
    fault = talk(host(factory, timeout_s), "a", "b")[-1]
    assert fault.message.startswith("raised ValueError: xxx")
    assert fault.trace.startswith("Traceback")
    assert "in step" in fault.trace
    assert fault.trace.endswith("xy\n")
    assert len(fault.message) <= 2000
    assert len(fault.trace) <= 20_100


SCRIPT = """
from lightning_rlhf.environments.hosts import ProcessHost
from lightning_rlhf.environments.live import Call, Spec

host = ProcessHost(Spec("tests.environments.worlds:Echo"), 30.0, 1)
print(host.call(Call("a", {}, 0)).result(60).message)
host.close()
"""


@pytest.mark.slow
def test_script_that_its_workers_would_run_again_is_reported(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.stdout.startswith("has no worker process: the process ended while it started")
    assert "if __name__ == '__main__':" in ran.stdout
    assert "before the\n        current process has finished its bootstrapping phase" in ran.stderr


def test_call_whose_process_is_killed_is_repeated(tmp_path):
    host = ProcessHost(Spec("tests.environments.worlds:KilledOnce", {"path": str(tmp_path / "killed")}), 60.0, 1)
    try:
        replies, turns = [host.call(Call("a", {}, 0)).result(120)], []
        for number in range(3):
            turns.append(Turn("x", number=number))
            call = Call("a", {}, 0, tuple(turns), tuple(map(digest_of, replies)))
            replies.append(host.call(call).result(120))
    finally:
        host.close()
    assert (tmp_path / "killed").exists()
    assert [reply.messages for reply in replies[1:]] == ["reply 0", "reply 1", "reply 2"]
