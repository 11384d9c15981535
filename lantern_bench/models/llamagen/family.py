"""LlamaGen as `models.registry` wants it: the text-conditional and the class-conditional models, by name or by file.

Two families, since they take different prompts: captions, or ImageNet classes. Nothing here imports torch before a
model is loaded. What the sizes are is `llamagen_sizes`, what is in the files `llamagen_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.default_prompts import CAPTIONS, some_classes
from lantern_bench.models.io.hub_files import SOURCES, ExpectedPaths, Found, find_part, hashes_of, require_part
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.llamagen import PUBLISHED, Kind, LlamaGenSize
from lantern_bench.plugins import ModelCard

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel, Parts
    from lantern_bench.models.vq import VQModel


# What the authors sample with: section 5 of the official README, and its demos.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t2i": {"cfg_scale": 7.5, "top_k": 1000, "tree": "eagle1-25"},
    "c2i": {"cfg_scale": 4.0, "top_k": 2000, "tree": "eagle1-25"},
}
_ABOUT = {"t2i": "text-conditional LlamaGen", "c2i": "class-conditional LlamaGen (ImageNet)"}
_TOP_CLASSES = {"llamagen-c2i-B": 256, "llamagen-c2i-L": 256}


class LlamaGenFamily:
    """The models of one kind of condition."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.name = f"llamagen-{kind}"
        self._sizes = {name: size for name, size in PUBLISHED.items() if size.kind == kind}

    # ---- what can be known without loading

    def cards(self) -> Sequence[ModelCard]:
        """The published models of this kind."""
        return [self._card(name, size) for name, size in self._sizes.items()]

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty caption, or for what is no ImageNet class."""
        self._check(text, 1000)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """A few prompts to begin with."""
        if self.kind == "t2i":
            return {"examples": CAPTIONS}
        return {"examples": some_classes(1000)}

    # ---- models of a user's file

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` is this family or one of its models; plain `llamagen` is decided by the target."""
        if file.family != "llamagen":
            return file.family == self.name or self._named(file) is not None
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.llamagen.checkpoint import kind_of_checkpoint, stated_sizes

        stated = stated_sizes(file).get("kind")
        kind = stated if stated is not None else kind_of_checkpoint(open_checkpoint(file.target.path))
        # What is neither is refused as text-conditional, with what it is.
        return (kind or "t2i") == self.kind

    def card_of_file(self, file: ModelFile) -> ModelCard:
        """The card of a model in a file."""
        known, published = self._known(file, "vocab_size", "classes"), self._named(file)
        grid = file.grid or known.get("grid")
        parts = {"target": file.target, "tokenizer": file.tokenizer, "drafter": file.drafter}
        return ModelCard(
            name=str(file.path),
            family=self.name,
            description=file.description or f"{file.name}: {_ABOUT[self.kind]}",
            defaults=_DEFAULTS[self.kind] | dict(file.defaults),
            prompt_set="examples",
            weights={name: part.path for name, part in parts.items() if part is not None},
            vocab_size=known["vocab_size"],
            tokens=grid[0] * grid[1] if grid is not None else known.get("block_size"),
            parameters=published.parameters if published is not None else None,
            classes=known["classes"] if self.kind == "c2i" else None,
        )

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """As `check_prompt`; the number of classes is the file's."""
        self._check(text, self._known(file, "classes").get("classes", 0))

    def prompt_sets_of_file(self, file: ModelFile) -> Mapping[str, tuple[str, ...]]:
        """As `prompt_sets`, of the classes that the model of the file has."""
        if self.kind == "t2i":
            return self.prompt_sets()
        return {"examples": some_classes(self._known(file, "classes")["classes"])}

    def load_file(self, file: ModelFile, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model of a file; raises `UserError` for every way in which its checkpoints do not fit."""
        from lantern_bench.models.eagle import load_drafter
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.files import hash_of
        from lantern_bench.models.llamagen.checkpoint import describe, load_target
        from lantern_bench.models.llamagen.model import hash_of_text, loaded_model, table_of_file
        from lantern_bench.models.loaded_model import Parts

        checkpoint = open_checkpoint(file.target.path)
        size, stated = describe(file, checkpoint, self.kind, self._named(file))
        layout: Any = file.target.layout
        target = load_target(
            checkpoint,
            size,
            layout,
            config=stated,
            dtype=dtype,
            device=device,
            advice=f"Give the grid the checkpoint was trained for in {file.path}, or the checkpoint of this grid.",
        )
        # Sizes that the checkpoint does not tell change what it computes.
        hashes = {"target": hash_of(checkpoint.paths), "sizes": hash_of_text(repr(size))}
        drafter = tokenizer = None
        if file.drafter is not None:
            drafter = load_drafter(file.drafter.path, target, dtype=dtype, device=device)
            weights = open_checkpoint(file.drafter.path).paths
            hashes["drafter"] = hash_of((*weights, file.drafter.path / "config.json"))
        if file.tokenizer is not None:
            tokenizer = self.load_tokenizer(file.tokenizer.path, device, file.tokenizer.config)
            hashes["tokenizer"] = hash_of(open_checkpoint(file.tokenizer.path).paths)
        if file.neighbours is not None:
            hashes["neighbour_table"] = hash_of((file.neighbours.path,))
        folder = file.text_encoder.path if file.text_encoder is not None else None
        return loaded_model(
            str(file.path),
            size,
            Parts(target, drafter, tokenizer),
            hashes,
            text_encoder=folder,
            table=table_of_file(file, size.vocab_size),
            table_folder=file.tokenizer.path.parent if file.tokenizer is not None else None,
        )

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """Load a tokenizer alone; raises `UserError` for a file that is none, or not of the sizes in `config`."""
        from lantern_bench.models.vq import load_vq

        return load_vq(path, device, config)

    # ---- published models

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load a published model; `RefusedError` when a file is missing, `UserError` when it is not what it should be.

        The drafter may be missing: then only `ar` can be asked of it.
        """
        from lantern_bench.models.eagle import load_drafter
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.llamagen.checkpoint import as_stated, config_beside, load_target
        from lantern_bench.models.llamagen.model import loaded_model
        from lantern_bench.models.loaded_model import Parts

        size = self._sizes[name]
        found = {"target": require_part(name, "target"), "tokenizer": require_part(name, "tokenizer")}
        drafter = self._optional(name, "drafter")
        if drafter is not None:
            found["drafter"] = drafter
        checkpoint = open_checkpoint(found["target"].path)
        layout: Any = found["target"].source.layout or None
        config = config_beside(found["target"].path, layout)
        size = as_stated(size, config, found["target"].path)
        target = load_target(
            checkpoint,
            size,
            layout,
            config=config,
            dtype=dtype,
            device=device,
            advice=f"Type `lantern-bench weights get {name}`, or name the file's own model.",
        )
        parts = Parts(
            target,
            None if drafter is None else load_drafter(drafter.folder, target, dtype=dtype, device=device),
            self.load_tokenizer(found["tokenizer"].path, device),
        )
        text = self._optional(name, "text_encoder")
        return loaded_model(
            name,
            size,
            parts,
            {part: one_hash(hashes_of(files)) for part, files in found.items()},
            text_encoder=text.folder if text is not None else None,
            table_folder=found["tokenizer"].folder,
        )

    def build(self, name: str) -> Parts:
        """Fresh modules of the full shape, a drafter of the published shape among them."""
        from lantern_bench.models.llamagen.model import build

        return build(self._sizes[name])

    def assemble(self, name: str, parts: Parts, weights: Mapping[str, str]) -> LoadedModel:
        """Put parts that have their weights together."""
        from lantern_bench.models.llamagen.model import loaded_model

        return loaded_model(name, self._sizes[name], parts, weights, captions=False)

    def random_condition(self, name: str, parts: Parts) -> Callable[[Sequence[str]], Any]:  # noqa: ARG002
        """Random features for a caption, the same for the same text; classes are what they are."""
        from lantern_bench.models.llamagen.model import class_condition, random_features

        size = self._sizes[name]
        return random_features(size) if self.kind == "t2i" else class_condition(size.classes)

    # ----

    def _card(self, name: str, size: LlamaGenSize) -> ModelCard:
        side, stem = size.grid[0], name.rsplit("-", 1)[0]
        usual = _TOP_CLASSES.get(stem, 384)
        return ModelCard(
            name=name,
            family=self.name,
            description=f"{_ABOUT[self.kind]}, {16 * side}x{16 * side} px, {size.parameters / 1e6:,.0f}M parameters",
            defaults=_DEFAULTS[self.kind],
            prompt_set="examples",
            licence="MIT",
            weights=ExpectedPaths(name) if name in SOURCES else {},
            vocab_size=size.vocab_size,
            tokens=size.tokens,
            parameters=size.parameters,
            classes=size.classes if self.kind == "c2i" else None,
            also_called=(stem,) if self.kind == "c2i" and name.endswith(f"-{usual}") else (),
        )

    def _named(self, file: ModelFile) -> LlamaGenSize | None:
        """The published size that `family:` names, if it is a model's name."""
        for card in self.cards():
            if file.family in (card.name, *card.also_called):
                return self._sizes[card.name]
        return None

    def _known(self, file: ModelFile, *wanted: str) -> dict[str, Any]:
        """The sizes in a file and, for what is wanted besides, in its checkpoint; classes only where there are any."""
        from lantern_bench.models.llamagen.checkpoint import known_sizes

        names = [name for name in wanted if name != "classes" or self.kind == "c2i"]
        return known_sizes(file, self.kind, self._named(file), names)

    def _check(self, text: str, classes: int) -> None:
        if self.kind == "c2i":
            from lantern_bench.models.default_prompts import class_number

            class_number(text, classes)
        elif not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def _optional(self, name: str, part: str) -> Found | None:
        known = {one.name for one in SOURCES.get(name, ())}
        return find_part(name, part) if part in known else None


def one_hash(hashes: Mapping[str, str]) -> str:
    """The hash of a part of several files, from theirs."""
    import hashlib

    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("".join(hashes[name] for name in sorted(hashes)).encode()).hexdigest()


T2I = LlamaGenFamily("t2i")
C2I = LlamaGenFamily("c2i")
