"""The trials of a certificate and of an audit: which decodings are tested, where, and with which broken rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lantern_bench.certify.plan import Claim
from lantern_bench.certify.tables import LEVEL
from lantern_bench.certify.tabular import table_model
from lantern_bench.certify.whole_image import TESTS
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, multiplicative_limit, rule_of
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.methods.rules import Rule
from lantern_bench.methods.tables import DRAFTINGS, RULES, can_decide, defaults_for, fresh_drafts_problem
from lantern_bench.methods.trees import STATIC_TREES, check_topology, is_chain
from lantern_bench.models.loaded_model import LoadedModel

TABLE_IMAGES = 256
"""How many images of the tables are decoded for each image of the model."""
_BRANCHING = {"tree": "small-7"}  # tested beside the model's own tree: its siblings are sampled
# With three possible tokens and siblings at every step, a rule that leaves a rejected draft in p or q is seen.
_NARROW: dict[str, Any] = {"top_k": 3}
_SIBLINGS = {"tree": ((0,), (1,), (2,))}
_BROKEN_RULE_FACTOR = 4  # until a broken rule is rejected, at most this many times the images are decoded
_REDUCED_DIVISOR = 4  # filtered cells, deterministic drafts and chains get this part of the images


@dataclass(frozen=True)
class Trial:
    """One test of the tokens of a decoding."""

    setting: str  # its name in the tables of results
    decoding: Decoding
    images: int
    on_tables: bool = False  # tested on the tables, by G-tests; else with the model, by tests of whole images
    dtype: str = ""  # of the model
    broken_rule: AcceptanceRule | None = None  # in place of the decoding's: the test must reject it
    level: float = 0.0  # with a broken rule: the p-value at which no more images are decoded

    @property
    def name(self) -> str:
        """The setting, and what is broken."""
        return f"{self.setting}: {self.broken_rule.name}" if self.broken_rule else self.setting


def certificate_trials(
    run: Decoding, tree: Any, cfg_default: float, model: LoadedModel, dtype: str, samples: int
) -> list[Trial]:
    """Return the trials of every lossless decoding under three filters, each followed by those of its broken rules.

    `run` gives temperature, guidance and filters, `tree` the model's own tree; `samples` is the most images of a
    trial without a broken rule.
    """
    common = {"temperature": run.temperature, "filter_order": run.filter_order, "cfg_scale": run.cfg_scale}
    run_filters: dict[str, Any] = {"top_k": run.top_k, "top_p": run.top_p}
    cases = []
    for filters in ({}, *([run_filters] if run.top_k or run.top_p < 1 else []), _NARROW):
        words = "".join(f", {key.replace('_', '-')} {value:g}" for key, value in filters.items())
        is_narrow = filters is _NARROW
        lossless = lossless_decodings(tree, cfg_default, siblings=is_narrow, **common, **filters)
        for setting, decoding in lossless.items():
            # A chain has the rule of a branching tree, which shows more: the broken rules run on that, and
            # those of a rule for chains on a static chain.
            broken: Sequence[AcceptanceRule] = ()
            if filters != run_filters and (decoding.branches or (decoding.rule_row.chains and bool(decoding.paths))):
                broken = broken_sibling_rules(decoding) if is_narrow else broken_rules(decoding, model)
            has_all_images = bool(broken) and decoding.drafting_row.sampled
            trial = Trial(
                setting + words,
                decoding,
                samples if has_all_images else -(-samples // _REDUCED_DIVISOR),
                dtype="float32" if is_narrow else dtype,
            )
            cases.append((trial, broken))
    level = LEVEL / (TESTS * len(cases))  # the strictest of Holm's correction
    trials = []
    for trial, broken in cases:
        images = _BROKEN_RULE_FACTOR * trial.images
        trials += [trial, *(replace(trial, broken_rule=rule, images=images, level=level) for rule in broken)]
    return trials


def audit_trials(claim: Claim, model: LoadedModel, dtype: str, samples: int) -> list[Trial]:
    """Return the trials of a claim: on the tables, and with the model if it says lossless.

    A claim that says lossless and is ours is also tested on the tables without its residual: the mistake that any way
    to draft can have.
    """
    decoding, small = claim.cell.decoding, table_decoding(claim.cell.decoding)
    trials = [Trial(f"{claim.cell.cell_id}, tables", small, TABLE_IMAGES * samples, on_tables=True)]
    if claim.is_lossless:
        trials.append(Trial(f"{claim.cell.cell_id}, {model.name}", decoding, samples, dtype=dtype))
    if claim.is_lossless and claim.is_ours:
        trials += [replace(trials[0], broken_rule=rule) for rule in broken_rules(small, table_model())[:1]]
    return trials


def lossless_decodings(tree: Any, cfg_default: float, *, siblings: bool = False, **values: Any) -> dict[str, Decoding]:
    """Return every lossless rule with every drafting that it can decide on, in small, by their labels.

    With `siblings` each rule for trees also decides on three siblings, whatever the model's own tree.
    """
    named: dict[str, Decoding] = {}
    for rule, drafting in itertools.product(RULES.values(), DRAFTINGS.values()):
        decides = rule.lossless and drafting.lossless and drafting.drafts and can_decide(rule.name, drafting.name)
        if rule.name == "none" or not decides:
            continue
        if fresh_drafts_problem(rule.name, drafting.name, defaults_for(drafting.name, rule.name, "speculative")):
            continue
        common = {"mode": "speculative", "cfg_scale": cfg_default, "cfg_default": cfg_default, **values}
        common |= {"drafting": drafting.name, "rule": rule.name}
        for small in _trees(rule, tree, siblings) if "tree" in drafting.defaults else [drafting.small]:
            decoding = Decoding(**{**common, **small})
            if decoding.rule == rule.name:  # greedy decoding has no rule for chains
                suffix = "" if rule.name == "strict" else f", {rule.name}"
                named[f"{drafting.name} {decoding.tree_label}{suffix}"] = decoding
    return named


def _trees(rule: Rule, tree: Any, siblings: bool) -> list[dict[str, Any]]:
    """The static trees that a rule is tested on: the model's own or the rule's, and one that branches."""
    model_tree = tree or DRAFTINGS["static"].defaults["tree"]
    paths = STATIC_TREES[model_tree] if isinstance(model_tree, str) else check_topology(model_tree)
    if rule.chains:
        return [{"tree": paths} if is_chain(paths) else {"tree": rule.tree}]
    if siblings:
        return [{"tree": paths}, _SIBLINGS]
    return [{"tree": paths}, *([_BRANCHING] if is_chain(paths) else [])]


def table_decoding(decoding: Decoding) -> Decoding:
    """Return the same method with few drafts and without filters and guidance, for the tables (`tabular.py`)."""
    values = {key: value for key, value in decoding.settings().items() if key != "tree"}
    values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg_scale": 1.0}
    is_static_chain = decoding.rule_row.chains and bool(decoding.paths)
    values |= {"tree": decoding.rule_row.tree} if is_static_chain else dict(decoding.drafting_row.small)
    return Decoding(**values | ({"neighbours": 2} if decoding.neighbours else {}))


# ---- Rules that are broken on purpose: what the tests must reject to have power (docs/algorithms.md, section 6.1)

Accept: TypeAlias = Callable[[Children, AcceptanceRule], Acceptance]

TOO_OFTEN, LAMBDA = 0.02, 2.0
"""What a draft's acceptance probability is raised by, and the bound of the relaxed rule among the broken ones."""


def broken_rules(decoding: Decoding, model: LoadedModel) -> list[AcceptanceRule]:
    """Return a decoding's rule with the mistakes that show without siblings, by name; none where nothing is drafted."""
    if not decoding.drafts:
        return []
    accept = rule_of(decoding, model).accept or accept_children
    rules = [
        AcceptanceRule("residual left out", accept=partial(without_residual, accept=accept)),
        AcceptanceRule("a draft accepted once too often in 50", accept=partial(accepted_too_often, accept=accept)),
    ]
    if accept is accept_traversal:
        stale = partial(accept_traversal, update=lambda share, _sum: share)
        rules.append(AcceptanceRule("share not updated after a rejection", accept=stale))
    if accept is accept_children:
        rules[0] = AcceptanceRule("residual left out", accept=strict_without_residual)
    if accept is accept_children and model.codebook is not None:
        k = min(100, len(model.codebook) // 4)
        name, values = f"relaxed: lambda {LAMBDA:g}, k {k}", {"lambda": LAMBDA}
        limit, nearest_codes = multiplicative_limit, model.table(k)
        rules.append(AcceptanceRule(name, values, limit=limit, neighbours=k, nearest_codes=nearest_codes))
    return rules


def broken_sibling_rules(decoding: Decoding) -> list[AcceptanceRule]:
    """Return the strict rule with a mistake with siblings, which is small unless few tokens are possible."""
    has_siblings = decoding.branches or not decoding.drafting_row.sampled
    if decoding.rule != "strict" or not has_siblings:
        return []
    return [AcceptanceRule("not renormalised after a rejected sibling", accept=siblings_not_renormalised)]


def strict_without_residual(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Each draft is accepted with the right probability and only the distribution of the tokens is wrong, which makes it
    the mistake that a weak test misses.
    """
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        q_x = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))


def without_residual(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, and draw the bonus token from the node's own p also after a rejection."""
    p = children.p.clone()
    return replace(accept(children, rule), residual=p, exhausted=torch.zeros_like(children.offered[:, 0]))


def accepted_too_often(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, with probabilities raised by `TOO_OFTEN`, to at most 1, of drafts that it can accept."""
    acceptance = accept(children, rule)
    raised = (acceptance.accept + TOO_OFTEN).clamp(max=1.0)
    can_be_accepted = children.offered & (acceptance.accept > 0)
    return replace(acceptance, accept=torch.where(can_be_accepted, raised, 0.0))


def siblings_not_renormalised(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not renormalise."""
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        p_x = p.gather(1, x)
        q_x = torch.ones_like(p_x) if q is None else q.gather(1, x)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p_x / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is None:
            p.scatter_(1, x, torch.where(tried, 0.0, p_x))
        else:
            residual = (p - q).clamp_min(0.0)
            residual_sum = residual.sum(dim=1, keepdim=True)
            p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
            q.scatter_(1, x, torch.where(tried, 0.0, q_x))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))
