"""LlamaGen (arXiv 2406.06525): text-conditional with T5 features, and class-conditional (ImageNet).

The shapes of a checkpoint do not tell all sizes. The sizes come from the published model that
`family:` names, from config.json and from the model file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lantern_bench.models.checkpoint_model import FAMILIES, CheckpointModel, layout_of
from lantern_bench.models.networks.t5_files import check_encoder, no_encoder
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_number,
)
from lantern_bench.prompts.prompt import class_number, some_classes
from lantern_bench.utils.errors import LanternError, UserError
from lantern_bench.utils.files import cache_folder, weights_in
from lantern_bench.utils.text import listed

if TYPE_CHECKING:
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import Condition, Prompts, TransformerTarget


# Keys of the official code, and of a config.json of transformers.
_OFFICIAL = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
}
_OTHERS = (
    "vocab_size intermediate_size multiple_of ffn_dim_multiplier cls_token_num block_size "
    "num_classes caption_dim class_dropout_prob class_dropout_p model_type input_type"
)
_KEYS = (*_OFFICIAL, *_OFFICIAL.values(), *_OTHERS.split())
_REQUIRED = {"dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}


def key_map(target: TransformerTarget, layout: str) -> KeyMap:
    """Return the key map of a layout, official or hf."""
    from lantern_bench.models.checkpoints.key_map import LLAMA, llama_key_map, same_names

    if layout == "official":
        return same_names(target, lambda name: name.removeprefix("transformer."))
    return llama_key_map(target, target.config, {**LLAMA, "cls_embedding.": "model.cls_embedding."})


class LlamaGen(CheckpointModel):
    """The base class of class-conditional and text-conditional models."""

    def with_one_name(self, stated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config of one source by the keys of transformers.

        Raises:
            UserError: A size has two names with different values.
        """
        config = dict(super().with_one_name(stated))
        for official, key in _OFFICIAL.items():
            value = config.pop(official, None)
            if value is None:
                continue
            # The HF conversion rotates by rope_base. Its config.json also has a Llama's rope_theta.
            if official != "rope_base" and config.get(key) not in (None, value):
                raise self.error_at(official, f"is {value}, and {key} is {config[key]}")
            config[key] = value
        return config

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of the published model, changed by config.json and the model file."""
        for name in self.file_config:
            near = difflib.get_close_matches(str(name), _KEYS, n=1, cutoff=0.82)
            if name not in _KEYS and near:
                raise self.error_at(str(name), f"unknown; did you mean {near[0]}?")
        sizes = llama_sizes(self.config, self.error_at, positions="grid", read=_KEYS)
        for field, key in _REQUIRED.items():
            if field not in sizes:
                raise self.error_at(
                    key,
                    "missing: no checkpoint states it",
                    "State it in target: {config: {...}}, or name the published model: "
                    "family: llamagen-c2i-B-256.",
                )
        multiple = self.numbers["multiple_of"]
        ffn_dim = int(self.numbers["ffn_dim_multiplier"] * int(8 * sizes["dim"] / 3))
        sizes.setdefault("ffn_dim", -(-ffn_dim // multiple) * multiple)
        return TransformerConfig(
            vocab_size=sizes.pop("text_vocab_size"),
            prefix=self.numbers["cls_token_num"],
            grid=self.grid or self._square_grid(),
            **sizes,
        )

    @cached_property
    def numbers(self) -> Mapping[str, Any]:
        """Numbers that only LlamaGen's config states."""
        names = "cls_token_num num_classes caption_dim multiple_of ffn_dim_multiplier block_size"
        return {
            key: read_number(key, self.config[key], self.error_at)
            for key in names.split()
            if self.config.get(key) is not None
        }

    def _square_grid(self) -> tuple[int, int]:
        """Return the grid of a square picture of `block_size` tokens."""
        tokens = self.numbers.get("block_size", 0)
        side = math.isqrt(tokens)
        if tokens and side * side == tokens:
            return side, side
        assert self.file is not None  # published models have a grid
        raise self.file.error_at(
            "grid",
            "missing: the weights do not tell it",
            "Give grid: [rows, columns] of tokens.",
        )

    def error_at(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a key of the target's config, by its name in the file.

        Args:
            key: The key of transformers.
            text: What is wrong with its value.
            advice: What to do.
        """
        for official, other in _OFFICIAL.items():
            if other == key and official in self.file_config:
                key = official
        return super().error_at(key, text, advice)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map of the layout. Raises `UserError` for a checkpoint of another grid."""
        for sign, tokens in self._signs(checkpoint).items():
            if tokens == self.tokens:
                continue
            side = math.isqrt(tokens)
            theirs = f"{tokens} tokens"
            if side * side == tokens:
                theirs = f"a {side}x{side} grid ({theirs})"
            rows, columns = self.sizes.grid
            raise UserError(
                f"{checkpoint.path}: is of another stage: {sign} is for {theirs}, "
                f"and this model's grid is {rows}x{columns} ({self.tokens} tokens)",
                "Give the grid the checkpoint was trained for, or the checkpoint of this grid.",
            )
        layout = layout_of(checkpoint)
        if "lm_head.weight" in checkpoint:
            self.head_key(checkpoint, "model.embed_tokens.weight")
        return key_map(target, layout)

    def _signs(self, checkpoint: Checkpoint) -> dict[str, int]:
        """Return every statement of the number of a picture's tokens.

        The tensors of both stages have the same shapes.
        """
        signs: dict[str, int] = {}
        for name in ("freqs_cis", "model.freqs_cis"):
            if name in checkpoint:
                # The rows of the prefix are zeros, and so is the margin of the HF conversion.
                rows = checkpoint[name].flatten(1).any(dim=1)
                signs[f"its position table ({name})"] = int(rows.sum())
        size = checkpoint.settings.get("image_size")
        if isinstance(size, int):
            side = size // int(checkpoint.settings.get("downsample_size") or 16)
            signs[f"the training it records (image_size {size})"] = side * side
        block = self.numbers.get("block_size")
        if block:
            signs[f"its config (block_size {block})"] = block
        return signs


class TextToImage(LlamaGen):
    """Captions, through FLAN-T5-XL."""

    family_spec = FAMILIES["llamagen-t2i"]

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.target import CaptionFeatures, TransformerTarget

        sizes = self.sizes
        return TransformerTarget(
            sizes, CaptionFeatures(sizes.prefix, self.numbers["caption_dim"], sizes.dim)
        )

    def missing(self, *, drafter: bool) -> list[LanternError]:
        """Return the errors for parts that are not here, and of an unfit text encoder.

        Args:
            drafter: Whether the drafter is needed.
        """
        errors = super().missing(drafter=drafter)
        folder = self.files().get("text_encoder")
        if folder is None:
            return [*errors, no_encoder(self.name)]
        if folder.is_dir():
            try:
                check_encoder(folder, self.numbers["caption_dim"])
            except LanternError as error:
                errors.append(error)
        return errors

    def prompts(self, target: TransformerTarget) -> Prompts:
        """Return captions through the text encoder."""
        from lantern_bench.models.networks.t5 import CaptionEncoder, refuse_captions
        from lantern_bench.models.networks.target import Prompts

        folder = self.paths.get("text_encoder")
        if folder is None:
            return refuse_captions(self.name)._replace(stand_in=self.random_prompts().condition)
        kinds = weights_in(folder)
        if len(kinds) > 1:
            self.remarks.append(f"{folder}: has {listed(kinds)}; {kinds[0]} is read")
        encoder = CaptionEncoder(
            folder,
            cache=cache_folder() / "features",
            positions=self.sizes.prefix,
            width=self.numbers["caption_dim"],
            device=target.device,
            dtype=target.dtype,
        )
        return Prompts(encoder, encoder.prepare, encoder.sha256)

    def random_prompts(self) -> Prompts:
        """Return captions as random features."""
        from lantern_bench.models.networks.t5 import random_features
        from lantern_bench.models.networks.target import Prompts

        return Prompts(random_features(self.sizes.prefix, self.numbers["caption_dim"]))


class ClassToImage(LlamaGen):
    """ImageNet classes."""

    family_spec = FAMILIES["llamagen-c2i"]

    @cached_property
    def classes(self) -> int:  # type: ignore[override]  # mypy takes it for read-only
        """The number of classes. Raises `UserError` for a model without a null class."""
        for key in ("class_dropout_prob", "class_dropout_p"):
            if self.config.get(key) == 0:
                raise self.error_at(
                    key,
                    "0: the model was trained without a null class, and guidance needs one",
                    "Its last class would be taken for the null class.",
                )
        return self.numbers["num_classes"]

    @cached_property
    def prompt_sets(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]  # as `classes`
        """Some of ImageNet's classes."""
        return {"examples": some_classes(self.classes)}

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a text that names no class."""
        class_number(text, self.classes)

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.target import ClassLabel, TransformerTarget

        return TransformerTarget(self.sizes, ClassLabel(self.classes, self.sizes.dim))

    def random_prompts(self) -> Prompts:
        """Return class labels, which the target embeds. They need no files."""
        import torch

        from lantern_bench.models.networks.target import Condition, Prompts

        def condition(prompts: Sequence[str]) -> Condition:
            labels = torch.tensor([class_number(text, self.classes) for text in prompts])
            return Condition(labels, torch.ones(len(labels), 1, dtype=torch.bool))

        return Prompts(condition)
