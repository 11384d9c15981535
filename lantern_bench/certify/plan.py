"""Plan a certificate or an audit: what is claimed of which cells, and how much is measured. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lantern_bench.config.experiment import Cell, ResolvedExperiment, load_experiment
from lantern_bench.config.parse_experiment import Overrides
from lantern_bench.config.plan import Prompt
from lantern_bench.errors import UserError
from lantern_bench.methods.tables import MODES, RULES
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts import load_prompts
from lantern_bench.runs.request import check_sizes


class Sizes(NamedTuple):
    """How much is measured."""

    positions: int  # of emitted TV
    draws: int  # of emitted TV, a position
    samples: int  # images of a trial
    greedy: int  # prompts of the greedy identity check


@dataclass(frozen=True)
class CertificationPlan:
    """The certificate of one model, or with `claims` its audit."""

    model: str
    resolved: ResolvedExperiment
    relaxed: tuple[Cell, ...]  # the cells whose emitted TV is measured
    prompts: Sequence[Prompt]
    sizes: Sizes
    claims: tuple[Claim, ...] = ()


def plan_certificate(
    experiment: str, flags: dict[str, Any], modes: list[str] | None, settings: list[str], sizes: Sizes
) -> CertificationPlan:
    """Resolve the relaxed cells and the prompts of an experiment."""
    model = model_of(flags["model"][0])
    flags = flags | {"model": [model.name], "prompts": flags["prompts"] or next(iter(model.prompt_sets))}
    overrides = Overrides.from_flags(flags, modes=modes, settings=settings)
    resolved = load_experiment(experiment, defaults_of, overrides)
    check_sizes(resolved)
    relaxed = tuple(cell for cell in resolved.cells if not cell.decoding.rule_row.lossless)
    if not relaxed:
        raise UserError(f"{experiment}: has no relaxed cell", "Give another --experiment, or other --modes.")
    return _measurement(resolved, relaxed, sizes)


def plan_audit(resolved: ResolvedExperiment, sizes: Sizes) -> CertificationPlan:
    """Plan the audit of cells that `audited_cells` lists."""
    claims = tuple(map(claim_of, resolved.cells))
    return _measurement(resolved, tuple(claim.cell for claim in claims if not claim.is_lossless), sizes, claims)


def _measurement(
    resolved: ResolvedExperiment, relaxed: tuple[Cell, ...], sizes: Sizes, claims: tuple[Claim, ...] = ()
) -> CertificationPlan:
    for cell in (*relaxed, *(claim.cell for claim in claims)):
        if cell.decoding.greedy:
            problem = f"{cell.cell_id}: at temperature 0 there is no distribution to test"
            raise UserError(problem, "Give a --temperature above 0.")
    model = model_of(resolved.settings.model[0])
    prompts = load_prompts(resolved.settings.prompts, model)
    return CertificationPlan(model.name, resolved, relaxed, prompts, sizes, claims)


class Claim(NamedTuple):
    """The claim about the tokens of a cell."""

    cell: Cell
    form: str = ""  # the values in which the cell differs from its mode
    source: str = ""  # arXiv number
    is_ours: bool = True  # False: the form of the authors' code, where it is not ours

    @property
    def is_lossless(self) -> bool:
        """Whether the claim says lossless; else it says relaxed."""
        return self.cell.decoding.rule_row.lossless


def audited_cells() -> list[dict[str, Any]]:
    """Return the cells of the audit, as an experiment file has them: every form of every mode, every other rule."""
    modes = [
        {"mode": mode.name, **values} for mode in MODES.values() for values in ({}, *mode.variants, *mode.published)
    ]
    rules_of_modes = {mode.rule for mode in MODES.values()}
    others = [rule for name, rule in RULES.items() if name not in rules_of_modes]
    return modes + [{"mode": "speculative", "drafting": rule.drafting, "rule": rule.name} for rule in others]


def claim_of(cell: Cell) -> Claim:
    """Return what is claimed of a cell, by the row of its mode or of its rule."""
    decoding, mode, rule = cell.decoding, MODES[cell.decoding.mode], cell.decoding.rule_row
    has_own_rule, forms = rule.name == mode.rule, (*mode.published, *mode.variants)
    matching = [values for values in forms if all(decoding.value(key) == value for key, value in values.items())]
    values = {**({} if has_own_rule else {"rule": rule.name}), **(matching[0] if matching else {})}
    source = mode.source if has_own_rule and mode.source else rule.source
    is_ours = not matching or matching[0] not in mode.published
    return Claim(cell, ", ".join(f"{key} {value}" for key, value in values.items()), source, is_ours)
