"""What is known of a model before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before it is loaded.

    `defaults` are the decoding values the model suggests (cfg_scale, tree, ...), by the names of an experiment file;
    `prompt_set` names the prompts to use where none are given. `weights` maps a part to its file, for listings;
    `vocab_size` is the number of image codes, where it is known; `tokens` those of one picture; `parameters` the
    target's. `classes` is their number, for a model that takes classes and no captions. `also_called` are other names
    of the same model. `sizes` is the target's `TransformerConfig`, where it is known without files. `mode` is the mode
    of `generate` where none is given.
    """

    name: str
    family: str
    description: str
    defaults: Mapping[str, Any]
    prompt_set: str
    licence: str = ""
    weights: Mapping[str, Path] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens: int | None = None
    parameters: int | None = None
    classes: int | None = None
    also_called: tuple[str, ...] = ()
    sizes: Any = field(default=None, repr=False)
    mode: str = "lantern++"
