"""Chameleon (arXiv 2405.09818) as Anole and Lumina-mGPT publish it, and Lumina-mGPT 2.0.

Lumina-mGPT 2.0 (arXiv 2507.17801) follows Alpha-VLLM/Lumina-mGPT-2.0 at `f44a4d7f`. Its weights
were not tried (docs/chameleon.md).
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_bench.models.checkpoint_model import FAMILIES
from lantern_bench.models.families.word_model import Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig, check_options
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_json

if TYPE_CHECKING:
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


_ROW_END = "<reserved08799>"
_IMAGE = "<racm3:break>"
_TURN = "<reserved08706>"
# Options of transformers' Chameleon, and their values in published checkpoints.
_ONLY = {"model_type": ("chameleon", "chameleon_xllmx", None), "tie_word_embeddings": (False, None)}


class Chameleon(WordModel):
    """Anole."""

    family_spec = FAMILIES["anole"]

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json. The number of codes follows from the vocabulary."""
        check_options(self.config, _ONLY, self.error_at)
        return self.llama_config(
            "",
            read=("swin_norm",),
            qk_norm=True,
            norm_after=bool(self.config.get("swin_norm")),
        )

    def image_words(self) -> Sequence[int]:
        """Return the words `IMGIMG<digits as letters A to J>Z`, then the end of a row if used."""
        digits = str.maketrans("ABCDEFGHIJ", string.digits)
        codes = self.vocabulary.codes_named(
            "IMGIMG([A-J]+)Z", lambda letters: int(letters.translate(digits))
        )
        return (*codes, self.vocabulary[_ROW_END]) if self.line_ends else codes

    def wording(self) -> Wording:
        """Return the caption alone."""
        return Wording(template="{caption}", before=(self.start,), after=(_TURN, _IMAGE))

    def unconditional(self, prompt: list[int]) -> list[int]:
        """Return the start of the text and the start of the image."""
        return [prompt[0], prompt[-1]]

    @property
    def start(self) -> str:
        """The token before a prompt."""
        return "<s>"

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map of transformers' Llama.

        In the authors' layout all heads of a parallel part share a row of the norms.
        """
        import torch

        from lantern_bench.models.checkpoints.key_map import llama_key_map, rows_of_tokens

        keys = llama_key_map(target, target.config)
        keys["transformer.output.weight"] = (rows_of_tokens("lm_head.weight", target.config),)
        for name, tensor in target.state_dict().items():
            if not re.search(r"\.[qk]_norm\.", name):
                continue
            (norm,) = keys[name]
            heads, width = tensor.shape
            rows = checkpoint[norm.key].shape[0] if norm.key in checkpoint else heads
            if rows < heads and heads % rows == 0:
                repeat = functools.partial(torch.repeat_interleave, repeats=heads // rows, dim=0)
                keys[name] = (norm._replace(prepare=repeat, file_shape=(rows, width)),)
        return keys


class Lumina(Chameleon):
    """Lumina-mGPT. The prompt states the size of the picture, and a token ends each row."""

    family_spec = FAMILIES["lumina"]
    line_ends = True

    def wording(self) -> Wording:
        """Return the size in words before the caption, and in tokens after it."""
        rows, columns = self.sizes.grid
        pixels = self.family_spec.pixels
        height = rows * pixels
        width = columns * pixels
        if height % 32 or width % 32:
            raise UserError(
                f"grid {rows}x{columns}: this model's pictures have a multiple of "
                f"{32 // pixels} of each"
            )
        sides = [f"<reserved{8800 + side // 32:05d}>" for side in (height, width)]
        return Wording(
            template=(
                f"Generate an image of {width}x{height} according to the following prompt:\n"
                "{caption}"
            ),
            before=(self.start,),
            after=(_TURN, _IMAGE, *sides),
        )

    def unconditional(self, prompt: list[int]) -> list[int]:
        """Return the start of the image and its size."""
        return prompt[-3:]


class Lumina2(Lumina):
    """Lumina-mGPT 2.0, with another vocabulary, and MoVQGAN as the tokenizer."""

    family_spec = FAMILIES["lumina-mgpt2"]

    def image_words(self) -> Sequence[int]:
        """Return the words. Code n is word `first_code` + n, as in the authors' code."""
        first = self.whole_number("first_code")
        codes = range(first, first + self.whole_number("codes"))
        return (*codes, self.vocabulary[_ROW_END])

    @property
    def start(self) -> str:
        """The tokenizer's start of text, or its end if it has no start."""
        path = self._tokenizer_json.with_name("tokenizer_config.json")
        stated = read_json(path) if path.is_file() else {}
        token = stated.get("bos_token") or stated.get("eos_token") or "<|endoftext|>"
        return str(token["content"] if isinstance(token, dict) else token)
