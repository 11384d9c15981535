"""The layout of the package: a name for a file once, and folders whose limits are written down.

That imports only go down, and in no circle, is checked by the contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lantern_bench"
# A name that is found in two folders makes the reader look twice.
ANYWHERE = {"__init__", "__main__"}
MOST_MODULES = 13


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def test_a_module_name_exists_once() -> None:
    names = Counter(path.stem for path in modules())
    assert [name for name, count in names.items() if count > 1 and name not in ANYWHERE] == []


def test_no_folder_is_crowded() -> None:
    folders = Counter(path.parent for path in modules() if path.stem not in ANYWHERE)
    crowded = {folder: count for folder, count in folders.items() if count > MOST_MODULES}
    assert crowded == {}


def test_every_folder_says_what_may_be_inside() -> None:
    for path in modules():
        if path.stem == "__init__" and path.parent != Path():
            tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), path
            if path.parent != Path("methods"):
                assert len(tree.body) == 1, f"{path}: has code beside its docstring"
