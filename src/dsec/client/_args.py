"""What a caller asks for."""

from __future__ import annotations

import msgspec

from dsec.core.network import NetworkRules
from dsec.core.specs import SandboxSpec


class DSecContainerRunArgs(msgspec.Struct, kw_only=True):
    """A container sandbox. MiB, cores and seconds; None: the server's default."""

    container_image: str
    """Reference of the base layer."""
    layers: list[str] = []
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
    init_user: str = ""
    """User of its commands; empty: the image's."""
    workdir: str = ""
    hostname: str = ""
    network_rules: NetworkRules | None = None
    """Service → allowed or not, and `allow` → rules. None: loopback alone; {}: nothing is allowed yet."""
    project: str = "default"
    task: str = ""
    labels: dict[str, str] = {}
    qos: str = "latency_sensitive"
    group: str = ""
    log_retention: int | None = None
    backend: str = "container"

    def spec(self) -> SandboxSpec:
        fields = {f: getattr(self, f) for f in self.__struct_fields__ if f != "container_image"}
        return SandboxSpec(image=self.container_image, **fields)
