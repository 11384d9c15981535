"""Emu3-Gen (arXiv 2409.18869) as transformers reads it: a Llama that writes pictures in its own vocabulary.

A forced token ends each row. The unconditional prompt is that of a list of faults, as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.io.hub_files import APACHE
from lantern_bench.models.prompt_tokens import Encode, Vocabulary
from lantern_bench.models.transformer_config import TransformerConfig, Wrong
from lantern_bench.models.transformers_family import PROMPT, Published, TransformersFamily, llama_transformer, section

if TYPE_CHECKING:
    from lantern_bench.models.io.checkpoint import Checkpoint
    from lantern_bench.models.io.state_dict import KeyMap
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel

# What transformers takes where a config.json states nothing: the published sizes.
_TEXT: dict[str, Any] = {"vocab_size": 184622, "hidden_size": 4096, "intermediate_size": 14336}
_TEXT |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6}
_VQ: dict[str, Any] = {"codebook_size": 32768, "embed_dim": 4, "latent_channels": 4, "base_channels": 256}
_VQ |= {"channel_multiplier": (1, 2, 2, 4), "num_res_blocks": 2, "attn_resolutions": (3,)}
_VQ |= {"temporal_downsample_factor": 4, "num_attention_heads": 1}
_BEGIN, _ROW_END, _START, _IMAGE = "<|extra_203|>", "<|extra_200|>", "<|image start|>", "<|image token|>"
_CODE = r"<\|visual token (\d+)\|>"
_GOOD = " masterpiece, film grained, best quality."
_BAD = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_AROUND = {
    "transformer.tok_embeddings.": "model.text_model.embed_tokens.",
    "transformer.layers.": "model.text_model.layers.",
    "transformer.norm.": "model.text_model.norm.",
    "transformer.output.": "lm_head.",
}


@dataclass(frozen=True)
class Emu3Wording:
    """A caption with words of praise, the size of the picture in tokens, and the start of an image."""

    grid: tuple[int, int]
    positions: int = PROMPT

    def text(self, caption: str) -> str:
        """The text of a caption's prompt."""
        return f"{caption}{_GOOD}{self._image}"

    def around(self, text: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The whole prompt of a tokenised text."""
        return [vocabulary[_BEGIN], *text]

    def without_caption(self, prompt: Sequence[int], vocabulary: Vocabulary, encode: Encode) -> list[int]:  # noqa: ARG002
        """The unconditional prompt, the same for all."""
        return self.around(encode(f"{_BAD}{self._image}"), vocabulary)

    @property
    def _image(self) -> str:
        return f"{_START}{self.grid[0]}*{self.grid[1]}{_IMAGE}"


class Emu3Family(TransformersFamily):
    """Emu3-Gen 8B."""

    def transformer(self, config: Mapping[str, Any], wrong: Wrong) -> TransformerConfig:
        """As `TransformersFamily.transformer`; the grid is that of 720 x 720 pixels, which no file states."""
        codes = section(config, "vq_config", _VQ, wrong)["codebook_size"]
        return llama_transformer(config, _TEXT, wrong, codes + 1, (90, 90), line_ends=True)

    def token_ids(self, config: TransformerConfig, vocabulary: Vocabulary) -> Sequence[int]:
        """The codes by name, and the end of a row."""
        codes = vocabulary.codes_named(_CODE)
        if len(codes) != config.vocab_size - 1:
            text = (
                f"the vocabulary has {len(codes)} image codes, and vq_config.codebook_size is {config.vocab_size - 1}"
            )
            raise UserError(f"config.json: {text}", "Download the folder again.")
        # Prompts need these, and would be made of other tokens without them.
        _ = vocabulary[_START], vocabulary[_IMAGE]
        return (*codes, vocabulary[_ROW_END])

    def wording(self, grid: tuple[int, int]) -> Emu3Wording:
        """What stands around a caption."""
        return Emu3Wording(grid)

    def name_now(self, name: str) -> str:
        """The names of the published files come from an earlier version of transformers."""
        name = re.sub(r"^text_model\.lm_head\.", "lm_head.", name)
        name = re.sub(r"^text_model\.(model\.)?", "model.text_model.", name)
        return re.sub(r"^vqmodel\.", "model.vqmodel.", name)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """As `TransformersFamily.target_keys`; of the head (the embedding, where they are tied) it takes some rows."""
        from lantern_bench.models.io.state_dict import llama_key_map, rows_of_tokens

        head = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.text_model.embed_tokens.weight"
        pieces = llama_key_map(target, target.config, _AROUND)
        return {**pieces, "transformer.output.weight": (rows_of_tokens(head, target.config),)}

    def image_tokenizer(self, config: Mapping[str, Any], wrong: Wrong) -> VQModel:
        """As `TransformersFamily.image_tokenizer`."""
        from lantern_bench.models.emu3.tokenizer import Emu3Tokenizer
        from lantern_bench.models.vq import VQConfig, read_vq_config

        stated = section(config, "vq_config", _VQ, wrong)
        sizes, last = read_vq_config(stated, wrong), len(stated["channel_multiplier"]) - 1
        attends, frames = list(stated["attn_resolutions"] or []), stated["temporal_downsample_factor"]
        if attends not in ([], [last]):
            raise wrong("vq_config.attn_resolutions", f"{attends}: only the lowest resolution ({last}) can attend")
        if stated["num_attention_heads"] != 1:
            raise wrong("vq_config.num_attention_heads", f"{stated['num_attention_heads']}: must be 1")
        if sizes["z_channels"] != sizes["code_dim"] or frames not in (1, 2, 4, 8):
            text = "latent_channels must equal embed_dim, and temporal_downsample_factor be 1, 2, 4 or 8"
            raise wrong("vq_config", text)
        return Emu3Tokenizer(VQConfig(**sizes, unit_codes=False, attention=bool(attends), code_norms=True), frames)

    def tokenizer_keys(self, tokenizer: VQModel) -> KeyMap:
        """As `TransformersFamily.tokenizer_keys`."""
        from lantern_bench.models.emu3.tokenizer import key_map

        return key_map(tokenizer)


FAMILY = Emu3Family(
    name="emu3",
    licence=APACHE.name,
    defaults={"cfg_scale": 3.0, "top_k": 2048, "tree": "eagle1-25"},  # as in the authors' image_generation.py
    kind=("model.text_model.embed_tokens.weight", "an Emu3 model"),
    extra=r"lm_head\.",
    numbers={_BEGIN: 151849},
    words=(0, 151642),
    published={"emu3-gen": Published("Emu3-Gen", {})},
    token_pixels=8,
)
