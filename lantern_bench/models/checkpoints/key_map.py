"""Key maps name the tensors of a checkpoint that make up each tensor of a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lantern_bench.models.checkpoints.checkpoint import Checkpoint, what_is
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import slow_task

# Names of tensors with a row for each token of the vocabulary.
_BY_TOKEN = r"(tok_embeddings|embed_tokens|lm_head|^output|\.output)\.weight$"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Slice(NamedTuple):
    """Rows of one of our tensors, and the tensor of a checkpoint that fills them."""

    key: str
    rows: int | None = None  # along the first axis of our tensor; None: all
    # Computes our rows from the file's tensor. Such a slice cannot be exported.
    prepare: Callable[[Tensor], Tensor] | None = None
    file_shape: tuple[int, ...] | None = None  # of the file's tensor, if it differs from ours


KeyMap: TypeAlias = Mapping[str, tuple[Slice, ...]]
"""The slices of each of our tensors, in order."""


def same_names(
    module: nn.Module, rename: Callable[[str], str] = lambda name: name
) -> dict[str, tuple[Slice, ...]]:
    """Return the key map in which each tensor of a module is one tensor of the file.

    Args:
        module: The module.
        rename: Turns our name into the file's.
    """
    return {
        name: (Slice(rename(name)),)
        for name, tensor in module.state_dict().items()
        if tensor.is_floating_point()
    }


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    key_map: KeyMap,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignored: str = "$",
    wanted: str = "this model",
) -> None:
    """Load a checkpoint into a module, on the meta device or with weights to drop, for evaluation.

    Args:
        module: The module.
        checkpoint: The checkpoint.
        key_map: Which tensors of the checkpoint make up each tensor of the module.
        dtype: Type of the loaded weights.
        device: Where the module is moved.
        ignored: Regular expression of the checkpoint's tensors that are not read.
        wanted: The model in words, for errors.

    Raises:
        UserError: Tensors are missing, unexpected, misshapen, quantised or not finite. All keys
            that do not fit are named in one message.
    """
    ours = module.state_dict()
    expected: dict[str, tuple[int, ...]] = {}
    for name, slices in key_map.items():
        shape = tuple(ours[name].shape)
        for slice_ in slices:
            expected[slice_.key] = slice_.file_shape or (slice_.rows or shape[0], *shape[1:])
    checkpoint.leave_root(expected)
    _raise_if_unfit(checkpoint, expected, ignored=ignored, wanted=wanted)

    # Only batch counts of batch norms are missing from the map. They change no result.
    state = {
        name: torch.zeros_like(tensor, device=device)
        for name, tensor in ours.items()
        if not tensor.is_floating_point()
    }
    read: dict[str, Tensor] = {}
    total = sum(ours[name].numel() for name in key_map)
    loaded = slow_task(f"loading {checkpoint.path.name}", total)
    for name, slices in key_map.items():
        tensor = torch.empty(ours[name].shape, dtype=dtype, device=device)
        for slice_, rows in _rows_of(tensor, slices):
            _fill(rows, slice_, checkpoint)
            read[slice_.key] = rows
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{checkpoint.path}: {name} has numbers that are not finite in {_kind(dtype)}",
                "The file is damaged, or needs a type with a wider range, such as "
                "--dtype bfloat16.",
            )
        state[name] = tensor
        loaded(tensor.numel())
    checkpoint.note_zeros(read)
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(requires_grad=False).eval().to(device)


def _fill(rows: Tensor, slice_: Slice, checkpoint: Checkpoint) -> None:
    read = checkpoint[slice_.key]
    if read.dtype not in _FLOATS:
        raise UserError(
            f"{checkpoint.path}: {slice_.key} has the unsupported type {_kind(read.dtype)}",
            "Weights must be float32, bfloat16, float16 or float64; quantised weights are not "
            "supported.",
        )
    rows.copy_(read if slice_.prepare is None else slice_.prepare(read))


def export(module: nn.Module, key_map: KeyMap) -> dict[str, Tensor]:
    """Return the weights of a module by a checkpoint's names: the inverse of `load_into`."""
    state = module.state_dict()
    exported: dict[str, Tensor] = {}
    for name, slices in key_map.items():
        for slice_, rows in _rows_of(state[name], slices):
            if slice_.prepare is not None:
                raise ValueError(f"{slice_.key}: is not loaded as it is, so it cannot be exported")
            exported[slice_.key] = rows.detach().cpu().clone().contiguous()
    return exported


def _rows_of(tensor: Tensor, slices: Iterable[Slice]) -> Iterable[tuple[Slice, Tensor]]:
    counts = [slice_.rows or len(tensor) for slice_ in slices]
    return zip(slices, tensor.split(counts), strict=True)


def _raise_if_unfit(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: str,
    wanted: str,
) -> None:
    """Raise one `UserError` for all keys that do not fit the expected shapes."""
    others = checkpoint.keys() - expected.keys()
    problems = {
        "missing": [key for key in expected if key not in checkpoint],
        "unexpected": [key for key in others if re.match(ignored, key) is None],
        "misshapen": [],
    }
    for key, shape in expected.items():
        found = checkpoint[key].shape if key in checkpoint else shape
        if found != shape:
            text = f"{key} is {_shape_text(found)}, not {_shape_text(shape)}"
            if re.search(_BY_TOKEN, key) and found[1:] == shape[1:]:
                text += f" (vocab_size here is {shape[0]}; the checkpoint's is {found[0]})"
            problems["misshapen"].append(text)
    advice = None
    if problems["missing"] == ["fc.bias"]:
        advice = "If its fusion has no bias, write bias: false into its config.json."
    lines = ""
    for problem, keys in problems.items():
        if keys:
            lines += f"\n  {len(keys)} {problem}: {', '.join(sorted(keys))}"
    if lines:
        kind = what_is(checkpoint)
        many = len(problems["missing"]) * 2 > len(expected)
        if kind is not None and kind not in wanted and many:
            wanted += f": it is {kind}"
        raise UserError(f"{checkpoint.path}: does not hold {wanted}{lines}", advice)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


LLAMA: Mapping[str, str] = {
    "transformer.tok_embeddings.": "model.embed_tokens.",
    "transformer.layers.": "model.layers.",
    "transformer.norm.": "model.norm.",
    "transformer.output.": "lm_head.",
}
"""Parts of names in a `TransformerTarget`, and in transformers' LlamaForCausalLM."""

_INSIDE_LAYERS = {
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.": ".self_attn.q_norm.",
    ".attention.k_norm.": ".self_attn.k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}


def llama_key_map(
    module: nn.Module,
    config: TransformerConfig,
    renamed: Mapping[str, str] = LLAMA,
    turned: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, tuple[Slice, ...]]:
    """Return the key map to the names of transformers' Llama.

    Query, key and value are three matrices there and one matrix here.

    Args:
        module: A `TransformerTarget` or a drafter.
        config: Sizes of the module.
        renamed: Parts of names, and what replaces them in this order.
        turned: Reorders the rows of queries and keys, if their heads rotate other pairs there.
    """

    def rename(name: str) -> str:
        for ours, theirs in {**renamed, **_INSIDE_LAYERS}.items():
            name = name.replace(ours, theirs)
        return name

    kv_rows = (config.kv_heads or config.heads) * config.head_dim
    rows = {"q": config.heads * config.head_dim, "k": kv_rows, "v": kv_rows}
    prepare = {"q": turned, "k": turned, "v": None}
    key_map = same_names(module, rename)
    for name in key_map:
        layer, mixed, part = rename(name).partition("attention.wqkv.")
        if mixed:
            key_map[name] = tuple(
                Slice(f"{layer}self_attn.{letter}_proj.{part}", rows[letter], prepare[letter])
                for letter in "qkv"
            )
    return key_map


def rows_of_tokens(key: str, config: TransformerConfig) -> Slice:
    """Return the slice of an output head with the rows of the image's tokens (`token_ids`)."""
    ids = torch.tensor(config.token_ids, device="cpu")
    return Slice(
        key,
        rows=len(ids),
        prepare=lambda rows: rows[ids],
        file_shape=(config.embedded_tokens, config.dim),
    )
