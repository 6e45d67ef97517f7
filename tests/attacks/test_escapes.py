# ruff: noqa: E501  (shell and perl scripts)
"""The known ways out of containers, and what agents did in production, each as root inside a sandbox.

Each attack is a script that prints a line `GOT ...` for whatever it achieved. It must achieve nothing; the
neighbour and the node go on, and the audit record names the sandbox that did what was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.attacks.test_control_plane import attempt, client, neighbour
from tests.e2e.server import ServerProcess

from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core import errors
from dsec.core.errors import DSecError
from dsec.layers.build import Builder, Wanted
from dsec.layers.store import LayerStore

__all__ = ["client", "neighbour"]
pytestmark = pytest.mark.kernel

PERL = r"""
sub try_call { my ($name, $nr, @args) = @_; my $r = syscall($nr, @args); print "GOT $name $r\n" if $r != -1; }
"""
SCRIPTS = {
    "core_pattern": """
        for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/fs/binfmt_misc/register \
                 /proc/sys/vm/panic_on_oom /proc/sys/kernel/hostname /proc/sysrq-trigger; do
            (echo '|/bin/true' > $f) 2>/dev/null && echo GOT wrote $f; done
        mount -o remount,rw /proc/sys 2>/dev/null && echo GOT remounted; umount -l /proc/sys 2>/dev/null && echo GOT unmounted
        mkdir -p /tmp/p; mount -t proc proc /tmp/p 2>/dev/null && echo GOT proc; true""",
    "release_agent": """
        mkdir -p /tmp/cg
        for type in cgroup cgroup2; do mount -t $type none /tmp/cg 2>/dev/null && echo GOT mounted $type; done
        mount -t cgroup -o memory none /tmp/cg 2>/dev/null && echo GOT memory
        for f in $(find /sys/fs/cgroup -name release_agent -o -name cgroup.procs 2>/dev/null); do
            (echo 1 > $f) 2>/dev/null && echo GOT wrote $f; done; true""",
    "own binary": r"""
        (printf x > /proc/self/exe) 2>/dev/null; (printf x > /proc/1/exe) 2>/dev/null && echo GOT wrote
        exec 9</proc/1/exe 2>/dev/null && echo GOT opened; true""",
    "devices": """
        cd /tmp
        i=0; for d in "b 8 0" "b 254 0" "b 259 0" "b 7 0" "b 252 0" "c 1 1" "c 1 2" "c 10 232" "c 10 200" "c 10 229" "c 10 237"; do
            i=$((i+1)); mknod node$i $d 2>/dev/null && (head -c 1 node$i) >/dev/null 2>&1 && echo GOT read $d; done
        for d in /dev/mem /dev/kmsg /dev/kvm /dev/fuse /dev/loop-control /dev/vda /dev/sda /dev/net/tun; do
            [ -e $d ] && echo GOT $d; done; true""",
    "mounts": """
        mkdir -p /tmp/a /tmp/b /tmp/w
        mount -t overlay overlay -o lowerdir=/,upperdir=/tmp/a,workdir=/tmp/w /tmp/b 2>/dev/null && echo GOT overlay
        mount --bind / /tmp/b 2>/dev/null && echo GOT bind
        for t in tmpfs sysfs devpts mqueue bpf debugfs tracefs securityfs fuse erofs ext4; do
            mount -t $t none /tmp/b 2>/dev/null && echo GOT $t; done
        pivot_root / /tmp 2>/dev/null && echo GOT pivot; true""",
    "nested namespaces": """
        for n in U m p n i u C T; do unshare -$n true 2>/dev/null && echo GOT unshare -$n; done
        unshare -Ur true 2>/dev/null && echo GOT rootless
        for n in mnt pid net user; do nsenter --$n=/proc/1/ns/$n true 2>/dev/null && echo GOT entered $n; done; true""",
    "system calls": "perl -e '"
    + PERL
    + r"""
        my $b = "\0" x 512;
        try_call("bpf", 321, 0, $b, 72); try_call("perf", 298, $b, 0, -1, -1, 0);
        try_call("userfaultfd", 323, 0); try_call("io_uring", 425, 8, $b);
        try_call("keyctl", 250, 0, -3, 1); try_call("add_key", 248, "user", "x", "y", 1, -3);
        try_call("request_key", 249, "user", "x", 0, -3); try_call("open_by_handle", 304, -100, $b, 0);
        try_call("init_module", 175, $b, 1, ""); try_call("finit_module", 313, 0, "", 0);
        try_call("kexec", 246, 0, 0, 0, 0); try_call("fsopen", 430, "tmpfs", 0); try_call("open_tree", 428, -100, "/", 1);
        try_call("mount_setattr", 442, -100, "/", 0, $b, 32); try_call("move_mount", 429, -100, "/tmp", -100, "/tmp", 0);
        try_call("swapon", 167, "/tmp", 0); try_call("reboot", 169, 0xfee1dead, 672274793, 0x01234567, 0);
        try_call("iopl", 172, 3); try_call("ioperm", 173, 0, 1, 1); try_call("quotactl", 179, 0, 0, 0, 0);
        try_call("acct", 163, "/tmp/acct"); try_call("settimeofday", 164, $b, 0); try_call("clock_settime", 227, 0, $b);
        try_call("lookup_dcookie", 212, 0, $b, 1); try_call("vhangup", 153); try_call("syslog", 103, 3, $b, 16);
        try_call("nfsservctl", 180, 0, 0, 0); try_call("name_to_handle", 303, -100, "/nowhere", $b, $b, 0);
        try_call("pidfd_getfd", 438, 0, 0, 0); try_call("process_madvise", 440, 0, 0, 0, 0, 0);'""",
    "terminal injection": r"""
        script -qc 'perl -e "print \"GOT TIOCSTI\n\" if ioctl(STDIN, 0x5412, \"x\"); \
            my \$b = \"\x03\"; print \"GOT TIOCLINUX\n\" if ioctl(STDIN, 0x541C, \$b)"' /dev/null 2>/dev/null; true""",
    "extent swap": r"""
        cd /tmp; echo a >one; echo b >two
        perl -e 'open(A, "+<", "/tmp/one"); my $b = "\0" x 512;
            for (0xc0c0586d, 0x80285881, 0x40285881, 0x5879, 0x40049409, 0x5000940e, 0x5000940f) {
                next if $_ == 0x40049409; # FICLONE: an ordinary user may
                print "GOT ioctl $_\n" if ioctl(A, $_, $b); }' 2>/dev/null; true""",
    "setuid": """
        cp /bin/bash /tmp/rootbash; chmod 4755 /tmp/rootbash; chown root /tmp/rootbash
        cat /proc/self/status | grep NoNewPrivs | grep -q 1 || true
        perl -e '$) = 65534; $> = 65534; exec "/tmp/rootbash", "-p", "-c",
            "(cat /proc/1/environ) >/dev/null 2>&1 && echo GOT environ; kill -9 1 2>/dev/null; true"' """,
    "signals to everybody": "(kill -9 -1) & sleep 0.1; kill -STOP -1; true",
    "reads of everything": "timeout 20 grep -r nothing-like-this /proc /sys >/dev/null 2>&1; true",
    "kernel memory": """
        for f in /proc/kcore /proc/kpagecgroup /proc/kpageflags /proc/kpagecount /proc/kallsyms /proc/timer_list \
                 /proc/sched_debug /proc/keys /sys/kernel/debug /sys/kernel/tracing /sys/firmware/acpi; do
            n=$( (head -c 64 $f) 2>/dev/null | wc -c); case $f in *kallsyms) continue;; esac
            [ "$n" -gt 0 ] && echo GOT $f; done
        grep -v '^0000000000000000' /proc/kallsyms 2>/dev/null | head -1 | grep . && echo GOT addresses; true""",
    "host's network": """
        [ "$(ls /sys/class/net)" = lo ] || echo GOT $(ls /sys/class/net)
        grep -q ':' /proc/net/dev && [ $(grep -c ':' /proc/net/dev) -gt 1 ] && echo GOT devices; true""",
    "raw frames": "perl -e '"
    + PERL
    + r"""
        for (["vsock", 40], ["alg", 38], ["bluetooth", 31], ["tipc", 30], ["xdp", 44], ["can", 29]) {
            my ($name, $family) = @$_; try_call("socket $name", 41, $family, 1, 0); }'""",
}


@pytest.fixture
async def sandbox(client: DSecClient) -> AsyncIterator[Sandbox]:
    made = await client.run_container(
        DSecContainerRunArgs(
            container_image="base", memory_limit_mb=128, pids_limit=64, disk_limit_mb=64, shm_mb=16
        )
    )
    yield made
    await made.stop()


async def behaved(client: DSecClient, sandbox: Sandbox) -> list[str]:
    """What the audit record says of misbehaviour inside."""
    return [e.what async for e in client.audit(sandbox=sandbox.id, kind="misbehaviour")]


@pytest.mark.parametrize("name", SCRIPTS)
async def test_nothing_is_achieved(
    client: DSecClient, sandbox: Sandbox, neighbour: Sandbox, name: str
) -> None:
    core_pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    result = await attempt(sandbox, SCRIPTS[name])
    assert [x for x in result.stdout_text.splitlines() if x.startswith("GOT")] == []
    assert Path("/proc/sys/kernel/core_pattern").read_text() == core_pattern
    assert (await client.node()).counts["running"] >= 2
    done = [e async for e in client.audit(sandbox=sandbox.id, what="operations.")]
    assert any(str(e.detail.get("command", "")).startswith("/bin/bash -c") for e in done)


async def test_endless_output(client: DSecClient, sandbox: Sandbox, neighbour: Sandbox) -> None:
    """It costs a bounded amount, and the record names who did it."""
    result = await sandbox.exec(["yes"], timeout=20, output_limit=1 << 20, kill_at_limit=True)
    assert result.reason == "output_limit" and len(result.stdout) == 1 << 20
    assert await behaved(client, sandbox) == ["output_limit"]


async def test_memory_bomb(client: DSecClient, sandbox: Sandbox, neighbour: Sandbox) -> None:
    result = await sandbox.exec(["perl", "-e", 'my @a; push @a, "x" x 1e6 while 1'], timeout=60)
    assert result.reason == "oom"
    assert await behaved(client, sandbox) == ["oom"]


async def test_fork_bomb(client: DSecClient, sandbox: Sandbox, neighbour: Sandbox) -> None:
    result = await sandbox.exec(["/bin/bash", "-c", "b() { b | b & }; b 2>/dev/null; sleep 600"], timeout=2)
    assert result.reason == "timed_out"
    assert await behaved(client, sandbox) == ["timed_out"]
    async with asyncio.timeout(60):
        while True:
            try:
                await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"])
                break
            except errors.ResourceExhausted:
                continue
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


async def test_disk_bomb(sandbox: Sandbox, neighbour: Sandbox) -> None:
    filled = await sandbox.exec(["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=400"], timeout=120)
    assert filled.exit_code != 0, "no limit on the writable disk is in force"
    await neighbour.files.write("/mine", bytes(5_000_000))
    await sandbox.exec(["rm", "-f", "/big"])
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


INODES = r"""my $i = 0; mkdir "/many"; while (open my $f, ">", "/many/" . $i) { close $f; last if ++$i >= 400000 }
print "$i\n";"""


async def test_inode_bomb(sandbox: Sandbox, neighbour: Sandbox) -> None:
    """Empty files take room of the sandbox's own limit; the neighbour goes on writing."""
    made = await sandbox.exec(["perl", "-e", INODES], timeout=300)
    assert 0 < int(made.stdout) < 400_000, "files without end could be made"
    for i in range(50):
        await neighbour.files.write(f"/mine-{i}", b"x")
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


async def test_shared_memory_bomb(sandbox: Sandbox, neighbour: Sandbox) -> None:
    await sandbox.exec(["dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", "count=400"], timeout=60)
    assert (await sandbox.files.stat("/dev/shm/x")).size <= 16 << 20
    await sandbox.exec(["rm", "-f", "/dev/shm/x"])
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


HOSTILE_LINKS = ("proc", "sys", "dev", "etc", "tmp")


@pytest.fixture(scope="module")
def outside(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where layers named links-... lead. Each was used once, and stays mounted from then on."""
    where = tmp_path_factory.mktemp("outside")
    with LayerStore(server.data / "store") as store:
        for name in HOSTILE_LINKS:
            root = tmp_path_factory.mktemp("root")
            (root / name).symlink_to("../" * 12 + str(where).lstrip("/"))
            Builder(store).from_directory(root, Wanted(name=f"links-{name}", kind="toolkit"))

    async def use() -> None:
        async with DSecClient(url=server.url, token=server.token) as client:
            for name in HOSTILE_LINKS:
                await _started(client, name)

    asyncio.run(use())
    return where


async def _started(client: DSecClient, name: str) -> None:
    args = DSecContainerRunArgs(container_image="base", layers=[f"links-{name}"])
    try:
        await (await client.run_container(args)).stop()
    except DSecError as e:
        if e.code not in ("launch_failed", "sandbox_failed", "no_shell", "invalid_argument"):
            raise


@pytest.mark.parametrize("name", HOSTILE_LINKS)
async def test_mount_targets_that_are_links(client: DSecClient, outside: Path, name: str) -> None:
    """An image whose /proc, /dev, ... lead out of its root: mounts land below the root, or nothing starts."""
    before = _mounts()
    await _started(client, name)
    assert list(outside.iterdir()) == []
    assert _mounts() == before


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


async def test_setuid_files_of_a_layer_give_nothing_of_the_host(
    server: ServerProcess, client: DSecClient, tmp_path: Path, neighbour: Sandbox
) -> None:
    """A setuid program of an image makes root of its own sandbox, as Docker users expect, and nobody else."""
    made = await client.run_container(DSecContainerRunArgs(container_image="base"))
    script = """cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id
        perl -e '$( = $) = 65534; $< = $> = 65534; exec "/tmp/id", "-u"'"""
    inside = await made.exec(["/bin/sh", "-c", script])
    assert inside.stdout == b"0\n"
    background = await made.exec(["sleep", "987"], background=True)
    pid = next(p for p in Path("/proc").iterdir() if p.name.isdigit() and b"sleep\x00987" in _cmdline(p))
    uids = next(x for x in (pid / "status").read_text().splitlines() if x.startswith("Uid:")).split()[1:]
    assert min(int(u) for u in uids) >= 65_536, "root inside is an ordinary user of the host"
    await background.kill()
    await made.stop()


def _cmdline(pid: Path) -> bytes:
    try:
        return (pid / "cmdline").read_bytes()
    except OSError:
        return b""


FILE_ERRORS = (
    "file_not_found", "not_a_directory", "file_access_denied", "file_exists", "file_error", "is_a_directory",
)  # fmt: skip


async def test_a_path_is_swapped_while_files_are_served(sandbox: Sandbox, neighbour: Sandbox) -> None:
    """Root inside turns a directory into a link to /, over and over, while the caller writes below it."""
    swap = await sandbox.exec(
        ["/bin/bash", "-c", "mkdir -p /t/real; while :; do ln -sfn /proc/1/root /t/d; rm -f /t/d; mkdir -p /t/d; rmdir /t/d; done"],
        background=True,
    )  # fmt: skip
    for i in range(100):
        try:
            await sandbox.files.write("/t/d/file", b"x" * i, parents=True)
            await sandbox.files.read("/t/d/etc/shadow")
        except DSecError as e:
            if e.code not in FILE_ERRORS:
                raise
    await swap.kill()
    assert not Path("/file").exists()


async def test_many_sandboxes_attack_while_others_are_made(client: DSecClient, sandbox: Sandbox) -> None:
    """Timing a mount during creation: what runs in one sandbox sees no mount of another, half-made or not."""
    watch = await sandbox.exec(
        ["/bin/bash", "-c", "for i in $(seq 400); do cat /proc/self/mountinfo; done | sort | uniq -c"],
        background=True,
    )
    made = [s async for s in client.run_many(DSecContainerRunArgs(container_image="base"), count=20)]
    seen = (await watch.wait()).stdout_text.splitlines()
    for other in made:
        assert not [x for x in seen if other.id in x]
        await other.stop()
    assert len({x.split()[0] for x in seen}) == 1, "its table of mounts changed while others were made"
