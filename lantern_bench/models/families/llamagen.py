"""LlamaGen (arXiv 2406.06525): text-conditional with T5 features, and class-conditional (ImageNet).

A checkpoint's shapes do not tell all sizes: they come from what `family:` names, config.json and the model file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from lantern_bench.models.checkpoint_model import CheckpointModel, Published, layout_of
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_numbers,
)
from lantern_bench.prompts.prompt import class_number, some_classes
from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.conditions import Condition, Prompts
    from lantern_bench.models.networks.target import TransformerTarget


# Table 1: width, layers, heads, and parameters of the class-conditional model.
_SCALES = {
    "B": (768, 12, 12, 110_888_448),
    "L": (1024, 24, 16, 342_910_976),
    "XL": (1280, 36, 20, 774_699_520),
    "XXL": (1536, 48, 24, 1_410_972_672),
    "3B": (3200, 24, 32, 3_096_659_200),
}
# Names of the official code -> those of a config.json of transformers.
_OFFICIAL = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
}
_OTHERS = "vocab_size intermediate_size multiple_of ffn_dim_multiplier cls_token_num block_size num_classes caption_dim"
_KEYS = (*_OFFICIAL, *_OFFICIAL.values(), *_OTHERS.split(), "class_dropout_prob", "class_dropout_p")
_KEYS += ("model_type", "input_type")


def _scale(scale: str) -> Mapping[str, Any]:
    dim, layers, heads, _ = _SCALES[scale]
    return {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads}


def key_map(target: TransformerTarget, layout: str) -> KeyMap:
    """Return the key map of a layout, official or hf, onto a target."""
    from lantern_bench.models.checkpoints.key_map import LLAMA, llama_key_map, same_names

    if layout == "official":
        return same_names(target, lambda name: name.removeprefix("transformer."))
    return llama_key_map(target, target.config, {**LLAMA, "cls_embedding.": "model.cls_embedding."})


class LlamaGen(CheckpointModel):
    """What both kinds of condition share."""

    licence = hub.LICENCES["mit"].name
    ignored = r".*(freqs_cis|causal_mask|[kv]_cache|inv_freq)$"
    vq_layout = "llamagen"
    positions: ClassVar[int]  # of the condition, where no file states them

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What is stated of the target, by the names of a config.json."""
        stated = super().config
        config = {_OFFICIAL.get(key, key): value for key, value in stated.items()}
        if "rope_base" in stated:
            # The HF conversion rotates by rope_base; its config.json also has the rope_theta of every Llama.
            config["rope_theta"] = stated["rope_base"]
        return config

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of the published model, changed by config.json and the model file."""
        for name in (self.file and self.file.target.config) or ():
            if name not in _KEYS and (
                near := difflib.get_close_matches(str(name), _KEYS, n=1, cutoff=0.82)
            ):
                raise self.wrong(str(name), f"unknown; did you mean {near[0]}?")
        sizes = {"text_vocab_size": 16384, **llama_sizes(self.config, self.wrong, positions="grid")}
        for field, key in {
            "dim": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
        }.items():
            if field not in sizes:
                advice = "State it in target: {config: {...}}, or name the published model: family: llamagen-c2i-B-256."
                raise self.wrong(key, "missing: no checkpoint states it", advice)
        ffn_dim = int(8 * sizes["dim"] / 3)
        multiple = self.numbers["multiple_of"]
        ffn_dim = int(self.numbers["ffn_dim_multiplier"] * ffn_dim)
        sizes.setdefault("ffn_dim", -(-ffn_dim // multiple) * multiple)
        vocab_size = sizes.pop("text_vocab_size")
        prefix = self.numbers["cls_token_num"]
        return TransformerConfig(vocab_size, prefix=prefix, grid=self._grid(), **sizes)

    @cached_property
    def numbers(self) -> Mapping[str, Any]:
        """What only LlamaGen's config states, or the published values; raises `UserError` for impossible ones."""
        usual = {"cls_token_num": self.positions, "num_classes": 1000, "caption_dim": 2048}
        usual |= {"multiple_of": 256, "ffn_dim_multiplier": 1, "block_size": 0}
        return usual | read_numbers(
            self.config,
            {key: key for key in usual},
            self.wrong,
            fractions=("ffn_dim_multiplier",),
        )

    def _grid(self) -> tuple[int, int]:
        """The grid of the model file, of the named model, or of a square picture."""
        if grid := (self.file and self.file.grid) or self.row.grid:
            return grid
        block = self.numbers["block_size"]
        side = math.isqrt(block)
        if not block or side * side != block:
            problem = "missing: the weights do not tell it"
            advice = "Give grid: [rows, columns] of tokens."
            raise (
                self.file.wrong("grid", problem, advice)
                if self.file
                else UserError(f"grid: {problem}", advice)
            )
        return side, side

    def wrong(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a key of the target's config, by the name that the file has."""
        stated = (self.file and self.file.target.config) or {}
        official = next(
            (name for name, other in _OFFICIAL.items() if other == key and name in stated), key
        )
        return super().wrong(official, text, advice)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map of the layout; raises `UserError` for a checkpoint for another grid."""
        # Stages have tensors of the same shapes.
        signs: dict[str, int] = {}  # what states the number of a picture's tokens
        for name in filter(checkpoint.__contains__, ("freqs_cis", "model.freqs_cis")):
            # The rows of the prefix are zeros, and so is the HF conversion's margin behind the grid.
            rows = int(checkpoint[name].flatten(1).any(dim=1).sum())
            signs[f"its position table ({name})"] = rows
        if isinstance(size := checkpoint.settings.get("image_size"), int):
            side = size // int(checkpoint.settings.get("downsample_size") or 16)
            signs[f"the training it records (image_size {size})"] = side * side
        if block := self.numbers["block_size"]:
            signs[f"its config (block_size {block})"] = block
        for sign, tokens in signs.items():
            if tokens != self.tokens:
                side = math.isqrt(tokens)
                square = (
                    f"a {side}x{side} grid ({tokens} tokens)"
                    if side * side == tokens
                    else f"{tokens} tokens"
                )
                rows, columns = self.sizes.grid
                raise UserError(
                    f"{checkpoint.path}: is of another stage: {sign} is for {square}, "
                    f"and this model's grid is {rows}x{columns} ({self.tokens} tokens)",
                    "Give the grid the checkpoint was trained for, or the checkpoint of this grid.",
                )
        return key_map(target, layout_of(checkpoint))


class TextToImage(LlamaGen):
    """Captions, through FLAN-T5-XL."""

    family = "llamagen-t2i"
    # the README, section 5
    defaults: Mapping[str, Any] = {"cfg_scale": 7.5, "top_k": 1000, "tree": "eagle1-25"}
    published: ClassVar = {
        "llamagen-t2i-stage1": Published(
            about="text-conditional LlamaGen",
            config=_scale("XL"),
            vq={},
            grid=(16, 16),
            parameters=777_923_840,
        ),
        "llamagen-t2i-stage2": Published(
            about="text-conditional LlamaGen",
            config=_scale("XL"),
            vq={},
            grid=(32, 32),
            parameters=777_923_840,
        ),
    }
    any_model = Published(
        about="text-conditional LlamaGen", config={}, vq={}, grid=None, aliases=("llamagen",)
    )
    kind = ("cls_embedding.uncond_embedding", "LlamaGen, text-conditional")
    positions = 120

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.conditions import CaptionFeatures
        from lantern_bench.models.networks.target import TransformerTarget

        sizes = self.sizes
        return TransformerTarget(
            sizes, CaptionFeatures(sizes.prefix, self.numbers["caption_dim"], sizes.dim)
        )

    def prompts(self, target: TransformerTarget, invented: bool = False) -> Prompts:
        """Return captions through the text encoder."""
        from lantern_bench.models.networks.conditions import Prompts
        from lantern_bench.models.networks.t5 import CaptionEncoder, no_encoder, random_features
        from lantern_bench.utils.files import cache_folder

        positions = self.sizes.prefix
        width = self.numbers["caption_dim"]
        if invented:
            return Prompts(random_features(positions, width))
        folder = self.paths.get("text_encoder")
        if folder is None:
            return no_encoder(self.name)
        encoder = CaptionEncoder(
            folder,
            cache=cache_folder() / "features",
            positions=positions,
            width=width,
            device=target.device,
            dtype=target.dtype,
        )
        return Prompts(encoder, encoder.prepare, encoder.sha256)


class ClassToImage(LlamaGen):
    """ImageNet classes."""

    family = "llamagen-c2i"

    # the README's demos
    defaults: Mapping[str, Any] = {"cfg_scale": 4.0, "top_k": 2000, "tree": "eagle1-25"}
    published: ClassVar = {
        f"llamagen-c2i-{scale}-{16 * side}": Published(
            about="class-conditional LlamaGen (ImageNet)",
            config=_scale(scale),
            vq={},
            grid=(side, side),
            parameters=parameters,
            # The best published size of picture has the short name.
            aliases=(f"llamagen-c2i-{scale}",) if (side == 16) == (scale in ("B", "L")) else (),
        )
        for scale, (*_, parameters) in _SCALES.items()
        for side in (16, 24)
    }
    any_model = Published(
        about="class-conditional LlamaGen (ImageNet)", config={}, vq={}, grid=None
    )
    kind = ("cls_embedding.embedding_table.weight", "LlamaGen, class-conditional")
    positions = 1

    @cached_property
    def classes(self) -> int:  # type: ignore[override]  # mypy takes it for read-only
        """The number of classes; raises `UserError` for a model without a null class."""
        for key in ("class_dropout_prob", "class_dropout_p"):
            if self.config.get(key) == 0:
                text = "0: the model was trained without a null class, and guidance needs one"
                raise self.wrong(key, text, "Its last class would be taken for the null class.")
        return self.numbers["num_classes"]

    @cached_property
    def prompt_sets(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]  # mypy takes it for read-only
        """Some of ImageNet's classes."""
        return {"examples": some_classes(self.classes)}

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a text that names no class."""
        class_number(text, self.classes)

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.conditions import ClassLabel
        from lantern_bench.models.networks.target import TransformerTarget

        return TransformerTarget(self.sizes, ClassLabel(self.classes, self.sizes.dim))

    def prompts(self, target: TransformerTarget, invented: bool = False) -> Prompts:  # noqa: ARG002
        """Return classes as labels, which the target embeds."""
        import torch

        from lantern_bench.models.networks.conditions import Condition, Prompts

        def condition(prompts: Sequence[str]) -> Condition:
            labels = torch.tensor([class_number(text, self.classes) for text in prompts])
            return Condition(labels, torch.ones(len(labels), 1, dtype=torch.bool))

        return Prompts(condition)
