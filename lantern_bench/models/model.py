"""A model before it is loaded, without torch (docs/adding-a-model.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import CAPTIONS


class Model(ABC):
    """A model that can be loaded, by name or from a model file."""

    name: str
    description: str
    family: str = ""  # the models whose quality is scored alike, and the heading of listings
    licence: str = ""
    aliases: Sequence[str] = ()  # other names of the same model
    defaults: Mapping[str, Any] = {}  # decoding values, by the names of an experiment file
    codes: int | None = None  # how many image codes there are; None: known when the model is loaded
    tokens: int | None = None  # of one picture, forced ones included
    parameters: int | None = None  # of the target
    classes: int | None = None  # for a model that takes classes and no captions
    sizes: TransformerConfig | None = None  # of the target, where it is this package's transformer
    prompt_sets: Mapping[str, Sequence[str]] = {"examples": CAPTIONS}  # the first is the default

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt that the model cannot take."""
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def files(self) -> Mapping[str, Path]:
        """Return the file or folder of each part by name: where it is, or where a download puts it."""
        return {}

    @property
    def lacks_drafter(self) -> bool:
        """Whether its parts are listed, and no `drafter` among them."""
        return bool(self.files()) and "drafter" not in self.files()

    @property
    def mode(self) -> str:
        """The mode of `generate` where none is given."""
        return "scd" if self.lacks_drafter else "lantern++"

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model; raises `RefusedError` for missing weights, `UserError` for files that do not fit."""

    def with_random_weights(self) -> LoadedModel | None:
        """Return the model on the meta device, without weights; None where only its files tell its architecture."""
        return None
