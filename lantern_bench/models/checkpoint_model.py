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
from lantern_bench.models.model import NO_TOKENIZER, Model
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    with_one_rope_base,
)
from lantern_bench.utils.errors import LanternError, UserError
from lantern_bench.utils.files import read_json
from lantern_bench.utils.hashes import hash_of

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.models.model_file import ModelFile
    from lantern_bench.models.networks.target import Prompts, TransformerTarget


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of one published model, or of a family when a model file names only the family."""

    about: str  # its name in descriptions
    config: dict[str, Any] = {}  # content of its config.json
    vq: dict[str, Any] = {}  # sizes of its image tokenizer: fields of `VQConfig`
    grid: tuple[int, int] | None = None  # rows and columns of codes; None: read from its files
    parameters: int | None = None  # of the target; None: only for model files
    aliases: tuple[str, ...] = ()
    families: tuple[str, ...] = ()  # further names that a model file may give as `family`


class FamilySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties that all models of a family share."""

    name: str
    licence: str
    kind: str  # name of the models in errors
    marker: str  # suffix of a tensor name present in every checkpoint
    ignored: str  # regular expression; matches tensors of the target that no picture needs
    models: dict[str, ModelSpec]
    # layout of the tokenizer's file: a key of `LAYOUTS`; None: no tokenizer here draws its tokens
    vq_layout: str | None = None
    codebook: str | None = None  # tensor of the codebook in a target without such a tokenizer
    config: dict[str, Any] = {}
    defaults: dict[str, Any] = {}  # as in `Model`
    pixels: int = 16  # height and width of a code in the picture
    # The space in which published neighbour tables measure distances.
    neighbour_space: Literal["raw", "normalised"] = "raw"
    guided: bool = True  # as in `Model`
    has_drafter: bool = False  # whether a model with random weights gets a drafter


FAMILIES = msgspec.toml.decode(
    (Path(__file__).parent / "families" / "published.toml").read_bytes(), type=dict[str, FamilySpec]
)
"""The published families by table name. Two tables share the family `chameleon`."""


def layout_of(checkpoint: Checkpoint) -> str:
    """Return the layout of a checkpoint: hf, or LlamaGen's official one, which joins q, k and v."""
    return "official" if any(".wqkv." in name for name in checkpoint) else "hf"


class CheckpointModel(Model):
    """This package's transformer with a VQ tokenizer and an EAGLE drafter, from published files.

    Each family is a subclass. `family_spec` has its published models, and model files describe
    others.

    Args:
        name: Name of the model.
        spec: Its defaults.
        paths: File or folder of each part. Empty for a published model, whose files are searched
            when it is loaded.
    """

    family_spec: ClassVar[FamilySpec]

    def __init__(self, name: str, spec: ModelSpec, paths: Mapping[str, Path] = {}) -> None:
        self.name = name
        self.family = self.family_spec.name
        self.licence = self.family_spec.licence
        self.ignored = self.family_spec.ignored
        self.defaults = self.family_spec.defaults
        self.guided = self.family_spec.guided
        self.draws_maps = self.family_spec.vq_layout is None
        self.spec = spec
        self.paths = paths
        self.file: ModelFile | None = None
        self.description = spec.about
        if spec.grid is not None and spec.parameters is not None:
            height, width = (self.family_spec.pixels * side for side in spec.grid)
            self.description += f", {height}x{width} px, {spec.parameters / 1e6:,.0f}M parameters"
        if self.draws_maps:
            self.description += ", tokens only"
        self.aliases = spec.aliases
        self.parameters = spec.parameters
        self.remarks: list[str] = []  # what the user should know of its config and files

    @classmethod
    def of_file(cls, file: ModelFile, spec: ModelSpec) -> Self:
        """Return the model that a model file describes.

        Args:
            file: The model file.
            spec: The result of `spec_of` for its family.

        Raises:
            UserError: The file states something impossible.
        """
        model = cls(str(file.path), spec, file.paths())
        model.file = file
        file.describe(model, f"{file.name or file.path.stem}: {spec.about}")
        model.parameters = None
        # Computing these checks the values of the file.
        _ = model.codes, model.classes
        return model

    @classmethod
    def spec_of(cls, family: str) -> ModelSpec | None:
        """Return the defaults that `family` of a model file names.

        `family` is the name or alias of a published model, or of the family itself.
        """
        for name, spec in cls.family_spec.models.items():
            if family in (name, *spec.aliases, *spec.families):
                return spec
        return None

    # ---- What a family defines

    @abstractmethod
    def read_sizes(self) -> TransformerConfig:
        """Return the target's sizes from `self.config`. Raises errors of `self.error_at`."""

    @abstractmethod
    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""

    @abstractmethod
    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the tensors of the checkpoint that make up each tensor of the target."""

    @abstractmethod
    def random_prompts(self) -> Prompts:
        """Return a converter of prompts to conditions that needs no files, for random weights."""

    def prompts(self, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Return the converter of prompts to conditions."""
        return self.random_prompts()

    def rename_tensor(self, name: str) -> str:
        """Return the name in the key map of a tensor of a published file."""
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
        """Rows and columns of codes that the model file or `spec` states."""
        return (self.file and self.file.grid) or self.spec.grid

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
        """The target's config: the defaults, overridden by config.json, then by the model file."""
        config = dict(self.family_spec.config)
        for stated in (self.spec.config, self._config_beside(), self.file_config):
            for key, value in self.with_one_name(stated).items():
                before = config.get(key)
                if isinstance(value, Mapping) and isinstance(before, Mapping):
                    config[key] = {**before, **value}
                elif value is not None:
                    config[key] = value
        return config

    def with_one_name(self, stated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config of one source, in which every size has one name."""
        config, remarks = with_one_rope_base(stated)
        self.remarks += [f"{self.file.path if self.file else self.folder}: {x}" for x in remarks]
        return config

    def _config_beside(self) -> Mapping[str, Any]:
        """Return config.json beside the weights. Beside a torch file it may be another model's."""
        target = self.paths.get("target")
        if target is None or not (target.is_dir() or target.suffix == ".safetensors"):
            return {}
        path = (target if target.is_dir() else target.parent) / "config.json"
        # A link to a file that is gone is no folder without a config.
        stated = read_json(path) if path.exists() or path.is_symlink() else {}
        return stated if isinstance(stated, dict) else {}

    def error_at(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a key of the target's config.

        Args:
            key: The key, dotted inside a section.
            text: What is wrong with its value.
            advice: What to do.
        """
        if self.file is not None:
            return self.file.error_at(f"target.config.{key}", text, advice)
        return UserError(f"{self.folder}: config.json: {key}: {text}", advice)

    def files(self) -> Mapping[str, Path]:
        """Return the path of each part on this machine, or the path to which it is downloaded."""
        if self.paths:
            return self.paths
        return {
            name: hub.expected_path(part) for name, part in hub.PARTS.get(self.name, {}).items()
        }

    def missing(self, *, drafter: bool) -> list[LanternError]:
        """Return the error for the parts of a published model that are not on this machine."""
        if self.paths:
            return []
        parts = hub.PARTS.get(self.name, {})
        try:
            hub.local_paths(self.name, [part for part in parts if drafter or part != "drafter"])
        except LanternError as error:
            return [error]
        return []

    @property
    def why_no_pixels(self) -> str:
        """Why it cannot draw pictures: a model file may name no tokenizer."""
        published = [hub.PARTS.get(name, {}) for name in self.family_spec.models]
        # Where the published parts are one, the target's checkpoint holds the tokenizer.
        is_apart = any(parts.get("tokenizer") != parts.get("target") for parts in published)
        lacks_tokenizer = self.paths and is_apart and "tokenizer" not in self.paths
        return NO_TOKENIZER if lacks_tokenizer and not self.draws_maps else ""

    def open_part(self, part: str) -> Checkpoint:
        """Open the target's or the tokenizer's checkpoint, the entry that the model file names."""
        from lantern_bench.models.checkpoints.checkpoint import open_checkpoint

        path = self.paths.get(part, self.paths["target"])
        checkpoint = open_checkpoint(path, self.rename_tensor, self.stated(part, "weights"))
        checkpoint.check_hash(self.stated(part, "sha256"))
        return checkpoint

    def head_key(self, checkpoint: Checkpoint, embedding: str, section: str = "") -> str:
        """Return the tensor of the output head, which is the embedding in a tied model.

        Args:
            checkpoint: The checkpoint.
            embedding: Its embedding.
            section: The section of config.json that describes the decoder.

        Raises:
            UserError: The config says something else.
        """
        import torch

        key = "tie_word_embeddings"
        head = "lm_head.weight"
        stated = {key: self.config.get(key)}
        if section:
            stated[f"{section}.{key}"] = (self.config.get(section) or {}).get(key)
        said = {name: value for name, value in stated.items() if value is not None}
        if head not in checkpoint:
            for name, value in said.items():
                if not value:
                    raise self.error_at(
                        name,
                        f"is false, and {checkpoint.path} has no {head}",
                        "Download the checkpoint again; if its head is its embedding, state true.",
                    )
            if not said:
                self.remarks.append(f"{checkpoint.path}: has no {head}: its embedding is the head")
            return embedding
        for name, value in list(said.items())[:1]:
            if value and not torch.equal(
                checkpoint[head], checkpoint.get(embedding, torch.empty(0))
            ):
                raise self.error_at(
                    name,
                    f"is true, and {checkpoint.path} has a {head} that differs from {embedding}",
                    "State false if the head is a matrix of its own.",
                )
        return head

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target. Return it with the files that determine its output."""
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
            ignored=self.ignored,
            wanted=f"{self.family_spec.kind}, {config.layers} layers of width {config.dim}",
        )
        self.remarks += checkpoint.remarks
        return target, checkpoint.paths

    def open_target(self) -> Checkpoint:
        """Open the target's checkpoint. Raises `UserError` for another kind of model."""
        checkpoint = self.open_part("target")
        checkpoint.require(
            self.family_spec.marker, self.family_spec.kind, advice=self._where_published
        )
        return checkpoint

    @property
    def _where_published(self) -> str:
        """The advice for a checkpoint of another kind."""
        repos = [
            hub.PARTS[name]["target"][0].repo
            for name in self.family_spec.models
            if name in hub.PARTS
        ]
        known = ", ".join(dict.fromkeys(repos))
        return f"Give the checkpoint of this model. The published files that are read: {known}."

    def _check_target(self, checkpoint: Checkpoint) -> None:
        """Raise `UserError` if layout or number of layers differ from the stated ones."""
        from lantern_bench.models.checkpoints.checkpoint import what_is

        if self.config.get("quantization_config"):
            raise self.error_at(
                "quantization_config",
                "quantised weights are not supported",
                "Give the checkpoint in float32, bfloat16 or float16.",
            )
        layout = layout_of(checkpoint)
        if self.file is not None and self.file.target.layout not in (None, layout):
            raise UserError(
                f"{checkpoint.path}: is not in the layout {self.file.target.layout}: it is "
                f"{what_is(checkpoint)}",
                f"Give layout: {layout}, or leave it out.",
            )
        # The checkpoint of Janus also has the layers of an image encoder.
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
            # With its files, because they may state other sizes than the published spec.
            return type(self)(self.name, self.spec, hub.local_paths(self.name)).load(device, dtype)
        from lantern_bench.models.checkpoints.drafter_files import give_drafter
        from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
        from lantern_bench.models.loaded_model import assemble
        from lantern_bench.models.neighbour_tables import read_own_table

        paths = self.paths
        tokenizer = None
        target, files = self.load_target(device, dtype)
        # The hash covers sizes too: they change the output, and the checkpoint does not state all.
        sizes = repr((target.config, target.config.token_ids))
        entries = {part: self.stated(part, "weights") for part in paths}
        sizes += "".join(f" {part} {entry}" for part, entry in entries.items() if entry)
        hashes = {"target": hash_of(files), "sizes": hashlib.sha256(sizes.encode()).hexdigest()}
        layout = LAYOUTS.get(self.family_spec.vq_layout or "")
        if layout is not None and ("tokenizer" in paths or layout.inside):
            checkpoint = self.open_part("tokenizer")
            tokenizer = load_vq(checkpoint, layout, device)
            self.remarks += checkpoint.remarks
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
            space=self.family_spec.neighbour_space,
        )
        if self.family_spec.codebook is not None:
            checkpoint = self.open_part("target")
            checkpoint.require(self.family_spec.codebook, self.family_spec.kind)
            model.show_codes(checkpoint[self.family_spec.codebook].to(device).float())
        model.guided = self.guided
        model.remarks = tuple(dict.fromkeys(self.remarks))
        if "drafter" in paths:
            give_drafter(model, self)
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
            if self.family_spec.has_drafter:
                drafter = published_drafter(target.config, target)
            model = assemble(
                self.name,
                target=target,
                drafter=drafter,
                tokenizer=None if self.draws_maps else new_vq(VQConfig(**self.spec.vq)),
                prompts=self.random_prompts(),
                weights={},
                space=self.family_spec.neighbour_space,
            )
            if self.draws_maps:
                model.show_codes(None)
            return model
