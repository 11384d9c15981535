"""A LlamaGen in memory, put together from its parts: conditions, pictures, nearest codes.

Where the parts come from (files, random numbers) makes no difference here. A model without a tokenizer gives tokens
and no pictures; one without a text encoder takes features that somebody else made.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.models.default_prompts import class_number
from lantern_bench.models.eagle import build_drafter
from lantern_bench.models.io.files import cache_folder
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.llamagen import LlamaGenSize
from lantern_bench.models.llamagen.checkpoint import build_target
from lantern_bench.models.llamagen.text_encoder import CaptionFeatureSource
from lantern_bench.models.loaded_model import LoadedModel, NoPixels, Parts, VQPixels
from lantern_bench.models.transformer.conditioning import Condition
from lantern_bench.models.vq import VQConfig, VQModel


def build(size: LlamaGenSize) -> Parts:
    """Fresh modules: target, a drafter of the published shape, the tokenizer VQ-16."""
    target = build_target(size)
    # The published drafters have one layer of the target's own shape.
    return Parts(target, build_drafter(target.config, target), VQModel(VQConfig()))


def loaded_model(
    name: str,
    size: LlamaGenSize,
    parts: Parts,
    weights: Mapping[str, str],
    *,
    text_encoder: Path | None = None,
    table: Tensor | None = None,
    table_folder: Path | None = None,
    captions: bool = True,
) -> LoadedModel:
    """Put parts together.

    `captions`: whether a text-conditional model encodes its captions itself, with the encoder in `text_encoder` or
    from what an encoder left behind; else its condition is to be given.
    `table` [V, k] holds the nearest codes where the user has made them; else they come from the codebook, and are
    kept in `table_folder`.
    """
    target: Any = parts.target
    drafter: Any = parts.drafter
    tokenizer: Any = parts.tokenizer
    codes = tokenizer.config.codes if tokenizer is not None else 0
    fits = codes == size.vocab_size
    reason = f"the tokenizer has {codes} codes, the target {size.vocab_size}" if codes else "it has no tokenizer"
    source, hashes = None, dict(weights)
    if size.kind == "t2i" and captions:
        cache = cache_folder() / "features"
        source = CaptionFeatureSource(
            text_encoder,
            cache,
            positions=size.positions,
            width=size.width,
            device=target.device,
            dtype=target.dtype,
            model=name,
        )
        # Without encoder and features no caption can be taken, and there is nothing to hash.
        with contextlib.suppress(RefusedError):
            hashes["text_encoder"] = source.sha256
    model = LoadedModel(
        name=name,
        target=target,
        drafter=drafter,
        pixels=VQPixels(tokenizer, size.grid) if fits else NoPixels(name, reason),
        codebook=tokenizer.codebook() if fits else None,
        condition=source if source is not None else class_condition(size.classes),
        weights=hashes,
        grid=size.grid,
        neighbour_space="raw",
        table_folder=table_folder,
        given_table=table,
    )
    if source is not None:
        model.prepare = source.prepare
    return model


def class_condition(classes: int) -> Callable[[Sequence[str]], Condition]:
    """Prompts that name classes -> their labels int64 [B]; `UserError` for one that is none."""

    def condition(prompts: Sequence[str]) -> Condition:
        labels = torch.tensor([class_number(text, classes) for text in prompts])
        return Condition(labels, torch.ones(len(labels), 1, dtype=torch.bool))

    return condition


def random_features(size: LlamaGenSize) -> Callable[[Sequence[str]], Condition]:
    """Stands for a text encoder: normal numbers seeded by the caption, no padding. They mean nothing."""

    def condition(prompts: Sequence[str]) -> Condition:
        rows = []
        for text in prompts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(size.positions, size.width, generator=generator) / size.width**0.5)
        return Condition(torch.stack(rows), torch.ones(len(rows), size.positions, dtype=torch.bool))

    return condition


def hash_of_text(text: str) -> str:
    """The hash of what is no file."""
    return hashlib.sha256(text.encode()).hexdigest()


def table_of_file(file: ModelFile, codes: int) -> Tensor | None:
    """The table of nearest codes int32 [V, k] a model file names; raises `UserError` for what is no such table."""
    if file.neighbours is None:
        return None
    path = file.neighbours.path
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
            table = found.get("nearest", found.get("table"))
        else:
            read = np.load(path, allow_pickle=False)
            table = torch.from_numpy((read["nearest"] if isinstance(read, np.lib.npyio.NpzFile) else read).astype("i8"))
    except (OSError, ValueError, KeyError, TypeError, EOFError, SafetensorError) as error:
        raise file.wrong("neighbours.table", f"{path.name}: cannot be read as .npy, .npz or .safetensors") from error
    if table is None or table.dim() != 2 or table.is_floating_point() or table.shape[0] != codes:
        shape = "nothing called nearest" if table is None else "x".join(map(str, table.shape))
        raise file.wrong("neighbours.table", f"{path.name}: must hold whole numbers [{codes}, k], not {shape}")
    table = table.long()
    if not bool(((table >= 0) & (table < codes)).all()) or bool((table == torch.arange(codes)[:, None]).any()):
        raise file.wrong("neighbours.table", f"{path.name}: each row must name other codes, from 0 to {codes - 1}")
    return table.int()
