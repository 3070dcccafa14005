"""A run owns its directory: a second one is told who has it, and moves and writes nothing."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from filelock import FileLock

from lightning_rlhf.callbacks import complete
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.run_lock.lock import RunLock, lock_run, unlock_run
from tests.distributed.launch import ROOT

HOLD = """
import sys, time
from pathlib import Path
from lightning_rlhf.extras.run_lock.lock import lock_run
lock_run(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that has the lock of a directory; return it."""
    started = []

    def holder(directory):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", HOLD, str(directory)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield holder
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def files(directory):
    """Return the files of a directory with their contents."""
    return {path: path.read_bytes() for path in sorted(Path(directory).rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--ckpt_path", "last")], ids=["new", "resumed"])
def test_second_run_is_told_who_has_the_directory_and_changes_nothing(fit, config, holder, arguments):
    assert fit(config).code == 0
    first = holder("runs/tiny")
    before = files("runs")
    result = fit(config, *arguments)
    assert result.code == 2
    assert result.err == (
        f"lightning-rlhf: process {first.pid} on {socket.gethostname()} writes to runs/tiny: wait until it has ended, "
        f"or set another trainer.default_root_dir\n"
    )
    assert files("runs") == before
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert fit(config, *arguments).code == 0


def test_process_that_is_killed_has_no_lock(holder, tmp_path):
    process = holder(tmp_path)
    with pytest.raises(UsageError, match=f"process {process.pid} on "):
        lock_run(tmp_path)
    process.kill()
    process.wait()
    lock_run(tmp_path)
    assert f"process {os.getpid()} on " in (tmp_path / "run.lock").read_text()
    unlock_run(tmp_path)
    assert not (tmp_path / "run.lock").exists()


def test_lock_goes_with_the_directory_of_an_earlier_run_until_the_new_one_is_locked(tmp_path):
    run = tmp_path / "run"
    lock_run(run)
    lock_run(run)
    run.rename(tmp_path / "run-1")
    lock_run(run)
    assert FileLock(tmp_path / "run-1/run.lock").acquire(blocking=False)
    unlock_run(run)
    unlock_run(run)
    assert not (run / "run.lock").exists()


def test_run_that_was_faster_after_the_renaming_keeps_its_lock(holder, tmp_path):
    run = tmp_path / "run"
    lock_run(run)
    run.rename(tmp_path / "run-1")
    faster = holder(run)
    with pytest.raises(UsageError, match=f"process {faster.pid} on "):
        lock_run(run)
    unlock_run(run)
    assert f"process {faster.pid} on " in (run / "run.lock").read_text()


def test_no_lock_is_left_after_runs_and_their_renaming(fit, config):
    for _ in range(2):
        assert fit(config, "--trainer.max_steps", "1").code == 0
    assert Path("runs/tiny-1/config.yaml").is_file()
    config["model"]["init_args"]["actor"] = "runs/none/export"
    assert fit(config).code == 2
    assert not [*Path("runs").rglob("run.lock")]


def test_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog):
    def fail(self, **options):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(FileLock, "acquire", fail)
    lock_run(tmp_path)
    assert f"{tmp_path} cannot be locked (No locks available): start no second run in it" in caplog.text
    unlock_run(tmp_path)


def test_runs_from_python_lock_their_directory():
    assert any(isinstance(callback, RunLock) for callback in complete([]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_live_run_goes_on_while_a_second_one_is_rejected(tmp_path, config):
    config["trainer"]["max_steps"] = 10_000
    config["trainer"]["callbacks"].append({"class_path": "tests.distributed.test_signals_to_ranks.Slow"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "text": True}
    with (tmp_path / "output.log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, **options)
    while "step 2: " not in (tmp_path / "output.log").read_text():
        assert first.poll() is None, (tmp_path / "output.log").read_text()
        time.sleep(0.1)
    second = subprocess.run(command, capture_output=True, **options)
    assert second.returncode == 2, second.stderr
    assert f"process {first.pid} on " in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 143
    rows = (tmp_path / "runs/tiny/metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == [str(step) for step in range(1, len(rows))]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]


@pytest.mark.parametrize(("size", "is_told"), [("4", True), ("1", False), ("", False), ("four", False)])
def test_a_launcher_that_is_not_read_is_told(tmp_path, monkeypatch, caplog, size, is_told):
    monkeypatch.setenv("WORLD_SIZE", size)
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=False, default_root_dir=tmp_path, world_size=1)
    with caplog.at_level("WARNING", "lightning_rlhf"):
        RunLock().setup(trainer, None, "fit")
    unlock_run(tmp_path)
    assert ("WORLD_SIZE is 4, but this run has one process" in caplog.text) == is_told
