"""Linux control groups, which limit the total memory and number of all processes of a program.

Resource limits apply to single processes; only a group limits a program and its children together, including their
files in ``/tmp`` and the kernel's memory for them. Groups can be created only in a folder that the system delegates to
the user.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rlhf.extras.sandbox.protocol import SandboxFault

_NAME = "lightning-rlhf-sandbox-{pid}-"
_REMOVAL_TIMEOUT_S = 10.0  # the kernel cleans up killed processes asynchronously


@contextmanager
def control_group(parent: Path, memory_bytes: int, processes: int) -> Iterator[Path]:
    """Create a group for one program; at the end kill its processes and remove it.

    Args:
        parent: folder in which groups can be created.
        memory_bytes: memory limit of all processes, their files in ``/tmp`` and the kernel's memory for them; if it is
            exceeded, all processes are killed.
        processes: largest number of processes and threads.

    Raises:
        SandboxFault: the group cannot be created or removed.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_NAME.format(pid=os.getpid()), dir=parent))
    except OSError as error:
        raise SandboxFault(f"cannot create a control group in {parent}: {error}") from error
    try:
        _set_limits(folder, memory_bytes, processes)
        yield folder
    finally:
        _remove(folder)


def _set_limits(folder: Path, memory_bytes: int, processes: int) -> None:
    try:
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "pids.max").write_text(str(processes))
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            if (folder / name).exists():
                (folder / name).write_text(value)
    except OSError as error:
        raise SandboxFault(f"cannot set the limits of the control group {folder}: {error}") from error


def _remove(folder: Path) -> None:
    kill = folder / "cgroup.kill"  # Linux 5.14
    if kill.exists():
        kill.write_text("1")
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise SandboxFault(f"cannot remove the control group {folder}: {error}") from error
        time.sleep(0.002)


def mount_points(proc: Path = Path("/proc/self")) -> list[Path]:
    """Return the mount points of control groups version 2; empty without them.

    Args:
        proc: the process's folder in /proc.
    """
    if not (proc / "mounts").exists():
        return []
    mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]


def delegated_group(proc: Path = Path("/proc/self")) -> Path | None:
    """Find the nearest folder, from this process's group upward, where groups with limits can be created.

    Args:
        proc: the process's folder in /proc.
    """
    roots = mount_points(proc)
    if not roots:
        return None
    groups = [line[len("0::") :] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")]
    if not groups:
        return None
    current = roots[0] / groups[0].strip("/")
    folders = [folder for folder in (current, *current.parents) if folder.is_relative_to(roots[0])]
    return next((folder for folder in folders if _is_usable(folder)), None)


def _is_usable(folder: Path) -> bool:
    control = folder / "cgroup.subtree_control"
    if not control.exists() or not {"memory", "pids"}.issubset(control.read_text().split()):
        return False
    if not os.access(folder / "cgroup.procs", os.W_OK):  # needed to move a process into a group below this one
        return False
    with suppress(SandboxFault), control_group(folder, 2**20, 1):
        # Remove the empty groups of trainers that were killed.
        for old in folder.glob(_NAME.format(pid="*") + "*"):
            if not Path(f"/proc/{old.name.split('-')[3]}").exists():
                with suppress(OSError):  # another trainer may remove it at the same time
                    old.rmdir()
        return True
    return False
