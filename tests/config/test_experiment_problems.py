"""What is wrong with an experiment is expected at once, in plain words, with its place and what to
type.

The words are compared in full where people will meet them most.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.settings import Overrides, decimal_commas
from lantern_bench.methods.catalog import MODES
from lantern_bench.utils.errors import UserError

ALL_MODES = ", ".join(MODES)
MODELS: dict[str, dict[str, Any]] = {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}


def message(folder: Path, text: str, flags: dict[str, Any] | None = None, **more: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_experiment(path, MODELS, Overrides.from_flags(flags or {}, **more))
    return caught.value.message.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (
            "{mode: lanten}",
            "cells[0].mode lanten: unknown mode; did you mean lantern? "
            f"(must be one of {ALL_MODES})",
        ),
        ("{mode: lantern, delta: 1.5}", "cells[0].delta 1.5: must lie strictly between 0 and 1"),
        ("{mode: lantern, delta: 0}", "cells[0].delta 0: must lie strictly between 0 and 1"),
        ("{mode: lantern, delta: nan}", "cells[0].delta nan: must lie strictly between 0 and 1"),
        ("{mode: lantern, delta:}", "cells[0].delta (empty): must lie strictly between 0 and 1"),
        ("{mode: lantern, delta: true}", "cells[0].delta true: must lie strictly between 0 and 1"),
        ("{mode: lantern, delta: [0.1, 2]}", "cells[0].delta 2: must lie strictly between 0 and 1"),
        ("{mode: lantern, delta: []}", "cells[0].delta: an empty list; give at least one value"),
        ("{mode: lantern++, lambda: 1}", "cells[0].lambda 1: must be a number above 1"),
        (
            "{mode: ar, temperature: -1}",
            "cells[0].temperature -1: must be a number of at least 0 (0 is greedy)",
        ),
        ("{mode: ar, top_p: 0}", "cells[0].top_p 0: must be above 0 and at most 1 (1 is off)"),
        (
            "{mode: ar, top_k: -1}",
            "cells[0].top_k -1: must be a whole number of at least 0 (0 is off)",
        ),
        (
            "{mode: ar, top_k: 2.5}",
            "cells[0].top_k 2.5: must be a whole number of at least 0 (0 is off)",
        ),
        (
            "{mode: ar, cfg_scale: -2}",
            "cells[0].cfg_scale -2: must be a number of at least 0 (1 is off)",
        ),
        (
            "{mode: lantern, delta: 0.1, neighbours: -1}",
            "cells[0].neighbours -1: must be a whole number of at least 0",
        ),
        (
            "{mode: lantern, delta: 0.1, beam: 0}",
            "cells[0].beam 0: must be a whole number of at least 1",
        ),
        (
            "{mode: lantern, delta: 0.1, residual: exat}",
            "cells[0].residual exat: unknown value; did you mean exact? "
            "(must be one of exact, official)",
        ),
        (
            "{mode: speculative, delta: 0.1}",
            "cells[0].delta 0.1: mode speculative has the drafting static and the rule "
            "strict; delta belongs to the rule additive",
        ),
        (
            "{mode: lantern, lambda: 2}",
            "cells[0].lambda 2.0: mode lantern has the drafting dynamic and the rule additive; "
            "lambda belongs to the rule multiplicative",
        ),
        (
            "{mode: lantern, delta: 0.1, tree: small-7}",
            "cells[0].tree small-7: mode lantern has the drafting dynamic and "
            "the rule additive; tree belongs to the drafting static",
        ),
        (
            "{mode: ar, neighbours: 5}",
            "cells[0].neighbours 5: mode ar has the drafting none and the rule none; "
            "neighbours belongs to the rules additive, multiplicative and entropy",
        ),
        (
            "{mode: ar, drafting: static}",
            "cells[0].drafting static: mode ar drafts nothing and has no drafting; leave it out",
        ),
        (
            "{mode: lantern, drafting: none}",
            "cells[0].drafting none: mode lantern needs a drafting; "
            "without drafting write mode: ar",
        ),
        (
            "{mode: speculative, tree: smal-7}",
            "cells[0].tree smal-7: unknown tree; did you mean small-7? (the trees are "
            "chain-3, chain-4, chain-5, chain-6, chain-7, small-7, eagle1-25, balanced-25, "
            "deep-25, extended-57, "
            "medusa-63; or @FILE, or a list of paths)",
        ),
        (
            "{mode: speculative, tree: [[0], [2]]}",
            "cells[0].tree [[0], [2]]: the path [2] leaves a gap: its sibling [1] is "
            "missing. Number the children of a node 0, 1, 2, ... without gaps.",
        ),
        (
            "{mode: lantern, delta: 0.1, depth: 1, nodes: 20}",
            "cells[0].nodes 20: depth 1 and beam 10 make only 10 candidates",
        ),
        ("{mode: ar, dephth: 3}", "cells[0].dephth: unknown key; did you mean depth?"),
        ("{mode: ar, top-k: 3}", "cells[0].top-k: unknown key; did you mean top_k?"),
        (
            "{mode: ar, images: 3}",
            "cells[0].images: belongs at the top level of the file, not here",
        ),
        ("{delta: 0.3}", f"cells[0]: has no mode; the modes are {ALL_MODES}"),
        ("5", "cells[0] 5: must be a cell such as {mode: lantern, delta: 0.1}"),
        ("{mode: ar, model: 5}", "cells[0].model 5: must be a model's name or a list of names"),
        (
            "{mode: ar, model: other}",
            "cells[0]: the model other is not among the experiment's models (lanterns)",
        ),
        (
            "{mode: lantern}",
            "cells[0]: mode lantern has the rule additive and needs delta; "
            "write delta: 0.02 in the cell, or type --delta 0.02",
        ),
        (
            "{mode: lantern, drafting: static, rule: multiplicative}",
            "cells[0]: mode lantern has the rule multiplicative and "
            "needs lambda; write lambda: 2 in the cell, or type --lambda 2",
        ),
        (
            "{mode: lantern, delta: [0.1, 0.1000000001]}",
            "two cells differ too little to be told apart by name: "
            "lantern-dynamic-58n5d10b-k20-delta0.1-t1",
        ),
    ],
)
def test_a_cell_that_is_wrong(tmp_path: Path, cell: str, expected: str) -> None:
    location = "mine.yaml: cells: " if expected.startswith("two cells") else "mine.yaml line 3: "
    assert message(tmp_path, f"model: lanterns\ncells:\n  - {cell}\n") == location + expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("imges: 3", "line 3: imges: unknown key; did you mean images?"),
        ("images: 0", "line 3: images 0: must be a whole number of at least 1"),
        ("seed: -1", "line 3: seed -1: must be a whole number of at least 0"),
        (
            "metrics: [sped]",
            "line 3: metrics sped: must be a list of speed, quality and distance; "
            "did you mean speed?",
        ),
        (
            "dtype: float23",
            "line 3: dtype float23: must be one of auto, float32, bfloat16, float16; "
            "did you mean float32?",
        ),
        ("device: gpu", "line 3: device gpu: must be auto, cpu, mps, cuda or cuda:N"),
        ("compile: maybe", "line 3: compile maybe: must be true or false"),
        ("name: a/b", "line 3: name a/b: must be letters, digits and . _ + - (it names a folder)"),
        ("name:", "line 3: name (empty): must be letters, digits and . _ + - (it names a folder)"),
        ("delta: 7", "line 3: delta 7: must lie strictly between 0 and 1"),
        ("mode: ar", "line 3: mode: belongs in cells, for example: cells: [{mode: lantern}]"),
        (
            "models: {lantens: {}}",
            "line 3: models.lantens: the model lantens is not among the experiment's models "
            "(lanterns)",
        ),
        (
            "models: {lanterns: {delta: 3}}",
            "line 3: models.lanterns.delta 3: must lie strictly between 0 and 1",
        ),
        (
            "models: {lanterns: {batch: 3}}",
            "line 3: models.lanterns.batch: belongs at the top level of the file, not here",
        ),
        (
            "models: {lanterns: {images: 0}}",
            "line 3: models.lanterns.images 0: must be a whole number of at least 1",
        ),
        (
            "models: [lanterns]",
            "line 3: models ['lanterns']: must be a mapping of model names to values",
        ),
        ("model: lanterns", "line 3: model: is written twice"),
        ("paper: 3", "line 3: paper 3: must be a mapping"),
    ],
)
def test_a_top_level_that_is_wrong(tmp_path: Path, line: str, expected: str) -> None:
    assert (
        message(tmp_path, f"model: lanterns\ncells: [{{mode: ar}}]\n{line}\n")
        == f"mine.yaml {expected}"
    )


@pytest.mark.parametrize(
    ("flags", "more", "expected"),
    [
        ({"delta": "1.5"}, {}, "--delta 1.5: must lie strictly between 0 and 1"),
        ({"delta": "0.1,x"}, {}, "--delta x: must lie strictly between 0 and 1"),
        ({"lambda": "1"}, {}, "--lambda 1: must be a number above 1"),
        ({"top-k": -3}, {}, "--top-k -3: must be a whole number of at least 0 (0 is off)"),
        ({"cfg_scale": "-1"}, {}, "--cfg-scale -1: must be a number of at least 0 (1 is off)"),
        ({"images": "0"}, {}, "--images 0: must be a whole number of at least 1"),
        ({"seed": "1,2"}, {}, "--seed 1,2: takes one value"),
        (
            {"model": "lantens"},
            {},
            "--model lantens: unknown model; did you mean lanterns? (the models are lanterns)",
        ),
        (
            {"filter-order": "k"},
            {},
            "--filter-order k: unknown value (must be one of top_k_first, top_p_first)",
        ),
        (
            {},
            {"modes": "lantern+"},
            f"--modes lantern+: unknown mode; did you mean lantern++? (must be one of {ALL_MODES})",
        ),
        (
            {"delta": 0.1},
            {"modes": "speculative"},
            "--delta 0.1: reaches no cell: it belongs to the rule additive, "
            "and the modes here are ar, speculative",
        ),
        ({}, {"settings": ["beam=0"]}, "--set beam=0: must be a whole number of at least 1"),
        ({}, {"settings": ["bean=3"]}, "--set bean=3: unknown key; did you mean beam?"),
        (
            {},
            {"settings": ["foo=1"]},
            "--set foo=1: unknown key (`lantern-bench sweep --help-all` lists the keys, as flags)",
        ),
        (
            {"images": "1e6"},
            {},
            "--images 1e6: must be a whole number of at least 1; write 1000000",
        ),
        (
            {"batch": "1,8.0e0"},
            {},
            "--batch 8.0e0: must be a whole number of at least 1, or a list of them; write 8",
        ),
        (
            {},
            {"settings": ["beam=1e1"]},
            "--set beam=1e1: must be a whole number of at least 1; write 10",
        ),
        ({}, {"settings": ["beam"]}, "--set beam: must have the form key=value"),
        (
            {},
            {"settings": ["mode=ar"]},
            "--set mode=ar: unknown key; cells are picked with --modes",
        ),
        (
            {"tree": "[[0], [2]]"},
            {},
            "--tree [[0], [2]]: the path [2] leaves a gap: its sibling [1] is missing. "
            "Number the children of a node 0, 1, 2, ... without gaps.",
        ),
        ({"delta": "[0.1"}, {}, "--delta [0.1: not a valid list"),
        (
            {"rule": "block", "tree": "small-7", "drafting": "static"},
            {"modes": "speculative"},
            "--tree small-7: the rule block needs a chain of "
            "sampled drafts, and it is not one; the tree chain-5 is",
        ),
        (
            {"rule": "block", "drafting": "dynamic"},
            {"modes": "speculative"},
            "--rule block: the rule block needs a chain "
            "of sampled drafts, and the drafting dynamic is not one; the tree chain-5 is",
        ),
    ],
)
def test_a_flag_that_is_wrong(flags: dict[str, Any], more: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment("lanterns", MODELS, Overrides.from_flags(flags, **more))
    assert caught.value.message.split(": while")[0] == expected


def test_a_grid_without_cells(tmp_path: Path) -> None:
    text = "model: lanterns\ncells: [{mode: ar}]\n"
    assert message(tmp_path, text, {"baseline": False}) == "--no-baseline: leaves no cell to run"


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
model: lanterns
imges: 3
temperature: -1
cells:
  - {mode: lanten}
  - mode: lantern
    delta: [0.1, 1.5]
    speed: 3
  - {mode: speculative, delta: 0.1}
"""
    assert message(tmp_path, text, {"images": 0, "beam": -1}).split("\n") == [
        "mine.yaml: 8 problems",
        "  line 2: imges: unknown key; did you mean images?",
        "  line 3: temperature -1: must be a number of at least 0 (0 is greedy)",
        "  line 5: cells[0].mode lanten: unknown mode; did you mean lantern? "
        f"(must be one of {ALL_MODES})",
        "  line 7: cells[1].delta 1.5: must lie strictly between 0 and 1",
        "  line 8: cells[1].speed: unknown key; did you mean seed_set?",
        "  line 9: cells[2].delta 0.1: "
        "mode speculative has the drafting static and the rule strict; "
        "delta belongs to the rule additive",
        "  --beam -1: must be a whole number of at least 1",
        "  --images 0: must be a whole number of at least 1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "mine.yaml: the file is empty"),
        ("- 1", "mine.yaml: must be a mapping of keys to values, not a list"),
        (
            "model: lanterns",
            "mine.yaml: cells: must be a list of cells, for example: "
            "cells: [{mode: ar}, {mode: lantern, delta: 0.1}]",
        ),
        (
            "model: lanterns\ncells: []",
            "mine.yaml line 2: cells: must be a list of cells, for example: "
            "cells: [{mode: ar}, {mode: lantern, delta: 0.1}]",
        ),
        (
            "cells: [{mode: ar}]",
            "mine.yaml: model: missing; must be a model's name or a list of names",
        ),
        (
            "model: lanterns\ncells:\n  - {mode: ar",
            "mine.yaml line 3, column 14: not valid YAML: "
            "while parsing a flow mapping, expected ',' or '}', but got '<stream end>'",
        ),
        (
            "model: &a [*a]\ncells: [{mode: ar}]",
            "mine.yaml line 1, column 12: not valid YAML: "
            "the alias *a cannot be used here; write the value again",
        ),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, text) == expected


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such experiment file"):
        load_experiment(tmp_path / "none.yaml", MODELS)
    with pytest.raises(UserError, match="no such experiment file"):
        load_experiment(tmp_path, MODELS)
    with pytest.raises(
        UserError, match="no experiment is named 'lantrns'; did you mean lanterns\\?"
    ):
        load_experiment("lantrns", MODELS)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml line 1: the file is in UTF-16"):
        load_experiment(tmp_path / "binary.yaml", MODELS)
    (tmp_path / "windows.yaml").write_bytes(b"name: a\ndescription: caf\xe9\n")
    with pytest.raises(UserError, match=r"windows.yaml line 2: byte 0xe9 is not UTF-8"):
        load_experiment(tmp_path / "windows.yaml", MODELS)
    (tmp_path / "control.yaml").write_bytes(b"name: \x01")
    with pytest.raises(UserError, match="not valid YAML"):
        load_experiment(tmp_path / "control.yaml", MODELS)


WORDS = st.sampled_from(
    ["ar", "lantern", "lantern++", "speculative", "chain", "static", "dynamic", "none", "strict"]
)
SCALARS = (
    WORDS
    | st.none()
    | st.booleans()
    | st.integers(-2, 60)
    | st.floats()
    | st.text(max_size=3)
    | st.dates()
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=2),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["mode", "drafting", "rule", "tree", "nodes", "depth", "beam", "neighbours", "delta", "lambda"]
)
KEYS |= st.sampled_from(
    ["residual", "temperature", "top_k", "cfg_scale", "model", "images", "seed", "name", "paper"]
)
KEYS |= st.sampled_from(
    ["models", "model_defaults", "cells", "metrics", "prompts", "batch", "baseline", "device"]
)
BLOCKS = st.dictionaries(KEYS, ANYTHING, max_size=4)
CELLS = st.builds(lambda cell, mode: {"mode": mode} | cell, BLOCKS, WORDS)
FILES = st.fixed_dictionaries(
    {
        "model": st.just("lanterns") | ANYTHING,
        "cells": st.lists(CELLS | ANYTHING, max_size=3) | ANYTHING,
    },
    optional={
        "models": st.dictionaries(WORDS, BLOCKS, max_size=2),
        "model_defaults": BLOCKS,
        "delta": ANYTHING,
    },
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, BLOCKS, st.dictionaries(KEYS, st.lists(SCALARS, min_size=1, max_size=2), max_size=2))
def test_whatever_is_written_is_understood_or_refused(
    tmp_path: Path, data: dict[str, Any], more: dict[str, Any], flags: dict[str, Any]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(more | data), encoding="utf-8")
    try:
        experiment = load_experiment(path, MODELS, Overrides(flags))
    except UserError as error:
        assert error.message
    else:
        assert experiment.run_name


@pytest.mark.parametrize(
    ("line", "reading"),
    [
        ("images: 010", "YAML reads 010 as the number 8"),
        ("images: 0x10", "YAML reads 0x10 as the number 16"),
        ("images: 0b11", "YAML reads 0b11 as the number 3"),
        ("images: 1_000", "YAML reads 1_000 as the number 1000"),
        ("seed: 12:30", "YAML reads 12:30 as the number 750"),
        ("seed: 1:2:3.5", "YAML reads 1:2:3.5 as the number 3723.5"),
        ("temperature: 1_0.5", "YAML reads 1_0.5 as the number 10.5"),
        ("name: 0o", ""),
        ("name: 2026-11-25", ""),
        ("name: '010'", ""),
        ("temperature: .5", ""),
        ("temperature: 1.", ""),
        ("temperature: 1.5e+0", ""),
        ("seed: +10", ""),
    ],
)
def test_numbers_that_yaml_reads_otherwise_than_they_look(
    tmp_path: Path, line: str, reading: str
) -> None:
    text = f"model: lanterns\n{line}\ncells: [{{mode: ar}}]\n"
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    if not reading:
        load_experiment(path, MODELS)
        return
    with pytest.raises(UserError) as caught:
        load_experiment(path, MODELS)
    assert f"mine.yaml line 2, column {line.index(':') + 3}" in caught.value.message
    assert f"{reading}; write a plain decimal number, or a text in quotes" in caught.value.message


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (
            "name: 2026",
            "it names a folder); YAML reads it as a number or a switch, so put it in qu",
        ),
        ("prompts: no", "or a file; YAML reads it as a number or a switch, so put it in quotes"),
        ("images: 1e6", "images 1e6: must be a whole number of at least 1; write 1000000"),
        ("temperature: 0,7", "(0 is greedy); a decimal number is written 0.7"),
    ],
)
def test_the_cause_of_a_wrong_value_is_named(tmp_path: Path, line: str, hint: str) -> None:
    assert hint in message(tmp_path, f"model: lanterns\n{line}\ncells: [{{mode: ar}}]\n")


def test_a_negative_number_is_not_proposed_again(tmp_path: Path) -> None:
    said = message(tmp_path, "model: lanterns\nimages: -1\ncells: [{mode: ar}]\n")
    assert said.endswith("images -1: must be a whole number of at least 1")


def test_a_flag_and_a_setting_that_differ_are_refused() -> None:
    flags = {"images": 2, "temperature": ["1,2"]}
    overrides = Overrides.from_flags(flags, settings=["images=2", "temperature=1,2"])
    assert overrides.values == {"images": ["2"], "temperature": ["1", "2"]}
    for typed in (["images=3"], ["temperature=1"], ["seed=1", "seed=[2]"]):
        with pytest.raises(UserError, match="the same key has another value before it"):
            Overrides.from_flags(flags, settings=typed)
    assert Overrides.from_flags({}, settings=["images=[2, 3]"]).values == {"images": [2, 3]}


def test_a_list_of_integers_may_have_decimal_commas() -> None:
    def notes(settings: list[str] | None = None, **flags: Any) -> list[str]:
        return decimal_commas(flags, settings)

    said = "read as 2 values, 0 and 7. A decimal number is written 0.7."
    assert notes(temperature=["0,7"]) == [f"--temperature 0,7: {said}"]
    assert notes(["temperature=0,7"]) == [f"--set temperature=0,7: {said}"]
    assert notes(lambda_=["1,0"], cfg_scale=["3,5"], top_p=None) == [
        "--lambda 1,0: read as 2 values, 1 and 0. A decimal number is written 1.0.",
        "--cfg-scale 3,5: read as 2 values, 3 and 5. A decimal number is written 3.5.",
    ]
    assert notes(temperature=["0,75,1"]) == [
        "--temperature 0,75,1: read as 3 values, 0, 75 and 1. A decimal number is written 0.75."
    ]
    assert not notes(["depth=1,2"], temperature=["0.7,1", "[0, 7]", "7"], beam=["1,2"])
