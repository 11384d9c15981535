"""Janus-Pro (arXiv 2501.17811) in the transformers layout: a Llama decoder over image codes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_bench.models.checkpoint_model import FAMILIES
from lantern_bench.models.families.word_model import Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


_JANUS_START = "<｜begin▁of▁sentence｜>"
_ALIGNER = "model.generation_aligner."
_PAD = "<｜▁pad▁｜>"
_BEGIN_IMAGE = "<begin_of_image>"


class Janus(WordModel):
    """Janus-Pro 1B and 7B."""

    family_spec = FAMILIES["janus"]

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json. Image tokens are embedded after the words."""
        image_size = self.whole_number("vision_config.image_size")
        side = image_size // self.whole_number("vision_config.patch_size")
        if self.file is not None and self.file.grid not in (None, (side, side)):
            rows, columns = self.file.grid or ()
            raise self.file.error_at(
                "grid",
                f"[{rows}, {columns}]: this Janus draws {side}x{side} codes, as image_size and "
                "patch_size in its config.json say",
                "Leave grid out.",
            )
        return self.llama_config(
            "text_config",
            grid=(side, side),
            head_layer=True,
            text_vocab_size=self.whole_number("text_config.vocab_size") + len(self.token_ids),
        )

    def image_words(self) -> Sequence[int]:
        """Return the rows of the embedding after the words."""
        first = self.whole_number("text_config.vocab_size")
        return range(first, first + self.whole_number("vq_config.num_embeddings"))

    def wording(self) -> Wording:
        """Return a turn of the user, then the start of an answer with an image."""
        return Wording(
            template="<|User|>: {caption}\n\n<|Assistant|>:",
            before=(_JANUS_START,),
            after=(_BEGIN_IMAGE,),
        )

    def unconditional(self, prompt: list[int]) -> list[int]:
        """Return the prompt with padding for its words."""
        return [prompt[0], *[self.vocabulary[_PAD]] * (len(prompt) - 2), prompt[-1]]

    def prompt_tokens(self, caption: str) -> list[int]:
        """Return the prompt of a caption without the spaces around it."""
        return super().prompt_tokens(caption.strip())

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map of a Llama. Rows of image tokens go through the aligner, once."""
        from lantern_bench.models.checkpoints.key_map import LLAMA, Slice, llama_key_map

        kind = self.section("text_config").get("model_type")
        if kind not in ("llama", None):
            raise self.error_at("text_config.model_type", f"is {kind}, and only llama is supported")
        names = {
            **LLAMA,
            "model.": "model.language_model.",
            "transformer.head_layer.": "model.generation_head.proj_out.",
            "lm_head.": "model.generation_head.vision_head.",
        }
        keys = llama_key_map(target, target.config, names)

        table = "model.generation_embeddings.weight"
        codes = self.sizes.vocab_size
        for needed in (table, f"{_ALIGNER}fc1.weight"):
            checkpoint.require(needed, self.family_spec.kind)
        (words,) = keys["transformer.tok_embeddings.weight"]
        words = words._replace(rows=(self.sizes.text_vocab_size or 0) - codes)
        images = Slice(
            table,
            rows=codes,
            prepare=functools.partial(_aligned, checkpoint=checkpoint),
            file_shape=(codes, checkpoint[table].shape[-1]),
        )
        keys["transformer.tok_embeddings.weight"] = (words, images)
        return keys


def _aligned(rows: Tensor, checkpoint: Checkpoint) -> Tensor:
    """Apply the aligner of a checkpoint, linear layers with a GELU between them."""
    from torch.nn import functional

    weights = [
        name for name in checkpoint if name.startswith(_ALIGNER) and name.endswith(".weight")
    ]
    rows = rows.float()
    for number, name in enumerate(sorted(weights)):
        if number:
            rows = functional.gelu(rows)
        bias = name.removesuffix("weight") + "bias"
        rows = functional.linear(rows, checkpoint[name].float(), checkpoint[bias].float())
    return rows
