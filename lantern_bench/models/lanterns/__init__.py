"""The embedded family: a miniature text-to-image world that ships inside the package.

Scenes of paper lanterns, their captions, the recipe that trains the five models, and the weights it made. Its figures
describe this miniature only; they are never LlamaGen's.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["FILES", "GUIDANCE", "TREE", "WEIGHTS_FOLDER"]

GUIDANCE = 2.0

# As fast as any chain or small tree for the strict rule on two cores (docs/engine.md); relaxed ones gain by longer.
TREE = "chain-4"

WEIGHTS_FOLDER = Path(__file__).parent / "weights"

FILES: dict[str, str] = {
    "tokenizer": "tokenizer.safetensors",
    "features": "features.safetensors",
    "clip": "clip/open_clip_model.safetensors",
    "target": "target.safetensors",
    "drafter": "drafter.safetensors",
}
"""The file of each part, relative to the folder of weights."""
