"""From the files of a LlamaGen target to its size and its weights, whoever put them there.

A size has up to four sources, the first that states a number wins: the `config` of a model file or the config.json
beside the weights, the published size of that name, the shapes in the checkpoint, and, for the number of heads, which
no shape tells, the published size of the same width and depth. What then does not fit the checkpoint is an error that
lists it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint, what_is
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.io.state_dict import AROUND, KeyMap, fill, llama_key_map, plain
from lantern_bench.models.llamagen import PUBLISHED, Kind, LlamaGenSize, ffn_width, heads_of_published, read_config
from lantern_bench.models.transformer.attention import grid_rotary
from lantern_bench.models.transformer.conditioning import CaptionFeatures, ClassLabel
from lantern_bench.models.transformer.target import TransformerTarget

# ---- LlamaGen: the modules of a size, and key maps of its two layouts onto them, nothing else


Layout = Literal["official", "hf"]

_HF = {**AROUND, "cls_embedding.": "model.cls_embedding."}
# Tables and caches that some files carry and every program computes anew.
_COMPUTED = re.compile(r"(^|\.)(freqs_cis|causal_mask|k_cache|v_cache|inv_freq|cos_cached|sin_cached)$")


def build_target(size: LlamaGenSize) -> TransformerTarget:
    """A target of this size with fresh weights (none under `torch.device("meta")`)."""
    condition: ClassLabel | CaptionFeatures
    if size.kind == "c2i":
        condition = ClassLabel(size.classes, size.dim)
    else:
        condition = CaptionFeatures(size.positions, size.width, size.dim)
    return TransformerTarget(size.transformer(), condition)


def layout_of(names: Iterable[str]) -> Layout:
    """The layout of a LlamaGen checkpoint with these names."""
    return "hf" if any(name.startswith(("model.", "lm_head.")) for name in names) else "official"


def key_map(target: TransformerTarget, layout: Layout) -> KeyMap:
    """The key map of a layout onto a target; the same one reads and writes."""
    if layout == "official":
        return plain(target, lambda name: name.removeprefix("transformer."))
    return llama_key_map(target, target.config, _HF)


def is_computed(name: str) -> bool:
    """Whether a file's tensor is a table or a cache that is computed anew."""
    return _COMPUTED.search(name) is not None


# ---- Whether a LlamaGen checkpoint belongs to the picture size it is used for


_PUBLISHED_FILES = {
    "t2i_XL_stage1_256.pt": "llamagen-t2i-stage1",
    "t2i_XL_stage2_512.pt": "llamagen-t2i-stage2",
} | {
    f"c2i_{name.removeprefix('llamagen-c2i-').replace('-', '_')}.pt": name
    for name in PUBLISHED
    if name.startswith("llamagen-c2i-")
}
_TABLES = ("freqs_cis", "model.freqs_cis")
_DOWNSAMPLING = 16
# The HF conversion's table has ten rows of zeros behind the grid (finding B5).
_MARGINS = (0, 10)
_ROUNDING = 2e-2


class _Sign(NamedTuple):
    """Tokens of a picture, and what says so."""

    tokens: int
    source: str


def check_stage(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any], advice: str) -> None:
    """Raise `UserError` when the checkpoint tells of another grid than `size.grid`, with the reason.

    `config` is what stands beside the weights (`block_size`); `advice` is shown with the error.
    """
    for sign in _signs(checkpoint, size, config):
        if sign.tokens != size.tokens:
            raise UserError(
                f"{checkpoint.path}: is of another stage: {sign.source} is for {_grid_text(sign.tokens)}, "
                f"and this model's grid is {size.grid[0]}x{size.grid[1]} ({size.tokens} tokens)",
                advice,
            )
    _check_values(checkpoint, size, advice)


def grid_of_table(checkpoint: Checkpoint, positions: int) -> tuple[int, int] | None:
    """The square grid that a checkpoint's position table is for; None without a table, or where it is not square."""
    name = next((name for name in _TABLES if name in checkpoint), None)
    if name is None or not checkpoint.shape(name):
        return None
    for margin in _MARGINS:
        tokens = checkpoint.shape(name)[0] - positions - margin
        if tokens > 0 and math.isqrt(tokens) ** 2 == tokens:
            return math.isqrt(tokens), math.isqrt(tokens)
    return None


def _signs(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any]) -> Iterator[_Sign]:
    for name in _TABLES:
        if name in checkpoint:
            rows = checkpoint.shape(name)[0] - size.positions
            # With the margin or without it: either may be this grid's.
            fits = size.tokens if rows - size.tokens in _MARGINS else _nearest_square(rows)
            yield _Sign(fits, f"its position table ({name}, {rows + size.positions} rows)")
    settings = checkpoint.settings
    if isinstance(settings.get("image_size"), int):
        side = settings["image_size"] // int(settings.get("downsample_size") or _DOWNSAMPLING)
        yield _Sign(side * side, f"the training it records (image_size {settings['image_size']})")
    if isinstance(config.get("block_size"), int):
        yield _Sign(config["block_size"], f"its config (block_size {config['block_size']})")
    published = PUBLISHED.get(_PUBLISHED_FILES.get(checkpoint.path.name, ""))
    # Only where it really is that model: anybody may name a file so.
    if published is not None and (published.dim, published.layers) == (size.dim, size.layers):
        yield _Sign(published.tokens, f"the published file of that name ({checkpoint.path.name})")


def _nearest_square(rows: int) -> int:
    for margin in _MARGINS:
        if rows > margin and math.isqrt(rows - margin) ** 2 == rows - margin:
            return rows - margin
    return rows


def _check_values(checkpoint: Checkpoint, size: LlamaGenSize, advice: str) -> None:
    """The table itself must turn as ours does: another base, or rows and columns exchanged, are other positions."""
    name = next((name for name in _TABLES if name in checkpoint), None)
    if name is None:
        return
    ours = grid_rotary(size.transformer())[: size.positions + size.tokens]
    theirs = checkpoint[name].float()[: len(ours)]
    if theirs.shape != ours.shape:
        raise UserError(
            f"{checkpoint.path}: its position table turns {2 * theirs.shape[1] if theirs.dim() > 1 else 0} numbers a "
            f"head, and this model's heads have {2 * ours.shape[1]}",
            "The number of heads does not fit: see n_head of its config.",
        )
    if not torch.allclose(theirs[size.positions :], ours[size.positions :], atol=_ROUNDING):
        raise UserError(f"{checkpoint.path}: its position table is of another grid or another rope_base", advice)


def _grid_text(tokens: int) -> str:
    side = math.isqrt(max(tokens, 0))
    return f"a {side}x{side} grid ({tokens} tokens)" if side * side == tokens else f"{tokens} tokens"


# ----

_KINDS: dict[tuple[str, str], str] = {
    ("t2i", "official"): "LlamaGen, text-conditional, in the official layout",
    ("t2i", "hf"): "LlamaGen, text-conditional, in the layout of the HF conversion",
    ("c2i", "official"): "LlamaGen, class-conditional, in the official layout",
    ("c2i", "hf"): "LlamaGen, class-conditional, in the layout of the HF conversion",
}
_WORDS = {"t2i": "text-conditional", "c2i": "class-conditional"}


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


def as_stated(size: LlamaGenSize, config: Mapping[str, Any], path: Path) -> LlamaGenSize:
    """A published size with the constants that a config.json beside the weights states (finding B6)."""

    def wrong(name: str, text: str) -> UserError:
        return UserError(f"{path.parent / 'config.json'}: {name}: {text}")

    stated = read_config(config, wrong)
    return replace(size, **{name: stated[name] for name in ("norm_eps", "rope_base") if name in stated})


def stated_sizes(file: ModelFile) -> dict[str, Any]:
    """What a model file, or the config.json beside its weights, states of the target's size, by our names."""
    config, where = file.target.config, "target.config"
    if config is None:
        config, where = config_beside(file.target.path, file.target.layout), "config.json"

    def wrong(name: str, text: str) -> UserError:
        return file.wrong(f"{where}.{name}", text)

    return read_config(config, wrong)


def known_sizes(file: ModelFile, kind: Kind, published: LlamaGenSize | None, wanted: Iterable[str]) -> dict[str, Any]:
    """What is known of a target before it is loaded, by our names, `wanted` among it.

    The checkpoint is opened only for what neither the file nor the family's name tells. Raises `UserError` as
    `describe`.
    """
    known = {} if published is None else {item.name: getattr(published, item.name) for item in fields(published)}
    known |= stated_sizes(file)
    if not known.keys() >= set(wanted):
        known = _told(file.target.path, file.target.path.stat().st_mtime_ns, kind) | known
    return known


@functools.lru_cache(maxsize=8)
def _told(path: Path, _changed: int, kind: Kind) -> dict[str, Any]:
    """What the shapes in a checkpoint tell, read once while the file stays as it is."""
    checkpoint = open_checkpoint(path)
    _check_kind(checkpoint, kind, None)
    return _shapes(checkpoint, kind)


def describe(
    file: ModelFile, checkpoint: Checkpoint, kind: Kind, published: LlamaGenSize | None
) -> tuple[LlamaGenSize, dict[str, Any]]:
    """The size of the model in a file, and what was stated beside its weights.

    `published` is the size that the family's name stands for, if it is a model's. Raises `UserError` for a checkpoint
    of another kind and for what nobody tells.
    """
    _check_kind(checkpoint, kind, _layout(file))
    stated = stated_sizes(file)
    if stated.get("kind", kind) != kind:
        raise file.wrong("target.config", f"says {stated['kind']}, and the family {file.family} is {kind}")
    known = _shapes(checkpoint, kind)
    if published is not None:
        known |= {item.name: getattr(published, item.name) for item in fields(published)}
    known |= {name: value for name, value in stated.items() if name != "block_size"}
    known["grid"] = _grid(file, stated, checkpoint, published, known["positions"])
    known.setdefault("heads", heads_of_published(known["dim"], known["layers"]))
    if known["heads"] is None:
        raise file.wrong(
            "target.config.n_head",
            "missing: no checkpoint tells the number of heads, and this is no published size",
            "Give target: {config: {n_head: N}}.",
        )
    if known["dim"] % known["heads"]:
        raise file.wrong("target.config.n_head", f"{known['heads']}: does not divide the width {known['dim']}")
    if published is None and "kv_heads" not in known:
        known["kv_heads"] = _kv_heads(known.pop("kv_width"), known["dim"], known["heads"])
    known.pop("kv_width", None)
    known.setdefault("ffn_dim", ffn_width(known["dim"]))
    return LlamaGenSize(**(known | {"kind": kind})), stated


def kind_of_checkpoint(checkpoint: Checkpoint) -> Kind | None:
    """Whether a checkpoint is text-conditional or class-conditional LlamaGen; None for neither."""
    for kind, ending in (("c2i", "cls_embedding.embedding_table.weight"), ("t2i", "cls_embedding.uncond_embedding")):
        if any(name.endswith(ending) for name in checkpoint):
            return "c2i" if kind == "c2i" else "t2i"
    return None


def _layout(file: ModelFile) -> Layout | None:
    return "hf" if file.target.layout == "hf" else "official" if file.target.layout == "official" else None


def config_beside(path: Path, layout: str | None) -> Mapping[str, Any]:
    """The config.json beside weights in the HF layout; others have none."""
    folder = path if path.is_dir() else path.parent
    if not (layout == "hf" or path.is_dir() or path.suffix == ".safetensors") or not (folder / "config.json").is_file():
        return {}
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _check_kind(checkpoint: Checkpoint, kind: Kind, layout: Layout | None) -> None:
    """Refuse a checkpoint that is something else: of another family, the other condition, or the other layout."""
    found, found_layout = kind_of_checkpoint(checkpoint), layout_of(checkpoint)
    wanted = f"LlamaGen, {_WORDS[kind]}"
    if found is None:
        what = what_is(checkpoint)
        raise UserError(
            f"{checkpoint.path}: is not {wanted}" + (f": it is {what}" if what else "; none of its keys are known"),
            f"It begins with {', '.join(list(checkpoint)[:3])}.",
        )
    if found != kind:
        raise UserError(
            f"{checkpoint.path}: is not {wanted}: it is {_KINDS[found, found_layout]}",
            f"Its family is llamagen-{found}.",
        )
    if layout is not None and layout != found_layout:
        raise UserError(
            f"{checkpoint.path}: is not in the layout {layout}: it is {_KINDS[found, found_layout]}",
            f"Give layout: {found_layout}, or leave it out.",
        )


def _shapes(checkpoint: Checkpoint, kind: Kind) -> dict[str, Any]:
    """The numbers that the shapes of a checkpoint tell; raises `UserError` where those are missing."""
    hf = layout_of(checkpoint) == "hf"
    top, embedding = ("model.", "model.embed_tokens.weight") if hf else ("", "tok_embeddings.weight")
    gate, keys = ("mlp.gate_proj", "self_attn.k_proj") if hf else ("feed_forward.w1", "attention.wqkv")
    null = f"{top}cls_embedding.{'embedding_table.weight' if kind == 'c2i' else 'uncond_embedding'}"
    layers = 0
    while f"{top}layers.{layers}.{gate}.weight" in checkpoint:
        layers += 1
    try:
        vocab_size, dim = checkpoint.shape(embedding)
        rows, width = checkpoint.shape(null)
        ffn_dim = checkpoint.shape(f"{top}layers.0.{gate}.weight")[0]
        kv_rows = checkpoint.shape(f"{top}layers.0.{keys}.weight")[0]
    except (KeyError, ValueError, IndexError) as error:
        missing = [
            name
            for name in (embedding, null, f"{top}layers.0.{gate}.weight", f"{top}layers.0.{keys}.weight")
            if name not in checkpoint
        ]
        raise UserError(f"{checkpoint.path}: {len(missing)} missing: {', '.join(missing)}") from error
    found = {"vocab_size": vocab_size, "dim": dim, "layers": layers, "ffn_dim": ffn_dim}
    found |= {"positions": 1, "classes": rows - 1} if kind == "c2i" else {"positions": rows, "width": width}
    return found | {"kv_width": kv_rows if hf else (kv_rows - dim) // 2}


def _kv_heads(kv_width: int, dim: int, heads: int) -> int | None:
    """The heads of keys and values, from how many rows they have; None where they are as many as the queries'."""
    count = kv_width * heads // dim
    return None if count in (0, heads) else count


def _grid(
    file: ModelFile,
    stated: Mapping[str, Any],
    checkpoint: Checkpoint,
    published: LlamaGenSize | None,
    positions: int,
) -> tuple[int, int]:
    """The grid: as the file says, or its name, or what stands beside the weights."""
    if file.grid is not None:
        return file.grid
    if published is not None:
        return published.grid
    side = int(stated.get("block_size", 0) ** 0.5)
    if side and side * side == stated["block_size"]:
        return side, side
    table = grid_of_table(checkpoint, positions)
    if table is None:
        raise file.wrong("grid", "missing: the weights do not tell it", "Give grid: [rows, columns] of tokens.")
    return table
