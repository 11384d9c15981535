"""Janus-Pro (arXiv 2501.17811) as transformers reads it: a Llama whose image tokens have embeddings and a head apart.

An image token is embedded as its row of a table through an aligner, which is computed once when the model is loaded;
these rows stand behind those of the words. The unconditional prompt is the prompt with padding, which the model sees,
in place of its words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lantern_bench.models import hub
from lantern_bench.models.model import Published
from lantern_bench.models.transformer_config import TransformerConfig
from lantern_bench.models.word_model import Encode, Vocabulary, Wording, WordModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lantern_bench.models.io.checkpoint import Checkpoint
    from lantern_bench.models.io.state_dict import KeyMap
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel

_BEGIN, _PAD, _IMAGE = "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"
_PREFIXES = {
    "transformer.tok_embeddings.": "model.language_model.embed_tokens.",
    "transformer.layers.": "model.language_model.layers.",
    "transformer.norm.": "model.language_model.norm.",
    "transformer.head_layer.": "model.generation_head.proj_out.",
    "transformer.output.": "model.generation_head.vision_head.",
}


def _config(vocab_size: int, dim: int, ffn_dim: int, layers: int, heads: int) -> Mapping[str, Any]:
    text = {"vocab_size": vocab_size, "hidden_size": dim, "intermediate_size": ffn_dim, "rms_norm_eps": 1e-6}
    text |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    vision = {"image_size": 384, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "vq_config": {"num_embeddings": 16384}}


class Janus(WordModel):
    """Janus-Pro 1B and 7B."""

    family = "janus"
    licence = hub.JANUS.name
    defaults: Mapping[str, Any] = {"cfg_scale": 5.0, "tree": "eagle1-25"}  # as in the authors' generation_inference.py
    published: ClassVar = {
        "janus-pro-1b": Published("Janus-Pro 1B", _config(102400, 2048, 5632, 24, 16), {}, (24, 24), 1_514_262_528),
        "janus-pro-7b": Published("Janus-Pro 7B", _config(102400, 4096, 11008, 30, 32), {}, (24, 24), 6_641_950_720),
    }
    # What transformers takes where a config.json states nothing.
    any_model = Published("a Janus model", _config(32000, 4096, 11008, 32, 32), {}, None)
    kind = ("model.generation_head.vision_head.weight", "a Janus model")
    ignored = r"model\.(vqmodel|vision_model|aligner|generation_aligner)\.|lm_head\."
    words = (0, 99999)
    neighbour_space = "normalised"  # codes are scaled to unit length when they are looked up
    tokenizer_in_target = True

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json; the rows of image tokens stand behind those of the words."""
        codes = self.whole_number("vq_config", "num_embeddings")
        side = self.whole_number("vision_config", "image_size") // self.whole_number("vision_config", "patch_size")
        sizes = self.llama_config("text_config", codes, grid=(side, side), head_layer=True)
        return replace(sizes, text_vocab_size=(sizes.text_vocab_size or 0) + codes)

    def image_words(self) -> Sequence[int]:
        """Return the rows behind those of the words."""
        rows = self.sizes.text_vocab_size or 0
        return range(rows - self.sizes.vocab_size, rows)

    def published_numbers(self) -> Mapping[str, int]:
        """Return the numbers of the tokens that a prompt needs."""
        return {_BEGIN: 100000, _PAD: 100002, _IMAGE: 100003}

    def wording(self) -> Wording:
        """Return a turn of the user, and the answer that begins with an image; without caption padding between."""

        def padding(prompt: list[int], vocabulary: Vocabulary, _encode: Encode) -> list[int]:
            return [prompt[0], *[vocabulary[_PAD]] * (len(prompt) - 2), prompt[-1]]

        return Wording("<|User|>: {caption}\n\n<|Assistant|>:", (_BEGIN,), (_IMAGE,), padding)

    def prompt_tokens(self, caption: str, encode: Encode, bare: bool = False) -> list[int]:
        """Return the prompt of a caption without the spaces around it."""
        return super().prompt_tokens(caption.strip(), encode, bare)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return a Llama by other names; rows of image tokens go through the aligner."""
        from torch.nn import functional

        from lantern_bench.models.io.state_dict import Slice, llama_key_map

        table, aligner, codes = (
            "model.generation_embeddings.weight",
            "model.generation_aligner.",
            len(self.image_words()),
        )
        for needed in (table, f"{aligner}fc1.weight"):
            checkpoint.require(needed, self.kind[1])
        names = sorted(name for name in checkpoint if name.startswith(aligner) and name.endswith(".weight"))
        layers = [name.removesuffix("weight") for name in names]

        def aligned(rows: Tensor) -> Tensor:
            for number, layer in enumerate(layers):
                rows = functional.gelu(rows) if number else rows.float()
                rows = functional.linear(rows, checkpoint[layer + "weight"].float(), checkpoint[layer + "bias"].float())
            return rows

        words = Slice(_PREFIXES["transformer.tok_embeddings."] + "weight", (target.config.text_vocab_size or 0) - codes)
        images = Slice(table, codes, aligned, file_shape=(codes, checkpoint.shape(table)[-1]))
        keys = llama_key_map(target, target.config, _PREFIXES)
        return {**keys, "transformer.tok_embeddings.weight": (words, images)}

    def load_tokenizer(self, path: Path, device: torch.device) -> VQModel:
        """Load LlamaGen's VQ-16, by other names."""
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.vq import janus_names, load_vq

        return load_vq(open_checkpoint(path).inside("model.vqmodel."), janus_names, device, unit_codes=True)
