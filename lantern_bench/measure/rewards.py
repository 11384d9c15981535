"""Human-preference judges, HPSv2 and ImageReward, behind the interface of the CLIP score.

Both are optional: their weights are large and ImageReward needs a package of its own. What is not there is refused in
one sentence before anything is decoded or scored. Nothing here downloads anything: HPSv2 is a ViT-H-14 of open_clip
with the authors' checkpoint, and ImageReward is made from files that must be on the disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.measure import weights_files
from lantern_bench.measure.clip import as_pil, load_clip
from lantern_bench.spec.protocols import REWARDS

__all__ = ["Reward", "load_reward"]

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
    path = weights_files.find_weights("HPSv2", _HPS_FILE, weights, advice)
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
    path = weights_files.find_weights("ImageReward", _IMAGE_REWARD_FILE, weights, advice)
    if not (path.parent / _IMAGE_REWARD_CONFIG).is_file():
        raise RefusedError(f"ImageReward needs {_IMAGE_REWARD_CONFIG} beside {path.name}", advice)
    weights_files.check_plain_weights(path)
    import ImageReward

    # Its loader prints, and asks the network for what is beside the weights already.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        model = ImageReward.load(str(path), device=device, download_root=str(path.parent))
    return _ImageReward(model, f"image-reward-1.0@{weights_files.fingerprint(path)}")


_LOADERS: dict[str, Callable[[Path | None, torch.device | str], Reward]] = {
    "hpsv2": _hpsv2,
    "image_reward": _image_reward,
}
