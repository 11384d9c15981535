"""The tables of methods: parameters, ways to draft, acceptance rules, and modes, one row each.

A new method is a file with its code and a row here. Flags, validation, grids, cell ids, columns, legends, and the
checks of `certify` read these rows. Rows of other packages join the tables when this module is imported
(`plugins.py` says what a row holds). Torch is not imported: a row names its code by module.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from lantern_bench.config.trees import STATIC_TREES, Topology, is_chain
from lantern_bench.plugins import DRAFTING_GROUP, RULE_GROUP, Drafting, Mode, Parameter, Rule, Values, find_rows


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

_COUNT = "must be a whole number of at least 1"
_NATURAL = "must be a whole number of at least 0"
_CHOICE = "must be one of"
_POSITIVE = "must be a number of at least 0"

# ---- ways to draft


def tree_label(nodes: int, depth: int, beam: int) -> str:
    """Return how a dynamic tree is written in ids and tables: `58n5d10b`."""
    return f"{nodes}n{depth}d{beam}b"


def most_nodes(depth: int, beam: int) -> int:
    """Return how many candidates the rounds of a dynamic tree make: `beam`, then `beam` squared a round."""
    return beam + (depth - 1) * beam * beam


def _dynamic_problem(values: Values) -> tuple[str, str] | None:
    depth, beam = values["depth"], values["beam"]
    if values["nodes"] <= most_nodes(depth, beam):
        return None
    return "nodes", f"depth {depth} and beam {beam} make only {most_nodes(depth, beam)} candidates"


def _enough_nodes(defaults: Values, given: Values) -> Values:
    """The default number of nodes, or all candidates where depth and beam make fewer."""
    depth, beam = (int(given.get(key) or defaults[key]) for key in ("depth", "beam"))
    return {**defaults, "nodes": min(defaults["nodes"], most_nodes(depth, beam))}


_SHIPPED_DRAFTINGS = (
    Drafting("none", make="", about="no drafts", needs_drafter=False, sampled=False),
    Drafting(
        "static",
        make="lantern_bench.decoding.drafting.static:make_static",
        about="fixed tree, sampled",
        parameters=("tree",),
        defaults={"tree": "eagle1-25"},
        label=lambda values: values.get("tree"),
        presets={"chain": {"tree": "chain-5"}},
        search="lantern_bench.profile.static_trees:list_static",
    ),
    Drafting(
        "dynamic",
        make="lantern_bench.decoding.drafting.dynamic:make_dynamic",
        about="best of a beam",
        parameters=("nodes", "depth", "beam"),
        defaults={"nodes": 58, "depth": 5, "beam": 10},
        small={"nodes": 10, "depth": 2, "beam": 5},
        sampled=False,
        label=lambda values: tree_label(values["nodes"], values["depth"], values["beam"]),
        adapt=_enough_nodes,
        problem=_dynamic_problem,
        search="lantern_bench.profile.dynamic_trees:list_dynamic",
    ),
)

# ---- acceptance rules

_RELAXATION = "lantern_bench.decoding.acceptance.relaxation"
_SHIPPED_RULES = (
    Rule("none", about="nothing is accepted", in_id=False),
    Rule("strict", about="accepts with p / q", in_id=False),
    Rule(
        "block",
        about="decides on a chain as a whole",
        accept="lantern_bench.decoding.acceptance.block_acceptance:accept_block",
        chains=True,
        tree="chain-5",
        greedy="strict",
        label="speculative (block)",
    ),
    Rule(
        "additive",
        about="neighbour mass of at most delta",
        limit=f"{_RELAXATION}:additive_limit",
        bound="delta",
        low=0.0,
        high=1.0,
        example=0.02,
        tensor_bound=True,
        neighbours=20,
        in_id=False,
    ),
    Rule(
        "multiplicative",
        about="probability of at most lambda times the draft's own",
        limit=f"{_RELAXATION}:multiplicative_limit",
        bound="lambda",
        low=1.0,
        example=2.0,
        tensor_bound=True,
        neighbours=10,
        in_id=False,
    ),
)

# ---- modes

_SHIPPED_MODES = (
    Mode("ar", "none", "none", "AR", "#000000"),
    Mode("speculative", "static", "strict", "speculative (strict)", "#0072B2"),
    Mode("lantern", "dynamic", "additive", "LANTERN", "#D55E00"),
    Mode("lantern++", "static", "multiplicative", "LANTERN++", "#009E73"),
)

_NAMES = {row.name for row in (*_SHIPPED_DRAFTINGS, *_SHIPPED_RULES, *_SHIPPED_MODES)} | {"all", "chain"}
OUTSIDE_DRAFTINGS, _refused = find_rows(DRAFTING_GROUP, Drafting, _NAMES)
"""Draftings that other packages bring, by name."""
DRAFTINGS: dict[str, Drafting] = {row.name: row for row in _SHIPPED_DRAFTINGS} | OUTSIDE_DRAFTINGS

_DRAFTS = [name for name, row in DRAFTINGS.items() if row.drafts]
OUTSIDE_RULES, _refused_rules = find_rows(RULE_GROUP, Rule, {*_NAMES, *OUTSIDE_DRAFTINGS}, _DRAFTS)
"""Rules that other packages bring, by name."""
REFUSED = [*_refused, *_refused_rules]
"""Errors of installed rows that cannot be used: reading an experiment raises the first, other commands work."""
RULES: dict[str, Rule] = {row.name: row for row in _SHIPPED_RULES} | OUTSIDE_RULES

MODES: dict[str, Mode] = {row.name: row for row in _SHIPPED_MODES}
MODES |= {
    name: Mode(name, rule.drafting, name, rule.label or name, rule.colour) for name, rule in OUTSIDE_RULES.items()
}
MODES |= {name: Mode(name, name, "strict", row.legend or name, row.colour) for name, row in OUTSIDE_DRAFTINGS.items()}

PRESETS = {word: (row.name, fixed) for row in DRAFTINGS.values() for word, fixed in row.presets.items()}
"""Short words for a drafting with some of its parameters fixed: word -> (drafting, values)."""

# ---- parameters, in the order of a grid's axes, the first varying slowest


_FLOAT, _WORD = ("float", ""), ("string", "")
_METRICS, _RESIDUALS, _ORDERS = get_args(NeighbourMetric), get_args(Residual), get_args(FilterOrder)
_DRAFTING_HELP = f"How to draft: {', '.join([*_DRAFTS, *PRESETS])}."
_RULE_HELP = f"Acceptance rule: {', '.join(name for name in RULES if name != 'none')}."
_TREE_HELP = f"Static tree: {', '.join(STATIC_TREES)}; @FILE; or a list of paths."
_NODES_HELP = "Nodes of a dynamic tree, not counting the root."
_DELTA_HELP = "Bound of the additive rule: the most neighbour mass of a draft, between 0 and 1."
_LAMBDA_HELP = "Bound of the multiplicative rule: the most by which a draft's probability may grow, above 1."
_structural = partial(Parameter, in_id="structure")
_changed = partial(Parameter, in_id="changed")
_ALL_PARAMETERS = (
    _structural("mode", str, _CHOICE, "The mode.", choices=tuple(MODES)),
    _structural("drafting", str, _CHOICE, _DRAFTING_HELP, choices=(*DRAFTINGS, *PRESETS)),
    _structural("rule", str, _CHOICE, _RULE_HELP, choices=tuple(RULES)),
    _structural("tree", Any, "must be a tree", _TREE_HELP, choices=tuple(STATIC_TREES)),
    _structural("nodes", Count, f"{_COUNT} (root not counted)", _NODES_HELP),
    _structural("depth", Count, _COUNT, "Depth of a dynamic tree."),
    _structural("beam", Count, _COUNT, "Beam width of a dynamic tree."),
    *(one for row in OUTSIDE_DRAFTINGS.values() for one in row.parameters if isinstance(one, Parameter)),
    Parameter(
        "neighbours",
        Natural,
        _NATURAL,
        "Number k of nearest codes that add to the neighbour mass.",
        short="k",
        column=("int", "codes"),
    ),
    _changed(
        "neighbour_metric",
        NeighbourMetric,
        _CHOICE,
        "Distance between codes: l2, cosine or random.",
        "l2",
        _METRICS,
        omit_default=True,
        column=_WORD,
    ),
    Parameter("delta", Delta, "must lie strictly between 0 and 1", _DELTA_HELP, symbol="δ", column=_FLOAT),
    Parameter("lambda", Lambda, "must be a number above 1", _LAMBDA_HELP, symbol="λ", column=_FLOAT),
    Parameter("bound", Bound, "must be a number", "Bound of an external rule.", symbol="bound", column=_FLOAT),
    _changed(
        "residual",
        Residual,
        _CHOICE,
        "What replaces p after a rejection: exact (keeps the bound) or official (as the LANTERN code).",
        "exact",
        _RESIDUALS,
        sampled_only=True,
        column=_WORD,
    ),
    Parameter(
        "temperature",
        Scale,
        f"{_POSITIVE} (0 is greedy)",
        "Sampling temperature; 0 is greedy.",
        1.0,
        short="t",
        column=_FLOAT,
    ),
    _changed(
        "top_k",
        Natural,
        f"{_NATURAL} (0 is off)",
        "Keep the k most probable tokens; 0 is off.",
        0,
        sampled_only=True,
        column=("int", "tokens"),
    ),
    _changed(
        "top_p",
        TopP,
        "must be above 0 and at most 1 (1 is off)",
        "Keep the smallest set of tokens with this mass; 1 is off.",
        1.0,
        sampled_only=True,
        column=_FLOAT,
    ),
    _changed(
        "filter_order", FilterOrder, _CHOICE, "top_k_first or top_p_first.", "top_k_first", _ORDERS, sampled_only=True
    ),
    _changed("cfg_scale", Scale, f"{_POSITIVE} (1 is off)", "Guidance scale; 1 is off.", 1.0, column=_FLOAT),
    _changed(
        "seed_set",
        Natural,
        _NATURAL,
        "Which seeds the images have: other sets make the same prompts again, to see how far figures vary.",
        0,
        omit_default=True,
        column=("int", ""),
    ),
)
PARAMETERS: dict[str, Parameter] = {parameter.name: parameter for parameter in _ALL_PARAMETERS}
SAMPLING = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "seed_set")
"""The parameters of every cell; `mode` aside, all others belong to a drafting or to a rule."""

_OF_DRAFTING = {name: row.parameter_names for name, row in DRAFTINGS.items()}


def has_parameter(key: str, drafting: str, rule: str) -> bool:
    """Whether a cell of this drafting and rule has the parameter."""
    if key in ("drafting", "rule"):
        return DRAFTINGS[drafting].drafts
    return key == "mode" or key in SAMPLING or key in _OF_DRAFTING[drafting] or key in RULES[rule].parameters


def who_has(key: str) -> str:
    """Return which draftings or rules have a parameter, in words: `the rules additive and multiplicative`."""
    if key == "mode" or key in SAMPLING:
        return "every cell"
    if key in ("drafting", "rule"):
        return "modes that draft"
    found: list[tuple[str, list[str]]] = [
        ("drafting", [name for name, keys in _OF_DRAFTING.items() if key in keys]),
        ("rule", [name for name, rule in RULES.items() if key in rule.parameters]),
    ]
    parts = [f"the {noun}{'s' * (len(names) > 1)} {' and '.join(names)}" for noun, names in found if names]
    return " and ".join(parts) or "rules from other packages (none is installed)"


def chain_problem(rule: str, drafting: str, paths: Topology, tree: str | None) -> str | None:
    """Return why a rule for chains cannot decide on drafts that branch or are not sampled; None where it can."""
    if not RULES[rule].chains or (DRAFTINGS[drafting].sampled and is_chain(paths)):
        return None
    return f"the rule {rule} needs a chain of sampled drafts, and {tree} is not one; the tree {RULES[rule].tree} is"


def defaults_for(drafting: str, rule: str) -> dict[str, Any]:
    """Return the values used when neither the experiment nor the model says otherwise; bounds have none."""
    values = {
        key: one.default
        for key, one in PARAMETERS.items()
        if one.default is not None and has_parameter(key, drafting, rule)
    }
    values.update(DRAFTINGS[drafting].defaults)
    if RULES[rule].tree and "tree" in values:
        values["tree"] = RULES[rule].tree
    values.update(RULES[rule].defaults)
    return values
