"""The bundled family: a miniature text-to-image model of paper lanterns that ships in the wheel.

Captions, modules and trained weights; `experiments/train_lanterns` trains them. Figures measured with it
describe this miniature only, never LlamaGen.
"""

from __future__ import annotations

from pathlib import Path

from lantern_bench.models.transformer_config import TransformerConfig

GUIDANCE = 2.0

# On two cores no chain or small tree is faster for strict rules (docs/engine.md); relaxed rules gain from longer ones.
TREE = "chain-4"

TARGET_CONFIG = TransformerConfig(
    vocab_size=2048, dim=256, layers=8, heads=4, ffn_dim=704, prefix=10, grid=(16, 16), prefix_rotary="identity"
)
"""The target's sizes; the prefix holds `captions.MAX_WORDS` words."""

WEIGHTS_FOLDER = Path(__file__).parent / "weights"

FILES: dict[str, str] = {
    "tokenizer": "tokenizer.safetensors",
    "features": "features.safetensors",
    "clip": "clip/open_clip_model.safetensors",
    "target": "target.safetensors",
    "drafter": "drafter.safetensors",
}
"""The file of each part, relative to the folder of weights."""
