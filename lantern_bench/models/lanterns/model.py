"""Weights of the embedded models on disk: float16 safetensors, one file a part, replaced whole or not at all.

How a module's weights come to be in a file, and from there into a module. Which part lies where is in `files`, how they
are trained in `recipe`; loading them for decoding is in `family`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import file_sha256
from lantern_bench.models.lanterns import FILES, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import MAX_WORDS, VOCABULARY, words
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.conditioning import Condition, WordCaption
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.models.vq import VQConfig, VQModel


def part_hash(path: Path) -> str:
    """The SHA-256 of a file of weights, in hex."""
    return file_sha256(path)


def write_weights(state: dict[str, Tensor], path: Path) -> None:
    """Write weights as float16 safetensors; a file that was there is replaced when the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: _half(value) for name, value in state.items()}, part)
    os.replace(part, path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights as they train and decode: float16 becomes float32.

    Raises `UserError` for a file that cannot be read as safetensors.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as weights: {problem}") from problem
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def fill(module: nn.Module, path: Path) -> None:
    """Load a file of weights into a module; raises `UserError` where they are another model's."""
    try:
        module.load_state_dict(read_weights(path))
    except RuntimeError as problem:
        # Torch's message has a heading and then a line for each tensor: one of them is enough.
        first = str(problem).splitlines()[1:2] or [str(problem)]
        raise UserError(f"{path} holds the weights of another model: {first[0].strip()}") from problem


def load_tokenizer(folder: Path = WEIGHTS_FOLDER, device: torch.device | str = "cpu") -> VQModel:
    """The trained tokenizer in float32, in evaluation mode; raises `RefusedError` when its file is missing."""
    path = folder / FILES["tokenizer"]
    if not path.is_file():
        raise RefusedError(
            f"the tokenizer's weights are missing: {path.name}",
            "train them with `lantern-bench train lanterns --part tokenizer`",
        )
    tokenizer = VQModel(TOKENIZER_CONFIG)
    fill(tokenizer, path)
    return tokenizer.to(device).eval().requires_grad_(False)


def _half(value: Tensor) -> Tensor:
    return (value.detach().half() if value.is_floating_point() else value).cpu().contiguous()


TOKENIZER_CONFIG = VQConfig(codes=2048, code_dim=8, z_channels=64, channels=32, channel_mult=(1, 2, 3), res_blocks=1)


TARGET_CONFIG = TransformerConfig(
    vocab_size=2048,
    dim=256,
    layers=8,
    heads=4,
    ffn_dim=704,
    prefix=MAX_WORDS,
    grid=(16, 16),
    prefix_rotary="identity",
)


def build_target() -> TransformerTarget:
    """The embedded target with fresh weights, drawn from torch's current stream."""
    target = TransformerTarget(TARGET_CONFIG, WordCaption(len(VOCABULARY), MAX_WORDS, TARGET_CONFIG.dim))
    for name, parameter in target.named_parameters():
        if parameter.dim() >= 2:
            deep = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * TARGET_CONFIG.layers) ** 0.5 if deep else 0.02)
    return target


def caption_condition(captions: Sequence[str]) -> Condition:
    """Word numbers int64 [B, 10], padded on the left, and which are words; UserError as in `captions.words`."""
    values = torch.zeros(len(captions), MAX_WORDS, dtype=torch.int64)
    for row, caption in enumerate(captions):
        numbers = words(caption)
        values[row, MAX_WORDS - len(numbers) :] = torch.tensor(numbers)
    return Condition(values, values > 0)
