"""Prompts in a model's own vocabulary: what stands around a caption, and the conditions made of captions or numbers.

Chameleon, Janus and Emu3 read captions as their language model does. No torch and no tokenizer is imported before the
first caption.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lantern_bench.errors import RefusedError, UserError

if TYPE_CHECKING:
    import numpy as np

    from lantern_bench.models.target import Condition

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Makes numbers of a text."""


class Vocabulary:
    """The numbers of a vocabulary's tokens, by name; `model` is what errors call a model that has it."""

    def __init__(self, ids: Mapping[str, int], source: str, model: str = "this model") -> None:
        self._ids, self._source, self._model = ids, source, model

    def __getitem__(self, name: str) -> int:
        """The number of a token; raises `UserError` where the vocabulary has none of this name."""
        if name not in self._ids:
            raise self._wrong(f"no {name}")
        return self._ids[name]

    def codes_named(self, pattern: str, number: Callable[[str], int] = int) -> tuple[int, ...]:
        """The numbers of the image codes, by code; raises `UserError` where some are missing.

        `pattern` matches the name of a code, and `number` makes the code of its group.
        """
        found: dict[int, int] = {}
        for name, token in self._ids.items():
            if (match := re.fullmatch(pattern, name)) is not None:
                found[number(match[1])] = token
        if not found or sorted(found) != list(range(len(found))):
            gap = next((code for code in range(len(found)) if code not in found), None)
            raise self._wrong("no image codes" if not found else f"no image code {gap}, and others above it")
        return tuple(found[code] for code in range(len(found)))

    def _wrong(self, lack: str) -> UserError:
        return UserError(f"{self._source}: the vocabulary has {lack}", f"It is not that of {self._model}.")


def token_numbers(stated: Mapping[str, int] | None, tokenizer: Path, source: str) -> tuple[dict[str, int], str]:
    """The numbers of a model's tokens, and where they stand: in its config, and its tokenizer.json where there is one.

    Raises `UserError` for a file that is no tokenizer.
    """
    ids = dict(stated or {})
    if tokenizer.is_file():
        source = str(tokenizer)
        try:
            read = json.loads(tokenizer.read_text(encoding="utf-8"))
            ids |= read["model"]["vocab"]
            ids |= {str(added["content"]): added["id"] for added in read.get("added_tokens") or []}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{tokenizer}: cannot be read as a tokenizer: {error}", "Download it again.") from error
    return ids, source


class Wording(Protocol):
    """What a model puts around a caption, and its prompt without one."""

    @property
    def positions(self) -> int:
        """The longest prompt."""
        ...

    def text(self, caption: str) -> str:
        """The text of a caption's prompt."""
        ...

    def around(self, text: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The whole prompt of a tokenised text."""
        ...

    def without_caption(self, prompt: Sequence[int], vocabulary: Vocabulary, encode: Encode) -> list[int]:
        """The unconditional prompt that goes with a prompt."""
        ...


@dataclass(frozen=True)
class PromptBuilder:
    """Conditions of captions (called), or of prompts that are numbers already (`of_arrays`).

    `encode` makes numbers of a text: `TextTokenizer`, or `InventedNumbers` for models with random weights. `bare`: the
    text of a prompt is its caption alone.
    """

    wording: Wording
    vocabulary: Vocabulary
    encode: Encode
    bare: bool = False

    def words(self, caption: str) -> list[int]:
        """The prompt of a caption as numbers; raises `UserError` for one that is empty or too long."""
        if not caption.strip():
            raise UserError("caption: is empty", "Say what the picture shows.")
        text = caption if self.bare else self.wording.text(caption)
        prompt = self.wording.around(self.encode(text), self.vocabulary)
        if len(prompt) > self.wording.positions:
            most = f"its prompt has {len(prompt)} tokens, and at most {self.wording.positions} are taken"
            raise UserError(f"caption {caption[:40]!r}...: {most}", "Say it in fewer words.")
        return prompt

    def __call__(self, captions: Sequence[str]) -> Condition:
        """The condition of captions, one an image."""
        return self.of_prompts([self.words(caption) for caption in captions])

    def of_prompts(self, prompts: Sequence[Sequence[int]]) -> Condition:
        """The condition of whole prompts."""
        nulls = (self.wording.without_caption(prompt, self.vocabulary, self.encode) for prompt in prompts)
        from lantern_bench.models.target import prompt_condition

        return prompt_condition(list(zip(prompts, nulls, strict=True)))

    def of_arrays(self, arrays: Mapping[str, np.ndarray], words: int) -> Condition:
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
        if ids.shape[1] > self.wording.positions:
            raise ValueError(f"input_ids has {ids.shape[1]} tokens, and at most {self.wording.positions} are taken")
        return self.of_prompts([row[use].tolist() for row, use in zip(ids, kept, strict=True)])


class TextTokenizer:
    """Texts to numbers by the tokenizer.json at `path`, which is read with the first text."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RefusedError(
                "captions need the package tokenizers, which is not installed",
                "Type `pip install 'lantern-bench[hf]'`; or give numbers: lantern_bench.decode(..., conditions=...).",
            ) from error
        if not self._path.is_file():
            raise UserError(f"{self._path}: no such file", "Captions need the tokenizer.json of the published folder.")
        try:
            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{self._path}: cannot be read as a tokenizer: {error}", "Download it again.") from error

    def __call__(self, text: str) -> Sequence[int]:
        """The numbers of a text, without what a tokenizer adds around one."""
        numbers: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return numbers


class InventedNumbers:
    """A hash maps each word of a text to a number from `first` to `last`; at most `longest` words are read."""

    def __init__(self, first: int, last: int, longest: int) -> None:
        self._first, self._last, self._longest = first, last, longest

    def __call__(self, text: str) -> Sequence[int]:
        """The numbers of a text."""
        digests = [hashlib.sha256(word.encode()).digest() for word in text.split()]
        numbers = [int.from_bytes(digest[:8]) for digest in digests][: self._longest]
        return [self._first + number % (self._last + 1 - self._first) for number in numbers]


def invented_prompts(wording: Wording, vocabulary: Vocabulary, first: int, last: int) -> PromptBuilder:
    """Prompts for models with random weights: words become numbers from `first` to `last`."""
    return PromptBuilder(wording, vocabulary, InventedNumbers(first, last, wording.positions // 2), bare=True)
