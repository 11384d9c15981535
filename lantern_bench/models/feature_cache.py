"""Features of captions on disk, one file a caption: a sweep encodes each caption once, and the next sweep none.

A caption's file is named by a hash of its text and lies in a folder named by a hash of all that can change the
features: the encoder's files, the number of positions, the number type and the cleaning of captions. Only the valid
positions are kept. Which encoder makes them is `text_encoder`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.models.files import write_atomically

__all__ = ["FeatureCache"]

_ABOUT = "encoder.json"


class FeatureCache:
    """The features of one encoder under `root`; `about` is all that can change them."""

    def __init__(self, root: Path, about: Mapping[str, Any]) -> None:
        self.about = json.loads(json.dumps(dict(about), sort_keys=True))
        self.sha256 = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        self.folder = root / self.sha256[:16]

    @classmethod
    def only_one(cls, root: Path, wanted: Mapping[str, Any]) -> FeatureCache | None:
        """The cache of the one encoder of which there are features with the values `wanted`; None without any.

        Features alone are enough to decode, so the encoder's own files need not be there. Raises `RefusedError` when
        several encoders fit.
        """
        fitting = [cls(root, about) for about in _kept(root) if wanted.items() <= about.items()]
        if len(fitting) > 1:
            raise RefusedError(
                f"{root}: holds caption features of {len(fitting)} text encoders, and the encoder itself is missing",
                "Fetch the encoder, or leave only the folder of the features you mean.",
            )
        return fitting[0] if fitting else None

    def path(self, caption: str) -> Path:
        """The file of a caption."""
        name = hashlib.sha256(caption.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"

    def has(self, caption: str) -> bool:
        """Whether a caption has been encoded."""
        return self.path(caption).is_file()

    def put(self, caption: str, features: Tensor) -> None:
        """Keep the features [n, width] of a caption; raises OSError where nothing can be written."""
        about = self.folder / _ABOUT
        if not about.is_file():
            write_atomically(about, json.dumps(self.about, indent=1, sort_keys=True).encode() + b"\n")
        content = save({"features": features.cpu().contiguous()}, metadata={"caption": caption})
        write_atomically(self.path(caption), content)

    def get(self, caption: str) -> Tensor:
        """The features [n, width] of a caption; raises `RefusedError` for a damaged file, KeyError for none."""
        path = self.path(caption)
        if not path.is_file():
            raise KeyError(caption)
        try:
            with safe_open(path, framework="pt") as file:
                kept = (file.metadata() or {}).get("caption")
                features: Tensor = file.get_tensor("features")
        except (OSError, SafetensorError) as error:
            raise RefusedError(f"{path}: damaged features of a caption: {error}", "Remove the file.") from error
        if kept != caption:
            raise RefusedError(f"{path}: holds the features of another caption", "Remove the file.")
        return features


def _kept(root: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(root.glob(f"*/{_ABOUT}")):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RefusedError(f"{path}: damaged: {error}", "Remove the folder; features are made again.") from error
        found.append(about)
    return found
