"""A command that receives a signal while it loads ends at once, with one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = (
    "import os, signal, time; from lightning_rlhf.processes.signals import end_at_sigterm, ending_at\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell starts programs in the background without it
)
WAIT = "print('ready', flush=True)\nimport hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"  # minutes, in C


def started(program):
    process = subprocess.Popen(
        [sys.executable, "-c", START + program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


@pytest.mark.parametrize(
    ("program", "sent", "code", "printed"),
    [
        (f"end_at_sigterm(True)\n{WAIT}", signal.SIGTERM, 143, "lightning-rlhf: ended by SIGTERM\n"),
        (f"end_at_sigterm(False)\n{WAIT}", signal.SIGTERM, 143, ""),
        (
            f"end_at_sigterm(True)\nwith ending_at(signal.SIGINT):\n    {WAIT.replace(chr(10), '; ')}",
            signal.SIGINT,
            130,
            "lightning-rlhf: ended by Ctrl-C\n",
        ),
        ("end_at_sigterm(True)\nprint('ready', flush=True)\nwhile True: pass", signal.SIGTERM, 143, None),
    ],
    ids=["in C", "another rank", "Ctrl-C while ranks join", "in Python"],
)
def test_process_ends_at_once_with_one_line(program, sent, code, printed):
    process = started(program)
    process.send_signal(sent)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (code, "lightning-rlhf: ended by SIGTERM\n" if printed is None else printed)


def test_other_handlers_and_the_end_of_a_forked_process_are_left_alone():
    program = """end_at_sigterm(True)
child = os.fork()
if not child: time.sleep(60)
print('ready', flush=True)
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
with ending_at(signal.SIGINT): pass
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    output, error = started(program).communicate(timeout=30)
    assert (output, error) == ("-15\nmine\nTrue\n", "")


def test_ctrl_c_of_a_program_that_does_not_end_at_sigterm_is_its_own():
    process = started("with ending_at(signal.SIGINT):\n    print('ready', flush=True); time.sleep(60)")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert error.splitlines()[-1] == "KeyboardInterrupt"
