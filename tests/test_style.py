"""What no linter has a rule for: code that was squeezed to save lines. Numbers may only fall."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lantern_bench"
# Tuple assignments, `a, b = x, y`, per 1,000 statements that a folder may have.
MOST_TUPLES = 3


def folder_of(path: Path) -> str:
    """The folder of the package that a file belongs to; `decoding` has two levels."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("decoding",) else 1])


def tuple_assignments(tree: ast.AST) -> int:
    """The number of statements such as `a, b = x, y`; a swap of two names does not count."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and ast.unparse(node.targets[0]) != ast.unparse(ast.Tuple(node.value.elts[::-1]))
        for node in ast.walk(tree)
    )


def units(tree: ast.AST) -> int:
    """The size of code: statements and expressions, without docstrings, annotations and names of
    keyword arguments.

    `a, b = x, y` has 7 units and the same in two statements 6, so that nothing is gained by
    squeezing.
    """
    skipped = {"annotation", "returns"}
    count = isinstance(tree, ast.stmt | ast.expr)
    for field, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and field not in skipped and not is_text:
                count += units(child)
    return int(count)


def test_no_folder_is_squeezed() -> None:
    tuples: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        folder = folder_of(path)
        tuples[folder] += tuple_assignments(tree)
        statements[folder] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    assert tuples["decoding"] == 0
    for folder, count in tuples.items():
        assert count <= MOST_TUPLES * statements[folder] / 1000, folder


@pytest.mark.parametrize(
    ("squeezed", "plain"),
    [
        ("a, b = x, y", "a = x\nb = y"),
        ("f(1, 2)", "f(first=1, second=2)"),
        ("x = 1", 'x: int = 1\n"""A number."""'),
    ],
)
def test_plain_code_is_not_larger(squeezed: str, plain: str) -> None:
    assert units(ast.parse(plain)) <= units(ast.parse(squeezed))
