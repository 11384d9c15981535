"""What is claimed of the tokens of each mode: lossless or relaxed, by whom, and in which form (docs/audit.md)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.methods.tables import MODES, RULES


class Claim(NamedTuple):
    """The claim about the tokens of a cell."""

    cell: Cell
    claim: Literal["lossless", "relaxed"]
    form: str = ""  # the values in which the cell differs from its mode
    source: str = ""  # arXiv number
    is_ours: bool = True  # False: the form of the authors' code, where it is not ours

    @property
    def is_lossless(self) -> bool:
        """Whether the claim says lossless."""
        return self.claim == "lossless"

    def columns(self) -> dict[str, Any]:
        """Return the columns of `audit` that no test decides."""
        return self.cell.columns() | {"form": self.form or None, "claim": self.claim, "source": self.source or None}


def audited_cells() -> list[dict[str, Any]]:
    """Return the cells of the audit as an experiment file writes them: every form of every mode, every other rule."""
    modes = [
        {"mode": mode.name, **values} for mode in MODES.values() for values in ({}, *mode.variants, *mode.published)
    ]
    rules_of_modes = {mode.rule for mode in MODES.values()}
    others = [rule for name, rule in RULES.items() if name not in rules_of_modes]
    return modes + [{"mode": "speculative", "drafting": rule.drafting, "rule": rule.name} for rule in others]


def claim_of(cell: Cell) -> Claim:
    """Return what is claimed of a cell: by the row of its mode, or of its rule where that is not the mode's."""
    decoding, mode, rule = cell.decoding, MODES[cell.decoding.mode], cell.decoding.rule_row
    has_own_rule, forms = rule.name == mode.rule, (*mode.published, *mode.variants)
    matching = [values for values in forms if all(decoding.value(key) == value for key, value in values.items())]
    values = {**({} if has_own_rule else {"rule": rule.name}), **(matching[0] if matching else {})}
    claim: Literal["lossless", "relaxed"] = "lossless" if rule.lossless else "relaxed"
    source = mode.source if has_own_rule and mode.source else rule.source
    is_ours = not matching or matching[0] not in mode.published
    return Claim(cell, claim, ", ".join(f"{key} {value}" for key, value in values.items()), source, is_ours)


def table_decoding(decoding: Decoding) -> Decoding:
    """Return the same method with few drafts and without filters and guidance, for the tables (`tabular.py`)."""
    values = {key: value for key, value in decoding.settings().items() if key != "tree"}
    values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg_scale": 1.0}
    is_static_chain = decoding.rule_row.chains and bool(decoding.paths)
    values |= {"tree": decoding.rule_row.tree} if is_static_chain else dict(decoding.drafting_row.small)
    return Decoding(**values | ({"neighbours": 2} if decoding.neighbours else {}))
