"""Runs the test-suite in a small VM that boots a distribution's kernel: `scripts/test-kernels`.

The guest prints to a virtio-serial port, which is QEMU's standard output; lines that begin with '@@' are
for this program, the others for the reader. A run counts only when the guest said how it ended.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kernel_image import ROOT, Image, build

QUIETLY = ["-q", "-p", "no:cacheprovider"]
SERVER = ["tests/e2e/test_burst.py", "tests/e2e/test_published_listing.py"]
"""Need nothing that is not in the guest; most of the others want a suite's programs inside."""
SHORT = [
    *QUIETLY,
    "tests/backends/test_conformance.py",
    "tests/backends/test_container.py",
    "tests/linux/test_cgroup.py",
    *SERVER,
    "-k",
    "staged and (test_launch or recover_after or reclaim_after or destroy_is or stats or seen_nowhere)"
    " or test_groups or turned_on or test_listing or (test_burst and not container)",
]
FULL = [
    "-v",
    "-o",
    "faulthandler_timeout=300",
    "-p",
    "no:cacheprovider",
    "tests/backends",
    "tests/linux",
    *SERVER,
    "tests/e2e/test_crash.py",
    "-m",
    "not slow",
    "-k",
    "not fake",
]
KVM_DEADLINE_S = 8
BOOT_DEADLINE_S = 45
BOOTS = 4
"""A guest that does not come up is started again: it has not begun anything."""
MEMORY_MB = 2560


@dataclass
class Outcome:
    """What a guest did. `status` is None until it has said how it ended."""

    up: bool = False
    boot_s: float = 0.0
    status: int | None = None
    end: str = ""
    """How it was over, for a reader."""
    passed: int = 0
    failed: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.status == 0 and self.passed > 0 and self.failed == 0


def main() -> int:
    arguments = _parse()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dsec/kernel-vm"
    image = build(arguments.suite, cache)
    accelerator = arguments.accelerator or _accelerator(image, cache)
    tests = arguments.tests or (SHORT if arguments.short else FULL)
    with tempfile.TemporaryDirectory(prefix="dsec-kernel-vm-") as scratch:
        tree = Path(scratch) / "tree.tar"
        _pack_tree(tree, tests, arguments.command)
        outcome = _run_guest(image, accelerator, tree, Path(scratch), arguments.deadline)
    if arguments.command:
        return outcome.status if outcome.status is not None else 1
    return _verdict(outcome)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-kernels", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the part that CI runs")
    parser.add_argument("--suite", default="bookworm", help="the Debian release whose kernel is booted")
    parser.add_argument("--accelerator", choices=["kvm", "tcg"], help="default: kvm if a guest boots on it")
    parser.add_argument("--deadline", type=float, help="seconds for the whole guest; 280 if short, else 3600")
    parser.add_argument("--command", help="a shell command to run in the guest in place of the tests")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    arguments.deadline = arguments.deadline or (280 if arguments.short else 3600)
    return arguments


def _verdict(outcome: Outcome) -> int:
    if outcome.status is not None and outcome.passed == 0:
        print("kernel-vm: no test ran", flush=True)
    print(f"kernel-vm: {outcome.passed} passed, {outcome.failed} failed", flush=True)
    return 0 if outcome.good else 1


def _pack_tree(target: Path, tests: list[str], command: str | None) -> None:
    """The working tree as it is now, with the agent's binary and what the guest is to run."""
    listing = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    names = [os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(target, "w") as tar:
        for name in names:
            if (ROOT / name).exists():
                tar.add(ROOT / name, name, recursive=False)
        for binary in _agent_binaries():
            tar.add(binary, str(binary.relative_to(ROOT)))
        for name, text in {"arguments": "\n".join(tests) + "\n", "command": command}.items():
            if text is not None:
                path = Path(scratch) / name
                path.write_text(text)
                tar.add(path, f".vm/{name}")


def _agent_binaries() -> Iterator[Path]:
    return (path for path in (ROOT / "build").glob("aether") if path.is_file())


def _run_guest(image: Image, accelerator: str, tree: Path, scratch: Path, deadline_s: float) -> Outcome:
    end = time.monotonic() + deadline_s
    for attempt in range(1, BOOTS + 1):
        console = scratch / f"console-{attempt}"
        outcome = _boot(image, accelerator, console, tree=tree, end=end, boot_s=BOOT_DEADLINE_S)
        if outcome.up:
            break
        print(f"kernel-vm: {outcome.end} before the guest was up (try {attempt})", flush=True)
        _show_end(console, 10)
        if time.monotonic() >= end:
            break
    if outcome.up and outcome.status is None:
        print(f"kernel-vm: {outcome.end} before the guest had said how its tests ended", flush=True)
        _show_end(console, 40)
    return outcome


def _show_end(console: Path, lines: int) -> None:
    """Of what the kernel said; none where QEMU did not come as far."""
    text = console.read_text("utf-8", "replace") if console.exists() else ""
    print("kernel-vm: the end of the guest's console:", *text.splitlines()[-lines:], sep="\n  ", flush=True)


def _accelerator(image: Image, cache: Path) -> str:
    """KVM only if a guest really comes up on it: on some hosts /dev/kvm opens and nothing boots.

    The answer is kept until the host boots again.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = cache / f"accelerator-{boot_id}"
    if not known.exists():
        with tempfile.TemporaryDirectory(prefix="dsec-kernel-vm-") as scratch:
            end = time.monotonic() + KVM_DEADLINE_S
            outcome = _boot(
                image, "kvm", Path(scratch) / "console", tree=None, end=end, boot_s=KVM_DEADLINE_S
            )
        for old in cache.glob("accelerator-*"):
            old.unlink()
        known.write_text("kvm" if outcome.up else "tcg")
    if (accelerator := known.read_text()) == "tcg":
        print("kernel-vm: /dev/kvm opens, but no guest boots on it; QEMU interprets (slow)", flush=True)
    return accelerator


def _boot(
    image: Image, accelerator: str, console: Path, *, tree: Path | None, end: float, boot_s: float
) -> Outcome:
    """One guest, from start to end. It is killed at `end`, or when it is not up after `boot_s`."""
    outcome, start = Outcome(), time.monotonic()
    said = console.with_suffix(".port")
    said.touch()
    command = _qemu(image, accelerator, console, said, tree)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as qemu, said.open("rb") as port:
        try:
            for line in _lines(qemu, port, lambda: end if outcome.up else min(end, start + boot_s)):
                _take(outcome, line, time.monotonic() - start)
                if outcome.status is not None:
                    break
            outcome.end = _end_of(qemu, time.monotonic() - start)
        finally:
            qemu.kill()
    return outcome


def _end_of(qemu: subprocess.Popen[bytes], seconds: float) -> str:
    if (status := qemu.poll()) is None:
        return f"time was up ({seconds:.0f} s)"
    return f"QEMU ended with {status} after {seconds:.0f} s"


def _lines(qemu: subprocess.Popen[bytes], port: BinaryIO, deadline: Callable[[], float]) -> Iterator[str]:
    """What the guest says, as it says it, and all that was left when QEMU has ended.

    The port is a file: QEMU's own standard input and output would hang up on the guest at their first end.
    """
    rest = b""
    while True:
        ended = qemu.poll() is not None
        data = port.read()
        if not data:
            if ended or time.monotonic() >= deadline():
                if rest:
                    yield rest.decode("utf-8", "replace")  # where it stopped
                return
            time.sleep(0.05)
            continue
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode("utf-8", "replace").rstrip("\r") for line in whole)


def _take(outcome: Outcome, line: str, seconds: float) -> None:
    if line.startswith("@@ up"):
        outcome.up, outcome.boot_s = True, seconds
        print(f"kernel-vm: Linux {line.split()[2]} is up after {seconds:.1f} s", flush=True)
    elif line.startswith("@@ done"):
        outcome.status = int(line.split()[2])
        print(f"kernel-vm: the guest ended with {outcome.status} after {seconds:.0f} s", flush=True)
    else:
        print(f"  {line}", flush=True)
        if re.search(r"\d+ (passed|failed|error|skipped).* in [\d.]+s", line):
            outcome.passed = _count(line, "passed")
            outcome.failed = _count(line, "failed") + _count(line, "error")


def _count(line: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", line)
    return int(found[1]) if found else 0


def _qemu(image: Image, accelerator: str, console: Path, said: Path, tree: Path | None) -> list[str]:
    words = "console=ttyS0 quiet loglevel=4 panic=-1 reboot=t random.trust_cpu=on"
    if accelerator == "tcg":
        # Calibrating the TSC against an emulated timer hangs many boots; the guest's is the host's anyway.
        # Unless told that it is reliable, the kernel takes it for unsynchronized and keeps time by counting
        # ticks: a sleep of 1 ms then takes 5, and the clock falls behind while the host is busy.
        words += f" tsc_early_khz={_tsc_khz()} tsc=reliable"
    drives = [image.disk] if tree is None else [image.disk, tree]
    command = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    # The kernel finds its virtio-mmio devices through ACPI only, and wants a clock.
    command += ["-machine", "microvm,acpi=on,rtc=on", "-cpu", "host" if accelerator == "kvm" else "max"]
    command += ["-accel", "tcg,thread=multi" if accelerator == "tcg" else "kvm"]
    command += ["-smp", "2", "-m", f"{MEMORY_MB}M", "-serial", f"file:{console}"]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
    command += ["-append", words if tree else f"{words} dsec.probe"]
    for number, path in enumerate(drives):
        # `snapshot`: what the guest writes goes to a temporary file and the cached image stays as made.
        options = f"id=disk{number},file={path},format=raw,if=none,cache=unsafe,snapshot=on"
        command += ["-drive", options, "-device", f"virtio-blk-device,drive=disk{number}"]
    command += ["-chardev", f"file,id=out,path={said}", "-device", "virtio-serial-device"]
    return [*command, "-device", "virtserialport,chardev=out,name=dsec.out"]


def _tsc_khz() -> int:
    """The rate of this host's time stamp counter, measured against its monotonic clock."""
    code = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl $32, %rdx; or %rdx, %rax; ret
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    ticks, start = counter(), time.perf_counter()
    while (seconds := time.perf_counter() - start) < 0.1:
        pass
    passed: int = counter() - ticks
    return round(passed / seconds / 1000)


if __name__ == "__main__":
    sys.exit(main())
