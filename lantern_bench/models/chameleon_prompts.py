"""Captions as Chameleon's prompts: text to tokens by the model's own tokenizer.json, then what stands around them.

Both prompts of an image, with its caption and without, are padded on the left to one length; positions count from the
first token that is not padding. Prompts may also come as numbers, or be made up where there is no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.chameleon_sizes import Style, Vocabulary

if TYPE_CHECKING:
    from lantern_bench.models.conditioning import Condition

__all__ = ["PromptTokenizer", "invented_words", "prompt_condition"]

_PADDING = 1
_FIRST_WORD = 9000


class PromptTokenizer:
    """Captions to prompts; `path` is a tokenizer.json, read when the first caption comes. Needs no torch until then."""

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
        path = self._path
        if not path.is_file():
            raise UserError(f"{path}: no such file", "Captions need the tokenizer.json of the published folder.")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{path}: cannot be read as a tokenizer: {error}", "Download it again.") from error

    def words(self, caption: str) -> list[int]:
        """The prompt of a caption as numbers; raises `UserError` for one that is empty or too long."""
        if not caption.strip():
            raise UserError("caption: is empty", "Say what the picture shows.")
        text = self._tokenizer.encode(self._style.text(caption), add_special_tokens=False).ids
        prompt = self._style.around(text, self._vocabulary)
        if len(prompt) > self._style.positions:
            raise UserError(
                f"caption {caption[:40]!r}...: its prompt has {len(prompt)} tokens, and at most "
                f"{self._style.positions} are taken",
                "Say it in fewer words.",
            )
        return prompt

    def __call__(self, captions: Sequence[str]) -> Condition:
        """The condition of captions, one an image."""
        return prompt_condition([self.words(caption) for caption in captions], self._style)


def prompt_condition(prompts: Sequence[Sequence[int]], style: Style) -> Condition:
    """The condition of whole prompts: numbers int64 [B, 2, P], with caption and without, and which are no padding."""
    import torch

    from lantern_bench.models.conditioning import Condition

    pairs = [(list(prompt), style.without_caption(prompt)) for prompt in prompts]
    length = max(len(prompt) for pair in pairs for prompt in pair)
    values = torch.full((len(pairs), 2, length), _PADDING, dtype=torch.int64)
    valid = torch.zeros(values.shape, dtype=torch.bool)
    for row, pair in enumerate(pairs):
        for kind, prompt in enumerate(pair):
            values[row, kind, length - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
            valid[row, kind, length - len(prompt) :] = True
    return Condition(values, valid)


def invented_words(style: Style, vocabulary: Vocabulary, words: int) -> Callable[[Sequence[str]], Condition]:
    """Prompts for models whose weights are random: every word of a caption is some number above the image codes."""

    def condition(captions: Sequence[str]) -> Condition:
        prompts = []
        for caption in captions:
            digests = [hashlib.sha256(word.encode()).digest() for word in caption.split()]
            numbers = [int.from_bytes(digest[:8]) for digest in digests][: style.positions // 2]
            text = [_FIRST_WORD + number % (words - _FIRST_WORD) for number in numbers]
            prompts.append(style.around(text, vocabulary))
        return prompt_condition(prompts, style)

    return condition
