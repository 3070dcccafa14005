"""Escape attempts from the sandbox do not affect the machine; checked from outside where possible."""

import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox
from lightning_rlhf.extras.sandbox.protocol import Limits
from lightning_rlhf.extras.sandbox.seccomp import _DENIED
from tests.extras.sandbox.escape_attempts import ATTEMPTS

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts know x86_64's numbers of system calls"),
]
SECONDS = 3.0
SCRATCH = 16 * 2**20 + os.getpid()  # stands on the command line of every sandboxed process, and of no other
LIMITS = Limits(seconds=SECONDS, scratch_bytes=SCRATCH)
LONG = {  # seconds, until a limit ends them; one of each kind remains in make test
    "recurse in Python", "overflow the stack", "stop itself", "stop its parent", "compute in C for ever",
    "compute for ever in children", "leave zombie processes", "wait for more input", "adopt its descendants",
    "sleep and ignore every signal", "close everything and sleep", "two gigabytes bit by bit",
}  # fmt: skip
SECRET = f"secret-{uuid.uuid4()}"


class World:
    """Targets of the attempts: files, listeners, a session key, shared memory, an open descriptor, this process."""

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(tempfile.mkdtemp())  # pytest's folder is private, so that reading from it always fails
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o777)
        self.canary, self.scratch, self.doomed = (folder / name for name in ("canary", "scratch", "doomed"))
        for file in (self.canary, self.scratch, self.doomed):
            file.write_text(SECRET)
            file.chmod(0o666)
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        for listener in (self.tcp, self.udp, self.unix, self.abstract):
            stack.enter_context(listener).setblocking(False)
        self.udp.bind(("127.0.0.1", 0))
        self.unix.bind(str(folder / "unix"))
        os.chmod(folder / "unix", 0o777)
        self.name = str(uuid.uuid4())
        self.abstract.bind(f"\0{self.name}")
        for listener in (self.unix, self.abstract):
            listener.listen()
        self.descriptor = os.open(self.canary, os.O_RDONLY)
        stack.callback(os.close, self.descriptor)
        os.set_inheritable(self.descriptor, True)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(_DENIED["add_key"][0], b"user", SECRET.encode(), b"payload", 7, -3)
        libc.shmget.restype = ctypes.c_int
        self.shared = uuid.uuid4().int % 2**31
        number = libc.shmget(self.shared, 4096, 0o1666)
        stack.callback(libc.shmctl, number, 0, None)
        self.folder = folder

    @property
    def names(self):
        return {
            **{name: numbers[0] for name, numbers in _DENIED.items()},
            **{name: str(getattr(self, name)) for name in ("canary", "scratch", "doomed", "folder")},
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": str(self.folder / "unix"),
            "abstract": self.name,
            "key": SECRET,
            "shared": self.shared,
            "descriptor": self.descriptor,
            "pid": os.getpid(),
            "secret": SECRET,
            "host": socket.gethostname(),
            "site": Path(pytest.__file__).parents[1],
        }

    def visited(self):
        """Return whether anything arrived."""
        for listener in (self.tcp, self.unix, self.abstract):
            try:
                listener.accept()[0].close()
                return True
            except BlockingIOError:
                pass
        try:
            return bool(self.udp.recv(99))
        except BlockingIOError:
            return False


def sandboxed():
    """Return the running sandboxed processes of these tests."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(SCRATCH) in (folder / "cmdline").read_text():
                result.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return result


def all_gone():
    """Return whether all processes end soon; the kernel may still clean up after the one that was waited for."""
    deadline = time.monotonic() + 5
    while sandboxed() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not sandboxed()


@pytest.fixture(scope="module")
def world():
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY", SECRET)
        yield World(stack)


@pytest.fixture(scope="module")
def results(world, request):
    """Results by name of the attempts of this test session; four run at a time."""
    tests = [item for item in request.session.items if item.name.startswith("test_attempt_fails_and_ends")]
    attempts = [item.callspec.params["attempt"] for item in tests]
    sandbox = BubblewrapSandbox()
    sandbox.check()

    def run(attempt):
        return sandbox.run(attempt.program.format(**world.names), "", LIMITS)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip([a.name for a in attempts], pool.map(run, attempts), strict=True))


_MARKED = [pytest.param(attempt, marks=pytest.mark.slow) if attempt.name in LONG else attempt for attempt in ATTEMPTS]


def test_attempts_are_numerous_and_distinct():
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 60
    assert len({attempt.program for attempt in ATTEMPTS}) == len(ATTEMPTS)
    assert {attempt.name for attempt in ATTEMPTS} > LONG


@pytest.mark.parametrize("attempt", _MARKED, ids=lambda attempt: attempt.name)
def test_attempt_fails_and_ends_in_time(attempt, results):
    result = results[attempt.name]
    assert "ESCAPED" not in result.stdout
    assert "SyntaxError" not in result.stderr
    assert SECRET not in result.stdout
    assert len(result.stdout) <= LIMITS.output_bytes
    assert len(result.stderr) <= LIMITS.output_bytes
    assert result.seconds <= SECONDS + 1


def test_attempts_do_not_change_the_machine(world, results):
    assert not world.visited()
    for file in (world.canary, world.scratch, world.doomed):
        assert file.read_text() == SECRET
    assert not [path for path in ("/escaped", "/usr/lib/escaped", "/dev/shm/escaped") if os.path.exists(path)]
    assert sorted(path.name for path in world.folder.iterdir()) == ["canary", "doomed", "scratch", "unix"]
    assert all_gone()


def test_search_for_processes_finds_a_running_one():
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(BubblewrapSandbox().run, "import time; time.sleep(99)", "", LIMITS)
        seen = False
        while not (seen or sleeper.done()):
            seen = bool(sandboxed())
            time.sleep(0.02)
        assert sleeper.result().timed_out
    assert seen
    assert all_gone()


CONTROLS = [attempt for attempt in ATTEMPTS if attempt.control != "never"]


@pytest.mark.parametrize("attempt", CONTROLS, ids=lambda attempt: attempt.name)
def test_attempt_succeeds_without_a_sandbox(attempt, tmp_path):
    if attempt.control == "root" and os.getuid() != 0:
        pytest.skip("only root gets through even without a sandbox")
    with ExitStack() as stack:
        world = World(stack)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", attempt.program.format(**world.names)],
            cwd=tmp_path, env={"CANARY": SECRET}, pass_fds=[world.descriptor],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert "ESCAPED" in done.stdout, done.stderr
