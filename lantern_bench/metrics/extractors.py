"""Features of sets of pictures, and reference sets.

The feature extractors come from torch-fidelity; the bundled family has its own classifier. Sets
may be larger than memory, so pictures are read one at a time. A pass of a large reference through
Inception takes minutes, so its features are cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch_fidelity.utils import create_feature_extractor
from torchvision.transforms.functional import crop, pil_to_tensor, to_pil_image

from lantern_bench.metrics.protocols import EMBEDDED, NETWORK_FILES, Preparation, Protocol
from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.hub import find_weights
from lantern_bench.models.families.lanterns import modules as classifier
from lantern_bench.models.families.lanterns.description import WEIGHTS_FOLDER
from lantern_bench.storage.pictures import (
    PICTURE_SUFFIXES,
    other_files,
    pictures_below,
    read_rgb,
)
from lantern_bench.utils import files
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.hashes import remembered_sha256
from lantern_bench.utils.progress import Note, tell

# ---- Feature extractors


@dataclass(frozen=True)
class Extractor:
    """A feature extractor."""

    name: str
    layer: str  # the layer that all metrics use
    width: int  # features of one picture
    # The file of its weights. In `EXTRACTORS` the name of the published file, which
    # `find_extractor` looks for.
    weights: Path
    parameter: str  # a parameter that the weights of other models lack

    @property
    def label(self) -> str:
        """The name in results: `<extractor>-<layer>@<first digits of the weights' hash>`."""
        return f"{self.name}-{self.layer}@{remembered_sha256(self.weights)[:8]}"


BUNDLED = "lanterns-features"

EXTRACTORS = {
    BUNDLED: Extractor(
        BUNDLED,
        layer=str(classifier.FEATURES),
        width=classifier.FEATURES,
        weights=classifier.WEIGHTS,
        parameter="project.weight",
    ),
    "inception-v3-compat": Extractor(
        "inception-v3-compat",
        layer="2048",
        width=2048,
        weights=Path(NETWORK_FILES["inception-v3-compat"]),
        parameter="Mixed_7c.branch_pool.conv.weight",
    ),
    "vgg16": Extractor(
        "vgg16",
        layer="fc2_relu",
        width=4096,
        weights=Path(NETWORK_FILES["vgg16"]),
        parameter="classifier.3.weight",
    ),
}


def find_extractor(name: str = BUNDLED, weights: Path | None = None) -> Extractor:
    """Return an extractor whose weights were checked.

    Args:
        name: A name in `EXTRACTORS`.
        weights: A file of weights in place of the published one.

    Raises:
        UserError: The weights belong to another model.
        RefusedError: The weights are not on this machine.
    """
    extractor = EXTRACTORS[name]
    path = weights or find_weights(f"the feature extractor {name}", str(extractor.weights))[0]
    open_checkpoint(path).require(extractor.parameter, f"the weights of {name}")
    return replace(extractor, weights=path)


# ---- Features of a set

_BATCH = 64


def read_picture(path: Path) -> Tensor:
    """Read a picture file as uint8 [3, h, w]; raises `UserError` as `read_rgb` does."""
    return pil_to_tensor(read_rgb(path)).contiguous()


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of pictures under one extractor, or only their mean and covariance."""

    mean: NDArray[np.float64]  # [width]
    covariance: NDArray[np.float64]  # [width, width], unbiased; nan for fewer than two pictures
    n: int | None  # number of pictures; None if a file of statistics does not record it
    features: Tensor | None = None  # float32 [n, width]

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """Return the set with these features, float32 [n, width]."""
        values = features.double().numpy()
        n, width = values.shape
        covariance = np.full((width, width), np.nan)
        if n > 1:
            covariance = np.atleast_2d(np.cov(values, rowvar=False))
        return cls(values.mean(axis=0), covariance, n, features=features)


@torch.inference_mode()
def features_of(
    pictures: Iterable[Tensor],
    extractor: Extractor,
    size: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Compute the features of pictures, a batch at a time.

    Args:
        pictures: Preprocessed pictures, uint8 [3, h, w].
        extractor: The network.
        size: Pixels a side that the network sees; None for the size of the pictures.
        device: Where the network runs.

    Returns:
        Features float32 [n, width], on the CPU.

    Raises:
        UserError: The pictures differ in size, and `size` is None.
    """
    network = _network(extractor, device)
    features = [torch.zeros(0, extractor.width)]
    sizes = set[tuple[int, ...]]()
    remaining = iter(pictures)
    while some := list(islice(remaining, _BATCH)):
        batch = [resized(picture, size, Image.Resampling.BICUBIC) for picture in some]
        sizes.update(tuple(picture.shape[1:]) for picture in batch)
        if len(sizes) > 1:
            raise UserError(
                f"the pictures differ in size: {sorted(sizes)[:3]}",
                "This protocol does not resize pictures; lantern-coco crops and resizes them.",
            )
        features.append(network(torch.stack(batch).to(device)).float().cpu())
    return torch.cat(features)


def _network(extractor: Extractor, device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Load an extractor: uint8 [B, 3, h, w] -> features [B, width]."""
    if extractor.name == BUNDLED:
        bundled = classifier.load_classifier(extractor.weights, device)
        return lambda batch: bundled.features(batch.float() / 255)

    of_library: Any = create_feature_extractor(
        extractor.name,
        [extractor.layer],
        cuda=torch.device(device).type == "cuda",
        verbose=False,
        feature_extractor_weights_path=str(extractor.weights),
    )
    return lambda batch: of_library(batch)[0]


def preprocess(picture: Tensor, preparation: Preparation) -> Tensor:
    """Crop and resize a picture uint8 [3, h, w] as every scorer of the protocol sees it."""
    if preparation.crop:
        height, width = picture.shape[1:]
        side = min(height, width)
        picture = crop(picture, (height - side) // 2, (width - side) // 2, side, side)
    return resized(picture, preparation.size, Image.Resampling.LANCZOS)


def resized(picture: Tensor, side: int | None, resampling: Image.Resampling) -> Tensor:
    """Resize a picture uint8 [3, h, w] to a square.

    Args:
        picture: The picture.
        side: Pixels a side; None returns the picture unchanged.
        resampling: The filter of Pillow.
    """
    if side is None or tuple(picture.shape[1:]) == (side, side):
        return picture
    image = to_pil_image(picture).resize((side, side), resampling)
    return pil_to_tensor(image).contiguous()


# ---- Reference sets

EMBEDDED_FEATURES = WEIGHTS_FOLDER / "reference.safetensors"


class PictureReference(NamedTuple):
    """Picture files that fidelity is measured against."""

    label: str  # name in results
    paths: Sequence[Path]
    digest: str  # of the contents of all files, not of their names

    def features(
        self, extractor: Extractor, preparation: Preparation, device: torch.device | str
    ) -> FeatureSet:
        """Return the features of the pictures, from the cache if they were computed before.

        Args:
            extractor: The network.
            preparation: The preprocessing of the quality protocol.
            device: Where the network runs.

        Raises:
            UserError: The pictures differ in size after preprocessing.
        """
        steps = "-".join(f"{name}={value}" for name, value in asdict(preparation).items())
        covered = f"2|{self.digest}|{extractor.label}|{steps}"
        digest = hashlib.sha256(covered.encode()).hexdigest()
        cached = files.cache_folder() / "references" / f"{digest[:32]}.safetensors"
        # A missing or damaged file is computed again.
        with contextlib.suppress(OSError, SafetensorError, KeyError):
            features = load_file(cached)["features"]
            if features.shape == (len(self.paths), extractor.width):
                return FeatureSet.of(features)
        pictures = (preprocess(read_picture(path), preparation) for path in self.paths)
        features = features_of(pictures, extractor, preparation.features_size, device=device)
        # The figures do not depend on the cache: a read-only home is no error.
        with contextlib.suppress(OSError):
            files.write_atomically(cached, save({"features": features}))
        return FeatureSet.of(features)


class FeatureReference(NamedTuple):
    """Features of pictures, or their mean and covariance, that fidelity is measured against."""

    label: str  # name in results
    statistics: FeatureSet
    extractor: str = ""  # label of their extractor; empty if the file does not record it

    def features(self, extractor: Extractor) -> FeatureSet:
        """Return the features. Raises `UserError` if another extractor made them."""
        width = len(self.statistics.mean)
        if width != extractor.width:
            raise UserError(
                f"the reference {self.label} has {width} features, "
                f"{extractor.name} has {extractor.width}",
                "Give statistics of the protocol's own extractor, or a folder of pictures.",
            )
        if self.extractor not in ("", extractor.label):
            raise UserError(
                f"the reference {self.label} has features of {self.extractor}, "
                f"not of {extractor.label}",
                "Give --reference a folder of pictures: it is measured by any extractor.",
            )
        return self.statistics


Reference: TypeAlias = PictureReference | FeatureReference


def find_reference(name: str | None, protocol: Protocol) -> Reference | None:
    """Return the reference that `--reference` names, by default the protocol's own.

    Raises:
        UserError: There is no such file or folder, or it cannot be used.
    """
    name = name or protocol.reference
    if name is None:
        return None
    if name == EMBEDDED:
        if protocol.reference == EMBEDDED:
            return embedded_reference()
        raise UserError(
            f"--reference {name}: the rendered scenes are not for the protocol {protocol.name}",
            "Give a folder, a .json or a .npz, or --protocol embedded.",
        )

    file, _, folder = name.partition("=")
    path = Path(file)
    suffix = path.suffix.lower() if path.is_file() else ""
    if suffix == ".json":
        return _annotated(path, Path(folder) if folder else path.with_suffix(""))
    if suffix == ".npz":
        return _read_statistics(path)
    if Path(name).is_dir():
        return folder_reference(Path(name))
    raise UserError(
        f"--reference {name}: no such folder or file",
        "What fidelity is measured against: embedded (scenes of the bundled family), a folder of "
        "pictures, a COCO annotation .json (its pictures in the folder of the same name, or "
        "FILE.json=FOLDER), or a .npz of mu, sigma.",
    )


def embedded_reference() -> FeatureReference:
    """Return the features that ship with the package, of 1,024 scenes that no training uses."""
    with safe_open(EMBEDDED_FEATURES, framework="pt") as file:
        statistics = FeatureSet.of(file.get_tensor("features"))
        return FeatureReference(statistics=statistics, **file.metadata())


def folder_reference(folder: Path) -> PictureReference:
    """Return all pictures in a folder and below it; raises `UserError` if it has none."""
    paths = pictures_below(folder)
    others = other_files(folder)
    allowed = f"Allowed: {', '.join(PICTURE_SUFFIXES)}"
    if not paths:
        raise UserError(
            f"no pictures in the reference folder {folder}, which holds {others or 'no files'}",
            allowed,
        )
    if others:
        tell(Note(f"files of the reference folder {folder} that are not read: {others}", allowed))
    return _of_files(folder.name, paths)


def _annotated(annotations: Path, folder: Path) -> PictureReference:
    """Return the pictures in `folder` that a COCO annotation file lists under `images`."""
    flag = f"--reference {annotations}"
    try:
        images = files.read_json(annotations)["images"]
        names = sorted({str(image["file_name"]) for image in images})
    except (UserError, KeyError, TypeError) as error:
        raise UserError(
            f"{flag}: not a COCO annotation file: it needs images, each with file_name"
        ) from error
    if not names:
        raise UserError(f"{flag}: lists no pictures")
    paths = [folder / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            f"{flag}: {len(missing)} of {len(names)} pictures are not in {folder}, "
            f"the first is {missing[0]}",
            f"Write {annotations}=FOLDER.",
        )
    return _of_files(annotations.stem, paths)


def _read_statistics(path: Path) -> FeatureReference:
    """Read mean and covariance under `mu` and `sigma`, as clean-fid and pytorch-fid write them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            mean = file["mu"].astype(np.float64, casting="same_kind")
            covariance = file["sigma"].astype(np.float64, casting="same_kind")
            count = float(file["n"]) if "n" in file else None
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(f"mu is {mean.shape}, sigma {covariance.shape}")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"--reference {path}: not a file of statistics: it needs the arrays mu [width] and "
            f"sigma [width, width]: {error}"
        ) from error

    problem = _impossible(mean, covariance, count)
    if problem:
        raise UserError(
            f"--reference {path}: these are not the mean and covariance of features: {problem}",
            "Compute the file again, or give --reference the folder of pictures.",
        )
    digest = hashlib.sha256(mean.tobytes() + covariance.tobytes()).hexdigest()
    n = None if count is None else int(count)
    shown = "n unknown" if n is None else f"n={n}"
    return FeatureReference(
        label=f"{path.stem} (statistics), {shown}, sha256={digest[:8]}",
        statistics=FeatureSet(mean, covariance, n),
    )


# Rounding to float32, of statistics and of the features behind them, stays below these fractions of
# the largest value.
_MOST_ASYMMETRY = 1e-5
_MOST_NEGATIVE = 1e-4


def _impossible(
    mean: NDArray[np.float64], covariance: NDArray[np.float64], count: float | None
) -> str:
    """Say why no set of pictures has these statistics; empty if one may have them."""
    for name, values in (("mu", mean), ("sigma", covariance)):
        wrong = int((~np.isfinite(values)).sum())
        if wrong:
            return f"{name} has {wrong:,} values that are not finite"
    if count is not None and not (count >= 2 and count == int(count)):
        return f"n is {count:g}, and a covariance needs at least 2 pictures"
    asymmetry = float(np.abs(covariance - covariance.T).max())
    if asymmetry > _MOST_ASYMMETRY * float(np.abs(covariance).max()):
        return f"sigma is not symmetric (values that must be equal differ by {asymmetry:.3g})"
    eigenvalues = np.linalg.eigvalsh(covariance)
    if eigenvalues[-1] <= 0:
        return f"the largest variance in sigma is {eigenvalues[-1]:.3g}"
    if eigenvalues[0] < -_MOST_NEGATIVE * eigenvalues[-1]:
        return f"sigma has the negative variance {eigenvalues[0]:.3g} in some direction"
    return ""


def _of_files(name: str, paths: Sequence[Path]) -> PictureReference:
    try:
        hashes = sorted(files.file_sha256(path) for path in paths)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read: {error.strerror}", "Remove it, or make it again."
        ) from error
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return PictureReference(f"{name}, n={len(paths)}, sha256={digest[:8]}", paths, digest)
