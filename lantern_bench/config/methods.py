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
from lantern_bench.plugins import (
    DRAFTING_GROUP,
    RULE_GROUP,
    Drafting,
    Mode,
    Parameter,
    Rule,
    Values,
    find_rows,
    own_parameters,
)


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
Above0 = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, _NUMBER, Field(ge=0, le=1)]
Several = Annotated[int, _NUMBER, Field(ge=2)]
Bound = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
Residual = Literal["exact", "official"]
NeighbourMetric = Literal["l2", "cosine", "random"]
FilterOrder = Literal["top_k_first", "top_p_first"]
Initial = Literal["uniform", "left", "above", "row"]
Coupling = Literal["none", "maximal", "gumbel"]
Form = Literal["exact", "published"]

_COUNT, _SEVERAL = "must be a whole number of at least 1", "must be a whole number of at least 2"
_NATURAL = "must be a whole number of at least 0"
_CHOICE = "must be one of"
_POSITIVE = "must be a number of at least 0"
_ABOVE_0, _UNIT = "must be a number above 0", "must lie strictly between 0 and 1"
_FLOAT, _COUNTED, _WORD = ("float", ""), ("int", "tokens"), ("string", "")

_structural = partial(Parameter, in_id="structure")
_changed = partial(Parameter, in_id="changed")

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


def _jacobi_label(values: Values) -> str:
    """`w16`, with what is not the default: `w16-left-maximal`; with candidates `w16x3x2-maximal`."""
    sizes = (values[key] for key in ("window", "candidates", "branching") if values.get(key) is not None)
    named = (values["initial"], values["coupling"], values.get("form"))
    words = [word for word in named if word not in ("uniform", "none", "exact", None)]
    return "-".join(["w" + "x".join(map(str, sizes)), *words])


def _hybrid_label(values: Values) -> str:
    """`w16d2-row-maximal`: a window of 16, and the drafter is asked at 2 places."""
    window, *words = _jacobi_label(values).split("-")
    share = [] if values["share"] == 0.5 else [f"share{values['share']:g}"]
    return "-".join([f"{window}d{values['drafted']}", *share, *words])


def _published_problem(values: Values) -> tuple[str, str] | None:
    if values["form"] == "exact" or (values["coupling"] == "maximal" and values["initial"] == "uniform"):
        return None
    return "form", "the published code differs from the exact form only with initial uniform and coupling maximal"


_SHARE = "must be a number from 0 to 1"
_SHARE_HELP = "Share of the drafter's distribution in those that the first places of a hybrid window draft from."
_SHIPPED_DRAFTINGS = (
    Drafting("none", make="", about="no drafts", needs_drafter=False, sampled=False),
    Drafting(
        "static",
        make="lantern_bench.decoding.drafting.static:make_static",
        about="fixed tree, sampled",
        parameters=("tree",),
        defaults={"tree": "eagle1-25"},
        small={"tree": "small-7"},
        label=lambda values: values.get("tree"),
        presets={"chain": {"tree": "chain-5"}},
    ),
    Drafting(
        "jacobi",
        make="lantern_bench.decoding.drafting.jacobi:make_jacobi",
        about="the target's own last answers",
        parameters=(
            _structural("window", Count, _COUNT, "Draft tokens of a step in Jacobi drafting."),
            _structural(
                "initial",
                Initial,
                _CHOICE,
                "First Jacobi draft of a position: uniform, left or above (copies of that token), row (the last p).",
                "uniform",
                get_args(Initial),
            ),
            _structural(
                "coupling",
                Coupling,
                _CHOICE,
                "How consecutive Jacobi drafts of a position share randomness: none, maximal or gumbel.",
                "none",
                get_args(Coupling),
                sampled_only=True,
            ),
            _structural(
                "form",
                Form,
                _CHOICE,
                "Form of coupled Jacobi drafts: exact, or published (as its authors' code, which is not lossless).",
                "exact",
                get_args(Form),
                sampled_only=True,
            ),
        ),
        defaults={"window": 16},
        small={"window": 4},
        needs_drafter=False,
        chain=True,
        redrawn=lambda values: values["coupling"] == "none",
        label=_jacobi_label,
        problem=_published_problem,
        published="lantern_bench.decoding.drafting.published:make_scd",
    ),
    Drafting(
        "pac",
        make="lantern_bench.decoding.drafting.pac:make_pac",
        about="Jacobi drafts with siblings",
        parameters=(
            "window",
            "initial",
            "coupling",
            "form",
            _structural("candidates", Count, _COUNT, "Candidates of a position in the drafting pac."),
            _structural("branching", Count, _COUNT, "At how many depths the drafting pac has several candidates."),
        ),
        defaults={"window": 16, "coupling": "maximal", "candidates": 3, "branching": 2},
        small={"window": 4, "candidates": 2},
        needs_drafter=False,
        redrawn=lambda _values: False,
        label=_jacobi_label,
        problem=_published_problem,
        published="lantern_bench.decoding.drafting.published:make_sjd_pac",
    ),
    Drafting(
        "hybrid",
        make="lantern_bench.decoding.drafting.hybrid:make_hybrid",
        about="Jacobi drafts, the first with a drafter",
        parameters=(
            "window",
            "initial",
            "coupling",
            _structural("drafted", Count, _COUNT, "At how many first places of a hybrid window the drafter is asked."),
            _structural("share", Share, _SHARE, _SHARE_HELP, 0.5),
        ),
        defaults={"window": 16, "initial": "row", "coupling": "maximal", "drafted": 2},
        small={"window": 4, "drafted": 2},
        chain=True,
        redrawn=lambda values: values["coupling"] == "none",
        label=_hybrid_label,
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
    ),
)

# ---- acceptance rules

_ACCEPTANCE = "lantern_bench.decoding.acceptance"
_RELAXATION = f"{_ACCEPTANCE}.relaxation"
_TRAVERSAL = f"{_ACCEPTANCE}.traversal:accept_traversal"
_WEIGHT = "w of the first draft in Cool-SD, which accepts with w p / q: 1 is strict."
_DECAY = "How fast Cool-SD's w falls: by the factor exp(-decay) with each depth."
_SCALE = "Bound of the entropy rule: the most neighbour mass where p is uniform, between 0 and 1."
_EPSILON = "Typical acceptance: a draft of at least this probability is accepted; between 0 and 1."
_ALPHA = "Typical acceptance: so is one above alpha * exp(-entropy); delta in Medusa's paper."
_CLUSTER = "Number of tokens in a cluster of GSD: a draft and its neighbours in order of p."
_GAP = "GSD: tokens whose probability differs by this much or more are in no cluster with the draft."
_CODE_GAP = "GSD: so are codes at this squared Euclidean distance or more; 0: at any."
_SHIPPED_RULES = (
    Rule("none", about="nothing is accepted", in_id=False),
    Rule("strict", about="accepts with p / q", in_id=False),
    Rule(
        "block",
        about="decides on a chain as a whole",
        accept=_TRAVERSAL,
        chains=True,
        looks_ahead=True,
        tree="chain-5",
        greedy="strict",
        source="2403.10444",
    ),
    Rule(
        "traversal",
        about="decides on a tree from its leaves to its root",
        accept=_TRAVERSAL,
        looks_ahead=True,
        greedy="strict",
        source="2505.12398",
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
    Rule(
        "cool-sd",
        about="accepts with w p / q, w falls with depth",
        chance=f"{_ACCEPTANCE}.cool_sd:annealed_chance",
        bound="strength",
        parameters=(
            Parameter("strength", Above0, _ABOVE_0, _WEIGHT, symbol="w", column=_FLOAT),
            Parameter("decay", Scale, _POSITIVE, _DECAY, 0.7, in_id="changed", column=_FLOAT),
        ),
        example=1.1,
        tensor_bound=True,
        source="2601.09212",
    ),
    Rule(
        "gsd",
        about="accepts with p / q of the draft's cluster of codes",
        chance=f"{_ACCEPTANCE}.gsd:grouped_chance",
        bound="cluster",
        parameters=(
            Parameter("cluster", Several, _SEVERAL, _CLUSTER, symbol="G", column=_COUNTED),
            Parameter("probability_gap", Above0, _ABOVE_0, _GAP, 0.15, in_id="changed", column=_FLOAT),
            Parameter("code_gap", Scale, _POSITIVE, _CODE_GAP, 0.5, in_id="changed", column=_FLOAT),
        ),
        low=1.0,
        example=14,
        codebook=True,
        published="plain",
        source="2508.07747",
    ),
    Rule(
        "entropy",
        about="neighbour mass that grows with the entropy of p",
        limit=f"{_ACCEPTANCE}.by_entropy:entropy_limit",
        bound="entropy_scale",
        parameters=(Parameter("entropy_scale", Delta, _UNIT, _SCALE, short="scale", symbol="η", column=_FLOAT),),
        high=1.0,
        example=0.1,
        tensor_bound=True,
        neighbours=20,
    ),
    Rule(
        "typical",
        about="accepts what is not improbable for the entropy of p",
        chance=f"{_ACCEPTANCE}.by_entropy:typical_chance",
        bound="epsilon",
        parameters=(
            Parameter("epsilon", Delta, _UNIT, _EPSILON, symbol="ε", column=_FLOAT),
            Parameter("alpha", Above0, _ABOVE_0, _ALPHA, 0.3, in_id="changed", column=_FLOAT),
        ),
        high=1.0,
        example=0.09,
        tensor_bound=True,
        published="none",
        source="2401.10774",
    ),
)

# ---- modes

_SHIPPED_MODES = (
    Mode("ar", "none", "none", "AR", "#000000", claim="lossless"),
    Mode("speculative", "static", "strict", "speculative (strict)", "#0072B2", claim="lossless", source="2401.15077"),
    Mode("lantern", "dynamic", "additive", "LANTERN", "#D55E00", claim="relaxed", source="2410.03355"),
    Mode("lantern++", "static", "multiplicative", "LANTERN++", "#009E73", claim="relaxed", source="2502.06352"),
    Mode(
        "sjd",
        "jacobi",
        "strict",
        "SJD",
        "#332288",
        claim="lossless",
        source="2410.01699",
        variants=({"initial": "left"}, {"initial": "row"}),
    ),
    Mode(
        "scd",
        "jacobi",
        "strict",
        "SCD",
        "#882255",
        {"coupling": "maximal"},
        claim="lossless",
        source="2510.24211",
        variants=({"coupling": "gumbel"},),
        published=({"form": "published"},),
    ),
    Mode(
        "sjd-pac",
        "pac",
        "strict",
        "SJD-PAC",
        "#44AA99",
        claim="lossless",
        source="2603.18599",
        variants=({"coupling": "gumbel"},),
        published=({"form": "published"},),
    ),
    Mode(
        "hybrid",
        "hybrid",
        "strict",
        "hybrid",
        "#999933",
        claim="lossless",
        variants=({"coupling": "none"}, {"coupling": "gumbel"}),
    ),
    Mode("cool-sd", "static", "cool-sd", "Cool-SD", "#56B4E9", claim="relaxed"),
    Mode("gsd", "static", "gsd", "GSD", "#E69F00", claim="relaxed", variants=({"drafting": "jacobi"},)),
    Mode("entropy", "static", "entropy", "by entropy", "#CC79A7", claim="relaxed"),
    Mode(
        "typical",
        "static",
        "typical",
        "typical",
        "#F0E442",
        claim="relaxed",
        variants=({"drafting": "jacobi"}, {"alpha": 0.1}),
    ),
)

SAMPLING = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "seed_set")
"""The parameters of every cell; `mode` aside, all others belong to a drafting or to a rule."""

_SHIPPED = (*_SHIPPED_DRAFTINGS, *_SHIPPED_RULES)
_NAMES = {"all", "chain", "mode", "drafting", "rule", "bound", *SAMPLING, *(row.name for row in _SHIPPED_MODES)}
_NAMES |= {name for row in _SHIPPED for name in (row.name, *row.parameter_names)}
OUTSIDE_DRAFTINGS, _refused = find_rows(DRAFTING_GROUP, Drafting, _NAMES)
"""Draftings that other packages bring, by name."""
DRAFTINGS: dict[str, Drafting] = {row.name: row for row in _SHIPPED_DRAFTINGS} | OUTSIDE_DRAFTINGS

_DRAFTS = [name for name, row in DRAFTINGS.items() if row.drafts]
_NAMES |= {name for row in OUTSIDE_DRAFTINGS.values() for name in (row.name, *row.parameter_names)}
OUTSIDE_RULES, _refused_rules = find_rows(RULE_GROUP, Rule, _NAMES, _DRAFTS)
"""Rules that other packages bring, by name."""
REFUSED = _refused | _refused_rules
"""Errors of installed rows that cannot be used, by name: an experiment that names one raises its error."""
RULES: dict[str, Rule] = {row.name: row for row in _SHIPPED_RULES} | OUTSIDE_RULES

MODES: dict[str, Mode] = {row.name: row for row in _SHIPPED_MODES}
MODES |= {
    name: Mode(name, rule.drafting, name, rule.label or name, rule.colour) for name, rule in OUTSIDE_RULES.items()
}
MODES |= {name: Mode(name, name, "strict", row.legend or name, row.colour) for name, row in OUTSIDE_DRAFTINGS.items()}

PRESETS = {word: (row.name, fixed) for row in DRAFTINGS.values() for word, fixed in row.presets.items()}
"""Short words for a drafting with some of its parameters fixed: word -> (drafting, values)."""

# ---- parameters, in the order of a grid's axes, the first varying slowest


_METRICS, _RESIDUALS, _ORDERS = get_args(NeighbourMetric), get_args(Residual), get_args(FilterOrder)
_DRAFTING_HELP = f"How to draft: {', '.join([*_DRAFTS, *PRESETS])}."
_RULE_HELP = f"Acceptance rule: {', '.join(name for name in RULES if name != 'none')}."
_TREE_HELP = f"Static tree: {', '.join(STATIC_TREES)}; @FILE; or a list of paths."
_NODES_HELP = "Nodes of a dynamic tree, not counting the root."
_DELTA_HELP = "Bound of the additive rule: the most neighbour mass of a draft, between 0 and 1."
_LAMBDA_HELP = "Bound of the multiplicative rule: the most by which a draft's probability may grow, above 1."
_ALL_PARAMETERS = (
    _structural("mode", str, _CHOICE, "The mode.", choices=tuple(MODES)),
    _structural("drafting", str, _CHOICE, _DRAFTING_HELP, choices=(*DRAFTINGS, *PRESETS)),
    _structural("rule", str, _CHOICE, _RULE_HELP, choices=tuple(RULES)),
    _structural("tree", Any, "must be a tree", _TREE_HELP, choices=tuple(STATIC_TREES)),
    _structural("nodes", Count, f"{_COUNT} (root not counted)", _NODES_HELP),
    _structural("depth", Count, _COUNT, "Depth of a dynamic tree."),
    _structural("beam", Count, _COUNT, "Beam width of a dynamic tree."),
    *own_parameters(DRAFTINGS.values()),
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
    Parameter("delta", Delta, _UNIT, _DELTA_HELP, symbol="δ", column=_FLOAT),
    Parameter("lambda", Lambda, "must be a number above 1", _LAMBDA_HELP, symbol="λ", column=_FLOAT),
    *own_parameters(RULES.values()),
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
OWN = {one.name: one for one in own_parameters((*DRAFTINGS.values(), *RULES.values())) if one.in_id != "structure"}
"""The parameters that rows bring and that are not part of the structure of a cell, by name."""

_OF_DRAFTING = {name: row.parameter_names for name, row in DRAFTINGS.items()}


def check_usable(name: object) -> None:
    """Raise the error of an installed rule or drafting of this name that cannot be used."""
    if isinstance(name, str) and name in REFUSED:
        raise REFUSED[name]


def has_parameter(key: str, drafting: str, rule: str) -> bool:
    """Whether a cell of this drafting and rule has the parameter."""
    if key in ("drafting", "rule"):
        return DRAFTINGS[drafting].drafts
    return key == "mode" or key in SAMPLING or key in _OF_DRAFTING[drafting] or key in RULES[rule].parameter_names


def who_has(key: str) -> str:
    """Return which draftings or rules have a parameter, in words: `the rules additive and multiplicative`."""
    if key == "mode" or key in SAMPLING:
        return "every cell"
    if key in ("drafting", "rule"):
        return "modes that draft"
    found: list[tuple[str, list[str]]] = [
        ("drafting", [name for name, keys in _OF_DRAFTING.items() if key in keys]),
        ("rule", [name for name, rule in RULES.items() if key in rule.parameter_names]),
    ]
    listed = [(noun, ", ".join(names[:-1]), names[-1]) for noun, names in found if names]
    parts = [f"the {noun}s {first} and {last}" if first else f"the {noun} {last}" for noun, first, last in listed]
    return " and ".join(parts) or "rules from other packages (none is installed)"


def can_decide(rule: str, drafting: str) -> bool:
    """Whether the rule can decide on some drafts of the drafting: sampled ones, or chains, where it needs these."""
    row = DRAFTINGS[drafting]
    sampled = row.sampled or not RULES[rule].looks_ahead
    return sampled and (not RULES[rule].chains or row.chain or "tree" in row.parameter_names)


def tensor_parameters(rule: str) -> tuple[str, ...]:
    """Return the parameters of a rule that its compiled program reads from tensors: one program for all values."""
    row = RULES[rule]
    return tuple(key for key in row.own_names if row.tensor_bound and PARAMETERS[key].column == _FLOAT)


def chain_problem(rule: str, drafting: str, paths: Topology, tree: str | None) -> str | None:
    """Return why a rule cannot decide on drafts that branch or are not sampled; None where it can."""
    row = RULES[rule]
    if can_decide(rule, drafting) and (not row.chains or is_chain(paths)):
        return None
    if not row.chains:
        return f"the rule {rule} needs sampled drafts, and those of the drafting {drafting} are deterministic"
    return f"the rule {rule} needs a chain of sampled drafts, and {tree} is not one; the tree {row.tree} is"


def redraw_problem(rule: str, drafting: str, values: Values) -> str | None:
    """Return why a rule that looks ahead cannot decide on drafts that are coupled from step to step, else None."""
    row = DRAFTINGS[drafting]
    if not RULES[rule].looks_ahead or row.redrawn(values):
        return None
    drafts = f"{drafting} {row.label(values)}"
    return f"the rule {rule} needs drafts that every step draws anew, each by itself; not so {drafts}: use strict"


def defaults_for(drafting: str, rule: str, mode: str, own: Values | None = None) -> dict[str, Any]:
    """Return the values used when the experiment does not say otherwise, `own` being the model's; bounds have none."""
    values = {
        key: one.default
        for key, one in PARAMETERS.items()
        if one.default is not None and has_parameter(key, drafting, rule)
    }
    values.update(DRAFTINGS[drafting].defaults)
    if RULES[rule].tree and "tree" in values:
        values["tree"] = RULES[rule].tree
    values.update(RULES[rule].default_values)
    values.update({key: value for key, value in (own or {}).items() if value is not None})
    values.update({key: value for key, value in MODES[mode].defaults.items() if has_parameter(key, drafting, rule)})
    return values
