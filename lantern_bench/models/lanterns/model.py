"""The bundled models: their sizes, fresh modules, and weights on disk as float16 safetensors, one file a part.

`lanterns.__init__` says where each part's file is, `experiments/train_lanterns` trains them, `family` loads them for
decoding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.state_dict import compute_buffers
from lantern_bench.models.lanterns import FILES, TARGET_CONFIG, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import MAX_WORDS, VOCABULARY, words
from lantern_bench.models.target import Condition, TransformerTarget, WordCaption
from lantern_bench.models.vq import VQConfig, VQModel

M = TypeVar("M", bound=nn.Module)

TOKENIZER_CONFIG = VQConfig(codes=2048, code_dim=8, z_channels=64, channels=32, channel_mult=(1, 2, 3), res_blocks=1)


def build_target() -> TransformerTarget:
    """The bundled target with fresh weights, drawn from torch's current stream."""
    target = TransformerTarget(TARGET_CONFIG, WordCaption(len(VOCABULARY), MAX_WORDS, TARGET_CONFIG.dim))
    for name, parameter in target.named_parameters():
        if parameter.dim() >= 2:
            deep = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * TARGET_CONFIG.layers) ** 0.5 if deep else 0.02)
    return target


def caption_condition(captions: Sequence[str]) -> Condition:
    """Word numbers int64 [B, 10], padded on the left; raises `UserError` as `captions.words`."""
    values = torch.zeros(len(captions), MAX_WORDS, dtype=torch.int64)
    for row, caption in enumerate(captions):
        numbers = words(caption)
        values[row, MAX_WORDS - len(numbers) :] = torch.tensor(numbers)
    return Condition(values, values > 0)


def write_weights(state: dict[str, Tensor], path: Path) -> None:
    """Write weights as float16 safetensors; an existing file is replaced when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    half = {name: value.detach().half() if value.is_floating_point() else value for name, value in state.items()}
    save_file({name: value.cpu().contiguous() for name, value in half.items()}, part)
    os.replace(part, path)


def read_weights(module: nn.Module, path: Path) -> None:
    """Read a file of weights into a float32 module; raises `UserError` for a damaged file or another model's."""
    try:
        state = load_file(path)
        module.load_state_dict({name: v.float() if v.is_floating_point() else v for name, v in state.items()})
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as weights: {problem}") from problem
    except RuntimeError as problem:
        # Torch's message has a heading and then a line for each tensor: one of them is enough.
        first = str(problem).splitlines()[1:2] or [str(problem)]
        raise UserError(f"{path} holds the weights of another model: {first[0].strip()}") from problem


def load_part(
    module: M, part: str, path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> M:
    """Read the weights of a part, for decoding; raises `RefusedError` when the file is missing."""
    if not path.is_file():
        raise RefusedError(
            f"the bundled model's {part} is missing: {path.name}",
            f"Install lantern-bench again; or, in its repository: python -m experiments.train_lanterns --part {part}",
        )
    read_weights(module, path)
    module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    # Position tables stay float32.
    compute_buffers(module, torch.device(device))
    return module


def load_tokenizer(folder: Path = WEIGHTS_FOLDER, device: torch.device | str = "cpu") -> VQModel:
    """The trained tokenizer in float32, in evaluation mode; raises as `load_part`."""
    return load_part(VQModel(TOKENIZER_CONFIG), "tokenizer", folder / FILES["tokenizer"], device)
