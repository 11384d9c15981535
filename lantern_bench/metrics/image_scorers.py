"""Scorers of pictures with captions: CLIP score by open_clip, prompt accuracy, HPSv2 and ImageReward.

The CLIP score is the cosine of the two embeddings, not scaled by 100 and not clipped at 0. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from torch import Tensor

from lantern_bench.methods.metrics import measures
from lantern_bench.metrics import extractors
from lantern_bench.metrics.protocols import Protocol
from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.families.lanterns import modules as classifier
from lantern_bench.models.families.lanterns.description import WEIGHTS_FOLDER, attributes_of
from lantern_bench.models.families.lanterns.modules import AttributeClassifier
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import read_json, remembered_sha256

BUNDLED = "lanterns-clip"
BUNDLED_FOLDER = WEIGHTS_FOLDER / "clip"
LOCAL_DIR = "local-dir:"


@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with its preprocessing and tokenizer."""

    model: Any
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    label: str  # its name in results, with the fingerprint of its weights
    prefix: str  # put before every caption
    device: torch.device

    def images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Normalised embeddings of pictures: float32 [n, width], on the CPU."""
        batches = (
            torch.stack([self.preprocess(picture) for picture in batch])
            for batch in _batches(pictures)
        )
        return self._embedded(self.model.encode_image, batches)

    def captions(self, captions: Sequence[str]) -> Tensor:
        """Normalised embeddings of captions: float32 [n, width], on the CPU."""
        batches = (
            self.tokenizer([self.prefix + caption for caption in batch])
            for batch in _batches(captions)
        )
        return self._embedded(self.model.encode_text, batches)

    @torch.inference_mode()
    def _embedded(self, encode: Callable[..., Tensor], batches: Iterator[Tensor]) -> Tensor:
        return torch.cat(
            [encode(batch.to(self.device), normalize=True).float().cpu() for batch in batches]
        )

    def __call__(self, pictures: Sequence[Tensor], captions: Sequence[str]) -> list[float]:
        """The cosine of each picture, uint8 [3, h, w], with its own caption, in [-1, 1]."""
        images = _as_pil(pictures)
        return (self.images(images) * self.captions(captions)).sum(1).tolist() if images else []


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + 64] for start in range(0, len(items), 64))


def _as_pil(pictures: Sequence[Tensor]) -> list[Image.Image]:
    return [
        Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).cpu().numpy()))
        for picture in pictures
    ]


def load_clip(
    name: str = BUNDLED,
    weights: Path | None = None,
    *,
    prefix: str = "",
    device: torch.device | str = "cpu",
    label: str | None = None,
) -> ClipScorer:
    """Load a CLIP model.

    `name` is `lanterns-clip` (the bundled model), `local-dir:FOLDER` (a folder with `open_clip_config.json` and
    weights), or an architecture of open_clip with the checkpoint `weights` or `NAME.safetensors` in the weights folder.
    """
    if name == BUNDLED or name.startswith(LOCAL_DIR):
        folder = BUNDLED_FOLDER if name == BUNDLED else Path(name.removeprefix(LOCAL_DIR))
        path = _weights_in(folder, name)
        source = f"{LOCAL_DIR}{folder}"
        pretrained = None
        label = label or (name if name == BUNDLED else folder.name)
    elif name in open_clip.list_models():
        path = weights or extractors.find_weights(f"the CLIP model {name}", f"{name}.safetensors")
        source = name
        pretrained = str(path)
    else:
        advice = f"Give {BUNDLED}, {LOCAL_DIR}FOLDER, or an architecture of open_clip such as ViT-B-32, ViT-L-14."
        raise UserError(f"unknown CLIP model {name!r}", advice)
    open_checkpoint(path)  # refuses a pickle with code
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(
            source, pretrained, device=device
        )
        tokenizer = open_clip.get_tokenizer(source)
    except (RuntimeError, ValueError) as problem:
        advice = (
            "Give the architecture of the checkpoint; OpenAI's weights need the -quickgelu ones."
        )
        raise UserError(f"{path.name} does not fit the CLIP model {name}", advice) from problem
    model.eval().requires_grad_(False)
    label = f"{label or name}@{remembered_sha256(path)[:8]}"
    return ClipScorer(
        model=model,
        preprocess=preprocess,
        tokenizer=tokenizer,
        label=label,
        prefix=prefix,
        device=torch.device(device),
    )


def _weights_in(folder: Path, name: str) -> Path:
    """The weights file that open_clip takes from a folder; raises for an incomplete one."""
    advice = (
        "In the repository: python -m scripts.train_lanterns --part clip"
        if name == BUNDLED
        else None
    )
    config = folder / "open_clip_config.json"
    if not config.is_file():
        kind = RefusedError if name == BUNDLED else UserError
        raise kind(f"the CLIP model {name} is missing: no {config.name} in its folder", advice)
    stated = read_json(config)
    if not isinstance(stated, dict) or "model_cfg" not in stated:
        raise UserError(
            f"{config} is not an open_clip configuration (a JSON object with model_cfg)"
        )
    checkpoint = open_clip.factory._find_checkpoint_in_dir(folder)
    if checkpoint is None:
        raise RefusedError(
            f"the weights of the CLIP model {name} are missing: none beside {config.name}", advice
        )
    return Path(checkpoint)


@measures("clip_score")
def clip_score(protocol: Protocol, device: torch.device | str) -> ClipScorer:
    """Load the scorer of the metric `clip_score`: the protocol's CLIP model."""
    return load_clip(protocol.clip_model or BUNDLED, prefix=protocol.clip_prefix, device=device)


@measures("hpsv2")
def hpsv2(_protocol: Protocol, device: torch.device | str) -> ClipScorer:
    """Load HPSv2.1 (Wu et al. 2023), a CLIP model."""
    path = extractors.find_weights("HPSv2", "HPS_v2.1_compressed.pt")
    return load_clip("ViT-H-14", path, device=device, label="hpsv2.1")


@measures("image_reward")
def image_reward(_protocol: Protocol, device: torch.device | str) -> ImageReward:
    """Load ImageReward 1.0 (Xu et al. 2023)."""
    if importlib.util.find_spec("ImageReward") is None:
        problem = "ImageReward is not installed: the protocol image-reward needs its package"
        raise RefusedError(problem, "Install the extra: pip install 'lantern-bench[image-reward]'")
    path = extractors.find_weights("ImageReward", "ImageReward.pt")
    if not (path.parent / "med_config.json").is_file():
        raise RefusedError(
            f"ImageReward needs med_config.json beside {path}",
            "Put that file of its authors there.",
        )
    open_checkpoint(path)  # refuses a pickle with code
    import ImageReward as package

    # Its loader prints, and asks the network for files that are beside the weights.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        model = package.load(str(path), device=device, download_root=str(path.parent))
    return ImageReward(model, f"image-reward-1.0@{remembered_sha256(path)[:8]}")


@dataclass(frozen=True)
class ImageReward:
    """The model of the package ImageReward; it takes one caption and one picture at a time."""

    model: Any
    label: str

    def __call__(self, pictures: Sequence[Tensor], captions: Sequence[str]) -> list[float]:
        """Return the reward of each picture, uint8 [3, h, w], for its own caption."""
        with torch.inference_mode():
            pairs = zip(_as_pil(pictures), captions, strict=True)
            return [float(self.model.score(caption, picture)) for picture, caption in pairs]


@dataclass(frozen=True)
class PromptAccuracy:
    """Whether pictures show all that their captions ask for, by the attribute classifier."""

    classifier: AttributeClassifier
    label = None  # the protocol says which network it is

    def __call__(self, pictures: Sequence[Tensor], prompts: Sequence[str]) -> list[float | None]:
        """Return 1.0 or 0.0 for each picture; None where the prompt is no caption of the bundled family."""
        wanted = {
            row: caption
            for row, caption in enumerate(attributes_of(prompts))
            if caption is not None
        }
        scores: list[float | None] = [None] * len(prompts)
        if wanted:
            captioned = torch.stack([pictures[row] for row in wanted])
            correct = classifier.prompt_accuracy(self.classifier, captioned, list(wanted.values()))
            for row, is_correct in zip(wanted, correct.tolist(), strict=True):
                scores[row] = float(is_correct)
        return scores


@measures("prompt_accuracy")
def prompt_accuracy(_protocol: Protocol, device: torch.device | str) -> PromptAccuracy:
    """Load the scorer of the metric `prompt_accuracy`."""
    return PromptAccuracy(classifier.load_classifier(device=device))
