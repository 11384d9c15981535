"""The decodings that a certificate or an audit tests, and two mistakes that any rule can make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lantern_bench.checks.claims import CertificationPlan, Claim
from lantern_bench.checks.tabular_model import TOKENS, table_tokens
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.methods.catalog import (
    DRAFTINGS,
    defaults_for,
    fresh_drafts_problem,
    lossless_pairs,
)
from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.parameters import load_code
from lantern_bench.methods.rules import Rule, tree_rule
from lantern_bench.methods.static_trees import STATIC_TREES, check_topology, is_chain
from lantern_bench.models.registry import model_of

TABLE_IMAGES = 16_384
"""Images of the tables in each trial of a certificate; a quarter of it for wide windows, whose
images are longer."""
AUDIT_TABLES = 256
"""Images of the tables that an audit decodes for each image of the model."""
_BROKEN_FACTOR = 8  # a broken rule gets at most this many times the images, until it is rejected
_TOO_OFTEN = 0.02  # added to acceptance probabilities
_WIDE = 16  # tokens of a window
# With few possible tokens, the tables show a rule that leaves a rejected sibling in p or q.
_FILTERED: dict[str, Any] = {"temperature": 0.9, "top_k": 3, "cfg_scale": 1.5}
_NARROW: dict[str, Any] = {"top_k": 3}
_SIBLINGS: dict[str, Any] = {"tree": ((0,), (1,), (2,))}


@dataclass(frozen=True)
class Trial:
    """One test of the tokens of a decoding."""

    setting: str  # its name in the tables of results
    decoding: Decoding
    images: int
    # Dtype of the tested model; empty if the tables of `tabular_model.py` are tested.
    dtype: str = ""
    broken: str | None = None  # name of the planted mistake
    rule: ConfiguredRule | None = None  # replaces the rule of the decoding
    claim: Claim | None = None  # in an audit


def plan_trials(plan: CertificationPlan, dtype: str) -> list[Trial]:
    """Return the trials of a certificate, or of every claim of an audit, for a model in a dtype."""
    if not plan.claims:
        return certificate_trials(plan, dtype)
    trials = []
    for claim in plan.claims:
        trials += audit_trials(claim, plan.model, dtype=dtype, samples=plan.samples)
    return trials


def certificate_trials(plan: CertificationPlan, dtype: str) -> list[Trial]:
    """Return the trials of every lossless decoding.

    If the plan asks for power, each is followed by the trials of its broken rules.
    """
    tables = []
    for setting, decoding in table_decodings().items():
        images = TABLE_IMAGES if table_tokens(decoding) == TOKENS else TABLE_IMAGES // 4
        tables.append(Trial(f"{setting}, tables", decoding, images))
    on_model = list(_model_trials(plan, dtype))
    if not plan.has_power:
        return on_model if plan.is_thorough else tables + on_model
    trials = []
    for trial in on_model if plan.is_thorough else tables:
        trials += [trial, *broken_trials(trial)]
    return trials


def _model_trials(plan: CertificationPlan, dtype: str) -> Iterator[Trial]:
    """The trials of the model: a few images of each decoding or, if thorough, under every filter.

    The filters are none, the run's filters if it has any, and narrow ones. Temperature and guidance
    are the run's.
    """
    run = plan.sampling
    several: list[dict[str, Any]] = []
    if run.top_k or run.top_p < 1:
        several.append({"top_k": run.top_k, "top_p": run.top_p})
    if plan.is_thorough:
        several = [{}, *several, _NARROW]
    for filters in several or [{}]:
        is_narrow = filters is _NARROW
        words = "".join(f", {key.replace('_', '-')} {value:g}" for key, value in filters.items())
        decodings = lossless_decodings(
            plan,
            siblings=is_narrow,
            temperature=run.temperature,
            filter_order=run.filter_order,
            cfg_scale=run.cfg_scale,
            **filters,
        )
        for setting, decoding in decodings.items():
            yield Trial(
                setting=setting + words,
                decoding=decoding,
                images=plan.samples,
                dtype="float32" if is_narrow else dtype,
            )


def audit_trials(claim: Claim, model: str, *, dtype: str, samples: int) -> list[Trial]:
    """Return the trials of a claim.

    The first is on the tables. A lossless claim is also tested on the model and, if this package
    makes the claim, with its residual left out.

    Args:
        claim: The claim about a cell.
        model: Name of the model, for the names of the trials.
        dtype: Dtype of the model.
        samples: Images of the model; the tables get `AUDIT_TABLES` times as many.
    """
    name = claim.cell.cell_id
    decoding = claim.cell.decoding
    on_tables = Trial(
        setting=f"{name}, tables",
        decoding=table_decoding(decoding),
        images=AUDIT_TABLES * samples,
        claim=claim,
    )
    if not claim.is_lossless:
        return [on_tables]
    trials = [
        on_tables,
        Trial(f"{name}, {model}", decoding, images=samples, dtype=dtype, claim=claim),
    ]
    if claim.is_ours and on_tables.decoding.drafts:
        without_residual, _ = broken_trials(on_tables)
        trials.append(replace(without_residual, images=on_tables.images))
    return trials


def lossless_decodings(
    plan: CertificationPlan, *, siblings: bool = False, **values: Any
) -> dict[str, Decoding]:
    """Return the lossless pairs as small decodings of the model, by their labels.

    Args:
        plan: Names the model.
        siblings: Whether one static tree must have siblings.
        **values: Parameters of every decoding.
    """
    default_tree = model_of(plan.model).defaults.get("tree")
    guidance = plan.sampling.cfg_default  # of the model, which cell ids leave out
    common = {"cfg_scale": guidance, "cfg_default": guidance, **values}
    named: dict[str, Decoding] = {}
    for rule, drafting in lossless_pairs():
        sizes = _sizes(rule, drafting)
        if "tree" in drafting.defaults:
            sizes = _static_trees(rule, default_tree, siblings=siblings)
        for size in sizes:
            _add(named, rule, drafting, values=common | size)
    return named


def _sizes(rule: Rule, drafting: Drafting) -> list[dict[str, Any]]:
    """The small values of a drafting; for rules that read deeper drafts also coupled drafts."""
    sizes = [dict(drafting.small)]
    if rule.gives_visit_probability and drafting.lookahead:
        sizes.append(dict(drafting.small) | dict(drafting.lookahead))
    return sizes


def _static_trees(rule: Rule, default_tree: Any, *, siblings: bool) -> list[dict[str, Any]]:
    """The static trees of a rule: the model's or the rule's own, and one with siblings."""
    tree = default_tree or DRAFTINGS["static"].defaults["tree"]
    paths = STATIC_TREES[tree] if isinstance(tree, str) else check_topology(tree)
    of_model = {"tree": paths}
    if rule.chains:
        return [of_model if is_chain(paths) else {"tree": rule.tree}]
    if siblings:
        return [of_model, _SIBLINGS]
    if is_chain(paths):
        return [of_model, dict(DRAFTINGS["static"].small)]
    return [of_model]


def table_decodings() -> dict[str, Decoding]:
    """Return the lossless pairs as decodings of the tables, by their labels.

    They cover every named choice of a parameter, wide windows, and filters.
    """
    named: dict[str, Decoding] = {}
    for rule, drafting in lossless_pairs():
        words = {
            row.name: row.kind.choices
            for row in drafting.parameters
            if row.kind.choices and row.name != "tree"
        }
        sizes = _sizes(rule, drafting)
        if "tree" in drafting.defaults:
            sizes = [{"tree": rule.tree}] if rule.chains else [dict(drafting.small), _SIBLINGS]
        chosen = [
            dict(zip(words, values, strict=True)) for values in itertools.product(*words.values())
        ]
        several = [size | values for size, values in itertools.product(sizes, chosen)]
        if "window" in drafting.small:
            wide = dict(drafting.small) | {"window": _WIDE}
            couplings = [{"coupling": word} for word in words.get("coupling", ())]
            several += [wide | coupling for coupling in couplings or [{}]]
        for values in several:
            _add(named, rule, drafting, values=values)
        for size in sizes:
            _add(named, rule, drafting, values=size | _FILTERED, suffix=", filtered and guided")
    return named


def _add(
    named: dict[str, Decoding],
    rule: Rule,
    drafting: Drafting,
    *,
    values: Mapping[str, Any],
    suffix: str = "",
) -> None:
    """Add a decoding of a rule and a drafting, unless the rule cannot decide with these values."""
    defaults = defaults_for(drafting.name, rule.name, "speculative")
    if fresh_drafts_problem(rule.name, drafting.name, {**defaults, **values}):
        return
    given: dict[str, Any] = {"cfg_default": 1.0, **values}
    decoding = Decoding("speculative", drafting=drafting.name, rule=rule.name, **given)
    if decoding.rule != rule.name:  # greedy decoding has no rule for chains
        return
    label = f"{drafting.name} {decoding.tree_label}"
    if rule.name != "strict":
        label += f", {rule.name}"
    named[label + suffix] = decoding


def table_decoding(decoding: Decoding) -> Decoding:
    """Return the same method with few drafts, for the tables, without filters and guidance."""
    values = decoding.settings()
    values.pop("tree", None)
    values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg_scale": 1.0}
    if decoding.rule_row.chains and decoding.paths:
        values["tree"] = decoding.rule_row.tree
    else:
        values |= decoding.drafting_row.small
    if decoding.neighbours:
        values["neighbours"] = 2
    return Decoding(**values)


# ---- Broken rules, which the tests must reject to have power

Accept: TypeAlias = Callable[[Children, ConfiguredRule], Acceptance]


def broken_trials(trial: Trial) -> list[Trial]:
    """Return a trial with each of the two mistakes that any rule can make."""
    accept = load_code(trial.decoding.rule_row.accept_tree or accept_children)
    mistakes: dict[str, Accept] = {
        "residual left out": partial(without_residual, accept=accept),
        "a draft accepted once too often in 50": partial(accepted_too_often, accept=accept),
    }
    return [
        replace(
            trial,
            images=_BROKEN_FACTOR * trial.images,
            broken=name,
            rule=ConfiguredRule(tree_rule(name)(code)),
        )
        for name, code in mistakes.items()
    ]


def without_residual(children: Children, rule: ConfiguredRule, accept: Accept) -> Acceptance:
    """Leave the residual out: draw the bonus token from the node's p also after a rejection.

    Args:
        children: Children of each node.
        rule: The rule of the decoding.
        accept: The function that decides on the drafts.
    """
    p = children.p.clone()
    return replace(
        accept(children, rule),
        residual=p,
        exhausted=torch.zeros_like(children.offered[:, 0]),
    )


def accepted_too_often(children: Children, rule: ConfiguredRule, accept: Accept) -> Acceptance:
    """Raise the acceptance probability of every draft that can be accepted, to at most 1.

    Args:
        children: Children of each node.
        rule: The rule of the decoding.
        accept: The function that decides on the drafts.
    """
    acceptance = accept(children, rule)
    raised = (acceptance.accept + _TOO_OFTEN).clamp(max=1.0)
    can_be_accepted = children.offered & (acceptance.accept > 0)
    return replace(acceptance, accept=torch.where(can_be_accepted, raised, 0.0))
