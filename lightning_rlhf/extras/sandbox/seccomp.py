"""System call filter of a sandbox: denies calls that namespaces do not isolate.

Namespaces do not cover everything: the keys of the trainer's session are inherited, VM sockets reach the host of a
virtual machine, inotify shows when a shared library is opened, memory files and System V memory do not count towards
the limits of a process. The other denied calls are not used by ordinary programs and have exposed kernel bugs.
"""

from __future__ import annotations

import platform
import struct

# Name: number on x86_64, number on aarch64 (None: missing there). From the kernel's syscall tables, Linux 6.18.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # all sockets, except for pairs of Unix sockets below
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # keys, which are inherited from the trainer's session
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # observing shared files; a lock on one is a channel to other programs and can block them
    "flock": (73, 32),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # large and recent parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "modify_ldt": (154, None),
    # limited by a count for the whole machine
    "io_setup": (206, 0),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "syslog": (103, 116), "acct": (163, 89), "swapon": (167, 224),
    "swapoff": (168, 225), "quotactl": (179, 60), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58), "personality": (135, 92),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
}  # fmt: skip
# Calls that depend on one argument: number on x86_64, number on aarch64, index of the argument, its value, and whether
# the call is allowed (True) or denied (False) with this value only.
_NARROWED: dict[str, tuple[int, int, int, int, bool]] = {
    "socketpair": (53, 199, 0, 1, True),  # AF_UNIX; another family would load its protocol into the kernel
    "fcntl": (72, 25, 1, 1026, False),  # F_NOTIFY, the predecessor of inotify
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH_*
# classic BPF instructions
_LOAD = 0x20  # ld [k]
_EQUAL = 0x15  # jeq k
_AT_LEAST = 0x35  # jge k
_RETURN = 0x06  # ret k
# offsets in struct seccomp_data
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
# results of the filter
_ALLOW = 0x7FFF0000
_DENY = 0x00050001  # EPERM
_KILL = 0x80000000
_X32 = 0x40000000  # flag of x86_64's second system call table, which has other numbers


def filter_program() -> bytes:
    """Build the filter in the kernel's format: EPERM for denied calls; calls of another architecture kill the process.

    Raises:
        NotImplementedError: the table has no system calls for this machine.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise NotImplementedError(
            f"the sandbox's system call filter supports {', '.join(_MACHINES)}, not {machine}: use a RemoteSandbox"
        )
    column, architecture = _MACHINES[machine]
    denied = [number for numbers in _DENIED.values() if (number := numbers[column]) is not None]
    # (code, jump if true, jump if false, k); a jump is the number of instructions to skip
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for *numbers, argument, value, allowed in _NARROWED.values():
        program += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),  # lower half of the argument, the only part that these calls read
            (_EQUAL, 0, 1, value),
            (_RETURN, 0, 0, _ALLOW if allowed else _DENY),
            (_RETURN, 0, 0, _DENY if allowed else _ALLOW),
        ]
    program += [
        (_AT_LEAST, len(denied) + 1, 0, _X32),
        *((_EQUAL, len(denied) - i, 0, number) for i, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
