"""Plan a certificate or an audit: which cells it tests and what is claimed of them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.methods.catalog import DRAFTINGS, MODES, RULES, check_modes
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.utils.errors import UserError


@dataclass(frozen=True)
class CertificationPlan:
    """The certificate of one model, or its audit if there are claims."""

    model: str
    resolved: ResolvedExperiment
    prompts: Sequence[Prompt]
    samples: int  # images of the model in a trial
    # Many images of the model under several filters decide; otherwise the tables and a few images.
    is_thorough: bool = False
    has_power: bool = False  # broken rules are tested too
    claims: tuple[Claim, ...] = ()

    @property
    def sampling(self) -> Decoding:
        """A decoding with the run's temperature, filters and guidance."""
        return self.resolved.cells[0].decoding


def plan_certification(
    resolved: ResolvedExperiment,
    *,
    is_audit: bool,
    samples: int,
    is_thorough: bool = False,
    has_power: bool = False,
) -> CertificationPlan:
    """Plan a certificate, or an audit of the cells that `audited_cells` lists.

    Args:
        resolved: One model and its cells.
        is_audit: Whether the claims of the cells are audited.
        samples: Images of the model in each trial.
        is_thorough: Whether many images of the model are tested under every filter.
        has_power: Whether broken rules are tested too.

    Raises:
        UserError: A cell decodes greedily, so it has no distribution to test.
    """
    for cell in resolved.cells:
        if cell.decoding.greedy:
            raise UserError(
                f"{cell.cell_id}: at temperature 0 there is no distribution to test",
                "Give a --temperature above 0.",
            )
    model = model_of(resolved.settings.model[0])
    return CertificationPlan(
        model=model.name,
        resolved=resolved,
        prompts=load_prompts(
            resolved.settings.prompts, model, column=resolved.settings.prompt_column
        ),
        samples=samples,
        is_thorough=is_thorough,
        has_power=has_power,
        claims=tuple(map(claim_of, resolved.cells)) if is_audit else (),
    )


class Claim(NamedTuple):
    """What is claimed of the tokens of a cell."""

    cell: Cell
    form: str = ""  # the values in which the cell differs from its mode
    source: str = ""  # arXiv number

    @property
    def is_ours(self) -> bool:
        """Whether this package makes the claim; it does not for a drafting that is not lossless."""
        return self.cell.decoding.drafting_row.lossless

    @property
    def is_lossless(self) -> bool:
        """Whether the claim is lossless rather than relaxed."""
        return self.cell.decoding.rule_row.lossless


def audited_cells(names: Collection[str]) -> list[dict[str, Any]]:
    """Return every form of the named modes as the cells of an experiment file.

    The name `all` means every mode that claims something, and every rule without a mode on
    `speculative`.

    Raises:
        UserError: A mode does not exist, or makes no claim.
    """
    check_modes("--modes", names)
    is_all = "all" in names
    cells: list[dict[str, Any]] = []
    for mode in MODES.values():
        drafting = DRAFTINGS[mode.drafting]
        # Without drafts and not in the target's order: nothing is verified, and nothing claimed.
        claims_nothing = not drafting.drafts and not drafting.lossless
        if claims_nothing and mode.name in names:
            raise UserError(
                f"--modes {mode.name}: it verifies nothing and makes no claim to test",
                "A sweep measures its distance from the target: --metrics speed,distance.",
            )
        if not claims_nothing and (is_all or mode.name in names):
            cells += [{"mode": mode.name, **values} for values in ({}, *mode.variants)]
    if is_all:
        rules_of_modes = {mode.rule for mode in MODES.values()}
        for name, rule in RULES.items():
            if name not in rules_of_modes:
                cells.append({"mode": "speculative", "drafting": rule.drafting, "rule": name})
    return cells


def claim_of(cell: Cell) -> Claim:
    """Return the claim about a cell, from the row of its mode or of its rule."""
    decoding = cell.decoding
    mode = MODES[decoding.mode]
    rule = decoding.rule_row
    source = rule.source
    values: dict[str, Any] = {"rule": rule.name}
    if rule.name == mode.rule:
        source = mode.source or rule.source
        values = {}
    for variant in mode.variants:
        if all(decoding.value(key) == value for key, value in variant.items()):
            values |= variant
            break
    return Claim(
        cell,
        form=", ".join(f"{key} {value}" for key, value in values.items()),
        source=source,
    )
