"""The bubblewrap sandbox: checks at the start, limits, faults, and the system call filter."""

import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_rlhf.extras.sandbox import bubblewrap
from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox, probe
from lightning_rlhf.extras.sandbox.protocol import Limits, Sandbox, SandboxFault, SandboxUnavailable
from lightning_rlhf.extras.sandbox.remote import RemoteSandbox
from lightning_rlhf.extras.sandbox.seccomp import _DENIED, _NARROWED, filter_program

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
LIMITS = Limits(seconds=10.0)
ALLOW_ALL = bytes.fromhex("06000000 0000ff7f")


@pytest.fixture
def public():
    """A folder that all users can read, including user 65534."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_both_sandboxes_implement_the_protocol():
    assert isinstance(BubblewrapSandbox(), Sandbox)
    assert isinstance(RemoteSandbox("http://127.0.0.1:1"), Sandbox)


@needs_bwrap
def test_probe_describes_the_sandbox():
    ((name, finding, fault),) = probe()
    assert (name, fault) == ("bubblewrap", "")
    assert finding.startswith("works, Python 3.")


def test_probe_does_not_import_torch():
    code = "import sys; import lightning_rlhf.extras.sandbox.bubblewrap; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_missing_bubblewrap_fails_the_check_and_not_the_probe(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe() == [("bubblewrap", "not installed; code rewards need it or a RemoteSandbox", "")]
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed: install bubblewrap"):
        BubblewrapSandbox().run("print(1)", "", LIMITS)


@needs_bwrap  # its interpreter has to be there
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1",
            "AppArmor blocks user namespaces: set",
        ),
        (
            "echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1",
            "namespaces are disabled",
        ),
        ("echo 'bwrap: Unknown option --disable-userns' >&2; exit 1", "install bubblewrap 0.8 or newer"),
        ("echo 'could not be started as an unprivileged user' >&2; exit 1", "map the user ids up to 65534"),
        ("echo 'bwrap: what?' >&2; exit 1", "(bwrap: what?): use a RemoteSandbox"),
        ("exit 3", "exited with 3 and no message"),
        ("exit 0", "exited with 0 and no message"),
        ('echo \'{"limits": {}, "uid": 1}\'; exit 0', "and no message"),
    ],
)
def test_bubblewrap_error_comes_with_its_remedy(monkeypatch, public, script, message):
    fake = public / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: str(fake))
    with pytest.raises(SandboxUnavailable) as raised:
        BubblewrapSandbox().check()
    assert message in str(raised.value)
    assert probe() == [("bubblewrap", "does not work", str(raised.value))]
    with pytest.raises(SandboxFault):
        BubblewrapSandbox().run("print(1)", "", LIMITS)


@needs_bwrap
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("filter_program", lambda: ALLOW_ALL),
        ("_BOOTSTRAP", bubblewrap._BOOTSTRAP.replace(b"resource.setrlimit(", b"str((")),
        ("_LIBRARIES", (*bubblewrap._LIBRARIES, "/proc")),
    ],
)
def test_sandbox_that_does_not_isolate_raises_an_error(monkeypatch, name, value):
    if name == "_BOOTSTRAP":
        value = value.replace(b"(_value, _value))", b"(_value, _value)))")
    monkeypatch.setattr(bubblewrap, name, value)
    with pytest.raises(SandboxUnavailable, match="starts but does not isolate"):
        BubblewrapSandbox().check()


def test_unknown_architecture_raises_an_error(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(NotImplementedError, match="supports x86_64, aarch64, not riscv64: use a RemoteSandbox"):
        filter_program()


def verdict(program, number, architecture, *arguments):
    """Evaluate a filter for a call with its four instructions, as the kernel does."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    index = accumulator = 0
    while True:
        code, true, false, k = struct.unpack_from("=HBBI", program, 8 * index)
        index += 1
        if code == 0x06:
            return {0x7FFF0000: "allow", 0x00050001: "EPERM", 0x80000000: "kill"}[k]
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        else:
            index += true if {0x15: accumulator == k, 0x35: accumulator >= k}[code] else false


def test_recent_mount_calls_and_file_locks_are_denied():
    young = {"open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458), "flock": (73, 32)}
    assert young.items() <= _DENIED.items()


@pytest.mark.parametrize(("machine", "column", "architecture"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)])
def test_filter_denies_exactly_the_listed_calls(monkeypatch, machine, column, architecture):
    monkeypatch.setattr("platform.machine", lambda: machine)
    program = filter_program()
    denied = {numbers[column] for numbers in _DENIED.values()} - {None}
    pair, fcntl = (_NARROWED[name][column] for name in ("socketpair", "fcntl"))
    for number in set(range(600)) - {pair, fcntl}:
        assert verdict(program, number, architecture) == ("EPERM" if number in denied else "allow")
        assert verdict(program, number, 0x40000003) == "kill"
        assert verdict(program, 0x40000000 + number, architecture) == "EPERM"
    upper = 1 << 32  # which the kernel cuts off
    assert [verdict(program, pair, architecture, n) for n in (1, upper + 1, 0, 30, upper + 30)] == ["allow"] * 2 + [
        "EPERM"
    ] * 3
    assert [verdict(program, fcntl, architecture, 0, n) for n in (1, 3, 1026, upper + 1026)] == ["allow"] * 2 + [
        "EPERM"
    ] * 2


@needs_bwrap
@pytest.mark.parametrize(
    ("source", "stdin", "stdout", "exit_code"),
    [
        ("print(input())", "ä ☃", "ä ☃\n", 0),
        ("import sys; print(len(sys.stdin.read()))", "x" * 10**6, "1000000\n", 0),
        ("print(1)", "x" * 10**6, "1\n", 0),  # which it does not read
        ("exit(3)", "", "", 3),
        ("import os; os.kill(os.getpid(), 9)", "", "", 137),
        ("import sys; print(sys.argv, __name__, sys.flags.isolated)", "", "['/program.py'] __main__ 1\n", 0),
        ("import os; print(sorted(os.environ), os.getcwd())", "", "['LC_CTYPE', 'PWD'] /tmp\n", 0),
        ("open('a', 'w').write('x'); print(open('/tmp/a').read())", "", "x\n", 0),
        ("import numpy", "", "", 1),
        ("import asyncio; asyncio.run(asyncio.sleep(0)); print(1)", "", "1\n", 0),
        ("import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()", "", "1\n", 0),
        ("import subprocess, sys; print(subprocess.run([sys.executable, '-c', '1']).returncode)", "", "0\n", 0),
        ("import os; os.write(1, b'a\\xff')", "", "a\ufffd", 0),
    ],
)  # fmt: skip
def test_harmless_program_runs(source, stdin, stdout, exit_code):
    result = BubblewrapSandbox().run(source, stdin, LIMITS)
    assert (result.stdout, result.exit_code) == (stdout, exit_code), result.stderr
    assert not result.timed_out
    assert not result.truncated


@needs_bwrap
def test_packages_can_be_imported(public):
    (public / "helpful.py").write_text("value = 7")
    assert (
        BubblewrapSandbox(packages=str(public)).run("import helpful; print(helpful.value)", "", LIMITS).stdout == "7\n"
    )


@needs_bwrap
def test_unreadable_interpreter_raises_an_error():
    with pytest.raises(
        SandboxUnavailable, match="no Python found for the sandbox: /nowhere/python must exist and be readable"
    ):
        BubblewrapSandbox(python="/nowhere/python").check()


@needs_bwrap
def test_simultaneous_sandboxes_have_separate_process_limits():
    six = "import os, time\nfor _ in range(6):\n    os.fork() or (time.sleep(2), os._exit(0))\ntime.sleep(1)\nprint(6)"
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda _: BubblewrapSandbox(concurrency=4).run(six, "", LIMITS), range(4)))
    assert [one.stdout for one in result] == ["6\n"] * 4


def test_concurrency_limits_simultaneous_programs(monkeypatch):
    now, most, lock = 0, 0, threading.Lock()

    def run(self, source, stdin, limits):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    monkeypatch.setattr(BubblewrapSandbox, "_run", run)
    sandbox = BubblewrapSandbox(concurrency=3)
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(lambda _: sandbox.run("", "", LIMITS), range(27)))
    assert most == 3


@needs_bwrap
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_sandbox_dies_with_the_trainer(end):
    seconds = 12345.0 + os.getpid() + 0.5 * end  # stands on the sandbox's command line, as RLIMIT_CPU
    code = (  # a shell that runs the tests in the background lets them ignore SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lightning_rlhf.extras.sandbox.protocol import Limits\n"
        "import lightning_rlhf.extras.sandbox.bubblewrap as b\n"
        f"b.BubblewrapSandbox().run('import time; time.sleep(99)', '', Limits(seconds={seconds}))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    sign = f'"RLIMIT_CPU": {math.ceil(seconds) + 1}'
    assert becomes(lambda: alive(sign))
    trainer.send_signal(end)
    trainer.wait()
    assert becomes(lambda: not alive(sign))


@pytest.mark.slow
@needs_bwrap
def test_timeout_during_startup_leaves_no_process(monkeypatch):
    """The kill happens during bubblewrap's setup, before its first child is tied to it."""
    monkeypatch.setattr(Limits, "__post_init__", lambda limits: None)
    memory = 2**29 + os.getpid()  # stands on the sandbox's command line
    for moment in range(40):
        limits = Limits(seconds=0.0005 * moment, memory_bytes=memory)
        assert BubblewrapSandbox().run("import time; time.sleep(99)", "", limits).timed_out
    assert becomes(lambda: not alive(str(memory)), seconds=5.0)


@needs_bwrap
def test_program_does_not_start_after_the_trainer_was_killed(monkeypatch):
    pipe = bubblewrap._pipe

    def dead():
        reads, writes = pipe()
        if not made:
            writes.close()
            writes = open(os.devnull, "wb")  # noqa: SIM115 (closed by whom it is given to)
        made.append(reads)
        return reads, writes

    made = []
    monkeypatch.setattr(bubblewrap, "_pipe", dead)
    result = BubblewrapSandbox().run("print(1)", "", LIMITS)
    assert (result.stdout, result.exit_code) == ("", 1)


def alive(sign):
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if sign in file.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            pass
    return False


def becomes(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@needs_bwrap
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_sandbox_works_for_unprivileged_users(public):
    shutil.copytree(Path(bubblewrap.__file__).parent, public / "lightning_rlhf/extras/sandbox")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lightning_rlhf.extras.sandbox.bubblewrap import probe; print(probe())"
    )
    command = ["/usr/bin/python3", "-c", code, str(public)]
    done = subprocess.run(command, user=1000, group=1000, extra_groups=[], capture_output=True, text=True, check=False)
    assert "'works, Python" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0.0}, "limits.seconds must be at least 0.1, got 0.0"),
        ({"seconds": float("nan")}, "limits.seconds must be at least 0.1, got nan"),
        ({"memory_bytes": 1}, "limits.memory_bytes must be at least 67108864, got 1"),
        ({"processes": 0}, "limits.processes must be at least 1, got 0"),
    ],
)
def test_limits_below_their_minimum_raise_an_error(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_concurrency_of_zero_raises_an_error():
    with pytest.raises(ValueError, match="concurrency must be at least 1, or null for one per processor, got 0"):
        BubblewrapSandbox(concurrency=0)
