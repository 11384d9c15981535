"""Emu3-Gen (arXiv 2409.18869) in the transformers layout: a Llama decoder over image codes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_bench.models.checkpoint_model import FAMILIES
from lantern_bench.models.families.word_model import Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


_EMU3_START = "<|extra_203|>"
_ROW_END = "<|extra_200|>"
_IMAGE_START = "<|image start|>"
_IMAGE = "<|image token|>"
_GOOD = " masterpiece, film grained, best quality."
_BAD = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)


class Emu3(WordModel):
    """Emu3-Gen 8B."""

    family_spec = FAMILIES["emu3"]
    line_ends = True

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json."""
        return self.llama_config("text_config")

    def image_words(self) -> Sequence[int]:
        """Return the codes by name, and the end of a spec."""
        codes = self.vocabulary.codes_named(r"<\|visual token (\d+)\|>")
        stated = self.whole_number("vq_config.codebook_size")
        if len(codes) != stated:
            raise UserError(
                f"config.json: the vocabulary has {len(codes)} image codes, and "
                f"vq_config.codebook_size is {stated}",
                "Download the folder again.",
            )
        # Raises for a missing token, which prompts would replace by other tokens.
        _ = self.vocabulary[_IMAGE_START], self.vocabulary[_IMAGE]
        return (*codes, self.vocabulary[_ROW_END])

    def wording(self) -> Wording:
        """Return a caption with words of praise, then the size of the picture in tokens."""
        return Wording(
            template=f"{{caption}}{_GOOD}{self._size()}", before=(_EMU3_START,), after=()
        )

    def unconditional(self, prompt: list[int]) -> list[int]:  # noqa: ARG002
        """Return a list of faults, then the size of the picture."""
        return [self.vocabulary[_EMU3_START], *self.encode(_BAD + self._size())]

    def _size(self) -> str:
        rows, columns = self.sizes.grid
        return f"{_IMAGE_START}{rows}*{columns}{_IMAGE}"

    def rename_tensor(self, name: str) -> str:
        """Rename tensors as today's transformers calls them; some of its versions wrote others."""
        name = re.sub(r"^(model\.)?text_model\.lm_head\.", "lm_head.", name)
        name = re.sub(r"^(model\.)?text_model\.(model\.)?", "model.text_model.", name)
        return re.sub(r"^vqmodel\.", "model.vqmodel.", name)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map of a Llama."""
        from lantern_bench.models.checkpoints.key_map import LLAMA, llama_key_map, rows_of_tokens

        keys = llama_key_map(target, target.config, {**LLAMA, "model.": "model.text_model."})
        embedding = "model.text_model.embed_tokens.weight"
        head = self.head_key(checkpoint, embedding, "text_config")
        keys["transformer.output.weight"] = (rows_of_tokens(head, target.config),)
        return keys
