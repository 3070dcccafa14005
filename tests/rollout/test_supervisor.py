"""Supervision of the engine process: a dead engine never leaves callers waiting and its reason is reported.
The worker is the real one with a fake vLLM."""

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
import torch

from lightning_rlhf.expected_errors import EngineDied, ExpectedError, RunError
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.requests import as_completion, as_requests, check_tokens
from lightning_rlhf.rollout.vllm.supervisor import EngineProcess, Restarts
from lightning_rlhf.types import SamplingParams, TokenPrompt
from tests.rollout.engines import parameters_of, setup_of, source_of

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    started = []

    def start(environment=None, **arguments):
        process = EngineProcess(
            "tests.rollout.stub_worker", arguments, environment or {}, tmp_path / "new" / "engine.log"
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.process.kill()
        process.close()


def request(*prompt):
    return {"prompt": list(prompt), "sampling": {"max_tokens": 900}, "seed": 0}


def wait_for_end(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_start_does_not_block(start):
    began = time.monotonic()
    engine = start(slow=3)
    assert time.monotonic() - began < 1
    assert not engine.ready.done()
    assert engine.ready.result(WAIT)["pid"] == engine.process.pid


def test_each_future_gets_its_answer_in_any_order_of_completion(start):
    engine = start()
    engine.command("load", weights={}, version=7).result(WAIT)
    prompts = [[3] * 9, [1], [2, 2, 2]]
    futures = engine.generate([request(*prompt) for prompt in prompts])
    answers = [future.result(WAIT) for future in futures]
    assert [answer["token_ids"] for answer in answers] == prompts
    assert {answer["policy_version"] for answer in answers} == {7}


def test_threads_may_send_requests_simultaneously(start):
    engine = start()
    with ThreadPoolExecutor(8) as threads:
        requested = threads.map(
            lambda i: engine.generate([request(*[i] * (i + 1))])[0].result(WAIT)["token_ids"], range(24)
        )
        assert list(requested) == [[i] * (i + 1) for i in range(24)]


def test_rejected_batch_fails_all_its_futures_and_the_engine_continues(start):
    engine = start()
    futures = engine.generate([request(1), request(), request(2)])
    for future in futures:
        with pytest.raises(RuntimeError, match="ValueError: an empty prompt"):
            future.result(WAIT)
    with pytest.raises(RuntimeError, match="TypeError: no weights"):
        engine.command("load", weights=None, version=1).result(WAIT)
    assert engine.generate([request(5)])[0].result(WAIT)["token_ids"] == [5]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_engine_is_reported_within_a_second_to_all_waiting_callers(start, tmp_path, number):
    engine = start()
    engine.ready.result(WAIT)
    futures = [engine.generate([request(*[1] * 100000)])[0] for _ in range(3)]
    killed = time.monotonic()
    os.kill(engine.process.pid, number)
    for future in futures:
        with pytest.raises(EngineDied) as death:
            future.result(WAIT)
    assert time.monotonic() - killed < 1
    assert f"{engine.process.pid} died: killed by signal {number.value} ({number.name})" in str(death.value)
    assert str(tmp_path / "new" / "engine.log") in str(death.value)
    for request_again in (lambda: engine.generate([request(1)]), lambda: engine.command("load", weights={}, version=1)):
        with pytest.raises(EngineDied, match=number.name):
            request_again()


def test_requests_around_the_death_of_the_engine_all_raise(start):
    engine = start()
    engine.ready.result(WAIT)

    def request_until_dead():
        while True:
            engine.generate([request(1, 2)])[0].result(WAIT)

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(request_until_dead) for _ in range(6)]
        time.sleep(0.2)
        engine.process.kill()
        for answer in asking:
            with pytest.raises(EngineDied):
                answer.result(WAIT)


def test_engine_that_cannot_start_reports_the_reason(start, tmp_path):
    with pytest.raises(EngineDied) as death:
        start(refuse="heads of 48 are unknown").ready.result(WAIT)
    message = str(death.value)
    assert "died: ValueError: heads of 48 are unknown; its log is " in message
    assert "\n" not in message  # a single line
    assert "Traceback" in (tmp_path / "new" / "engine.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"exit": 3}, "exit code 3"), ({"kill": signal.SIGABRT.value}, r"killed by signal 6 \(SIGABRT\)")],
)
def test_silent_exit_is_reported_with_the_end_of_the_log(start, arguments, message):
    progress = "(EngineCore pid=7) INFO 11-29 15:00:00 [core.py:1] loading\nINFO 11-29 15:00:01 [core.py:2] loaded"
    with pytest.raises(EngineDied, match=rf"died: {message}; its log is .*, and ends:\nout of cheese$"):
        start(chatter=f"{progress}\nout of cheese", **arguments).ready.result(WAIT)


def test_temporary_files_are_next_to_the_log_and_those_of_a_killed_run_are_removed(start, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "engine.tmp"
    monkeypatch.setattr("lightning_rlhf.processes.child._MOST_SOCKET_PATH_BYTES", len(str(folder)) + 37)
    folder.mkdir(parents=True)
    (folder / "vllm_dist_of_a_dead_run").touch()
    engine = start()
    engine.ready.result(WAIT)
    assert list(folder.iterdir()) == []
    assert psutil.Process(engine.process.pid).environ()["TMPDIR"] == str(folder)
    engine.close()
    assert not folder.exists()


def test_path_too_long_for_sockets_uses_the_system_folder_for_temporary_files(start, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "new" / "engine.tmp"
    monkeypatch.setattr("lightning_rlhf.processes.child._MOST_SOCKET_PATH_BYTES", len(str(folder)) + 36)
    monkeypatch.setenv("TMPDIR", "/tmp")
    with caplog.at_level(logging.INFO, logger="lightning_rlhf"):
        monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
        engine = start()
    engine.ready.result(WAIT)
    assert psutil.Process(engine.process.pid).environ()["TMPDIR"] == "/tmp"
    assert not folder.exists()
    assert f"paths of sockets in {folder} would be 1 bytes too long." in caplog.text


def test_first_missing_module_in_the_log_is_reported(start):
    chatter = "ModuleNotFoundError: No module named 'torchvision'\nModuleNotFoundError: No module named 'second'"
    with pytest.raises(
        EngineDied, match=r"died: No module named 'torchvision' \(the first .* log\), then ValueErr"
    ) as e:
        start(chatter=chatter, refuse="Model architectures ['X'] failed to be inspected").ready.result(WAIT)
    assert "second" not in str(e.value)


def test_error_during_generation_ends_the_engine_with_that_error(start):
    engine = start()
    futures = engine.generate([request(1, 1, 1, 1), request(666)])
    for future in futures:
        with pytest.raises(EngineDied, match="FloatingPointError: the engine burnt down"):
            future.result(WAIT)


def test_close_ends_the_process_and_the_thread_and_frees_the_descriptors(start):
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = start()
    engine.ready.result(WAIT)
    engine.close()
    assert engine.process.returncode == 0
    assert not engine._reader.is_alive()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    engine.close()


def test_close_ends_a_starting_engine_immediately(start):
    engine, began = start(slow=1000), time.monotonic()
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 2


def test_close_ends_an_unresponsive_engine(start, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._CLOSE_SECONDS", 0.5)
    engine = start(deaf=True)
    engine.ready.result(WAIT)
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL


def test_dead_engine_can_be_closed(start):
    engine = start(exit=1)
    engine.process.wait(WAIT)
    engine.close()


@pytest.fixture
def grandchild(start, tmp_path):
    def grandchild(**arguments):
        engine = start(child=str(tmp_path / "child"), **arguments)
        engine.ready.result(WAIT)
        return engine, psutil.Process(int((tmp_path / "child").read_text()))

    return grandchild


def gone(process):
    return wait_for_end(process.pid, 5)


@pytest.mark.slow
def test_close_ends_child_processes_of_the_engine(grandchild):
    engine, child = grandchild()
    engine.close()
    assert engine.process.returncode == 0
    assert gone(child)


@pytest.mark.slow
def test_ending_an_unresponsive_engine_ends_its_child_processes(grandchild, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._CLOSE_SECONDS", 0.5)
    engine, child = grandchild(deaf=True)
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL
    assert gone(child)


def test_death_of_the_engine_ends_its_child_processes(grandchild):
    engine, child = grandchild()
    engine.process.kill()
    assert gone(child)


@pytest.mark.parametrize("babble", [-1, -2, -3])
def test_malformed_answer_ends_the_engine_and_raises_for_all_waiting_callers(start, babble):
    engine, began = start(), time.monotonic()
    futures = engine.generate([request(1, 1, 1), request(babble, 1, 1, 1)])
    for future in futures:
        with pytest.raises(EngineDied, match="it sent an invalid message"):
            future.result(WAIT)
    assert time.monotonic() - began < 5  # not as long as it would take to close
    assert engine.process.returncode == -signal.SIGKILL


def test_error_of_the_reading_thread_raises_for_all_waiting_callers(start, monkeypatch):
    engine, faults = start(), []
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(threading, "excepthook", lambda fault: faults.append(fault.exc_value))
    engine.ready.result(WAIT)
    futures = engine.generate([request(1), request(1, 1, 1)])
    next(iter(engine._pending.values()))[0].set_result({})  # answered twice, which a future refuses
    with pytest.raises(EngineDied, match="SIGKILL"):
        futures[1].result(WAIT)
    engine.close()
    assert [type(fault).__name__ for fault in faults] == ["InvalidStateError"]


@pytest.mark.slow
def test_waiting_is_logged_with_reason_and_duration_until_the_answers_arrive(start, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("lightning_rlhf.processes.waiting.INTERVAL_SECONDS", 0.3)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    caplog.set_level("INFO", "lightning_rlhf")
    engine = start(slow=1.5)
    caplog.clear()
    assert engine.results([engine.ready], "the engine to be ready")[0]["kind"] == "ready"
    output = [record.getMessage() for record in caplog.records]
    log = tmp_path / "new" / "engine.log"
    assert len(output) >= 4
    for line in output:
        assert re.fullmatch(
            rf"Waiting for the engine to be ready for \d+ s; the engine's log is {re.escape(str(log))}\.", line
        )
    assert " for 0 s;" in output[0]
    assert " for 2 s;" in " ".join(output)
    caplog.clear()
    prompts = [[1], [2] * 80]
    answers = engine.results(engine.generate([request(*prompt) for prompt in prompts]), "completions")
    assert [answer["token_ids"] for answer in answers] == prompts
    assert "Waiting for 1 of 2 completions for 0 s" in caplog.text
    caplog.clear()
    engine.results([engine.command("load", weights={}, version=1)], "new weights")
    assert not caplog.records


def test_engine_that_dies_during_a_wait_raises(start, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.processes.waiting.INTERVAL_SECONDS", 0.1)
    engine = start(slow=0.5, exit=3)
    with pytest.raises(EngineDied, match="exit code 3"):
        engine.results([engine.ready], "the engine to be ready")


@pytest.mark.slow
def test_engine_does_not_outlive_its_trainer(tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from lightning_rlhf.rollout.vllm.supervisor import EngineProcess, Restarts
        engine = EngineProcess("tests.rollout.stub_worker", {{}}, {{}}, Path({str(tmp_path)!r}) / "log")
        engine.ready.result()
        engine.generate([{{"prompt": [1] * 100000, "sampling": {{}}, "seed": 0}}])
        print(engine.process.pid, flush=True)
        time.sleep(1000)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with trainer:
        pid = int(trainer.stdout.readline())
        trainer.kill()
        trainer.wait(WAIT)
        assert wait_for_end(pid, 5)


def test_variables_of_launcher_and_seed_do_not_reach_the_engine(start, monkeypatch):
    launchers = {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"}
    for name in {*launchers, "PL_GLOBAL_SEED"}:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FROM_THE_TRAINER", "yes")
    before = dict(os.environ)
    engine = start(environment={"FOR_THE_ENGINE": "yes"})
    engine.ready.result(WAIT)
    result = psutil.Process(engine.process.pid).environ()
    assert result["FROM_THE_TRAINER"] == result["FOR_THE_ENGINE"] == "yes"
    assert not {*launchers, "PL_GLOBAL_SEED"} & set(result)
    assert dict(os.environ) == before


def test_error_of_the_worker_is_an_expected_error(start):
    engine = start()
    with pytest.raises(RuntimeError, match="TypeError: no weights") as end:
        engine.results([engine.command("load", weights=None, version=1)], "new weights")
    assert isinstance(end.value, ExpectedError)


# -- restarts ------------------------------------------------------------------------------------------------------


def check(message, request):
    check_tokens(as_completion(message).token_ids, request, 1000)


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    """Start a worker that is started again, with weights of version 5 after its first push."""
    monkeypatch.chdir(ROOT)
    started = []

    def start(most=3, silent_seconds=None, state=None, **arguments):
        held = [{"kind": "load", "weights": {}, "version": 5}]
        restarts = Restarts(state or (lambda: held), check, most, silent_seconds)
        module = "tests.rollout.stub_worker"
        started.append(EngineProcess(module, arguments, {}, tmp_path / "new" / "engine.log", restarts))
        started[0].ready.result(WAIT)
        started[0].command("load", weights={}, version=5).result(WAIT)
        return started[0]

    yield start
    for process in started:
        process.close()


def die(engine):
    """Kill the worker, and return its process id."""
    pid = engine.process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_gets_all_unfinished_messages_in_their_order(restarted, caplog):
    engine = restarted()
    requests = [request(*range(1, length)) for length in (500, 100, 300, 20)]
    replies = engine.generate(requests)
    engine.results([replies[3]], "the short response")
    pid = die(engine)
    loading = engine.command("load", weights={}, version=6)
    later = engine.generate([request(7)])
    assert [reply.result(WAIT)["token_ids"] for reply in replies] == [each["prompt"] for each in requests]
    assert {reply.result()["policy_version"] for reply in replies} == {5}
    loading.result(WAIT)
    assert later[0].result(WAIT)["policy_version"] == 6
    assert (engine.restarted, wait_for_end(pid, 5)) == (1, True)
    (line,) = lines(caplog)
    assert f"the engine process {pid} died: killed by signal 9 (SIGKILL)" in line
    assert line.endswith("with the same weights and requests: 1 of at most 3 times in an hour.")


@pytest.mark.slow
def test_worker_that_dies_at_random_loses_no_request(restarted):
    engine = restarted(most=20)
    random = Random(3)
    for version in range(6, 16):
        replies = engine.generate([request(*([version] * random.randint(1, 40))) for _ in range(10)])
        killer = threading.Timer(random.random() * 0.4, die, [engine])
        killer.start()
        assert {reply.result(WAIT)["token_ids"][0] for reply in replies} == {version}
        killer.join()
        engine.command("load", weights={}, version=version).result(WAIT)
    assert engine.restarted == 10


def test_too_many_deaths_raise_with_the_last_cause(restarted, caplog):
    engine = restarted(most=2)
    reply = engine.generate([request(*[1] * 5000)])[0]
    for _ in range(3):
        pid = die(engine)
        end = time.monotonic() + WAIT
        while engine.process.pid == pid and not reply.done() and time.monotonic() < end:
            time.sleep(0.02)
    with pytest.raises(EngineDied, match="killed by signal 9"):
        reply.result(WAIT)
    with pytest.raises(EngineDied, match="killed by signal 9"):
        engine.command("load", weights={}, version=6)
    assert lines(caplog)[-1] == "The engine was started again 2 times in an hour, and is not again."


def test_deaths_count_for_an_hour(restarted, monkeypatch):
    engine = restarted(most=1)
    for seconds in (0, 3601):
        monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor.time.monotonic", partial(_later, seconds))
        die(engine)
        assert engine.generate([request(1)])[0].result(WAIT)["token_ids"] == [1]
    assert engine.restarted == 2


_monotonic = time.monotonic


def _later(seconds):
    return _monotonic() + seconds


def test_worker_that_was_never_ready_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    restarts = Restarts(list, check)
    engine = EngineProcess("tests.rollout.stub_worker", {"exit": 3}, {}, tmp_path / "engine.log", restarts)
    with pytest.raises(EngineDied, match="exit code 3"):
        engine.ready.result(WAIT)
    assert engine.restarted == 0
    engine.close()


@pytest.mark.parametrize(
    "cause",
    [
        "Error in memory profiling. Initial free memory 20.1 GiB, current free memory 31.0 GiB. This happens when",
        "Free memory on device cuda:0 (30.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.4",
    ],
)
def test_first_start_is_tried_again_when_the_memory_of_its_gpu_changed(tmp_path, monkeypatch, caplog, cause):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._MEMORY_SECONDS", 0.1)
    arguments = {"refuse": cause, "starts": str(tmp_path / "starts")}
    engine = EngineProcess(
        "tests.rollout.stub_worker", arguments, {}, tmp_path / "engine.log", Restarts(lambda: [], check)
    )
    requests = engine.generate([request(1, 2)])
    assert engine.ready.result(WAIT)["pid"] == engine.process.pid
    assert requests[0].result(WAIT)["token_ids"] == [1, 2]
    assert engine.restarted == 1
    assert cause in lines(caplog)[0]
    engine.close()


def test_first_start_is_tried_again_only_once(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._MEMORY_SECONDS", 0.1)
    cause = "Free memory on device cuda:0 (30.1/79.1 GiB) on startup is less than desired"
    arguments = {"refuse": cause, "refused": 9, "starts": str(tmp_path / "starts")}
    engine = EngineProcess(
        "tests.rollout.stub_worker", arguments, {}, tmp_path / "engine.log", Restarts(lambda: [], check)
    )
    with pytest.raises(EngineDied, match="Free memory on device cuda:0"):
        engine.ready.result(WAIT)
    assert engine.restarted == 1
    engine.close()


@pytest.mark.slow
def test_hanging_worker_is_killed_and_replaced(restarted, caplog):
    engine = restarted(silent_seconds=1.5)
    reply = engine.generate([request(*[1] * 30)])[0]
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert reply.result(WAIT)["token_ids"] == [1] * 30
    assert "it did nothing for 1.5 s (silent_seconds)" in lines(caplog)[0]
    time.sleep(3)  # a worker without work is not silent
    assert engine.restarted == 1


@pytest.mark.slow
def test_idle_time_is_not_silence(restarted):
    engine = restarted(silent_seconds=2.0)
    time.sleep(3)
    engine.command("load", weights={"seconds": 1.2}, version=6).result(WAIT)
    assert engine.restarted == 0


@pytest.mark.slow
def test_worker_may_need_longer_to_start_again_than_it_may_be_silent(restarted):
    engine = restarted(silent_seconds=1.0, slow=3)
    reply = engine.generate([request(*[1] * 60)])[0]
    die(engine)
    assert reply.result(WAIT)["token_ids"] == [1] * 60
    assert engine.restarted == 1


@pytest.mark.slow
def test_worker_that_hangs_while_it_starts_again_is_replaced(restarted, caplog):
    engine = restarted(silent_seconds=1.5)
    long = {"unused": "x" * 10_000}  # together more than a socket holds
    replies = engine.generate([{**request(*[1] * 60), **long} for _ in range(60)])
    first = engine.process.pid
    die(engine)
    while engine.process.pid == first:
        time.sleep(0.01)
    os.kill(engine.process.pid, signal.SIGSTOP)
    replies += engine.generate([{**request(*[1] * 60), **long} for _ in range(60)])  # does not wait for it either
    assert [reply.result(WAIT)["token_ids"] for reply in replies] == [[1] * 60] * 120
    assert engine.restarted == 2
    assert "(silent_seconds and three first starts)" in lines(caplog)[-1]


@pytest.mark.parametrize("prompt", [[-1], [-2], [-3, 1]])
def test_worker_that_sends_nonsense_is_replaced(restarted, prompt, caplog):
    engine = restarted(most=1)
    good = engine.generate([request(*[1] * 60)])[0]
    engine.generate([request(*prompt)])
    with pytest.raises(EngineDied, match="it sent an invalid message"):  # the stub does so each time
        good.result(WAIT)
    assert engine.restarted == 1


def test_completion_that_no_engine_sends_is_nonsense(restarted, monkeypatch, caplog):
    engine = restarted()
    calls = []

    def refuse_first(message, request):
        calls.append(request["prompt"])
        if len(calls) == 1:
            raise RunError("a completion without tokens")

    engine._restarts.check = refuse_first
    assert engine.generate([request(1)])[0].result(WAIT)["token_ids"] == [1]
    assert calls == [[1], [1]]
    assert "it sent an invalid message (RunError: a completion without tokens)" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("tokens", "echo", "message"),
    [
        ([1, 2, 3], False, "3 tokens for a request of at most 2"),
        ([6, 7, 1, 1], True, None),
        ([6, 7, 1, 1, 1], True, "5 tokens for a request of at most 4"),
        ([6, 8, 1, 1], True, "log-probabilities of other tokens than the prompt's"),
        ([60, 61], False, "token 61; the actor has tokens 0 to 60"),
        ([60, -1], False, "token -1; the actor has tokens 0 to 60"),
        ([60], False, None),
    ],
)
def test_tokens_that_cannot_be_a_response_are_rejected(tokens, echo, message):
    (sent,) = as_requests([TokenPrompt([5, 6, 7])], [SamplingParams(2, echo=echo)], [0])
    with nullcontext() if message is None else pytest.raises(RunError, match=f"^{message}$"):
        check_tokens(tokens, sent, 61)


def test_restart_waits_until_weights_are_written(restarted):
    held = []
    engine = restarted(state=lambda: held or None)
    die(engine)
    reply = engine.generate([request(1)])[0]
    time.sleep(1)
    assert not reply.done()
    held.append({"kind": "load", "weights": {}, "version": 9})
    assert reply.result(WAIT)["policy_version"] == 9


@pytest.mark.slow
def test_state_changes_when_a_worker_that_was_started_again_has_it(restarted):
    engine = restarted(state=lambda: [{"kind": "load", "weights": {"seconds": 1.0}, "version": 5}])
    reply = engine.generate([request(*[1] * 100)])[0]
    pid = die(engine)
    while engine.process.pid == pid:
        time.sleep(0.01)
    began, changed_after = time.monotonic(), []
    engine.change_state(lambda: changed_after.append(time.monotonic() - began))
    assert changed_after[0] >= 1.0
    engine.change_state(lambda: changed_after.append(time.monotonic() - began))
    assert changed_after[1] < changed_after[0] + 1.0
    assert reply.result(WAIT)["policy_version"] == 5


def test_state_of_an_engine_that_has_ended_cannot_be_changed(restarted):
    engine = restarted(most=0)
    reply = engine.generate([request(*[1] * 900)])[0]
    die(engine)
    for wait in (lambda: reply.result(WAIT), lambda: engine.change_state(pytest.fail)):
        with pytest.raises(EngineDied, match="killed by signal 9"):
            wait()


@pytest.mark.slow
@pytest.mark.vllm
def test_weights_are_not_replaced_before_a_worker_that_was_started_again_has_loaded_them(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    stub = lambda module, *arguments: EngineProcess("tests.rollout.stub_worker", *arguments)  # noqa: E731
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.EngineProcess", stub)
    engine = VLLMEngine(arguments={"slow": 1.0})
    engine.start(setup_of(source_of(), tmp_path))
    try:
        parameters = dict(parameters_of(source_of().causal()))
        for version in (1, 2):
            engine.update_weights([(n, torch.full_like(p, version)) for n, p in parameters.items()], version)
            if version == 1:
                responses = engine.request([TokenPrompt([1] * 300)], [SamplingParams(300)], [0])
                die(engine._process)
                while not engine.restarted:
                    time.sleep(0.01)
        responses += engine.request([TokenPrompt([1])], [SamplingParams(300)], [0])
        assert [(each.result(WAIT).policy_version, each.result().logprobs[0]) for each in responses] == [
            (1, -1),
            (2, -2),
        ]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_engine_that_dies_asleep_is_started_again_with_the_next_push(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    stub = lambda module, *arguments: EngineProcess("tests.rollout.stub_worker", *arguments)  # noqa: E731
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.EngineProcess", stub)
    engine = VLLMEngine(sleep_while_learning=True)
    monkeypatch.setattr(VLLMEngine, "llm_arguments", lambda *_: {"max_model_len": 64, "load_format": "dummy"})
    engine.start(setup_of(source_of(), tmp_path))
    parameters = list(parameters_of(source_of().causal()))
    try:
        for version in (1, 2):
            engine.update_weights(parameters, version)
            assert (
                engine.request([TokenPrompt([1])], [SamplingParams(1)], [0])[0].result(WAIT).policy_version == version
            )
            engine.sleep()
            pid = die(engine._process)
            assert wait_for_end(pid, 5)
            time.sleep(1.5)  # in which it would be started again
            assert engine.restarted == version - 1
    finally:
        engine.close()


def test_weights_that_are_not_kept_end_the_engine(restarted, caplog):
    def lost():
        raise EngineDied("weights that were pushed within the GPU are not kept")

    engine = restarted(state=lost)
    reply = engine.generate([request(*[1] * 900)])[0]
    die(engine)
    with pytest.raises(EngineDied, match="killed by signal 9"):
        reply.result(WAIT)
    assert lines(caplog)[-1].startswith("The engine cannot be started again: weights that were pushed")


def test_failing_command_of_a_restart_is_another_death(restarted, caplog):
    engine = restarted(most=2, state=lambda: [{"kind": "load", "weights": None, "version": 1}])
    die(engine)
    with pytest.raises(EngineDied, match="TypeError: no weights"):
        engine.generate([request(1)])[0].result(WAIT)
    assert engine.restarted == 2


@pytest.mark.slow
def test_closing_while_a_worker_starts_again_leaves_no_process(restarted):
    engine = restarted(slow=5)
    pid = die(engine)
    while engine.process.pid == pid:
        time.sleep(0.02)
    began, pid = time.monotonic(), engine.process.pid
    engine.close()
    assert time.monotonic() - began < 15
    assert wait_for_end(pid, 5)


def test_log_has_the_output_of_all_workers(restarted, tmp_path):
    engine = restarted(chatter="here")
    die(engine)
    engine.generate([request(1)])[0].result(WAIT)
    assert (tmp_path / "new/engine.log").read_text().count("here") == 2
