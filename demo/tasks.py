"""The demo's tasks: well-known packages, each with a fault planted by a patch of faults/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"
PYTEST = ("pytest==8.3.4", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2")
SRV = "/srv"
DEPENDENCIES = f"{SRV}/dependencies"


@dataclass(frozen=True)
class Task:
    """One package, as its maintainers might get it: something fails, and somebody has reported it."""

    package: str
    version: str
    source: str
    """Where the agent may edit: file or directory."""
    tests: tuple[str, ...]
    """What the reward is read from."""
    failing: tuple[str, ...]
    """Of them, those that fail with the fault."""
    issue: str
    dependencies: tuple[str, ...] = PYTEST

    @property
    def patch(self) -> Path:
        return FAULTS / f"{self.package}.patch"

    @property
    def directory(self) -> str:
        return f"{SRV}/{self.package}"

    @property
    def test_files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})


TASKS = (
    Task(
        package="sqlparse",
        version="0.5.3",
        source="sqlparse",
        tests=("tests/test_split.py", "tests/test_grouping.py"),
        failing=(
            "tests/test_split.py::test_split_casewhen_procedure",
            "tests/test_split.py::test_split_multiple_case_in_begin",
        ),
        issue="A CASE in a procedure's body ends the statement too early. _change_splitlevel loses count.",
    ),
    Task(
        package="tabulate",
        version="0.9.0",
        source="tabulate",
        tests=("test/test_regression.py", "test/test_internal.py"),
        failing=(
            "test/test_internal.py::test_align_column_decimal",
            "test/test_internal.py::test_align_column_decimal_with_incorrect_thousand_separators",
            "test/test_internal.py::test_align_column_decimal_with_thousand_separators",
            "test/test_regression.py::test_alignment_of_decimal_numbers_with_ansi_color",
            "test/test_regression.py::test_ansi_color_for_decimal_numbers",
        ),
        issue="Decimal points of a column do not stand in one line: _align_column_choose_padfn?",
        dependencies=(*PYTEST, "wcwidth==0.2.13"),
    ),
    Task(
        package="more-itertools",
        version="10.5.0",
        source="more_itertools",
        tests=("tests/test_recipes.py",),
        failing=(
            "tests/test_recipes.py::SieveTests::test_basic",
            "tests/test_recipes.py::SieveTests::test_prime_counts",
        ),
        issue="sieve() yields numbers that are no primes, such as 9.",
    ),
    Task(
        package="boltons",
        version="24.1.0",
        source="boltons",
        tests=("tests/test_strutils.py", "tests/test_dictutils.py"),
        failing=("tests/test_strutils.py::test_parse_int_list",),
        issue="parse_int_list() leaves out the end of a range.",
    ),
    Task(
        package="parse",
        version="1.20.2",
        source="parse.py",
        tests=("tests/test_parse.py", "tests/test_parsetype.py"),
        failing=(
            "tests/test_parse.py::test_numbers",
            "tests/test_parsetype.py::test_int_convert_stateless_base",
        ),
        issue="Numbers such as 0x1f are not read with their own base: int_convert.",
    ),
    Task(
        package="toolz",
        version="1.0.0",
        source="toolz/itertoolz.py",
        tests=("toolz/tests/test_itertoolz.py",),
        failing=("toolz/tests/test_itertoolz.py::test_partition_all",),
        issue="partition_all() on an iterator pads its last part.",
    ),
)
