"""Measurement of the steps of a training process: processor seconds of all its processes, wall time, memory."""

import json
import time
from pathlib import Path
from typing import Any

import psutil

WARM = 2  # steps before those that are counted


class Meter:
    """Collects one record per step and writes them to a file.

    Args:
        path: JSON file to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = psutil.Process()
        self.steps: list[dict[str, Any]] = []
        self.started: tuple[float, float] | None = None
        self.peak_bytes = 0

    def mark(self, **measured: float) -> None:
        """End a step, with further figures of it, and begin the next one."""
        now = (time.perf_counter(), self.cpu_seconds())
        if self.started is not None:
            wall, cpu = (after - before for after, before in zip(now, self.started, strict=True))
            self.steps.append({"wall": wall, "cpu": cpu, **measured})
        self.peak_bytes = max(self.peak_bytes, self.peak())
        self.started = (time.perf_counter(), self.cpu_seconds())

    def family(self) -> list[psutil.Process]:
        """Return this process and all that it has started."""
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the processor seconds of all processes, user and system."""
        seconds = 0.0
        for process in self.family():
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system  # also of ended ones
        return seconds

    def peak(self) -> int:
        """Return the sum of the processes' peaks of resident memory, bytes; shared pages count in each."""
        texts = [Path(f"/proc/{process.pid}/status").read_text() for process in self.family()]
        # A process that has ended, but was not waited for, has no memory.
        return sum(int(text.partition("VmHWM:")[2].split()[0]) * 1024 for text in texts if "VmHWM:" in text)

    def write(self, **described: Any) -> None:
        """Write the steps after the warm ones."""
        content = {"steps": self.steps[WARM:], "peak_bytes": self.peak_bytes, **described}
        self.path.write_text(json.dumps(content))
