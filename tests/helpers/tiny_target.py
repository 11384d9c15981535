"""A target of a few thousand numbers with words for captions, and its model: training takes
milliseconds.

The picture is 4 x 4 tokens of 32 codes; a tokenizer with random weights reads and draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lantern_bench.models.loaded_model import LoadedModel, VQPixels
from lantern_bench.models.model import Model
from lantern_bench.models.networks.target import Condition, TransformerTarget, WordCaption
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.models.networks.vq import VQConfig, VQModel
from lantern_bench.utils.errors import UserError

CONFIG = TransformerConfig(
    vocab_size=32,
    dim=32,
    layers=2,
    heads=2,
    ffn_dim=48,
    prefix=3,
    grid=(4, 4),
    prefix_rotary="identity",
)
WORDS = ("", "red", "blue", "round", "tall", "lantern")
CAPTIONS = (
    "red round lantern",
    "red tall lantern",
    "blue round lantern",
    "blue tall lantern",
)


def tiny_target(seed: int = 0) -> TransformerTarget:
    """The target with weights from the seed, its head sharp enough that tokens differ in
    probability.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = TransformerTarget(CONFIG, WordCaption(len(WORDS), CONFIG.prefix, CONFIG.dim))
        for parameter in target.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    return target.eval().requires_grad_(requires_grad=False)


def caption_condition(captions: Sequence[str]) -> Condition:
    """Numbers of the words, padded on the left."""
    values = torch.zeros(len(captions), CONFIG.prefix, dtype=torch.int64)
    for row, caption in enumerate(captions):
        numbers = [WORDS.index(word) for word in caption.split()]
        values[row, CONFIG.prefix - len(numbers) :] = torch.tensor(numbers)
    return Condition(values, values > 0)


def tiny_model() -> LoadedModel:
    """The target without a drafter."""
    config = VQConfig(
        codes=32, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1), res_blocks=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        tokenizer = VQModel(config).eval().requires_grad_(requires_grad=False)
    pixels = VQPixels(tokenizer, CONFIG.grid)
    weights = {"target": "a" * 64, "tokenizer": "b" * 64}
    codebook = tokenizer.codebook()
    return LoadedModel(
        name="tiny",
        target=tiny_target(),
        drafter=None,
        pixels=pixels,
        codebook=codebook,
        condition=caption_condition,
        weights=weights,
        grid=CONFIG.grid,
    )  # type: ignore[arg-type]


class TinyModel(Model):
    """The model `tiny`."""

    name = "tiny"
    family = "tiny"
    description = "A few numbers"
    codes = 32
    defaults: Mapping[str, Any] = {"cfg_scale": 2.0, "tree": "small-7"}
    prompt_sets: Mapping[str, Sequence[str]] = {"all": CAPTIONS}

    def check_prompt(self, text: str) -> None:
        for word in text.split():
            if word not in WORDS:
                raise UserError(
                    f"caption {text!r}: unknown word {word!r}",
                    f"The words are {', '.join(WORDS[1:])}.",
                )

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        return tiny_model()


def write_pictures(folder: Path, count: int, *, beside: bool = True) -> Path:
    """Pictures of 8 x 8 noise with captions, beside them or in captions.jsonl."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    lines = []
    for number in range(count):
        caption = CAPTIONS[number % len(CAPTIONS)]
        Image.fromarray(draws.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
            folder / f"{number:02d}.png"
        )
        lines.append(f'{{"file_name": "{number:02d}.png", "caption": "{caption}"}}')
        if beside:
            (folder / f"{number:02d}.txt").write_text(caption + "\n")
    if not beside:
        (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return folder
