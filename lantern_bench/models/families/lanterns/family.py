"""The bundled family: a miniature text-to-image model of paper lanterns that ships in the wheel.

`modules` has the networks, and `scripts/train_lanterns` trains them. Figures measured with it
describe this miniature only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.families.lanterns.description import (
    FILES,
    GUIDANCE,
    HELD_OUT,
    TARGET_CONFIG,
    TRAIN,
    TREE,
    WEIGHTS_FOLDER,
    words,
)
from lantern_bench.models.model import Model

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel


class Lanterns(Model):
    """Scenes of paper lanterns: 64x64 pixels, 256 tokens of 2,048 codes, weights in `folder`."""

    name = family = "lanterns"
    description = "bundled miniature: 64x64 px scenes of paper lanterns"
    licence = "Apache-2.0"
    defaults: Mapping[str, Any] = {"cfg_scale": GUIDANCE, "tree": TREE}
    codes = 2048
    tokens = 256
    parameters = 7_485_440
    sizes = TARGET_CONFIG
    prompt_sets: Mapping[str, Sequence[str]] = {
        "held-out": tuple(attributes.caption() for attributes in HELD_OUT),
        "train": tuple(attributes.caption() for attributes in TRAIN),
    }

    def __init__(self, folder: Path = WEIGHTS_FOLDER) -> None:
        self.folder = folder

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a word the model does not know."""
        words(text)

    def files(self) -> Mapping[str, Path]:
        """Return the file of each part."""
        return {part: self.folder / FILES[part] for part in ("target", "drafter", "tokenizer")}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load target, drafter and tokenizer. Raises `RefusedError` for a missing file."""
        from lantern_bench.models.families.lanterns.modules import (
            caption_condition,
            load_part,
            load_tokenizer,
            new_target,
        )
        from lantern_bench.models.loaded_model import assemble
        from lantern_bench.models.networks.eagle import EagleDrafter
        from lantern_bench.models.networks.target import Prompts
        from lantern_bench.utils.files import file_sha256

        files = self.files()
        target = load_part(new_target, "target", files["target"], device=device, dtype=dtype)

        def new_drafter() -> EagleDrafter:
            return EagleDrafter(target.config, target.transformer.output)

        return assemble(
            self.name,
            target=target,
            drafter=load_part(new_drafter, "drafter", files["drafter"], device=device, dtype=dtype),
            tokenizer=load_tokenizer(self.folder, device),
            prompts=Prompts(caption_condition),
            weights={part: file_sha256(path) for part, path in files.items()},
            # Rows have unit length when they are looked up (docs/algorithms.md, section 9, C1).
            space="normalised",
        )
