"""Features of sets of pictures, by the extractors of torch-fidelity and that of the bundled family; reference sets.

Sets may be larger than memory: pictures are read one at a time. A pass of a large reference through Inception takes
minutes, so its features are cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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

from lantern_bench.metrics.protocols import EMBEDDED, Preparation, Protocol
from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.hub import WEIGHTS_VARIABLE
from lantern_bench.models.families.lanterns import modules as classifier
from lantern_bench.models.families.lanterns.description import WEIGHTS_FOLDER
from lantern_bench.utils import files
from lantern_bench.utils.errors import RefusedError, UserError

# ---- Feature extractors, and the weights of all scorers


def find_weights(scorer: str, file_name: str) -> Path:
    """Return the published file of that name on this machine; raises `RefusedError` when no folder has it."""
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    path = Path(os.environ.get(WEIGHTS_VARIABLE) or cache) / file_name
    if path.is_file() or (path := cache / file_name).is_file():
        return path
    raise RefusedError(
        f"the weights of {scorer} are not on this machine: {file_name} is neither in the folder named by "
        f"{WEIGHTS_VARIABLE} nor in the cache of torch.hub (scoring downloads nothing)",
        f"Put {file_name} there; docs/troubleshooting.md has its address.",
    )


BUNDLED = "lanterns-features"

# By name: the layer that all metrics use, how many features it has, the published file of the weights, and a parameter
# that other models' files lack.
EXTRACTORS: dict[str, tuple[str, int, str, str]] = {
    BUNDLED: (
        str(classifier.FEATURES),
        classifier.FEATURES,
        classifier.WEIGHTS.name,
        "project.weight",
    ),
    "inception-v3-compat": (
        "2048",
        2048,
        "weights-inception-2015-12-05-6726825d.pth",
        "Mixed_7c.branch_pool.conv.weight",
    ),
    "vgg16": ("fc2_relu", 4096, "vgg16-397923af.pth", "classifier.3.weight"),
}


@dataclass(frozen=True)
class Extractor:
    """A feature extractor whose weights are on this machine."""

    name: str
    layer: str
    width: int
    weights: Path

    @property
    def label(self) -> str:
        """The name in results: `<extractor>-<layer>@<first digits of the weights' hash>`."""
        layer = "" if self.name.endswith(f"-{self.layer}") else f"-{self.layer}"
        return f"{self.name}{layer}@{files.remembered_sha256(self.weights)[:8]}"


def find_extractor(name: str = BUNDLED, weights: Path | None = None) -> Extractor:
    """Return an extractor; raises `UserError` for an unknown name or wrong weights, `RefusedError` for missing ones."""
    if name not in EXTRACTORS:
        raise UserError(
            f"unknown feature extractor {name!r}", f"The extractors are {', '.join(EXTRACTORS)}."
        )
    layer, width, file_name, key = EXTRACTORS[name]
    if name == BUNDLED:
        path = weights or classifier.WEIGHTS
        classifier.load_classifier(path)
    else:
        path = weights or find_weights(f"the feature extractor {name}", file_name)
        open_checkpoint(path).require(key, f"the weights of {name}")
    return Extractor(name=name, layer=layer, width=width, weights=path)


# ---- Features of a set

Pictures: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Path]
"""Pictures uint8 [3, h, w], or their files."""

_BATCH = 64


def read_picture(path: Path) -> Tensor:
    """Read a picture file as uint8 [3, h, w]; raises `UserError` for one that cannot be read."""
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(
                np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))
            )
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a picture") from error


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of pictures under one extractor, or their statistics alone."""

    mean: NDArray[np.float64]  # [width]; nan without pictures
    covariance: NDArray[np.float64]  # [width, width], unbiased; nan for fewer than two pictures
    n: int | None  # number of pictures, None where a file of statistics does not say
    features: Tensor | None = None  # float32 [n, width]

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """The set with these features float32 [n, d]."""
        values = features.double().numpy()
        n, width = values.shape
        mean = values.mean(axis=0) if n else np.full(width, np.nan)
        covariance = (
            np.atleast_2d(np.cov(values, rowvar=False))
            if n > 1
            else np.full((width, width), np.nan)
        )
        return cls(mean, covariance, n, features)


@torch.inference_mode()
def features_of(
    pictures: Pictures,
    extractor: Extractor,
    preparation: Preparation = Preparation(),  # noqa: B008  # frozen
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the features float32 [n, width] of pictures, on the CPU; raises `UserError` for several sizes."""
    if extractor.name == BUNDLED:
        classify = classifier.load_classifier(extractor.weights, device)
        network: Callable[[Tensor], Tensor] = lambda batch: classify.features(batch.float() / 255)  # noqa: E731
    else:
        cuda = torch.device(device).type == "cuda"
        weights = str(extractor.weights)
        of_library: Any = create_feature_extractor(
            extractor.name,
            [extractor.layer],
            cuda,
            verbose=False,
            feature_extractor_weights_path=weights,
        )
        network = lambda batch: of_library(batch)[0]  # noqa: E731
    features = [torch.zeros(0, extractor.width)]
    sizes = set[torch.Size]()
    for start in range(0, len(pictures), _BATCH):
        read = (
            item if isinstance(item, Tensor) else read_picture(item)
            for item in pictures[start : start + _BATCH]
        )
        seen = (preprocess(picture, preparation) for picture in read)
        batch = [
            resized(picture, preparation.features_size, Image.Resampling.BICUBIC)
            for picture in seen
        ]
        sizes.update(picture.shape[1:] for picture in batch)
        if len(sizes) > 1:
            advice = "This protocol does not resize pictures; lantern-coco crops and resizes them."
            raise UserError(f"the pictures differ in size: {sorted(map(tuple, sizes))[:3]}", advice)
        features.append(network(torch.stack(batch).to(device)).float().cpu())
    return torch.cat(features)


def preprocess(picture: Tensor, preparation: Preparation) -> Tensor:
    """Crop and resize a picture uint8 [3, h, w] as every scorer of the protocol sees it."""
    if preparation.crop:
        height, width = picture.shape[1:]
        side = min(height, width)
        row = (height - side) // 2
        column = (width - side) // 2
        picture = picture[:, row : row + side, column : column + side]
    return resized(picture, preparation.size, Image.Resampling.LANCZOS)


def resized(picture: Tensor, side: int | None, filter: Image.Resampling) -> Tensor:
    """The picture with `side` pixels a side; unchanged when it has them or `side` is None."""
    if side is None or tuple(picture.shape[1:]) == (side, side):
        return picture
    pixels = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    resized = np.asarray(Image.fromarray(pixels).resize((side, side), filter))
    return torch.from_numpy(resized.transpose(2, 0, 1).copy())


# ---- Reference sets

EMBEDDED_FEATURES = WEIGHTS_FOLDER / "reference.safetensors"

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class Reference(NamedTuple):
    """What fidelity is measured against."""

    pictures: Pictures | None  # None where there are only `statistics`
    label: str  # its name in results
    statistics: FeatureSet | None = None
    digest: str = ""  # of the content, for the cache
    # label of the extractor behind `statistics`; empty where the file does not say
    extractor: str = ""


def find_reference(name: str | None, protocol: Protocol) -> Reference | None:
    """Return the reference that --reference names, by default the protocol's own."""
    name = name or protocol.reference
    if name is None:
        return None
    if name == EMBEDDED:
        if protocol.reference == EMBEDDED:
            return embedded_reference()
        problem = (
            f"--reference {name}: the rendered scenes are not for the protocol {protocol.name}"
        )
        raise UserError(problem, "Give a folder, a .json or a .npz, or --protocol embedded.")
    file, _, folder = name.partition("=")
    path = Path(file)
    if path.suffix.lower() == ".json" and path.is_file():
        return _annotated(path, Path(folder) if folder else path.with_suffix(""))
    if path.suffix.lower() == ".npz" and path.is_file():
        return _statistics(path)
    if Path(name).is_dir():
        return folder_reference(Path(name))
    raise UserError(
        f"--reference {name}: no such folder or file",
        "What fidelity is measured against: embedded (scenes of the bundled family), a folder of pictures, a COCO "
        "annotation .json (its pictures in the folder of the same name, or FILE.json=FOLDER), or a .npz of mu, sigma.",
    )


def embedded_reference() -> Reference:
    """Return what ships with the bundled family: features of 1,024 scenes that no training uses."""
    with safe_open(EMBEDDED_FEATURES, framework="pt") as file:
        metadata = file.metadata()
        features = file.get_tensor("features")
    return Reference(
        None, metadata["label"], FeatureSet.of(features), extractor=metadata["extractor"]
    )


def folder_reference(folder: Path) -> Reference:
    """All pictures of a folder, by name; raises `UserError` when there are none."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise UserError(
            f"no pictures in the reference folder {folder}", f"Allowed: {', '.join(_SUFFIXES)}"
        )
    return _of_files(folder.name, paths)


def _annotated(annotations: Path, folder: Path) -> Reference:
    """The pictures in `folder` that a COCO annotation file lists under `images`."""
    flag = f"--reference {annotations}"
    try:
        names = sorted(
            {str(entry["file_name"]) for entry in files.read_json(annotations)["images"]}
        )
    except (UserError, KeyError, TypeError) as error:
        raise UserError(
            f"{flag}: not a COCO annotation file: it needs images, each with file_name"
        ) from error
    if not names:
        raise UserError(f"{flag}: lists no pictures")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        problem = f"{len(missing)} of {len(names)} pictures are not in {folder}, the first is {missing[0]}"
        raise UserError(f"{flag}: {problem}", f"Write {annotations}=FOLDER.")
    return _of_files(annotations.stem, [folder / name for name in names])


def _statistics(path: Path) -> Reference:
    """Mean and covariance under `mu` and `sigma`, as clean-fid and pytorch-fid write them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            mean, covariance = (
                np.asarray(file[name], dtype=np.float64) for name in ("mu", "sigma")
            )
            n = int(file["n"]) if "n" in file else None
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(f"mu is {mean.shape}, sigma {covariance.shape}")
    except (OSError, ValueError, KeyError) as error:
        problem = f"not a file of statistics: it needs the arrays mu [width] and sigma [width, width]: {error}"
        raise UserError(f"--reference {path}: {problem}") from error
    digest = hashlib.sha256(mean.tobytes() + covariance.tobytes()).hexdigest()
    label = (
        f"{path.stem} (statistics), {'n unknown' if n is None else f'n={n}'}, sha256={digest[:8]}"
    )
    return Reference(
        pictures=None, label=label, statistics=FeatureSet(mean, covariance, n), digest=digest
    )


def _of_files(name: str, paths: Sequence[Path]) -> Reference:
    """A set of files; the digest covers their contents alone."""
    hashes = sorted(files.file_sha256(path) for path in paths)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Reference(paths, f"{name}, n={len(paths)}, sha256={digest[:8]}", digest=digest)


def reference_features(
    reference: Reference,
    extractor: Extractor,
    preparation: Preparation,
    *,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> FeatureSet:
    """Return the features of a reference under an extractor, from `cache` if there, else computed and cached."""
    statistics = reference.statistics
    if statistics is not None:
        width = len(statistics.mean)
        if width != extractor.width:
            problem = f"the reference {reference.label} has {width} features, {extractor.name} has {extractor.width}"
            raise UserError(
                problem, "Give statistics of the protocol's own extractor, or a folder of pictures."
            )
        if reference.extractor not in ("", extractor.label):
            problem = f"the reference {reference.label} has features of {reference.extractor}, not of {extractor.label}"
            raise UserError(
                problem, "Give --reference a folder of pictures: it is measured by any extractor."
            )
        return statistics
    pictures = reference.pictures
    assert pictures is not None
    steps = "-".join(f"{name}={value}" for name, value in asdict(preparation).items())
    covered = f"2|{reference.digest}|{extractor.label}|{steps}"
    path = None
    if cache is not None and reference.digest:
        path = (
            cache
            / "references"
            / f"{hashlib.sha256(covered.encode()).hexdigest()[:32]}.safetensors"
        )
        # A missing or damaged file is computed again.
        with contextlib.suppress(OSError, SafetensorError, KeyError):
            features = load_file(path)["features"]
            if features.shape == (len(pictures), extractor.width):
                return FeatureSet.of(features)
    features = features_of(pictures, extractor, preparation, device=device)
    if path is not None:
        # The figures do not depend on the cache: a read-only home is no error.
        with contextlib.suppress(OSError):
            files.write_atomically(path, save({"features": features}))
    return FeatureSet.of(features)
