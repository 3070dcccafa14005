"""Control groups: finding a folder, setting limits, and enforcing them for a whole program."""

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from lightning_rlhf.extras.sandbox import cgroup
from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox
from lightning_rlhf.extras.sandbox.cgroup import control_group, delegated_group, mount_points
from lightning_rlhf.extras.sandbox.protocol import Limits, SandboxFault

MIB = 2**20
FOLDER = delegated_group()
WRITABLE = next((folder for folder in mount_points() if os.access(folder, os.W_OK)), None)
needs_delegation = pytest.mark.skipif(
    FOLDER is None or shutil.which("bwrap") is None,
    reason="needs bubblewrap and a cgroup2 folder that is writable and delegates memory and pids",
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Folders that simulate control groups; a group is removed with its files, as the kernel does."""
    kernel, root = tmp_path / "proc", tmp_path / "cgroup"
    (root / "user/session").mkdir(parents=True)
    kernel.mkdir()
    (kernel / "mounts").write_text(f"tmpfs /run tmpfs rw 0 0\ncgroup2 {root} cgroup2 rw 0 0\n")
    (kernel / "cgroup").write_text("5:memory:/elsewhere\n0::/user/session\n")
    for folder, delegated in ((root, "cpu memory pids"), (root / "user", "memory pids"), (root / "user/session", "")):
        (folder / "cgroup.subtree_control").write_text(delegated + "\n")
        (folder / "cgroup.procs").touch()
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return kernel, root


def use_groups(sandbox, folder):
    """Set the folder of control groups of a sandbox, which it otherwise finds once."""
    sandbox.__dict__["_groups"] = folder


def test_nearest_folder_with_memory_and_pids_is_used(machine):
    kernel, root = machine
    assert delegated_group(kernel) == root / "user"
    (root / "user/cgroup.subtree_control").write_text("memory\n")
    assert delegated_group(kernel) == root
    (root / "cgroup.subtree_control").write_text("\n")
    assert delegated_group(kernel) is None


def test_machine_without_control_groups_has_no_folder(tmp_path):
    assert delegated_group(tmp_path) is None


@pytest.mark.parametrize(("file", "text"), [("mounts", "tmpfs /run tmpfs rw 0 0\n"), ("cgroup", "5:memory:/user\n")])
def test_version_1_of_control_groups_is_not_used(machine, file, text):
    kernel, _ = machine
    (kernel / file).write_text(text)
    assert delegated_group(kernel) is None


def test_folder_where_no_group_can_be_created_is_skipped(machine, monkeypatch):
    kernel, root = machine
    real_mkdtemp = cgroup.tempfile.mkdtemp

    def refuse(prefix, dir):
        if dir == root / "user":
            raise OSError(errno.EROFS, "Read-only file system")
        return real_mkdtemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(cgroup.tempfile, "mkdtemp", refuse)
    assert delegated_group(kernel) == root


def test_groups_of_killed_trainers_are_removed_but_not_those_in_use(machine):
    kernel, root = machine
    no_process = 2**22 + 1  # larger than any process id of Linux
    dead, alive = (root / f"user/lightning-rlhf-sandbox-{pid}-x" for pid in (no_process, os.getpid()))
    for folder in (dead, alive):
        folder.mkdir()
    assert delegated_group(kernel) == root / "user"
    assert (dead.exists(), alive.exists()) == (False, True)


def test_group_has_its_limits_and_is_always_removed(machine):
    _, root = machine
    before = set((root / "user").iterdir())

    limits = {}

    def fail_within_group():
        with control_group(root / "user", 99 * MIB, 9) as group:
            limits.update({file.name: file.read_text() for file in group.iterdir()})
            raise KeyError

    with pytest.raises(KeyError):
        fail_within_group()
    assert limits == {"memory.max": str(99 * MIB), "pids.max": "9"}
    assert set((root / "user").iterdir()) == before


def test_group_that_cannot_be_created_or_removed_is_a_fault(machine, monkeypatch):
    _, root = machine
    with (
        pytest.raises(SandboxFault, match="cannot create a control group in /nowhere"),
        control_group(Path("/nowhere"), 1, 1),
    ):
        pass
    monkeypatch.setattr(cgroup, "_REMOVAL_TIMEOUT_S", 0.01)

    def busy(folder):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rmdir", busy)
    with pytest.raises(SandboxFault, match="cannot remove the control group"), control_group(root, 1, 1):
        pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_program_starts_only_in_its_group(machine, monkeypatch):
    """A simulated group has no limits, but shows the process that is moved in before it runs the program."""
    _, root = machine
    sandbox, seen, write = BubblewrapSandbox(), [], Path.write_text

    def record(path, text):
        if path.name == "cgroup.procs":
            time.sleep(0.5)  # a program that does not wait is there by now
            process = psutil.Process(int(text))
            seen.append((path.parent.parent, process.name(), process.children()))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", record)
    use_groups(sandbox, root / "user")
    assert sandbox.run("import time; time.sleep(3); print(1)", "", Limits(seconds=60.0)).stdout == "1\n"
    assert seen == [(root / "user", "bwrap", [])]
    assert sandbox.check().endswith(f"; control groups in {root / 'user'}")
    use_groups(sandbox, Path("/nowhere"))
    with pytest.raises(SandboxFault, match="cannot create a control group"):
        sandbox.run("print(1)", "", Limits())


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_program_that_cannot_be_moved_to_its_group_does_not_run(machine, monkeypatch, tmp_path):
    _, root = machine
    sandbox = BubblewrapSandbox()
    use_groups(sandbox, root / "user")
    real, began = Path.write_text, time.monotonic()

    def refuse(path, text):
        if path.name == "cgroup.procs":
            raise OSError(errno.EACCES, "Permission denied")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(SandboxFault, match=r"cannot move the program into its control group: .*Permission denied"):
        sandbox.run("import time; time.sleep(9)", "", Limits(seconds=30.0))
    assert time.monotonic() - began < 5


SIX_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(120 * 2**20)
        time.sleep(2)
        os._exit(0)
for _ in range(6):
    os.wait()
print("all lived")
"""
MANY_FILES = """
import os
for i in range(10**6):
    os.symlink("x" * 100, f"{i:0250}")  # links use memory of the kernel, and none of the limit of files
print("all made")
"""


@pytest.mark.skipif(
    WRITABLE is None or shutil.which("bwrap") is None, reason="needs bubblewrap and a cgroup2 folder that is writable"
)
def test_real_groups_contain_and_kill_programs_and_are_removed(monkeypatch):
    """The limits are left out, because memory and pids may not be delegated here."""
    monkeypatch.setattr(cgroup, "_set_limits", lambda *_: None)
    sandbox = BubblewrapSandbox()
    use_groups(sandbox, WRITABLE)
    assert sandbox.run("print(1)", "", Limits(seconds=60.0)).stdout == "1\n"
    assert sandbox.run("import time; time.sleep(60)", "", Limits(seconds=1.0)).timed_out
    with control_group(WRITABLE, 1, 1) as group, subprocess.Popen(["sleep", "60"]) as left:
        (group / "cgroup.procs").write_text(str(left.pid))
        cgroup._remove(group)
        assert left.wait() == -signal.SIGKILL
        group.mkdir()  # so that the end of the context can remove it
    assert not list(WRITABLE.glob("lightning-rlhf-sandbox-*"))


@needs_delegation
def test_memory_of_all_processes_and_of_the_kernel_is_limited():
    sandbox = BubblewrapSandbox()

    def limits_of(memory_mib):
        return Limits(300.0, memory_mib * MIB, scratch_bytes=MIB)

    for program, limits in ((SIX_CHILDREN, limits_of(256)), (MANY_FILES, limits_of(64))):
        result = sandbox.run(program, "", limits)
        assert (result.stdout, result.exit_code, result.timed_out) == ("", 137, False)
    assert sandbox.run("block = bytearray(150 * 2**20); print(1)", "", limits_of(256)).stdout == "1\n"
    assert sandbox.run(SIX_CHILDREN, "", limits_of(1024)).stdout == "all lived\n"


@needs_delegation
def test_no_group_is_left_after_programs_that_time_out():
    sandbox = BubblewrapSandbox()
    program = "import os, time\nos.fork(); os.fork()\nos.setsid()\nwhile True: time.sleep(1)"
    assert sandbox.run(program, "", Limits(seconds=1.0)).timed_out
    assert not list(FOLDER.glob("lightning-rlhf-sandbox-*"))
    assert str(FOLDER) in sandbox.check()
