"""The base class of model families that load published checkpoints."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lantern_bench.models.checkpoints import hub
from lantern_bench.models.model_file import ModelFile
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import hash_of, read_json

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.neighbours import Space
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.models.networks.conditions import Prompts
    from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.model import Model

# ---- Models of published checkpoints


class Published(NamedTuple):
    """A published model, or what the files of a family leave out."""

    about: str  # what it is called
    config: Mapping[str, Any]  # what its config.json states
    vq: Mapping[str, Any]  # sizes of its image tokenizer: fields of `VQConfig`
    grid: tuple[int, int] | None  # rows and columns of codes; None: its files state them
    parameters: int | None = None  # of the target
    aliases: tuple[str, ...] = ()


def layout_of(checkpoint: Checkpoint) -> str:
    """Return the layout of a checkpoint: hf, or that of LlamaGen's official ones."""
    return (
        "hf" if any(name.startswith(("model.", "lm_head.")) for name in checkpoint) else "official"
    )


class CheckpointModel(Model):
    """The transformer of this package with a VQ tokenizer and an EAGLE drafter, from files in published layouts.

    A family is a subclass; its models are the rows of `published`, and those that a model file describes.
    """

    published: ClassVar[Mapping[str, Published]]
    any_model: ClassVar[Published | None] = None  # for model files that name only the family
    # how the name of a tensor of every checkpoint ends; what the models are called
    kind: ClassVar[tuple[str, str]]
    ignored: ClassVar[str]  # a regular expression of the target's tensors that no picture needs
    vq_layout: ClassVar[str]  # of the tokenizer's file: a key of `vq.LAYOUTS`
    pixels: ClassVar[int] = 16  # that a code spans in each direction
    neighbour_space: ClassVar[Space] = "raw"  # in which published tables measure distances
    has_drafter: ClassVar[bool] = True  # whether models with random weights have one
    # whether the image tokenizer is in the target's folder
    tokenizer_in_target: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        row: Published,
        paths: Mapping[str, Path] | None = None,
        file: ModelFile | None = None,
    ) -> None:
        self.name = name
        self.row = row
        self.file = file
        # part -> file or folder; empty for a published model that is not located yet
        self.paths = dict(paths or {})
        if self.tokenizer_in_target and "target" in self.paths:
            self.paths.setdefault("tokenizer", self.paths["target"])
        if file is not None:
            self.description = file.description or f"{file.name}: {row.about}"
            self.defaults = {**self.defaults, **file.defaults}
        else:
            height, width = (self.pixels * side for side in row.grid or (0, 0))
            millions = (row.parameters or 0) / 1e6
            self.description = f"{row.about}, {height}x{width} px, {millions:,.0f}M parameters"
            self.aliases = row.aliases
            self.parameters = row.parameters

    @classmethod
    def row_of(cls, family: str) -> Published | None:
        """Return the row that `family:` of a model file names: a published model by name or alias, or the family."""
        for name, row in cls.published.items():
            if family in (name, *row.aliases):
                return row
        bare = cls.any_model
        return bare if bare is not None and family in (cls.family, *bare.aliases) else None

    # ---- What a family says

    @abstractmethod
    def read_sizes(self) -> TransformerConfig:
        """Return the target's sizes, from `self.config`; raises what `self.wrong(key, text)` returns."""

    @abstractmethod
    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""

    @abstractmethod
    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return where the target's tensors are."""

    @abstractmethod
    def prompts(self, target: TransformerTarget, invented: bool = False) -> Prompts:
        """Return how prompts become conditions; `invented`: without any file, for random weights."""

    def name_now(self, name: str) -> str:
        """Return the name that a tensor of an older file has now."""
        return name

    # ---- What follows

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
    def folder(self) -> Path | None:
        """The folder of the target's files."""
        path = self.paths.get("target")
        return path if path is None or path.is_dir() else path.parent

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What is stated of the target: by its row, then config.json beside its weights, then the model file."""
        config = dict(self.row.config)
        for stated in (self._config_beside(), self.file and self.file.target.config):
            for key, value in (stated or {}).items():
                if isinstance(value, Mapping) and isinstance(config.get(key), Mapping):
                    config[key] = {
                        **config[key],
                        **{name: entry for name, entry in value.items() if entry is not None},
                    }
                elif value is not None:
                    config[key] = value
        return config

    def _config_beside(self) -> Mapping[str, Any]:
        target = self.paths.get("target")
        # What lies beside a torch file need not be about it.
        if (
            target is None
            or self.folder is None
            or not (target.is_dir() or target.suffix == ".safetensors")
        ):
            return {}
        path = self.folder / "config.json"
        stated = read_json(path) if path.is_file() else {}
        return stated if isinstance(stated, dict) else {}

    def wrong(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a key of the target's config."""
        if self.file is not None:
            return self.file.wrong(f"target.config.{key}", text, advice)
        return UserError(f"{self.folder}: config.json: {key}: {text}", advice)

    def files(self) -> Mapping[str, Path]:
        """Return the file or folder of each part: where it is, or where a download puts it."""
        if self.file is not None:
            return {
                part: path
                for part, path in self.paths.items()
                if part in ("target", "tokenizer", "drafter")
            }
        return {
            name: hub.expected_path(part) for name, part in hub.PARTS.get(self.name, {}).items()
        }

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target; also return the files that decide what it computes."""
        import torch

        from lantern_bench.models.checkpoints.checkpoint import open_checkpoint, what_is
        from lantern_bench.models.checkpoints.key_map import load_into

        checkpoint = open_checkpoint(self.paths["target"]).renamed(self.name_now)
        checkpoint.require(*self.kind)
        layout = layout_of(checkpoint)
        if self.file is not None and self.file.target.layout not in (None, layout):
            text = f"{checkpoint.path}: is not in the layout {self.file.target.layout}: it is {what_is(checkpoint)}"
            raise UserError(text, f"Give layout: {layout}, or leave it out.")
        # Compared before modules of that size are made; Janus has layers of its image encoder too.
        numbers = (re.match(r"(?!.*vision).*\blayers\.(\d+)\.", name) for name in checkpoint)
        layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
        if layers != self.sizes.layers:
            text = f"{checkpoint.path}: has {layers} layers, and num_hidden_layers is {self.sizes.layers}"
            raise UserError(text, "Give the checkpoint of this model, or mend its config.")
        with torch.device("meta"):
            target = self.new_target()
        wanted = f"{self.kind[1]}, {target.config.layers} layers of width {target.config.dim}"
        keys = self.target_keys(target, checkpoint)
        load_into(
            target,
            checkpoint,
            keys,
            dtype=dtype,
            device=device,
            ignored=self.ignored,
            wanted=wanted,
        )
        return target, checkpoint.paths

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model; without a drafter it decodes with modes that need none."""
        if not self.paths:
            return type(self)(self.name, self.row, hub.local_paths(self.name)).load(device, dtype)
        from lantern_bench.models.checkpoints.checkpoint import open_checkpoint, read_own_table
        from lantern_bench.models.checkpoints.drafter_files import drafter_files, load_drafter
        from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
        from lantern_bench.models.loaded_model import assemble

        paths = self.paths
        target, files = self.load_target(device, dtype)
        # The checkpoint does not state all sizes, and they change what it computes.
        sizes = repr((target.config, target.config.token_ids))
        hashes = {"target": hash_of(files), "sizes": hashlib.sha256(sizes.encode()).hexdigest()}
        drafter = tokenizer = table = None
        if "drafter" in paths:
            drafter = load_drafter(paths["drafter"], target, dtype=dtype, device=device)
            hashes["drafter"] = hash_of(drafter_files(paths["drafter"]))
        if "tokenizer" in paths:
            checkpoint = open_checkpoint(paths["tokenizer"]).renamed(self.name_now)
            tokenizer = load_vq(checkpoint, LAYOUTS[self.vq_layout], device)
            hashes["tokenizer"] = hash_of(checkpoint.paths)
        if self.file is not None and "neighbours" in paths:
            try:
                table = read_own_table(paths["neighbours"], target.n_codes)
            except ValueError as error:
                raise self.file.wrong("neighbours.table", str(error)) from error
            hashes["neighbour_table"] = hash_of((paths["neighbours"],))
        prompts = self.prompts(target)
        space = self.neighbour_space
        return assemble(
            name=self.name,
            target=target,
            drafter=drafter,
            tokenizer=tokenizer,
            prompts=prompts,
            weights=hashes,
            space=space,
            table=table,
        )

    def with_random_weights(self) -> LoadedModel:
        """Return modules of the full shape on the meta device."""
        import torch

        from lantern_bench.models.loaded_model import assemble
        from lantern_bench.models.networks.eagle import published_drafter
        from lantern_bench.models.networks.vq import VQConfig, new_vq

        with torch.device("meta"):
            target = self.new_target()
            drafter = published_drafter(target.config, target) if self.has_drafter else None
            tokenizer = new_vq(VQConfig(**self.row.vq))
            prompts = self.prompts(target, invented=True)
            return assemble(
                name=self.name,
                target=target,
                drafter=drafter,
                tokenizer=tokenizer,
                prompts=prompts,
                weights={},
                space=self.neighbour_space,
            )
