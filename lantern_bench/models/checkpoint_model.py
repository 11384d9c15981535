"""The base class of model families that load published checkpoints."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec

from lantern_bench.models.checkpoints import hub
from lantern_bench.models.model import Model
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import hash_of, read_json

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.models.networks.target import Prompts, TransformerTarget
    from lantern_bench.models.registry import ModelFile


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published model, or what model files leave out that name only the family."""

    about: str  # what it is called
    config: dict[str, Any] = {}  # what its config.json states
    vq: dict[str, Any] = {}  # sizes of its image tokenizer: fields of `VQConfig`
    grid: tuple[int, int] | None = None  # rows and columns of codes; None: its files state them
    parameters: int | None = None  # of the target; None: only for model files
    aliases: tuple[str, ...] = ()
    families: tuple[str, ...] = ()  # what else a model file may give as its family


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the models of a family have in common."""

    name: str
    licence: str
    kind: str  # what the models are called, for errors
    marker: str  # the end of the name of a tensor that every checkpoint has
    ignored: str  # a regular expression of the target's tensors that no picture needs
    vq_layout: str  # layout of the tokenizer's file: a key of `LAYOUTS`
    models: dict[str, Published]
    config: dict[str, Any] = {}
    defaults: dict[str, Any] = {}  # as in `Model`
    pixels: int = 16  # height and width of a code in the picture
    # In which published tables measure distances.
    neighbour_space: Literal["raw", "normalised"] = "raw"
    has_drafter: bool = False  # whether models with random weights have one


FAMILIES = msgspec.toml.decode(
    (Path(__file__).parent / "families" / "published.toml").read_bytes(), type=dict[str, Family]
)
"""The published families. Two tables have the family `chameleon`."""


def layout_of(checkpoint: Checkpoint) -> str:
    """Return the layout of a checkpoint: hf, or the official layout of LlamaGen."""
    is_hf = any(name.startswith(("model.", "lm_head.")) for name in checkpoint)
    return "hf" if is_hf else "official"


class CheckpointModel(Model):
    """This package's transformer with a VQ tokenizer and an EAGLE drafter, from published files.

    A family is a subclass. Its models are those of `published`, and the models of model files.

    Args:
        name: Name of the model.
        row: What is published of it.
        paths: File or folder of each part. Empty for a published model whose files are searched
            when it is loaded.
    """

    published: ClassVar[Family]

    def __init__(self, name: str, row: Published, paths: Mapping[str, Path] = {}) -> None:
        self.name = name
        self.family = self.published.name
        self.licence = self.published.licence
        self.defaults = self.published.defaults
        self.row = row
        self.paths = paths
        self.file: ModelFile | None = None
        self.description = row.about
        if row.grid is not None and row.parameters is not None:
            height, width = (self.published.pixels * side for side in row.grid)
            self.description += f", {height}x{width} px, {row.parameters / 1e6:,.0f}M parameters"
        self.aliases = row.aliases
        self.parameters = row.parameters

    @classmethod
    def of_file(cls, file: ModelFile, row: Published) -> Self:
        """Return the model that a model file describes.

        Args:
            file: The model file.
            row: What `row_of` returns for its family.

        Raises:
            UserError: The file states something impossible.
        """
        model = cls(str(file.path), row, file.paths())
        model.file = file
        file.describe(model, f"{file.name or file.path.stem}: {row.about}")
        model.parameters = None
        # What a file states is checked when these are computed.
        _ = model.codes, model.classes
        return model

    @classmethod
    def row_of(cls, family: str) -> Published | None:
        """Return the row that `family` of a model file names.

        It may be a published model, or the family itself, each by name or alias.
        """
        for name, row in cls.published.models.items():
            if family in (name, *row.aliases, *row.families):
                return row
        return None

    # ---- What a family defines

    @abstractmethod
    def read_sizes(self) -> TransformerConfig:
        """Return the target's sizes from `self.config`. Raises what `self.wrong` returns."""

    @abstractmethod
    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""

    @abstractmethod
    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return which tensors of the checkpoint make up each tensor of the target."""

    @abstractmethod
    def random_prompts(self) -> Prompts:
        """Return how prompts become conditions of a model with random weights, without files."""

    def prompts(self, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Return how prompts become conditions."""
        return self.random_prompts()

    def name_now(self, name: str) -> str:
        """Return the name that the key map has for a tensor of a published file."""
        return name

    # ---- What the base class computes

    @cached_property
    def sizes(self) -> TransformerConfig:  # type: ignore[override]  # mypy takes it for read-only
        """The target's sizes."""
        return self.read_sizes()

    @cached_property
    def codes(self) -> int:  # type: ignore[override]  # mypy takes it for read-only
        """The number of image codes."""
        return self.sizes.n_codes

    @cached_property
    def tokens(self) -> int:  # type: ignore[override]  # mypy takes it for read-only
        """The tokens of one picture."""
        return self.sizes.image_tokens

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of codes that the model file or the published row states."""
        return (self.file and self.file.grid) or self.row.grid

    @property
    def file_config(self) -> Mapping[str, Any]:
        """The target's config in the model file."""
        return (self.file and self.file.target.config) or {}

    @property
    def folder(self) -> Path | None:
        """The folder of the target's files."""
        path = self.paths.get("target")
        return path if path is None or path.is_dir() else path.parent

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The target's config: what is published, then config.json, then the model file."""
        config = dict(self.published.config)
        for stated in (self.row.config, self._config_beside(), self.file_config):
            for key, value in stated.items():
                before = config.get(key)
                if isinstance(value, Mapping) and isinstance(before, Mapping):
                    config[key] = {**before, **value}
                elif value is not None:
                    config[key] = value
        return config

    def _config_beside(self) -> Mapping[str, Any]:
        """Return config.json beside the weights. One beside a torch file need not belong to it."""
        target = self.paths.get("target")
        if target is None or not (target.is_dir() or target.suffix == ".safetensors"):
            return {}
        path = (target if target.is_dir() else target.parent) / "config.json"
        stated = read_json(path) if path.is_file() else {}
        return stated if isinstance(stated, dict) else {}

    def wrong(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a key of the target's config.

        Args:
            key: The key, dotted inside a section.
            text: What is wrong with its value.
            advice: What to do.
        """
        if self.file is not None:
            return self.file.wrong(f"target.config.{key}", text, advice)
        return UserError(f"{self.folder}: config.json: {key}: {text}", advice)

    def files(self) -> Mapping[str, Path]:
        """Return the file or folder of each part: where it is, or where a download puts it."""
        if self.paths:
            return self.paths
        parts = hub.PARTS.get(self.name, {})
        return {name: hub.expected_path(part) for name, part in parts.items()}

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target and return it with the files that decide what it computes."""
        import torch

        from lantern_bench.models.checkpoints.key_map import load_into

        checkpoint = self.open_target()
        self._check_target(checkpoint)
        with torch.device("meta"):
            target = self.new_target()
        config = target.config
        load_into(
            target,
            checkpoint,
            self.target_keys(target, checkpoint),
            dtype=dtype,
            device=device,
            ignored=self.published.ignored,
            wanted=f"{self.published.kind}, {config.layers} layers of width {config.dim}",
        )
        return target, checkpoint.paths

    def open_target(self) -> Checkpoint:
        """Open the target's checkpoint. Raises `UserError` for another kind of model."""
        from lantern_bench.models.checkpoints.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(self.paths["target"], self.name_now)
        checkpoint.require(self.published.marker, self.published.kind)
        return checkpoint

    def _check_target(self, checkpoint: Checkpoint) -> None:
        """Raise `UserError` for another layout or number of layers than is stated."""
        from lantern_bench.models.checkpoints.checkpoint import what_is

        layout = layout_of(checkpoint)
        if self.file is not None and self.file.target.layout not in (None, layout):
            raise UserError(
                f"{checkpoint.path}: is not in the layout {self.file.target.layout}: it is "
                f"{what_is(checkpoint)}",
                f"Give layout: {layout}, or leave it out.",
            )
        # Janus has layers of its image encoder too.
        numbers = re.findall(
            r"^(?!.*vision).*\blayers\.(\d+)\.", "\n".join(checkpoint), re.MULTILINE
        )
        layers = len(set(numbers))
        if layers != self.sizes.layers:
            raise UserError(
                f"{checkpoint.path}: has {layers} layers, and num_hidden_layers is "
                f"{self.sizes.layers}",
                "Give the checkpoint of this model, or mend its config.",
            )

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model. Without a drafter it decodes with modes that need none."""
        if not self.paths:
            # With its files, because they may state other sizes than the published row.
            return type(self)(self.name, self.row, hub.local_paths(self.name)).load(device, dtype)
        from lantern_bench.models.checkpoints.checkpoint import open_checkpoint, read_own_table
        from lantern_bench.models.checkpoints.drafter_files import give_drafter
        from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
        from lantern_bench.models.loaded_model import assemble

        paths = self.paths
        tokenizer = None
        target, files = self.load_target(device, dtype)
        # The checkpoint does not state all sizes, and they change what it computes.
        sizes = repr((target.config, target.config.token_ids))
        hashes = {"target": hash_of(files), "sizes": hashlib.sha256(sizes.encode()).hexdigest()}
        layout = LAYOUTS[self.published.vq_layout]
        tokenizer_path = paths.get("tokenizer", paths["target"] if layout.inside else None)
        if tokenizer_path is not None:
            checkpoint = open_checkpoint(tokenizer_path, self.name_now)
            tokenizer = load_vq(checkpoint, layout, device)
            hashes["tokenizer"] = hash_of(checkpoint.paths)
        if "neighbours" in paths:
            hashes["neighbour_table"] = hash_of((paths["neighbours"],))
        model = assemble(
            self.name,
            target=target,
            drafter=None,
            tokenizer=tokenizer,
            prompts=self.prompts(target),
            weights=hashes,
            space=self.published.neighbour_space,
        )
        if "drafter" in paths:
            give_drafter(model, paths["drafter"])
        if "neighbours" in paths:
            model.given_table = read_own_table(paths["neighbours"], target.n_codes)
        return model

    def with_random_weights(self) -> LoadedModel:
        """Return modules of the full shape on the meta device."""
        import torch

        from lantern_bench.models.loaded_model import assemble
        from lantern_bench.models.networks.eagle import published_drafter
        from lantern_bench.models.networks.vq import VQConfig, new_vq

        with torch.device("meta"):
            target = self.new_target()
            drafter = None
            if self.published.has_drafter:
                drafter = published_drafter(target.config, target)
            return assemble(
                self.name,
                target=target,
                drafter=drafter,
                tokenizer=new_vq(VQConfig(**self.row.vq)),
                prompts=self.random_prompts(),
                weights={},
                space=self.published.neighbour_space,
            )
