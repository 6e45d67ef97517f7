"""libdsec: the SDK. `dsec.client.sync` is the same without await."""

from dsec.client._args import DSecContainerRunArgs
from dsec.client._client import DSecClient
from dsec.client._command import Command, Terminal
from dsec.client._files import Files
from dsec.client._result import CommandFailed, CommandResult, Output
from dsec.client._sandbox import Sandbox, Session
from dsec.client._stream import Chunk
from dsec.core.errors import DSecError
from dsec.wire.api import FileInfo, Operation
from dsec.wire.edge import NodeInfo, SandboxInfo, SandboxStats
from dsec.wire.layers import LayerInfo, Packed

__all__ = [
    "Chunk",
    "Command",
    "CommandFailed",
    "CommandResult",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "FileInfo",
    "Files",
    "LayerInfo",
    "NodeInfo",
    "Operation",
    "Output",
    "Packed",
    "Sandbox",
    "SandboxInfo",
    "SandboxStats",
    "Session",
    "Terminal",
]
