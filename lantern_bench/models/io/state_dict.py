"""State dicts: key maps from a checkpoint's names to ours, loading with every error at once, export, HF Llama names.

A key map says which tensors of a checkpoint make up each tensor of a module. `llama_key_map` is that of transformers'
Llama, which LlamaGen's conversion, Chameleon and the published drafters use for their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lantern_bench.errors import UserError
from lantern_bench.models.io.checkpoint import Checkpoint, what_is
from lantern_bench.models.transformer_config import TransformerConfig

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Piece(NamedTuple):
    """A tensor of a checkpoint as part of one of ours.

    It fills `rows` of ours along the first axis (None: all). `prepare` converts the file's tensor into ours, `undo` is
    its inverse; both keep the shape. Where `file_shape` is set the file's tensor has that shape, and `prepare` makes
    ours of it: such a piece cannot be exported.
    """

    key: str
    rows: int | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    file_shape: tuple[int, ...] | None = None


KeyMap: TypeAlias = Mapping[str, tuple[Piece, ...]]
"""Our name -> the pieces it consists of, in order."""


def plain(module: nn.Module, rename: Callable[[str], str] = lambda name: name) -> dict[str, tuple[Piece, ...]]:
    """The key map in which every tensor of a module is one tensor of the file, named by `rename`."""
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
    """Load a checkpoint into a module on the meta device: in evaluation mode, on `device`, in `dtype`.

    `computed` selects keys of the file that are ignored; `wanted` names the model in errors. Needs the memory of the
    module and of one more tensor. Raises one `UserError` with every missing, unexpected and misshapen key, and one for
    a tensor of an unsupported type or with values that are not finite.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    expected = {
        piece.key: piece.file_shape or (piece.rows or shapes[name][0], *shapes[name][1:])
        for name, pieces in key_map.items()
        for piece in pieces
    }
    _check(checkpoint, expected, computed, wanted)
    state: dict[str, Tensor] = {}
    for name, pieces in key_map.items():
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        for piece, part in _rows_of(tensor, pieces):
            read = checkpoint[piece.key]
            if read.dtype not in _FLOATS:
                raise UserError(
                    f"{checkpoint.path}: {piece.key} has the unsupported type {str(read.dtype)[6:]}",
                    "Weights must be float32, bfloat16, float16 or float64; quantised weights are not supported.",
                )
            part.copy_(read if piece.prepare is None else piece.prepare(read))
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
    """Compute the buffers that no checkpoint holds, such as rotary tables, on `device`."""
    for part in module.modules():
        compute = getattr(part, "compute_buffers", None)
        if compute is not None:
            compute(device)


def export(module: nn.Module, key_map: KeyMap) -> dict[str, Tensor]:
    """The weights of a module under a checkpoint's names: the inverse of `fill`."""
    state = module.state_dict()
    out: dict[str, Tensor] = {}
    for name, pieces in key_map.items():
        for piece, part in _rows_of(state[name], pieces):
            if piece.file_shape is not None:
                raise ValueError(f"{piece.key}: is not loaded as it is, so it cannot be exported")
            out[piece.key] = (part if piece.undo is None else piece.undo(part)).detach().cpu().clone().contiguous()
    return out


def _rows_of(tensor: Tensor, pieces: Iterable[Piece]) -> Iterable[tuple[Piece, Tensor]]:
    """Each piece with its rows of a tensor."""
    sizes = [tensor.shape[0] if piece.rows is None else piece.rows for piece in pieces]
    return zip(pieces, tensor.split(sizes), strict=True)


def _check(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], computed: Callable[[str], bool], wanted: str
) -> None:
    """Raise one `UserError` for all keys that do not fit; `expected` are the shapes of the file's tensors."""
    missing = [key for key in expected if key not in checkpoint]
    unexpected = [key for key in checkpoint if key not in expected and not computed(key)]
    misshapen = [
        f"{key} is {_shape(checkpoint.shape(key))}, not {_shape(shape)}"
        for key, shape in expected.items()
        if key in checkpoint and checkpoint.shape(key) != shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
    if lines := [f"\n  {len(keys)} {what}: {', '.join(keys)}" for what, keys in problems if keys]:
        kind = what_is(checkpoint) if len(missing) * 2 > len(expected) else None
        told = f": it is {kind}" if kind is not None else ""
        raise UserError(f"{checkpoint.path}: does not hold {wanted}{told}{''.join(lines)}")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


AROUND: Mapping[str, str] = {
    "transformer.tok_embeddings.": "model.embed_tokens.",
    "transformer.layers.": "model.layers.",
    "transformer.norm.": "model.norm.",
    "transformer.output.": "lm_head.",
}
"""Prefixes of a `TransformerTarget`'s parts -> those of transformers' LlamaForCausalLM."""

_INSIDE = {
    "attention.wo.": "self_attn.o_proj.",
    "attention.q_norm.": "self_attn.q_norm.",
    "attention.k_norm.": "self_attn.k_norm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
}


def llama_key_map(
    module: nn.Module, config: TransformerConfig, around: Mapping[str, str] = AROUND
) -> dict[str, tuple[Piece, ...]]:
    """The key map of a module with layers of `config`; `around` renames prefixes.

    Query, key and value are three matrices there and one here, their rows in the same order; `config.pairs` says which
    rows the rotary embedding rotates together.
    """

    def rename(name: str) -> str:
        prefix = next((ours for ours in around if name.startswith(ours)), None)
        if prefix is not None:
            name = around[prefix] + name.removeprefix(prefix)
        for ours, theirs in _INSIDE.items():
            name = name.replace(f".{ours}", f".{theirs}")
        return name

    kv_rows = (config.kv_heads or config.heads) * config.head_dim
    pieces = plain(module, rename)
    for name in pieces:
        layer, mixed, _ = rename(name).partition("attention.wqkv.weight")
        if mixed:
            rows = {"q": config.heads * config.head_dim, "k": kv_rows, "v": kv_rows}
            pieces[name] = tuple(Piece(f"{layer}self_attn.{part}_proj.weight", count) for part, count in rows.items())
    return pieces


def rows_of_tokens(key: str, config: TransformerConfig) -> Piece:
    """The piece of an output head that takes the rows of an image's tokens (`TransformerConfig.token_ids`)."""
    ids = torch.tensor(config.token_ids, device="cpu")
    return Piece(key, len(ids), prepare=lambda rows: rows[ids], file_shape=(config.text_vocab_size or 0, config.dim))
