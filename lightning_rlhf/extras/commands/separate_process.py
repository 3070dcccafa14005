"""Checks in separate processes, which may crash or hang without ending the program that runs them."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf.processes.child import Child, describe_exit

_RESULT = "result of the check: "
_SHOWN_CHARACTERS = 500  # of the output of a process without a result


def print_result(result: Any) -> None:
    """Print the result of this process, which :func:`run_apart` returns in another."""
    print(f"\n{_RESULT}{json.dumps(result)}", flush=True)


def error_line(error: BaseException) -> str:
    """Return the class and the beginning of the message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARACTERS]}"


def run_apart(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> tuple[Any, str, float]:
    """Run a command that prints its result by :func:`print_result`; kill it with its children after a time limit.

    Args:
        command: program and arguments.
        seconds: time limit, positive.
        environment: environment variables; None inherits those of this process.
        folder: working directory; None is that of this process.

    Returns:
        The result, None without one; a description of the failure, empty for a result; and the seconds that it ran.
    """
    began = time.monotonic()
    # A file, because a child that outlives the process would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = Child(command, environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        failure = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            failure = f"killed after {seconds:.0f} s"
        finally:
            process.kill_group()
        output.seek(0)
        text = output.read()
    results = [line.removeprefix(_RESULT) for line in text.splitlines() if line.startswith(_RESULT)]
    elapsed = time.monotonic() - began
    if results and not failure:
        return json.loads(results[-1]), "", elapsed
    end = " ".join(text.split())[-_SHOWN_CHARACTERS:]
    return None, f"{failure or describe_exit(process.wait())}; {end or 'no output'}", elapsed
