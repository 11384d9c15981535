"""CLIP score: how well a picture fits its caption, as the cosine of the two embeddings, by open_clip.

Cosine, not scaled by 100 and not clipped at 0, so that published figures must be brought to this form. The embedded
model and full-size ones go the same way: open_clip makes the model, its own preprocessing and its own tokenizer. The
model is part of the figure (`ClipScorer.label`). Nothing here downloads anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import open_clip
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from lantern_bench.config.protocols import REWARDS
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.metrics import features
from lantern_bench.models.lanterns import WEIGHTS_FOLDER

EMBEDDED = "lanterns-clip"
EMBEDDED_FOLDER = WEIGHTS_FOLDER / "clip"
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
    named = f"{label or called}@{features.fingerprint(path)}"
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
        features.check_plain_weights(path)
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
    path = features.find_weights(f"the CLIP model {name}", file_name, weights, advice)
    if path.suffix != ".safetensors":
        features.check_plain_weights(path)
    return path


# ---- Human-preference judges, HPSv2 and ImageReward, behind the interface of the CLIP score


_HPS_FILE = "HPS_v2.1_compressed.pt"
_HPS_ARCHITECTURE = "ViT-H-14"
_IMAGE_REWARD_FILE, _IMAGE_REWARD_CONFIG = "ImageReward.pt", "med_config.json"


class Reward(Protocol):
    """A judge of pictures with captions."""

    @property
    def label(self) -> str:
        """What results call it: its name and its weights."""
        ...

    def score(self, pictures: Tensor | Sequence[Tensor | Image.Image], captions: Sequence[str]) -> list[float]:
        """One figure for each picture with its own caption; pictures as for `clip.ClipScorer.score`."""
        ...


def load_reward(name: str, weights: Path | None = None, *, device: torch.device | str = "cpu") -> Reward:
    """The judge called `name` (one of `spec.protocols.REWARDS`).

    Raises `RefusedError` when its package or weights are not there; `ValueError` for another name.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; there are {', '.join(REWARDS)}")
    return _LOADERS[name](weights, device)


def _hpsv2(weights: Path | None, device: torch.device | str) -> Reward:
    advice = f"put {_HPS_FILE} of the HPSv2 authors into the folder that LANTERN_BENCH_WEIGHTS names"
    path = features.find_weights("HPSv2", _HPS_FILE, weights, advice)
    return load_clip(_HPS_ARCHITECTURE, path, device=device, label="hpsv2.1")


@dataclass(frozen=True)
class _ImageReward:
    """The package's own model; it takes one caption and one picture at a time."""

    model: Any
    label: str

    def score(self, pictures: Tensor | Sequence[Tensor | Image.Image], captions: Sequence[str]) -> list[float]:
        """One figure for each picture with its own caption."""
        if len(pictures) != len(captions):
            raise ValueError(f"{len(pictures)} pictures, {len(captions)} captions")
        pairs = zip(map(as_pil, pictures), captions, strict=True)
        with torch.inference_mode():
            return [float(self.model.score(caption, picture)) for picture, caption in pairs]


def _image_reward(weights: Path | None, device: torch.device | str) -> Reward:
    if importlib.util.find_spec("ImageReward") is None:
        raise RefusedError(
            "ImageReward is not installed: the protocol image-reward needs its package",
            "Install the extra: pip install 'lantern-bench[image-reward]'",
        )
    advice = f"put {_IMAGE_REWARD_FILE} and {_IMAGE_REWARD_CONFIG} of its authors into one folder there"
    path = features.find_weights("ImageReward", _IMAGE_REWARD_FILE, weights, advice)
    if not (path.parent / _IMAGE_REWARD_CONFIG).is_file():
        raise RefusedError(f"ImageReward needs {_IMAGE_REWARD_CONFIG} beside {path.name}", advice)
    features.check_plain_weights(path)
    import ImageReward

    # Its loader prints, and asks the network for what is beside the weights already.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        model = ImageReward.load(str(path), device=device, download_root=str(path.parent))
    return _ImageReward(model, f"image-reward-1.0@{features.fingerprint(path)}")


_LOADERS: dict[str, Callable[[Path | None, torch.device | str], Reward]] = {
    "hpsv2": _hpsv2,
    "image_reward": _image_reward,
}
