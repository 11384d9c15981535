"""From the files of a LlamaGen target to its size and its weights, whoever put them there.

A size has up to four sources, the first that states a number wins: the `config` of a model file or the config.json
beside the weights, the published size of that name, the shapes in the checkpoint, and, for the number of heads, which
no shape tells, the published size of the same width and depth. What then does not fit the checkpoint is an error that
lists it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import Checkpoint, open_checkpoint
from lantern_bench.models.filling import fill
from lantern_bench.models.llamagen import Layout, build_target, is_computed, key_map, layout_of
from lantern_bench.models.llamagen_sizes import Kind, LlamaGenSize, ffn_width, heads_of_published, read_config
from lantern_bench.models.llamagen_stage import check_stage, grid_of_table
from lantern_bench.models.model_file import ModelFile
from lantern_bench.models.recognise import what_is
from lantern_bench.models.target import TransformerTarget

__all__ = [
    "as_stated",
    "config_beside",
    "describe",
    "kind_of_checkpoint",
    "known_sizes",
    "load_target",
    "stated_sizes",
]

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
