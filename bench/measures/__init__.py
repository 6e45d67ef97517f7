"""Each measure by its name. A measure gets a target (or makes its own server) and returns one Result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from bench.result import Result


@dataclass(frozen=True)
class Options:
    """Zero means the measure's own default."""

    count: int = 0
    concurrency: int = 0
    url: str = ""
    token: str = ""
    image: str = ""
    docker: bool = True
    """Compare with Docker where it can be had."""


MODULES = {
    "create": "create",
    "create-alone": "create_alone",
    "exec": "exec_",
    "cycle": "cycle",
    "density": "density",
    "transfer": "transfer",
    "cold-start": "cold_start",
    "layers-vs-tar": "layers_vs_tar",
    "import": "import_",
    "pull-vs-docker": "pull",
    "catalogue": "catalogue",
    "pack-diff": "pack_diff",
}


def load(name: str) -> Callable[[Options], Result]:
    """The measure's function; imported when asked for, since it needs the SDK."""
    function: Callable[[Options], Result] = import_module(f"bench.measures.{MODULES[name]}").measure
    return function
