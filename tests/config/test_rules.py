"""Rules from outside: which are refused, and why, and what changes their fingerprint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.methods import DRAFTINGS, MODES, OUTSIDE_RULES, RULES
from lantern_bench.plugins import Rule, find_rows


class Entry(NamedTuple):
    """An entry point that is there already."""

    name: str
    row: object

    def load(self) -> object:
        return self.row


def some(**changes: Any) -> Rule:
    values: dict[str, Any] = {"name": "mine", "limit": lambda draft, bound: bound * draft.own}
    return Rule(**{**values, "low": 0, "high": 2, "example": 1, **changes})


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("text", "no lantern_bench.plugins.Rule but str"),
        (some(name="Mine"), "lower-case"),
        (some(name="lantern"), "the name lantern is taken"),
        (some(name="static"), "the name static is taken"),
        (some(drafting="none"), "must be one of static, dynamic"),
        (some(example=2), "example 2 must lie strictly between 0 and 2"),
        (some(neighbours=0), "at least 1"),
    ],
)
def test_what_cannot_be_used_is_refused(rule: object, wrong: str) -> None:
    taken = {*MODES, *DRAFTINGS, *RULES}
    found, refused = find_rows("", Rule, taken, ["static", "dynamic"], [Entry("entry", rule)])
    assert not found
    assert re.search(f"the rule entry cannot be used: .*{wrong}", refused[0].message)


def test_two_rules_of_one_name_are_refused() -> None:
    found, refused = find_rows("", Rule, (), ["static"], [Entry("one", some()), Entry("two", some())])
    assert list(found) == ["mine"]
    assert [error.message for error in refused] == ["the rule two cannot be used: the name mine is taken"]


def test_a_fingerprint_is_of_the_file_that_the_code_stands_in(tmp_path: Path) -> None:
    prints = set()
    for text in (
        "def limit(draft, bound):\n    return draft.own\n",
        "def limit(draft, bound):\n    return draft.near\n",
    ):
        path = tmp_path / "rule.py"
        path.write_text(text)
        space: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), space)
        prints.add(some(limit=space["limit"]).fingerprint())
    assert len(prints) == 2
    assert all(len(one) == 16 for one in [*prints, some(limit=None).fingerprint()])


def test_without_packages_there_are_the_shipped_rules_only() -> None:
    assert {"none", "strict", "block", "additive", "multiplicative"} <= set(RULES) - set(OUTSIDE_RULES)
    assert {name for name, rule in RULES.items() if not rule.lossless} >= {"additive", "multiplicative"}
    with pytest.raises(ValueError, match="bound does not belong here"):
        Decoding.model_validate({"mode": "lantern", "delta": 0.1, "bound": 0.1})
