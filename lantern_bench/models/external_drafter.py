"""Another drafter for a model that is loaded: from a folder in the published layout, whatever the model's family.

It is what `lantern-bench train drafter` writes, or somebody else's. Only targets that are THE transformer have drafters
of this kind.
"""

from __future__ import annotations

from pathlib import Path

from lantern_bench.errors import UserError
from lantern_bench.models.eagle import load_drafter
from lantern_bench.models.io.checkpoint import open_checkpoint
from lantern_bench.models.io.files import hash_of
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.transformer.target import TransformerTarget


def transformer_of(model: LoadedModel) -> TransformerTarget:
    """The model's target; raises `UserError` where it is not of the kind that has EAGLE drafters."""
    if not isinstance(model.target, TransformerTarget):
        raise UserError(
            f"{model.name}: its target is no transformer of this package", "EAGLE drafters need the target's features."
        )
    return model.target


def with_drafter(model: LoadedModel, folder: Path) -> LoadedModel:
    """Give a loaded model the drafter in a folder, and the hash that its records carry."""
    target = transformer_of(model)
    model.drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device)
    paths = (*open_checkpoint(folder).paths, folder / "config.json")
    model.weights = dict(model.weights) | {"drafter": hash_of(paths)}
    return model
