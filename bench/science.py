"""A large Python image: Debian, Python, and libraries of wheels. Made once, kept in build/bench."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from bench.server import layer_build
from bench.tools import CACHE, base_dir, run

IMAGE: Final = "bench/science:1"
WHEELS: Final = (
    *("numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "scikit-image", "statsmodels", "networkx"),
    *("sympy", "numba", "pyarrow", "polars", "opencv-python-headless"),
    *("pillow", "lxml", "cryptography", "sqlalchemy"),
)
PACKAGES: Final = "usr/local/lib/python3.11/dist-packages"
PROGRAM: Final = """
import numpy, scipy.linalg, networkx, pyarrow, polars, cv2
import PIL.Image, lxml.etree, cryptography.fernet, sqlalchemy
a = numpy.arange(64.0).reshape(8, 8) + numpy.eye(8)
print(round(float(scipy.linalg.norm(a @ a.T)), 3), polars.DataFrame({"n": [1, 2]}).shape)
"""
"""What a task's first step is like: it imports ten of the image's libraries and computes something."""


def root() -> Path:
    """The image's tree."""
    out = CACHE / "science.root"
    if not out.exists():
        part = CACHE / "science.part"
        shutil.rmtree(part, ignore_errors=True)
        run("cp", "-a", base_dir(), part)
        _install(part / PACKAGES)
        run("chroot", part, "python3", "-m", "compileall", "-q", f"/{PACKAGES}")
        part.rename(out)
    return out


def _install(where: Path) -> None:
    fit = ("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp")
    run(sys.executable, "-m", "pip", "install", "--no-compile", *fit, "--target", where, *WHEELS)


def store() -> Path:
    """A store that holds it as one layer."""
    out = CACHE / "science"
    if not (out / "complete").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, mode=0o700)
        layer_build(out, IMAGE, root(), "base")
        (out / "complete").touch()
    return out / "store"
