"""Certify or audit one model: which decodings are tested, with which broken rules, and the tables of the results.

Bars and rows are in `tables.py`, the tests in `whole_image.py` and `tabular.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lantern_bench.certify import tables, whole_image
from lantern_bench.certify.plan import CertificationPlan, Claim
from lantern_bench.certify.relaxation import emitted_tv_rows
from lantern_bench.certify.tabular import TOKENS, g_tests, table_model
from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, multiplicative_limit, rule_of
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.methods.rules import Rule
from lantern_bench.methods.tables import DRAFTINGS, RULES, can_decide, defaults_for, fresh_drafts_problem
from lantern_bench.methods.trees import STATIC_TREES, check_topology, is_chain
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.report.tables import frame, write_csv
from lantern_bench.runs.devices import Compute, choose_compute, load_models, package_versions

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

TABLE_IMAGES = 256
"""How many images of the tables are decoded for each image of the model."""
# With few possible tokens and siblings a rule that leaves a rejected draft in p or q is seen.
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
    dtype: str = ""  # of the model whose whole images are tested; "": the tables of `tabular.py` are, by G-tests
    broken_rule: AcceptanceRule | None = None  # in place of the decoding's: the test must reject it


def certificate_trials(
    run: Decoding, tree: Any, cfg_default: float, model: LoadedModel, dtype: str, samples: int
) -> list[Trial]:
    """Return the trials of every lossless decoding under each filter, each followed by those of its broken rules.

    The filters: none, those of `run` if it has any, and narrow ones; temperature and guidance are those of `run`.
    `samples` is the most images of a trial without a broken rule.
    """
    common = {"temperature": run.temperature, "filter_order": run.filter_order, "cfg_scale": run.cfg_scale}
    run_filters: dict[str, Any] = {"top_k": run.top_k, "top_p": run.top_p}
    trials = []
    for filters in ({}, *([run_filters] if run.top_k or run.top_p < 1 else []), _NARROW):
        words = "".join(f", {key.replace('_', '-')} {value:g}" for key, value in filters.items())
        is_narrow = filters is _NARROW
        lossless = lossless_decodings(tree, cfg_default, siblings=is_narrow, **common, **filters)
        for setting, decoding in lossless.items():
            # A branching tree shows more than a chain: the broken rules run on that.
            broken: Sequence[AcceptanceRule] = ()
            if filters != run_filters and (decoding.branches or (decoding.rule_row.chains and bool(decoding.paths))):
                broken = broken_sibling_rules(decoding) if is_narrow else broken_rules(decoding, model)
            has_all_images = bool(broken) and decoding.drafting_row.sampled
            images = samples if has_all_images else -(-samples // _REDUCED_DIVISOR)
            trial = Trial(setting + words, decoding, images, "float32" if is_narrow else dtype)
            several = replace(trial, images=_BROKEN_RULE_FACTOR * images)
            trials += [trial, *(replace(several, broken_rule=rule) for rule in broken)]
    return trials


def audit_trials(claim: Claim, model: LoadedModel, dtype: str, samples: int) -> list[Trial]:
    """Return the trials of a claim: on the tables, with the model if lossless, and without its residual if ours."""
    decoding, small = claim.cell.decoding, table_decoding(claim.cell.decoding)
    trials = [Trial(f"{claim.cell.cell_id}, tables", small, TABLE_IMAGES * samples)]
    if claim.is_lossless:
        trials.append(Trial(f"{claim.cell.cell_id}, {model.name}", decoding, samples, dtype))
    if claim.is_lossless and claim.is_ours:
        trials += [replace(trials[0], broken_rule=rule) for rule in broken_rules(small, table_model())[:1]]
    return trials


def lossless_decodings(tree: Any, cfg_default: float, *, siblings: bool = False, **values: Any) -> dict[str, Decoding]:
    """Return every lossless rule with every drafting that it can decide on, in small, by their labels."""
    named: dict[str, Decoding] = {}
    for rule, drafting in itertools.product(RULES.values(), DRAFTINGS.values()):
        are_lossless = rule.lossless and rule.name != "none" and drafting.lossless and drafting.drafts
        if not are_lossless or not can_decide(rule.name, drafting.name):
            continue
        if fresh_drafts_problem(rule.name, drafting.name, defaults_for(drafting.name, rule.name, "speculative")):
            continue
        common = {"cfg_scale": cfg_default, **values, "drafting": drafting.name, "rule": rule.name}
        for small in _trees(rule, tree, siblings) if "tree" in drafting.defaults else [drafting.small]:
            decoding = Decoding("speculative", cfg_default=cfg_default, **common, **small)
            if decoding.rule == rule.name:  # greedy decoding has no rule for chains
                suffix = "" if rule.name == "strict" else f", {rule.name}"
                named[f"{drafting.name} {decoding.tree_label}{suffix}"] = decoding
    return named


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
    values |= {"tree": decoding.rule_row.tree} if is_static_chain else dict(decoding.drafting_row.small)
    return Decoding(**values | ({"neighbours": 2} if decoding.neighbours else {}))


# ---- Rules that are broken on purpose: what the tests must reject to have power (docs/algorithms.md, section 6.1)

Accept: TypeAlias = Callable[[Children, AcceptanceRule], Acceptance]

_TOO_OFTEN, _LAMBDA = 0.02, 2.0  # what acceptance probabilities are raised by; the bound of the relaxed rule


def broken_rules(decoding: Decoding, model: LoadedModel) -> list[AcceptanceRule]:
    """Return a decoding's rule with the mistakes that show without siblings, by name; none where nothing is drafted."""
    if not decoding.drafts:
        return []
    accept = rule_of(decoding, model).accept or accept_children
    is_strict = accept is accept_children
    no_residual = strict_without_residual if is_strict else partial(without_residual, accept=accept)
    rules = [
        AcceptanceRule("residual left out", accept=no_residual),
        AcceptanceRule("a draft accepted once too often in 50", accept=partial(accepted_too_often, accept=accept)),
    ]
    if accept is accept_traversal:
        stale = partial(accept_traversal, update=lambda share, _sum: share)
        rules.append(AcceptanceRule("share not updated after a rejection", accept=stale))
    if is_strict and model.codebook is not None:
        k = min(100, len(model.codebook) // 4)
        name, values = f"relaxed: lambda {_LAMBDA:g}, k {k}", {"lambda": _LAMBDA}
        limit, nearest_codes = multiplicative_limit, model.table(k)
        rules.append(AcceptanceRule(name, values, limit=limit, neighbours=k, nearest_codes=nearest_codes))
    return rules


def broken_sibling_rules(decoding: Decoding) -> list[AcceptanceRule]:
    """Return the strict rule with a mistake with siblings, which is small unless few tokens are possible."""
    broken = AcceptanceRule("not renormalised after a rejected sibling", accept=siblings_not_renormalised)
    return [broken] if decoding.rule == "strict" else []


def strict_without_residual(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule without its residual: drafts are accepted as often as they should, so a weak test misses it."""
    keeps_p = AcceptanceRule(chance=lambda drafts, _values: drafts.strict_ratio, official_share=0.0)
    return accept_children(children, keeps_p)


def without_residual(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, and draw the bonus token from the node's own p also after a rejection."""
    p = children.p.clone()
    return replace(accept(children, rule), residual=p, exhausted=torch.zeros_like(children.offered[:, 0]))


def accepted_too_often(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, with probabilities raised, to at most 1, of drafts that it can accept."""
    acceptance = accept(children, rule)
    raised = (acceptance.accept + _TOO_OFTEN).clamp(max=1.0)
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


# ---- The measurements


class Certification:
    """The measurements of one plan."""

    def __init__(self, plan: CertificationPlan) -> None:
        self.plan, self.model, self.resolved = plan, plan.model, plan.resolved
        self.tree, self.cfg_default = model_of(plan.model).defaults.get("tree"), plan.resolved.cfg_defaults[plan.model]
        settings = plan.resolved.settings
        self.compute: Compute = choose_compute(settings.device, settings.dtype, fast=True)
        self.loaded: LoadedModel = load_models(plan.resolved, self.compute)[plan.model]

    @cached_property
    def exact(self) -> LoadedModel:
        """The model in float32, where rounding moves few tokens across a filter's edge, not compiled."""
        return load_models(self.resolved, self.compute._replace(dtype=torch.float32))[self.model]

    def measure(self, emitted_tv: bool, on_progress: OnProgress) -> Tables:
        """Return the tables."""
        for done, total in self.loaded.prepare([prompt.text for prompt in self.plan.prompts]):
            on_progress("captions", done / total)
        if emitted_tv:
            return self._emitted_tv(self.plan.relaxed, on_progress)
        return self._audit(on_progress) if self.plan.claims else self._certificate(on_progress)

    def write(self, folder: Path, measured: Tables) -> None:
        """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
        for name, rows in measured.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        measurement = {
            "model": self.model,
            "weights": dict(self.loaded.weights),
            "seed": self.resolved.settings.seed,
            "prompts": self.resolved.settings.prompts,
            **self.plan.sizes._asdict(),
            "device": self.compute.device.type,
            "dtype": self.compute.dtype_name,
            "packages": package_versions(),
        }
        write_atomically(folder / "measurement.json", (json.dumps(measurement, indent=2) + "\n").encode())

    def _audit(self, on_progress: OnProgress) -> Tables:
        audited = []
        for claim in self.plan.claims:
            trials = audit_trials(claim, self.loaded, self.compute.dtype_name, self.plan.sizes.samples)
            audited.append((claim, [self._run(trial, on_progress) for trial in trials]))
        costs = self._emitted_tv(self.plan.relaxed, on_progress)
        rows, tests = tables.audit_rows(self.model, audited, costs["emitted_tv"])
        return {"audit": rows, "lossless_tests": tests, **costs}

    def _certificate(self, on_progress: OnProgress) -> Tables:
        first, dtype, samples = self.plan.relaxed[0].decoding, self.compute.dtype_name, self.plan.sizes.samples
        trials = certificate_trials(first, self.tree, self.cfg_default, self.loaded, dtype, samples)
        # The strictest level of Holm's correction.
        level = tables.LEVEL / (whole_image.TESTS * sum(trial.broken_rule is None for trial in trials))
        rows, tests = tables.whole_image_rows(self.model, [self._run(trial, on_progress, level) for trial in trials])
        rows += self._greedy(on_progress)
        # The strict rule with deterministic drafts, because their emitted TV is exact; sampling as in the first cell.
        values = {key: first.value(key) for key in ("temperature", "top_k", "top_p", "filter_order", "cfg_scale")}
        values |= {"drafting": "dynamic", "cfg_default": self.cfg_default, **DRAFTINGS["dynamic"].small}
        strict = Cell(self.model, Decoding("speculative", **values))
        places = self._emitted_tv([strict], on_progress)["emitted_tv_places"]
        rows.append(tables.strict_row(self.model, f"dynamic {strict.decoding.tree_label}", places))
        costs = self._emitted_tv(self.plan.relaxed, on_progress)
        rows += tables.cost_check_rows(costs["emitted_tv"], costs["emitted_tv_places"])
        return {"certificate": rows, "lossless_tests": tests, **costs}

    def _run(self, trial: Trial, on_progress: OnProgress, level: float = 0.0) -> tables.TrialResult:
        """Decode and test the images of a trial; of a broken rule only until a p-value falls below `level`."""
        decoding, rule = trial.decoding, trial.broken_rule
        broken = rule.name if rule else None
        on_progress(f"whole images, {trial.setting}", 0.0)
        if not trial.dtype:
            p_of_tests, tv = g_tests(decoding, trial.images, rule)
            return tables.TrialResult(trial.setting, broken, p_of_tests, trial.images, trial.images * TOKENS, tv=tv)
        model = self.loaded if trial.dtype == self.compute.dtype_name else self.exact
        depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
        batches, images, seed = [], 0, self.resolved.settings.seed
        tolerance = whole_image.edge_tolerance(trial.dtype, decoding)
        for batch in whole_image.decoded_evidence(
            model, self.plan.prompts, decoding, trial.images, tolerance=tolerance, seed=seed, rule=rule
        ):
            batches.append(batch)
            images += len(batch.starts)
            on_progress(f"whole images, {trial.setting}", min(1.0, images / trial.images))
            p_of_tests = whole_image.p_values(batches, depth)
            if rule and min(p_of_tests.values()) < level:
                break
        edge, impossible = (sum(int(getattr(batch, key).sum()) for batch in batches) for key in ("edge", "impossible"))
        tokens = sum(batch.starts.size for batch in batches)
        return tables.TrialResult(trial.setting, broken, p_of_tests, images, tokens, edge, impossible)

    def _greedy(self, on_progress: OnProgress) -> list[dict[str, Any]]:
        """Whether each drafting at temperature 0 gives the tokens of greedy decoding."""
        named = lossless_decodings(self.tree, self.cfg_default, temperature=0)
        prompts = list(dict.fromkeys(self.plan.prompts[: self.plan.sizes.greedy]))
        differences = whole_image.greedy_differences(self.loaded, prompts, named, on_progress)
        tolerance = whole_image.NEAR_TIE[self.compute.dtype_name]
        return [tables.identity_row(self.model, name, of_name, tolerance) for name, of_name in differences.items()]

    def _emitted_tv(self, cells: Sequence[Cell], on_progress: OnProgress) -> Tables:
        """The means of emitted TV of the cells, and the rows that they are computed from."""
        sizes, seed, prompts = self.plan.sizes, self.resolved.settings.seed, self.plan.prompts
        amount = {"positions": sizes.positions, "draws": sizes.draws}
        places = list(emitted_tv_rows(self.loaded, cells, prompts, **amount, seed=seed, on_progress=on_progress))
        return {"emitted_tv": list(tables.cost_rows(places)), "emitted_tv_places": places}
