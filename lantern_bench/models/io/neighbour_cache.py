"""Nearest-code tables on disk: computed once per codebook and space, kept beside the tokenizer, checked when read.

A table's file is named by the space and a hash of the codebook and holds both, with the table's own hash: a table is
never used for another codebook, and a damaged one is refused. `decoding/neighbours.py` defines the distances.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.decoding.neighbours import Space, in_space, index_dtype, nearest_codes
from lantern_bench.errors import RefusedError
from lantern_bench.models.io.files import write_atomically


def neighbour_table(
    codebook: Tensor,
    space: Space,
    columns: int,
    folder: Path | None = None,
    k_max: int = 1000,
    device: torch.device | str = "cpu",
    on_rows: Callable[[int], None] | None = None,
) -> Tensor:
    """At least `columns` nearest codes of every code, [V, k] on the CPU in the smallest integer type.

    `codebook` [V, d] raw rows. With a `folder` the table there is read, or computed with max(k_max, columns) columns
    and written where possible; published settings use at most 1000. Raises `RefusedError` for a damaged table and
    ValueError for more columns than there are other codes.
    """
    codes = codebook.shape[0]
    path = table_path(folder, codebook, space) if folder is not None else None
    if path is not None and path.is_file():
        table = read_table(path, codebook, space)
        if table.shape[1] >= columns:
            return table
    width = max(columns, min(k_max, codes - 1)) if path is not None else columns
    rows = in_space(codebook.to(device), space)
    table = nearest_codes(rows, width, dtype=index_dtype(codes), on_rows=on_rows).cpu()
    if path is not None:
        # In a read-only directory the table is computed again each time.
        with contextlib.suppress(OSError):
            write_table(path, table, codebook, space)
    return table


def table_path(folder: Path, codebook: Tensor, space: Space) -> Path:
    """The file of a codebook's table: `nearest-<space>-<hash of the codebook>.safetensors`."""
    return folder / f"nearest-{space}-{codebook_sha256(codebook)[:12]}.safetensors"


def codebook_sha256(codebook: Tensor) -> str:
    """The SHA-256 of the raw rows as float32, row by row, in hex."""
    return _sha256(codebook.detach().float().cpu())


def write_table(path: Path, table: Tensor, codebook: Tensor, space: Space) -> None:
    """Write a table [V, k] atomically with the space and hash of its codebook. Raises OSError."""
    kept = table.to(index_dtype(codebook.shape[0])).cpu().contiguous()
    write_atomically(path, save({"table": kept}, metadata=_facts(codebook, space) | {"table_sha256": _sha256(kept)}))


def read_table(path: Path, codebook: Tensor, space: Space) -> Tensor:
    """Read a table; raises `RefusedError` for a damaged one and for one of another codebook or space."""
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = file.metadata() or {}
            table: Tensor = file.get_tensor("table")
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    for key, value in _facts(codebook, space).items():
        if facts.get(key) != value:
            raise _refused(path, f"its {key.replace('_', ' ')} is {facts.get(key)}, not {value}")
    if facts.get("table_sha256") != _sha256(table) or table.shape[0] != codebook.shape[0]:
        raise _refused(path, "its hash differs from the recorded one")
    return table


def _facts(codebook: Tensor, space: Space) -> dict[str, str]:
    return {"format": "lantern-bench nearest codes 1", "space": space, "codebook_sha256": codebook_sha256(codebook)}


def _sha256(rows: Tensor) -> str:
    return hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _refused(path: Path, why: str) -> RefusedError:
    return RefusedError(
        f"{path}: not a table of nearest codes of this codebook: {why}",
        "Remove it; the table is computed again when it is next needed.",
    )
