"""A real `dsec up` in a process of its own, for tests that need the whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

START_LIMIT_S = 60


class ServerProcess:
    """One data directory, and the server that runs on it now."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self.options = options
        self.token_file = data / "first-token"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.log = data.parent / f"{data.name}.log"

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def start(self) -> None:
        """Returns when it serves; raises with its log when it ends before."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dsec.cli.main",
                    "up",
                    "-v",
                    "--data",
                    str(self.data),
                    "--listen",
                    "127.0.0.1:0",
                    "--token-file",
                    str(self.token_file),
                    *self.options,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("dsec serves on "):
                self.url = line.split()[-1]
                return
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL: a normal event."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=START_LIMIT_S)
        self._close()
        assert status == 0, f"the server ended with {status}:\n{self.log.read_text()[-4000:]}"

    def _close(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
