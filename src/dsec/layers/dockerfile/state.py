"""A stage's state from one instruction to the next: what steps see, and what the result says of itself."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from dsec.core import specs
from dsec.core.errors import InvalidArgument
from dsec.core.images import ImageConfig
from dsec.layers.dockerfile.faults import At, shown
from dsec.layers.dockerfile.parser import Parsed
from dsec.layers.dockerfile.plan import PROXIES, Plan
from dsec.layers.dockerfile.words import expand

DEFAULT_SHELL: Final = ["/bin/sh", "-c"]
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRIPT: Final = 'f=$(mktemp) && printf %s "$1" >"$f" && chmod 700 "$f" && "$f"; s=$?; rm -f "$f"; exit $s'
"""Runs a heredoc that begins with `#!`."""
MAX_LABELS_BYTES: Final = 256 << 10
_PORT: Final = re.compile(r"\d{1,5}(-\d{1,5})?(/(tcp|udp|sctp))?\Z")
_SIGNAL: Final = re.compile(r"(SIG)?[A-Z][A-Z0-9+-]{0,15}\Z|\d{1,2}\Z")


class History(msgspec.Struct, frozen=True):
    """Of one instruction."""

    created_by: str
    layer: str = ""
    """What it made; empty when it only changed what the result says of itself."""


class State(msgspec.Struct):
    """Of one stage, changed by each instruction."""

    layers: list[str] = []
    """Bottom to top."""
    key: str = ""
    """Stands for what the layers are made of."""
    config: ImageConfig = ImageConfig()
    exposed: list[str] = []
    """Such as 80/tcp."""
    history: list[History] = []
    args: dict[str, str] = {}
    """Of this stage's ARGs, as far as it has come."""
    has_cmd: bool = False
    """CMD was said in this file: ENTRYPOINT keeps it."""

    def heir(self) -> State:
        """Of a stage that stands on this one."""
        return State(
            [*self.layers], self.key, self.config, [*self.exposed], [*self.history], has_cmd=self.has_cmd
        )

    @property
    def values(self) -> dict[str, str]:
        """For substitution: what ENV sets wins over ARG."""
        return {**self.args, **self.config.env}

    @property
    def shell(self) -> list[str]:
        return self.config.shell or DEFAULT_SHELL

    @property
    def workdir(self) -> str:
        return self.config.workdir or "/"


def run_argv(state: State, parsed: Parsed) -> list[str]:
    """The program that RUN means, and its arguments."""
    if parsed.json:
        return [*parsed.words]
    docs = parsed.heredocs
    if len(docs) == 1 and parsed.text.strip() == docs[0].word:
        body = docs[0].body
        return ["/bin/sh", "-c", SCRIPT, "sh", body] if body.startswith("#!") else [*state.shell, body]
    return [*state.shell, "\n".join([parsed.text, *(doc.body + doc.name for doc in docs)])]


def run_env(state: State, plan: Plan, *, key: bool = False) -> dict[str, str]:
    """What RUN's command sees. key: only what counts for the step's key."""
    given = {k: v for k, v in plan.build_args.items() if k in PROXIES and not key}
    return {**given, **state.args, **state.config.env}


class Metadata:
    """Applies the instructions that make no layer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._escape = plan.dockerfile.escape
        self._steps: dict[str, Callable[[State, Parsed], ImageConfig]] = {
            "ENV": self._env,
            "LABEL": self._label,
            "USER": self._user,
            "WORKDIR": self._workdir,
            "SHELL": self._shell,
            "CMD": self._cmd,
            "ENTRYPOINT": self._entrypoint,
            "STOPSIGNAL": self._signal,
        }

    def apply(self, state: State, parsed: Parsed) -> None:
        """Raises InvalidArgument with the line."""
        if parsed.name == "ARG":
            self._arg(state, parsed)
        elif parsed.name == "EXPOSE":
            self._expose(state, parsed)
        elif parsed.name in self._steps:
            state.config = self._steps[parsed.name](state, parsed)

    def expand(self, text: str, values: Mapping[str, str], parsed: Parsed) -> str:
        return expand(text, values, self._escape, self._at(parsed))

    def _at(self, parsed: Parsed) -> At:
        return self._plan.dockerfile.at(parsed)

    def _arg(self, state: State, parsed: Parsed) -> None:
        plan = self._plan
        for raw, default in parsed.pairs:
            name = self.expand(raw, state.values, parsed)
            if name in plan.build_args:
                state.args[name] = plan.build_args[name]
            elif default is not None:
                state.args[name] = self.expand(default, state.values, parsed)
            elif name in plan.args:
                state.args[name] = plan.args[name]
        self._check_env(state.args, parsed)

    def _pairs(self, state: State, parsed: Parsed) -> dict[str, str]:
        values = state.values  # as they were before this instruction
        return {
            self.expand(name, values, parsed): self.expand(value or "", values, parsed)
            for name, value in parsed.pairs
        }

    def _env(self, state: State, parsed: Parsed) -> ImageConfig:
        env = {**state.config.env, **self._pairs(state, parsed)}
        self._check_env(env, parsed)
        return msgspec.structs.replace(state.config, env=env)

    def _check_env(self, env: Mapping[str, str], parsed: Parsed) -> None:
        try:
            specs.check_env(dict(env))
        except InvalidArgument as e:
            raise self._at(parsed).bad(e.message) from None

    def _label(self, state: State, parsed: Parsed) -> ImageConfig:
        labels = {**state.config.labels, **self._pairs(state, parsed)}
        if sum(len(k) + len(v) for k, v in labels.items()) > MAX_LABELS_BYTES:
            raise self._at(parsed).bad(f"more than {MAX_LABELS_BYTES} bytes of labels")
        return msgspec.structs.replace(state.config, labels=labels)

    def _user(self, state: State, parsed: Parsed) -> ImageConfig:
        user = self.expand(parsed.text, state.values, parsed)
        if not specs.USER.match(user):
            raise self._at(parsed).bad(f"{shown(user)}: a name or number, or two with a colon between")
        return msgspec.structs.replace(state.config, user=user)

    def _workdir(self, state: State, parsed: Parsed) -> ImageConfig:
        path = self.expand(parsed.text, state.values, parsed)
        if not path or "\0" in path or len(path) > 4000:
            raise self._at(parsed).bad(f"{shown(path)}: a path of at most 4000 characters")
        full = posixpath.normpath(posixpath.join(state.workdir, path)).replace("//", "/")
        return msgspec.structs.replace(state.config, workdir=full)

    def _shell(self, state: State, parsed: Parsed) -> ImageConfig:
        if not parsed.words[0].startswith("/"):
            raise self._at(parsed).bad(f"{shown(parsed.words[0])}: name the shell by its absolute path")
        return msgspec.structs.replace(state.config, shell=[*parsed.words])

    def _command(self, state: State, parsed: Parsed) -> list[str]:
        return [*parsed.words] if parsed.json else [*state.shell, parsed.text]

    def _cmd(self, state: State, parsed: Parsed) -> ImageConfig:
        state.has_cmd = True
        return msgspec.structs.replace(state.config, cmd=self._command(state, parsed))

    def _entrypoint(self, state: State, parsed: Parsed) -> ImageConfig:
        """A CMD of the base was meant for the base's entrypoint."""
        cmd = state.config.cmd if state.has_cmd else []
        return msgspec.structs.replace(state.config, entrypoint=self._command(state, parsed), cmd=cmd)

    def _signal(self, state: State, parsed: Parsed) -> ImageConfig:
        signal = self.expand(parsed.text, state.values, parsed)
        if not _SIGNAL.match(signal):
            raise self._at(parsed).bad(f"{shown(signal)}: such as SIGTERM or 15")
        return msgspec.structs.replace(state.config, stop_signal=signal)

    def _expose(self, state: State, parsed: Parsed) -> None:
        for port in self.expand(parsed.text, state.values, parsed).split():
            if not _PORT.match(port):
                raise self._at(parsed).bad(f"{shown(port)}: such as 80 or 53/udp")
            full = port if "/" in port else f"{port}/tcp"
            if full not in state.exposed:
                state.exposed.append(full)
