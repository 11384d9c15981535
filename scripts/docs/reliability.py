"""Run the fault tests and write what happened into the table of tests/faults/README.md.

    python -m scripts.docs.reliability [arguments of pytest, such as -n 2 or one of the files]

A fault is a test of tests/faults whose docstring names the fault. What the test passes to `outcome`
is what happened. Rows of tests that did not run or did not pass stay as they are.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[2] / "tests" / "faults"
PAGE = TESTS / "README.md"
BEGIN = "<!-- Below: python -m scripts.docs.reliability -->\n"
END = "<!-- Above: python -m scripts.docs.reliability -->\n"
HEAD = "| fault | what happens |\n| --- | --- |\n"


class Fault(NamedTuple):
    """A row of the table: the file and the name of the test, and what it does to the program."""

    file: str
    test: str
    fault: str

    @property
    def node(self) -> str:
        """The test as pytest names it, without parameters."""
        return f"tests/faults/{self.file}::{self.test}"


class Result(NamedTuple):
    """What the cases of a test said happened, and how many of them passed."""

    outcomes: list[str]
    passed: int
    cases: int


def faults() -> list[Fault]:
    """Return the faults in the order of the files and of the tests in them."""
    found = []
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name.startswith("test_")
                and (said := ast.get_docstring(node))
            ):
                found.append(Fault(path.name, node.name, said.splitlines()[0].rstrip(".")))
    return found


class Outcomes:
    """A pytest plugin that keeps what the fault tests say."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the result of a test that ran, or could not be set up."""
        if report.when == "call" or report.failed:
            node = re.sub(r"\[.*", "", report.nodeid)
            before = self.results.get(node, Result([], 0, 0))
            said = [str(text) for name, text in report.user_properties if name == "outcome"]
            outcomes = [*before.outcomes, *(text for text in said if text not in before.outcomes)]
            self.results[node] = Result(outcomes, before.passed + report.passed, before.cases + 1)


def rows(page: str) -> list[tuple[str, str]]:
    """Return the rows of a page's table as (fault, what happens)."""
    table = page.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD)
    cells = (
        re.split(r"(?<!\\) ?\| ?", line)[1:-1]
        for line in table.splitlines()
        if line.startswith("| ")
    )
    return [(fault, happens) for fault, happens in cells]


def render(page: str, results: Mapping[str, Result]) -> str:
    """Return the text of the page with new rows for `results`.

    Of more than two outcomes, the first is given as an example.
    """
    lines = []
    table = dict(rows(page))
    for fault in faults():
        if fault.node in results:
            outcomes = results[fault.node].outcomes
            text = "; ".join(outcomes) if len(outcomes) <= 2 else f"for example: {outcomes[0]}"
            table[fault.fault] = re.sub(r"([|<>*_])", r"\\\1", text)
        if fault.fault in table:
            lines.append(f"| {fault.fault} | {table[fault.fault]} |\n")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{HEAD}{''.join(lines)}{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str]) -> int:
    """Run all fault tests and write the rows of those that pass; return pytest's exit code."""
    plugin = Outcomes()
    named = [] if any(word.startswith("tests/") for word in arguments) else [str(TESTS)]
    code = int(pytest.main(["-q", "-m", "not gpu", *arguments, *named], plugins=[plugin]))
    passed = {
        node: result for node, result in plugin.results.items() if result.passed == result.cases
    }
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), passed), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
