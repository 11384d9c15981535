"""From a checkpoint into modules, and back: key maps, and every key that does not fit in one error.

A key map says for each of our names which of the checkpoint's tensors make it up. The same map fills a module from a
file and exports a module into the layout of that file, so neither can drift from the other. Modules are built under
`torch.device("meta")` and get their memory here, tensor by tensor, in their final dtype on their final device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import Checkpoint
from lantern_bench.models.recognise import what_is

__all__ = ["KeyMap", "Piece", "compute_buffers", "export", "fill", "plain"]


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Piece(NamedTuple):
    """A tensor of a checkpoint as part of one of ours.

    `rows` of ours, along the first axis (None: all of them). `prepare` turns what the file holds into what we hold,
    `undo` is its inverse; both keep the shape, but where the file has `file_rows` and `prepare` takes `rows` of them:
    such a piece cannot be exported.
    """

    key: str
    rows: int | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    file_rows: int | None = None


KeyMap: TypeAlias = Mapping[str, tuple[Piece, ...]]
"""Our name -> the pieces it consists of, in order."""


def plain(module: nn.Module, rename: Callable[[str], str] = lambda name: name) -> dict[str, tuple[Piece, ...]]:
    """The key map in which every tensor of a module is one of the file's, under the name `rename` gives it."""
    return {name: (Piece(rename(name)),) for name in module.state_dict()}


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    key_map: KeyMap,
    *,
    dtype: torch.dtype,
    device: torch.device,
    computed: Callable[[str], bool] = lambda _key: False,
    wanted: str = "this model",
) -> None:
    """Give a module (on the meta device) its weights; it is then in evaluation mode, on `device`, in `dtype`.

    `computed` tells the keys that a file may have and nobody needs. Raises one `UserError` with every missing,
    unexpected and misshapen key, and one for a tensor without weights or with some that are not finite; `wanted` says
    there what was looked for. Needs the memory of the module and of one tensor more.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    _check(checkpoint, shapes, key_map, computed, wanted)
    state: dict[str, Tensor] = {}
    for name, pieces in key_map.items():
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        at = 0
        for piece in pieces:
            rows = shapes[name][0] if piece.rows is None else piece.rows
            read = checkpoint[piece.key]
            if read.dtype not in _FLOATS:
                raise UserError(
                    f"{checkpoint.path}: {piece.key} holds {str(read.dtype).removeprefix('torch.')}, no weights",
                    "Weights are read as float32, bfloat16, float16 or float64; quantised ones are not.",
                )
            tensor[at : at + rows].copy_(read if piece.prepare is None else piece.prepare(read))
            at += rows
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{checkpoint.path}: {name} has numbers that are not finite in {str(dtype).removeprefix('torch.')}",
                "The file is damaged, or needs a type with a wider range, such as --dtype bfloat16.",
            )
        state[name] = tensor
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()
    compute_buffers(module, device)


def compute_buffers(module: nn.Module, device: torch.device) -> None:
    """Let every submodule make the tables it computes, on `device`: those are in no file."""
    for part in module.modules():
        compute = getattr(part, "compute_buffers", None)
        if compute is not None:
            compute(device)


def export(module: nn.Module, key_map: KeyMap) -> dict[str, Tensor]:
    """The weights of a module under the names of a checkpoint's layout: the inverse of `fill`."""
    state = module.state_dict()
    out: dict[str, Tensor] = {}
    for name, pieces in key_map.items():
        at = 0
        for piece in pieces:
            rows = state[name].shape[0] if piece.rows is None else piece.rows
            if piece.file_rows is not None:
                raise ValueError(f"{piece.key} is held in part and cannot be exported")
            part = state[name][at : at + rows]
            out[piece.key] = (part if piece.undo is None else piece.undo(part)).detach().cpu().clone().contiguous()
            at += rows
    return out


def _check(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    key_map: KeyMap,
    computed: Callable[[str], bool],
    wanted: str,
) -> None:
    """Raise one `UserError` for all keys that do not fit."""
    expected = {
        piece.key: (piece.file_rows or piece.rows or shapes[name][0], *shapes[name][1:]) if shapes[name] else ()
        for name, pieces in key_map.items()
        for piece in pieces
    }
    missing = [key for key in expected if key not in checkpoint]
    unexpected = [key for key in checkpoint if key not in expected and not computed(key)]
    misshapen = [
        f"{key} is {_shape(checkpoint.shape(key))}, not {_shape(shape)}"
        for key, shape in expected.items()
        if key in checkpoint and checkpoint.shape(key) != shape
    ]
    if not (missing or unexpected or misshapen):
        return
    kind = what_is(checkpoint)
    told = f": it is {kind}" if kind is not None and len(missing) * 2 > len(expected) else ""
    lines = [
        f"{len(keys)} {what}: {_listed(keys)}"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if keys
    ]
    raise UserError(f"{checkpoint.path}: does not hold {wanted}{told}\n  " + "\n  ".join(lines))


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _listed(keys: list[str]) -> str:
    return ", ".join(keys)
