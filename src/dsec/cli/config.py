"""The server's configuration file: TOML, every key known, `dsec up --config FILE`.

    [network]
    upstreams = ["192.0.2.53"]

    [network.services.pypi]
    domains = ["pypi.example.org", "files.example.org"]

docs/network.md describes all of [network]; [tls] is `certificate`, `key` and `client_ca`; [limits] is what
dsec.apiserver.limits.ApiLimits says.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from dsec.apiserver.limits import ApiLimits
from dsec.apiserver.server import Tls
from dsec.core.errors import InvalidArgument
from dsec.core.network import SERVICE_NAME, Service, compile_rules
from dsec.network.service import NetworkConfig

MAX_BYTES = 1 << 20


class NetworkSection(NetworkConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    services: dict[str, Service] = msgspec.field(default_factory=dict)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    network: NetworkSection = NetworkSection()
    tls: Tls | None = None
    limits: ApiLimits = ApiLimits()


def read(path: Path | None) -> ServerConfig:
    """Raises InvalidArgument that names the file and the key."""
    if path is None:
        return ServerConfig()
    try:
        data = path.read_bytes()
        if len(data) > MAX_BYTES:
            raise InvalidArgument(f"{path}: over {MAX_BYTES} bytes")
        config = msgspec.convert(tomllib.loads(data.decode()), ServerConfig, dec_hook=_path)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise InvalidArgument(f"configuration {path}: {e}") from None
    try:
        _check(config)
    except InvalidArgument as e:
        raise InvalidArgument(f"configuration {path}: {e.message}") from None
    return config


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)


def _check(config: ServerConfig) -> None:
    """Services are tried now, so that no sandbox is refused for what the operator wrote."""
    for name, service in config.network.services.items():
        if not SERVICE_NAME.match(name) or name == "allow":
            raise InvalidArgument(f"[network.services.{name}]: no name of a service")
        if not (service.domains or service.cidrs):
            raise InvalidArgument(f"[network.services.{name}]: set domains or cidrs")
        compile_rules({name: True}, {name: service})
