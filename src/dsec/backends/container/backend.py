"""Container sandboxes. All kernel work of one launch runs in one thread, from beginning to end, in order."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dsec.backends.base import Exit, Fingerprint, Handle, LaunchSpec, Seen, Stats, WritableSnapshot
from dsec.backends.container import policy
from dsec.backends.container.dev import make_dev, remove_dev
from dsec.backends.container.ids import id_map, owner_of, root_of
from dsec.backends.container.launcher import Launcher, agent_binary, sealed_copy
from dsec.backends.container.layers import LayerMounts, clone
from dsec.backends.container.networks import INDEX, Networks
from dsec.backends.container.overlay import ByDescriptor, Overlay, Staged
from dsec.backends.container.pack import Packer
from dsec.backends.container.pool import Pool
from dsec.backends.container.process import (
    NAMED,
    aether_name,
    boot_id,
    end,
    name_and_parent,
    open_pidfd,
    start_time,
)
from dsec.backends.container.ready import READY_LIMIT_S, await_hello
from dsec.backends.container.stages import Stages
from dsec.core.errors import DiskFull, DSecError, LaunchFailed, SandboxFailed, Unavailable, Unsupported
from dsec.core.images import LayerRef
from dsec.core.network import Policy
from dsec.core.specs import SandboxSpec
from dsec.layers.metadata_cache import MetadataCache
from dsec.layers.warmth import Warmth
from dsec.linux.cgroup import Group, Limits, detect
from dsec.linux.probe import erofs_file_mount, overlay_by_fd
from dsec.linux.syscalls import (
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    mount_setattr,
)
from dsec.network.service import NetworkConfig
from dsec.wire.aether import HEADER, Type

log = logging.getLogger(__name__)
T = TypeVar("T")
THREADS: Final = 16
PACKS_AT_ONCE: Final = 4
"""Of the threads; the others stay for launches."""
END_LIMIT_S: Final = 20.0
BACKLOG: Final = 4
HOSTNAME: Final = "hostname"
LAYERS: Final = "layers"
"""In a handle: digests of what its sandbox stands on, with commas between."""


class ContainerBackend:
    """`mount_path`: auto, fd or staged (see overlay.py)."""

    name = "container"
    capabilities: frozenset[str] = frozenset({"network", "pack"})

    def __init__(
        self,
        *,
        data: Path,
        edge_id: str,
        mount_path: str = "auto",
        prefetch: bool = True,
        network: NetworkConfig | None = None,
    ) -> None:
        self.data = data
        self.mount_path = mount_path
        self.run = data / "run"
        self.layers = LayerMounts(data / "layers", MetadataCache(data / "cache"), mounted=self._mounted)
        self.warmth = Warmth(enabled=prefetch)
        self.pool = Pool(data)
        self.cgroups = detect(edge_id)
        self.packer = Packer(self.pool, self.cgroups)
        self.on_seen: Callable[[str, Seen], None] = lambda sandbox_id, seen: None
        self.networks = Networks(
            self.run,
            edge_id,
            network or NetworkConfig(),
            make_pair=lambda: self._launcher().pair(),
            seen=lambda sandbox_id, seen: self.on_seen(sandbox_id, seen),
        )
        self._packs = asyncio.Semaphore(PACKS_AT_ONCE)
        self._packing: dict[str, asyncio.Lock] = {}
        self.overlay: Overlay | None = None
        self.stages = Stages()
        self._launchers: list[Launcher] = []
        self._round = itertools.count()
        self._home: Group | None = None
        self._dev = self._run_fd = self._program = -1
        self._pidfds: dict[str, int] = {}
        self._statuses: dict[int, int] = {}
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self._own: dict[int, str] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="container")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home_ooms = 0

    def _mounted(self, layer: LayerRef) -> None:
        self.warmth.mounted(layer)

    # --- what all sandboxes of a node share ---------------------------------------------------------------

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.networks.start(self._loop)
        await self._in_thread(self._open)
        for launcher in self._launchers:
            launcher.attach(self._loop)
        await self._in_thread(self.networks.open)

    def _open(self) -> None:
        if os.geteuid() != 0:
            raise Unsupported("container sandboxes need root")
        self.run.mkdir(mode=0o700, exist_ok=True)
        self._run_fd = os.open(self.run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.cgroups.open()
        self._home = self.cgroups.home()
        self._home_ooms = self.cgroups.home_oom_kills()
        self.layers.open()
        if shutil.which("mkfs.erofs"):
            self.layers.file_backed = not erofs_file_mount()
        self.pool.open()
        self.packer.open()
        self.overlay = self._choose_overlay()
        self._dev = make_dev(self.run / "dev")
        self._program = sealed_copy(agent_binary())
        self._launchers = [self._new_launcher() for _ in range(os.cpu_count() or 1)]

    def _new_launcher(self) -> Launcher:
        assert self._home is not None
        return Launcher(self._program, self._home.join, self._reaped, self._launcher_ended)

    def _launcher_ended(self, launcher: Launcher) -> None:
        """Its aethers live on; another takes its place."""
        assert self._loop is not None
        self._launchers.remove(launcher)
        try:
            fresh = self._new_launcher()
        except OSError as e:
            log.error("no new launcher in place of %d: %s", launcher.pid, e)
            return
        fresh.attach(self._loop)
        self._launchers.append(fresh)

    def _choose_overlay(self) -> Overlay:
        if self.mount_path == "fd" or (self.mount_path == "auto" and not overlay_by_fd()):
            return ByDescriptor()
        stage = self.run / "staging"
        stage.mkdir(mode=0o700, exist_ok=True)
        return Staged(stage)

    async def close(self, *, keep: bool) -> None:
        loop = asyncio.get_running_loop()
        await self._in_thread(lambda: self.networks.close(keep=keep))
        for launcher in self._launchers:
            launcher.detach(loop)
        self._launchers = []
        for sandbox_id in list(self._pidfds):
            self._forget_pidfd(sandbox_id)
        await self._in_thread(lambda: self._close(keep))
        self._threads.shutdown()
        self.warmth.close()

    def _close(self, keep: bool) -> None:
        if self.overlay:
            self.overlay.close()
            self.overlay = None
        if self._home:
            self._home.close()
            self._home = None
        for fd in (self._dev, self._run_fd, self._program):
            if fd >= 0:
                os.close(fd)
        self._dev = self._run_fd = self._program = -1
        remove_dev(self.run / "dev")
        self.layers.close(keep=keep)
        self.packer.close(keep=keep)
        self.pool.close(keep=keep)
        with contextlib.suppress(OSError):
            (self.run / "staging").rmdir()
        if not keep:
            self.cgroups.close()
            with contextlib.suppress(OSError):
                self.run.rmdir()

    async def fingerprint(self) -> Fingerprint:
        if self.overlay is None:
            return Fingerprint(available=False, reason="not open")
        backed = {True: "file", False: "loop device", None: "not yet mounted"}[self.layers.file_backed]
        return Fingerprint(
            available=True,
            attributes={
                "mount_path": "fd" if isinstance(self.overlay, ByDescriptor) else "staged",
                "erofs": backed,
                "cgroup": f"v{self.cgroups.version}",
                "disk_limit": self.pool.described,
                "pack": self.packer.described,
                "network": self.networks.node.described,
            },
        )

    async def _in_thread(self, body: Callable[[], T]) -> T:
        """The body's value. A cancelled caller waits until the thread is done: nothing is half-made."""
        task = asyncio.get_running_loop().run_in_executor(self._threads, body)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            raise

    # --- launch -----------------------------------------------------------------------------------------

    async def launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket]:
        task = asyncio.get_running_loop().run_in_executor(self._threads, self._launch_or_undo, spec)
        try:
            handle, sock, pidfd = await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                handle, sock, pidfd = task.result()
                sock.close()
                os.close(pidfd)
                await self.destroy(handle)
            raise
        self._watch(handle, pidfd, own=True)
        return handle, sock

    def _launch_or_undo(self, spec: LaunchSpec) -> tuple[Handle, socket.socket, int]:
        try:
            return self._launch(spec)
        except BaseException as e:
            with contextlib.suppress(Exception):
                self._destroy(self.half_made(spec.sandbox_id, spec.slot))
            if isinstance(e, OSError):
                raise _typed(e, spec.sandbox_id) from e
            raise

    def _launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket, int]:
        if self.overlay is None:
            raise Unavailable("the container backend is not open")
        lap = self.stages.clock()
        with contextlib.ExitStack() as stack:
            pair = self.networks.take(spec)
            if pair is not None:
                stack.callback(pair.close)
            lap("network")
            lowers = self.layers.use(spec.layers, spec.sandbox_id)
            lap("layers")
            group = self._make_group(spec)
            stack.callback(group.close)
            lap("cgroup")
            own = self._etc_files(policy.hostname(spec), pair.index if pair else None)
            writable = self._make_writable(spec, own)
            stack.callback(os.close, writable)
            lap("writable layer")
            ours, theirs = socket.socketpair()
            failed = contextlib.ExitStack()
            failed.callback(ours.close)
            with failed:
                with contextlib.closing(theirs):
                    entered = (pair.user, pair.net) if pair else None
                    pid, pidfd = self._launcher().spawn(owner_of(spec.slot), theirs, entered)
                failed.callback(os.close, pidfd)
                failed.callback(end, pidfd, END_LIMIT_S)
                # Now, while it waits for its CONFIG: it may be gone and reaped at any time after.
                handle = self._handle(spec.sandbox_id, spec.slot, pid)
                handle.data[HOSTNAME] = policy.hostname(spec)
                handle.data[LAYERS] = ",".join(layer.digest for layer in spec.layers)
                if pair is not None:
                    handle.data[INDEX] = str(pair.index)
                lap("clone")
                userns = self._map_ids(pid, spec.slot)
                stack.callback(os.close, userns)
                lap("id maps")
                root = self.overlay.build(lowers, writable, userns, root_of(spec.slot))
                stack.callback(os.close, root)
                lap("overlay")
                self._configure(spec, ours, root, userns, group)
                lap("configure")
                await_hello(ours)
                lap("enter")
                failed.pop_all()
        self.stages.launches += 1
        ours.setblocking(False)
        return handle, ours, pidfd

    def _make_group(self, spec: LaunchSpec) -> Group:
        s = spec.spec
        return self.cgroups.create(
            spec.sandbox_id, Limits(s.memory_limit_mb << 20, s.pids_limit, s.cpu_cores_limit)
        )

    def _launcher(self) -> Launcher:
        """One after the other."""
        if not self._launchers:
            raise Unavailable("the container backend is not open")
        return self._launchers[next(self._round) % len(self._launchers)]

    def _etc_files(self, name: str, index: int | None) -> dict[str, str]:
        if index is None:
            return policy.etc_files(name)
        addresses = self.networks.node.addresses
        own = (addresses.address4(index), addresses.address6(index))
        return policy.etc_files(name, own, (addresses.gateway4, addresses.gateway6))

    def _make_writable(self, spec: LaunchSpec, own: dict[str, str]) -> int:
        fd = self.pool.create(spec.sandbox_id, spec.spec.disk_limit_mb << 20)
        try:
            os.mkdir("upper/etc", 0o755, dir_fd=fd)
            for name, text in own.items():
                file = os.open(f"upper/etc/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=fd)
                try:
                    os.write(file, text.encode())
                finally:
                    os.close(file)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _map_ids(pid: int, slot: int) -> int:
        """Maps the sandbox's ids; a descriptor of its user namespace."""
        proc = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in ("uid_map", "gid_map"):
                fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
                try:
                    os.write(fd, id_map(slot).encode())
                finally:
                    os.close(fd)
            return os.open("ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        finally:
            os.close(proc)

    def _dev_for(self, userns: int) -> int:
        fd = clone(self._dev)
        attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
        try:
            try:
                mount_setattr(fd, attr_set=attributes | MOUNT_ATTR_IDMAP, userns_fd=userns)
            except OSError as e:
                if e.errno != errno.EINVAL:  # tmpfs is idmapped since Linux 6.3; without, its owner is nobody
                    raise
                mount_setattr(fd, attr_set=attributes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _listen(self, sandbox_id: str) -> socket.socket:
        """Bound by way of a descriptor: a path below --data may be longer than a socket's name."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"/proc/self/fd/{self._run_fd}/{sandbox_id}")
        sock.listen(BACKLOG)
        sock.setblocking(False)
        return sock

    def _configure(
        self, spec: LaunchSpec, control: socket.socket, root: int, userns: int, group: Group
    ) -> None:
        assert self._home is not None
        home = self._home.join
        with contextlib.closing(self._listen(spec.sandbox_id)) as listener:
            dev = self._dev_for(userns)
            try:
                # In the order that policy.config names them by.
                fds = [root, listener.fileno(), dev, group.oom_counter, *group.join, *home]
                config = policy.config(spec, len(group.join), len(home), v2=self.cgroups.version == 2)
                payload = msgspec.msgpack.encode(config)
                frame = HEADER.pack(len(payload), 0, Type.CONFIG, 0, 0) + payload
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                control.settimeout(READY_LIMIT_S)
                sent = control.sendmsg([frame], rights)
                if sent < len(frame):
                    control.sendall(frame[sent:])
            finally:
                os.close(dev)

    def _handle(self, sandbox_id: str, slot: int, pid: int) -> Handle:
        return Handle(
            backend=self.name,
            sandbox_id=sandbox_id,
            slot=slot,
            pid=pid,
            start_time=start_time(pid) if pid else 0,
            boot_id=boot_id(),
            socket_path=str(self.run / sandbox_id),
        )

    def half_made(self, sandbox_id: str, slot: int) -> Handle:
        return self._handle(sandbox_id, slot, 0)

    # --- life -------------------------------------------------------------------------------------------

    async def recover(self, handle: Handle) -> socket.socket:
        pidfd = open_pidfd(handle)
        if pidfd < 0:
            raise SandboxFailed(f"{handle.sandbox_id} ended while no edge ran")
        try:
            sock = await self.connect(handle)
        except BaseException:
            os.close(pidfd)
            raise
        self.layers.note(handle.data.get(LAYERS, "").split(","), handle.sandbox_id)
        self._watch(handle, pidfd, own=False)
        return sock

    async def connect(self, handle: Handle) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(f"/proc/self/fd/{self._run_fd}/{handle.sandbox_id}")
        except BlockingIOError:
            sock.close()
            raise Unavailable(f"{handle.sandbox_id}: aether takes no connection now") from None
        except OSError as e:
            sock.close()
            raise SandboxFailed(f"{handle.sandbox_id}: aether cannot be reached: {e.strerror}") from e
        return sock

    def _watch(self, handle: Handle, pidfd: int, *, own: bool) -> None:
        assert self._loop is not None
        self._pidfds[handle.sandbox_id] = pidfd
        if own:
            self._own[handle.pid] = handle.sandbox_id
        self._loop.add_reader(pidfd, self._ended, handle, own)

    def _reaped(self, pid: int, status: int) -> None:
        if pid in self._own:
            self._statuses[pid] = status

    def _ended(self, handle: Handle, own: bool, patience: int = 20) -> None:
        """The pidfd says that it ended. How, the launcher says, a moment later."""
        assert self._loop is not None
        pidfd = self._pidfds.get(handle.sandbox_id)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
        if own and handle.pid not in self._statuses and patience:
            self._loop.call_later(0.01, self._ended, handle, own, patience - 1)
            return
        self._own.pop(handle.pid, None)
        status = self._statuses.pop(handle.pid, None)
        ooms = self.cgroups.home_oom_kills()
        host_oom, self._home_ooms = ooms > self._home_ooms, ooms
        exit_ = Exit(
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            host_oom=host_oom,
        )
        future = self._exits.setdefault(handle.sandbox_id, self._loop.create_future())
        if not future.done():
            future.set_result(exit_)

    async def wait_exit(self, handle: Handle) -> Exit:
        if handle.sandbox_id not in self._pidfds and handle.sandbox_id not in self._exits:
            return Exit()
        future = self._exits.setdefault(handle.sandbox_id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(future)

    def _forget_pidfd(self, sandbox_id: str) -> int | None:
        pidfd = self._pidfds.pop(sandbox_id, None)
        if pidfd is not None:
            if self._loop:
                self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return pidfd

    async def stop(self, handle: Handle) -> None:
        await self._in_thread(lambda: self._stop_thawed(handle))

    def _stop_thawed(self, handle: Handle) -> None:
        with self.packer.ending(handle.sandbox_id):
            self._stop(handle)

    def _stop(self, handle: Handle) -> None:
        pidfd = open_pidfd(handle)
        if pidfd < 0:
            return
        try:
            if not end(pidfd, END_LIMIT_S):
                raise SandboxFailed(f"{handle.sandbox_id} did not end within {END_LIMIT_S:.0f} s of SIGKILL")
        finally:
            os.close(pidfd)

    async def destroy(self, handle: Handle) -> None:
        await self._in_thread(lambda: self._destroy(handle))
        self._packing.pop(handle.sandbox_id, None)
        self._forget_pidfd(handle.sandbox_id)
        self._own.pop(handle.pid, None)
        self._statuses.pop(handle.pid, None)
        if (future := self._exits.pop(handle.sandbox_id, None)) and not future.done():
            future.set_result(Exit(signal=signal.SIGKILL))

    def _destroy(self, handle: Handle) -> None:
        with self.packer.ending(handle.sandbox_id):
            self._destroy_thawed(handle)

    def _destroy_thawed(self, handle: Handle) -> None:
        """Each part is tried, whatever became of the others; what failed last is raised."""
        problem: Exception | None = None
        parts: tuple[Callable[[], None], ...] = (
            lambda: self._stop(handle),
            lambda: self.networks.release(handle.sandbox_id),
            lambda: self.packer.forget(handle.sandbox_id),
            lambda: self.cgroups.remove(handle.sandbox_id),
            lambda: self.pool.destroy(handle.sandbox_id),
            lambda: _unlink(self._run_fd, handle.sandbox_id),
            lambda: self.layers.leave(handle.sandbox_id),
        )
        for part in parts:
            try:
                part()
            except (OSError, DSecError) as e:
                log.warning("destroying %s: %s", handle.sandbox_id, e)
                problem = e
        if isinstance(problem, OSError):
            raise _typed(problem, handle.sandbox_id) from problem
        if problem:
            raise problem

    async def snapshot_writable(self, handle: Handle) -> WritableSnapshot:
        lock = self._packing.setdefault(handle.sandbox_id, asyncio.Lock())
        async with lock, self._packs:
            task = asyncio.get_running_loop().run_in_executor(
                self._threads, self.packer.take, handle.sandbox_id
            )
            try:
                snapshot = await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task])
                if not task.cancelled() and task.exception() is None:
                    await self._in_thread(task.result().close)
                raise
        index = handle.data.get(INDEX)
        snapshot.platform = self._etc_files(handle.data.get(HOSTNAME, ""), int(index) if index else None)
        return snapshot

    async def set_network_rules(self, handle: Handle, policy: Policy, spec: SandboxSpec) -> None:
        await self._in_thread(lambda: self.networks.set_rules(handle, policy, spec))

    async def stats(self, handle: Handle) -> Stats:
        return await self._in_thread(lambda: self._stats(handle.sandbox_id))

    def _stats(self, sandbox_id: str) -> Stats:
        usage = self.cgroups.usage(sandbox_id)
        return Stats(
            memory_bytes=usage.memory_bytes,
            memory_peak_bytes=usage.memory_peak_bytes,
            cpu_us=usage.cpu_us,
            pids=usage.pids,
            disk_bytes=self.pool.usage(sandbox_id),
            oom_kills=usage.oom_kills,
        )

    def answered(self, handle: Handle) -> None:
        self.warmth.first_result(handle.data.get(LAYERS, "").split(","))

    async def reclaim(self, claimed: frozenset[str]) -> list[str]:
        return await self._in_thread(lambda: self._reclaim(claimed))

    def _reclaim(self, claimed: frozenset[str]) -> list[str]:
        """By name, and what has no name, an aether that no record knows, by its group."""
        told: list[str] = []
        own = {launcher.pid for launcher in self._launchers}
        names = {aether_name(sandbox_id) for sandbox_id in claimed}
        for pid in self.cgroups.home_pids() - own:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                pidfd = os.pidfd_open(pid)
                try:
                    name, parent = name_and_parent(pid)
                    if name not in names and (name.startswith(NAMED) or parent not in own):
                        end(pidfd, END_LIMIT_S)
                        told.append(f"process {pid} ({name})")
                finally:
                    os.close(pidfd)
        sockets = {e.name for e in self.run.iterdir() if e.is_socket()}
        found = self.cgroups.names() | self.pool.names() | self.packer.names() | sockets
        told += self.packer.reclaim()
        for name in sorted(found - claimed):
            with contextlib.suppress(DSecError):
                self._destroy(self.half_made(name, 0))
                told.append(f"sandbox {name}")
        return told + self.networks.node.reclaim()


def _unlink(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _typed(e: OSError, sandbox_id: str) -> DSecError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{sandbox_id}: {e}")
    return LaunchFailed(f"{sandbox_id}: {e}", errno=e.errno or 0)
