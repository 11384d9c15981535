"""Nearest-code tables on disk: computed once per codebook and space, and kept in the user's cache directory.

A table's file is named by the space and a hash of the codebook and holds the table's own hash: a table is never used
for another codebook, and a damaged one is computed again. `decoding/neighbours.py` defines the distances.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from lantern_bench.decoding.neighbours import Space, in_space, index_dtype, nearest_codes
from lantern_bench.models.io.files import write_atomically

_WIDTH = 1000  # columns of a table on disk: published settings use at most so many neighbours
_FEW_CODES = 1024  # the table of fewer codes is computed in milliseconds and not written


def neighbour_table(
    codebook: Tensor, space: Space, columns: int, folder: Path | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return at least `columns` nearest codes of every code, [V, k] on the CPU in the smallest integer type.

    `codebook` [V, d] raw rows. With a `folder` the table of many codes is read there, or computed and written where
    possible. Raises ValueError for more columns than there are other codes.
    """
    codes = codebook.shape[0]
    path = None if folder is None or codes < _FEW_CODES else table_path(folder, codebook, space)
    if path is not None and path.is_file():
        table = _read(path, codes)
        if table is not None and table.shape[1] >= columns:
            return table
    width = columns if path is None else max(columns, min(_WIDTH, codes - 1))
    rows = in_space(codebook.to(device), space)
    table = nearest_codes(rows, width, dtype=index_dtype(codes)).cpu()
    if path is not None:
        # In a read-only directory the table is computed again each time.
        with contextlib.suppress(OSError):
            write_atomically(path, save({"table": table}, metadata={"table_sha256": _sha256(table)}))
    return table


def table_path(folder: Path, codebook: Tensor, space: Space) -> Path:
    """Return the file of a codebook's table: `nearest-<space>-<hash of the codebook>.safetensors`."""
    return folder / f"nearest-{space}-{_sha256(codebook.detach().float().cpu())[:32]}.safetensors"


def _read(path: Path, codes: int) -> Tensor | None:
    """Read a table of the cache; None for a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            table: Tensor = file.get_tensor("table")
    except (OSError, SafetensorError):
        return None
    return table if metadata.get("table_sha256") == _sha256(table) and len(table) == codes else None


def _sha256(rows: Tensor) -> str:
    return hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_own_table(path: Path, codes: int) -> Tensor:
    """Read a user's table of nearest codes, int32 [V, k]; raises ValueError for one that is malformed."""
    try:
        if path.suffix == ".safetensors":
            arrays = load_file(path)
            table = arrays.get("nearest", arrays.get("table"))
        else:
            read = np.load(path, allow_pickle=False)
            table = torch.from_numpy((read["nearest"] if isinstance(read, np.lib.npyio.NpzFile) else read).astype("i8"))
    except (OSError, ValueError, KeyError, TypeError, EOFError, SafetensorError) as error:
        raise ValueError(f"{path.name}: cannot be read as .npy, .npz or .safetensors") from error
    if table is None or table.dim() != 2 or table.is_floating_point() or table.shape[0] != codes:
        shape = "nothing called nearest" if table is None else "x".join(map(str, table.shape))
        raise ValueError(f"{path.name}: must hold whole numbers [{codes}, k], not {shape}")
    table = table.long()
    if not bool(((table >= 0) & (table < codes)).all()) or bool((table == torch.arange(codes)[:, None]).any()):
        raise ValueError(f"{path.name}: each row must name other codes, from 0 to {codes - 1}")
    return table.int()
