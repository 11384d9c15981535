"""Rules from outside: which are refused, and why, and what changes their fingerprint."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.methods import catalog
from lantern_bench.methods.catalog import DRAFTINGS, MODES, RULES
from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.parameters import ABOVE_0, Parameter
from lantern_bench.methods.plugins import find_rows
from lantern_bench.methods.rules import Rule
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.yaml_file import Source


class Entry(NamedTuple):
    """An entry point that is there already."""

    name: str
    row: object
    dist: object = SimpleNamespace(name="their-package")

    def load(self) -> object:
        return self.row


def some(**changes: Any) -> Rule:
    values: dict[str, Any] = {"name": "mine", "neighbours": 10}
    values["kind"] = "by neighbours"
    values["function"] = lambda draft, values: values["bound"] * draft.p_x
    return Rule(**values | changes)


def number(name: str, **changes: Any) -> Parameter:
    return Parameter(name, ABOVE_0, **{"help": "A number.", **changes})


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("text", "is a str, not a Rule"),
        (some(name="Mine"), "lower-case"),
        (some(name="lantern"), "the name lantern is taken"),
        (some(name="static"), "the name static is taken"),
        (some(drafting="none"), "must be one of static, dynamic"),
        (some(neighbours=0), "at least 1"),
        (some(neighbours="3"), "TypeError"),
        (
            some(function=None),
            "its kind 'by neighbours' does not fit its function",
        ),
        (
            some(kind="strictly"),
            "its kind 'strictly' does not fit its function",
        ),
        (
            some(accept_tree="package:accept"),
            "its kind 'by neighbours' does not fit its accept_tree",
        ),
        (
            some(parameters=(number("my-number"),)),
            "its parameter 'my-number' must be lower-case letters, digits and _",
        ),
        (some(parameters=(number("delta"),)), "the name of its parameter delta is taken"),
        (some(parameters=(number("mine", help=None),)), "needs texts"),
    ],
)
def test_what_cannot_be_used_is_refused(rule: object, wrong: str) -> None:
    taken: dict[str, Parameter | None] = dict.fromkeys([*MODES, *DRAFTINGS, *RULES, "delta"])
    usable, refused = find_rows(
        group="",
        row_class=Rule,
        taken=taken,
        draftings=["static", "dynamic"],
        entry_points=[Entry("entry", rule)],
    )
    assert not usable
    message = refused["entry"].message
    assert re.search(
        f"the rule entry of the package their-package cannot be (used|loaded): .*{wrong}", message
    )


def test_two_rules_or_parameters_of_one_name_are_refused() -> None:
    shared = [some(name=name, bound="size", parameters=(number("size"),)) for name in ("a", "b")]
    entries = [Entry(f"{number}", row) for number, row in enumerate([some(), some(), *shared])]
    usable, refused = find_rows(
        group="", row_class=Rule, taken={}, draftings=["static"], entry_points=entries
    )
    assert list(usable) == ["mine", "a"]
    assert refused["1"].message.endswith("cannot be used: the name mine is taken")
    assert refused["b"].message.endswith(
        "the name of its parameter size is taken "
        "(rules of one package may share one Parameter object)"
    )


def test_rules_and_draftings_may_share_a_parameter() -> None:
    size = number("size")
    taken: dict[str, Parameter | None] = {}
    drafts = Drafting("drafts", make="module:make", about="of mine", parameters=(size,))
    find_rows("", Drafting, taken, entry_points=[Entry("drafts", drafts)])
    rules = [some(name=name, bound="size", parameters=(size,)) for name in ("a", "b")]
    other = some(name="c", bound="size", parameters=(number("size", help="Another."),))
    named_so = some(name="size")
    entries = [Entry(row.name, row) for row in (*rules, other, named_so)]
    usable, refused = find_rows(
        group="", row_class=Rule, taken=taken, draftings=["static"], entry_points=entries
    )
    assert list(usable) == ["a", "b"]
    assert set(refused) == {"c", "size"}


def test_names_may_have_hyphens() -> None:
    usable, refused = find_rows(
        group="",
        row_class=Rule,
        taken={},
        draftings=["static"],
        entry_points=[Entry("any", some(name="my-own-rule"))],
    )
    assert list(usable) == ["my-own-rule"]
    assert not refused
    drafts = Drafting("my-drafts", make="module:make", about="of mine")
    assert list(
        find_rows(
            group="",
            row_class=Drafting,
            taken={},
            draftings=(),
            entry_points=[Entry("any", drafts)],
        )[0]
    ) == ["my-drafts"]


def test_an_unusable_row_is_named_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        catalog.REFUSED,
        "mine",
        RefusedError("the rule mine of the package theirs cannot be loaded"),
    )
    data = {"name": "x", "model": "tiny", "cells": [{"mode": "speculative"}]}
    for asked in ({}, {"rule": "mine"}, {"mode": "mine"}):
        source = Source("x", Path(), {**data, "cells": [{**data["cells"][0], **asked}]})
        if asked:
            with pytest.raises(RefusedError, match="of the package theirs"):
                load_experiment(source, {"tiny": {}})
        else:
            assert load_experiment(source, {"tiny": {}}).cells


COOL = {"mode": "cool-sd", "strength": 1.5}


def test_parameters_of_a_rule_are_in_ids_columns_and_settings() -> None:
    plain, other = (Decoding(**COOL | extra) for extra in ({}, {"decay": 0.2}))
    assert plain.cell_id == "cool-sd-static-eagle1-25-strength1.5-t1"
    assert other.cell_id == plain.cell_id + "-decay0.2"
    assert (plain.columns()["decay"], other.columns()["decay"], other.columns()["strength"]) == (
        0.7,
        0.2,
        1.5,
    )
    assert (
        plain.columns()["residual"]
        is plain.columns()["neighbours"]
        is plain.columns()["cluster"]
        is None
    )
    for decoding in (plain, other):
        assert Decoding(**decoding.settings()) == decoding
    ablation = Decoding(mode="lantern", rule="gsd", cluster=3, residual="official")
    assert ablation.cell_id == "lantern-dynamic-58n5d10b-gsd-cluster3-t1-residualofficial"
    assert "decay" not in Decoding(mode="lantern", delta=0.1).cell_id


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"mode": "cool-sd"}, "needs strength; write strength: 1.1"),
        (COOL | {"strength": 0}, "must be a number above 0"),
        (COOL | {"cluster": 3}, "cluster does not belong here: it is for the rule gsd"),
        (COOL | {"epsilon": 0.1}, "does not belong here"),
        ({"mode": "lantern", "delta": 0.1, "bound": 0.1}, "bound does not belong here"),
        ({"mode": "lantern", "delta": 0.1, "decay": 0.3}, "decay does not belong here"),
        ({"mode": "gsd", "cluster": 1}, "must be a whole number of at least 2"),
        ({"mode": "typical", "epsilon": 1}, "must lie strictly between 0 and 1"),
    ],
)
def test_parameters_of_rules_are_checked(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Decoding(**values)


def test_a_rule_of_chance_is_strict_at_temperature_0() -> None:
    greedy = Decoding(**COOL | {"decay": 0.1, "temperature": 0})
    assert (greedy.rule, greedy.value("strength"), greedy.value("decay")) == ("strict", None, None)
    assert greedy.cell_id == "cool-sd-static-eagle1-25-t0"
    assert greedy == Decoding(**COOL | {"strength": 2, "temperature": 0})
    assert Decoding(mode="entropy", entropy_scale=0.1, temperature=0).rule == "entropy"


def test_a_fingerprint_is_of_the_file_that_the_code_stands_in(tmp_path: Path) -> None:
    prints = set()
    for text in (
        "def limit(draft, values):\n    return draft.p_x\n",
        "def limit(draft, values):\n    return draft.neighbour_p\n",
    ):
        path = tmp_path / "rule.py"
        path.write_text(text)
        space: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), space)
        prints.add(some(function=space["limit"]).fingerprint())
    assert len(prints) == 2
    assert all(len(digits) == 16 for digits in [*prints, some(function=None).fingerprint()])
