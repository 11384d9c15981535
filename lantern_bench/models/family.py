"""What families of published checkpoints share: cards, loading by name or from a model file, random weights.

A family says how its target, tokenizer and prompts are read; everything else is the same for all. Nothing here imports
torch before a model is loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.io.files import read_json
from lantern_bench.models.io.hub_files import SOURCES, ExpectedPaths, find_part, hashes_of, require_part
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.model import CAPTIONS

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.neighbours import Space
    from lantern_bench.models.loaded_model import LoadedModel, Parts, Prompts
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel


@dataclass(frozen=True)
class ModelCard:
    """The fields of a `Model` that a family states."""

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


class CheckpointFamily(ABC):
    """Models that are THE transformer with a VQ tokenizer and an EAGLE drafter, from checkpoints in published layouts.

    A published model is read as a model file of its parts: `published` says whether a `ModelFile` stands for one.
    """

    name: str
    defaults: Mapping[str, Any]
    mode = "lantern++"
    """The mode of `generate` where none is given; it needs what was published with the models."""
    builds_drafter = True
    """Whether models with random weights have a drafter."""
    token_pixels = 16
    """Pixels a token spans in each direction."""
    neighbour_space: Space = "raw"
    """The space in which codes are near each other, as in `LoadedModel`."""

    @abstractmethod
    def load_target(
        self, file: ModelFile, published: bool, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...], str]:
        """Load the target; also return its files, and a text of the sizes that change its numbers and are in no file.

        Raises `UserError` for every way in which the checkpoint does not fit.
        """

    @abstractmethod
    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """Load a tokenizer alone; raises `UserError` for a file that is none, or not of the sizes in `config`."""

    @abstractmethod
    def prompts(self, name: str, file: ModelFile, target: TransformerTarget) -> Prompts:
        """How the model takes prompts."""

    @abstractmethod
    def random_prompts(self, name: str) -> Prompts:
        """What replaces the text encoder of a published model whose weights are random."""

    @abstractmethod
    def fresh_parts(self, name: str) -> tuple[TransformerTarget, VQModel]:
        """A target and a tokenizer of the full shape of a published model, with fresh weights."""

    @abstractmethod
    def facts_of_file(self, file: ModelFile) -> dict[str, Any]:
        """The fields of the card of a model file that depend on the family, `description` among them."""

    @abstractmethod
    def cards(self) -> Sequence[ModelCard]:
        """The published models."""

    @abstractmethod
    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` names this family."""

    @abstractmethod
    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """As `check_prompt`, for the model of the file."""

    def completed(self, file: ModelFile) -> ModelFile:
        """The file with the parts that need not be named."""
        return file

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty caption."""
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """A few prompts to begin with."""
        return {"examples": CAPTIONS}

    def card(self, name: str, about: str, grid: tuple[int, int], parameters: int, **facts: Any) -> ModelCard:
        """The card of a published model."""
        height, width = (self.token_pixels * side for side in grid)
        return ModelCard(
            name=name,
            family=self.name,
            description=f"{about}, {height}x{width} px, {parameters / 1e6:,.0f}M parameters",
            defaults=self.defaults,
            mode=self.mode,
            prompt_set="examples",
            weights=ExpectedPaths(name) if name in SOURCES else {},
            parameters=parameters,
            **facts,
        )

    def card_of_file(self, file: ModelFile) -> ModelCard:
        """The card of a model in a file."""
        facts, file = self.facts_of_file(file), self.completed(file)
        parts = {"target": file.target, "tokenizer": file.tokenizer, "drafter": file.drafter}
        about = file.description or f"{file.name}: {facts.pop('description')}"
        return ModelCard(
            name=str(file.path),
            family=self.name,
            defaults={**self.defaults, **file.defaults},
            mode=self.mode if file.drafter is None else CheckpointFamily.mode,
            prompt_set="examples",
            weights={name: part.path for name, part in parts.items() if part is not None},
            **facts | {"description": about},
        )

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load a published model; `RefusedError` when a file is missing, `UserError` when it is not what it should be.

        The drafter may be missing: then the model decodes with mode `ar` only.
        """
        listed = {part.name for part in SOURCES.get(name, ())}
        found = {part: require_part(name, part) for part in ("target", "tokenizer")}
        optional = {part: find_part(name, part) for part in ("drafter", "text_encoder") if part in listed}
        parts: dict[str, dict[str, Any]] = {
            part: {"dir": str(here.folder.absolute())} for part, here in optional.items() if here is not None
        }
        parts |= {part: {"checkpoint": str(here.path.absolute())} for part, here in found.items()}
        parts["target"]["layout"] = found["target"].source.layout or None
        config = found["target"].folder / "config.json"
        file = ModelFile.model_validate({"name": name, "family": name, **parts}, context=config)
        loaded = self._load(name, file, True, device, dtype)
        if (drafter := optional.get("drafter")) is not None:
            found["drafter"] = drafter
        hashes = {part: [own for _, own in sorted(hashes_of(files).items())] for part, files in found.items()}
        loaded.weights = {
            part: own[0] if len(own) == 1 else hashlib.sha256("".join(own).encode()).hexdigest()
            for part, own in hashes.items()
        } | dict(loaded.weights)
        loaded.table_folder = found["tokenizer"].folder
        return loaded

    def load_file(self, file: ModelFile, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model of a file; raises `UserError` for every way in which its checkpoints do not fit."""
        return self._load(str(file.path), file, False, device, dtype)

    def _load(
        self, name: str, file: ModelFile, published: bool, device: torch.device, dtype: torch.dtype
    ) -> LoadedModel:
        from lantern_bench.models.eagle import load_drafter
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.files import hash_of
        from lantern_bench.models.loaded_model import Parts, assemble, table_of_file

        file = self.completed(file)
        target, files, sizes = self.load_target(file, published, device, dtype)
        hashed: dict[str, tuple[Path, ...]] = {}
        drafter = tokenizer = None
        if file.drafter is not None:
            drafter = load_drafter(file.drafter.path, target, dtype=dtype, device=device)
            hashed["drafter"] = (*open_checkpoint(file.drafter.path).paths, file.drafter.path / "config.json")
        if file.tokenizer is not None:
            tokenizer = self.load_tokenizer(file.tokenizer.path, device, file.tokenizer.config)
            hashed["tokenizer"] = open_checkpoint(file.tokenizer.path).paths
        if file.neighbours is not None:
            hashed["neighbour_table"] = (file.neighbours.path,)
        hashes = {}
        if not published:
            # The checkpoint does not state all sizes, and they change what it computes.
            hashes = {"target": hash_of(files), "sizes": hashlib.sha256(sizes.encode()).hexdigest()}
            hashes |= {part: hash_of(paths) for part, paths in hashed.items()}
        return assemble(
            name,
            Parts(target, drafter, tokenizer),
            self.prompts(name, file, target),
            hashes,
            table=table_of_file(file, target.n_codes),
            table_folder=None if file.tokenizer is None else file.tokenizer.path.parent,
            space=self.neighbour_space,
        )

    def build(self, name: str) -> Parts:
        """Fresh modules of the full shape, with a drafter of the published shape: one layer of the target's."""
        from lantern_bench.models.eagle import build_drafter
        from lantern_bench.models.loaded_model import Parts

        target, tokenizer = self.fresh_parts(name)
        return Parts(target, build_drafter(target.config, target) if self.builds_drafter else None, tokenizer)

    def assemble(self, name: str, parts: Parts, weights: Mapping[str, str]) -> LoadedModel:
        """Make a model of parts that have their weights."""
        from lantern_bench.models.loaded_model import assemble

        return assemble(name, parts, self.random_prompts(name), weights, space=self.neighbour_space)

    def random_condition(self, name: str, parts: Parts) -> Callable[[Sequence[str]], Any]:  # noqa: ARG002
        """Conditions without a text encoder: a function of the prompts alone."""
        return self.random_prompts(name).condition


def config_beside(path: Path, layout: str | None) -> Mapping[str, Any]:
    """The config.json beside weights in the HF layout; empty for others, which have none."""
    folder = path if path.is_dir() else path.parent
    if layout != "hf" and not path.is_dir() and path.suffix != ".safetensors":
        return {}
    found = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    return found if isinstance(found, dict) else {}
