"""One fully resolved decoding configuration, the ranges of its values, and the name it gives a cell.

`Decoding` is what the decode loop consumes and what a record's key covers. The table `PARAMETERS` says for each
parameter what is allowed, in the words an error uses, and which draftings and rules have it at all; the experiment
reader, the grids and the cell ids all work from that table. Where values come from is `experiment.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from lantern_bench.config.methods import MODES, OUTSIDE_RULES, PUBLISHED_RULES, RELAXED_RULES, RULES, Drafting
from lantern_bench.config.trees import STATIC_TREES, Topology, check_topology, is_chain, topology_name


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


_NUMBER = BeforeValidator(_refuse_bool)
Count = Annotated[int, _NUMBER, Field(ge=1)]
Natural = Annotated[int, _NUMBER, Field(ge=0)]
Scale = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, _NUMBER, Field(gt=0, le=1)]
Delta = Annotated[float, _NUMBER, Field(gt=0, lt=1)]
Lambda = Annotated[float, _NUMBER, Field(gt=1, allow_inf_nan=False)]
Bound = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
Residual = Literal["exact", "official"]
NeighbourMetric = Literal["l2", "cosine", "random"]
FilterOrder = Literal["top_k_first", "top_p_first"]


class Parameter(NamedTuple):
    """A decoding parameter: its type, what is allowed (completes "KEY VALUE: "), and who has it.

    `belongs(drafting, rule)` says whether a cell of that drafting and rule has the parameter, `to` says so in words.
    """

    adapter: TypeAdapter[Any]
    allowed: str
    belongs: Callable[[str, str], bool]
    to: str
    choices: tuple[str, ...] = ()


def _parameter(
    annotation: Any, allowed: str, belongs: Callable[[str, str], bool], to: str, choices: tuple[str, ...] = ()
) -> Parameter:
    return Parameter(TypeAdapter(annotation), allowed, belongs, to, choices)


def _everybody(_drafting: str, _rule: str) -> bool:
    return True


def _drafted(drafting: str, _rule: str) -> bool:
    return drafting != "none"


def _one_of(*names: str) -> Callable[[str, str], bool]:
    return lambda drafting, rule: drafting in names or rule in names


def _relaxed(_drafting: str, rule: str) -> bool:
    return rule in RELAXED_RULES


_COUNT = "must be a whole number of at least 1"
_NATURAL = "must be a whole number of at least 0"
_CHOICE = "must be one of"
_DRAFTING_WORDS = ("none", "static", "dynamic", "chain")
_RELAXED_TO = "the rules " + " and ".join(rule for rule in RULES if rule in RELAXED_RULES)
_OUTSIDE_TO = f"rules from outside the package ({', '.join(OUTSIDE_RULES) or 'none is installed'})"

# The order is that of a grid's axes, the first varying slowest.
PARAMETERS: dict[str, Parameter] = {
    "mode": _parameter(str, _CHOICE, _everybody, "every cell", tuple(MODES)),
    "drafting": _parameter(str, _CHOICE, _drafted, "modes that draft", _DRAFTING_WORDS),
    "rule": _parameter(str, _CHOICE, _drafted, "modes that draft", RULES),
    "tree": _parameter(Any, "must be a tree", _one_of("static"), "the drafting static", tuple(STATIC_TREES)),
    "nodes": _parameter(Count, _COUNT + " (root not counted)", _one_of("dynamic"), "the drafting dynamic"),
    "depth": _parameter(Count, _COUNT, _one_of("dynamic"), "the drafting dynamic"),
    "beam": _parameter(Count, _COUNT, _one_of("dynamic"), "the drafting dynamic"),
    "neighbours": _parameter(Natural, _NATURAL, _relaxed, _RELAXED_TO),
    "neighbour_metric": _parameter(NeighbourMetric, _CHOICE, _relaxed, _RELAXED_TO, ("l2", "cosine", "random")),
    "delta": _parameter(Delta, "must lie strictly between 0 and 1", _one_of("additive"), "the rule additive"),
    "lambda": _parameter(Lambda, "must be a number above 1", _one_of("multiplicative"), "the rule multiplicative"),
    "bound": _parameter(Bound, "must be a number", _one_of(*OUTSIDE_RULES), _OUTSIDE_TO),
    "residual": _parameter(Residual, _CHOICE, _relaxed, _RELAXED_TO, ("exact", "official")),
    "temperature": _parameter(Scale, "must be a number of at least 0 (0 is greedy)", _everybody, "every cell"),
    "top_k": _parameter(Natural, _NATURAL + " (0 is off)", _everybody, "every cell"),
    "top_p": _parameter(TopP, "must be above 0 and at most 1 (1 is off)", _everybody, "every cell"),
    "filter_order": _parameter(FilterOrder, _CHOICE, _everybody, "every cell", ("top_k_first", "top_p_first")),
    "cfg_scale": _parameter(Scale, "must be a number of at least 0 (1 is off)", _everybody, "every cell"),
}

DYNAMIC_TREE = {"nodes": 58, "depth": 5, "beam": 10}
_NEIGHBOURS = {"additive": 20, "multiplicative": 10} | {name: r.neighbours for name, r in OUTSIDE_RULES.items()}
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "filter_order": "top_k_first", "cfg_scale": 1.0}
# Settings that leave the id when they have their default; the order is that of the id.
_OF_SAMPLING: dict[str, Any] = {"residual": "exact", "top_k": 0, "top_p": 1.0, "filter_order": "top_k_first"}
_METRIC: NeighbourMetric = "l2"
_NAMED_IN_ID: dict[str, Any] = {"neighbour_metric": _METRIC, **_OF_SAMPLING}
# Younger than the first runs: left out of a cell's settings where it has its default, so that their keys stay valid.
_LEFT_OUT = {"neighbour_metric": _METRIC}

# In the tables, after what names the cell and its structure.
_COLUMNS = [key for key in list(PARAMETERS)[list(PARAMETERS).index("neighbours") :] if key != "filter_order"]


def fallbacks(drafting: str, rule: str) -> dict[str, Any]:
    """Return the values used when neither the experiment nor the model says otherwise; bounds have none."""
    values: dict[str, Any] = dict(_SAMPLING)
    if drafting == "static":
        values["tree"] = "chain-5" if rule == "block" else "eagle1-25"
    if drafting == "dynamic":
        values |= DYNAMIC_TREE
    if rule in RELAXED_RULES:
        values |= {"neighbours": _NEIGHBOURS[rule], "neighbour_metric": _METRIC, "residual": "exact"}
    return values


def tree_label(nodes: int, depth: int, beam: int) -> str:
    """Return how a dynamic tree is written in ids and tables: `58n5d10b`."""
    return f"{nodes}n{depth}d{beam}b"


class Decoding(BaseModel):
    """One decoding configuration with nothing left open; raises pydantic's `ValidationError` for what cannot be.

    Whatever is left out when it is made takes the preset of its mode and the fallbacks. `tree` names a static tree
    or the user's own (then `topology` holds its paths); `cfg_default` is the model's own guidance scale: the id
    mentions the scale only where it differs. Parameters the drafting or the rule does not have are None.
    Greedy (temperature 0) uses no filters and no residual (algorithms.md, section 3): they are set to their defaults,
    and so is the rule of a block, whose drafts are then judged as any others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    mode: str
    drafting: Drafting
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
    neighbour_metric: NeighbourMetric = _METRIC
    residual: Residual = "exact"
    temperature: Scale = 1.0
    top_k: Natural = 0
    top_p: TopP = 1.0
    filter_order: FilterOrder = "top_k_first"
    cfg_scale: Scale = 1.0
    cfg_default: Scale = Field(default=1.0, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("mode") not in MODES:
            return data
        values = dict(data)
        if "lambda_" in values:
            values["lambda"] = values.pop("lambda_")
        preset = MODES[values["mode"]]
        values.setdefault("drafting", preset.drafting)
        values.setdefault("rule", preset.rule)
        if values.get("topology") is not None:
            values["topology"] = check_topology(values["topology"])
            values["tree"] = topology_name(values["topology"])
        for key, value in fallbacks(values["drafting"], values["rule"]).items():
            if values.get(key) is None:
                values[key] = value if key != "nodes" else _enough_nodes(value, values)
        if values["temperature"] == 0:
            values |= _OF_SAMPLING | ({"rule": "strict"} if _is_judged_as_block(values) else {})
        return values

    @model_validator(mode="after")
    def _check(self) -> Decoding:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode '{self.mode}'; the modes are {', '.join(MODES)}")
        if self.rule not in RULES:
            raise ValueError(f"unknown rule '{self.rule}'; the rules are {', '.join(RULES)}")
        if (self.drafting == "none") != (self.rule == "none") or (self.mode == "ar") != (self.drafting == "none"):
            raise ValueError(f"mode {self.mode} cannot have the drafting {self.drafting} with the rule {self.rule}")
        if self.tree is not None and self.topology is None and self.tree not in STATIC_TREES:
            raise ValueError(f"unknown tree '{self.tree}'; the trees are {', '.join(STATIC_TREES)}")
        for key in ("tree", "nodes", "depth", "beam", "neighbours", "delta", "lambda", "bound"):
            if (self._value(key) is not None) != self._has(key):
                wrong = "is missing" if self._has(key) else "does not belong here"
                raise ValueError(f"{key} {wrong}: it is for {PARAMETERS[key].to}")
        if self.bound is not None and not OUTSIDE_RULES[self.rule].allows(self.bound):
            raise ValueError(f"bound {self.bound:g}: {OUTSIDE_RULES[self.rule].allowed}")
        if self.rule == "block" and not (self.drafting == "static" and is_chain(self.paths)):
            raise ValueError(not_a_chain(self.tree_label))
        if self.nodes and self.depth and self.beam and self.nodes > most_nodes(self.depth, self.beam):
            raise ValueError(f"nodes {self.nodes}: {too_many_nodes(self.depth, self.beam)}")
        return self

    def _has(self, key: str) -> bool:
        return PARAMETERS[key].belongs(self.drafting, self.rule)

    def _value(self, key: str) -> Any:
        return getattr(self, "lambda_" if key == "lambda" else key)

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
    def tree_label(self) -> str | None:
        """The tree as ids and tables write it: a name, nodes, depth and beam as `58n5d10b`, or None."""
        if self.nodes and self.depth and self.beam:
            return tree_label(self.nodes, self.depth, self.beam)
        return self.tree

    @property
    def cell_id(self) -> str:
        """The id of results.md: mode-drafting-tree[-kK][-deltaD|-lambdaL|-boundB]-tT and what else is not a default.

        It serves as a folder's name.
        """
        parts = [self.mode]
        if self.drafting != "none":
            parts += [self.drafting, str(self.tree_label)]
        if self.rule not in PUBLISHED_RULES and MODES[self.mode].rule != self.rule:
            parts.append(self.rule)
        for key in ("neighbours", "delta", "lambda", "bound"):
            if self._value(key) is not None:
                parts.append(("k" if key == "neighbours" else key) + _text(self._value(key)))
        parts.append("t" + _text(self.temperature))
        for key, default in {**_NAMED_IN_ID, "cfg_scale": self.cfg_default}.items():
            if self._value(key) != default:
                parts.append((key + _text(self._value(key))).replace("_", ""))
        return "-".join(parts)

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of `schema.py` without the model; None where a cell lacks the parameter."""
        values = {"cell_id": self.cell_id, "mode": self.mode, "drafting": self.drafting, "tree": self.tree_label}
        values |= {"rule": self.rule}
        return values | {key: self._value(key) if self._has(key) else None for key in _COLUMNS}

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it: every parameter it has and no other, `l2` left unsaid."""
        values: dict[str, Any] = {"mode": self.mode}
        for key in PARAMETERS:
            if self._has(key) and self._value(key) != _LEFT_OUT.get(key, ...):
                values[key] = self._value(key)
        if self.topology is not None and self.tree not in STATIC_TREES:
            values["tree"] = [list(path) for path in self.topology]
        return values


def most_nodes(depth: int, beam: int) -> int:
    """Return how many candidates the rounds of a dynamic tree make: `beam`, then `beam` squared a round."""
    return beam + (depth - 1) * beam * beam


def _is_judged_as_block(values: Mapping[str, Any]) -> bool:
    """Return whether the rule is `block` and may be: what may not must stay and be refused."""
    return (
        values["rule"] == "block"
        and values["drafting"] == "static"
        and is_chain(values.get("topology") or STATIC_TREES.get(values["tree"], ((1,),)))
    )


def _enough_nodes(nodes: int, values: Mapping[str, Any]) -> int:
    """Return the default number of nodes, or all candidates where depth and beam make fewer."""
    depth, beam = (values.get(key) or DYNAMIC_TREE[key] for key in ("depth", "beam"))
    return min(nodes, most_nodes(int(depth), int(beam)))


def not_a_chain(tree: str | None) -> str:
    """Return the sentence for the rule `block` with drafts that branch."""
    return f"the rule block judges a chain of sampled drafts, and {tree} is none; the tree chain-5 is one"


def too_many_nodes(depth: int, beam: int) -> str:
    """Return the sentence for a dynamic tree that asks for more nodes than its rounds make."""
    return f"depth {depth} and beam {beam} make only {most_nodes(depth, beam)} candidates"


def _text(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)
