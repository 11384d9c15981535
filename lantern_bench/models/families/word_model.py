"""Models whose prompts are words of the vocabulary that their image tokens belong to: Chameleon, Janus, Emu3.

A picture uses a share of the vocabulary, and the target holds only the rows of the output head for that share.
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


class Vocabulary(dict[str, int]):
    """The numbers of a vocabulary's tokens, by name; `source` is for errors."""

    def __init__(self, numbers: Mapping[str, int], source: str, model: str) -> None:
        super().__init__(numbers)
        self._source = source
        self._model = model

    def __missing__(self, name: str) -> int:
        raise self._lacks(name)

    def codes_named(self, pattern: str, code_of: Callable[[str], int] = int) -> tuple[int, ...]:
        """Return the numbers of the image codes, by the code in the group of `pattern`; `UserError` where some lack."""
        codes = {
            code_of(match[1]): self[name]
            for name in self
            if (match := re.fullmatch(pattern, name)) is not None
        }
        if not codes:
            raise self._lacks("image codes")
        missing = next((code for code in range(len(codes)) if code not in codes), None)
        if missing is not None:
            raise self._lacks(f"image code {missing}, and others above it")
        return tuple(codes[code] for code in range(len(codes)))

    def _lacks(self, token: str) -> UserError:
        return UserError(
            f"{self._source}: the vocabulary has no {token}", f"It is not that of {self._model}."
        )


@lru_cache(maxsize=4)
def _tokens_in(path: Path, _changed: int) -> Mapping[str, int]:
    """Return the numbers of the tokens in a tokenizer.json, which is read again when it has changed."""
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        added = {
            str(token["content"]): token["id"] for token in tokenizer.get("added_tokens") or []
        }
        return {**tokenizer["model"]["vocab"], **added}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read as a tokenizer: {error}", "Download it again."
        ) from error


@dataclass(frozen=True)
class Wording:
    """What stands around a caption: tokens `before`, the text of `template` with its {caption}, tokens `after`."""

    template: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    # (prompt, vocabulary, encode) -> the unconditional prompt that goes with a prompt
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
        """Return the numbers of the tokens that prompts and pictures need, for models without files."""

    @abstractmethod
    def wording(self) -> Wording:
        """Return what stands around a caption."""

    # ---- What follows

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of config.json ("": the whole); raises `UserError` for one that is no mapping."""
        section = self.config.get(key, {}) if key else self.config
        if not isinstance(section, Mapping):
            raise self.wrong(key, "must be a mapping")
        return section

    def llama_config(self, section: str, vocab_size: int, **fields: Any) -> TransformerConfig:
        """Return the sizes that a section of config.json ("": the whole) states; `UserError` for impossible ones."""

        def wrong(key: str, text: str) -> UserError:
            return self.wrong(f"{section}.{key}" if section else key, text)

        sizes = llama_sizes(self.section(section), wrong)
        grid = (self.file and self.file.grid) or fields.pop("grid", None) or self.row.grid
        sizes |= {
            "prefix": self.longest_prompt,
            "grid": grid,
            "positions": "sequence",
            "pairs": "halves",
        }
        return TransformerConfig(vocab_size, **sizes, **fields)

    def whole_number(self, key: str) -> int:
        """Return a number that config.json states, by its dotted key; raises `UserError` for others."""
        section, _, name = key.rpartition(".")
        if (value := self.section(section).get(name)) is None:
            raise self.wrong(key, "missing")
        return int(read_numbers({key: value}, {key: key}, self.wrong)[key])

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of config.json and tokenizer.json; the published ones without files."""
        if self.folder is None:
            return Vocabulary(self.published_numbers(), "the published vocabulary", self.kind[1])
        numbers = dict(self.config.get("vocabulary_map") or {})
        path = self._tokenizer_json
        source = str(self.file.path if self.file else self.folder)
        if path.is_file():
            source = str(path)
            numbers |= _tokens_in(path, path.stat().st_mtime_ns)
        elif not numbers:
            # Without either it may well be another model: that error comes first.
            from lantern_bench.models.checkpoints.checkpoint import open_checkpoint

            open_checkpoint(self.paths["target"]).renamed(self.name_now).require(*self.kind)
        return Vocabulary(numbers, source, self.kind[1])

    @cached_property
    def target_config(self) -> TransformerConfig:
        """The sizes with the numbers of the image's words."""
        words = tuple(self.image_words())
        return replace(self.sizes, vocab_size=len(words), token_ids=words)

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a caption that is empty or too long, and for a missing tokenizer.json."""
        super().check_prompt(text)
        if self.file is not None:
            self.prompt_tokens(text, self._encode)

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.target import TransformerTarget

        return TransformerTarget(self.target_config)

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target; tokenizer.json, which decides which code a token is, is one of the files."""
        target, files = super().load_target(device, dtype)
        return target, (*files, *filter(Path.is_file, [self._tokenizer_json]))

    def prompts(self, target: TransformerTarget, invented: bool = False) -> Prompts:  # noqa: ARG002
        """Return captions through the model's own tokenizer; an invented number is a hash of its word."""
        from lantern_bench.models.networks.conditions import Prompts, prompt_condition

        first, last = self.words

        def invent(text: str) -> Sequence[int]:
            digests = [
                hashlib.sha256(word.encode()).digest()
                for word in text.split()[: self.longest_prompt // 2]
            ]
            return [first + int.from_bytes(digest[:8]) % (last + 1 - first) for digest in digests]

        encode = invent if invented else self._encode

        def condition(captions: Sequence[str]) -> Condition:
            prompts = [self.prompt_tokens(caption, encode, bare=invented) for caption in captions]
            nulls = [
                self.wording().without_caption(prompt, self.vocabulary, encode)
                for prompt in prompts
            ]
            return prompt_condition(list(zip(prompts, nulls, strict=True)))

        return Prompts(condition)

    def prompt_tokens(self, caption: str, encode: Encode, bare: bool = False) -> list[int]:
        """Return the prompt of a caption, `bare` or in the template; raises `UserError` for one too long."""
        wording = self.wording()
        vocabulary = self.vocabulary
        text = encode(caption if bare else wording.template.format(caption=caption))
        prompt = [
            *(vocabulary[name] for name in wording.before),
            *text,
            *(vocabulary[name] for name in wording.after),
        ]
        if len(prompt) > self.longest_prompt:
            most = (
                f"its prompt has {len(prompt)} tokens, and at most {self.longest_prompt} are taken"
            )
            raise UserError(f"caption {caption[:40]!r}...: {most}", "Say it in fewer words.")
        return prompt

    @property
    def _tokenizer_json(self) -> Path:
        return (self.folder or Path()) / "tokenizer.json"

    def _encode(self, text: str) -> Sequence[int]:
        """The numbers of a text, without what a tokenizer adds around one."""
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
            raise UserError(
                f"{path}: no such file", "Captions need the tokenizer.json of the published folder."
            )
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(
                f"{path}: cannot be read as a tokenizer: {error}", "Download it again."
            ) from error
