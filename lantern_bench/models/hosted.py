"""Models of transformers in the decode loop.

A model file names one Python file, whose class is the model. Its decoder computes on this package's
cache with this package's tree masks. docs/adding-a-model.md has an example.
"""

from __future__ import annotations

import contextlib
import math
import runpy
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lantern_bench.decoding.neighbours import Space
from lantern_bench.models.checkpoints.checkpoint import is_mostly_zero
from lantern_bench.models.loaded_model import LoadedModel, to_bytes
from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.target import (
    CachedTarget,
    Condition,
    prompt_condition,
    prompt_rows,
    without_line_ends,
)
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import LanternError, UserError
from lantern_bench.utils.files import file_sha256
from lantern_bench.utils.hashes import hash_of
from lantern_bench.utils.text import one_line

if TYPE_CHECKING:
    from lantern_bench.models.model_file import PythonModel

# Endings of the files that determine the output: weights, configuration, tokenizer.
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".yaml", ".model")


_NEEDED = "docs/adding-a-model.md lists the attributes and methods that a hosted model must have"


class HostedModel(ABC):
    """A model of transformers that draws by next-token prediction over codes."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    # The decoder takes inputs_embeds [rows, n, dim], position_ids, a 4D attention_mask and
    # past_key_values, and returns last_hidden_state. Its `config` has the sizes.
    decoder: nn.Module
    grid: tuple[int, int]  # rows and columns of codes
    codes: int  # number of codes
    prefix: int = 256  # tokens of the longest prompt
    # rows and columns of a coarser grid of codes, which comes before `grid`
    coarse_grid: tuple[int, int] | None = None
    line_ends: bool = False  # a forced token, number `codes`, ends each row
    # Space of the nearest codes: "normalised" if the tokenizer scales its rows to unit length.
    neighbour_space: Space = "raw"

    @abstractmethod
    def __init__(self, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load the checkpoint that the model file names."""

    @abstractmethod
    def prompts(self, caption: str) -> tuple[list[int], list[int]]:
        """Return the words of the prompt with a caption, and of the unconditional prompt."""

    def positions(self, counted: Tensor, words: Tensor) -> Tensor:  # noqa: ARG002  # for subclasses
        """Return the decoder's `position_ids`: [rows, n], or [axes, rows, n] for several axes.

        Args:
            counted: The number of each token, from the first word of its prompt, int64 [rows, n].
                The image begins at the number `words`, and drafts may reach beyond its end.
            words: Number of words of the prompt of each row, int64 [rows, 1].
        """
        return counted

    @abstractmethod
    def embed_words(self, words: Tensor) -> Tensor:
        """Embed words of prompts int64 [rows, n] to [rows, n, dim]."""

    @abstractmethod
    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes int64 [rows, n], and forced tokens if there are any, to [rows, n, dim]."""

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Map last hidden states [rows, n, dim] to logits [rows, n, codes].

        With forced tokens there is one more logit. If a drafter is trained, gradients must pass.
        """

    @abstractmethod
    def codebook(self) -> Tensor:
        """Return the rows of the codebook [codes, d] as stored."""

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes int64 [B, N], without forced tokens, to RGB [B, H, W, 3] from -1 to 1.

        The pictures of a model without this method are maps of its codes.
        """
        raise NotImplementedError


def makes_pixels(cls: type[HostedModel]) -> bool:
    """Return whether a hosted model decodes its codes to pixels."""
    return cls.pixels is not HostedModel.pixels


class _Decoder(nn.Module):
    """A hosted model with the interface of `Transformer` and of a condition."""

    def __init__(self, hosted: HostedModel) -> None:
        super().__init__()
        self.decoder = hosted.decoder
        self.tok_embeddings = hosted.embed_codes
        self._hosted = (hosted,)  # in a tuple, so that only the decoder is a submodule

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        return self._hosted[0].embed_words(prompt_rows(values, 2 if guided else 1))

    def output(self, features: Tensor) -> Tensor:
        dtype = next(self.decoder.parameters()).dtype
        return self._hosted[0].logits(features.to(dtype)).float()

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return self.decoder(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=mask.to(x.dtype),
            use_cache=False,
        ).last_hidden_state

    def step(
        self, x: Tensor, *, positions: Tensor, cache: KVCache, slots: Tensor, mask: Tensor
    ) -> Tensor:
        return self.decoder(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=_SharedCache(cache, slots, mask.shape[-1]),
            use_cache=True,
        ).last_hidden_state


@dataclass
class _SharedCache:
    """A `KVCache` that the attention of transformers writes and reads, at fixed slots."""

    cache: KVCache
    slots: Tensor
    columns: int

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.cache.write(
            layer,
            slots=self.slots,
            keys=keys.transpose(1, 2),
            values=values.transpose(1, 2),
            used=self.columns,
        )


class _HostedTarget(CachedTarget):
    """A hosted model as the target of the decode loop and as its pixel decoder."""

    linear_head = False  # its head may be more than one matrix

    def __init__(self, hosted: HostedModel) -> None:
        text_config: Any = hosted.decoder.config
        heads = text_config.num_attention_heads
        width = text_config.hidden_size
        config = TransformerConfig(
            vocab_size=hosted.codes + 1 if hosted.line_ends else hosted.codes,
            # The cache is as wide as the heads, which some models do not cut from the hidden size.
            dim=heads * (getattr(text_config, "head_dim", None) or width // heads),
            layers=text_config.num_hidden_layers,
            heads=heads,
            ffn_dim=text_config.intermediate_size,
            prefix=hosted.prefix,
            grid=hosted.grid,
            coarse_grid=hosted.coarse_grid,
            kv_heads=getattr(text_config, "num_key_value_heads", None),
            positions="sequence",
            line_ends=hosted.line_ends,
        )
        decoder = _Decoder(hosted)
        super().__init__(config, decoder, condition=decoder)
        self._hosted = hosted
        if width != config.dim:
            # A drafter is as wide as the features, and cuts them into heads of an even width.
            heads = math.gcd(heads, width // 2)
            self.drafter_config = replace(config, dim=width, heads=heads, kv_heads=None)

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        if self.config.line_ends:
            tokens = without_line_ends(tokens, self.config.grid)
        return to_bytes(self._hosted.pixels(tokens.long().to(self.device)))

    def position_ids(self, counted: Tensor, words: Tensor) -> Tensor:
        return self._hosted.positions(counted, words)

    def features_without_cache(self, condition: Condition, tokens: Tensor) -> Tensor:
        # The decoder's own forward of each row, with its own mask.
        prompts = prompt_rows(condition.values.to(self.device), 2)
        valid = prompt_rows(condition.valid.to(self.device), 2)
        drawn = self.transformer.tok_embeddings(tokens[:, :-1])
        rows = []
        for row, prompt in enumerate(prompts):
            words = self._hosted.embed_words(prompt[valid[row]][None])
            x = torch.cat([words, drawn[row % len(drawn)][None]], dim=1)
            counted = torch.arange(x.shape[1], device=x.device)[None]
            length = torch.full_like(counted[:, :1], words.shape[1])
            features = self.transformer.decoder(
                inputs_embeds=x,
                position_ids=self._hosted.positions(counted, length),
                use_cache=False,
            ).last_hidden_state
            rows.append(features[:, words.shape[1] - 1 :])
        return torch.cat(rows)


def load_class(file: PythonModel) -> type[HostedModel]:
    """Run the Python file of a model file and return its `HostedModel`.

    Raises:
        UserError: The file cannot be imported, or does not define exactly one.
    """
    path = file.python
    module = f"lantern_bench_model_{path.stem}"
    try:
        names = runpy.run_path(str(path), run_name=module)
    except Exception as error:
        raise file.error_at(
            "python", f"{path.name}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
    classes = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, HostedModel) and value.__module__ == module
    ]
    if len(classes) != 1:
        raise file.error_at(
            "python",
            f"{path.name}: must define one subclass of HostedModel, and defines {len(classes)}",
        )
    return classes[0]


@contextlib.contextmanager
def _naming(file: PythonModel, what: str) -> Iterator[None]:
    """Let errors of a user's class name its file and the line of it that was reached last."""
    try:
        yield
    except LanternError:
        raise
    except Exception as error:
        path = str(file.python)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        place = f"{file.python.name} line {lines[-1]}" if lines else file.python.name
        raise file.error_at("python", f"{place}: {what}: {one_line(error)}. {_NEEDED}") from error


@torch.no_grad()
def load_hosted(file: PythonModel, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load the model of a model file with the key `python`.

    Args:
        file: The model file.
        device: Device of the weights.
        dtype: Type of the weights.

    Raises:
        UserError: The class lacks a method or an attribute, or raises an error.
    """
    cls = load_class(file)
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise file.error_at("python", f"{cls.__name__} lacks {', '.join(missing)}")
    remarks: list[str] = []
    with _naming(file, f"{cls.__name__} cannot be built"):
        hosted = cls(file.checkpoint, device, dtype)
        for name, module in vars(hosted).items():
            if isinstance(module, nn.Module):
                module.requires_grad_(requires_grad=False).eval()
                remarks += [
                    f"{file.path}: {name}.{weight} is zeros, as in an incomplete checkpoint"
                    for weight, tensor in module.named_parameters()
                    if is_mostly_zero(weight, tensor)
                ]
        target = _HostedTarget(hosted)
        codebook = hosted.codebook()

    def condition(captions: Sequence[str]) -> Condition:
        with _naming(file, f"{cls.__name__}.prompts fails"):
            prompts = prompt_condition([hosted.prompts(caption) for caption in captions])
        length = prompts.values.shape[2]
        if length > hosted.prefix:
            raise UserError(
                f"{file.path}: caption: its prompt has {length} tokens, and at most "
                f"{hosted.prefix} are taken",
                "Say it in fewer words.",
            )
        return prompts

    # None if the checkpoint is a file.
    files = sorted(path for path in file.checkpoint.rglob("*") if path.suffix in _ENDINGS)
    loaded = LoadedModel(
        name=str(file.path),
        target=target,
        drafter=None,
        pixels=target,
        codebook=codebook,
        condition=condition,
        weights={"target": hash_of(files or [file.checkpoint]), "code": file_sha256(file.python)},
        grid=hosted.grid,
        neighbour_space=hosted.neighbour_space,
        reference=target.logits_without_cache,
        compiles=False,
        remarks=remarks[:8],
    )
    if not makes_pixels(cls):
        loaded.show_codes(codebook)
    return loaded
