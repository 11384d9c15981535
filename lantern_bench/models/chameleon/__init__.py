"""Chameleon (arXiv 2405.09818) as Anole and Lumina-mGPT publish it: sizes, vocabulary, and prompts.

No torch at import: listings and plans need only sizes. The two models share one architecture and one vocabulary; they
differ in the text around a caption, in the grid, and in that Lumina-mGPT ends each row of a picture with a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lantern_bench.errors import UserError
from lantern_bench.models.prompt_tokens import Encode, Vocabulary, token_numbers
from lantern_bench.models.transformer_config import (
    SHARED_SIZES,
    TransformerConfig,
    Wrong,
    heads_problem,
    llama_sizes,
    transformer_parameters,
)

CODES = 8192
"""The codes of the published tokenizer."""
FIRST_WORD = 9000
"""The first number that is a word of a text and no code: where invented prompts begin."""
_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


@dataclass(frozen=True)
class Style:
    """A model's prompt: the token `start`, the text of `template`, end of turn, start of image.

    `sized`: the start of image states the picture's height and width. `null`: indices of the prompt's tokens that
    form the unconditional prompt. `line_ends`: a forced token ends every row. `positions`: the longest prompt.
    `pixels`: of a code, in each direction. `first_code`: the number of code 0, where the `codes` are numbered in order
    and not found by their names.
    """

    grid: tuple[int, int]
    template: str
    sized: bool
    null: tuple[int, ...]
    line_ends: bool
    positions: int = 256

    start: str = "<s>"
    pixels: int = 16
    first_code: int | None = None
    codes: int = CODES

    @property
    def tokens(self) -> int:
        """Tokens of one picture, forced ones included."""
        return self.grid[0] * (self.grid[1] + self.line_ends)

    def text(self, caption: str) -> str:
        """The text of a caption's prompt."""
        height, width = (self.pixels * side for side in self.grid)
        return self.template.format(caption=caption, height=height, width=width)

    def around(self, text: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The whole prompt of a tokenised text."""
        # The tokens of sizes count in steps of 32 pixels.
        step = 32 // self.pixels
        if self.sized and any(side % step for side in self.grid):
            what = "an even number" if step == 2 else f"a multiple of {step}"
            raise UserError(f"grid {self.grid[0]}x{self.grid[1]}: this model's pictures have {what} of each")
        names = ["<reserved08706>", "<racm3:break>"]
        names += [f"<reserved{8800 + side // step:05d}>" for side in self.grid] if self.sized else []
        return [vocabulary[self.start], *text, *(vocabulary[name] for name in names)]

    def without_caption(
        self,
        prompt: Sequence[int],
        vocabulary: Vocabulary | None = None,  # noqa: ARG002
        encode: Encode | None = None,  # noqa: ARG002
    ) -> list[int]:
        """The unconditional prompt that goes with a prompt."""
        return [prompt[index] for index in self.null if -len(prompt) <= index < len(prompt)]


STYLES: dict[str, Style] = {
    "anole-7b": Style((32, 32), "{caption}", sized=False, null=(0, -1), line_ends=False),
    "lumina-mgpt-7b-768": Style(
        (48, 48),
        "Generate an image of {width}x{height} according to the following prompt:\n{caption}",
        sized=True,
        null=(-3, -2, -1),
        line_ends=True,
    ),
}
LUMINA_2 = replace(
    STYLES["lumina-mgpt-7b-768"],
    grid=(96, 96),
    start="<|endoftext|>",
    pixels=8,
    first_code=155000,
    codes=16384,
)
"""Lumina-mGPT 2.0 (arXiv 2507.17801); its tokenizer's files say what `start` is."""


@dataclass(frozen=True)
class ChameleonSize:
    """A size, named as `TransformerConfig` does; `words` is the whole vocabulary."""

    words: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    norm_after: bool = False

    @property
    def parameters(self) -> int:
        """The number of parameters of the published target without its image encoder."""
        head_norms = 2 * self.dim // self.heads * (self.heads + (self.kv_heads or self.heads))
        return transformer_parameters(self, self.words) + self.layers * head_norms

    def transformer(self, style: Style, token_ids: Sequence[int]) -> TransformerConfig:
        """The size as a `TransformerConfig`; `token_ids` as from `Vocabulary.token_ids`."""
        shared = {name: getattr(self, name) for name in SHARED_SIZES}
        return TransformerConfig(
            vocab_size=len(token_ids),
            prefix=style.positions,
            grid=style.grid,
            positions="sequence",
            pairs="halves",
            qk_norm=True,
            norm_after=self.norm_after,
            text_vocab_size=self.words,
            token_ids=tuple(token_ids),
            line_ends=style.line_ends,
            **shared,
        )


PUBLISHED = ChameleonSize(words=65536, dim=4096, layers=32, heads=32, ffn_dim=11008)
"""Chameleon 7B, which Anole and Lumina-mGPT were trained from."""
LUMINA_2_SIZE = replace(PUBLISHED, words=171385)
"""Lumina-mGPT 2.0, of Chameleon's architecture and trained from scratch with another vocabulary."""


class ChameleonVocabulary(Vocabulary):
    """A vocabulary whose image codes are `IMGIMG<digits as letters A to J>Z`."""

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """The number of every image code, by code; raises `UserError` where some are missing."""
        return self.codes_named("IMGIMG([A-J]+)Z", lambda letters: int(letters.translate(_DIGITS)))

    def token_ids(self, style: Style) -> tuple[int, ...]:
        """The numbers of an image's tokens: the codes and, if rows have ends, the end of a row."""
        first = style.first_code
        codes = self.codes if first is None else tuple(range(first, first + style.codes))
        return (*codes, self["<reserved08799>"]) if style.line_ends else codes


def chameleon_vocabulary(config: Mapping[str, Any], tokenizer: Path, source: str) -> ChameleonVocabulary:
    """The vocabulary of a model: the `vocabulary_map` of its config, and its tokenizer.json where there is one."""
    ids, source = token_numbers(config.get("vocabulary_map"), tokenizer, source)
    return ChameleonVocabulary(ids, source, "a Chameleon model")


def published_vocabulary() -> ChameleonVocabulary:
    """The published numbers of the tokens that a picture needs, for models without files."""
    ids = {"<s>": 0, "<racm3:break>": 8197, "<reserved08706>": 8710}
    ids |= {f"<reserved{number:05d}>": number + 4 for number in range(8799, 8799 + 34)}
    ids |= {f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": code + 4 for code in range(CODES)}
    return ChameleonVocabulary(ids, "the published vocabulary", "a Chameleon model")


# Options of transformers' Chameleon that no published checkpoint uses.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("chameleon", "chameleon_xllmx", None),
    "tie_word_embeddings": (False, None),
}


def published_vocabulary_2() -> ChameleonVocabulary:
    """The numbers of the tokens that a picture of Lumina-mGPT 2.0 needs, for models without files.

    Those of the start and the end of an image are published; the others are invented, because no file was seen.
    """
    ids = {"<|endoftext|>": 151643, "<racm3:break>": 151665, "<eoss>": 151666, "<reserved08706>": 151667}
    ids |= {f"<reserved{number:05d}>": number - 8799 + 151668 for number in range(8799, 8799 + 130)}
    return ChameleonVocabulary(ids, "the published vocabulary", "Lumina-mGPT 2.0")


def read_config(config: Mapping[str, Any], wrong: Wrong, usual: ChameleonSize = PUBLISHED) -> ChameleonSize:
    """The size that a config.json states; the size `usual` fills what it leaves out.

    Raises what `wrong(key, text)` returns for impossible values, and for options that this transformer lacks.
    """
    for key, allowed in _ONLY.items():
        if config.get(key) not in allowed:
            raise wrong(key, f"is {config[key]}, and Chameleon's is {allowed[0]}")
    said = llama_sizes(config, wrong)
    if "text_vocab_size" in said:
        said["words"] = said.pop("text_vocab_size")
    size = replace(usual, **said, norm_after=bool(config.get("swin_norm")))
    if (problem := heads_problem(size.dim, size.heads, size.kv_heads, "sequence")) is not None:
        raise wrong(*problem)
    return size
