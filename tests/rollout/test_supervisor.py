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
from pathlib import Path

import psutil
import pytest

from lightning_rlhf.expected_errors import EngineDied, ExpectedError
from lightning_rlhf.rollout.vllm.supervisor import EngineProcess

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
    return {"prompt": list(prompt), "sampling": {}, "seed": 0}


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
    with pytest.raises(EngineDied, match=rf"died: {message}; its log is .*, and ends:\nout of cheese$"):
        start(chatter="out of cheese", **arguments).ready.result(WAIT)


def test_temporary_files_are_next_to_the_log_and_those_of_a_killed_run_are_removed(start, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "engine.tmp"
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._MAX_SOCKET_PATH", len(str(folder)) + 37)
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
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._MAX_SOCKET_PATH", len(str(folder)) + 36)
    monkeypatch.setenv("TMPDIR", "/tmp")
    with caplog.at_level(logging.INFO, logger="lightning_rlhf"):
        monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
        engine = start()
    engine.ready.result(WAIT)
    assert psutil.Process(engine.process.pid).environ()["TMPDIR"] == "/tmp"
    assert not folder.exists()
    length = len(str(folder)) + 37
    assert f"paths of sockets in {folder} would have {length} bytes (at most {length - 1})." in caplog.text


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
    next(iter(engine._pending.values())).set_result({})  # answered twice, which a future refuses
    with pytest.raises(EngineDied, match="SIGKILL"):
        futures[1].result(WAIT)
    engine.close()
    assert [type(fault).__name__ for fault in faults] == ["InvalidStateError"]


def test_waiting_is_logged_with_reason_and_duration_until_the_answers_arrive(start, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._HEARTBEAT_SECONDS", 0.3)
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
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.supervisor._HEARTBEAT_SECONDS", 0.1)
    engine = start(slow=0.5, exit=3)
    with pytest.raises(EngineDied, match="exit code 3"):
        engine.results([engine.ready], "the engine to be ready")


@pytest.mark.slow
def test_engine_does_not_outlive_its_trainer(tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from lightning_rlhf.rollout.vllm.supervisor import EngineProcess
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
