"""Builds, once, what the kernel VM boots: a distribution's kernel, an initramfs and a root disk.

Everything lies in a cache directory whose name is a digest of all that went into it, and appears there by
rename, so that a build that was cut off is never used.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    "python3",
    "btrfs-progs",
    "erofs-utils",
    "e2fsprogs",
    "kmod",
    "util-linux",
    "mount",
    "procps",
    "iproute2",
    "busybox-static",
    "bash",
    "ca-certificates",
    "git",
]
KERNEL = "linux-image-cloud-amd64"
"""The kernel that a Debian cloud machine runs: small, and has all that the product needs."""
NOT_IN_GUEST = {"mypy", "ruff", "import-linter"}
NEEDED_EARLY = ["virtio_ring", "virtio", "virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console"]
NEEDED_FOR_ROOT = ["crc32c_generic", "crc32c_intel", "libcrc32c", "ext4"]
DISK_MB = 6144
PYTHON = {"bookworm": "3.11", "trixie": "3.13"}
"""Of each suite that was tried."""


@dataclass(frozen=True)
class Image:
    """A guest that can be booted. The disk must be opened as a snapshot."""

    kernel: Path
    initramfs: Path
    disk: Path


def build(suite: str, cache: Path) -> Image:
    """The image of a suite, from the cache or made now (a minute; network to the distribution and PyPI)."""
    target = cache / f"{suite}-{_digest(suite)}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
        try:
            _make(suite, work)
            for old in cache.glob(f"{suite}-*"):
                shutil.rmtree(old)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Image(target / "vmlinuz", target / "initramfs", target / "root.img")


def _digest(suite: str) -> str:
    parts = [suite, *PACKAGES, *_requirements(), str(DISK_MB)]
    parts += [Path(__file__).read_text(), (ROOT / "scripts/kernel-vm-init").read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    return [r for r in wanted if re.split(r"[<>=!~\[ ]", r)[0] not in NOT_IN_GUEST]


def _make(suite: str, work: Path) -> None:
    root = work / "root"
    print(f"kernel-vm: making a {suite} root (half a minute)", flush=True)
    _bootstrap(suite, root)
    print("kernel-vm: adding Python packages, making disks", flush=True)
    _python_packages(suite, root)
    version = _kernel(root, work)
    _initramfs(root, version, work / "initramfs")
    (root / "dsec").mkdir()
    # No journal: the disk is thrown away after each boot.
    options = ["-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,root_owner=0:0"]
    _run("mke2fs", *options, "-d", root, work / "root.img", f"{DISK_MB}M")
    shutil.rmtree(root)


def _bootstrap(suite: str, root: Path) -> None:
    # The kernel is fetched, not installed: installing would make an initramfs for a machine that is not ours.
    fetch = (
        'mkdir "$1/kernel" && chroot "$1" sh -c "cd /kernel && apt-get -q download '
        f"\\$(apt-cache depends {KERNEL} | sed -n 's/.*Depends: \\(linux-image[^ ]*\\)/\\1/p')\""
    )
    lean = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale", "info")]
    clock = [f'--aptopt=Acquire::Check-{what} "false"' for what in ("Valid-Until", "Date")]
    _run(
        *("mmdebstrap", "--quiet", "--variant=minbase", "--format=directory", *lean, *clock),
        *(f"--include={','.join(PACKAGES)}", f"--customize-hook={fetch}", suite, root),
    )


def _python_packages(suite: str, root: Path) -> None:
    """Wheels for the guest's Python, which need not be the host's."""
    version = PYTHON[suite]
    target = root / f"usr/local/lib/python{version}/dist-packages"
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28, 34)]
    platforms.append("--platform=manylinux2014_x86_64")
    _run(
        *(ROOT / ".venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-compile", "--target", target, "--python-version", version, "--only-binary=:all:"),
        *(*platforms, *_requirements()),
    )
    _run("chroot", root, "python3", "-m", "compileall", "-q", f"/usr/local/lib/python{version}/dist-packages")


def _kernel(root: Path, work: Path) -> str:
    (package,) = (root / "kernel").glob("*.deb")
    _run("dpkg-deb", "-x", package, root / "kernel/tree")
    (image,) = (root / "kernel/tree/boot").glob("vmlinuz-*")
    version = image.name.removeprefix("vmlinuz-")
    image.rename(work / "vmlinuz")
    (modules,) = (root / "kernel/tree").glob("**/lib/modules")
    shutil.move(modules / version, root / "usr/lib/modules" / version) if (
        root / "usr/lib/modules"
    ).is_dir() else shutil.copytree(modules, root / "usr/lib/modules", symlinks=True)
    shutil.rmtree(root / "kernel")
    _run("depmod", "-b", root, version)
    return version


def _initramfs(root: Path, version: str, target: Path) -> None:
    files: dict[str, bytes] = {
        "init": (ROOT / "scripts/kernel-vm-init").read_bytes(),
        "bin/busybox": (root / "bin/busybox").read_bytes(),
    }
    order = _with_dependencies(root / "lib/modules" / version, NEEDED_EARLY + NEEDED_FOR_ROOT)
    for module in order:
        files[f"modules/{_module_name(module)}.ko"] = _decompressed(module)
    files["modules/order"] = "".join(f"{_module_name(module)}.ko\n" for module in order).encode()
    target.write_bytes(_cpio(files))


def _module_name(path: Path) -> str:
    return path.name.split(".")[0].replace("-", "_")


def _decompressed(module: Path) -> bytes:
    data = module.read_bytes()
    if module.suffix == ".xz":
        return lzma.decompress(data)
    if module.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq"], input=data, stdout=subprocess.PIPE, check=True).stdout
    return data


def _with_dependencies(modules: Path, wanted: list[str]) -> list[Path]:
    """Files to load, in order. A module that is built in, or not there, is left out."""
    needs: dict[str, list[Path]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, rest = line.partition(":")
        # modules.dep lists what to load first last.
        chain = [modules / part for part in [*reversed(rest.split()), name]]
        needs[_module_name(Path(name))] = chain
    order: dict[Path, None] = {}
    for name in wanted:
        order.update(dict.fromkeys(needs.get(name, [])))
    return list(order)


def _cpio(files: dict[str, bytes]) -> bytes:
    """A `newc` archive (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    parents = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    entries = [(name, 0o040755, b"") for name in sorted(parents)]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    archive = bytearray()
    for inode, (name, mode, data) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + path
        archive += b"\0" * (-len(archive) % 4) + data
        archive += b"\0" * (-len(archive) % 4)
    return bytes(archive)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)
