"""What goes wrong with a Dockerfile, said with its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from dsec.core.errors import Conflict, InvalidArgument

SHOWN: Final = 120


class StepFailed(Conflict):
    """A command of a RUN ended with another status than 0. `details`: exit_code, and the line."""

    code = "step_failed"


class At:
    """A place in a file, from which errors are made."""

    __slots__ = ("file", "line", "name")

    def __init__(self, file: str, line: int, name: str = "") -> None:
        self.file = file
        self.line = line
        self.name = name

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.name}" if self.name else "")

    def bad(self, why: str) -> InvalidArgument:
        """why: what is wrong, and what to do."""
        return InvalidArgument(f"{self}: {why}", file=self.file, line=self.line, instruction=self.name)


def shown(text: str) -> str:
    """For a message: quoted, and not too long."""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


@contextlib.contextmanager
def placed(at: At) -> Iterator[None]:
    """Errors of what a runner does get the place of the instruction that asked for it."""
    try:
        yield
    except (StepFailed, InvalidArgument) as e:
        if "line" in e.details:
            raise
        raise type(e)(f"{at}: {e.message}", **{**e.details, "line": at.line}) from e
