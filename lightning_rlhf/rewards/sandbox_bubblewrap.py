"""The sandbox of this machine: bubblewrap, with namespaces, limits and a system call filter, and without Docker."""

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

from lightning_rlhf.rewards.sandbox import Finished, Limits, SandboxFault, SandboxUnavailable
from lightning_rlhf.rewards.sandbox_cgroup import control_group, delegated
from lightning_rlhf.rewards.sandbox_process import end_all, watch
from lightning_rlhf.rewards.sandbox_seccomp import filter_program

_NOBODY = 65534
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
    *("--cap-drop", "ALL", "--hostname", "sandbox"),
)
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")  # no environment, no site-packages, no bytecode files, UTF-8
_START = (Path(__file__).parent / "sandbox_start.py").read_bytes()
_INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap), or use a RemoteSandbox"
# What keeps bubblewrap from working, by what it says, and what to do.
_REMEDIES = {
    "unknown option": _INSTALL,
    "unprivileged user": "in a container, give it the user ids up to 65534; or start the trainer as an ordinary user",
    "uid map": "AppArmor forbids user namespaces: set sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    "namespace": (
        "user namespaces are switched off: set sysctl user.max_user_namespaces=10000 (on Debian also "
        "kernel.unprivileged_userns_clone=1); in Docker, give --security-opt seccomp=unconfined and "
        "--security-opt apparmor=unconfined; or use a RemoteSandbox"
    ),
}
# Runs inside and says what it finds there; check() compares.
_INSPECTION = """
import _socket, json, os, platform, resource
def refused(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE")
print(json.dumps({
    "python": "Python " + platform.python_version(), "uid": os.getuid(), "groups": os.getgroups(),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    "write": refused(lambda: open("/x", "w")), "socket": refused(_socket.socket), "proc": os.path.exists("/proc"),
}))
"""


def find_bwrap() -> str | None:
    """Where bubblewrap is, if it is installed."""
    return shutil.which("bwrap")


@dataclass(frozen=True)
class BubblewrapSandbox:
    """A Linux sandbox for any user, root or not, that needs no daemon and no image: about 15 ms a program.

    Args:
        python: the interpreter inside; None takes the one that the trainer's environment was made from if everybody may
            read it, else /usr/bin/python3. It comes without site-packages.
        packages: a folder of packages (``pip install --target``) that programs may import; everybody must be able to
            read it.
        concurrency: programs at a time, over all threads; None takes one for each processor. The others wait, and
            their time does not run yet.
    """

    python: str | None = None
    packages: str | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, or null for one a processor, got {self.concurrency}")
        self._slots  # noqa: B018 (made before there are threads)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.python, self.packages, self.concurrency)  # what is cached stays in its process

    def check(self) -> str:
        """Run a program that looks around in the sandbox, and see that it found what it should.

        Raises:
            SandboxUnavailable: bubblewrap is missing, may not work here, or does not keep what it promises.
        """
        limits = Limits(seconds=30.0)  # a machine may be busy with loading models
        try:
            found = self.run(_INSPECTION, "", limits)
        except SandboxFault as fault:
            raise _unavailable(str(fault)) from fault
        try:
            report = json.loads(found.stdout)
        except ValueError:
            raise _unavailable(found.stderr.strip() or f"no answer within {limits.seconds:g} s") from None
        expected = {name: [value, value] for name, value in _resources(limits).items()}
        refused = (report["write"], report["socket"]) == (errno.EROFS, errno.EPERM)
        if not refused or report["limits"] != expected or report["uid"] == 0 or report["groups"] or report["proc"]:
            raise SandboxUnavailable(
                f"bubblewrap starts but does not isolate, it reports {report}: use a RemoteSandbox"
            )
        groups = f"control groups in {self._groups}" if self._groups else "no control groups are delegated"
        return f"works, {report['python']} at {self._interpreter}; {groups}"

    def run(self, source: str, stdin: str, limits: Limits) -> Finished:
        """Run a program to its end or to its limits.

        Raises:
            SandboxUnavailable: there is nothing to run it with.
            SandboxFault: bubblewrap failed before the program began.
        """
        with self._slots:
            return self._run(source, stdin, limits)

    def _run(self, source: str, stdin: str, limits: Limits) -> Finished:
        memory, processes = limits.memory_bytes + limits.scratch_bytes, _resources(limits)["RLIMIT_NPROC"]
        with control_group(self._groups, memory, processes) if self._groups else nullcontext() as group:
            alive, held = _pipe()  # its end shows a program that is just starting that the trainer was killed
            with alive, held:
                process, status = self._begin(source, limits, group, alive)
                text = stdin.encode("utf-8", "surrogatepass")
                found = watch(process, text, {"status": status}, limits.seconds, limits.output_bytes)
        said, complained = (found.output[name].decode("utf-8", "replace") for name in ("stdout", "stderr"))
        # Only bubblewrap itself can write this line, so a program cannot pass its own end off as a fault of ours.
        if b'"exit-code"' not in found.output["status"] and found.exit_code is not None:
            raise SandboxFault(complained.strip() or f"bubblewrap ended with {found.exit_code} and said nothing")
        return Finished(said, complained, found.exit_code, found.timed_out, found.truncated, found.seconds)

    def _begin(
        self, source: str, limits: Limits, group: Path | None, alive: IO[bytes]
    ) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """Start a program; also the pipe on which bubblewrap says how it ended."""
        with ExitStack() as files:
            program, start, rules = (
                files.enter_context(_in_memory(content))
                for content in (source.encode("utf-8", "surrogatepass"), _START, filter_program())
            )
            (status, says), (waits, gate) = _pipe(), _pipe()
            for end in (says, waits, gate):
                files.enter_context(end)
            arguments = [
                *("--file", str(start), "/start.py", "--file", str(program), "/program.py"),
                *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(rules)),
                *("--json-status-fd", str(says.fileno())),
                *(("--block-fd", str(waits.fileno())) if group else ()),
            ]
            passed = (program, start, rules, says.fileno(), alive.fileno(), *((waits.fileno(),) if group else ()))
            try:
                process = self._start([*arguments, "--", *self._command(limits, alive)], limits, passed)
            except BaseException:
                status.close()
                raise
            says.close()
            try:
                if group is not None:
                    _enter(group, status, gate)
            except BaseException:
                with process, status:
                    end_all(process)
                raise
        return process, status

    def _start(self, arguments: list[str], limits: Limits, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
        bwrap = find_bwrap()
        if bwrap is None:
            raise SandboxUnavailable(f"bubblewrap is not installed: {_INSTALL}")
        scratch = ("--size", str(limits.scratch_bytes), "--tmpfs", "/tmp")
        # Root is exempt from the limit on processes, and must not be what a hole in the kernel is met as.
        nobody: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        try:
            return subprocess.Popen(
                [bwrap, *_ISOLATION, *self._files, *scratch, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                cwd="/",
                env={},
                start_new_session=True,
                **nobody,
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
        return delegated()

    @cached_property
    def _interpreter(self) -> str:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        choice = [self.python] if self.python else [f"{sys.base_prefix}/bin/{version}", "/usr/bin/python3"]
        for path in (Path(name).resolve() for name in choice):
            if path.is_file() and _readable(path):
                return str(path)
        who = "everybody, because root runs programs as nobody" if os.getuid() == 0 else "you"
        raise SandboxUnavailable(
            f"no Python for the sandbox: {' and '.join(choice)} must exist and be readable to {who}"
        )

    @cached_property
    def _files(self) -> list[str]:
        """What there is of the machine's files: libraries, the interpreter, three devices; all of it to read only."""
        executable = Path(self._interpreter)
        folders = dict.fromkeys(Path(name) for name in (*_LIBRARIES, f"{executable.parents[1]}/lib"))
        arguments = []
        for folder in filter(os.path.lexists, folders):
            link = ["--symlink", os.readlink(folder)] if folder.is_symlink() else ["--ro-bind", str(folder)]
            arguments += [*link, str(folder)]
        arguments += ["--ro-bind", str(executable), str(executable)]
        for folder in folders:
            for installed in sorted([*folder.glob("python3*/site-packages"), *folder.glob("python3*/dist-packages")]):
                if not folder.is_symlink() and installed.is_dir():
                    arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", str(installed)]
                    arguments += ["--remount-ro", str(installed)]
        for device in _DEVICES:
            arguments += ["--dev-bind", device, device]
        return [*arguments, *(["--ro-bind", self.packages, "/packages"] if self.packages else [])]


def _enter(group: Path, status: IO[bytes], gate: IO[bytes]) -> None:
    """Put the process that becomes the program into a group, then let it go on."""
    line = bytearray()
    while not line.endswith(b"\n"):
        read = status.read(1)
        if not read:
            return  # it failed before, and its stderr says why
        line += read
    try:
        (group / "cgroup.procs").write_text(str(json.loads(line)["child-pid"]))
    except OSError as error:
        raise SandboxFault(f"a program could not be put into its control group: {error}") from error
    gate.write(b"1")


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reads, writes = os.pipe()
    return open(reads, "rb", buffering=0), open(writes, "wb", buffering=0)


@contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """A file descriptor to read the content from; it never touches a disk."""
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
        "RLIMIT_NPROC": limits.processes + 1,  # bubblewrap's own process in there counts
        "RLIMIT_CORE": 0,
    }


def _readable(path: Path) -> bool:
    """Whether the user whom programs run as can reach and run a file."""
    if os.getuid() != 0:
        return os.access(path, os.R_OK | os.X_OK)
    return all(place.stat().st_mode & 0o001 for place in (path, *path.parents)) and bool(path.stat().st_mode & 0o004)


def _unavailable(said: str) -> SandboxUnavailable:
    remedy = next((text for sign, text in _REMEDIES.items() if sign in said.lower()), "use a RemoteSandbox")
    return SandboxUnavailable(f"the bubblewrap sandbox does not work here ({said[-300:]}): {remedy}")
