"""Misbehaving reward functions; each runs in a worker process."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path


class Unsendable(Exception):
    """Cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)
        self.lock = threading.Lock()


def _recurse():
    return _recurse()


def raises():
    raise KeyError("level")


def raises_what_cannot_be_sent():
    raise Unsendable(1, 2)


def raises_base_exception():
    raise BaseException("base")


def interrupts():
    raise KeyboardInterrupt


def exits():
    sys.exit(3)


def exits_with_nothing():
    sys.exit()


def ends_its_process():
    os._exit(0)


def ends_its_process_with_seven():
    os._exit(7)


def kills_its_process():
    os.kill(os.getpid(), signal.SIGKILL)


def terminates_its_process():
    os.kill(os.getpid(), signal.SIGTERM)


def aborts():
    os.abort()


def reads_from_nowhere():
    ctypes.string_at(1)


def recurses():
    _recurse()


def sleeps():
    time.sleep(1000)


def spins():
    while True:
        pass


def ignores_the_end():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def deadlocks():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_thread_that_never_ends():
    thread = threading.Thread(target=time.sleep, args=(1000,))
    thread.start()
    thread.join()


def backtracks():
    re.match(r"(a+)+$", "a" * 60 + "b")


def computes_for_ever_without_python():
    return pow(7, 10**9)


def swallows_every_error():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def reads_from_an_idle_pipe():
    end, _ = os.pipe()
    os.read(end, 1)


def starts_a_process_and_waits():
    os.waitpid(os.fork() or os.execv("/bin/sleep", ["sleep", "1234"]), 0)


def starts_a_session():
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "4321"])
    time.sleep(0.2)
    return 1.0


def starts_a_session_by_a_process_that_ends():
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "4321"])
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    return 1.0


def prints_a_gigabyte():
    for _ in range(1000):
        print("x" * 1_000_000)
    return 1.0


def prints_to_stderr():
    for _ in range(1000):
        print("x" * 1_000_000, file=sys.stderr)
    return 1.0


def imports_torch():
    import torch

    return torch.tensor(1.0)


def forgets_a_thread():
    threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
    return 1.0


def changes_folder():
    os.chdir("/")
    return 1.0


def sees_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return 1.0


def sees_a_launcher():
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID"} & set(os.environ)
    return 1.0


def uses_an_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as math-verify does; only a main thread may
    return 1.0


def returns_nothing():
    return None


def returns_text():
    return "1.0"


def returns_nan():
    return float("nan")


def returns_infinity():
    return float("inf")


def returns_what_float32_has_not():
    return 1e39


def returns_a_number_beyond_all_floats():
    return 10**400


def returns_a_dictionary_without_score():
    return {"reward": 1.0}


def returns_a_list():
    return [1.0, 2.0]


def returns_an_empty_tuple():
    return ()


def returns_a_function():
    return returns_a_function


def returns_a_lock():
    return threading.Lock()


def returns_complex():
    return 1j


def returns_a_class():
    return float


def returns_a_generator():
    return (number for number in [1.0])


def returns_a_pool():
    return multiprocessing.get_context("spawn").Lock()


def judge(solution_str, ground_truth):
    """Return 1, or call the function above that the response names."""
    function = globals().get(solution_str)
    return 1.0 if function is None else function()


def killed_once(completions, path):
    """Kill the process in the first call, as the system may."""
    if not Path(path).exists():
        Path(path).write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]
