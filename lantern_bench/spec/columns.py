"""What a column is, and the columns that many tables share; the tables themselves are `schema.py`.

A quantity has one name in code, flag, column, axis and documentation.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CELL_COLUMNS", "NOTE", "Column", "figure"]


class Column(NamedTuple):
    """One column; `dtype` is `string`, `int`, `float`, `list[int]` or `list[list[int]]`, `unit` may be empty."""

    name: str
    dtype: str
    unit: str
    meaning: str


def figure(name: str, unit: str, meaning: str) -> tuple[Column, Column, Column]:
    """Return an uncertain figure with the two ends of its 95 % interval."""
    return (
        Column(name, "float", unit, meaning),
        Column(f"{name}_low", "float", unit, f"lower end of the 95 % interval of {name}"),
        Column(f"{name}_high", "float", unit, f"upper end of the 95 % interval of {name}"),
    )


CELL_COLUMNS: tuple[Column, ...] = (
    Column("cell_id", "string", "", "the cell: one fully resolved decoding configuration"),
    Column("mode", "string", "", "ar, speculative, lantern, lantern++, or the name of a rule from outside"),
    Column("drafting", "string", "", "none, static (fixed tree, sampled) or dynamic (best of a beam)"),
    Column("tree", "string", "", "name of the static tree, or nodes, depth and beam of the dynamic one"),
    Column("rule", "string", "", "acceptance rule: none, strict, block, additive, multiplicative, or one from outside"),
    Column("neighbours", "int", "codes", "nearest codes whose mass a draft may take (k)"),
    Column("neighbour_metric", "string", "", "what near is: l2, cosine or random"),
    Column("delta", "float", "", "bound of the additive rule: most mass one draft may take"),
    Column("lambda", "float", "", "bound of the multiplicative rule: most a draft's probability may grow"),
    Column("bound", "float", "", "bound of a rule from outside the package; the rule says what it means"),
    Column("residual", "string", "", "residual after a relaxed rejection: exact or official"),
    Column("temperature", "float", "", "sampling temperature; 0 is greedy"),
    Column("top_k", "int", "tokens", "keep the k most probable tokens; 0 is off"),
    Column("top_p", "float", "", "keep the smallest set of this mass; 1 is off"),
    Column("cfg_scale", "float", "", "classifier-free guidance scale; 1 is off"),
    Column("batch", "int", "images", "images decoded at once"),
    Column("model", "string", "", "name of the model"),
)

NOTE = Column("note", "string", "", "why a figure is missing, or what to know about it")
