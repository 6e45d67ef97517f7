"""The stages of a Dockerfile as a graph: which are needed for a target, and which stand on which."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from dsec.core import specs
from dsec.core.errors import InvalidArgument
from dsec.layers.dockerfile.faults import shown
from dsec.layers.dockerfile.parser import Dockerfile, Parsed, Stage
from dsec.layers.dockerfile.words import expand

SCRATCH: Final = "scratch"
PROXIES: Final = frozenset(
    name
    for word in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (word, word.lower())
)
"""Build arguments that need no ARG; they are no part of a step's key, as with Docker."""
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_PLATFORM: Final = re.compile(r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?\Z")


class Planned(msgspec.Struct, frozen=True):
    """A stage that is to be built."""

    number: int
    stage: Stage
    base: str
    """A reference, `scratch`, or empty: it stands on stage `on`."""
    on: int
    platform: str
    uses: frozenset[int]
    """Stages that must be done before: `on`, and those of COPY --from."""

    @property
    def title(self) -> str:
        return self.stage.name or f"stage {self.number}"


class Plan(msgspec.Struct, frozen=True):
    dockerfile: Dockerfile
    stages: dict[int, Planned]
    """Those that the target needs, by number, in the file's order."""
    target: int
    args: dict[str, str]
    """Of before the first FROM, and of the platform: what an ARG without a default in a stage has."""
    build_args: dict[str, str]

    def find(self, word: str, before: int) -> int | None:
        return _stage_of(self.dockerfile, word, before)


def plan(
    dockerfile: Dockerfile,
    *,
    target: str = "",
    build_args: Mapping[str, str] | None = None,
    platform: str = "",
) -> Plan:
    """target: a stage's name or number; the last one if empty. Raises InvalidArgument."""
    given = dict(build_args or {})
    specs.check_env(given)
    last = _target(dockerfile, target)
    args = _global_args(dockerfile, given, platform or default_platform())
    found: dict[int, Planned] = {}
    waiting = [last]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found[number] = _planned(dockerfile, number, args)
            waiting += found[number].uses
    return Plan(dockerfile, dict(sorted(found.items())), last, args, given)


def default_platform() -> str:
    machine = host.machine()
    return f"linux/{_MACHINES.get(machine, machine)}"


def _target(dockerfile: Dockerfile, target: str) -> int:
    if not target:
        return len(dockerfile.stages) - 1
    found = _stage_of(dockerfile, target, len(dockerfile.stages))
    if found is None:
        names = ", ".join(stage.name for stage in dockerfile.stages if stage.name) or "none has a name"
        raise InvalidArgument(f"{dockerfile.file}: there is no stage {shown(target)}; stages: {names}")
    return found


def _stage_of(dockerfile: Dockerfile, word: str, before: int) -> int | None:
    """The stage of a name or number among the first `before`."""
    stages = dockerfile.stages[:before]
    for number, stage in enumerate(stages):
        if stage.name and stage.name == word.lower():
            return number
    if word.isascii() and word.isdigit() and len(word) < 5 and int(word) < len(stages):
        return int(word)
    return None


def _global_args(dockerfile: Dockerfile, given: Mapping[str, str], platform: str) -> dict[str, str]:
    if not _PLATFORM.match(platform):
        raise InvalidArgument(f"platform {shown(platform)}: such as linux/amd64")
    args = {**_platform_args("TARGET", platform), **_platform_args("BUILD", default_platform())}
    for parsed in dockerfile.args:
        for name, default in parsed.pairs:
            if name in given:
                args[name] = given[name]
            elif default is not None:
                args[name] = expand(default, args, dockerfile.escape, dockerfile.at(parsed))
    return args


def _platform_args(prefix: str, platform: str) -> dict[str, str]:
    system, machine, variant = (*platform.split("/"), "")[:3]
    parts = {"PLATFORM": platform, "OS": system, "ARCH": machine, "VARIANT": variant}
    return {prefix + name: value for name, value in parts.items()}


def _planned(dockerfile: Dockerfile, number: int, args: Mapping[str, str]) -> Planned:
    stage = dockerfile.stages[number]
    at = dockerfile.at(stage.start)
    base = expand(stage.base, args, dockerfile.escape, at)
    if not base:
        raise at.bad(f"{shown(stage.base)} is empty: give its ARG a default before the first FROM")
    on = None if base.isdigit() else _stage_of(dockerfile, base, number)
    platform = expand(stage.start.flags.get("platform", ""), args, dockerfile.escape, at)
    if platform and not _PLATFORM.match(platform):
        raise at.bad(f"--platform={shown(platform)}: such as linux/amd64")
    uses = frozenset({*_copied(dockerfile, number), *(() if on is None else (on,))})
    return Planned(number, stage, "" if on is not None else base, -1 if on is None else on, platform, uses)


def _copied(dockerfile: Dockerfile, number: int) -> Iterator[int]:
    for parsed in dockerfile.stages[number].body:
        found = _stage_of(dockerfile, _from(dockerfile, parsed), number)
        if found is not None:
            yield found


def _from(dockerfile: Dockerfile, parsed: Parsed) -> str:
    word = parsed.flags.get("from", "")
    if "$" in word:
        why = "--from takes no variables: name a stage with FROM, which does, and copy from that"
        raise dockerfile.at(parsed).bad(why)
    return word
