"""Runs the command line in processes that are killed at a chosen point; ``python -m tests.faults.forge``.

Everything is imported once, then each attempt is a fork: a line of JSON on standard input requests one, a line on
standard output contains its result. The output of an attempt is written to ``output.log`` in its directory.
"""

import errno
import importlib
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from lightning_rlhf import launch_environment

launch_environment.apply()  # as the command does before it imports anything else

import torch  # noqa: E402

import lightning_rlhf  # noqa: E402
from lightning_rlhf.cli.main import run  # noqa: E402

for _name in lightning_rlhf.__all__:  # all that attempts would import one by one
    getattr(lightning_rlhf, _name)
for _name in ("llama.modeling_llama", "auto.modeling_auto"):
    importlib.import_module(f"transformers.models.{_name}")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def send(signals):
    for number in signals:
        if number == "hang":
            time.sleep(100)
        elif number == "pause":
            time.sleep(1)
        elif number == "slow":
            print("slow", flush=True)
            until = time.monotonic() + 60
            while "step 6:" not in Path("output.log").read_text() and time.monotonic() < until:
                time.sleep(0.05)
            print("slow is over", flush=True)
        else:
            os.kill(os.getpid(), number)
            time.sleep(0.2)  # the handler runs in the main thread, which need not be this one


def die_at(position, number, when):
    """End this process at the ``number``-th call of ``module:name``.

    ``when`` is one of

    - before, after, or half: after half of the bytes that ``torch.save`` writes to a file;
    - fail: the call raises; full: the disk is full for this and all later calls; gone: the run's directory is removed;
    - a list of signals, which this process sends to itself before it continues; a final ``hang`` makes it sleep
      instead.
    """
    module, _, path = position.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def watched(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            die()
        if calls == number and when == "fail":
            raise RuntimeError("as the test wants it")
        if calls >= number and when == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
        if calls == number and when == "gone":
            shutil.rmtree("run")
        if calls == number and isinstance(when, list):
            send(when)
        if calls == number and when == "half":
            whole = io.BytesIO()
            real(args[0], whole)
            args[1].write(whole.getvalue()[: whole.tell() // 2])
            args[1].flush()
            die()
        result = real(*args, **kwargs)
        if calls == number and when == "after":
            die()
        return result

    setattr(owner, name, watched)


def count_calls(limit, report):
    """End this process at the ``limit``-th call of any Python function, or write the number of calls to a file."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if event == "call":
            calls += 1
            if calls == limit:
                die()

    sys.setprofile(count)

    def finish():
        sys.setprofile(None)
        with open(report, "w") as file:
            file.write(str(calls))

    return finish


def attempt(request):
    """Execute one run in this process and exit."""
    os.makedirs(request["directory"], exist_ok=True)
    os.chdir(request["directory"])
    output = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    code = 70
    try:
        if request["position"]:
            die_at(*request["position"])
        finish = count_calls(request["calls"], "calls") if request["calls"] is not None else None
        code = run(request["arguments"])
        if finish is not None:
            finish()
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            attempt(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
