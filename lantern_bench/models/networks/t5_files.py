"""The folder of a T5 text encoder in the layout of transformers. This module imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import WEIGHT_FILES, read_json, weights_in

_GIVE_FEATURES = "or give features: lantern_bench.decode(..., conditions=...)."


def check_encoder(folder: Path, width: int) -> None:
    """Check what can be known of a text encoder before its weights are read.

    Args:
        folder: Its folder.
        width: Numbers of a feature that the model takes.

    Raises:
        UserError: The folder has no T5 encoder, or one of another width.
        RefusedError: transformers is not installed.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: is no T5 encoder: it has no config.json")
    config = read_json(path)
    kind = config.get("model_type")
    if kind != "t5":
        raise UserError(f"{folder}: is no T5 encoder: its config.json says model_type {kind}")
    numbers = config.get("d_model")
    if numbers != width:
        raise UserError(
            f"{folder}: is another T5: its features have {numbers} numbers, and the model takes "
            f"{width}",
            "The published models take google/flan-t5-xl.",
        )
    if not any((folder / name).is_file() for name in weights_in(folder)):
        raise UserError(
            f"{folder}: is no whole T5 encoder: it has no weights",
            f"One of {', '.join(WEIGHT_FILES)} is needed.",
        )
    if importlib.util.find_spec("transformers") is None:
        raise RefusedError(
            "captions need the package transformers, which is not installed",
            f"Type `pip install -e '.[hf]'` in the clone; {_GIVE_FEATURES}",
        )


def no_encoder(model: str) -> RefusedError:
    """Return the error for captions of a model whose text encoder is not on this machine."""
    fetch = f"Type `lantern-bench weights get {model}`"
    if Path(model).suffix in (".yaml", ".yml"):
        fetch = f"Name its folder in {model}, text_encoder: {{dir: ...}}"
    return RefusedError(
        f"{model} needs its text encoder (FLAN-T5-XL), and it is not on this machine",
        f"{fetch}; {_GIVE_FEATURES}",
    )
