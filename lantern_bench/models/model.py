"""A model before it is loaded, without torch (docs/adding-a-model.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.prompts.prompt import CAPTIONS
from lantern_bench.utils.errors import LanternError, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lantern_bench.models.loaded_model import LoadedModel


NO_TOKENIZER = "it has no tokenizer"
"""Why a model without a tokenizer draws no pictures."""


def no_picture(name: str, reason: str) -> UserError:
    """Return the error for a model that cannot draw pictures."""
    return UserError(
        f"{name}: no picture can be drawn: {reason}",
        "Name the tokenizer's checkpoint in the model's file; or ask for the tokens alone, "
        "from Python, with `lantern_bench.decode`.",
    )


class Model(ABC):
    """A model that can be loaded, by name or from a model file."""

    name: str
    description: str
    # Models of a family are scored alike, and have one heading in listings.
    family: str = ""
    licence: str = ""
    aliases: Sequence[str] = ()  # other names of the same model
    defaults: Mapping[str, Any] = {}  # decoding values, by the names of an experiment file
    codes: int | None = None  # number of image codes; None: known when the model is loaded
    tokens: int | None = None  # tokens of one picture, forced ones included
    parameters: int | None = None  # of the target
    guided: bool = True  # whether it was trained for guidance
    # Whether its pictures are maps of the tokens, because no decoder here turns them into pixels.
    draws_maps: bool = False
    classes: int | None = None  # for a model that takes classes and no captions
    sizes: TransformerConfig | None = None  # of the target, if it is this package's transformer
    file: Any = None  # the model file that describes it
    ignored: str = "$"  # a regular expression of tensors of its files that are not read
    prompt_sets: Mapping[str, Sequence[str]] = {"examples": CAPTIONS}  # the first is the default

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt that the model cannot take."""
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def files(self) -> Mapping[str, Path]:
        """Return the path of each part on this machine, or the path to which it is downloaded."""
        return {}

    def stated(self, part: str, key: str) -> str | None:
        """Return a value of a part in the model file, such as `weights`; None without any."""
        return getattr(getattr(self.file, part, None), key, None)

    def missing(self, *, drafter: bool) -> list[LanternError]:  # noqa: ARG002
        """Return an error for what decoding captions needs and this machine lacks.

        No weights are read.

        Args:
            drafter: Whether the drafter is needed.
        """
        return []

    @property
    def why_no_pixels(self) -> str:
        """Why it cannot draw pictures, as far as it is known before loading; empty if it can."""
        return ""

    @property
    def lacks_drafter(self) -> bool:
        """Whether the model lists its parts and has no `drafter` among them."""
        parts = self.files()
        return bool(parts) and "drafter" not in parts

    @property
    def mode(self) -> str:
        """The default mode of `generate`."""
        return "scd" if self.lacks_drafter else "lantern++"

    def decoder_input(self, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return the arrays that the authors' decoder takes, by its names.

        Args:
            tokens: The tokens of images int64 [B, N], as they were decoded.
        """
        return {"tokens": tokens}

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model.

        Raises:
            RefusedError: Weights are missing.
            UserError: A file does not fit.
        """

    def with_random_weights(self) -> LoadedModel | None:
        """Return the model on the meta device, without weights.

        None if only its files tell its architecture.
        """
        return None
