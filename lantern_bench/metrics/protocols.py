"""Quality protocols: everything that can change how pictures are scored, by name and version.

A protocol that is changed gets a new version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lantern_bench.methods.catalog import METRICS, OF_IMAGES, REFUSED_METRICS
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean

EMBEDDED = "embedded"
LANTERN_COCO = "lantern-coco"


@dataclass(frozen=True)
class Preparation:
    """The preprocessing of a picture, in this order."""

    crop: bool = False  # to the largest square around the centre
    size: int | None = None  # pixels a side, by Lanczos
    # pixels a side for the features: bicubic, rounded to 8 bits (clean-fid keeps fractions)
    features_size: int | None = None


@dataclass(frozen=True)
class Protocol:
    """A way to score pictures."""

    name: str
    version: int
    about: str
    # Metrics of single images. Metrics of sets are measured wherever there are features.
    metrics: tuple[str, ...] = ()
    preparation: Preparation = Preparation()
    features: str | None = None  # extractor of FID and KID (a name in `metrics/extractors.py`)
    manifold: str | None = None  # extractor of precision and recall; None: the same
    manifold_neighbours: int = 3
    clip_model: str | None = None  # as in `metrics.image_scorers.load_clip`
    clip_prefix: str = ""
    reference: str | None = None  # the default reference; None requires --reference


_ALL = (
    Protocol(
        EMBEDDED,
        version=2,
        about=(
            "the bundled family's own scorers, against 1,024 newly painted scenes of the held-out "
            "captions"
        ),
        metrics=("clip_score", "prompt_accuracy"),
        features="lanterns-features",
        clip_model="lanterns-clip",
        reference="embedded",
    ),
    Protocol(
        LANTERN_COCO,
        version=2,
        about=(
            "as the LANTERN authors: centre crop, Lanczos to 256, Inception FID resized as "
            "clean-fid does, VGG-16 manifold"
        ),
        metrics=("clip_score",),
        preparation=Preparation(crop=True, size=256, features_size=299),
        features="inception-v3-compat",
        manifold="vgg16",
        clip_model="ViT-B-32-quickgelu",
        clip_prefix="A photo depicts ",
    ),
    Protocol(
        "torch-fidelity",
        version=2,
        about=(
            "the defaults of torch-fidelity: its Inception for FID, KID, precision and recall, "
            "pictures as they are"
        ),
        features="inception-v3-compat",
    ),
)
_MEASURED = set[str]().union(*(protocol.metrics for protocol in _ALL))
# A metric of images that no protocol above measures has a protocol of its own name.
_OF_METRICS = tuple(
    Protocol(name=name.replace("_", "-"), version=1, about=METRICS[name].meaning, metrics=(name,))
    for name in OF_IMAGES
    if name not in _MEASURED
)

PROTOCOLS = {protocol.name: protocol for protocol in (*_ALL, *_OF_METRICS)}


def protocol_of(name: str) -> Protocol:
    """Return the protocol of a name.

    Raises:
        UserError: The name is unknown.
        LanternError: The protocol belongs to an installed metric that cannot be used.
    """
    metric = name.replace("-", "_")
    if metric in REFUSED_METRICS:
        raise REFUSED_METRICS[metric]
    if name not in PROTOCOLS:
        raise UserError(
            f"--protocol {name}: unknown protocol{did_you_mean(name, PROTOCOLS)}",
            f"The protocols are {', '.join(PROTOCOLS)}.",
        )
    return PROTOCOLS[name]


def default_protocol(models: Sequence[str]) -> str:
    """Return the protocol for a run of these models: `embedded` only for the bundled family."""
    bundled = all(model_of(model).family == "lanterns" for model in models)
    return EMBEDDED if bundled else LANTERN_COCO
