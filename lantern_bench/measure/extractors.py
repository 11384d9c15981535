"""Feature extractors: the networks in whose features fidelity is measured, by name, with their weights on this machine.

The embedded family's features are registered with torch-fidelity as one more extractor, so the way of all of them is
the same. The extractor is part of a figure: its label names it, its layer and its weights. Nothing here downloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_fidelity
from torch import Tensor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase

from lantern_bench.errors import UserError
from lantern_bench.lanterns import classifier
from lantern_bench.measure import weights_files

__all__ = ["EMBEDDED", "EXTRACTORS", "Extractor", "find_extractor"]

EMBEDDED = "lanterns-features"


@dataclass(frozen=True)
class _Known:
    """An extractor torch-fidelity can run: the layer all four metrics use, its width, its published file.

    `key` is a parameter that tells the file from another model's.
    """

    layer: str
    width: int
    file_name: str
    key: str


EXTRACTORS: dict[str, _Known] = {
    EMBEDDED: _Known(str(classifier.FEATURES), classifier.FEATURES, classifier.WEIGHTS.name, "project.weight"),
    "inception-v3-compat": _Known(
        "2048", 2048, "weights-inception-2015-12-05-6726825d.pth", "Mixed_7c.branch_pool.conv.weight"
    ),
    "vgg16": _Known("fc2_relu", 4096, "vgg16-397923af.pth", "classifier.3.weight"),
}


@dataclass(frozen=True)
class Extractor:
    """A feature extractor with its weights at hand."""

    name: str
    layer: str
    width: int
    weights: Path

    @property
    def label(self) -> str:
        """How results name it: `<extractor>-<layer>@<first digits of the weights' hash>`."""
        layer = "" if self.name.endswith(f"-{self.layer}") else f"-{self.layer}"
        return f"{self.name}{layer}@{weights_files.fingerprint(self.weights)}"


class _LanternFeatures(FeatureExtractorBase):
    """The attribute classifier's penultimate layer, in the shape torch-fidelity wants an extractor to have."""

    def __init__(
        self,
        name: str,
        features_list: Sequence[str],
        feature_extractor_weights_path: str | None = None,
        **_other: Any,
    ) -> None:
        super().__init__(name, list(features_list))
        path = None if feature_extractor_weights_path is None else Path(feature_extractor_weights_path)
        self.model = classifier.load_classifier(path)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return (str(classifier.FEATURES),)

    @staticmethod
    def get_default_feature_layer_for_metric(_metric: str) -> str:
        return str(classifier.FEATURES)

    @staticmethod
    def can_be_compiled() -> bool:
        return False

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        return torch.zeros((1, 3, 64, 64), dtype=torch.uint8)

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Pictures uint8 [n, 3, 64, 64] to one feature tensor float32 [n, 64]."""
        return (self.model.features(pictures.float() / 255),)


torch_fidelity.register_feature_extractor(EMBEDDED, _LanternFeatures)


def find_extractor(name: str = EMBEDDED, weights: Path | None = None) -> Extractor:
    """The extractor called `name` (one of `EXTRACTORS`), with the weights given or found on this machine.

    Raises `UserError` for an unknown name, a path that is no file or a file that is not plain weights, and
    `RefusedError` when the weights are not there: they are never downloaded.
    """
    known = EXTRACTORS.get(name)
    if known is None:
        raise UserError(f"unknown feature extractor {name!r}", f"known: {', '.join(EXTRACTORS)}")
    if name == EMBEDDED:
        path = weights or classifier.WEIGHTS
        classifier.load_classifier(path)
    else:
        advice = f"put {known.file_name} there, or give its path"
        path = weights_files.find_weights(f"the feature extractor {name}", known.file_name, weights, advice)
        weights_files.check_plain_weights(path, known.key)
    return Extractor(name, known.layer, known.width, path)
