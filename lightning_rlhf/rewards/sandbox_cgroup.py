"""Control groups of Linux: one bound for the memory and the number of all processes of a program together.

The limits of a process are its own; only a group bounds what it and its children take in all, with their files in
``/tmp`` and what the kernel holds for them. Groups can be made only where the machine hands us a folder for them.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rlhf.rewards.sandbox import SandboxFault

_NAME = "lightning-rlhf-sandbox-{pid}-"
_PATIENCE_S = 10.0  # for the kernel to clear up what was killed


@contextmanager
def control_group(parent: Path, memory_bytes: int, processes: int) -> Iterator[Path]:
    """A group for one program; at the end all that is in it is killed, and it is removed.

    Args:
        parent: folder in which groups may be made.
        memory_bytes: of all processes, their files in ``/tmp`` and the kernel's own for them; beyond, all are killed.
        processes: and threads, at a time.

    Raises:
        SandboxFault: it cannot be made, or not be removed.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_NAME.format(pid=os.getpid()), dir=parent))
    except OSError as error:
        raise SandboxFault(f"no control group can be made in {parent}: {error}") from error
    try:
        _bound(folder, memory_bytes, processes)
        yield folder
    finally:
        _remove(folder)


def _bound(folder: Path, memory_bytes: int, processes: int) -> None:
    try:
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "pids.max").write_text(str(processes))
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            if (folder / name).exists():
                (folder / name).write_text(value)
    except OSError as error:
        raise SandboxFault(f"the control group {folder} takes no bounds: {error}") from error


def _remove(folder: Path) -> None:
    kill = folder / "cgroup.kill"  # Linux 5.14
    if kill.exists():
        kill.write_text("1")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise SandboxFault(f"the control group {folder} cannot be removed: {error}") from error
        time.sleep(0.002)


def mounted(proc: Path = Path("/proc/self")) -> list[Path]:
    """Where groups of the second version are mounted; nowhere on a machine that knows none.

    Args:
        proc: where the kernel says so.
    """
    if not (proc / "mounts").exists():
        return []
    mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]


def delegated(proc: Path = Path("/proc/self")) -> Path | None:
    """The nearest folder from our own group upward in which groups that bound memory and processes can be made.

    Args:
        proc: where the kernel says which group this process is in, and where groups are mounted.
    """
    roots = mounted(proc)
    if not roots:
        return None
    groups = [line[len("0::") :] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")]
    if not groups:
        return None
    own = roots[0] / groups[0].strip("/")
    return next((folder for folder in (own, *own.parents) if folder.is_relative_to(roots[0]) and _usable(folder)), None)


def _usable(folder: Path) -> bool:
    control = folder / "cgroup.subtree_control"
    if not control.exists() or not {"memory", "pids"}.issubset(control.read_text().split()):
        return False
    if not os.access(folder / "cgroup.procs", os.W_OK):  # or no process may be moved from our group to one below
        return False
    with suppress(SandboxFault), control_group(folder, 2**20, 1):
        # What trainers that were killed have left; their programs died with them.
        for left in folder.glob(_NAME.format(pid="*") + "*"):
            if not Path(f"/proc/{left.name.split('-')[3]}").exists():
                with suppress(OSError):  # another trainer clears up, too
                    left.rmdir()
        return True
    return False
