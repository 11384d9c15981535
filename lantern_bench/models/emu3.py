"""Emu3-Gen (arXiv 2409.18869) as transformers reads it: a Llama that writes pictures in its own vocabulary.

A forced token ends each row. The unconditional prompt is that of a list of faults, as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lantern_bench.errors import UserError
from lantern_bench.models import hub
from lantern_bench.models.model import Published
from lantern_bench.models.transformer_config import TransformerConfig
from lantern_bench.models.word_model import Encode, Vocabulary, Wording, WordModel

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.io.checkpoint import Checkpoint
    from lantern_bench.models.io.state_dict import KeyMap
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel

_TEXT: dict[str, Any] = {"vocab_size": 184622, "hidden_size": 4096, "intermediate_size": 14336}
_TEXT |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_TEXT |= {"rope_parameters": {"rope_theta": 1e6}}
_VQ: dict[str, Any] = {"codes": 32768, "code_dim": 4, "z_channels": 4, "channels": 256, "channel_mult": (1, 2, 2, 4)}
_VQ |= {"unit_codes": False, "code_norms": True}
_BEGIN, _ROW_END, _START, _IMAGE = "<|extra_203|>", "<|extra_200|>", "<|image start|>", "<|image token|>"
_GOOD = " masterpiece, film grained, best quality."
_BAD = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_PREFIXES = {
    "transformer.tok_embeddings.": "model.text_model.embed_tokens.",
    "transformer.layers.": "model.text_model.layers.",
    "transformer.norm.": "model.text_model.norm.",
    "transformer.output.": "lm_head.",
}


class Emu3(WordModel):
    """Emu3-Gen 8B; the grid is that of 720 x 720 pixels, which no file states."""

    family = "emu3"
    licence = hub.APACHE.name
    defaults: Mapping[str, Any] = {"cfg_scale": 3.0, "top_k": 2048, "tree": "eagle1-25"}  # as in image_generation.py
    published: ClassVar = {
        "emu3-gen": Published(
            "Emu3-Gen", {"text_config": _TEXT, "vq_config": {"codebook_size": 32768}}, _VQ, (90, 90), 7_870_021_632
        )
    }
    any_model = published["emu3-gen"]._replace(about="an Emu3 model")
    kind = ("model.text_model.embed_tokens.weight", "an Emu3 model")
    ignored = r"model\.vqmodel\.|lm_head\."
    words = (0, 151642)
    pixels = 8
    tokenizer_in_target = True

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json."""
        codes = self.whole_number("vq_config", "codebook_size")
        return self.llama_config("text_config", codes + 1, line_ends=True)

    def image_words(self) -> Sequence[int]:
        """Return the codes by name, and the end of a row."""
        codes = self.vocabulary.codes_named(r"<\|visual token (\d+)\|>")
        if len(codes) != self.sizes.n_codes:
            text = f"the vocabulary has {len(codes)} image codes, and vq_config.codebook_size is {self.sizes.n_codes}"
            raise UserError(f"config.json: {text}", "Download the folder again.")
        # Prompts need these, and would be made of other tokens without them.
        _ = self.vocabulary[_START], self.vocabulary[_IMAGE]
        return (*codes, self.vocabulary[_ROW_END])

    def published_numbers(self) -> Mapping[str, int]:
        """Return the published numbers of the tokens of prompts, and the codes in order."""
        codes = {f"<|visual token {code:06}|>": 151854 + code for code in range(32768)}
        return {_BEGIN: 151849, _ROW_END: 151846, _START: 151852, _IMAGE: 151851} | codes

    def wording(self) -> Wording:
        """Return a caption with words of praise, or a list of faults, and the size of the picture in tokens."""
        rows, columns = self.sizes.grid
        image = f"{_START}{rows}*{columns}{_IMAGE}"

        def faults(_prompt: list[int], vocabulary: Vocabulary, encode: Encode) -> list[int]:
            return [vocabulary[_BEGIN], *encode(_BAD + image)]

        return Wording(f"{{caption}}{_GOOD}{image}", (_BEGIN,), (), faults)

    def name_now(self, name: str) -> str:
        """Return the name now: those of the published files come from an earlier version of transformers."""
        name = re.sub(r"^text_model\.lm_head\.", "lm_head.", name)
        name = re.sub(r"^text_model\.(model\.)?", "model.text_model.", name)
        return re.sub(r"^vqmodel\.", "model.vqmodel.", name)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return a Llama by other names; of the head (the embedding, where they are tied) it takes some rows."""
        from lantern_bench.models.io.state_dict import llama_key_map, rows_of_tokens

        head = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.text_model.embed_tokens.weight"
        keys = llama_key_map(target, target.config, _PREFIXES)
        return {**keys, "transformer.output.weight": (rows_of_tokens(head, target.config),)}

    def load_tokenizer(self, path: Path, device: torch.device) -> VQModel:
        """Load Emu3's tokenizer of videos."""
        from lantern_bench.models.emu3_tokenizer import load_emu3_tokenizer
        from lantern_bench.models.io.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(path).renamed(self.name_now)
        return load_emu3_tokenizer(checkpoint.inside("model.vqmodel."), device)

    def new_tokenizer(self) -> VQModel:
        """Return the published tokenizer of videos with fresh weights."""
        from lantern_bench.models.emu3_tokenizer import Emu3Tokenizer
        from lantern_bench.models.vq import VQConfig

        return Emu3Tokenizer(VQConfig(**self.row.vq))
