"""The audit: what the authors of each mode claim of its tokens, and what tests of the tokens say (docs/audit.md).

What is audited follows from the rows of methods/modes.py: every mode, its variants, the form of its authors' code, and
every rule that no mode has. Each is decoded on small tables, where images are cheap (`tabular.py`), and with the model
(`whole_image.py`, `relaxation.py`). Bars, verdicts and rows are in `tables.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lantern_bench.certify import tables as rows_of
from lantern_bench.certify.run import Certification, Sizes, Tables, means_of
from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.errors import UserError
from lantern_bench.methods.tables import MODES, RULES
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.sets import load_prompts

if TYPE_CHECKING:
    from lantern_bench.certify.broken import Broken
    from lantern_bench.certify.tables import ImageTests

TIMES = 256
"""How many images of the tables are decoded for each image of the model."""
_PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg_scale": 1.0}


class Claim(NamedTuple):
    """What is claimed of the tokens of a cell; `form` says which form of its mode it is.

    published: the form of the authors' code where it is not ours: the claim is then theirs alone.
    """

    cell: Cell
    form: str
    claim: Literal["lossless", "relaxed"]
    source: str
    published: bool

    @property
    def small(self) -> Decoding:
        """The same method with few drafts and without filters, for the tables."""
        one = self.cell.decoding
        values = {key: value for key, value in one.settings().items() if key != "tree"} | _PLAIN
        values |= {"tree": one.rule_row.tree} if one.rule_row.chains and one.paths else dict(one.drafting_row.small)
        return Decoding.model_validate(values | ({"neighbours": 2} if one.neighbours else {}))

    def columns(self) -> dict[str, Any]:
        """Return the columns of `audit` that are known before any test."""
        found = {"form": self.form or None, "claim": self.claim, "source": self.source or None}
        return self.cell.columns() | found


def audited_cells() -> list[dict[str, Any]]:
    """Return the cells of the audit as an experiment file writes them."""
    modes = [
        {"mode": mode.name, **values} for mode in MODES.values() for values in ({}, *mode.variants, *mode.published)
    ]
    known = {mode.rule for mode in MODES.values()}
    others = [rule for name, rule in RULES.items() if name not in known]
    return modes + [{"mode": "speculative", "drafting": rule.drafting, "rule": rule.name} for rule in others]


def claim_of(cell: Cell) -> Claim:
    """Return what is claimed of a cell: by the row of its mode, or of its rule where that is not the mode's."""
    one, mode, rule = cell.decoding, MODES[cell.decoding.mode], cell.decoding.rule_row
    own, listed = rule.name == mode.rule, (*mode.published, *mode.variants)
    fits = [values for values in listed if all(one.value(key) == value for key, value in values.items())]
    values = {**({} if own else {"rule": rule.name}), **(fits[0] if fits else {})}
    form = ", ".join(f"{key} {value}" for key, value in values.items())
    claim = mode.claim if own and mode.claim else "lossless" if rule.lossless else "relaxed"
    source = mode.source if own and mode.source else rule.source
    return Claim(cell, form, claim, source, bool(fits) and fits[0] in mode.published)


def plan_audit(resolved: ResolvedExperiment, sizes: Sizes) -> Audit:
    """Plan the audit of cells that `audited_cells` lists; raises `UserError`, imports no torch."""
    for cell in resolved.cells:
        if cell.decoding.greedy:
            problem = f"{cell.cell_id}: at temperature 0 there is no distribution to test"
            raise UserError(problem, "Give a --temperature above 0.")
    claims = tuple(map(claim_of, resolved.cells))
    relaxed = tuple(one.cell for one in claims if one.claim == "relaxed")
    model = model_of(resolved.settings.model[0])
    prompts = load_prompts(resolved.settings.prompts, model)
    return Audit(model.name, resolved, relaxed, prompts, sizes, model.defaults.get("tree"), claims)


@dataclass
class Audit(Certification):
    """The planned audit of one model; `cells` are the relaxed ones."""

    claims: tuple[Claim, ...]

    def measure(self, emitted_tv: bool, on_progress: OnProgress) -> Tables:  # noqa: ARG002
        """Return the tables `audit`, `lossless_tests`, `emitted_tv` and `emitted_tv_places`."""
        self.prepare(on_progress)
        audited = [self._audited(one, on_progress) for one in self.claims]
        costs = means_of(self.emitted_tv(self.cells, on_progress) if self.cells else [])
        rows, tests = rows_of.audit_rows(self.model, audited, costs["emitted_tv"])
        return {"audit": rows, "lossless_tests": tests, **costs}

    def _audited(self, claim: Claim, on_progress: OnProgress) -> rows_of.Audited:
        """Test a claim on the tables and, where it says lossless, with the model; then what is broken on purpose."""
        from lantern_bench.certify.broken import broken_draftings, broken_residual
        from lantern_bench.certify.tabular import TOKENS, g_tests, tables

        cell, made = claim.cell, tables()
        one, small, images = cell.decoding, claim.small, self.sizes.samples

        def on_tables(broken: Broken | None = None) -> ImageTests:
            name = broken and broken.name
            on_progress(f"{cell.cell_id}, tables" + (f": {name}" if name else ""), 0.0)
            found = g_tests(made, small, TIMES * images, broken)
            of_tokens = (found.p_values, found.images, found.images * TOKENS, 0, 0)
            return rows_of.ImageTests(f"{cell.cell_id}, tables", name, *of_tokens, (found.low, found.high))

        def with_model(broken: Broken | None = None) -> ImageTests:
            dtype, about = self.compute.dtype_name, f"{cell.cell_id}, {self.model}"
            return self.tested(about, one, images, dtype, on_progress, broken, rows_of.BROKEN)

        tests = [on_tables()]
        if claim.claim == "lossless":
            tests += [with_model()]
        if claim.claim == "lossless" and not claim.published:
            tests += [on_tables(broken) for broken in (*broken_residual(small, made), *broken_draftings(small))]
            tests += [with_model(broken) for broken in broken_draftings(one)]
        return rows_of.Audited(claim.columns(), claim.claim == "lossless", not claim.published, tests)
