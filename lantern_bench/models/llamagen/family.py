"""LlamaGen as `models.registry` wants it: the text-conditional and the class-conditional models, by name or by file.

Two families, because they take different prompts: captions, or ImageNet classes. Nothing here imports torch before a
model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.family import CheckpointFamily, ModelCard, config_beside
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.llamagen import PUBLISHED, Kind, LlamaGenSize, read_config
from lantern_bench.models.model import class_number, some_classes

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import Prompts
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel


# What the authors sample with: section 5 of the official README, and its demos.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t2i": {"cfg_scale": 7.5, "top_k": 1000, "tree": "eagle1-25"},
    "c2i": {"cfg_scale": 4.0, "top_k": 2000, "tree": "eagle1-25"},
}
_ABOUT = {"t2i": "text-conditional LlamaGen", "c2i": "class-conditional LlamaGen (ImageNet)"}
_TOP_CLASSES = {"llamagen-c2i-B": 256, "llamagen-c2i-L": 256}


class LlamaGenFamily(CheckpointFamily):
    """The models of one kind of condition."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.name, self.defaults = f"llamagen-{kind}", _DEFAULTS[kind]
        self._sizes = {name: size for name, size in PUBLISHED.items() if size.kind == kind}

    def cards(self) -> Sequence[ModelCard]:
        """The published models of this kind."""
        made, classes = [], self.kind == "c2i"
        for name, size in self._sizes.items():
            stem = name.rsplit("-", 1)[0]
            top = classes and name == f"{stem}-{_TOP_CLASSES.get(stem, 384)}"
            made.append(
                self.card(
                    name,
                    _ABOUT[self.kind],
                    size.grid,
                    size.parameters,
                    licence="MIT",
                    vocab_size=size.vocab_size,
                    tokens=size.tokens,
                    classes=size.classes if classes else None,
                    also_called=(stem,) if top else (),
                    sizes=size.transformer(),
                )
            )
        return made

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty caption, or for a text that names no ImageNet class."""
        self._check(text, 1000)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """A few prompts to begin with."""
        return super().prompt_sets() if self.kind == "t2i" else {"examples": some_classes(1000)}

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` is this family or one of its models; the checkpoint decides for plain `llamagen`."""
        if file.family != "llamagen":
            return file.family == self.name or self._named(file) is not None
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.llamagen.checkpoint import kind_of_checkpoint, stated_sizes

        kind = stated_sizes(file).get("kind") or kind_of_checkpoint(open_checkpoint(file.target.path))
        # The text-conditional family refuses a checkpoint that is neither, and says what it is.
        return (kind or "t2i") == self.kind

    def facts_of_file(self, file: ModelFile) -> dict[str, Any]:
        """The card's fields, from the file, its family's name and its checkpoint."""
        known, published = self._known(file, "vocab_size", "classes"), self._named(file)
        grid = file.grid or known.get("grid")
        return {
            "description": _ABOUT[self.kind],
            "vocab_size": known["vocab_size"],
            "tokens": grid[0] * grid[1] if grid is not None else known.get("block_size"),
            "parameters": published.parameters if published is not None else None,
            "classes": known["classes"] if self.kind == "c2i" else None,
        }

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """As `check_prompt`; the number of classes is the file's."""
        self._check(text, self._known(file, "classes").get("classes", 0))

    def prompt_sets_of_file(self, file: ModelFile) -> Mapping[str, tuple[str, ...]]:
        """As `prompt_sets`, of the classes that the model of the file has."""
        if self.kind == "t2i":
            return self.prompt_sets()
        return {"examples": some_classes(self._known(file, "classes")["classes"])}

    def load_target(
        self, file: ModelFile, published: bool, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...], str]:
        """As `CheckpointFamily.load_target`."""
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.llamagen.checkpoint import describe, load_target

        checkpoint = open_checkpoint(file.target.path)
        layout: Any = file.target.layout
        if published:
            # The constants that a config.json states (docs/algorithms.md, section 9, B6).
            config = config_beside(file.target.path, layout)
            stated = read_config(config, file.wrong)
            constants = {name: stated[name] for name in ("norm_eps", "rope_base") if name in stated}
            size = replace(self._sizes[file.name], **constants)
            advice = f"Type `lantern-bench weights get {file.name}`, or name the file's own model."
        else:
            size, config = describe(file, checkpoint, self.kind, self._named(file))
            advice = f"Give the grid the checkpoint was trained for in {file.path}, or the checkpoint of this grid."
        target = load_target(checkpoint, size, layout, config=config, dtype=dtype, device=device, advice=advice)
        return target, checkpoint.paths, repr(size)

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """As `CheckpointFamily.load_tokenizer`."""
        from lantern_bench.models.vq import load_vq

        return load_vq(path, device, config)

    def prompts(self, name: str, file: ModelFile, target: TransformerTarget) -> Prompts:
        """Captions through the text encoder, or classes."""
        from lantern_bench.models.llamagen.text_encoder import caption_prompts, class_condition
        from lantern_bench.models.loaded_model import Prompts

        embedding: Any = target.cls_embedding
        if self.kind == "c2i":
            return Prompts(class_condition(embedding.classes))
        folder = file.text_encoder.path if file.text_encoder is not None else None
        return caption_prompts(name, folder, embedding.uncond_embedding.shape, target.device, target.dtype)

    def random_prompts(self, name: str) -> Prompts:
        """Random features for a caption, the same for the same text; classes are what they are."""
        from lantern_bench.models.llamagen.text_encoder import class_condition, random_features
        from lantern_bench.models.loaded_model import Prompts

        size = self._sizes[name]
        return Prompts(
            random_features(size.positions, size.width) if self.kind == "t2i" else class_condition(size.classes)
        )

    def fresh_parts(self, name: str) -> tuple[TransformerTarget, VQModel]:
        """As `CheckpointFamily.fresh_parts`; the tokenizer is VQ-16."""
        from lantern_bench.models.llamagen.checkpoint import build_target
        from lantern_bench.models.vq import VQConfig, VQModel

        return build_target(self._sizes[name]), VQModel(VQConfig())

    def _named(self, file: ModelFile) -> LlamaGenSize | None:
        """The published size that `family:` names, if it is a model's name."""
        for card in self.cards():
            if file.family in (card.name, *card.also_called):
                return self._sizes[card.name]
        return None

    def _known(self, file: ModelFile, *wanted: str) -> dict[str, Any]:
        """The sizes that the file states and, where `wanted` are missing, its checkpoint tells."""
        from lantern_bench.models.llamagen.checkpoint import known_sizes

        names = [name for name in wanted if name != "classes" or self.kind == "c2i"]
        return known_sizes(file, self.kind, self._named(file), names)

    def _check(self, text: str, classes: int) -> None:
        if self.kind == "c2i":
            class_number(text, classes)
        else:
            super().check_prompt(text)


T2I = LlamaGenFamily("t2i")
C2I = LlamaGenFamily("c2i")
