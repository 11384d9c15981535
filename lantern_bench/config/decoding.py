"""One fully resolved decoding configuration, and the name it gives a cell.

`Decoding` is what the decode loop gets and what a record's key covers. Which parameters a cell has, and what they may
be, are rows of `lantern_bench/methods`. Where values come from is `experiment.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.parameters import Count, FilterOrder, Natural, NeighbourMetric
from lantern_bench.methods.rules import Rule
from lantern_bench.methods.tables import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    RULES,
    chain_problem,
    defaults_for,
    fresh_drafts_problem,
    has_parameter,
    owners_of,
)
from lantern_bench.methods.trees import STATIC_TREES, Topology, check_topology, is_chain, topology_name

# Types of the model below.
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Lambda = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Bound = Annotated[float, Field(allow_inf_nan=False)]
Residual = Literal["exact", "official"]


@cache
def adapter(key: str) -> TypeAdapter[Any]:
    """Return what validates the values of a parameter."""
    return TypeAdapter(PARAMETERS[key].kind.type)


class Decoding(BaseModel):
    """One decoding configuration with every value decided; raises pydantic's `ValidationError` for what cannot be.

    Values left out take the preset of the mode and the defaults of its rows. `tree` names a static tree or the user's
    own (then `topology` holds its paths); `cfg_default` is the model's own guidance scale: the id mentions the scale
    only where it differs. A parameter that the drafting or the rule does not have is None. `extra_parameters` holds the
    parameters that draftings bring. Greedy decoding (temperature 0) uses no filters and no residual
    (docs/algorithms.md, section 3): they are set to their defaults, and a rule is replaced
    by its greedy counterpart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    mode: str
    drafting: str
    rule: str
    tree: str | None = None
    topology: Topology | None = None
    nodes: Count | None = None
    depth: Count | None = None
    beam: Count | None = None
    neighbours: Natural | None = None
    delta: Delta | None = None
    lambda_: Lambda | None = Field(default=None, alias="lambda")
    bound: Bound | None = None
    neighbour_metric: NeighbourMetric = "l2"
    residual: Residual = "exact"
    temperature: Scale = 1.0
    top_k: Natural = 0
    top_p: TopP = 1.0
    filter_order: FilterOrder = "top_k_first"
    cfg_scale: Scale = 1.0
    seed_set: Natural = 0
    cfg_default: Scale = Field(default=1.0, exclude=True, repr=False)
    extra_parameters: tuple[tuple[str, Any], ...] = Field(default=(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("mode") not in MODES:
            return data
        values = dict(data)
        if "lambda_" in values:
            values["lambda"] = values.pop("lambda_")
        drafting = values.setdefault("drafting", MODES[values["mode"]].drafting)
        rule = values.setdefault("rule", MODES[values["mode"]].rule)
        if drafting not in DRAFTINGS or rule not in RULES:
            return values
        if values.get("topology") is not None:
            values["topology"] = check_topology(values["topology"])
            values["tree"] = topology_name(values["topology"])
        for key, value in DRAFTINGS[drafting].adapt(defaults_for(drafting, rule, values["mode"]), values).items():
            if values.get(key) is None:
                values[key] = value
        if values["temperature"] == 0:
            ignored = [one for one in PARAMETERS.values() if one.sampled_only]
            values |= {one.name: one.default for one in ignored if one.name in _FIELDS or one.name in values}
            tree = values.get("tree")
            paths = values.get("topology") or (STATIC_TREES.get(tree, ((1,),)) if tree else ())
            greedy = RULES[rule].greedy
            if greedy and not chain_problem(rule, drafting, paths, tree):
                values["rule"] = greedy
                for key in {*RULES[rule].parameter_names} - {*RULES[greedy].parameter_names}:
                    values.pop(key, None)
        own = {key: values.pop(key) for key in list(values) if key in PARAMETERS and key not in _FIELDS}
        checked = {key: adapter(key).validate_python(value) for key, value in own.items()}
        extra = dict(values.get("extra_parameters", ())) | checked
        return values | {"extra_parameters": tuple(sorted(extra.items()))}

    @model_validator(mode="after")
    def _check(self) -> Decoding:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode '{self.mode}'; the modes are {', '.join(MODES)}")
        if self.drafting not in DRAFTINGS:
            raise ValueError(f"unknown drafting '{self.drafting}'; the draftings are {', '.join(DRAFTINGS)}")
        if self.rule not in RULES:
            raise ValueError(f"unknown rule '{self.rule}'; the rules are {', '.join(RULES)}")
        if len({self.drafting == "none", self.rule == "none", self.mode == "ar"}) > 1:
            raise ValueError(f"mode {self.mode} cannot have the drafting {self.drafting} with the rule {self.rule}")
        if self.tree is not None and self.topology is None and self.tree not in STATIC_TREES:
            raise ValueError(f"unknown tree '{self.tree}'; the trees are {', '.join(STATIC_TREES)}")
        for key, parameter in PARAMETERS.items():
            if key in ("mode", "drafting", "rule") or (key in _FIELDS and parameter.default is not None):
                continue
            if (self.value(key) is not None) != self.has(key):
                wrong = "is missing" if self.has(key) else "does not belong here"
                raise ValueError(f"{key} {wrong}: it is for {owners_of(key)}")
        row, bound = self.rule_row, self.value(self.rule_row.bound)
        if not row.lossless and not row.allows(bound):
            raise ValueError(f"{row.bound} {bound:g}: {row.allowed}")
        problem = chain_problem(self.rule, self.drafting, self.paths, self.tree_label)
        values = {key: self.value(key) for key in PARAMETERS if self.has(key)}
        problem = problem or fresh_drafts_problem(self.rule, self.drafting, values)
        if problem:
            raise ValueError(problem)
        unfit = self.drafting_row.problem(values)
        if unfit:
            raise ValueError(f"{unfit[0]} {self.value(unfit[0])}: {unfit[1]}")
        return self

    def has(self, key: str) -> bool:
        """Whether the cell has the parameter."""
        return has_parameter(key, self.drafting, self.rule)

    def value(self, key: str) -> Any:
        """Return the value of a parameter by its name in an experiment file; None where the cell lacks it."""
        if key in _FIELDS:
            return getattr(self, _FIELDS[key])
        return dict(self.extra_parameters).get(key)

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
        """Whether the tokens keep the target's distribution: no relaxed rule, and no form as published."""
        return self.rule_row.lossless and self.value("form") != "published"

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted: False for autoregressive decoding."""
        return self.drafting_row.drafts

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy (temperature 0)."""
        return self.temperature == 0

    @property
    def paths(self) -> Topology:
        """The static tree as root-to-node paths of child ranks, sorted by (depth, path); empty without one."""
        if self.topology is not None:
            return self.topology
        return STATIC_TREES[self.tree] if self.tree is not None else ()

    @property
    def branches(self) -> bool:
        """Whether drafts can have siblings."""
        return not (self.drafting_row.chain or (self.paths and is_chain(self.paths)))

    @property
    def tree_label(self) -> str | None:
        """The drafts as ids and tables write them: a tree's name, or nodes, depth and beam as `58n5d10b`, or None."""
        return self.drafting_row.label({key: self.value(key) for key in PARAMETERS})

    @property
    def cell_id(self) -> str:
        """The id: mode-drafting-tree[-rule][-kK][-deltaD|-lambdaL|-boundB]-tT and what else is not a default.

        It serves as a folder's name.
        """
        parts = [self.mode]
        if self.drafts:
            parts += [self.drafting, str(self.tree_label)]
        if self.rule_row.in_id and MODES[self.mode].rule != self.rule:
            parts.append(self.rule)
        always, changed = [], []
        for key, parameter in PARAMETERS.items():
            value, default = self.value(key), self.cfg_default if key == "cfg_scale" else parameter.default
            if parameter.in_id == "always" and value is not None:
                always.append((parameter.short or key) + _text(value))
            elif parameter.in_id == "changed" and self.has(key) and value != default:
                changed.append((key + _text(value)).replace("_", ""))
        return "-".join([*parts, *always, *changed])

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of `schema.py` without the model; None where a cell lacks the parameter."""
        values = {"cell_id": self.cell_id, "mode": self.mode, "drafting": self.drafting, "tree": self.tree_label}
        values |= {"rule": self.rule}
        shown = [key for key, parameter in PARAMETERS.items() if parameter.column]
        return values | {key: self.value(key) if self.has(key) else None for key in shown}

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it: every parameter it has and no other."""
        values: dict[str, Any] = {"mode": self.mode}
        for key, parameter in PARAMETERS.items():
            if self.has(key) and not (parameter.omit_default and self.value(key) == parameter.default):
                values[key] = self.value(key)
        if self.topology is not None and self.tree not in STATIC_TREES:
            values["tree"] = [list(path) for path in self.topology]
        return values


_FIELDS = {field.alias or name: name for name, field in Decoding.model_fields.items()}
"""The field of each parameter that has one, by the parameter's name."""


def _text(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)
