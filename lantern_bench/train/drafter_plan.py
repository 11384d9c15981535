"""What a training of a drafter would make, in numbers, before anything is made: sequences, bytes, steps."""

from __future__ import annotations

import math

import torch

from lantern_bench.models.random_weights import blueprint
from lantern_bench.models.registry import Buildable, family_of, load_model
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.train.drafter_job import DrafterJob
from lantern_bench.train.lessons import SHARD_BYTES, bytes_a_row

__all__ = ["plan_rows", "shape_of"]


def shape_of(model: str) -> TransformerConfig | None:
    """The target's sizes: of a published model without its files, else from them; None for no transformer.

    Raises as `load_model` where a model's own files are needed and missing.
    """
    if isinstance(family_of(model), Buildable):
        target = blueprint(model)[2].target
    else:
        target = load_model(model, torch.device("cpu"), torch.float32).target  # type: ignore[assignment]
    return target.config if isinstance(target, TransformerTarget) else None


def plan_rows(job: DrafterJob, config: TransformerConfig, dtype: torch.dtype) -> list[tuple[str, str]]:
    """What would be made, and how much of it."""
    recipe, total = job.recipe, len(job.data)
    held_out = min(total - 1, max(1, round(recipe.held_out * total)))
    learnt = total - held_out
    steps = recipe.total_steps(learnt)
    stored = torch.bfloat16 if recipe.autocast else dtype
    row = bytes_a_row(config.prefix, config.image_tokens, config.dim, stored)
    rows = total * (1 + recipe.guided)
    shards = math.ceil(rows / max(1, SHARD_BYTES // row))
    kind = "pictures encoded" if job.data.pictures is not None else "pictures sampled by the target"
    where = "written" if job.features == "shards" else "not written: features are made as they are needed"
    weights = 4 * _parameters(config)
    examined = steps // job.examine_every if job.examine_every else 0
    until = f"{steps:,}" if job.minutes is None else f"as many as {job.minutes:g} minutes allow"
    return [
        (kind, f"{total:,}" + (" with mirror images" if job.data.mirrored else "")),
        ("tokens", f"{total * config.image_tokens:,} ({config.image_tokens:,} a picture)"),
        ("held out", f"{held_out:,} of {total:,}"),
        ("token files", _bytes(4 * total * config.image_tokens)),
        ("feature shards", f"{_bytes(rows * row)} in {shards} files of {str(stored)[6:]}, {where}"),
        ("steps", f"{until} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", f"{steps / recipe.steps_an_epoch(learnt):.3g}" if job.minutes is None else "as many"),
        ("examinations", f"{examined} of {job.examine_images} images, one of {job.final_images} at the end"),
        ("checkpoint", _bytes(3 * weights)),
        ("exported drafter", _bytes(weights)),
    ]


def _parameters(config: TransformerConfig) -> int:
    """Numbers of a drafter: embedding, fusion, one layer."""
    kv = (config.kv_heads or config.heads) * config.head_dim
    layer = 2 * config.dim * config.dim + 2 * config.dim * kv + 3 * config.dim * config.ffn_dim + config.dim
    return (config.words or config.vocab_size) * config.dim + 2 * config.dim * config.dim + config.dim + layer


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
