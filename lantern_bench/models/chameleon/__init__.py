"""Chameleon (arXiv 2405.09818) as Anole and Lumina-mGPT publish it: sizes, vocabulary, and prompts.

No torch at import: listings and plans need only sizes. The two models share one architecture and one vocabulary; they
differ in the text around a caption, in the grid, and in that Lumina-mGPT ends each row of a picture with a token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.transformer import (
    SHARED_SIZES,
    TransformerConfig,
    Wrong,
    heads_problem,
    read_sizes,
    transformer_parameters,
)

if TYPE_CHECKING:
    import numpy as np

    from lantern_bench.models.transformer.conditioning import Condition

CODES = 8192
"""The codes of the published tokenizer."""
_FIRST_WORD = 9000


@dataclass(frozen=True)
class Style:
    """A model's prompt: `<s>`, the text of `template`, end of turn, start of image.

    `sized`: the start of image states the picture's height and width. `null`: indices of the prompt's tokens that
    form the unconditional prompt. `line_ends`: a forced token ends every row. `positions`: the longest prompt.
    """

    grid: tuple[int, int]
    template: str
    sized: bool
    null: tuple[int, ...]
    line_ends: bool
    positions: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of one picture, forced ones included."""
        return self.grid[0] * (self.grid[1] + self.line_ends)

    def text(self, caption: str) -> str:
        """The text of a caption's prompt."""
        height, width = (16 * side for side in self.grid)
        return self.template.format(caption=caption, height=height, width=width)

    def around(self, text: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The whole prompt of a tokenised text."""
        if self.sized and any(side % 2 for side in self.grid):
            raise UserError(f"grid {self.grid[0]}x{self.grid[1]}: this model's pictures have an even number of each")
        names = ["<reserved08706>", "<racm3:break>"]
        # The tokens of sizes count in steps of 32 pixels, which are two rows or columns of codes.
        names += [f"<reserved{8800 + side // 2:05d}>" for side in self.grid] if self.sized else []
        return [vocabulary["<s>"], *text, *(vocabulary[name] for name in names)]

    def without_caption(self, prompt: Sequence[int]) -> list[int]:
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
            words=self.words,
            token_ids=tuple(token_ids),
            line_ends=style.line_ends,
            **shared,
        )


PUBLISHED = ChameleonSize(words=65536, dim=4096, layers=32, heads=32, ffn_dim=11008)
"""Chameleon 7B, which Anole and Lumina-mGPT were trained from."""


class Vocabulary:
    """The numbers of a vocabulary's tokens; image codes are `IMGIMG<digits as letters A to J>Z`."""

    def __init__(self, ids: Mapping[str, int], source: str) -> None:
        self._ids, self._source = ids, source

    def __getitem__(self, name: str) -> int:
        """The number of a token; raises `UserError` where the vocabulary has none of this name."""
        if name not in self._ids:
            raise UserError(f"{self._source}: the vocabulary has no {name}", "It is not that of a Chameleon model.")
        return self._ids[name]

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """The number of every image code, by code; raises `UserError` where some are missing."""
        found: dict[int, int] = {}
        for name, number in self._ids.items():
            letters = re.fullmatch("IMGIMG([A-J]+)Z", name)
            if letters is not None:
                found[int("".join(str(ord(letter) - ord("A")) for letter in letters[1]))] = number
        if not found or sorted(found) != list(range(len(found))):
            gap = next((code for code in range(len(found)) if code not in found), None)
            lack = "no image codes" if not found else f"no image code {gap}, and others above it"
            raise UserError(f"{self._source}: the vocabulary has {lack}", "It is not that of a Chameleon model.")
        return tuple(found[code] for code in range(len(found)))

    def token_ids(self, style: Style) -> tuple[int, ...]:
        """The numbers of an image's tokens: the codes and, if rows have ends, the end of a row."""
        return (*self.codes, self["<reserved08799>"]) if style.line_ends else self.codes


def read_vocabulary(config: Mapping[str, Any], tokenizer: Path, source: str) -> Vocabulary:
    """The vocabulary of a model: the `vocabulary_map` of its config, and its tokenizer.json where there is one."""
    ids = dict(config.get("vocabulary_map") or {})
    if tokenizer.is_file():
        source = str(tokenizer)
        try:
            stated = json.loads(tokenizer.read_text(encoding="utf-8"))
            ids |= stated["model"]["vocab"]
            ids |= {str(added["content"]): added["id"] for added in stated.get("added_tokens") or []}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{tokenizer}: cannot be read as a tokenizer: {error}", "Download it again.") from error
    return Vocabulary(ids, source)


def published_vocabulary() -> Vocabulary:
    """The published numbers of the tokens that a picture needs, for models without files."""
    ids = {"<s>": 0, "<racm3:break>": 8197, "<reserved08706>": 8710}
    ids |= {f"<reserved{number:05d}>": number + 4 for number in range(8799, 8799 + 34)}
    ids |= {f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": code + 4 for code in range(CODES)}
    return Vocabulary(ids, "the published vocabulary")


_NAMES: dict[str, tuple[str, ...]] = {
    "words": ("vocab_size",),
    "dim": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "ffn_dim": ("intermediate_size",),
    "kv_heads": ("num_key_value_heads",),
    "norm_eps": ("rms_norm_eps",),
    "rope_base": ("rope_theta",),
}
# Options of transformers' Chameleon that no published checkpoint uses.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("chameleon", "chameleon_xllmx", None),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "tie_word_embeddings": (False, None),
    "rope_scaling": (None,),
}


def read_config(config: Mapping[str, Any], wrong: Wrong) -> ChameleonSize:
    """The size that a config.json states; the size of Chameleon 7B fills what it leaves out.

    Raises what `wrong(key, text)` returns for impossible values, and for options that this transformer lacks.
    """
    for key, allowed in _ONLY.items():
        if config.get(key) not in allowed:
            raise wrong(key, f"is {config[key]}, and Chameleon's is {allowed[0]}")
    rope = config.get("rope_parameters") or {}
    said = read_sizes({"rope_theta": rope.get("rope_theta"), **config}, _NAMES, wrong, ("norm_eps", "rope_base"))
    size = replace(PUBLISHED, **said, norm_after=bool(config.get("swin_norm")))
    if (problem := heads_problem(size.dim, size.heads, size.kv_heads, "sequence")) is not None:
        raise wrong(*problem)
    return size


def drafter_config(stated: Mapping[str, Any], target: TransformerConfig, folder: Path) -> TransformerConfig:
    """The sizes of a drafter's one layer for a target; raises `UserError` where the two cannot work together."""
    where = folder / "config.json"
    size = read_config(stated, lambda key, text: UserError(f"{where}: {key}: {text}"))
    sizes = {"hidden_size": (size.dim, target.dim), "vocab_size": (size.words, target.words or target.vocab_size)}
    for key, (has, needed) in sizes.items():
        if has != needed:
            text = f"{where}: {key} is {has}, and the drafter of this target has {needed}"
            raise UserError(text, "The drafter was trained for another model.")
    if size.layers != 1:
        raise UserError(f"{where}: num_hidden_layers: is {size.layers}: only drafters of one layer are supported")
    own = {name: getattr(size, name) for name in SHARED_SIZES if name not in ("dim", "layers")}
    return replace(target, layers=1, **own)


class PromptTokenizer:
    """Captions to prompts; reads the tokenizer.json at `path` with the first caption, and needs no torch until then."""

    def __init__(self, path: Path, vocabulary: Vocabulary, style: Style) -> None:
        self._path, self._style, self._vocabulary = path, style, vocabulary

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RefusedError(
                "captions need the package tokenizers, which is not installed",
                "Type `pip install 'lantern-bench[hf]'`; or give numbers: generate --condition FILE.npz.",
            ) from error
        if not self._path.is_file():
            raise UserError(f"{self._path}: no such file", "Captions need the tokenizer.json of the published folder.")
        try:
            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{self._path}: cannot be read as a tokenizer: {error}", "Download it again.") from error

    def words(self, caption: str) -> list[int]:
        """The prompt of a caption as numbers; raises `UserError` for one that is empty or too long."""
        if not caption.strip():
            raise UserError("caption: is empty", "Say what the picture shows.")
        text = self._tokenizer.encode(self._style.text(caption), add_special_tokens=False).ids
        prompt = self._style.around(text, self._vocabulary)
        if len(prompt) > self._style.positions:
            most = f"its prompt has {len(prompt)} tokens, and at most {self._style.positions} are taken"
            raise UserError(f"caption {caption[:40]!r}...: {most}", "Say it in fewer words.")
        return prompt

    def __call__(self, captions: Sequence[str]) -> Condition:
        """The condition of captions, one an image."""
        return prompt_condition([self.words(caption) for caption in captions], self._style)


def prompt_condition(prompts: Sequence[Sequence[int]], style: Style) -> Condition:
    """The condition of whole prompts: int64 [B, 2, P], conditional and unconditional, padded on the left."""
    import torch

    from lantern_bench.models.transformer.conditioning import Condition

    pairs = [(list(prompt), style.without_caption(prompt)) for prompt in prompts]
    length = max(len(prompt) for pair in pairs for prompt in pair)
    values = torch.full((len(pairs), 2, length), 1, dtype=torch.int64)
    valid = torch.zeros(values.shape, dtype=torch.bool)
    for row, pair in enumerate(pairs):
        for kind, prompt in enumerate(pair):
            values[row, kind, length - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
            valid[row, kind, length - len(prompt) :] = True
    return Condition(values, valid)


def prompt_of_arrays(arrays: Mapping[str, np.ndarray], style: Style, words: int) -> Condition:
    """The condition of prompts given as numbers: `input_ids` int [P] or [n, P], `mask` of the same shape or none.

    `attention_mask` is another name of the mask; masked positions must be on the left. `words` is the size of the
    vocabulary. Raises `ValueError` for anything else.
    """
    import numpy as np

    def rows(name: str) -> np.ndarray:
        array = arrays.get(name)
        if array is None or array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iub":
            raise ValueError(f"{name} must be there, whole numbers [P] or [n, P]")
        return np.atleast_2d(array)

    ids = rows("input_ids")
    masks = [rows(name).astype(bool) for name in ("mask", "attention_mask") if name in arrays]
    kept = masks[0] if masks else np.ones(ids.shape, bool)
    if kept.shape != ids.shape or (np.diff(kept.astype(int), axis=1) < 0).any() or not kept[:, -1].all():
        raise ValueError("mask must have the shape of input_ids, its zeros on the left")
    if ids.min() < 0 or ids.max() >= words:
        raise ValueError(f"input_ids must be from 0 to {words - 1}")
    if ids.shape[1] > style.positions:
        raise ValueError(f"input_ids has {ids.shape[1]} tokens, and at most {style.positions} are taken")
    return prompt_condition([row[use].tolist() for row, use in zip(ids, kept, strict=True)], style)


def invented_words(style: Style, vocabulary: Vocabulary, words: int) -> Callable[[Sequence[str]], Condition]:
    """Prompts for models with random weights: a hash maps each word of a caption to a number above the image codes."""

    def condition(captions: Sequence[str]) -> Condition:
        prompts = []
        for caption in captions:
            digests = [hashlib.sha256(word.encode()).digest() for word in caption.split()]
            numbers = [int.from_bytes(digest[:8]) for digest in digests][: style.positions // 2]
            text = [_FIRST_WORD + number % (words - _FIRST_WORD) for number in numbers]
            prompts.append(style.around(text, vocabulary))
        return prompt_condition(prompts, style)

    return condition
