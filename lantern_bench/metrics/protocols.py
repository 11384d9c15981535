"""Quality protocols: everything that can change how pictures are scored, by name and version.

`protocols.toml` holds them. A protocol that is changed gets a new version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lantern_bench.methods.catalog import METRICS, OF_IMAGES, REFUSED_METRICS
from lantern_bench.models.checkpoints.hub import find_weights
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import LanternError, RefusedError, UserError, joined
from lantern_bench.utils.text import did_you_mean

EMBEDDED = "embedded"


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
    clip_model: str | None = None  # as in `metrics.image_scorers.load_clip`
    clip_prefix: str = ""
    reference: str | None = None  # the default reference; None requires --reference

    def find_networks(self) -> None:
        """Raise one error for the package and all files of networks that are not here."""
        missing: list[LanternError] = []
        if "image_reward" in self.metrics and importlib.util.find_spec("ImageReward") is None:
            missing.append(
                RefusedError(
                    "ImageReward is not installed: the protocol image-reward needs its package",
                    "Install the extra, in the clone: pip install -e '.[image-reward]'",
                )
            )
        used = {self.features, self.manifold, self.clip_model, *self.metrics}
        files = [file for network, file in NETWORK_FILES.items() if network in used]
        try:
            find_weights(f"the protocol {self.name}", *files)
        except RefusedError as error:
            missing.append(error)
        if missing:
            raise joined(missing)


class _Shipped(msgspec.Struct, forbid_unknown_fields=True):
    """The content of `protocols.toml`."""

    files: dict[str, str]
    protocol: list[Protocol]


_SHIPPED = msgspec.toml.decode(
    Path(__file__).with_name("protocols.toml").read_bytes(), type=_Shipped
)
NETWORK_FILES = _SHIPPED.files
"""The files of the networks that do not ship, by extractor, CLIP model or metric."""
PROTOCOLS = {protocol.name: protocol for protocol in _SHIPPED.protocol}

_MEASURED = set[str]().union(*(protocol.metrics for protocol in _SHIPPED.protocol))
# An image metric outside all shipped protocols gets a protocol with the metric's name. Official
# scorers, which have no function here, are imported.
for _metric in OF_IMAGES:
    if _metric not in _MEASURED and METRICS[_metric].load:
        _name = _metric.replace("_", "-")
        PROTOCOLS[_name] = Protocol(
            name=_name, version=1, about=METRICS[_metric].meaning, metrics=(_metric,)
        )


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
    return EMBEDDED if bundled else "lantern-coco"
