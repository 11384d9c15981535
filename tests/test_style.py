"""What no linter has a rule for: code that was squeezed to save lines.

Size is measured in units: statements and expressions of the syntax tree, without docstrings,
annotations and the names of keyword arguments. `a, b = x, y` has 7 units and the two plain
statements have 6, so that nothing is gained by squeezing. The bounds below should only fall.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lantern_bench"
CODE = ("lantern_bench", "tests", "scripts")

# A change that adds more than it removes raises this bound, and its message says what for. The
# fourth edition had 97,684 units.
MOST_UNITS = 126_845
MOST_UNITS_PER_STATEMENT = 6.5
MOST_MEAN_LINE = 48.0
MOST_TUPLES_PER_1000_STATEMENTS = 3.0
MOST_POSITIONAL = 3

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@cache
def syntax_trees(folder: str) -> dict[Path, ast.Module]:
    """The syntax tree of every Python file below a folder of the repository."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def folder_of(path: Path) -> str:
    """The folder of the repository that a bound is for: `lantern_bench/models`, `tests/cli`."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def is_text(node: ast.AST) -> bool:
    """Whether a node is a docstring, or a string that documents the name above it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def counted(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement and expression that counts as a unit."""
    if isinstance(tree, ast.stmt | ast.expr):
        yield tree
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not is_text(child):
                yield from counted(child)


def units(tree: ast.AST) -> int:
    """The size of code in units."""
    return sum(1 for _ in counted(tree))


def statements(tree: ast.AST) -> int:
    """The number of statements, without docstrings."""
    return sum(isinstance(node, ast.stmt) for node in counted(tree))


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a statement is `a, b = x, y`; a swap of two names is not counted."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    value = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    swapped = ast.Tuple(value.elts[::-1])
    return ast.unparse(target) != ast.unparse(swapped)


def is_dense_comprehension(node: ast.AST) -> bool:
    """Whether a comprehension has several `for`, or several `if`."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    return len(node.generators) > 1 or len(node.generators[0].ifs) > 1


def is_call_as_condition(node: ast.AST) -> bool:
    """Whether a statement is `x and f(x)`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp)


def is_picked_from_a_literal(node: ast.AST) -> bool:
    """Whether an expression is `[a, b][flag]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.List | ast.Tuple)


def is_nested_conditional(node: ast.AST) -> bool:
    """Whether a conditional expression has another one inside."""
    if not isinstance(node, ast.IfExp):
        return False
    inside = (node.test, node.body, node.orelse)
    return any(isinstance(part, ast.IfExp) for part in inside)


@cache
def own_functions() -> frozenset[str]:
    """Names of functions of the package whose arguments should be passed by name.

    Functions of any number of arguments are left out, and so are names that tests use again.
    """
    names = set()
    for tree in syntax_trees("lantern_bench").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.args.vararg is None:
                names.add(node.name)
    for tree in syntax_trees("tests").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names.discard(node.name)
    return frozenset(names)


def is_positional_call(node: ast.AST) -> bool:
    """Whether a call to a function of the package passes more than three arguments by position."""
    if not isinstance(node, ast.Call) or len(node.args) <= MOST_POSITIONAL:
        return False
    return isinstance(node.func, ast.Name) and node.func.id in own_functions()


def is_splatted_tuple(node: ast.AST) -> bool:
    """Whether a call takes its arguments from a tuple that is written in the call."""
    if not isinstance(node, ast.Call):
        return False
    starred = [part.value for part in node.args if isinstance(part, ast.Starred)]
    return any(isinstance(part, ast.Tuple) for part in starred)


@pytest.mark.parametrize(
    "is_squeezed",
    [
        is_dense_comprehension,
        is_call_as_condition,
        is_picked_from_a_literal,
        is_nested_conditional,
        is_positional_call,
        is_splatted_tuple,
    ],
)
@pytest.mark.parametrize("folder", CODE)
def test_nothing_is_squeezed(folder: str, is_squeezed: Callable[[ast.AST], bool]) -> None:
    found = []
    for path, tree in syntax_trees(folder).items():
        for node in ast.walk(tree):
            if is_squeezed(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}")  # type: ignore[attr-defined]
    assert found == []


@pytest.mark.parametrize("folder", CODE)
def test_one_name_is_assigned_a_statement(folder: str) -> None:
    tuples: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path, tree in syntax_trees(folder).items():
        tuples[folder_of(path)] += sum(map(is_tuple_assignment, ast.walk(tree)))
        sizes[folder_of(path)] += statements(tree)
    assert tuples["lantern_bench/decoding"] == 0
    for name, count in tuples.items():
        assert 1000 * count <= MOST_TUPLES_PER_1000_STATEMENTS * sizes[name], name


def test_the_package_is_no_larger_than_its_budget() -> None:
    trees = syntax_trees("lantern_bench").values()
    size = sum(map(units, trees))
    assert size <= MOST_UNITS
    assert size <= MOST_UNITS_PER_STATEMENT * sum(map(statements, trees))


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


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Public functions of a module, and public methods of its public classes."""
    bodies = [tree.body]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bodies.append(node.body)
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")]


def test_functions_of_three_parameters_explain_them() -> None:
    """The docstrings of commands are their help texts, where each option explains itself."""
    missing = []
    for path, tree in syntax_trees("lantern_bench").items():
        if folder_of(path) == "lantern_bench/cli":
            continue
        for function in public_functions(tree):
            docstring = ast.get_docstring(function) or ""
            if len(parameters(function)) >= 3 and "Args:" not in docstring:
                missing.append(f"{path.relative_to(ROOT)}: {function.name}")
    assert missing == []


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of libraries that a module needs: an import in a `try` has a fallback."""
    libraries = set()
    guarded = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            libraries |= {(name.asname or name.name).split(".")[0] for name in node.names}
        if isinstance(node, ast.Try):
            guarded |= set(node.body)
    for node in ast.walk(tree):
        dotted: list[str] = []
        if isinstance(node, ast.ImportFrom) and node not in guarded:
            dotted = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in libraries:
            dotted = [ast.unparse(node)]
        for name in dotted:
            if re.fullmatch(r"[\w.]+\._[a-z][\w.]*", name) and name != "os._exit":  # documented
                yield name


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._check(True)", ["torch._check"]),
        ("import numpy as np\nnp._core.x", ["np._core.x", "np._core"]),
        ("from torch._dynamo import exc", ["torch._dynamo.exc"]),
        ("try:\n    from torch._dynamo import exc\nexcept ImportError:\n    pass", []),
        ("import torch\ngetattr(torch, '_check', bool)\nself._x.y", []),
        ("import os\nos._exit(0)\nos._wrap_close", ["os._wrap_close"]),
    ],
)
def test_a_private_name_of_a_library_is_found(code: str, found: list[str]) -> None:
    assert list(private_names(ast.parse(code))) == found


def test_private_names_of_libraries_have_fallbacks() -> None:
    found = []
    for path, tree in syntax_trees("lantern_bench").items():
        found += [f"{path.relative_to(ROOT)}: {name}" for name in private_names(tree)]
    assert found == []
