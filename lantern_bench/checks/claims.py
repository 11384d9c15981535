"""Plan a certificate or an audit: what is claimed of which cells. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.methods.catalog import MODES, RULES, raise_if_refused
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean


@dataclass(frozen=True)
class CertificationPlan:
    """The certificate of one model, or with `claims` its audit."""

    model: str
    resolved: ResolvedExperiment
    prompts: Sequence[Prompt]
    samples: int  # images of the model in a trial
    # the model's images decide, under several filters; else the tables' and a few of them
    is_thorough: bool = False
    has_power: bool = False  # broken rules are tested too
    claims: tuple[Claim, ...] = ()

    @property
    def sampling(self) -> Decoding:
        """A decoding with the run's temperature, filters and guidance."""
        return self.resolved.cells[0].decoding


def plan_certification(
    resolved: ResolvedExperiment, is_audit: bool, **values: Any
) -> CertificationPlan:
    """Plan the certificate, or the audit of cells that `audited_cells` lists; `values` are fields of the plan."""
    for cell in resolved.cells:
        if cell.decoding.greedy:
            problem = f"{cell.cell_id}: at temperature 0 there is no distribution to test"
            raise UserError(problem, "Give a --temperature above 0.")
    model = model_of(resolved.settings.model[0])
    claims = tuple(map(claim_of, resolved.cells)) if is_audit else ()
    prompts = load_prompts(resolved.settings.prompts, model)
    return CertificationPlan(model.name, resolved, prompts, claims=claims, **values)


class Claim(NamedTuple):
    """The claim about the tokens of a cell."""

    cell: Cell
    form: str = ""  # the values in which the cell differs from its mode
    source: str = ""  # arXiv number

    @property
    def is_ours(self) -> bool:
        """Whether this package stands for the claim: not for a drafting whose row says that it is not lossless."""
        return self.cell.decoding.drafting_row.lossless

    @property
    def is_lossless(self) -> bool:
        """Whether the claim says lossless; else it says relaxed."""
        return self.cell.decoding.rule_row.lossless


def audited_cells(names: Collection[str]) -> list[dict[str, Any]]:
    """Return the cells of the audit, as an experiment file has them: every form of these modes.

    `all` are every mode, and every other rule on `speculative`.
    """
    for name in names:
        if name not in MODES and name != "all":
            raise_if_refused(name)
            hint = did_you_mean(name, MODES)
            raise UserError(
                f"--modes {name}: unknown mode{hint}", f"The modes are {', '.join(MODES)}, or all."
            )
    modes = [
        {"mode": mode.name, **values}
        for mode in MODES.values()
        if {mode.name, "all"} & set(names)
        for values in ({}, *mode.variants)
    ]
    if "all" not in names:
        return modes
    rules_of_modes = {mode.rule for mode in MODES.values()}
    others = [rule for name, rule in RULES.items() if name not in rules_of_modes]
    return modes + [
        {"mode": "speculative", "drafting": rule.drafting, "rule": rule.name} for rule in others
    ]


def claim_of(cell: Cell) -> Claim:
    """Return what is claimed of a cell, by the row of its mode or of its rule."""
    decoding = cell.decoding
    mode = MODES[cell.decoding.mode]
    rule = cell.decoding.rule_row
    has_own_rule = rule.name == mode.rule
    matching = [
        values
        for values in mode.variants
        if all(decoding.value(key) == value for key, value in values.items())
    ]
    values = {**({} if has_own_rule else {"rule": rule.name}), **(matching[0] if matching else {})}
    source = mode.source if has_own_rule and mode.source else rule.source
    form = ", ".join(f"{key} {value}" for key, value in values.items())
    return Claim(cell, form, source)
