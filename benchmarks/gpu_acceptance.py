"""Check and measure a machine with an NVIDIA GPU: nineteen points, and one block to send back.

    .venv/bin/python -m benchmarks.gpu_acceptance

Run it in the repository. Each point runs in a separate process and prints one line of JSON; a point that fails or
takes too long does not end the others. vLLM is not needed. ``--device cpu`` runs the same code in a small form on a
machine without a GPU: that shows that the points run, and measures nothing.

docs/tested.md describes what each point measures. This is what the results decide:

- 1 ``machine`` or 2 ``building`` fails: the installation is wrong. Mend it before you run the others.
- 13 ``attention`` fails: packed rows are wrong on a GPU. Train with ``packing: false`` until we know why.
- 3 ``steps`` or 5 ``two_updates`` fails: if only in ``bf16-mixed``, packed rows or autocast are wrong. In ``32-true``
  as well, a tensor is on the wrong device.
- 15 ``head``: the size of the head's chunks, which is a guess now.
- 17 ``layers`` and 8 ``speed``: if the fraction of the peak is below 20 %, points 14 and 15 and the time the CPU waits
  show which part is slow.
- 7 ``memory``: its difference from ``plan`` is what ``plan`` adds for the CUDA context and NCCL.
- 16 ``ipc``: whether ``push_within_gpu`` can become the default.
- 9 ``push``: whether pushes reach the speed of the bus.
- 10 ``start_order``: whether the engine may start while the trainer begins, and whether the limit of the trainer's
  memory holds.
- 18 ``loops``: whether the loop over a response's tokens is fast enough in Python.
- 4 ``engine_gap``: the bounds of the check of engine and actor.
- 6 ``strategies``, 11 ``resume``, 12 ``quickstart``: whether strategies, resuming and whole runs are as on a CPU.
- 19 ``activation_offload``: whether it saves memory without changing gradients.
- ``first_gpu_run`` and ``doctor --try``: whether vLLM works. If engine and actor differ by more than 0.1 nats in
  bfloat16, the bounds of their check.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rlhf.extras.commands import separate_process

ROOT = Path(__file__).resolve().parents[1]
# Number of a point to its name and the most seconds that it may take, in the order of what each can find.
POINTS = {
    1: ("machine", 120),
    2: ("building", 60),
    3: ("steps", 150),
    4: ("engine_gap", 90),
    5: ("two_updates", 60),
    6: ("strategies", 150),
    7: ("memory", 100),
    8: ("speed", 100),
    9: ("push", 100),
    10: ("start_order", 60),
    11: ("resume", 150),
    12: ("quickstart", 300),
    13: ("attention", 100),
    14: ("attention_speed", 60),
    15: ("head", 100),
    16: ("ipc", 100),
    17: ("layers", 120),
    18: ("loops", 60),
    19: ("activation_offload", 90),
}
# The files of the points, each with the number of its last one.
_PARTS = {"acceptance_points": 6, "acceptance_measurements": 12, "acceptance_trainer": 19}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the points and print the block; exit code 0 if all were run and passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--points", type=int, nargs="+", default=list(POINTS), choices=list(POINTS), metavar="N")
    parser.add_argument("--seconds", type=float, default=1170.0, help="time for all points (default: %(default)s)")
    parser.add_argument("--in-this-process", type=int, choices=list(POINTS), metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_this_process is not None:
        return run_here(options.in_this_process, options.device)
    end, lines = time.monotonic() + options.seconds, []
    for number in options.points:
        lines.append(json.dumps(run_apart(number, options.device, end)))
        print(lines[-1], flush=True)
    passed = sum(json.loads(line)["ok"] for line in lines)
    print(f"\n===== lightning-rlhf GPU acceptance: {passed} of {len(lines)} points passed =====")
    print(*lines, "===== end =====", sep="\n")
    return 0 if passed == len(lines) else 1


def run_here(number: int, device: str) -> int:
    """Run one point in this process and print its figures as the last line."""
    name = POINTS[number][0]
    with tempfile.TemporaryDirectory(prefix=f"acceptance_{name}_") as folder:
        try:
            figures = point_of(number)(device, Path(folder))
        except Exception as error:
            traceback.print_exc()
            figures = {"ok": False, "error": separate_process.error_line(error)}
    separate_process.print_result(figures)
    return 0


def point_of(number: int) -> Callable[[str, Path], dict[str, Any]]:
    """Return the function of a point."""
    part = next(part for part, last in _PARTS.items() if number <= last)
    point: Callable[[str, Path], dict[str, Any]] = getattr(import_module(f"benchmarks.{part}"), POINTS[number][0])
    return point


def run_apart(number: int, device: str, end: float) -> dict[str, Any]:
    """Run one point in a separate process, which is killed with all its children when its time is over.

    Args:
        number: number of the point.
        device: ``cuda`` or ``cpu``.
        end: time on the monotonic clock at which all points must have ended.

    Returns:
        Number, name, whether it passed, seconds, and the figures or the error.
    """
    name, most = POINTS[number]
    left = end - time.monotonic()
    limit = min(float(most if device == "cuda" else 3 * most), left)
    line: dict[str, Any] = {"point": number, "name": name, "ok": False, "device": device}
    if left < 5:
        return {**line, "error": "not run: the time for all points is over"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--device", device, "--in-this-process", str(number)]
    environment = {**os.environ, **hidden}
    figures, failure, seconds = separate_process.run_apart(command, limit, environment, ROOT)
    line["seconds"] = round(seconds, 1)
    return {**line, "error": failure} if figures is None else {**line, **figures}


if __name__ == "__main__":
    sys.exit(main())
