"""A child process ends with all that it started, is named by its exit, and inherits what it should."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.processes import child as module
from lightning_rlhf.processes.child import (
    Child,
    bytes_too_long,
    describe_exit,
    inherited_environment,
)
from tests.processes import example

# Starts a process that ignores SIGTERM, prints both ids, and sleeps.
PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
"""


def python(code, log=None, **options):
    return Child([sys.executable, "-c", code], log=log, **options)


def has_ended(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def with_grandchild(tmp_path):
    started = []

    def start(code):
        started.append(python(PARENT + code, tmp_path / "log"))
        end = time.monotonic() + 60
        while len(started[0].log_tail().split()) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        own, other = map(int, started[0].log_tail().split()[:2])
        assert own == started[0].pid
        return started[0], other

    yield start
    for process in started:
        process.kill_group()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("pass", "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL), often because memory ran out"),
        ("import os; os.kill(os.getpid(), 15)", "killed by signal 15 (SIGTERM)"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40 (unnamed)"),
    ],
)
def test_exit_has_words(code, words):
    assert describe_exit(python(code).wait(60)) == words


def test_killing_a_group_ends_what_the_process_started(with_grandchild):
    process, other = with_grandchild("time.sleep(60)")
    assert process.kill_group() == -signal.SIGKILL
    assert has_ended(other)
    assert process.kill_group() == -signal.SIGKILL


def test_group_that_has_ended_gets_no_signal():
    process = python("pass")
    assert process.signal_group(0)
    process.wait(60)
    assert not process.signal_group(0)
    assert process.kill_group() == 0


def test_what_a_process_started_ends_after_it(with_grandchild):
    process, other = with_grandchild("")
    process.wait(60)
    assert not has_ended(other, 0.1)
    began = time.monotonic()
    assert process.end(60, grace=0.3) == 0
    assert 0.3 <= time.monotonic() - began < 5
    assert has_ended(other)


def test_process_that_ignores_a_request_to_end_is_killed_at_the_time_limit(with_grandchild):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    process, other = with_grandchild(code)
    while "deaf" not in process.log_tail():
        time.sleep(0.02)
    began = time.monotonic()
    process.signal_group(signal.SIGTERM)
    assert process.end(0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 5
    assert has_ended(other)


def test_process_that_ends_at_a_request_keeps_its_exit_code(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(60)"
    )
    process = python(code, tmp_path / "log")
    while not process.log_tail():
        time.sleep(0.02)
    process.signal_group(signal.SIGTERM)
    assert process.end(60) == 7


def test_group_is_another_one_than_this_process_has():
    process = python("import time; time.sleep(60)")
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid != os.getsid(0)
    process.kill_group()


def test_log_has_both_streams_in_a_new_folder_and_its_tail_is_bounded(tmp_path):
    log = tmp_path / "new" / "log"
    code = "import sys; print('é' * 5000); sys.stdout.flush(); print('last words', file=sys.stderr)"
    process = python(code, log)
    process.wait(60)
    assert process.log_tail() == "é" * 1988 + "\nlast words"
    python("print('first')", log).wait(60)
    later = python("print('second')", log, append=True)
    later.wait(60)
    assert later.log_tail() == "first\nsecond"


def test_tail_without_a_log_is_empty(tmp_path):
    process = python("pass", tmp_path / "log")
    process.wait(60)
    process.log.unlink()
    assert process.log_tail() == ""
    other = python("pass")
    other.wait(60)
    assert other.log_tail() == ""


def test_unusable_log_raises(tmp_path):
    with pytest.raises(IsADirectoryError):
        python("pass", tmp_path)


def test_process_reads_nothing_unless_asked(tmp_path):
    process = python("import sys; print(repr(sys.stdin.read()))", tmp_path / "log")
    process.wait(60)
    assert process.log_tail() == "''"
    with python("import sys; print(sys.stdin.read())", tmp_path / "log", stdin=subprocess.PIPE) as other:
        other.communicate(b"given")
    assert other.log_tail() == "given"


def test_variables_of_launchers_are_not_inherited(monkeypatch, tmp_path):
    launchers = {
        "RANK",
        "LOCAL_RANK",
        "MASTER_PORT",
        "ROLE_NAME",
        "NODE_RANK",
        "TORCHELASTIC_X",
        "SLURM_PROCID",
        "PMI_A",
    }
    for name in (*launchers, "MINE", "SECRET", "RANKING"):
        monkeypatch.setenv(name, "1")
    environment = inherited_environment(["SECRET"])
    assert not environment.keys() & {*launchers, "SECRET"}
    assert environment.items() <= os.environ.items()
    code = "import os; print([name in os.environ for name in ('MINE', 'RANKING', 'RANK', 'SECRET')])"
    process = python(code, tmp_path / "log", environment=environment)
    process.wait(60)
    assert process.log_tail() == "[True, True, False, False]"


def test_paths_of_sockets_are_measured_in_bytes():
    assert bytes_too_long("/" + "x" * 69) == 0
    assert bytes_too_long(Path("/" + "x" * 70)) == 1
    assert bytes_too_long("/" + "é" * 35) == 1


def test_process_ends_with_its_parent(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from tests.processes.example import Doubler
print(Doubler(Path({str(tmp_path / "log")!r})).process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(pid)


def test_a_supervised_thing_has_40_lines(tmp_path):
    assert len(Path(example.__file__).read_text().splitlines()) <= 40
    doubler = example.Doubler(tmp_path / "log")
    assert [doubler.double(number) for number in (1, 21)] == [2, 42]
    with pytest.raises(RunError, match=r"(?s)died: exit code 1; .*log ends with:\n.*ValueError: invalid literal"):
        doubler.double("a word")
    doubler.close()
    idle = example.Doubler(tmp_path / "other")
    idle.close()
    assert idle.process.returncode == 0


@pytest.mark.parametrize("path", sorted(Path(module.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_package_imports_only_the_standard_library(path):
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
