"""Models with one vocabulary for prompts and image tokens: Chameleon, Janus and Emu3.

A picture uses a part of the vocabulary, and the target holds only the rows of the output head for
this part.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lantern_bench.models.checkpoint_model import CheckpointModel
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_number,
)
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import fingerprint

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.networks.target import Condition, Prompts, TransformerTarget


class Vocabulary(dict[str, int]):  # __missing__ is for dict
    """The numbers of a vocabulary's tokens, by name.

    Args:
        numbers: The numbers.
        source: The file that was read, for errors.
        model: Name of the model in errors.
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
        missing = set(range(len(codes))) - codes.keys()
        if missing:
            raise self._lacks(f"image code {min(missing)}, and others above it")
        return tuple(codes[code] for code in range(len(codes)))

    def _lacks(self, token: str) -> UserError:
        return UserError(
            f"{self._source}: the vocabulary has no {token}",
            f"It is not the vocabulary of {self._model}.",
        )


@lru_cache(maxsize=4)
def read_tokenizer(path: Path, _changed: str) -> Any:
    """Read a tokenizer.json, again whenever the file has changed."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RefusedError(
            f"{path}: reading it needs the package tokenizers, which is not installed",
            "Type `pip install -e '.[hf]'` in the clone.",
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(
            f"{path}: cannot be read as a tokenizer: {error}", "Download it again."
        ) from error


class Wording(NamedTuple):
    """The parts of a prompt around a caption."""

    template: str  # text with {caption}
    before: tuple[str, ...]  # tokens before the text
    after: tuple[str, ...]  # tokens after the text


class WordModel(CheckpointModel):
    """A model with prompts in its own vocabulary."""

    line_ends: ClassVar[bool] = False  # as in `TransformerConfig`
    longest_prompt: ClassVar[int] = 256

    @abstractmethod
    def image_words(self) -> Sequence[int]:
        """Return the numbers of the image's tokens among the words of the vocabulary."""

    @abstractmethod
    def wording(self) -> Wording:
        """Return the parts of a prompt around a caption."""

    @abstractmethod
    def unconditional(self, prompt: list[int]) -> list[int]:
        """Return the unconditional prompt that belongs to a prompt."""

    # ---- What a config.json states

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of config.json by its dotted key. The key "" returns the whole file."""
        section = self.config
        for name in key.split(".") if key else ():
            section = section.get(name, {})
            if not isinstance(section, Mapping):
                raise self.error_at(key, "must be a mapping")
        return section

    def llama_config(
        self, section: str, *, read: Sequence[str] = (), **fields: Any
    ) -> TransformerConfig:
        """Return the sizes that a section of config.json states.

        Args:
            section: As of `section`.
            read: Keys that the family reads and a Llama does not have.
            fields: Fields of `TransformerConfig` that the family sets.

        Raises:
            UserError: A size is impossible or not supported.
        """

        def error_at(key: str, text: str) -> UserError:
            return self.error_at(f"{section}.{key}" if section else key, text)

        sizes = llama_sizes(self.section(section), error_at, read=read)
        usual = {"grid": self.grid, "positions": "sequence", "pairs": "halves"}
        return TransformerConfig(
            vocab_size=len(self.token_ids),
            prefix=self.longest_prompt,
            line_ends=self.line_ends,
            **{**usual, **sizes, **fields},
        )

    def whole_number(self, key: str) -> int:
        """Return a number that config.json states, by its dotted key."""
        section, _, name = key.rpartition(".")
        value = self.section(section).get(name)
        if value is None:
            raise self.error_at(key, "missing")
        return int(read_number(key, value, self.error_at))

    # ---- Vocabulary and target

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of config.json and tokenizer.json."""
        numbers = dict(self.config.get("vocabulary_map") or {})
        source = str(self.file.path if self.file else self.folder)
        if self._tokenizer_json.is_file():
            source = str(self._tokenizer_json)
            numbers |= self._tokenizer.get_vocab()
        return Vocabulary(numbers, source, self.family_spec.kind)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The numbers of the image's words. Without files these are the first numbers."""
        if self.folder is None:
            return tuple(range(self.spec.vq["codes"] + self.line_ends))
        try:
            return tuple(self.image_words())
        except UserError:
            self.open_target()  # It may be another model, and that error comes first.
            raise

    def new_target(self) -> TransformerTarget:
        """Return a target with fresh weights."""
        from lantern_bench.models.networks.target import TransformerTarget

        return TransformerTarget(replace(self.sizes, token_ids=self.token_ids))

    def load_target(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...]]:
        """Load the target. The files include tokenizer.json, which maps tokens to codes."""
        target, files = super().load_target(device, dtype)
        if self._tokenizer_json.is_file():
            files = (*files, self._tokenizer_json)
        return target, files

    # ---- Prompts

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty or too long caption, and for a missing tokenizer.json."""
        super().check_prompt(text)
        if self.file is not None:
            self.prompt_tokens(text)

    def prompts(self, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Return captions through the model's own tokenizer."""
        from lantern_bench.models.networks.target import Prompts, prompt_condition

        def condition(captions: Sequence[str]) -> Condition:
            prompts = [self.prompt_tokens(caption) for caption in captions]
            return prompt_condition([(prompt, self.unconditional(prompt)) for prompt in prompts])

        return Prompts(condition)

    def random_prompts(self) -> Prompts:
        """Return a converter that numbers words by their hashes. Prompts start with number 0."""
        from lantern_bench.models.networks.target import Prompts, prompt_condition

        def condition(captions: Sequence[str]) -> Condition:
            pairs = []
            for caption in captions:
                prompt = [0]
                for word in caption.split()[: self.longest_prompt // 2]:
                    digest = hashlib.sha256(word.encode()).digest()
                    prompt.append(int.from_bytes(digest[:8]) % self.sizes.embedded_tokens)
                pairs.append((prompt, [0]))
            return prompt_condition(pairs)

        return Prompts(condition)

    def prompt_tokens(self, caption: str) -> list[int]:
        """Return the prompt of a caption. Raises `UserError` for one that is too long."""
        wording = self.wording()
        before = [self.vocabulary[name] for name in wording.before]
        after = [self.vocabulary[name] for name in wording.after]
        prompt = [*before, *self.encode(wording.template.format(caption=caption)), *after]
        if len(prompt) > self.longest_prompt:
            raise UserError(
                f"caption {caption[:40]!r}...: its prompt has {len(prompt)} tokens, and at most "
                f"{self.longest_prompt} are taken",
                "Say it in fewer words.",
            )
        return prompt

    @property
    def _tokenizer_json(self) -> Path:
        return (self.folder or Path()) / "tokenizer.json"

    def encode(self, text: str) -> Sequence[int]:
        """Return the numbers of a text, without tokens that the tokenizer adds around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _tokenizer(self) -> Any:
        path = self._tokenizer_json
        if not path.is_file():
            raise UserError(
                f"{path}: no such file",
                "Captions need the tokenizer.json of the published folder.",
            )
        return read_tokenizer(path, fingerprint(path))
