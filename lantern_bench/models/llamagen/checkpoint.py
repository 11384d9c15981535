"""LlamaGen's checkpoints: key maps of the two layouts, the size they are of, and whether they fit the picture size.

A size has up to four sources; the first that states a number wins: the `config` of a model file or the config.json
beside the weights, the published size of that name, the shapes in the checkpoint, and, for the number of heads, which
no shape tells, the published size of the same width and depth.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.eagle import is_computed
from lantern_bench.models.family import config_beside
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint, what_is
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.io.state_dict import AROUND, KeyMap, fill, llama_key_map, plain
from lantern_bench.models.llamagen import PUBLISHED, Kind, LlamaGenSize, ffn_width, heads_of_published, read_config
from lantern_bench.models.target import CaptionFeatures, ClassLabel, TransformerTarget
from lantern_bench.models.transformer import grid_rotary
from lantern_bench.models.transformer_config import heads_problem

Layout = Literal["official", "hf"]

_WORDS = {"t2i": "text-conditional", "c2i": "class-conditional"}


def build_target(size: LlamaGenSize) -> TransformerTarget:
    """A target of this size with fresh weights (none under `torch.device("meta")`)."""
    if size.kind == "c2i":
        return TransformerTarget(size.transformer(), ClassLabel(size.classes, size.dim))
    return TransformerTarget(size.transformer(), CaptionFeatures(size.positions, size.width, size.dim))


def layout_of(names: Iterable[str]) -> Layout:
    """The layout of a LlamaGen checkpoint with these names."""
    return "hf" if any(name.startswith(("model.", "lm_head.")) for name in names) else "official"


def key_map(target: TransformerTarget, layout: Layout) -> KeyMap:
    """The key map of a layout onto a target; the same one reads and writes."""
    if layout == "official":
        return plain(target, lambda name: name.removeprefix("transformer."))
    return llama_key_map(target, target.config, {**AROUND, "cls_embedding.": "model.cls_embedding."})


_PUBLISHED_FILES = {"t2i_XL_stage1_256.pt": "llamagen-t2i-stage1", "t2i_XL_stage2_512.pt": "llamagen-t2i-stage2"} | {
    f"{name.removeprefix('llamagen-').replace('-', '_')}.pt": name for name in PUBLISHED if "-c2i-" in name
}
_TABLES = ("freqs_cis", "model.freqs_cis")
# The HF conversion's table has ten rows of zeros behind the grid (docs/algorithms.md, section 9, B5).
_MARGINS = (0, 10)


def check_stage(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any], advice: str) -> None:
    """Raise `UserError` when the checkpoint is for another grid than `size.grid`, with the reason.

    `config` is what stands beside the weights (`block_size`); `advice` is shown with the error.
    """
    for tokens, source in _signs(checkpoint, size, config):
        if tokens != size.tokens:
            side = math.isqrt(max(tokens, 0))
            square = f"a {side}x{side} grid ({tokens} tokens)" if side * side == tokens else f"{tokens} tokens"
            raise UserError(
                f"{checkpoint.path}: is of another stage: {source} is for {square}, "
                f"and this model's grid is {size.grid[0]}x{size.grid[1]} ({size.tokens} tokens)",
                advice,
            )
    name = _table(checkpoint)
    if name is None:
        return
    # Another base, or rows and columns exchanged, are other positions: the table must rotate as ours does.
    ours = grid_rotary(size.transformer())[: size.positions + size.tokens]
    theirs = checkpoint[name].float()[: len(ours)]
    if theirs.shape != ours.shape:
        raise UserError(
            f"{checkpoint.path}: its position table turns {2 * theirs.shape[1] if theirs.dim() > 1 else 0} numbers a "
            f"head, and this model's heads have {2 * ours.shape[1]}",
            "The number of heads does not fit: see n_head of its config.",
        )
    if not torch.allclose(theirs[size.positions :], ours[size.positions :], atol=2e-2):
        raise UserError(f"{checkpoint.path}: its position table is of another grid or another rope_base", advice)


def _table(checkpoint: Checkpoint) -> str | None:
    return next((name for name in _TABLES if name in checkpoint), None)


def _signs(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Everything that tells the number of a picture's tokens, and what tells it."""
    for name in _TABLES:
        if name in checkpoint:
            rows = checkpoint.shape(name)[0] - size.positions
            # With the margin or without it: either may be this grid's.
            fits = size.tokens if rows - size.tokens in _MARGINS else (_square_of(rows) or (rows, 0))[0]
            yield fits, f"its position table ({name}, {rows + size.positions} rows)"
    settings = checkpoint.settings
    if isinstance(settings.get("image_size"), int):
        side = settings["image_size"] // int(settings.get("downsample_size") or 16)
        yield side * side, f"the training it records (image_size {settings['image_size']})"
    if isinstance(config.get("block_size"), int):
        yield config["block_size"], f"its config (block_size {config['block_size']})"
    published = PUBLISHED.get(_PUBLISHED_FILES.get(checkpoint.path.name, ""))
    # Another model's file may have the same name.
    if published is not None and (published.dim, published.layers) == (size.dim, size.layers):
        yield published.tokens, f"the published file of that name ({checkpoint.path.name})"


def _square_of(rows: int) -> tuple[int, int] | None:
    """The tokens of the square grid that a table of so many rows is for, and its side; None where it is not square."""
    for margin in _MARGINS:
        tokens = rows - margin
        if tokens > 0 and math.isqrt(tokens) ** 2 == tokens:
            return tokens, math.isqrt(tokens)
    return None


def load_target(
    checkpoint: Checkpoint,
    size: LlamaGenSize,
    layout: Layout | None,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    advice: str,
) -> TransformerTarget:
    """Load a target; raises `UserError` for another family, layout or stage, and for every key that does not fit.

    `config` is what stands beside the weights; `advice` goes with an error about the stage.
    """
    _check_kind(checkpoint, size.kind, layout)
    check_stage(checkpoint, size, config, advice)
    with torch.device("meta"):
        target = build_target(size)
    names = key_map(target, layout or layout_of(checkpoint))
    wanted = f"LlamaGen of {size.layers} layers of width {size.dim}"
    fill(target, checkpoint, names, dtype=dtype, device=device, computed=is_computed, wanted=wanted)
    return target


def stated_sizes(file: ModelFile, kind: Kind | None = None) -> dict[str, Any]:
    """The sizes that a model file, or the config.json beside its weights, states for the target, by our names.

    Raises `UserError` for a class-conditional model (`kind`) that was trained without a null class.
    """
    config, where = file.target.config, "target.config"
    if config is None:
        config, where = config_beside(file.target.path, file.target.layout), "config.json"
    for name in ("class_dropout_prob", "class_dropout_p") if kind == "c2i" else ():
        if config.get(name) == 0:
            text = "0: the model was trained without a null class, and guidance needs one"
            raise file.wrong(f"{where}.{name}", text, "Its last class would be taken for the null class.")
    return read_config(config, lambda name, text: file.wrong(f"{where}.{name}", text))


def known_sizes(file: ModelFile, kind: Kind, published: LlamaGenSize | None, wanted: Iterable[str]) -> dict[str, Any]:
    """The sizes of a target that are known before it is loaded, by our names, `wanted` among them.

    Opens the checkpoint only for sizes that neither the file nor the family's name tells. Raises `UserError` as
    `describe`.
    """
    known = ({} if published is None else dict(vars(published))) | stated_sizes(file, kind)
    if not known.keys() >= set(wanted):
        known = _told(file.target.path, file.target.path.stat().st_mtime_ns, kind) | known
    return known


@functools.lru_cache(maxsize=8)
def _told(path: Path, _changed: int, kind: Kind) -> dict[str, Any]:
    """The sizes that a checkpoint's shapes tell, read once while the file is unchanged."""
    checkpoint = open_checkpoint(path)
    _check_kind(checkpoint, kind, None)
    return _shapes(checkpoint, kind)


def describe(
    file: ModelFile, checkpoint: Checkpoint, kind: Kind, published: LlamaGenSize | None
) -> tuple[LlamaGenSize, dict[str, Any]]:
    """The size of the model in a file, and the sizes stated beside its weights.

    `published` is the size that the family's name stands for, if it is a model's. Raises `UserError` for a checkpoint
    of another kind and for sizes that nothing tells.
    """
    _check_kind(checkpoint, kind, file.target.layout)
    stated = stated_sizes(file, kind)
    if stated.get("kind", kind) != kind:
        raise file.wrong("target.config", f"says {stated['kind']}, and the family {file.family} is {kind}")
    known = _shapes(checkpoint, kind)
    kv_width = known.pop("kv_width")
    known |= {} if published is None else vars(published)
    known |= {name: value for name, value in stated.items() if name != "block_size"}
    known["grid"] = _grid(file, stated, checkpoint, published, known["positions"])
    known.setdefault("heads", heads_of_published(known["dim"], known["layers"]))
    dim, heads = known["dim"], known["heads"]
    if heads is None:
        raise file.wrong(
            "target.config.n_head",
            "missing: no checkpoint tells the number of heads, and this is no published size",
            "Give target: {config: {n_head: N}}.",
        )
    if (problem := heads_problem(dim, heads, known.get("kv_heads"), "grid")) is not None:
        key = {"num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head"}[problem[0]]
        raise file.wrong(f"target.config.{key}", problem[1])
    if published is None and "kv_heads" not in known:
        count = kv_width * heads // dim
        known["kv_heads"] = None if count in (0, heads) else count
    known.setdefault("ffn_dim", ffn_width(dim))
    return LlamaGenSize(**(known | {"kind": kind})), stated


def kind_of_checkpoint(checkpoint: Checkpoint) -> Kind | None:
    """Whether a checkpoint is text-conditional or class-conditional LlamaGen; None for neither."""
    endings: dict[Kind, str] = {"c2i": "cls_embedding.embedding_table.weight", "t2i": "cls_embedding.uncond_embedding"}
    return next((kind for kind, ending in endings.items() if any(name.endswith(ending) for name in checkpoint)), None)


def _check_kind(checkpoint: Checkpoint, kind: Kind, layout: Layout | None) -> None:
    """Refuse a checkpoint of another family, of the other condition, or in the other layout."""
    found, found_layout = kind_of_checkpoint(checkpoint), layout_of(checkpoint)
    wanted = f"LlamaGen, {_WORDS[kind]}"
    if found is None:
        what = what_is(checkpoint)
        raise UserError(
            f"{checkpoint.path}: is not {wanted}" + (f": it is {what}" if what else "; none of its keys are known"),
            f"It begins with {', '.join(list(checkpoint)[:3])}.",
        )
    written = "the official layout" if found_layout == "official" else "the layout of the HF conversion"
    told = f"it is LlamaGen, {_WORDS[found]}, in {written}"
    if found != kind:
        raise UserError(f"{checkpoint.path}: is not {wanted}: {told}", f"Its family is llamagen-{found}.")
    if layout is not None and layout != found_layout:
        advice = f"Give layout: {found_layout}, or leave it out."
        raise UserError(f"{checkpoint.path}: is not in the layout {layout}: {told}", advice)


def _shapes(checkpoint: Checkpoint, kind: Kind) -> dict[str, Any]:
    """The sizes that the shapes of a checkpoint tell; raises `UserError` where those are missing."""
    hf = layout_of(checkpoint) == "hf"
    top, embedding = ("model.", "model.embed_tokens.weight") if hf else ("", "tok_embeddings.weight")
    gate, keys = ("mlp.gate_proj", "self_attn.k_proj") if hf else ("feed_forward.w1", "attention.wqkv")
    null = f"{top}cls_embedding.{'embedding_table.weight' if kind == 'c2i' else 'uncond_embedding'}"
    needed = (embedding, null, f"{top}layers.0.{gate}.weight", f"{top}layers.0.{keys}.weight")
    missing = [name for name in needed if name not in checkpoint]
    try:
        (vocab_size, dim), (rows, width), (ffn_dim, _), (kv_rows, _) = (checkpoint.shape(name) for name in needed)
    except (KeyError, ValueError) as error:
        raise UserError(f"{checkpoint.path}: {len(missing)} missing: {', '.join(missing)}") from error
    layers = next(number for number in itertools.count() if f"{top}layers.{number}.{gate}.weight" not in checkpoint)
    found = {"vocab_size": vocab_size, "dim": dim, "layers": layers, "ffn_dim": ffn_dim}
    found |= {"positions": 1, "classes": rows - 1} if kind == "c2i" else {"positions": rows, "width": width}
    return found | {"kv_width": kv_rows if hf else (kv_rows - dim) // 2}


def _grid(
    file: ModelFile, stated: Mapping[str, Any], checkpoint: Checkpoint, published: LlamaGenSize | None, positions: int
) -> tuple[int, int]:
    """The grid: as the file says, or its family's name, or the config, or a square position table."""
    if file.grid is not None:
        return file.grid
    if published is not None:
        return published.grid
    side = math.isqrt(stated.get("block_size", 0))
    table = _table(checkpoint)
    if side and side * side == stated["block_size"]:
        return side, side
    shape = () if table is None else checkpoint.shape(table)
    square = _square_of(shape[0] - positions) if shape else None
    if square is None:
        raise file.wrong("grid", "missing: the weights do not tell it", "Give grid: [rows, columns] of tokens.")
    return square[1], square[1]
