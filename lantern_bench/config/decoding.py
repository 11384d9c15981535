"""One decoding configuration with every value decided, and the name that it gives a cell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lantern_bench.methods.catalog import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    RULES,
    chain_problem,
    defaults_for,
    fresh_drafts_problem,
    has_parameter,
    owners_of,
    raise_if_refused,
)
from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.methods.rules import Rule
from lantern_bench.methods.static_trees import (
    MOST_NODES,
    STATIC_TREES,
    Topology,
    check_topology,
    is_chain,
    topology_name,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Location, Problems, load_yaml

_ROWS: Mapping[str, Collection[str]] = {"mode": MODES, "drafting": DRAFTINGS, "rule": RULES}
STRUCTURE = tuple(_ROWS)
"""The parameters that decide which others a cell has."""


class ParameterError(ValueError):
    """A value that a cell cannot have."""

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(f"{key} {text}" if key else text)
        self.text = text  # the sentence that follows the parameter and its value
        self.key = key  # the parameter at fault; None: no single one is


class MissingValueError(ParameterError):
    """A parameter without a default has no value."""


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(PARAMETERS[key].kind.type)


def check_value(key: str, value: object, folder: Path = Path()) -> Any:
    """Return a value of a parameter as its type; `folder` is where `@FILE` of a tree starts.

    Raises `ParameterError`, and `RefusedError` for an installed row that cannot be used.
    """
    if key == "tree":
        return _check_tree(value, folder)
    parameter = PARAMETERS[key]
    choices = _ROWS.get(key, parameter.kind.choices)
    if isinstance(value, str) and value in choices:
        return value
    if choices:
        raise_if_refused(value)
        noun = "mode" if key == "mode" else "value"
        hint = did_you_mean(value, choices)
        raise ParameterError(f"unknown {noun}{hint} (must be one of {', '.join(choices)})", key)
    try:
        return _adapter(key).validate_python(value)
    except ValidationError as error:
        if (most := parameter.kind.most) is not None and error.errors()[0][
            "type"
        ] == "less_than_equal":
            raise ParameterError(f"must be at most {most:,}", key) from error
        remark = f" ({parameter.remark})" if parameter.remark else ""
        raise ParameterError(parameter.kind.allowed + remark, key) from error


def read_values(
    key: str, written: object, location: Location, problems: Problems, folder: Path = Path()
) -> tuple[Any, ...]:
    """Return the checked values of a parameter; a list is a grid. Wrong values go to `problems`."""
    values = (
        written
        if isinstance(written, list) and not (key == "tree" and is_tree(written))
        else [written]
    )
    if not values:
        problems.add(location, "an empty list; give at least one value")
    checked = []
    for value in values:
        try:
            checked.append(check_value(key, value, folder))
        except ParameterError as error:
            problems.add(location, error.text, "(empty)" if value is None else value)
    return tuple(checked)


def is_tree(value: object) -> bool:
    """Whether a value is one tree (a list of paths), and not a name or a grid of trees."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(path, list | tuple) for path in value
    ):
        return False
    ranks = [rank for path in value for rank in path]
    return bool(value) and not any(isinstance(rank, list | tuple) for rank in ranks)


def _check_tree(value: object, folder: Path) -> str | Topology:
    """Return the name of a tree, or its checked paths."""
    if isinstance(value, str) and value.startswith("@"):
        try:
            value = load_yaml((folder / value[1:]).read_text(encoding="utf-8"), value[1:])[0]
        except (OSError, ValueError, UserError) as error:
            raise ParameterError(
                f"cannot be read as a tree: {' '.join(str(error).split())}", "tree"
            ) from error
    if isinstance(value, str):
        if value not in STATIC_TREES:
            allowed = f"the trees are {', '.join(STATIC_TREES)}; or @FILE, or a list of paths"
            raise ParameterError(
                f"unknown tree{did_you_mean(value, STATIC_TREES)} ({allowed})", "tree"
            )
        return value
    if not is_tree(value):
        allowed = (
            "must be a tree's name, @FILE, or a list of child-rank paths such as [[0], [1], [0, 0]]"
        )
        raise ParameterError(allowed, "tree")
    try:
        topology = check_topology(value)  # type: ignore[arg-type]  # is_tree has looked at it
    except UserError as error:
        raise ParameterError(
            error.message + (f". {error.advice}" if error.advice else ""), "tree"
        ) from error
    name = topology_name(topology)
    return name if name in STATIC_TREES else topology


@dataclass(frozen=True, init=False)
class Decoding:
    """A mode, its drafting and rule, and a value for every parameter that they have.

    Each parameter is also an attribute (`decoding.temperature`), None if the cell lacks it.
    """

    mode: str
    drafting: str
    rule: str
    parameters: tuple[tuple[str, Any], ...]  # name and value, in the order of `PARAMETERS`
    paths: Topology  # of a static tree, as `check_topology`; empty without one
    cfg_default: float  # the model's own scale, which the id leaves out

    def __init__(
        self,
        mode: str,
        *,
        cfg_default: float = 1.0,
        model_defaults: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        """Check the values (`lambda_` for `lambda`; None: not given); the others are defaults.

        Raises `ParameterError`.
        """
        values = {
            key.removesuffix("_"): value for key, value in values.items() if value is not None
        }
        for key in values:
            if key not in PARAMETERS:
                raise ParameterError(f"is no parameter{did_you_mean(key, PARAMETERS)}", key)
        mode = check_value("mode", mode)
        drafting = check_value("drafting", values.pop("drafting", MODES[mode].drafting))
        rule = check_value("rule", values.pop("rule", MODES[mode].rule))
        for key, value in (("drafting", drafting), ("rule", rule)):
            if mode == "ar" and value != "none":
                raise ParameterError(f"mode ar drafts nothing and has no {key}; leave it out", key)
            if mode != "ar" and value == "none":
                raise ParameterError(
                    f"mode {mode} needs a {key}; without drafting write mode: ar", key
                )
        for key in values:
            if not has_parameter(key, drafting, rule):
                raise ParameterError(f"does not belong here: it is for {owners_of(key)}", key)
        values = {key: check_value(key, value) for key, value in values.items()}
        defaults = DRAFTINGS[drafting].adapt(
            defaults_for(drafting=drafting, rule=rule, mode=mode, of_model=model_defaults), values
        )
        values = {
            key: value for key, value in defaults.items() if has_parameter(key, drafting, rule)
        } | values
        paths: Topology = ()
        if (tree := values.get("tree")) is not None:
            paths = STATIC_TREES[tree] if isinstance(tree, str) else check_topology(tree)
            values["tree"] = topology_name(paths)
        _check_together(values=values, mode=mode, drafting=drafting, rule=rule, paths=paths)
        # it uses no filters and no residual (docs/algorithms.md, section 3)
        if values["temperature"] == 0:
            values |= {
                key: PARAMETERS[key].default for key in values if PARAMETERS[key].sampled_only
            }
            rule = RULES[rule].greedy_rule
            values = {
                key: value for key, value in values.items() if has_parameter(key, drafting, rule)
            }
        ordered = tuple((key, values[key]) for key in PARAMETERS if key in values)
        fields = (mode, drafting, rule, ordered, paths, cfg_default)
        self.__dict__.update(zip(self.__dataclass_fields__, fields, strict=True))  # it is frozen

    def __getattr__(self, name: str) -> Any:
        key = name.removesuffix("_")  # `lambda` is a keyword of Python
        if key in PARAMETERS:
            return self.value(key)
        raise AttributeError(f"a decoding has no {name}")

    @cached_property
    def _values(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "drafting": self.drafting,
            "rule": self.rule,
            **dict(self.parameters),
        }

    def value(self, key: str) -> Any:
        """Return the value of a parameter, None if the cell lacks it."""
        return self._values.get(key)

    def changed(self, **values: Any) -> Decoding:
        """Return this decoding with other values."""
        return Decoding(**{**self.settings(), **values}, cfg_default=self.cfg_default)

    def autoregressive(self) -> Decoding:
        """Return autoregressive decoding with the same sampling."""
        return Decoding(
            "ar", cfg_default=self.cfg_default, **{key: self.value(key) for key in SAMPLING}
        )

    @property
    def drafting_row(self) -> Drafting:
        """The row of the drafting."""
        return DRAFTINGS[self.drafting]

    @property
    def rule_row(self) -> Rule:
        """The row of the acceptance rule."""
        return RULES[self.rule]

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution."""
        return self.rule_row.lossless and self.drafting_row.lossless

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return self.drafting_row.drafts

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy (temperature 0)."""
        return bool(self.value("temperature") == 0)

    @property
    def branches(self) -> bool:
        """Whether a node of the draft may have several children."""
        is_tree_a_chain = bool(self.paths) and is_chain(self.paths)
        return self.drafts and not self.drafting_row.chain and not is_tree_a_chain

    @property
    def draft_nodes(self) -> int:
        """How many nodes a draft has below the root, for estimates of memory; 0: its row does not say."""
        return len(self.paths) or self.drafting_row.nodes(self._values)

    @property
    def tree_label(self) -> str | None:
        """How ids and tables write the drafts: a static tree's name, `58n5d10b`, `w16`; None without a draft."""
        return self.drafting_row.label(self._values)

    @cached_property
    def cell_id(self) -> str:
        """A name of all values that matter, without the model: letters, digits, `.`, `+`, `_` and `-`."""
        words = [self.mode]
        if self.drafts:
            words.append(
                self.drafting if self.tree_label is None else f"{self.drafting}-{self.tree_label}"
            )
        if self.rule_row.in_id and MODES[self.mode].rule != self.rule:
            words.append(self.rule)
        always = []
        changed = []
        for key, value in self.parameters:
            parameter = PARAMETERS[key]
            default = self.cfg_default if key == "cfg_scale" else parameter.default
            if parameter.in_id == "always":
                always.append((parameter.short or key) + word_of(value))
            elif parameter.in_id == "changed" and value != default:
                changed.append((key + word_of(value)).replace("_", ""))
        return "-".join([*words, *always, *changed])

    def check_sizes(self, model: str, tokens: int | None, codes: int | None) -> None:
        """Raise `UserError` for a size that a model of so many image tokens and codes bounds; None: unknown.

        The default of a drafting is no error of the user: what lies behind the image is cut off.
        """
        limits = {
            "tokens": tokens,
            "codes": codes,
            "other codes": None if codes is None else codes - 1,
        }
        typed = [
            (key, value)
            for key, value in self.parameters
            if self.drafting_row.defaults.get(key) != value
        ]
        sizes = [(key.replace("_", "-"), value, PARAMETERS[key].bounded_by) for key, value in typed]
        if self.paths:
            fan_out = 1 + max(path[-1] for path in self.paths)
            sizes += [
                ("tree of depth", len(self.paths[-1]), "tokens"),
                ("tree of fan-out", fan_out, "codes"),
            ]
        for flag, size, bound in sizes:
            if bound is not None and (most := limits[bound]) is not None and size > most:
                has = f"{tokens} tokens an image" if bound == "tokens" else f"{codes} codes"
                raise UserError(f"--{flag} {size}: the model {model} has {has}", f"At most {most}.")

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of `schema.py` without the model and the batch."""
        values = {
            "cell_id": self.cell_id,
            "mode": self.mode,
            "drafting": self.drafting,
            "tree": self.tree_label,
        }
        parameters = {
            key: self.value(key) for key, parameter in PARAMETERS.items() if parameter.column
        }
        return values | {"rule": self.rule} | parameters

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it."""
        values = dict(self._values) if self.drafts else {"mode": self.mode, **dict(self.parameters)}
        for key, value in self.parameters:
            if PARAMETERS[key].omit_default and value == PARAMETERS[key].default:
                del values[key]
        if self.paths and values["tree"] not in STATIC_TREES:
            values["tree"] = [list(path) for path in self.paths]
        return values


def _check_together(
    values: Mapping[str, Any], mode: str, drafting: str, rule: str, paths: Topology
) -> None:
    """Raise `ParameterError` for values of a cell that do not go together, or for a missing one."""
    if problem := chain_problem(
        rule=rule,
        drafting=drafting,
        paths=paths,
        tree="it" if paths else f"the drafting {drafting}",
    ):
        raise ParameterError(problem, "tree" if paths else "rule")
    row = RULES[rule]
    for key in PARAMETERS:
        if key not in STRUCTURE and key not in values and has_parameter(key, drafting, rule):
            example = f"{row.example:g}" if key == row.bound else "VALUE"
            raise MissingValueError(
                f"mode {mode} has the rule {rule} and needs {key}; "
                f"write {key}: {example} in the cell, or type --{key.replace('_', '-')} {example}"
            )
    if values["temperature"] and (problem := fresh_drafts_problem(rule, drafting, values)):
        raise ParameterError(problem)
    if (nodes := DRAFTINGS[drafting].nodes(values)) > MOST_NODES:
        raise ParameterError(
            f"the drafting {drafting} makes {nodes:,} nodes of these values, and at most {MOST_NODES:,}"
        )
    if clash := DRAFTINGS[drafting].problem(values):
        key, text = clash
        raise ParameterError(text, key)


def word_of(value: object) -> str:
    """Return a value as cell ids write it."""
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)
