"""A sandbox on this machine: bubblewrap with namespaces, resource limits and a system call filter, without Docker."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.sandbox.cgroup import control_group, delegated_group
from lightning_rlhf.extras.sandbox.process import communicate, kill_session
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult, SandboxFault, SandboxUnavailable
from lightning_rlhf.extras.sandbox.seccomp import filter_program
from lightning_rlhf.processes.child import Child

_NOBODY = 65534  # user id
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
    *("--cap-drop", "ALL", "--hostname", "sandbox"),
)
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")  # no environment, no site-packages, no bytecode files, UTF-8
_BOOTSTRAP = (Path(__file__).parent / "bootstrap.py").read_bytes()
_INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap), or use a RemoteSandbox"
# Remedies by a part of bubblewrap's error message.
_REMEDIES = {
    "unknown option": _INSTALL,
    "unprivileged user": "in a container, map the user ids up to 65534; or start the trainer as an ordinary user",
    "uid map": "AppArmor blocks user namespaces: set sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    "namespace": (
        "user namespaces are disabled: set sysctl user.max_user_namespaces=10000 (on Debian also "
        "kernel.unprivileged_userns_clone=1); in Docker, use --security-opt seccomp=unconfined and "
        "--security-opt apparmor=unconfined; or use a RemoteSandbox"
    ),
}
# Program that reports the sandbox's environment to check().
_INSPECTION = """
import _socket, json, os, platform, resource
def error_of(action):
    try:
        action()
    except OSError as error:
        return error.errno
names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE")
print(json.dumps({
    "python": "Python " + platform.python_version(), "uid": os.getuid(), "groups": os.getgroups(),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    "write": error_of(lambda: open("/x", "w")), "socket": error_of(_socket.socket), "proc": os.path.exists("/proc"),
}))
"""


def find_bwrap() -> str | None:
    """Return the path of bubblewrap, None if it is not installed."""
    return shutil.which("bwrap")


def probe() -> list[tuple[str, str, str]]:
    """Test the sandbox for ``doctor``.

    Returns:
        Name, finding and error. The error is also empty if bubblewrap is not installed, because only code rewards need
        it.
    """
    if find_bwrap() is None:
        return [("bubblewrap", "not installed; code rewards need it or a RemoteSandbox", "")]
    try:
        return [("bubblewrap", BubblewrapSandbox().check(), "")]
    except SandboxUnavailable as error:
        return [("bubblewrap", "does not work", str(error))]


@dataclass(frozen=True)
class BubblewrapSandbox:
    """Runs programs in a Linux sandbox that needs no root, daemon or image, in about 15 ms per program.

    A program gets:

    - the user ``nobody`` (65534) if the trainer is root, else the trainer's user, without capabilities or supplementary
      groups. It cannot gain privileges.
    - separate user, process, network, mount, IPC, UTS and cgroup namespaces, with further user namespaces disabled, and
      a separate session.
    - the libraries and one Python without site-packages, all read-only, and a ``/tmp`` of its own. There is no
      ``/proc``, ``/sys``, ``/etc`` or shell. The devices are ``/dev/null``, ``/dev/zero`` and ``/dev/urandom``.
    - none of the trainer's environment variables and descriptors. stdin, stdout and stderr are pipes.
    - the resources of ``limits``. At the end of its time, the whole tree is killed. Processes are counted inside the
      sandbox, so other sandboxes and the trainer do not count. There are no core files.
    - with delegated control groups, at most ``memory_bytes`` plus ``scratch_bytes`` for all its processes, its files
      and the kernel's memory for them. It is moved to its group before its first instruction, and the group is removed
      at its end.
    - no access to some seventy system calls: all sockets except pairs of Unix sockets, keys, tracing, mounts, bpf,
      io_uring, asynchronous reads, perf, memory files, System V memory, inotify, modules and clocks. Calls of another
      architecture kill the process.

    It can see the machine's libraries, its kernel's version and how much time passes. With the default limits it may
    use up to 8 processors. Before a model loads, a test program reports its limits, and whether it can write, open a
    socket or see ``/proc``.

    Control groups are optional. Without them, limits of memory are per process, and empty files in ``/tmp`` use kernel
    memory until the program's time ends. All other protection is the same. With them, the kernel kills only the
    processes of the program that needs too much. You need version 2 (``/sys/fs/cgroup`` of type cgroup2) and a folder,
    the trainer's own group or a parent, that its user can write to, with ``memory`` and ``pids`` in
    ``cgroup.subtree_control``. With systemd, start the trainer by ``systemd-run --user --scope`` and check with
    ``lightning-rlhf doctor``. In a container, its operator has to delegate one. The programs' groups are siblings of
    the trainer's, so only a parent unit's ``MemoryMax`` applies to them.

    Args:
        python: interpreter of the programs, without site-packages. None uses the base interpreter of the trainer's
            environment if the programs' user can read it, else /usr/bin/python3.
        packages: folder of packages (``pip install --target``) that programs may import, readable by all users.
        concurrency: most programs at a time, over all threads. None: one per processor. Waiting does not count towards
            a program's time limit.
    """

    python: str | None = None
    packages: str | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, or null for one per processor, got {self.concurrency}")
        self._slots  # noqa: B018 (created before threads use it)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.python, self.packages, self.concurrency)  # without cached properties

    def check(self) -> str:
        """Run a program that reports its isolation, and verify the report.

        Raises:
            SandboxUnavailable: bubblewrap is missing, does not work here, or does not isolate.
        """
        limits = Limits(seconds=30.0)  # the machine may be busy loading models
        try:
            result = self.run(_INSPECTION, "", limits)
        except SandboxFault as fault:
            raise _unavailable(str(fault)) from fault
        try:
            report = json.loads(result.stdout)
        except ValueError:
            raise _unavailable(result.stderr.strip() or f"no answer within {limits.seconds:g} s") from None
        expected = {name: [value, value] for name, value in _resources(limits).items()}
        blocked = (report["write"], report["socket"]) == (errno.EROFS, errno.EPERM)
        if not blocked or report["limits"] != expected or report["uid"] == 0 or report["groups"] or report["proc"]:
            raise SandboxUnavailable(
                f"bubblewrap starts but does not isolate; the program inside reports {report}: use a RemoteSandbox"
            )
        groups = "no control groups are delegated"
        if self._groups:
            groups = f"control groups in {self._groups}"
        return f"works, {report['python']} at {self._interpreter}; {groups}"

    def run(self, source: str, stdin: str, limits: Limits) -> ProgramResult:
        """Run a program until it ends or exceeds its limits.

        Raises:
            SandboxUnavailable: bubblewrap or Python was not found.
            SandboxFault: bubblewrap failed before the program started.
        """
        with self._slots:
            return self._run(source, stdin, limits)

    def _run(self, source: str, stdin: str, limits: Limits) -> ProgramResult:
        memory = limits.memory_bytes + limits.scratch_bytes
        processes = _resources(limits)["RLIMIT_NPROC"]
        with control_group(self._groups, memory, processes) if self._groups else nullcontext() as group:
            alive, held_open = _pipe()  # end of file shows the program that the trainer was killed
            with alive, held_open:
                process, status = self._launch(source, limits, group, alive)
                result = communicate(
                    process,
                    stdin=stdin.encode("utf-8", "surrogatepass"),
                    extra_pipes={"status": status},
                    seconds=limits.seconds,
                    output_bytes=limits.output_bytes,
                )
        stderr = result.output["stderr"].decode("utf-8", "replace")
        # Only bubblewrap can write to this pipe, so a program cannot simulate a failure of the sandbox.
        if b'"exit-code"' not in result.output["status"] and result.exit_code is not None:
            raise SandboxFault(stderr.strip() or f"bubblewrap exited with {result.exit_code} and no message")
        return ProgramResult(
            stdout=result.output["stdout"].decode("utf-8", "replace"),
            stderr=stderr,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            truncated=result.truncated,
            seconds=result.seconds,
        )

    def _launch(self, source: str, limits: Limits, group: Path | None, alive: IO[bytes]) -> tuple[Child, IO[bytes]]:
        """Start a program in its control group.

        Returns:
            The process, and the pipe to which bubblewrap writes how the program ended.
        """
        with ExitStack() as files:
            program = files.enter_context(_in_memory(source.encode("utf-8", "surrogatepass")))
            bootstrap = files.enter_context(_in_memory(_BOOTSTRAP))
            rules = files.enter_context(_in_memory(filter_program()))
            status, status_writer = _pipe()
            gate, gate_writer = _pipe()  # bubblewrap waits for a byte until the program is in its group
            for end in (status_writer, gate, gate_writer):
                files.enter_context(end)
            arguments = [
                *("--file", str(bootstrap), "/start.py", "--file", str(program), "/program.py"),
                *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(rules)),
                *("--json-status-fd", str(status_writer.fileno())),
            ]
            descriptors = [program, bootstrap, rules, status_writer.fileno(), alive.fileno()]
            if group is not None:
                arguments += ["--block-fd", str(gate.fileno())]
                descriptors.append(gate.fileno())
            try:
                process = self._start([*arguments, "--", *self._command(limits, alive)], limits, descriptors)
            except BaseException:
                status.close()
                raise
            status_writer.close()
            try:
                if group is not None:
                    _move_to_group(group, status, gate_writer)
            except BaseException:
                with process, status:
                    kill_session(process)
                raise
        return process, status

    def _start(self, arguments: list[str], limits: Limits, descriptors: list[int]) -> Child:
        bwrap = find_bwrap()
        if bwrap is None:
            raise SandboxUnavailable(f"bubblewrap is not installed: {_INSTALL}")
        scratch = ("--size", str(limits.scratch_bytes), "--tmpfs", "/tmp")
        # Root is exempt from the process limit, and could do more damage through a kernel bug.
        user: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        try:
            return Child(
                [bwrap, *_ISOLATION, *self._files, *scratch, *arguments],
                {},
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                cwd="/",
                **user,
            )
        except OSError as error:
            raise SandboxFault(f"bubblewrap could not be started as an unprivileged user: {error}") from error

    def _command(self, limits: Limits, alive: IO[bytes]) -> list[str]:
        folders = ["/packages"] if self.packages else []
        return [self._interpreter, *_FLAGS, "/start.py", json.dumps(_resources(limits)), str(alive.fileno()), *folders]

    @cached_property
    def _slots(self) -> threading.BoundedSemaphore:
        return threading.BoundedSemaphore(self.concurrency or os.cpu_count() or 1)

    @cached_property
    def _groups(self) -> Path | None:
        return delegated_group()

    @cached_property
    def _interpreter(self) -> str:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if self.python:
            candidates = [self.python]
        else:
            candidates = [f"{sys.base_prefix}/bin/{version}", "/usr/bin/python3"]
        for path in (Path(name).resolve() for name in candidates):
            if path.is_file() and _is_readable(path):
                return str(path)
        users = "you"
        if os.getuid() == 0:
            users = "all users, because root runs programs as user 65534"
        raise SandboxUnavailable(
            f"no Python found for the sandbox: {' or '.join(candidates)} must exist and be readable by {users}"
        )

    @cached_property
    def _files(self) -> list[str]:
        """Arguments that mount the libraries, the interpreter and three devices read-only."""
        executable = Path(self._interpreter)
        folders = dict.fromkeys(Path(name) for name in (*_LIBRARIES, f"{executable.parents[1]}/lib"))
        arguments = []
        for folder in filter(os.path.lexists, folders):
            mount = ["--symlink", os.readlink(folder)] if folder.is_symlink() else ["--ro-bind", str(folder)]
            arguments += [*mount, str(folder)]
        arguments += ["--ro-bind", str(executable), str(executable)]
        for folder in folders:
            for installed in sorted([*folder.glob("python3*/site-packages"), *folder.glob("python3*/dist-packages")]):
                if not folder.is_symlink() and installed.is_dir():
                    arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", str(installed)]
                    arguments += ["--remount-ro", str(installed)]
        for device in _DEVICES:
            arguments += ["--dev-bind", device, device]
        return [*arguments, *(["--ro-bind", self.packages, "/packages"] if self.packages else [])]


def _move_to_group(group: Path, status: IO[bytes], gate: IO[bytes]) -> None:
    """Move the process that becomes the program into a control group, then let it continue."""
    line = bytearray()
    while not line.endswith(b"\n"):
        read = status.read(1)
        if not read:
            return  # bubblewrap failed; its stderr contains the reason
        line += read
    try:
        (group / "cgroup.procs").write_text(str(json.loads(line)["child-pid"]))
    except OSError as error:
        raise SandboxFault(f"cannot move the program into its control group: {error}") from error
    gate.write(b"1")


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return open(reader, "rb", buffering=0), open(writer, "wb", buffering=0)


@contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Yield the descriptor of an in-memory file."""
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _resources(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.scratch_bytes,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_NPROC": limits.processes + 1,  # one more for bubblewrap's own process in the sandbox
        "RLIMIT_CORE": 0,
    }


def _is_readable(path: Path) -> bool:
    """Return whether the user that runs the programs can read and execute a file."""
    if os.getuid() != 0:
        return os.access(path, os.R_OK | os.X_OK)
    reachable = all(part.stat().st_mode & 0o001 for part in (path, *path.parents))
    return reachable and bool(path.stat().st_mode & 0o004)


def _unavailable(message: str) -> SandboxUnavailable:
    remedy = next((text for sign, text in _REMEDIES.items() if sign in message.lower()), "use a RemoteSandbox")
    return SandboxUnavailable(f"the bubblewrap sandbox does not work here ({message[-300:]}): {remedy}")
