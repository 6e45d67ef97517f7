"""The filter, run by a small interpreter of classic BPF: no kernel, no root, every architecture."""

from __future__ import annotations

import errno
import struct

import pytest

from dsec.linux import seccomp
from dsec.linux.seccomp import AARCH64, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, X86_64, Table

MACHINES = [("x86_64", X86_64), ("aarch64", AARCH64)]
I386 = 0x40000003
X32 = 0x40000000


def run(machine: str, arch: int, number: int, *args: int) -> int:
    """What the filter answers. Every jump must stay inside of it."""
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    data = struct.pack(
        "<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6]
    )
    accumulator = at = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp.BPF_LD_W_ABS:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == seccomp.BPF_JEQ:
            at += yes if accumulator == k else no
        elif op == seccomp.BPF_JGE:
            at += yes if accumulator >= k else no
        elif op == seccomp.BPF_JSET:
            at += yes if accumulator & k else no
        elif op == seccomp.BPF_RET:
            return k
        else:
            raise AssertionError(f"instruction {op:#x}")


def refused(number: int) -> int:
    return SECCOMP_RET_ERRNO | number


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_denied_by_name(machine: str, t: Table) -> None:
    for name, number in t.denied.items():
        assert run(machine, t.audit_arch, number) == refused(errno.EPERM), name


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_what_must_be_denied_is_in_the_table(machine: str, t: Table) -> None:
    names = (
        "bpf perf_event_open userfaultfd keyctl add_key request_key kexec_load init_module finit_module mount"
    )
    names += " umount2 pivot_root setns unshare open_by_handle_at io_uring_setup io_uring_enter reboot swapon"
    assert set(names.split()) <= set(t.denied)


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_ordinary_calls_are_allowed(machine: str, t: Table) -> None:
    special = {t.clone, t.clone3, t.socket, t.ioctl, t.personality, *t.denied.values()}
    for number in range(seccomp.NEWEST + 1):
        if number not in special:
            assert run(machine, t.audit_arch, number) == SECCOMP_RET_ALLOW, number


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_namespaces_cannot_be_made(machine: str, t: Table) -> None:
    assert run(machine, t.audit_arch, t.clone3) == refused(errno.ENOSYS)
    assert run(machine, t.audit_arch, t.clone, 0x01200011) == SECCOMP_RET_ALLOW  # fork
    assert run(machine, t.audit_arch, t.clone, 0x3D0F00) == SECCOMP_RET_ALLOW  # pthread_create
    for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):
        assert run(machine, t.audit_arch, t.clone, flag | 17) == refused(errno.EPERM), hex(flag)


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_arguments(machine: str, t: Table) -> None:
    for request in (0x5412, 0x541C, 0xC0C0586D):
        assert run(machine, t.audit_arch, t.ioctl, 0, request) == refused(errno.EPERM)
        assert run(machine, t.audit_arch, t.ioctl, 0, request | 0xABCD << 32) == refused(errno.EPERM), (
            "high bits"
        )
    assert run(machine, t.audit_arch, t.ioctl, 0, 0x5413) == SECCOMP_RET_ALLOW
    assert run(machine, t.audit_arch, t.socket, 40) == refused(errno.EPERM)
    assert run(machine, t.audit_arch, t.socket, 2) == SECCOMP_RET_ALLOW
    assert run(machine, t.audit_arch, t.personality, 0xFFFFFFFF) == SECCOMP_RET_ALLOW
    assert run(machine, t.audit_arch, t.personality, 0x0040000) == refused(errno.EPERM)


@pytest.mark.parametrize(("machine", "t"), MACHINES)
def test_other_conventions_and_newer_calls(machine: str, t: Table) -> None:
    assert run(machine, I386, 11) == refused(errno.ENOSYS)
    assert run(machine, t.audit_arch, X32 | 1) == refused(errno.ENOSYS)
    assert run(machine, t.audit_arch, seccomp.NEWEST + 1) == refused(errno.ENOSYS)
    assert run(machine, t.audit_arch, 0xFFFFFFFF) == refused(errno.ENOSYS)


def test_length() -> None:
    for machine, _ in MACHINES:
        assert len(seccomp.program(machine)) // 8 <= 4096  # BPF_MAXINSNS
