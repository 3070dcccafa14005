"""The process that starts the other ranks of its machine: the command of a run, or a script."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lightning_rlhf.launch_environment import is_first_process
from lightning_rlhf.processes.child import end_with_parent

_LAUNCHER = "LIGHTNING_RLHF_LAUNCHER"  # variable with its process id


def end_with_launcher(is_loading: bool) -> None:
    """Have this rank end with the process that started it, while it loads; the failure watch sees to that afterwards.

    In the first process of a machine: have the ranks that it starts do so. torchrun and SLURM end their ranks.
    """
    if is_first_process():
        os.environ[_LAUNCHER] = str(os.getpid())
    elif (launcher := os.environ.get(_LAUNCHER)) and sys.platform == "linux":
        end_with_parent(signal.SIGKILL if is_loading else 0)
        if is_loading and not Path("/proc", launcher).exists():  # it ended before this line
            sys.exit(1)
