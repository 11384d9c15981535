"""One decoding configuration with a value for every parameter, and its id."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
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
    can_decide,
    defaults_for,
    emitted_tv_problem,
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
"""The parameters that decide which other parameters a cell has."""


class ParameterError(ValueError):
    """A value that a cell cannot have.

    Args:
        text: What is wrong; messages put the parameter and its value before it.
        key: The wrong parameter; None if several parameters are to blame.
    """

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(f"{key} {text}" if key else text)
        self.text = text
        self.key = key


class MissingValueError(ParameterError):
    """A parameter without a default has no value."""


# ---- Values of one parameter


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(PARAMETERS[key].kind.type)


def check_value(key: str, value: object, folder: Path = Path()) -> Any:
    """Return a value of a parameter as its type.

    Args:
        key: The parameter.
        value: The value as it was written.
        folder: The folder that the path of a tree's `@FILE` is relative to.

    Raises:
        ParameterError: The value is not allowed.
        RefusedError: It names a row of an installed package that cannot be used.
    """
    if key == "tree":
        return _check_tree(value, folder)
    kind = PARAMETERS[key].kind
    choices = _ROWS.get(key, kind.choices)
    if isinstance(value, str) and value in choices:
        return value
    if choices:
        raise_if_refused(value)
        noun = "mode" if key == "mode" else "value"
        raise ParameterError(
            f"unknown {noun}{did_you_mean(value, choices)} (must be one of {', '.join(choices)})",
            key,
        )
    try:
        return _adapter(key).validate_python(value)
    except ValidationError as error:
        is_too_large = error.errors()[0]["type"] == "less_than_equal"
        if is_too_large and kind.most is not None:
            raise ParameterError(f"must be at most {kind.most:,}", key) from error
        remark = PARAMETERS[key].remark
        remark = f" ({remark})" if remark else ""
        raise ParameterError(kind.allowed + remark, key) from error


def read_values(
    key: str, written: object, location: Location, problems: Problems, folder: Path = Path()
) -> tuple[Any, ...]:
    """Return the checked values of a parameter.

    Args:
        key: The parameter.
        written: A value, or a list of them: a grid.
        location: Where the value is written.
        problems: Receives the wrong values, which are left out.
        folder: The folder that the path of a tree's `@FILE` is relative to.
    """
    is_grid = isinstance(written, list) and not (key == "tree" and is_tree(written))
    values: list[Any] = written if is_grid else [written]  # type: ignore[assignment]
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
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(path, list | tuple) and not _has_lists(path) for path in value)


def _has_lists(values: Iterable[object]) -> bool:
    return any(isinstance(value, list | tuple) for value in values)


def _check_tree(value: object, folder: Path) -> str | Topology:
    """Return the name of a static tree, or the checked paths of any other tree."""
    if isinstance(value, str) and value.startswith("@"):
        name = value[1:]
        try:
            value = load_yaml((folder / name).read_text(encoding="utf-8"), name)[0]
        except (OSError, ValueError, UserError) as error:
            raise ParameterError(
                f"cannot be read as a tree: {' '.join(str(error).split())}", "tree"
            ) from error
    if isinstance(value, str):
        if value in STATIC_TREES:
            return value
        raise ParameterError(
            f"unknown tree{did_you_mean(value, STATIC_TREES)} "
            f"(the trees are {', '.join(STATIC_TREES)}; or @FILE, or a list of paths)",
            "tree",
        )
    if not is_tree(value):
        raise ParameterError(
            "must be a tree's name, @FILE, "
            "or a list of child-rank paths such as [[0], [1], [0, 0]]",
            "tree",
        )
    try:
        topology = check_topology(value)  # type: ignore[arg-type]  # is_tree has looked at it
    except UserError as error:
        raise ParameterError(
            ". ".join(filter(None, [error.message, error.advice])), "tree"
        ) from error
    name = topology_name(topology)
    return name if name in STATIC_TREES else topology


def word_of(value: object) -> str:
    """Return a value as cell ids write it."""
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)


# ---- A decoding


@dataclass(frozen=True, init=False)
class Decoding:
    """A mode, its drafting and rule, and a value for every parameter that they have.

    Each parameter is also an attribute (`decoding.temperature`), None if the cell lacks it.
    """

    mode: str
    drafting: str
    rule: str
    # Name and value, in the order of `PARAMETERS`.
    parameters: tuple[tuple[str, Any], ...]
    # Paths of a static tree, as from `check_topology`; empty without one.
    paths: Topology
    # The model's own guidance scale, which the id leaves out.
    cfg_default: float

    def __init__(
        self,
        mode: str,
        *,
        cfg_default: float | None = None,
        model_defaults: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        """Check values and fill in defaults.

        Args:
            mode: The mode. It decides the drafting and the rule unless `values` names them.
            cfg_default: The model's own guidance scale, which the id leaves out; None: as in
                `model_defaults`, or 1.
            model_defaults: Values that the model suggests; they replace the parameters' defaults.
            **values: Parameters by name, `lambda_` for `lambda`; None means not given.

        Raises:
            ParameterError: A value is wrong, missing, or does not go with the others.
        """
        given = {key.removesuffix("_"): value for key, value in values.items() if value is not None}

        # 1. The mode, its drafting and its rule.
        mode = check_value("mode", mode)
        drafting = _choose("drafting", given.pop("drafting", MODES[mode].drafting), mode)
        rule = _choose("rule", given.pop("rule", MODES[mode].rule), mode)

        # 2. The values that are given, over the defaults of the parameters that the cell has.
        checked = {}
        for key, value in given.items():
            if key not in PARAMETERS:
                raise ParameterError(f"is no parameter{did_you_mean(key, PARAMETERS)}", key)
            if not has_parameter(key, drafting, rule):
                raise ParameterError(f"does not belong here: it is for {owners_of(key)}", key)
            checked[key] = check_value(key, value)
        defaults = defaults_for(drafting=drafting, rule=rule, mode=mode, of_model=model_defaults)
        adapted = DRAFTINGS[drafting].adapt(defaults, checked)
        complete = _of_method({**adapted, **checked}, drafting, rule)

        # 3. The static tree.
        tree = complete.get("tree")
        paths: Topology = ()
        if tree is not None:
            paths = STATIC_TREES[tree] if isinstance(tree, str) else check_topology(tree)
            complete["tree"] = topology_name(paths)
        _check_together(complete, mode=mode, drafting=drafting, rule=rule, paths=paths)

        # 4. Greedy decoding uses no filters and no residual (docs/algorithms.md, section 3).
        if complete["temperature"] == 0:
            for key in complete:
                if PARAMETERS[key].sampled_only:
                    complete[key] = PARAMETERS[key].default
            rule = RULES[rule].greedy_rule
            complete = _of_method(complete, drafting, rule)

        # The class is frozen, so the fields are set in its dictionary.
        self.__dict__.update(
            mode=mode,
            drafting=drafting,
            rule=rule,
            parameters=tuple((key, complete[key]) for key in PARAMETERS if key in complete),
            paths=paths,
            cfg_default=float(cfg_default or (model_defaults or {}).get("cfg_scale") or 1.0),
        )

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
        """Return this decoding with some values replaced."""
        return Decoding(**(self.settings() | values), cfg_default=self.cfg_default)

    def autoregressive(self) -> Decoding:
        """Return autoregressive decoding with the same sampling."""
        sampling = {key: self.value(key) for key in SAMPLING}
        return Decoding("ar", cfg_default=self.cfg_default, **sampling)

    @property
    def drafting_row(self) -> Drafting:
        """The row of the drafting."""
        return DRAFTINGS[self.drafting]

    @property
    def rule_row(self) -> Rule:
        """The row of the acceptance rule."""
        return RULES[self.rule]

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return self.drafting_row.drafts

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy (temperature 0)."""
        return bool(self.value("temperature") == 0)

    @property
    def emitted_tv_problem(self) -> str | None:
        """Why decoding does not measure `emitted_tv`, or None."""
        return emitted_tv_problem(self.drafting, self.rule, self._values)

    @property
    def draft_nodes(self) -> int:
        """Number of draft nodes below the root, for estimates of memory; 0 if unknown."""
        return len(self.paths) or self.drafting_row.nodes(self._values)

    @property
    def tree_label(self) -> str | None:
        """The draft in ids and tables: a tree's name, `58n5d10b`, `w16`; None without a draft."""
        return self.drafting_row.label(self._values)

    @cached_property
    def cell_id(self) -> str:
        """A name made of all values that matter, without the model.

        It consists of letters, digits, `.`, `+`, `_` and `-`.
        """
        words = [self.mode]
        if self.drafts:
            words.append(self.drafting)
        if self.tree_label:
            words.append(self.tree_label)
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
        """Check the sizes that depend on the model.

        A default of the drafting is never an error: the part of a draft beyond the end of the
        image is cut off.

        Args:
            model: The model's name, for the message.
            tokens: Tokens of an image, None if unknown.
            codes: Image codes, None if unknown.

        Raises:
            UserError: A size is above its limit.
        """
        limits = {
            "tokens": tokens,
            "codes": codes,
            "other codes": None if codes is None else codes - 1,
        }
        sizes = [
            (key.replace("_", "-"), value, PARAMETERS[key].bounded_by)
            for key, value in self.parameters
            if self.drafting_row.defaults.get(key) != value
        ]
        if self.paths:
            sizes.append(("tree of depth", len(self.paths[-1]), "tokens"))
            sizes.append(("tree of fan-out", 1 + max(path[-1] for path in self.paths), "codes"))
        for flag, size, bound in sizes:
            most = limits.get(bound or "")
            if most is not None and size > most:
                has = f"{tokens} tokens an image" if bound == "tokens" else f"{codes} codes"
                raise UserError(f"--{flag} {size}: the model {model} has {has}", f"At most {most}.")

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of the schema without the model and the batch."""
        return {
            "cell_id": self.cell_id,
            "mode": self.mode,
            "drafting": self.drafting,
            "tree": self.tree_label,
            "rule": self.rule,
            **{key: self.value(key) for key, row in PARAMETERS.items() if row.column},
        }

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it."""
        values = dict(self._values)
        if not self.drafts:
            del values["drafting"]
            del values["rule"]
        if self.paths and values["tree"] not in STATIC_TREES:
            values["tree"] = [list(path) for path in self.paths]
        return values


def _choose(key: str, value: object, mode: str) -> str:
    """Return the checked drafting or rule of a mode."""
    chosen: str = check_value(key, value)
    row = MODES[mode]
    if not DRAFTINGS[row.drafting].drafts:
        if chosen != getattr(row, key):
            raise ParameterError(f"mode {mode} drafts nothing and has no {key}; leave it out", key)
        return chosen
    for other in MODES.values():
        if getattr(other, key) == chosen and not DRAFTINGS[other.drafting].drafts:
            text = f"mode {mode} needs a {key}; without drafting write mode: {other.name}"
            raise ParameterError(text, key)
    return chosen


def _of_method(values: Mapping[str, Any], drafting: str, rule: str) -> dict[str, Any]:
    """Return the values of the parameters that a drafting and a rule have."""
    return {key: value for key, value in values.items() if has_parameter(key, drafting, rule)}


def _check_together(
    values: Mapping[str, Any], *, mode: str, drafting: str, rule: str, paths: Topology
) -> None:
    """Raise `ParameterError` for a missing value, or values that do not go together."""
    row = RULES[rule]
    can_decide_here = can_decide(rule, drafting)
    if row.chains and not (can_decide_here and is_chain(paths)):
        drafts = "it" if paths else f"the drafting {drafting}"
        raise ParameterError(
            f"the rule {rule} needs a chain of sampled drafts, and {drafts} is not one; "
            f"the tree {row.tree} is",
            "tree" if paths else "rule",
        )
    if not can_decide_here:
        raise ParameterError(
            f"the rule {rule} needs sampled drafts, "
            f"and the drafts of the drafting {drafting} are deterministic",
            "rule",
        )
    for key in PARAMETERS:
        if key not in STRUCTURE and key not in values and has_parameter(key, drafting, rule):
            example = f"{row.example:g}" if key == row.bound else "VALUE"
            flag = key.replace("_", "-")
            raise MissingValueError(
                f"mode {mode} has the rule {rule} and needs {key}; "
                f"write {key}: {example} in the cell, or type --{flag} {example}"
            )
    if values["temperature"]:
        problem = fresh_drafts_problem(rule, drafting, values)
        if problem:
            raise ParameterError(problem)
    nodes = DRAFTINGS[drafting].nodes(values)
    if nodes > MOST_NODES:
        raise ParameterError(
            f"the drafting {drafting} needs {nodes:,} draft nodes with these values; "
            f"the limit is {MOST_NODES:,}"
        )
    clash = DRAFTINGS[drafting].problem(values)
    if clash:
        key, text = clash
        raise ParameterError(text, key)
