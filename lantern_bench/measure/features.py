"""Pictures to features: one pass of an extractor over a set, by torch-fidelity.

The features are all that FID, KID, precision and recall need, so a set is passed once and the reference's can be kept
(`runs/reference_cache.py`). Sets may be larger than the memory: pictures are read and prepared one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity.utils import create_feature_extractor, get_featuresdict_from_dataset

from lantern_bench.measure.extractors import Extractor

__all__ = ["FeatureSet", "Pictures", "features_of", "statistics"]


class Pictures(Protocol):
    """A set of pictures uint8 [3, h, w], by number; a tensor uint8 [n, 3, h, w] is one."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int, /) -> Tensor:
        """One of them."""
        ...


@dataclass(frozen=True)
class FeatureSet:
    """What is known of a set of pictures under one extractor.

    mean [d] and covariance [d, d] in float64 (numpy's unbiased one); features float32 [n, d], or None where only the
    two were given; n, where it is known.
    """

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    n: int | None
    features: Tensor | None = None

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """The set with these features float32 [n, d]."""
        mean, covariance = statistics(features)
        return cls(mean, covariance, len(features), features)


class _Prepared(Dataset[Tensor]):
    """Pictures as the dataset torch-fidelity reads."""

    def __init__(self, pictures: Pictures, prepared: Callable[[Tensor], Tensor] | None) -> None:
        self.pictures, self.prepared = pictures, prepared

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        picture = self.pictures[index]
        return picture if self.prepared is None else self.prepared(picture)


def features_of(
    pictures: Pictures,
    extractor: Extractor,
    *,
    prepared: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = 64,
) -> Tensor:
    """The features float32 [n, width] of pictures, on the CPU; `prepared` is applied to each picture first."""
    if len(pictures) == 0:
        return torch.zeros(0, extractor.width)
    cuda = torch.device(device).type == "cuda"
    network: Any = create_feature_extractor(
        extractor.name, [extractor.layer], cuda=cuda, feature_extractor_weights_path=str(extractor.weights)
    )
    # save_cpu_ram: loads in this process; worker processes cost more than pictures that are in memory already.
    found = get_featuresdict_from_dataset(
        _Prepared(pictures, prepared), network, batch_size, cuda, save_cpu_ram=True, verbose=False
    )
    features: Tensor = found[extractor.layer].float()
    return features


def statistics(features: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean [d] and covariance [d, d] of features [n, d], in float64; the covariance of fewer than two is nan."""
    values = features.double().numpy()
    width = values.shape[1]
    mean = values.mean(axis=0) if len(values) else np.full(width, np.nan)
    return mean, np.atleast_2d(np.cov(values, rowvar=False)) if len(values) > 1 else np.full((width, width), np.nan)
