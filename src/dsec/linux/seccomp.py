"""The system call filter of a sandbox, as classic BPF: what Docker's default profile denies to its default
capabilities is denied here, and io_uring, which newer versions of it deny, too.

Source of the list: the profile `default.json` of moby, as of version 28. It names what is allowed; here the
denied are named, and a number above the newest that we know is answered with ENOSYS. The kernel's cache makes
calls that are always allowed free of cost (Linux 5.11).
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final

import msgspec

BPF_LD_W_ABS: Final = 0x20
BPF_JEQ: Final = 0x15
BPF_JGE: Final = 0x35
BPF_JSET: Final = 0x45
BPF_RET: Final = 0x06
SECCOMP_RET_ALLOW: Final = 0x7FFF0000
SECCOMP_RET_ERRNO: Final = 0x00050000
DATA_NR: Final = 0
DATA_ARCH: Final = 4
DATA_ARGS: Final = 16

CLONE_NEW_ANY: Final = 0x7E020000
AF_VSOCK: Final = 40
TIOCSTI: Final = 0x5412
TIOCLINUX: Final = 0x541C
XFS_IOC_SWAPEXT: Final = 0xC0C0586D
PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
NEWEST: Final = 466
"""The highest number that was judged."""

COMMON: Final = {  # asm-generic from 424 on
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
}


class Table(msgspec.Struct, frozen=True):
    """Numbers of one architecture."""

    audit_arch: int
    denied: dict[str, int]
    clone: int
    socket: int
    ioctl: int
    personality: int
    clone3: int = 435


X86_64: Final = Table(
    audit_arch=0xC000003E,
    clone=56,
    socket=41,
    ioctl=16,
    personality=135,
    denied=COMMON
    | {
        "uselib": 134,
        "ustat": 136,
        "sysfs": 139,
        "vhangup": 153,
        "pivot_root": 155,
        "_sysctl": 156,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "create_module": 174,
        "init_module": 175,
        "delete_module": 176,
        "get_kernel_syms": 177,
        "query_module": 178,
        "quotactl": 179,
        "nfsservctl": 180,
        "syslog": 103,
        "lookup_dcookie": 212,
        "clock_settime": 227,
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "migrate_pages": 256,
        "unshare": 272,
        "move_pages": 279,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
)

AARCH64: Final = Table(
    audit_arch=0xC00000B7,
    clone=220,
    socket=198,
    ioctl=29,
    personality=92,
    denied=COMMON
    | {
        "lookup_dcookie": 18,
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "nfsservctl": 42,
        "vhangup": 58,
        "quotactl": 60,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "reboot": 142,
        "sethostname": 161,
        "setdomainname": 162,
        "settimeofday": 170,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "mbind": 235,
        "get_mempolicy": 236,
        "set_mempolicy": 237,
        "migrate_pages": 238,
        "move_pages": 239,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
)

TABLES: Final = {"x86_64": X86_64, "aarch64": AARCH64}

Instruction = tuple[int, int, int, int]


def _errno(number: int) -> Instruction:
    return (BPF_RET, 0, 0, SECCOMP_RET_ERRNO | number)


def _load(offset: int) -> Instruction:
    return (BPF_LD_W_ABS, 0, 0, offset)


ALLOW: Final[Instruction] = (BPF_RET, 0, 0, SECCOMP_RET_ALLOW)
EPERM: Final = _errno(errno.EPERM)


def _only_for(number: int, body: list[Instruction]) -> list[Instruction]:
    """`body` if the call is this one, which must return; the number is in the accumulator."""
    return [(BPF_JEQ, 0, len(body), number), *body]


def _argument(index: int, *, high: bool = False) -> Instruction:
    return _load(DATA_ARGS + 8 * index + (4 if high else 0))


def _refuse_values(index: int, values: tuple[int, ...]) -> list[Instruction]:
    body = [_argument(index)]
    for value in values:
        body += [(BPF_JEQ, 0, 1, value), EPERM]
    return [*body, ALLOW]


def program(machine: str | None = None) -> bytes:
    """struct sock_filter[] for this machine. Raises KeyError for an architecture with no table."""
    t = TABLES[machine or platform.machine()]
    code: list[Instruction] = [
        _load(DATA_ARCH),
        (BPF_JEQ, 1, 0, t.audit_arch),
        _errno(errno.ENOSYS),  # other calling conventions (i386) have other numbers
        _load(DATA_NR),
        (BPF_JGE, 0, 1, NEWEST + 1),  # newer than judged, and x32
        _errno(errno.ENOSYS),
    ]
    code += _only_for(t.clone3, [_errno(errno.ENOSYS)])  # its flags lie in memory: libc falls back to clone
    code += _only_for(t.clone, [_argument(0), (BPF_JSET, 0, 1, CLONE_NEW_ANY), EPERM, ALLOW])
    code += _only_for(t.socket, _refuse_values(0, (AF_VSOCK,)))
    code += _only_for(t.ioctl, _refuse_values(1, (TIOCSTI, TIOCLINUX, XFS_IOC_SWAPEXT)))
    allowed = [_argument(0)]
    for value in PERSONALITIES:
        allowed += [(BPF_JEQ, 0, 1, value), ALLOW]
    code += _only_for(t.personality, [*allowed, EPERM])
    for number in sorted(t.denied.values()):
        code += _only_for(number, [EPERM])
    code.append(ALLOW)
    return b"".join(struct.pack("<HBBI", *i) for i in code)
