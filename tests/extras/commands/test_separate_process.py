"""Checks in a separate process return a result or a one-line failure even if it crashes, hangs or leaves children."""

import os
import sys
import time

import psutil

from lightning_rlhf.extras.commands.separate_process import run_apart

PRINT = "from lightning_rlhf.extras.commands.separate_process import print_result; "


def run(code, seconds=30.0, **options):
    result, failure, _ = run_apart([sys.executable, "-c", code], seconds, **options)
    return result, failure


def test_last_result_is_returned_among_other_output():
    code = PRINT + "print('noise', end=''); print_result({'n': 1}); print_result(['a', 2]); print('more noise')"
    assert run(code) == (["a", 2], "")


def test_result_counts_even_if_the_process_crashes_at_exit():
    assert run(PRINT + "import os; print_result(1); os.abort()") == (1, "")


def test_process_without_a_result_has_its_exit_code_and_the_end_of_its_output():
    assert run("import os; print('before', flush=True); os.abort()") == (None, "killed by signal 6 (SIGABRT); before")
    assert run("raise SystemExit(3)") == (None, "exit code 3; no output")
    result, failure = run("raise TypeError('enable_gqa')")
    assert result is None
    assert failure.endswith("TypeError: enable_gqa")


def test_hanging_process_is_killed_with_its_children(tmp_path):
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid"
    began = time.monotonic()
    result, failure = run(f"{child}, flush=True); import time; time.sleep(99)", seconds=2)
    assert time.monotonic() - began < 20
    assert result is None
    killed, _, pid = failure.partition("; ")
    assert killed == "killed after 2 s"
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 20  # a killed process ends within moments
        time.sleep(0.05)


def test_child_that_keeps_the_output_open_does_not_delay_the_result():
    code = PRINT + "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); print_result(1)"
    began = time.monotonic()
    assert run(code) == (1, "")
    assert time.monotonic() - began < 30


def test_environment_and_folder_are_passed_to_the_process(tmp_path):
    code = PRINT + "import os; print_result([os.getcwd(), os.environ['MARK']])"
    environment = {**os.environ, "MARK": "here", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert run(code, environment=environment, folder=tmp_path) == ([str(tmp_path), "here"], "")
