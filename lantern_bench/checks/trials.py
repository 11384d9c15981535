"""Which decodings a certificate or an audit tests, and the two mistakes that any rule can be given (`--power`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lantern_bench.checks.claims import CertificationPlan, Claim
from lantern_bench.checks.tabular_model import TOKENS, table_tokens
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.bound_rule import BoundRule
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.methods.catalog import (
    DRAFTINGS,
    RULES,
    can_decide,
    defaults_for,
    fresh_drafts_problem,
)
from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.parameters import load_code
from lantern_bench.methods.rules import Rule, tree_rule
from lantern_bench.methods.static_trees import STATIC_TREES, check_topology, is_chain

TABLE_IMAGES = 16_384
"""Images of the tables in each trial of a certificate; of wide windows, whose images are longer, a quarter."""
AUDIT_TABLES = 256
"""How many images of the tables an audit decodes for each image of the model."""
_TOO_OFTEN = 0.02  # what acceptance probabilities are raised by
# On the tables: with few possible tokens a rule that leaves a rejected sibling in p or q is seen.
_FILTERED: dict[str, Any] = {"temperature": 0.9, "top_k": 3, "cfg_scale": 1.5}
_NARROW: dict[str, Any] = {"top_k": 3}
_SIBLINGS = {"tree": ((0,), (1,), (2,))}
_WIDE = 16  # tokens of a window
# until a broken rule is rejected, at most this many times the images are decoded
_BROKEN_FACTOR = 8


@dataclass(frozen=True)
class Trial:
    """One test of the tokens of a decoding."""

    setting: str  # its name in the tables of results
    decoding: Decoding
    images: int
    # of the model whose whole images are tested; "": the tables of `tabular.py` are, by G-tests
    dtype: str = ""
    broken: str | None = None  # what is wrong on purpose
    rule: BoundRule | None = None  # in place of the decoding's
    # makes what replaces the decoding's
    drafting: Callable[[Decoding, Target, int], DraftMethod] | None = None


def certificate_trials(
    plan: CertificationPlan, tree: Any, cfg_default: float, dtype: str
) -> list[Trial]:
    """Return the trials of every lossless decoding; with `has_power` each is followed by those of its broken rules."""
    tables = []
    for setting, decoding in table_decodings().items():
        images = TABLE_IMAGES if table_tokens(decoding) == TOKENS else TABLE_IMAGES // 4
        tables.append(Trial(f"{setting}, tables", decoding, images))
    model = list(_model_trials(plan=plan, tree=tree, cfg_default=cfg_default, dtype=dtype))
    if not plan.has_power:
        return model if plan.is_thorough else tables + model
    trials = model if plan.is_thorough else tables
    return [broken for trial in trials for broken in (trial, *broken_trials(trial))]


def _model_trials(
    plan: CertificationPlan, tree: Any, cfg_default: float, dtype: str
) -> Iterator[Trial]:
    """The trials of the model: a few images of each decoding, or thorough, under every filter.

    The filters: none, those of the run if it has any, and narrow ones; temperature and guidance are those of the run.
    """
    run = plan.sampling
    common = {
        "temperature": run.temperature,
        "filter_order": run.filter_order,
        "cfg_scale": run.cfg_scale,
    }
    run_filters: dict[str, Any] = {"top_k": run.top_k, "top_p": run.top_p}
    has_filters = bool(run.top_k) or run.top_p < 1
    thorough = ({}, *([run_filters] if has_filters else []), _NARROW)
    for filters in thorough if plan.is_thorough else [run_filters if has_filters else {}]:
        words = "".join(f", {key.replace('_', '-')} {value:g}" for key, value in filters.items())
        is_narrow = filters is _NARROW
        for setting, decoding in lossless_decodings(
            tree, cfg_default, siblings=is_narrow, **common, **filters
        ).items():
            yield Trial(
                setting=setting + words,
                decoding=decoding,
                images=plan.samples,
                dtype="float32" if is_narrow else dtype,
            )


def audit_trials(claim: Claim, model: str, dtype: str, samples: int) -> list[Trial]:
    """Return the trials of a claim: on the tables, with the model if lossless, and without its residual if ours."""
    decoding = claim.cell.decoding
    small = table_decoding(claim.cell.decoding)
    trials = [Trial(f"{claim.cell.cell_id}, tables", small, AUDIT_TABLES * samples)]
    if claim.is_lossless:
        trials.append(
            Trial(
                setting=f"{claim.cell.cell_id}, {model}",
                decoding=decoding,
                images=samples,
                dtype=dtype,
            )
        )
    if claim.is_lossless and claim.is_ours and small.drafts:
        trials.append(replace(broken_trials(trials[0])[0], images=trials[0].images))
    return trials


def lossless_pairs() -> Iterator[tuple[Rule, Drafting]]:
    """Yield every lossless rule with every lossless drafting that it can decide on.

    On a drafting of chains `traversal` is the code of `block`, and comes once.
    """
    codes = set[tuple[Any, str]]()
    for rule, drafting in itertools.product(RULES.values(), DRAFTINGS.values()):
        are_lossless = (
            rule.lossless and rule.name != "none" and drafting.lossless and drafting.drafts
        )
        is_repeated = drafting.chain and (rule.accept_tree, drafting.name) in codes
        if are_lossless and can_decide(rule.name, drafting.name) and not is_repeated:
            codes.add((rule.accept_tree, drafting.name))
            yield rule, drafting


def lossless_decodings(
    tree: Any, cfg_default: float, *, siblings: bool = False, **values: Any
) -> dict[str, Decoding]:
    """Return the lossless pairs as decodings of a model, in small, by their labels."""
    named: dict[str, Decoding] = {}
    for rule, drafting in lossless_pairs():
        common = {"cfg_scale": cfg_default, **values}
        for small in (
            _trees(rule, tree, siblings) if "tree" in drafting.defaults else [drafting.small]
        ):
            _add(
                named=named,
                rule=rule,
                drafting=drafting,
                values={**common, **small},
                cfg_default=cfg_default,
            )
    return named


def table_decodings() -> dict[str, Decoding]:
    """Return the lossless pairs as decodings of the tables: every word of their parameters, wide windows, filters."""
    named: dict[str, Decoding] = {}
    for rule, drafting in lossless_pairs():
        words = {
            row.name: row.kind.choices
            for row in drafting.parameters
            if row.kind.choices and row.name != "tree"
        }
        combinations = [
            dict(zip(words, chosen, strict=True)) for chosen in itertools.product(*words.values())
        ]
        smalls: list[dict[str, Any]] = [dict(drafting.small)]
        if "tree" in drafting.defaults:
            smalls = [{"tree": rule.tree}] if rule.chains else [dict(drafting.small), _SIBLINGS]
        for small, chosen in itertools.product(smalls, combinations):
            _add(named=named, rule=rule, drafting=drafting, values={**small, **chosen})
        if "window" in drafting.small:
            couplings = [{"coupling": word} for word in words.get("coupling", ())] or [{}]
            for chosen in couplings:
                _add(
                    named=named,
                    rule=rule,
                    drafting=drafting,
                    values={**drafting.small, **chosen, "window": _WIDE},
                )
        for small in smalls:
            _add(
                named=named,
                rule=rule,
                drafting=drafting,
                values={**small, **_FILTERED},
                suffix=", filtered and guided",
            )
    return named


def _add(
    named: dict[str, Decoding],
    rule: Rule,
    drafting: Drafting,
    values: dict[str, Any],
    cfg_default: float = 1.0,
    suffix: str = "",
) -> None:
    """Add a decoding of a rule and a drafting, unless they do not go together with these values."""
    defaults = defaults_for(drafting.name, rule.name, "speculative")
    if fresh_drafts_problem(rule.name, drafting.name, {**defaults, **values}):
        return
    pair: dict[str, Any] = {
        "drafting": drafting.name,
        "rule": rule.name,
        "cfg_default": cfg_default,
    }
    decoding = Decoding("speculative", **pair, **values)
    if decoding.rule == rule.name:  # greedy decoding has no rule for chains
        words = "" if rule.name == "strict" else f", {rule.name}"
        named[f"{drafting.name} {decoding.tree_label}{words}{suffix}"] = decoding


def _trees(rule: Rule, tree: Any, siblings: bool) -> list[dict[str, Any]]:
    """The static trees that a rule is tested on: the model's own or the rule's, and one with siblings."""
    model_tree = tree or DRAFTINGS["static"].defaults["tree"]
    paths = STATIC_TREES[model_tree] if isinstance(model_tree, str) else check_topology(model_tree)
    if rule.chains:
        return [{"tree": paths} if is_chain(paths) else {"tree": rule.tree}]
    if siblings:
        return [{"tree": paths}, _SIBLINGS]
    return [{"tree": paths}, *([dict(DRAFTINGS["static"].small)] if is_chain(paths) else [])]


def table_decoding(decoding: Decoding) -> Decoding:
    """Return the same method with few drafts and without filters and guidance, for the tables (`tabular.py`)."""
    values = {key: value for key, value in decoding.settings().items() if key != "tree"}
    values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg_scale": 1.0}
    is_static_chain = decoding.rule_row.chains and bool(decoding.paths)
    values |= (
        {"tree": decoding.rule_row.tree} if is_static_chain else dict(decoding.drafting_row.small)
    )
    return Decoding(**values | ({"neighbours": 2} if decoding.neighbours else {}))


# ---- Rules that are broken on purpose: what the tests must reject to have power

Accept: TypeAlias = Callable[[Children, BoundRule], Acceptance]


def broken_trials(trial: Trial) -> list[Trial]:
    """Return a trial with the mistakes that any rule can have."""
    accept = load_code(trial.decoding.rule_row.accept_tree or accept_children)
    mistakes: dict[str, Accept] = {
        "residual left out": partial(without_residual, accept=accept),
        "a draft accepted once too often in 50": partial(accepted_too_often, accept=accept),
    }
    several = replace(trial, images=_BROKEN_FACTOR * trial.images)
    return [
        replace(several, broken=name, rule=BoundRule(tree_rule(name)(code)))
        for name, code in mistakes.items()
    ]


def without_residual(
    children: Children, rule: BoundRule, accept: Accept = accept_children
) -> Acceptance:
    """Decide as `accept`, and draw the bonus token from the node's own p also after a rejection."""
    p = children.p.clone()
    return replace(
        accept(children, rule), residual=p, exhausted=torch.zeros_like(children.offered[:, 0])
    )


def accepted_too_often(
    children: Children, rule: BoundRule, accept: Accept = accept_children
) -> Acceptance:
    """Decide as `accept`, with probabilities raised, to at most 1, of drafts that it can accept."""
    acceptance = accept(children, rule)
    raised = (acceptance.accept + _TOO_OFTEN).clamp(max=1.0)
    can_be_accepted = children.offered & (acceptance.accept > 0)
    return replace(acceptance, accept=torch.where(can_be_accepted, raised, 0.0))
