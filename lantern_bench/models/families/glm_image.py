"""The language model of GLM-Image, in the transformers layout.

It decodes a coarse grid of codes and then a fine one. A diffusion model, which this package does
not run, makes a picture of the fine grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_bench.models.checkpoint_model import FAMILIES
from lantern_bench.models.families.word_model import Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig, read_number
from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


_COARSE_SIDE = 16  # of the coarse grid of a square picture
_SIZE_BEGIN = "<sop>"
_SIZE_END = "<eop>"
_IMAGE_START = "<|dit_token_16384|>"
_LAYERS = "model.language_model."
_ROPE = "text_config.rope_parameters"


def coarse_grid(grid: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the coarse grid: at most 256 codes, in the shape of `grid`."""
    ratio = grid[0] / grid[1]
    rows = int(math.sqrt(ratio) * _COARSE_SIDE)
    columns = int(math.sqrt(1 / ratio) * _COARSE_SIDE)
    return rows, columns


class GlmImage(WordModel):
    """GLM-Image's 9B language model. Its weights do not state the picture's grid."""

    family_spec = FAMILIES["glm-image"]
    longest_prompt = 1024

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json."""
        grid = self.grid
        assert grid is not None  # `published.toml` states one
        sizes = self.llama_config(
            "text_config",
            read=("attention_bias", "partial_rotary_factor", "mrope_section"),
            positions="axes",
            # `target_keys` reorders the rows of queries and keys to pairs of neighbours.
            pairs="interleaved",
            axis_pairs=self._axis_pairs(),
            coarse_grid=coarse_grid(grid),
            qkv_bias=bool(self.section("text_config").get("attention_bias", True)),
            norm_both=True,
        )
        rotated = int(self._rotated_share() * sizes.head_dim)
        if 2 * sum(sizes.axis_pairs) != rotated:
            raise self.error_at(
                f"{_ROPE}.mrope_section",
                f"{list(sizes.axis_pairs)}: must have {rotated / 2:g} pairs in all, for a head of "
                f"{sizes.head_dim} numbers of which {rotated} rotate",
            )
        return sizes

    def _rotated_share(self) -> float:
        """Return the part of the numbers of a head that rotate."""

        def error_at(key: str, text: str) -> UserError:
            return self.error_at(f"{_ROPE}.{key}", text)

        key = "partial_rotary_factor"
        return float(read_number(key, self.section(_ROPE).get(key, 1.0), error_at))

    def _axis_pairs(self) -> tuple[int, int, int]:
        """Return how many pairs rotate with the grid, the row and the column."""
        pairs = self.section(_ROPE).get("mrope_section")
        counts = pairs if isinstance(pairs, list) else []
        if len(counts) != 3 or not all(type(count) is int and count > 0 for count in counts):
            raise self.error_at(
                f"{_ROPE}.mrope_section", f"{pairs}: must be three whole numbers above 0"
            )
        time, row, column = counts
        return time, row, column

    def image_words(self) -> Sequence[int]:
        """Return the codes, the first words of the vocabulary."""
        return range(self.whole_number("vq_config.num_embeddings"))

    def wording(self) -> Wording:
        """Return a caption, the sizes of both grids, the fine one first, and the image's start."""
        coarse, fine = self.sizes.grids
        sizes = [f"{_SIZE_BEGIN}{rows} {columns}{_SIZE_END}" for rows, columns in (fine, coarse)]
        return Wording(template="{caption}" + "".join(sizes), before=(), after=(_IMAGE_START,))

    def unconditional(self, prompt: list[int]) -> list[int]:
        """Return the prompt itself: without guidance nothing reads it."""
        return prompt

    def decoder_input(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return all tokens, and each code of the fine grid twice in both directions.

        So `GlmImagePipeline` of diffusers takes them as `prior_token_ids`.
        """
        if tokens.shape[1] != self.sizes.image_tokens:
            raise UserError(
                f"{self.name}: its images have {self.sizes.image_tokens} tokens, and this run's "
                f"have {tokens.shape[1]}",
                "Give the model file its former grid.",
            )
        fine = tokens[:, self.sizes.coarse_tokens :].unflatten(1, self.sizes.grid)
        doubled = fine.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return {"tokens": tokens, "prior_token_ids": doubled.flatten(1)}

    @property
    def _tokenizer_json(self) -> Path:
        """The file beside the weights, or where the repository has it."""
        beside = super()._tokenizer_json
        published = beside.parents[1] / "processor" / beside.name
        return published if published.is_file() and not beside.is_file() else beside

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:  # noqa: ARG002
        """Return the key map of a Llama with further norms and one matrix for `w1` and `w3`."""
        from lantern_bench.models.checkpoints.key_map import LLAMA, Slice, llama_key_map

        config = target.config
        names = {
            **LLAMA,
            "model.": _LAYERS,
            ".attention_output_norm.": ".post_self_attn_layernorm.",
            ".ffn_output_norm.": ".post_mlp_layernorm.",
        }
        keys = llama_key_map(target, config, names, turned=_neighbouring_pairs(config))
        for layer in range(config.layers):
            for name, half in (("w1", 0), ("w3", 1)):
                keys[f"transformer.layers.{layer}.feed_forward.{name}.weight"] = (
                    Slice(
                        f"{_LAYERS}layers.{layer}.mlp.gate_up_proj.weight",
                        prepare=functools.partial(_half, number=half),
                        file_shape=(2 * config.ffn_dim, config.dim),
                    ),
                )
        # The words behind the codes end a picture, whose size is known here.
        head = Slice(
            "lm_head.weight",
            prepare=lambda rows: rows[: config.vocab_size],
            file_shape=(self.whole_number("text_config.vision_vocab_size"), config.dim),
        )
        keys["transformer.output.weight"] = (head,)
        return keys


def _half(rows: Tensor, number: int) -> Tensor:
    return rows.chunk(2)[number]


def _neighbouring_pairs(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return what reorders the rows of queries and keys.

    There the pairs are (i, i + n) of the first 2n numbers of a head, here (2i, 2i + 1).
    """
    import torch

    rotated = 2 * sum(config.axis_pairs)
    with torch.device("cpu"):
        pairs = torch.arange(rotated).view(2, -1).mT.flatten()
        order = torch.cat([pairs, torch.arange(rotated, config.head_dim)])

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)

    return reorder
