"""What families of models that transformers reads share: one folder with config.json, safetensors and tokenizer.json.

Such a family says how its config.json is read, where its tensors are, and what stands around a caption
(docs/adding-a-model.md). The target, the image tokenizer and the text tokenizer are in the same folder, and no drafter
was published. Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.family import CheckpointFamily, ModelCard, config_beside
from lantern_bench.models.io.model_file import CheckpointPart, ModelFile
from lantern_bench.models.prompt_tokens import (
    PromptBuilder,
    TextTokenizer,
    Vocabulary,
    Wording,
    invented_prompts,
    token_numbers,
)
from lantern_bench.models.transformer_config import (
    TransformerConfig,
    Wrong,
    heads_problem,
    llama_sizes,
    target_parameters,
)

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.neighbours import Space
    from lantern_bench.models.io.checkpoint import Checkpoint
    from lantern_bench.models.io.state_dict import KeyMap
    from lantern_bench.models.loaded_model import Prompts
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel

_TOKENIZER = "model.vqmodel."
PROMPT = 256
"""The longest prompt, in tokens."""


@dataclass(frozen=True)
class Published:
    """A published model: what it is called, and what its config.json states."""

    about: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class TransformersFamily(CheckpointFamily):
    """Models whose checkpoints transformers reads, with prompts in their own vocabulary.

    published: the models by name. licence: theirs. kind: a tensor that every checkpoint has, and what the family's
    models are called. extra: a regular expression of the tensors that no picture needs. numbers: those of the published
    tokens that a prompt needs besides words, and `words` the first and the last number of a word, for random weights.
    """

    name: str
    licence: str
    defaults: Mapping[str, Any]
    kind: tuple[str, str]
    extra: str
    numbers: Mapping[str, int]
    words: tuple[int, int]
    published: Mapping[str, Published]
    mode: str = "scd"
    builds_drafter: bool = False
    token_pixels: int = 16
    neighbour_space: Space = "raw"

    @abstractmethod
    def transformer(self, config: Mapping[str, Any], wrong: Wrong) -> TransformerConfig:
        """The sizes that a config.json states, without `token_ids`; raises what `wrong(key, text)` returns."""

    @abstractmethod
    def token_ids(self, config: TransformerConfig, vocabulary: Vocabulary) -> Sequence[int]:
        """The numbers of the image's tokens among `config.text_vocab_size`."""

    @abstractmethod
    def wording(self, grid: tuple[int, int]) -> Wording:
        """What stands around a caption."""

    @abstractmethod
    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """The key map of the target."""

    @abstractmethod
    def image_tokenizer(self, config: Mapping[str, Any], wrong: Wrong) -> VQModel:
        """The image tokenizer that a config.json describes, with fresh weights."""

    @abstractmethod
    def tokenizer_keys(self, tokenizer: VQModel) -> KeyMap:
        """The key map of the image tokenizer, whose names begin with `model.vqmodel.`."""

    def name_now(self, name: str) -> str:
        """The name that a tensor of an older file has now."""
        return name

    # ---- what follows from these

    def cards(self) -> Sequence[ModelCard]:
        """The published models."""
        made = []
        for name, model in self.published.items():
            sizes = self.transformer(model.config, _impossible)
            facts = {**self._facts(sizes), "licence": self.licence, "sizes": sizes}
            made.append(self.card(name, model.about, sizes.grid, **facts))
        return made

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` is one of these models, or the family's name."""
        return file.family == self.name or file.family in self.published

    def facts_of_file(self, file: ModelFile) -> dict[str, Any]:
        """The card's fields; raises `UserError` for sizes that cannot be."""
        return {"description": self.kind[1], **self._facts(self._sizes(file))}

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """Raise `UserError` for a caption that is empty or too long, and for a missing tokenizer.json."""
        self._builder(file).words(text)

    def completed(self, file: ModelFile) -> ModelFile:
        """The file with the target's checkpoint as its image tokenizer, unless it names another one."""
        if file.tokenizer is not None:
            return file
        return file.model_copy(update={"tokenizer": CheckpointPart.model_construct(path=file.target.path, config=None)})

    def load_target(
        self,
        file: ModelFile,
        published: bool,  # noqa: ARG002  # config.json says it all
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[TransformerTarget, tuple[Path, ...], str]:
        """As `CheckpointFamily.load_target`; the tokenizer decides which code a token is, so it is one of the files."""
        import torch

        from lantern_bench.models.eagle import check_kind
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.state_dict import fill
        from lantern_bench.models.target import TransformerTarget

        if file.target.layout == "official":
            raise file.wrong("target.layout", f"official: {self.kind[1]} is read in the layout hf", "Leave it out.")
        checkpoint = open_checkpoint(file.target.path).renamed(self.name_now)
        check_kind(checkpoint, *self.kind)
        sizes = self._sizes(file)
        config = replace(sizes, token_ids=tuple(self.token_ids(sizes, self._vocabulary(file))))
        with torch.device("meta"):
            target = TransformerTarget(config)
        wanted = f"{self.kind[1]} of {config.layers} layers of width {config.dim}"
        keys = self.target_keys(target, checkpoint)
        fill(target, checkpoint, keys, dtype=dtype, device=device, computed=self._is_extra, wanted=wanted)
        words = tuple(path for path in (_folder(file.target.path) / "tokenizer.json",) if path.is_file())
        return target, (*checkpoint.paths, *words), repr((self.wording(config.grid), config, config.token_ids))

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """As `CheckpointFamily.load_tokenizer`; `config` has the content of config.json, else it is read beside it."""
        import torch

        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.state_dict import fill

        def name_inside(name: str) -> str | None:
            now = self.name_now(name)
            return now.removeprefix(_TOKENIZER) if now.startswith(_TOKENIZER) else None

        checkpoint = open_checkpoint(path).renamed(name_inside)
        if not len(checkpoint):
            raise UserError(f"{path}: holds no image tokenizer", f"Give the folder of {self.kind[1]}.")
        stated = config_beside(path, "hf") if config is None else config
        with torch.device("meta"):
            model = self.image_tokenizer(stated, _wrong_in(_folder(path) / "config.json"))
        keys = self.tokenizer_keys(model)
        wanted = f"an image tokenizer of {model.config.codes} codes"
        fill(model, checkpoint, keys, dtype=torch.float32, device=device, computed=_is_counter, wanted=wanted)
        return model

    def prompts(self, name: str, file: ModelFile, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Captions through the model's own tokenizer, or prompts as numbers."""
        return _prompts(self._builder(file), target.config)

    def random_prompts(self, name: str) -> Prompts:
        """Prompts of invented numbers, the same for the same words."""
        config = self._published_sizes(name)
        vocabulary = Vocabulary(self.numbers, "the published vocabulary", self.kind[1])
        return _prompts(invented_prompts(self.wording(config.grid), vocabulary, *self.words), config)

    def fresh_parts(self, name: str) -> tuple[TransformerTarget, VQModel]:
        """As `CheckpointFamily.fresh_parts`."""
        from lantern_bench.models.target import TransformerTarget

        sizes = self._published_sizes(name)
        last = (sizes.text_vocab_size or 0) - sizes.vocab_size
        config = replace(sizes, token_ids=tuple(range(last, last + sizes.vocab_size)))
        return TransformerTarget(config), self.image_tokenizer(self.published[name].config, _impossible)

    def _published_sizes(self, name: str) -> TransformerConfig:
        return self.transformer(self.published[name].config, _impossible)

    def _facts(self, sizes: TransformerConfig) -> dict[str, Any]:
        codes = sizes.vocab_size - sizes.line_ends
        return {"vocab_size": codes, "tokens": sizes.image_tokens, "parameters": target_parameters(sizes)}

    def _is_extra(self, name: str) -> bool:
        return name.startswith(_TOKENIZER) or re.match(self.extra, name) is not None

    def _sizes(self, file: ModelFile) -> TransformerConfig:
        """The sizes of config.json beside the weights, overridden by the model file."""
        stated = {**config_beside(file.target.path, "hf"), **(file.target.config or {})}
        sizes = self.transformer(stated, lambda key, text: file.wrong(f"target.config.{key}", text))
        return sizes if file.grid is None else replace(sizes, grid=file.grid)

    def _vocabulary(self, file: ModelFile) -> Vocabulary:
        folder = _folder(file.target.path)
        stated = {**config_beside(file.target.path, "hf"), **(file.target.config or {})}
        ids, source = token_numbers(stated.get("vocabulary_map"), folder / "tokenizer.json", str(file.path))
        return Vocabulary(ids, source, self.kind[1])

    def _builder(self, file: ModelFile) -> PromptBuilder:
        encode = TextTokenizer(_folder(file.target.path) / "tokenizer.json")
        return PromptBuilder(self.wording(self._sizes(file).grid), self._vocabulary(file), encode)


def section(config: Mapping[str, Any], key: str, usual: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """A part of a config.json, with `usual` values where it states none; each must be of its usual value's kind.

    Raises what `wrong(key, text)` returns for others: numbers must be above 0, and lists hold such numbers.
    """
    stated = config.get(key) or {}
    if not isinstance(stated, Mapping):
        raise wrong(key, "must be a mapping")
    for name, value in usual.items():
        given = stated.get(name)
        many = isinstance(value, tuple)
        if given is None or (many and given == []):
            continue
        if many is not isinstance(given, list | tuple):
            raise wrong(f"{key}.{name}", f"{given}: must be {'a list of whole numbers' if many else 'a number'}")
        for number in given if many else (given,):
            kinds = (int, float) if isinstance(value, float) else (int,)
            if type(number) not in kinds or number <= 0:
                raise wrong(f"{key}.{name}", f"{given}: must be above 0{'' if float in kinds else ', and whole'}")
    return {**usual, **{name: value for name, value in stated.items() if value is not None}}


def llama_transformer(
    config: Mapping[str, Any],
    usual: Mapping[str, Any],
    wrong: Wrong,
    vocab_size: int,
    grid: tuple[int, int],
    **more: Any,
) -> TransformerConfig:
    """The transformer of a Llama or its kin that the `text_config` of a config.json describes.

    `usual` are transformers' values where it states none; `vocab_size` image tokens make pictures of `grid`; `more` are
    other fields of `TransformerConfig`. Raises what `wrong(key, text)` returns for sizes that cannot be.
    """

    def wrong_inside(key: str, text: str) -> UserError:
        return wrong(f"text_config.{key}", text)

    text = section(config, "text_config", usual, wrong)
    if text.get("rope_parameters") and "rope_theta" not in config["text_config"]:
        # Newer files state the base of rotary positions there alone.
        text.pop("rope_theta", None)
    said = llama_sizes(text, wrong_inside)
    if (problem := heads_problem(said["dim"], said["heads"], said.get("kv_heads"), "sequence")) is not None:
        raise wrong_inside(*problem)
    return TransformerConfig(vocab_size, prefix=PROMPT, grid=grid, positions="sequence", pairs="halves", **said, **more)


def _prompts(builder: PromptBuilder, config: TransformerConfig) -> Prompts:
    from lantern_bench.models.loaded_model import Prompts

    words = config.embedded_tokens
    return Prompts(builder, condition_of_arrays=functools.partial(builder.of_arrays, words=words))


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _wrong_in(path: Path) -> Wrong:
    return lambda key, text: UserError(f"{path}: {key}: {text}")


_impossible = _wrong_in(Path("config.json"))


def _is_counter(name: str) -> bool:
    """Batch norms count their batches, which changes no picture."""
    return name.endswith(".num_batches_tracked")
