# ruff: noqa: E501 -- a table of programs reads better with one on a line
"""Attempts of hostile programs. Each prints ESCAPED if it succeeds; names in braces are filled in by the test.

``control`` is the user for whom the attempt succeeds without a sandbox and without damage, which shows that the attempt
is effective. ``never`` marks attempts that would damage the machine, or whose success cannot be detected by printing.
"""

from dataclasses import dataclass
from typing import Literal

_LIBC = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):  # c_long fills the whole register; a plain int may not
    return libc.syscall(*(ctypes.c_long(given) if isinstance(given, int) else given for given in arguments))
def escaped(yes=True):
    if yes:
        print("ESCAPED", flush=True)
"""


@dataclass(frozen=True)
class Attempt:
    name: str
    program: str
    control: Literal["anyone", "root", "never"]


def _files():
    yield "read a file", "anyone", "print(open('{canary}').read()); escaped()"
    yield "append to a file", "anyone", "open('{scratch}', 'a').write('x'); escaped()"
    yield "delete a file", "anyone", "os.unlink('{doomed}'); escaped()"
    yield (
        "read a file through a symbolic link",
        "anyone",
        "os.symlink('{canary}', 'a'); print(open('a').read()); escaped()",
    )
    yield "read a file through many dots", "anyone", "open('/tmp/' + '../' * 20 + '{canary}'); escaped()"
    yield "hard link a file", "anyone", "os.link('{canary}', '{folder}/hard'); escaped()"
    yield "read the users", "anyone", "open('/etc/passwd'); escaped()"
    yield "read the password hashes", "root", "open('/etc/shadow'); escaped()"
    yield "list the home folder", "root", "os.listdir('/root'); escaped()"
    yield (
        "see the machine's root folder",
        "anyone",
        "escaped(set(os.listdir('/')) & {{'etc', 'home', 'var', 'root', 'sys'}})",
    )
    yield "find a shell", "anyone", "escaped(os.path.exists('/bin/sh') or os.path.exists('/usr/bin/sh'))"
    yield "run another program", "anyone", "os.execv('/bin/echo', ['echo', 'ESCAPED'])"
    yield (
        "import the machine's packages",
        "never",
        "sys.path += ['/usr/lib/python3/dist-packages', '{site}']\nimport numpy; escaped()",
    )
    yield "read the trainer's packages", "anyone", "escaped(os.listdir('{site}'))"
    yield (
        "lock a library that other programs read",
        "anyone",
        "import fcntl; file = open('/usr/lib/os-release' if os.path.exists('/usr/lib/os-release') else ctypes.__file__)\n"
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); escaped()",
    )
    yield "write into the root folder", "never", "open('/escaped', 'w'); escaped()"
    yield "write among the libraries", "never", "open('/usr/lib/escaped', 'w'); escaped()"
    yield "write over the program", "never", "os.chmod('/program.py', 0o777); open('/program.py', 'w'); escaped()"
    yield "write over what starts it", "never", "open('/start.py', 'w'); escaped()"
    yield "replace what starts it", "never", "os.rename('/program.py', '/start.py'); escaped()"
    yield "change the mode of a device", "never", "os.chmod('/dev/null', 0o666); escaped()"
    yield "write among the devices", "anyone", "open('/dev/shm/escaped', 'w'); os.unlink('/dev/shm/escaped'); escaped()"
    yield "find another device", "anyone", "escaped(set(os.listdir('/dev')) - {{'null', 'zero', 'urandom'}})"
    yield "open the terminal's multiplexer", "anyone", "os.openpty(); escaped()"
    yield "open the controlling terminal", "never", "os.open('/dev/tty', os.O_RDWR); escaped()"
    yield "open the memory device", "never", "open('/dev/mem', 'rb'); escaped()"
    yield "make a device", "root", "os.mknod('n', 0o20666, os.makedev(1, 3)); escaped()"
    yield "list the files of the kernel", "anyone", "escaped(os.listdir('/sys'))"
    yield "join a control group", "never", "open('/sys/fs/cgroup/cgroup.procs', 'w').write('1'); escaped()"


def _processes():
    yield "read its own process files", "anyone", "open('/proc/self/maps'); escaped()"
    yield "read the trainer's environment", "anyone", "print(open('/proc/{pid}/environ').read()); escaped()"
    yield "read the trainer's memory", "root", "open('/proc/{pid}/mem', 'rb'); escaped()"
    yield "reach files through another's root", "anyone", "open('/proc/{pid}/root{canary}'); escaped()"
    yield "reach files through its own root", "anyone", "open('/proc/self/root{canary}'); escaped()"
    yield "write a setting of the kernel", "never", "open('/proc/sys/kernel/core_pattern', 'w').write('|/x'); escaped()"
    yield "ask the kernel for a crash", "never", "open('/proc/sysrq-trigger', 'w').write('c'); escaped()"
    yield "read a secret from the environment", "anyone", "escaped('{secret}' in str(os.environ))"
    yield "read the machine's name", "anyone", "escaped(os.uname().nodename == '{host}')"
    yield (
        "find an open file of the trainer's",
        "anyone",
        """
for descriptor in range(3, 1024):
    try:
        os.fstat(descriptor)
    except OSError:
        continue
    escaped()
""",
    )
    yield "read an open file of the trainer's", "anyone", "print(os.pread({descriptor}, 99, 0)); escaped()"
    yield "signal the trainer", "anyone", "os.kill({pid}, 0); escaped()"
    yield "open the trainer as a process", "anyone", "os.pidfd_open({pid}); escaped()"
    yield "see a parent", "anyone", "escaped(os.getppid() > 1)"
    yield "kill everything", "never", "os.kill(-1, 9); os.kill(1, 9); import time; time.sleep(0.1); os.kill(1, 9)"
    yield "trace its parent", "never", "escaped(call({ptrace}, 16, os.getppid(), 0, 0) == 0)"
    yield (
        "trace a child",
        "anyone",
        """
child = os.fork()
if child == 0:
    import time; time.sleep(1); os._exit(0)
escaped(call({ptrace}, 0x4206, child, 0, 0) == 0)
os.kill(child, 9)
""",
    )
    yield (
        "read another process's memory",
        "anyone",
        """
text = ctypes.create_string_buffer(b"x" * 16)
iovec = struct.pack("PN", ctypes.addressof(text), 16)
escaped(call({process_vm_readv}, os.getpid(), iovec, 1, iovec, 1, 0) == 16)
""",
    )
    yield "become root", "never", "os.setuid(0); escaped()"
    yield "join the group root", "root", "os.setgroups([0]); escaped()"
    yield (
        "raise a limit",
        "never",
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**5, 10**5)); escaped()",
    )
    yield "raise its priority", "root", "os.nice(-5); escaped()"
    yield "run in real time", "root", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped()"
    yield (
        "set the set-user-id bit and use it",
        "never",
        """
import shutil
shutil.copy(sys.executable, "a"); os.chmod("a", 0o4755); os.execv("./a", ["a", "-c", "import os; os.setuid(0); print('ESCAPED')"])
""",
    )


def _network():
    yield (
        "TCP to the machine",
        "anyone",
        "import socket; socket.create_connection(('127.0.0.1', {tcp}), 1).send(b'got out'); escaped()",
    )
    yield (
        "UDP to the machine",
        "anyone",
        "import socket; socket.socket(2, 2).sendto(b'got out', ('127.0.0.1', {udp})); escaped()",
    )
    yield "TCP to the internet", "never", "import socket; socket.create_connection(('1.1.1.1', 53), 1); escaped()"
    yield "ask for a name", "never", "import socket; print(socket.getaddrinfo('example.org', 80)); escaped()"
    yield (
        "a Unix socket in a folder",
        "anyone",
        "import socket; s = socket.socket(1); s.connect('{unix}'); s.send(b'got out'); escaped()",
    )
    yield (
        "an abstract Unix socket",
        "anyone",
        "import socket; s = socket.socket(1); s.connect(chr(0) + '{abstract}'); s.send(b'got out'); escaped()",
    )
    yield "listen", "anyone", "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()"
    yield "a raw socket", "root", "import socket; socket.socket(2, 3, 1); escaped()"
    yield "a packet socket", "root", "import socket; socket.socket(17, 3, 0); escaped()"
    yield "a netlink socket", "anyone", "import socket; socket.socket(16, 3, 0); escaped()"
    yield "a socket to the hypervisor", "never", "import socket; socket.socket(40, 1, 0); escaped()"
    yield "a socket to the kernel's ciphers", "never", "import socket; socket.socket(38, 5, 0); escaped()"


def _kernel():
    yield (
        "read the keys of the session",
        "anyone",
        """
text = ctypes.create_string_buffer(4096)
key = call({keyctl}, 10, -3, b"user", b"{key}", 0)
escaped(key > 0 and call({keyctl}, 11, key, text, 4096) > 0)
""",
    )
    yield "add a key", "anyone", "escaped(call({add_key}, b'user', b'mine', b'x', 1, -2) > 0)"
    yield "ask for a key", "anyone", "escaped(call({request_key}, b'user', b'{key}', 0, 0) > 0)"
    yield (
        "load a program into the kernel",
        "root",
        """
attributes = struct.pack("IIIIIIII", 2, 4, 4, 1, 0, 0, 0, 0)  # a map: an array of one number
escaped(call({bpf}, 0, attributes + bytes(96), 128) > 0)
""",
    )
    yield (
        "count the machine's events",
        "never",
        "escaped(call({perf_event_open}, struct.pack('IIQ', 1, 128, 0) + bytes(112), 0, -1, -1, 0) > 0)",
    )
    yield "a ring of system calls", "never", "escaped(call({io_uring_setup}, 1, bytes(120)) > 0)"
    yield "handle its own page faults", "anyone", "escaped(call({userfaultfd}, 1) > 0)"
    yield "use up the machine's asynchronous reads", "anyone", "escaped(call({io_setup}, 1, struct.pack('P', 0)) == 0)"
    yield "watch a folder as inotify did before", "anyone", "escaped(libc.fcntl(os.open('/usr/lib', 0), 1026, 1) == 0)"
    yield (
        "load another family's sockets",
        "anyone",
        "libc.socketpair(30, 1, 0, bytes(8)); escaped(ctypes.get_errno() != 1)",
    )
    yield (
        "load the hypervisor's sockets",
        "anyone",
        "libc.socketpair(40, 1, 0, bytes(8)); escaped(ctypes.get_errno() != 1)",
    )
    yield "a user namespace", "anyone", "escaped(libc.unshare(0x10000000) == 0)"
    yield "a child in a user namespace", "never", "escaped(call(56, 0x10000011, 0, 0, 0, 0) > 0)"
    yield "a mount namespace", "root", "escaped(libc.unshare(0x20000) == 0)"
    yield "a network namespace", "root", "escaped(libc.unshare(0x40000000) == 0)"
    yield "enter a namespace", "never", "escaped(libc.setns(os.pidfd_open(1), 0x20000) == 0)"
    yield "mount a file system", "never", "escaped(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)"
    yield "bind a folder", "never", "escaped(libc.mount(b'/usr', b'/tmp', None, 4096, None) == 0)"
    yield "make the root writable", "never", "escaped(libc.mount(None, b'/', None, 32 | 4096, None) == 0)"
    yield "unmount what covers the packages", "never", "escaped(libc.umount2(b'/tmp', 2) == 0)"
    yield "change the root", "root", "os.chroot('/'); escaped()"
    yield "mount by the new calls", "root", "escaped(call({fsopen}, b'tmpfs', 0) > 0)"
    yield "open a tree", "root", "escaped(call({open_tree}, -100, b'/', 1) > 0)"
    yield (
        "a handle of a file",
        "anyone",
        "escaped(call({name_to_handle_at}, -100, b'/usr/lib', struct.pack('Ii', 128, 0) + bytes(128), bytes(4), 0) == 0)",
    )
    yield "watch who opens a library", "anyone", "escaped(libc.inotify_init1(0) >= 0)"
    yield "watch a file system", "root", "escaped(libc.fanotify_init(0, 0) >= 0)"
    yield "memory without a process", "anyone", "os.memfd_create('x'); escaped()"
    yield "shared memory of the machine", "anyone", "escaped(libc.shmget({shared}, 0, 0) >= 0)"
    yield "private shared memory", "anyone", "escaped(libc.shmget(0, 4096, 0o1600) >= 0)"
    yield "a message queue", "anyone", "escaped(libc.msgget(0, 0o1600) >= 0)"
    yield "read the kernel's log", "root", "escaped(call({syslog}, 3, bytes(4096), 4096) > 0)"
    yield "rename the machine", "never", "escaped(libc.sethostname(b'mine', 4) == 0)"
    yield "set the clock", "never", "escaped(libc.settimeofday(struct.pack('qq', 0, 0), None) == 0)"
    yield "load a module", "never", "escaped(call({init_module}, b'', 0, b'') == 0)"
    yield "restart the machine", "never", "escaped(call({reboot}, 0xfee1dead, 672274793, 0, 0) == 0)"
    yield "change how addresses are drawn", "anyone", "escaped(libc.personality(0x40000) >= 0)"
    yield "move memory", "anyone", "escaped(call({set_mempolicy}, 0, None, 0) == 0)"
    yield "the other table of calls", "never", "escaped(call(0x40000000 + 39) > 0)"
    yield "type into the terminal", "never", "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); escaped()"


def _bombs():
    yield (
        "fork without end",
        "never",
        """
import time
children = 0
try:
    while children < 200:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    pass
escaped(children > 20)
""",
    )
    yield "fork exponentially", "never", "while True:\n    try: os.fork()\n    except OSError: pass"
    yield (
        "threads without end",
        "never",
        """
import threading, time
threading.stack_size(32768)
try:
    for count in range(200):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    escaped()
finally:
    os._exit(0)
""",
    )
    yield "two gigabytes at once", "never", "bytearray(2 * 2**30); escaped()"
    yield "two gigabytes bit by bit", "never", "kept = [bytearray(2**20) for _ in range(2048)]; escaped()"
    yield (
        "two gigabytes of mapped memory",
        "never",
        "import mmap; kept = [mmap.mmap(-1, 2**27) for _ in range(16)]; escaped()",
    )
    yield (
        "fill the disk",
        "never",
        """
for number in range(64):
    with open(str(number), "wb") as file:
        file.write(bytes(2**20))
escaped()
""",
    )
    yield (
        "one huge file",
        "never",
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('x', 'wb').truncate(2**30); escaped()",
    )
    yield "a terabyte with holes", "never", "f = open('x', 'wb'); f.seek(2**40); f.write(b'x'); f.flush(); escaped()"
    yield "open files without end", "never", "kept = [os.dup(0) for _ in range(500)]; escaped()"
    yield "a core file", "never", "os.abort()"
    yield "write without end", "never", "while True: print('x' * 1000)"
    yield "write to stderr without end", "never", "while True: print('x' * 1000, file=sys.stderr)"
    yield "write in children without end", "never", "os.fork(); os.fork()\nwhile True: os.write(1, b'x' * 4096)"
    yield "compute for ever", "never", "while True: pass"
    yield "compute in C for ever", "never", "import re; re.match('(a+)+b', 'a' * 60)"
    yield "compute for ever in children", "never", "os.fork(); os.fork()\nwhile True: pass"
    yield "recurse in Python", "never", "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()"
    yield "overflow the stack", "never", "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)"
    yield "jump to nowhere", "never", "ctypes.string_at(0)"


def _sleepers():
    yield "sleep for ever", "never", "import time\nwhile True: time.sleep(99)"
    yield (
        "sleep and ignore every signal",
        "never",
        """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(99)
""",
    )
    yield "close everything and sleep", "never", "import time; os.closerange(0, 99); time.sleep(99)"
    yield "wait for more input", "never", "import time\nsys.stdin.read()\nwhile True: time.sleep(1)"
    yield "stop its parent", "never", "import time; os.kill(os.getppid(), 19); time.sleep(99)"
    yield "stop itself", "never", "os.kill(os.getpid(), 19)"
    yield (
        "a daemon that outlives it",
        "never",
        """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 99)
        time.sleep(600)
    os._exit(0)
""",
    )
    yield (
        "a daemon that holds its output open",
        "never",
        "import time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)",
    )
    yield (
        "a daemon that is born late",
        "never",
        "import time\nif os.fork() == 0:\n    while True:\n        os.fork() and os._exit(0)\n        time.sleep(0.05)",
    )
    yield "leave zombie processes", "never", "for _ in range(500):\n    if os.fork() == 0: os._exit(0)"
    yield (
        "adopt its descendants",
        "never",
        "libc.prctl(36, 1, 0, 0, 0); libc.prctl(1, 0, 0, 0, 0)\nimport time; os.fork(); time.sleep(600)",
    )


ATTEMPTS = [
    Attempt(name, _LIBC + program, control)
    for group in (_files, _processes, _network, _kernel, _bombs, _sleepers)
    for name, control, program in group()
]
