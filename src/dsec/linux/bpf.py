"""eBPF by libbpf: load an object file, its maps, its ring buffer, and programs on tc's clsact hook.

libbpf comes with iproute2 on every distribution that we know. Everything here raises OSError that says what
was being done; `available` says why not, where something is missing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

BPF_ANY: Final = 0
BPF_TC_INGRESS: Final = 1
BPF_TC_EGRESS: Final = 2
BPF_TC_F_REPLACE: Final = 1
EEXIST: Final = 17
ENOENT: Final = 2
PRIORITY: Final = 1
HANDLE: Final = 1

SampleFn = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)


class bpf_tc_hook(Structure):
    _fields_ = (
        ("sz", c_size_t),
        ("ifindex", c_int),
        ("attach_point", c_uint32),
        ("parent", c_uint32),
        ("pad", c_uint32),
    )


class bpf_tc_opts(Structure):
    _fields_ = (
        ("sz", c_size_t),
        ("prog_fd", c_int),
        ("flags", c_uint32),
        ("prog_id", c_uint32),
        ("handle", c_uint32),
        ("priority", c_uint32),
        ("pad", c_uint32),
    )


@cache
def _lib() -> ctypes.CDLL:
    """Raises OSError where there is no libbpf 1."""
    lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "libbpf_set_print": (c_void_p, (c_void_p,)),
        "bpf_object__open_file": (c_void_p, (c_char_p, c_void_p)),
        "bpf_object__load": (c_int, (c_void_p,)),
        "bpf_object__close": (None, (c_void_p,)),
        "bpf_object__find_map_fd_by_name": (c_int, (c_void_p, c_char_p)),
        "bpf_object__find_program_by_name": (c_void_p, (c_void_p, c_char_p)),
        "bpf_program__fd": (c_int, (c_void_p,)),
        "bpf_map_update_elem": (c_int, (c_int, c_char_p, c_char_p, c_uint64)),
        "bpf_map_lookup_elem": (c_int, (c_int, c_char_p, c_char_p)),
        "bpf_map_delete_elem": (c_int, (c_int, c_char_p)),
        "bpf_map_get_next_key": (c_int, (c_int, c_char_p, c_char_p)),
        "ring_buffer__new": (c_void_p, (c_int, SampleFn, c_void_p, c_void_p)),
        "ring_buffer__consume": (c_int, (c_void_p,)),
        "ring_buffer__epoll_fd": (c_int, (c_void_p,)),
        "ring_buffer__free": (None, (c_void_p,)),
        "bpf_tc_hook_create": (c_int, (POINTER(bpf_tc_hook),)),
        "bpf_tc_attach": (c_int, (POINTER(bpf_tc_hook), POINTER(bpf_tc_opts))),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.libbpf_set_print(None)  # its warnings go nowhere: what fails is raised
    return lib


def available() -> str:
    """Empty, or why programs cannot be loaded here."""
    try:
        _lib()
    except OSError as e:
        return f"libbpf is not there ({e}): install iproute2 or libbpf1"
    return "" if Path("/proc/sys/kernel/unprivileged_bpf_disabled").exists() else "the kernel has no eBPF"


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


class Map:
    """One map; keys and values are bytes of its sizes. The descriptor belongs to the object."""

    def __init__(self, fd: int, name: str, value_size: int) -> None:
        self.fd = fd
        self.name = name
        self._value_size = value_size

    def set(self, key: bytes, value: bytes) -> None:
        """Raises OSError E2BIG when it is full."""
        _check(_lib().bpf_map_update_elem(self.fd, key, value, BPF_ANY), f"map {self.name}")

    def get(self, key: bytes) -> bytes | None:
        out = ctypes.create_string_buffer(self._value_size)
        result = _lib().bpf_map_lookup_elem(self.fd, key, out)
        if result == -ENOENT:
            return None
        _check(result, f"map {self.name}")
        return out.raw

    def delete(self, key: bytes) -> bool:
        """Whether it was there."""
        result = _lib().bpf_map_delete_elem(self.fd, key)
        return result != -ENOENT and _check(result, f"map {self.name}") == 0

    def keys(self, size: int) -> Iterator[bytes]:
        """All keys of `size` bytes; what is deleted meanwhile may end it early."""
        key, following = None, ctypes.create_string_buffer(size)
        while _lib().bpf_map_get_next_key(self.fd, key, following) == 0:
            key = following.raw
            yield key


class Object:
    """A loaded object file. `close` once; attached programs stay attached."""

    def __init__(self, path: Path) -> None:
        lib = _lib()
        self._object = lib.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            e = ctypes.get_errno()
            raise OSError(e, f"open {path}: {os.strerror(e)}")
        try:
            _check(lib.bpf_object__load(self._object), f"load {path} into the kernel")
        except OSError:
            self.close()
            raise

    def map(self, name: str, value_size: int) -> Map:
        fd = _lib().bpf_object__find_map_fd_by_name(self._object, name.encode())
        return Map(_check(fd, f"find map {name}"), name, value_size)

    def program(self, name: str) -> int:
        """Its descriptor, which belongs to the object."""
        found = _lib().bpf_object__find_program_by_name(self._object, name.encode())
        if not found:
            raise OSError(ENOENT, f"no program {name}")
        return _check(_lib().bpf_program__fd(found), f"program {name}")

    def close(self) -> None:
        if self._object:
            _lib().bpf_object__close(self._object)
            self._object = None


class RingBuffer:
    """`fd` is readable when there is something; `consume` hands each record to `take`."""

    def __init__(self, ring: Map, take: Callable[[bytes], None]) -> None:
        def sample(_: int | None, data: int, size: int) -> int:
            take(ctypes.string_at(data, size))
            return 0

        self._keep = SampleFn(sample)
        self._ring = _lib().ring_buffer__new(ring.fd, self._keep, None, None)
        if not self._ring:
            e = ctypes.get_errno()
            raise OSError(e, f"ring buffer {ring.name}: {os.strerror(e)}")
        self.fd: int = _lib().ring_buffer__epoll_fd(self._ring)

    def consume(self) -> int:
        """How many there were."""
        return _check(_lib().ring_buffer__consume(self._ring), "ring buffer")

    def close(self) -> None:
        if self._ring:
            _lib().ring_buffer__free(self._ring)
            self._ring = None


def attach(ifindex: int, *, ingress: int, egress: int) -> None:
    """Both programs on an interface of this thread's network namespace, in place of what was there."""
    lib = _lib()
    hook = bpf_tc_hook(ctypes.sizeof(bpf_tc_hook), ifindex, BPF_TC_INGRESS | BPF_TC_EGRESS, 0, 0)
    result = lib.bpf_tc_hook_create(byref(hook))
    if result != -EEXIST:
        _check(result, f"clsact on interface {ifindex}")
    for point, program in ((BPF_TC_INGRESS, ingress), (BPF_TC_EGRESS, egress)):
        hook = bpf_tc_hook(ctypes.sizeof(bpf_tc_hook), ifindex, point, 0, 0)
        opts = bpf_tc_opts(ctypes.sizeof(bpf_tc_opts), program, BPF_TC_F_REPLACE, 0, HANDLE, PRIORITY, 0)
        _check(lib.bpf_tc_attach(byref(hook), byref(opts)), f"program on interface {ifindex}")
