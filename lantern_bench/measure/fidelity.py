"""FID, KID, precision and recall of a set of pictures against reference pictures, by torch-fidelity.

The embedded family's features are registered with torch-fidelity as one more extractor, so the arithmetic is the
library's for both. The extractor is part of the figure: `FidelityScores.fid_features` names it, its layer and its
weights, and figures under different names are not comparable. Which pictures are compared is decided in
`runs.score`; nothing here reads a run or downloads anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_fidelity
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity.feature_extractor_base import FeatureExtractorBase

from lantern_bench.errors import UserError
from lantern_bench.lanterns import classifier
from lantern_bench.measure import weights_files

__all__ = ["EMBEDDED", "EXTRACTORS", "Extractor", "FidelityScores", "find_extractor", "measure_fidelity"]

EMBEDDED = "lanterns-features"
_SEED = 2020
_KID_SUBSET_MOST = 1000
_KID_SUBSETS = 100
_NEIGHBOURS = 3


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


@dataclass(frozen=True)
class FidelityScores:
    """The figures of one set of pictures; None where one cannot be had, with the reason in `note`."""

    fid: float | None
    kid: float | None
    kid_std: float | None
    precision: float | None
    recall: float | None
    n: int
    n_reference: int
    kid_subset: int
    fid_features: str
    note: str


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


class _Pictures(Dataset[Tensor]):
    """A tensor of pictures as the dataset torch-fidelity reads."""

    def __init__(self, pictures: Tensor) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index]


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


def measure_fidelity(
    pictures: Tensor,
    reference: Tensor,
    extractor: Extractor,
    *,
    device: torch.device | str = "cpu",
    seed: int = _SEED,
    batch_size: int = 64,
) -> FidelityScores:
    """Compare `pictures` [n, 3, h, w] with `reference` [m, 3, h', w'], both uint8.

    The KID subset is min(1000, n / 2), m / 2 counting too; precision is the share of pictures inside the reference's
    manifold of 3 nearest neighbours, recall the converse. FID is None for fewer than twice as many pictures as there
    are features, since its covariance would be mostly guessed; with 4 pictures or fewer nothing is measured.

    KID of two sets of the same kind is about 0 only when their pictures are drawn independently. Prompts taken in
    turn leave a set without pairs of one caption, which puts KID below 0 by the same amount in every cell.
    """
    fewest = min(len(pictures), len(reference))
    subset = min(_KID_SUBSET_MOST, fewest // 2)
    notes = []
    with_fid = fewest >= 2 * extractor.width
    if not with_fid:
        notes.append(f"fid needs {2 * extractor.width} images, twice its features; there are {fewest}")
    values: dict[str, float] = {}
    if fewest > _NEIGHBOURS + 1:
        values = _calculate(pictures, reference, extractor, with_fid, subset, device, seed, batch_size)
    else:
        notes.append(f"kid, precision and recall need {_NEIGHBOURS + 2} images; there are {fewest}")
    return FidelityScores(
        fid=values.get(torch_fidelity.KEY_METRIC_FID),
        kid=values.get(torch_fidelity.KEY_METRIC_KID_MEAN),
        kid_std=values.get(torch_fidelity.KEY_METRIC_KID_STD),
        precision=values.get(torch_fidelity.KEY_METRIC_PRECISION),
        recall=values.get(torch_fidelity.KEY_METRIC_RECALL),
        n=len(pictures),
        n_reference=len(reference),
        kid_subset=subset if values else 0,
        fid_features=extractor.label,
        note="; ".join(notes),
    )


def _calculate(
    pictures: Tensor,
    reference: Tensor,
    extractor: Extractor,
    with_fid: bool,
    kid_subset: int,
    device: torch.device | str,
    seed: int,
    batch_size: int,
) -> dict[str, float]:
    layers = {f"feature_layer_{metric}": extractor.layer for metric in ("fid", "kid", "prc")}
    values: dict[str, float] = torch_fidelity.calculate_metrics(
        input1=_Pictures(pictures),
        input2=_Pictures(reference),
        fid=with_fid,
        kid=True,
        prc=True,
        feature_extractor=extractor.name,
        feature_extractor_weights_path=str(extractor.weights),
        kid_subset_size=kid_subset,
        kid_subsets=_KID_SUBSETS,
        prc_neighborhood=_NEIGHBOURS,
        rng_seed=seed,
        batch_size=batch_size,
        cuda=torch.device(device).type == "cuda",
        cache=False,
        # Loads in this process: worker processes cost more than pictures that are in memory already.
        save_cpu_ram=True,
        verbose=False,
        **layers,
    )
    return values
