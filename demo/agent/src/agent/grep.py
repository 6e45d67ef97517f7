"""Where the issue points: functions that its text names."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def named(issue: str, path: Path) -> set[int]:
    """Lines of the functions and methods of `path` whose names stand in the issue."""
    words = set(re.findall(r"[A-Za-z_]\w+", issue))
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in words:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines
