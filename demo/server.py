"""The demo's own `dsec up`, on a free port, below a directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 120


class Server:
    """Started with `with`; stopped, and looked after, at its end."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.url = ""
        self.log = data.parent / "server.log"
        self._process: subprocess.Popen[str] | None = None

    @property
    def token(self) -> str:
        return (self.data / "first-token").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def __enter__(self) -> Server:
        ready = self.data.parent / "ready"
        ready.unlink(missing_ok=True)
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        # It ends in order even when we do not.
        argv = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            "--",
            sys.executable,
            "-m",
            "dsec.cli.main",
            "up",
            "--data",
            os.fspath(self.data),
        ]
        argv += ["--listen", "127.0.0.1:0", "--ready-file", os.fspath(ready)]
        argv += ["--token-file", os.fspath(self.data / "first-token")]
        with self.log.open("w") as log:
            # A session of its own: Ctrl-C is for us, and we stop it in order.
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, text=True, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not (ready.exists() and ready.read_text().endswith("\n")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(
                    f"the server did not start; {self.log} ends with:\n{self.log.read_text()[-2000:]}"
                )
            time.sleep(0.02)
        self.url = ready.read_text().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def left(self) -> list[str]:
        """What the stopped server has left on this host: mounts and loop devices below its directory."""
        where = os.fspath(self.data)
        mounts = [
            f"mount {line.split()[4]}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if f" {where}" in line
        ]
        backing = Path("/sys/block").glob("loop*/loop/backing_file")
        loops = [f"loop device {b.parent.parent.name}" for b in backing if b.read_text().startswith(where)]
        return mounts + loops

    def memory(self) -> int:
        """Resident bytes of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024
