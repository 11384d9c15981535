"""Where the weights of the embedded models lie; no torch, so that listings can ask."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FILES", "WEIGHTS_FOLDER"]

WEIGHTS_FOLDER = Path(__file__).parent / "weights"

FILES: dict[str, str] = {
    "tokenizer": "tokenizer.safetensors",
    "features": "features.safetensors",
    "clip": "clip/open_clip_model.safetensors",
    "target": "target.safetensors",
    "drafter": "drafter.safetensors",
}
"""The file of each part, relative to the folder of weights."""
