"""What a caller asks for, and the limits of every number in it."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dsec.core.errors import InvalidArgument
from dsec.core.network import NetworkRules, check_rules

MIN_MEMORY_MB: Final = 8
MAX_MEMORY_MB: Final = 1 << 20
MAX_LABELS: Final = 64
MAX_ENV: Final = 512
MAX_ENV_BYTES: Final = 256 << 10
MAX_LAYERS: Final = 64
MAX_TTL: Final = 30 * 24 * 3600
LAYER_REF: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,254}\Z")
LABEL_KEY: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")
NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
HOSTNAME: Final = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
USER: Final = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?\Z")
ENV_NAME: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*\Z")

Short = Annotated[str, Meta(max_length=255)]


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything about one sandbox to be made. Units are in the names; None means the server's default."""

    backend: Short = "container"
    image: Short
    """Reference of the base layer."""
    layers: list[Short] = []
    """References of workspace and toolkit layers, bottom to top."""
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 1.0
    pids_limit: int = 1024
    disk_limit_mb: int = 4096
    """Of the writable layer."""
    open_files_limit: int = 65536
    shm_mb: int = 64
    ttl_running_stop: int | None = None
    """Seconds without an operation after which it is stopped."""
    ttl_max: int | None = None
    """Seconds after its creation after which it is stopped, whatever it does."""
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    """Environment that is never logged, stored or returned."""
    init_user: Short = ""
    workdir: str = ""
    hostname: Short = ""
    network_rules: NetworkRules | None = None
    """What it may reach (core/network.py). None: loopback alone; {}: a network with nothing allowed yet."""
    project: Short = "default"
    task: Short = ""
    labels: dict[str, str] = {}
    qos: Short = "latency_sensitive"
    group: Short = ""
    log_retention: int | None = None


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise InvalidArgument(what)


def validate(spec: SandboxSpec) -> SandboxSpec:
    """The spec itself, if every value is within its limits. Raises InvalidArgument that names the field."""
    _need(spec.backend in {"container", "fake", "microvm", "full_vm"}, f"backend: unknown {spec.backend!r}")
    for ref in (spec.image, *spec.layers):
        _need(bool(LAYER_REF.match(ref)), f"image, layers: {ref[:80]!r} is no layer reference")
    _need(len(spec.layers) <= MAX_LAYERS, f"layers: at most {MAX_LAYERS}")
    _need(
        MIN_MEMORY_MB <= spec.memory_limit_mb <= MAX_MEMORY_MB,
        f"memory_limit_mb: {spec.memory_limit_mb} is not in {MIN_MEMORY_MB}..{MAX_MEMORY_MB}",
    )
    _need(
        0.01 <= spec.cpu_cores_limit <= 1024, f"cpu_cores_limit: {spec.cpu_cores_limit} is not in 0.01..1024"
    )
    _need(4 <= spec.pids_limit <= 1 << 20, f"pids_limit: {spec.pids_limit} is not in 4..{1 << 20}")
    _need(1 <= spec.disk_limit_mb <= 1 << 24, f"disk_limit_mb: {spec.disk_limit_mb} is not in 1..{1 << 24}")
    _need(16 <= spec.open_files_limit <= 1 << 20, f"open_files_limit: not in 16..{1 << 20}")
    _need(1 <= spec.shm_mb <= MAX_MEMORY_MB, f"shm_mb: {spec.shm_mb} is not in 1..{MAX_MEMORY_MB}")
    for name, ttl in (("ttl_running_stop", spec.ttl_running_stop), ("ttl_max", spec.ttl_max)):
        _need(ttl is None or 1 <= ttl <= MAX_TTL, f"{name}: {ttl} is not in 1..{MAX_TTL} seconds")
    _need(spec.qos in {"latency_sensitive", "best_effort"}, f"qos: unknown {spec.qos!r}")
    _need(bool(NAME.match(spec.project)), f"project: {spec.project[:80]!r} is no name")
    _need(not spec.task or bool(LAYER_REF.match(spec.task)), f"task: {spec.task[:80]!r} is no name")
    _need(not spec.hostname or bool(HOSTNAME.match(spec.hostname)), f"hostname: {spec.hostname[:80]!r}")
    _need(not spec.init_user or bool(USER.match(spec.init_user)), f"init_user: {spec.init_user[:80]!r}")
    _need(
        not spec.workdir or (spec.workdir.startswith("/") and "\0" not in spec.workdir),
        "workdir: must be absolute",
    )
    check_rules(spec.network_rules)
    _need(len(spec.workdir) <= 4095, "workdir: too long")
    _need(len(spec.labels) <= MAX_LABELS, f"labels: at most {MAX_LABELS}")
    for k, v in spec.labels.items():
        _need(bool(LABEL_KEY.match(k)) and len(v) <= 255, f"labels: {k[:80]!r}")
    check_env(spec.env)
    check_env(spec.secrets)
    return spec


def check_env(env: dict[str, str]) -> None:
    """Raises InvalidArgument for a bad name, a NUL, or more than the limits."""
    _need(len(env) <= MAX_ENV, f"env: at most {MAX_ENV} variables")
    _need(sum(len(k) + len(v) for k, v in env.items()) <= MAX_ENV_BYTES, f"env: over {MAX_ENV_BYTES} bytes")
    for k, v in env.items():
        _need(bool(ENV_NAME.match(k)), f"env: {k[:80]!r} is no variable name")
        _need("\0" not in v, f"env: {k} holds a NUL")
