"""Scorers of pictures with captions: CLIP score, prompt accuracy, HPSv2 and ImageReward.

The CLIP score is the cosine of two embeddings of open_clip. It is neither scaled by 100 nor clipped
at 0. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lantern_bench.metrics.protocols import NETWORK_FILES, Protocol
from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.hub import find_weights
from lantern_bench.models.families.lanterns import modules as classifier
from lantern_bench.models.families.lanterns.description import WEIGHTS_FOLDER, attributes_of
from lantern_bench.models.families.lanterns.modules import AttributeClassifier
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.hashes import remembered_sha256

BUNDLED = "lanterns-clip"
BUNDLED_FOLDER = WEIGHTS_FOLDER / "clip"


@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with its preprocessing and tokenizer."""

    model: Any
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Any  # of open_clip: called with texts, and with a context length if not its own
    label: str  # name in results, with the fingerprint of the weights
    prefix: str  # put before every caption
    device: torch.device | str

    def embed_pictures(self, pictures: Sequence[Tensor]) -> Tensor:
        """Return normalised embeddings of pictures, uint8 [3, h, w]: float32 [n, width]."""

        def encode(batch: Sequence[Tensor]) -> Tensor:
            pixels = torch.stack([self.preprocess(to_pil_image(picture)) for picture in batch])
            return self.model.encode_image(pixels.to(self.device), normalize=True)

        return _by_batches(pictures, encode)

    def embed_captions(self, captions: Sequence[str]) -> Tensor:
        """Return normalised embeddings of captions: float32 [n, width]."""

        def encode(batch: Sequence[str]) -> Tensor:
            tokens = self.tokenizer([self.prefix + caption for caption in batch])
            return self.model.encode_text(tokens.to(self.device), normalize=True)

        return _by_batches(captions, encode)

    def cut(self, captions: Sequence[str]) -> list[bool]:
        """Return which captions are longer than the context: the model sees only their beginning.

        Such a caption has a token, and not padding, after the last position of the context.
        """
        longer = self.tokenizer.context_length + 1
        texts = [self.prefix + caption for caption in captions]
        padding = self.tokenizer([""], context_length=longer)[0, -1]
        tokens = self.tokenizer(texts, context_length=longer)
        return (tokens[:, -1] != padding).tolist()

    def __call__(self, pictures: Sequence[Tensor], captions: Sequence[str]) -> list[float]:
        """Return the cosine of each picture, uint8 [3, h, w], with its own caption, in [-1, 1]."""
        return (self.embed_pictures(pictures) * self.embed_captions(captions)).sum(1).tolist()


@torch.inference_mode()
def _by_batches(items: Sequence[Any], encode: Callable[[Any], Tensor]) -> Tensor:
    """Encode 64 items at a time: float32, on the CPU."""
    starts = range(0, len(items), 64)
    return torch.cat([encode(items[start : start + 64]).float().cpu() for start in starts])


def load_clip(
    name: str = BUNDLED,
    weights: Path | None = None,
    *,
    prefix: str = "",
    device: torch.device | str = "cpu",
    label: str | None = None,
) -> ClipScorer:
    """Load a CLIP model.

    Args:
        name: `lanterns-clip` (the bundled model) or an architecture of open_clip.
        weights: Of an architecture its checkpoint, by default `NAME.safetensors` in the weights
            folder. Of `lanterns-clip` a folder with `open_clip_config.json` and weights, by default
            the package's own.
        prefix: Put before every caption.
        device: Where the model runs.
        label: Name in results, by default the name of the model.

    Raises:
        UserError: The weights do not fit the model.
        RefusedError: The weights are not on this machine.
    """
    pretrained = None
    source = name
    if name == BUNDLED:
        folder = weights or BUNDLED_FOLDER
        path = _weights_in(folder)
        source = f"local-dir:{folder}"
    else:
        path = weights or find_weights(f"the CLIP model {name}", f"{name}.safetensors")[0]
        pretrained = str(path)
    open_checkpoint(path)  # refuses a pickle with code
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(
            source, pretrained, device=device
        )
        tokenizer = open_clip.get_tokenizer(source)
    # The last two: a configuration that is no mapping, or lacks model_cfg.
    except (RuntimeError, ValueError, TypeError, KeyError) as problem:
        raise UserError(
            f"{path.name} does not fit the CLIP model {name}",
            "Give the architecture of the checkpoint; OpenAI's weights need the -quickgelu ones.",
        ) from problem
    model.eval().requires_grad_(requires_grad=False)
    return ClipScorer(
        model=model,
        preprocess=preprocess,
        tokenizer=tokenizer,
        label=f"{label or name}@{remembered_sha256(path)[:8]}",
        prefix=prefix,
        device=device,
    )


def _weights_in(folder: Path) -> Path:
    """Return the file of weights of a folder of the bundled model, which open_clip takes too."""
    paths = []
    for ending in ("safetensors", "bin", "pth"):
        paths += sorted(folder.glob(f"*.{ending}"))
    config = folder / "open_clip_config.json"
    if not paths or not config.is_file():
        raise RefusedError(
            f"the CLIP model {BUNDLED} is missing: it needs {config.name} and weights in {folder}",
            "In the repository: python -m scripts.train_lanterns --part clip",
        )
    if len(paths) > 1:
        raise RefusedError(
            f"{folder}: has several files of weights: {', '.join(path.name for path in paths)}",
            "Leave the one that is meant.",
        )
    return paths[0]


def clip_score(protocol: Protocol, device: torch.device | str) -> ClipScorer:
    """Load the scorer of the metric `clip_score`: the protocol's CLIP model."""
    return load_clip(protocol.clip_model or BUNDLED, prefix=protocol.clip_prefix, device=device)


def hpsv2(_protocol: Protocol, device: torch.device | str) -> ClipScorer:
    """Load HPSv2.1 (Wu et al. 2023), a CLIP model."""
    [path] = find_weights("HPSv2", NETWORK_FILES["hpsv2"])
    return load_clip("ViT-H-14", path, device=device, label="hpsv2.1")


@dataclass(frozen=True)
class EachPicture:
    """A scorer of one picture with its caption at a time."""

    score: Callable[[Tensor, str], float | None]  # of a picture uint8 [3, h, w] and its caption
    label: str | None  # name in results; None where the protocol names the network
    # Tokens of a caption, and how many of them the network sees; None: all of them.
    tokens: Callable[[str], Sequence[int]] | None = None
    most_tokens: int = 0

    def cut(self, captions: Sequence[str]) -> list[bool]:
        """Return which captions are longer than the network reads."""
        if self.tokens is None:
            return [False] * len(captions)
        return [len(self.tokens(caption)) > self.most_tokens for caption in captions]

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[Tensor], captions: Sequence[str]) -> list[float | None]:
        """Return the score of each picture for its own caption; None without one."""
        pairs = zip(pictures, captions, strict=True)
        return [self.score(picture, caption) for picture, caption in pairs]


_REWARD_TOKENS = 35
"""Tokens of a caption that ImageReward sees; its package cuts the rest off."""


def image_reward(_protocol: Protocol, device: torch.device | str) -> EachPicture:
    """Load ImageReward 1.0 (Xu et al. 2023), whose package `Protocol.find_networks` looks for."""
    [path] = find_weights("ImageReward", NETWORK_FILES["image_reward"])
    if not (path.parent / "med_config.json").is_file():
        raise RefusedError(
            f"ImageReward needs med_config.json beside {path}",
            "Put the authors' file there.",
        )
    open_checkpoint(path)  # refuses a pickle with code
    package = importlib.import_module("ImageReward")
    # The loader prints, and asks the network for files that are already beside the weights.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        model = package.load(str(path), device=device, download_root=str(path.parent))

    def reward(picture: Tensor, caption: str) -> float:
        return float(model.score(caption, to_pil_image(picture)))

    label = f"image-reward-1.0@{remembered_sha256(path)[:8]}"
    tokenizer = getattr(getattr(model, "blip", None), "tokenizer", None)
    if tokenizer is None:
        return EachPicture(reward, label)
    return EachPicture(
        reward,
        label,
        tokens=lambda caption: tokenizer(caption)["input_ids"],
        most_tokens=_REWARD_TOKENS,
    )


def prompt_accuracy(_protocol: Protocol, device: torch.device | str) -> EachPicture:
    """Load the scorer of the metric `prompt_accuracy`: the attribute classifier."""
    return accuracy_by(classifier.load_classifier(device=device))


def accuracy_by(network: AttributeClassifier) -> EachPicture:
    """Return a scorer that asks whether a picture shows all that its caption asks for.

    The score is 1.0 or 0.0, or None if the caption is not of the bundled family.
    """

    def accuracy(picture: Tensor, caption: str) -> float | None:
        [attributes] = attributes_of([caption])
        if attributes is None:
            return None
        return float(classifier.prompt_accuracy(network, picture[None], [attributes]))

    return EachPicture(accuracy, label=None)
