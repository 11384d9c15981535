"""Models whose prompts are words of the vocabulary that their image tokens belong to.

These are Chameleon, Janus and Emu3. A picture uses a part of the vocabulary, and the target holds
only the rows of the output head for that part.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from lantern_bench.models.checkpoint_model import CheckpointModel
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_numbers,
)
from lantern_bench.utils.errors import RefusedError, UserError

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.networks.conditions import Condition, Prompts
    from lantern_bench.models.networks.target import TransformerTarget


Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Turns a text into numbers of words."""


class Vocabulary(dict[str, int]):  # __missing__ is for dict
    """The numbers of a vocabulary's tokens, by name.

    Args:
        numbers: The numbers.
        source: Where they were read, for errors.
        model: What the model is called, for errors.
    """

    def __init__(self, numbers: Mapping[str, int], source: str, model: str) -> None:
        super().__init__(numbers)
        self._source = source
        self._model = model

    def __missing__(self, name: str) -> int:
        raise self._lacks(name)

    def codes_named(self, pattern: str, code_of: Callable[[str], int] = int) -> tuple[int, ...]:
        """Return the numbers of the image codes in order.

        Args:
            pattern: Regular expression of their names. Its group is the code.
            code_of: Turns the group into the code.

        Raises:
            UserError: Codes are missing.
        """
        codes: dict[int, int] = {}
        for name, number in self.items():
            match = re.fullmatch(pattern, name)
            if match is not None:
                codes[code_of(match[1])] = number
        if not codes:
            raise self._lacks("image codes")
        for code in range(len(codes)):
            if code not in codes:
                raise self._lacks(f"image code {code}, and others above it")
        return tuple(codes[code] for code in range(len(codes)))

    def _lacks(self, token: str) -> UserError:
        problem = f"{self._source}: the vocabulary has no {token}"
        return UserError(problem, f"It is not that of {self._model}.")


@lru_cache(maxsize=4)
def _tokens_in(path: Path, _changed: int) -> Mapping[str, int]:
    """Read the numbers of the tokens in a tokenizer.json, again whenever the file has changed."""
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        numbers = dict(tokenizer["model"]["vocab"])
        for token in tokenizer.get("added_tokens") or []:
            numbers[str(token["content"])] = token["id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path}: cannot be read as a tokenizer: {error}"
        raise UserError(problem, "Download it again.") from error
    return numbers


@dataclass(frozen=True)
class Wording:
    """What is around a caption in a prompt."""

    template: str  # text with {caption}
    before: tuple[str, ...]  # tokens before the text
    after: tuple[str, ...]  # tokens after the text
    # (prompt, vocabulary, encode) -> the unconditional prompt that belongs to a prompt
    without_caption: Callable[[list[int], Vocabulary, Encode], list[int]]


class WordModel(CheckpointModel):
    """A model with prompts in its own vocabulary."""

    has_drafter = False  # none was published
    words: ClassVar[tuple[int, int]]  # the first and the last number of a word, for random weights
    longest_prompt: ClassVar[int] = 256

    @abstractmethod
    def image_words(self) -> Sequence[int]:
        """Return the numbers of the image's tokens among the words of the vocabulary."""

    @abstractmethod
    def published_numbers(self) -> Mapping[str, int]:
        """Return the numbers of all tokens of prompts and pictures, for models without files."""

    @abstractmethod
    def wording(self) -> Wording:
        """Return what is around a caption."""

    # ---- What a config.json states

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of config.json. The whole of it is the section ""."""
        section = self.config.get(key, {}) if key else self.config
        if not isinstance(section, Mapping):
            raise self.wrong(key, "must be a mapping")
        return section

    def llama_config(self, section: str, vocab_size: int, **fields: Any) -> TransformerConfig:
        """Return the sizes that a section of config.json states.

        Args:
            section: As of `section`.
            vocab_size: Number of image tokens.
            fields: Fields of `TransformerConfig` that the family sets.

        Raises:
            UserError: A size is impossible or not supported.
        """

        def wrong(key: str, text: str) -> UserError:
            return self.wrong(f"{section}.{key}" if section else key, text)

        sizes = {
            "grid": self.grid,
            "prefix": self.longest_prompt,
            "positions": "sequence",
            "pairs": "halves",
            **llama_sizes(self.section(section), wrong),
            **fields,
        }
        return TransformerConfig(vocab_size, **sizes)

    def whole_number(self, key: str) -> int:
        """Return a number that config.json states, by its dotted key."""
        section, _, name = key.rpartition(".")
        value = self.section(section).get(name)
        if value is None:
            raise self.wrong(key, "missing")
        return int(read_numbers({key: value}, {key: key}, self.wrong)[key])

    # ---- Vocabulary and target

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of config.json and tokenizer.json. Without files: the published ones."""
        if self.folder is None:
            return Vocabulary(self.published_numbers(), "the published vocabulary", self.kind)
        numbers = dict(self.config.get("vocabulary_map") or {})
        path = self._tokenizer_json
        source = str(self.file.path if self.file else self.folder)
        if path.is_file():
            source = str(path)
            numbers |= _tokens_in(path, path.stat().st_mtime_ns)
        elif not numbers:
            # Without either file it may be another model, and that error comes first.
            self.open_target()
        return Vocabulary(numbers, source, self.kind)

    @cached_property
    def target_config(self) -> TransformerConfig:
        """The sizes with the numbers of the image's words."""
        words = tuple(self.image_words())
        return replace(self.sizes, vocab_size=len(words), token_ids=words)

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.target import TransformerTarget

        return TransformerTarget(self.target_config)

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target. tokenizer.json, which tells the code of a token, is one of the files."""
        target, files = super().load_target(device, dtype)
        if self._tokenizer_json.is_file():
            files = (*files, self._tokenizer_json)
        return target, files

    # ---- Prompts

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty or too long caption, and for a missing tokenizer.json."""
        super().check_prompt(text)
        if self.file is not None:
            self.prompt_tokens(text, self._encode)

    def prompts(self, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Return captions through the model's own tokenizer."""
        return self._prompts(self.prompt_tokens, self._encode)

    def random_prompts(self) -> Prompts:
        """Return captions whose words have hashes for numbers."""
        first, last = self.words

        def invent(text: str) -> Sequence[int]:
            numbers = []
            for word in text.split()[: self.longest_prompt // 2]:
                digest = hashlib.sha256(word.encode()).digest()
                numbers.append(first + int.from_bytes(digest[:8]) % (last + 1 - first))
            return numbers

        return self._prompts(self.bare_prompt, invent)

    def _prompts(self, prompt_of: Callable[[str, Encode], list[int]], encode: Encode) -> Prompts:
        from lantern_bench.models.networks.conditions import Prompts, prompt_condition

        def condition(captions: Sequence[str]) -> Condition:
            pairs = []
            for caption in captions:
                prompt = prompt_of(caption, encode)
                null = self.wording().without_caption(prompt, self.vocabulary, encode)
                pairs.append((prompt, null))
            return prompt_condition(pairs)

        return Prompts(condition)

    def prompt_tokens(self, caption: str, encode: Encode) -> list[int]:
        """Return the prompt of a caption. Raises `UserError` for one that is too long."""
        prompt = self.bare_prompt(self.wording().template.format(caption=caption), encode)
        if len(prompt) > self.longest_prompt:
            most = f"at most {self.longest_prompt} are taken"
            text = f"its prompt has {len(prompt)} tokens, and {most}"
            raise UserError(f"caption {caption[:40]!r}...: {text}", "Say it in fewer words.")
        return prompt

    def bare_prompt(self, text: str, encode: Encode) -> list[int]:
        """Return the numbers of a text between the tokens that begin and end a prompt."""
        wording = self.wording()
        before = [self.vocabulary[name] for name in wording.before]
        after = [self.vocabulary[name] for name in wording.after]
        return [*before, *encode(text), *after]

    @property
    def _tokenizer_json(self) -> Path:
        return (self.folder or Path()) / "tokenizer.json"

    def _encode(self, text: str) -> Sequence[int]:
        """Return the numbers of a text, without what a tokenizer adds around one."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _tokenizer(self) -> Any:
        path = self._tokenizer_json
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            text = "captions need the package tokenizers, which is not installed"
            raise RefusedError(text, "Type `pip install 'lantern-bench[hf]'`.") from error
        if not path.is_file():
            needed = "Captions need the tokenizer.json of the published folder."
            raise UserError(f"{path}: no such file", needed)
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            problem = f"{path}: cannot be read as a tokenizer: {error}"
            raise UserError(problem, "Download it again.") from error
