"""CLIP score: how well a picture fits its caption, as the cosine of the two embeddings, by open_clip.

Cosine, not scaled by 100 and not clipped at 0, so that published figures must be brought to this form. The embedded
model and full-size ones go the same way: open_clip makes the model, its own preprocessing and its own tokenizer. The
model is part of the figure (`ClipScorer.label`). Nothing here downloads anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.measure import weights_files

__all__ = ["EMBEDDED", "EMBEDDED_FOLDER", "LOCAL_DIR", "ClipScorer", "as_pil", "load_clip"]

EMBEDDED = "lanterns-clip"
EMBEDDED_FOLDER = Path(__file__).parent.parent / "lanterns" / "weights" / "clip"
LOCAL_DIR = "local-dir:"
_CONFIG = "open_clip_config.json"
_BATCH = 64


@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with the preprocessing and the tokenizer that belong to it."""

    model: Any
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    label: str
    prefix: str
    device: torch.device

    @torch.inference_mode()
    def images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Normalised embeddings of pictures: float32 [n, width], on the CPU."""
        rows = []
        for start in range(0, len(pictures), _BATCH):
            batch = torch.stack([self.preprocess(picture) for picture in pictures[start : start + _BATCH]])
            rows.append(self.model.encode_image(batch.to(self.device), normalize=True).float().cpu())
        return torch.cat(rows)

    @torch.inference_mode()
    def captions(self, captions: Sequence[str]) -> Tensor:
        """Normalised embeddings of captions, each with the prefix before it: float32 [n, width], on the CPU."""
        rows = []
        for start in range(0, len(captions), _BATCH):
            tokens = self.tokenizer([self.prefix + caption for caption in captions[start : start + _BATCH]])
            rows.append(self.model.encode_text(tokens.to(self.device), normalize=True).float().cpu())
        return torch.cat(rows)

    def score(self, pictures: Tensor | Sequence[Tensor | Image.Image], captions: Sequence[str]) -> list[float]:
        """The cosine of each picture with its own caption, in [-1, 1].

        `pictures` are PIL images or tensors uint8 [3, h, w], or one of [n, 3, h, w]; there must be as many captions
        (`ValueError`).
        """
        if len(pictures) != len(captions):
            raise ValueError(f"{len(pictures)} pictures, {len(captions)} captions")
        if not len(pictures):
            return []
        images = self.images([as_pil(picture) for picture in pictures])
        cosines: list[float] = (images * self.captions(captions)).sum(1).tolist()
        return cosines


def as_pil(picture: Tensor | Image.Image) -> Image.Image:
    """A picture uint8 [3, h, w] as a PIL image; a PIL image as it is."""
    if not isinstance(picture, Tensor):
        return picture
    return Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).cpu().numpy()))


def load_clip(
    name: str = EMBEDDED,
    weights: Path | None = None,
    *,
    prefix: str = "",
    device: torch.device | str = "cpu",
    label: str | None = None,
) -> ClipScorer:
    """Load a CLIP model.

    `name` is `lanterns-clip` (the embedded one), `local-dir:FOLDER` (a folder with `open_clip_config.json` and
    weights), or an architecture of open_clip such as `ViT-B-32`, whose checkpoint is `weights` or `NAME.safetensors` in
    the folder of weights (OpenAI's own weights need the `-quickgelu` architectures). `prefix` is put before every
    caption, e.g. "a photo of "; `label` is what results call the model, its name by default. Raises `UserError` for a
    name or file that is wrong, `RefusedError` when weights are missing.
    """
    if name == EMBEDDED or name.startswith(LOCAL_DIR):
        folder = EMBEDDED_FOLDER if name == EMBEDDED else Path(name.removeprefix(LOCAL_DIR))
        path, source, pretrained = _weights_in(folder, name), f"{LOCAL_DIR}{folder}", None
        called = name if name == EMBEDDED else folder.name
    else:
        path, source, called = _checkpoint(name, weights), name, name
        pretrained = str(path)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(source, pretrained, device=device)
        tokenizer = open_clip.get_tokenizer(source)
    except (RuntimeError, ValueError, SafetensorError) as problem:
        raise UserError(
            f"{path.name} does not fit the CLIP model {name}",
            "its architecture must be the checkpoint's own; OpenAI's weights need the -quickgelu ones",
        ) from problem
    model.eval().requires_grad_(False)
    named = f"{label or called}@{weights_files.fingerprint(path)}"
    return ClipScorer(model, preprocess, tokenizer, named, prefix, torch.device(device))


def _weights_in(folder: Path, name: str) -> Path:
    """The weights file open_clip will take from a `local-dir:` folder, after checking that the folder is whole."""
    advice = "train it with `lantern-bench train lanterns --part clip`" if name == EMBEDDED else None
    config = folder / _CONFIG
    if not config.is_file():
        kind = RefusedError if name == EMBEDDED else UserError
        raise kind(f"the CLIP model {name} is missing: no {_CONFIG} in its folder", advice)
    try:
        json.loads(config.read_text(encoding="utf-8"))["model_cfg"]
    except (json.JSONDecodeError, KeyError, TypeError) as problem:
        raise UserError(f"{config} is not an open_clip configuration (a JSON object with model_cfg)") from problem
    found = open_clip.factory._find_checkpoint_in_dir(folder)
    if found is None:
        raise RefusedError(f"the weights of the CLIP model {name} are missing: none beside {_CONFIG}", advice)
    path = Path(found)
    if path.suffix != ".safetensors":
        weights_files.check_plain_weights(path)
    return path


def _checkpoint(name: str, weights: Path | None) -> Path:
    """The checkpoint of a full-size model, checked to be there and to be plain weights."""
    if name not in open_clip.list_models():
        raise UserError(
            f"unknown CLIP model {name!r}",
            f"{EMBEDDED}, {LOCAL_DIR}FOLDER, or an architecture of open_clip such as ViT-B-32, ViT-L-14",
        )
    file_name = f"{name}.safetensors"
    advice = f"give the path of a checkpoint of {name}, or put it there as {file_name}"
    path = weights_files.find_weights(f"the CLIP model {name}", file_name, weights, advice)
    if path.suffix != ".safetensors":
        weights_files.check_plain_weights(path)
    return path
