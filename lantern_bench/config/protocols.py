"""Quality protocols: how pictures are scored. Each has a name and a version that are recorded with its figures.

A figure can be compared only under one protocol, so a protocol holds everything that can change a figure: the
preprocessing, the network of the features, the CLIP model and the words before the caption. Every change is a new
version. `runs/scoring.py` makes scorers from a protocol; where weights are is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from lantern_bench.errors import UserError, did_you_mean

EMBEDDED, LANTERN_COCO = "embedded", "lantern-coco"

REWARDS = ("hpsv2", "image_reward")
"""Scorers of pictures and captions besides CLIP, as columns name them."""


@dataclass(frozen=True)
class Preparation:
    """The preprocessing of a picture, in this order.

    crop: the largest square around the centre. size: Lanczos to this many pixels a side. features_size: for the
    fidelity features only, bicubic to this many pixels a side, rounded to 8 bits (clean-fid keeps the fractions).
    """

    crop: bool = False
    size: int | None = None
    features_size: int | None = None


@dataclass(frozen=True)
class Protocol:
    """A way to score pictures.

    features: the extractor of FID and KID (a name of `metrics/fidelity.py`), or None; manifold: that of precision and
    recall, None for the same. clip_model and clip_prefix: as in `metrics.clip.load_clip`. accuracy: whether the bundled
    family's classifier scores prompts. rewards: names of `REWARDS`. reference: the default reference pictures, and
    how many they are: FID, precision and recall depend on it; None requires --reference.
    """

    name: str
    version: int
    about: str
    preparation: Preparation = Preparation()
    features: str | None = None
    manifold: str | None = None
    manifold_neighbours: int = 3
    clip_model: str | None = None
    clip_prefix: str = ""
    accuracy: bool = False
    rewards: tuple[str, ...] = ()
    reference: str | None = None
    reference_pictures: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for the manifest."""
        return asdict(self) | {"rewards": list(self.rewards)}


_ALL = (
    Protocol(
        EMBEDDED,
        2,
        "the bundled family's own scorers, against 1,024 newly painted scenes of the held-out captions",
        features="lanterns-features",
        clip_model="lanterns-clip",
        accuracy=True,
        reference="embedded",
        reference_pictures=1024,
    ),
    Protocol(
        LANTERN_COCO,
        2,
        "as the LANTERN authors: centre crop, Lanczos to 256, Inception FID resized as clean-fid does, VGG-16 manifold",
        preparation=Preparation(crop=True, size=256, features_size=299),
        features="inception-v3-compat",
        manifold="vgg16",
        clip_model="ViT-B-32-quickgelu",
        clip_prefix="A photo depicts ",
    ),
    Protocol(
        "torch-fidelity",
        2,
        "the defaults of torch-fidelity: its Inception for FID, KID, precision and recall, pictures as they are",
        features="inception-v3-compat",
    ),
    Protocol("hpsv2", 1, "HPSv2.1, the human preference score (cosine, not scaled)", rewards=("hpsv2",)),
    Protocol("image-reward", 1, "ImageReward 1.0", rewards=("image_reward",)),
)

PROTOCOLS: Mapping[str, Protocol] = MappingProxyType({protocol.name: protocol for protocol in _ALL})


def protocol_of(name: str) -> Protocol:
    """Return the protocol of a name; raises `UserError` with the names there are."""
    if name not in PROTOCOLS:
        raise UserError(
            f"--protocol {name}: unknown protocol{did_you_mean(name, PROTOCOLS)}",
            f"The protocols are {', '.join(PROTOCOLS)}.",
        )
    return PROTOCOLS[name]
