"""Janus-Pro (arXiv 2501.17811) as transformers reads it: a Llama whose image tokens have embeddings and a head apart.

An image token is embedded as its row of a table through an aligner, which is computed once when the model is loaded;
these rows stand behind those of the words. The unconditional prompt is the prompt with padding, which the model sees,
in place of its words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lantern_bench.models.io.hub_files import JANUS
from lantern_bench.models.prompt_tokens import Encode, Vocabulary
from lantern_bench.models.transformer_config import TransformerConfig, Wrong
from lantern_bench.models.transformers_family import PROMPT, Published, TransformersFamily, llama_transformer, section

if TYPE_CHECKING:
    from lantern_bench.models.io.checkpoint import Checkpoint
    from lantern_bench.models.io.state_dict import KeyMap
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQModel

# What transformers takes where a config.json states nothing.
_TEXT = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "rms_norm_eps": 1e-6}
_TEXT |= {"num_hidden_layers": 32, "num_attention_heads": 32}
_VQ: dict[str, Any] = {"num_embeddings": 16384, "embed_dim": 8, "latent_channels": 256, "base_channels": 128}
_VQ |= {"num_res_blocks": 2, "channel_multiplier": (1, 1, 2, 2, 4), "projection_dim": 2048, "num_hidden_layers": 2}
_SEEN = {"image_size": 384, "patch_size": 16}
_BEGIN, _PAD, _IMAGE = "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"
_AROUND = {
    "transformer.tok_embeddings.": "model.language_model.embed_tokens.",
    "transformer.layers.": "model.language_model.layers.",
    "transformer.norm.": "model.language_model.norm.",
    "transformer.head_layer.": "model.generation_head.proj_out.",
    "transformer.output.": "model.generation_head.vision_head.",
}


@dataclass(frozen=True)
class JanusWording:
    """A turn of the user, and the answer that begins with an image."""

    positions: int = PROMPT

    def text(self, caption: str) -> str:
        """The text of a caption's prompt."""
        return f"<|User|>: {caption.strip()}\n\n<|Assistant|>:"

    def around(self, text: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The whole prompt of a tokenised text."""
        return [vocabulary[_BEGIN], *text, vocabulary[_IMAGE]]

    def without_caption(self, prompt: Sequence[int], vocabulary: Vocabulary, encode: Encode) -> list[int]:  # noqa: ARG002
        """The unconditional prompt that goes with a prompt: padding between its ends."""
        return [prompt[0], *[vocabulary[_PAD]] * (len(prompt) - 2), prompt[-1]]


class JanusFamily(TransformersFamily):
    """Janus-Pro 1B and 7B."""

    def transformer(self, config: Mapping[str, Any], wrong: Wrong) -> TransformerConfig:
        """As `TransformersFamily.transformer`."""
        vq, seen = section(config, "vq_config", _VQ, wrong), section(config, "vision_config", _SEEN, wrong)
        side = seen["image_size"] // seen["patch_size"]
        found = llama_transformer(config, _TEXT, wrong, vq["num_embeddings"], (side, side), head_layer=True)
        if vq["projection_dim"] != found.dim:
            raise wrong("vq_config.projection_dim", f"is {vq['projection_dim']}, and hidden_size is {found.dim}")
        return replace(found, text_vocab_size=(found.text_vocab_size or 0) + found.vocab_size)

    def token_ids(self, config: TransformerConfig, vocabulary: Vocabulary) -> Sequence[int]:  # noqa: ARG002
        """The rows behind those of the words."""
        return range((config.text_vocab_size or 0) - config.vocab_size, config.text_vocab_size or 0)

    def wording(self, grid: tuple[int, int]) -> JanusWording:  # noqa: ARG002
        """What stands around a caption."""
        return JanusWording()

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """As `TransformersFamily.target_keys`; rows of image tokens go through the aligner."""
        from torch.nn import functional

        from lantern_bench.models.eagle import check_kind
        from lantern_bench.models.io.state_dict import Piece, llama_key_map

        def aligned(rows: Any) -> Any:
            names = sorted(name for name in checkpoint if name.startswith("model.generation_aligner."))
            for number, weight in enumerate(name for name in names if name.endswith(".weight")):
                rows = rows.float() if number == 0 else functional.gelu(rows)
                bias = checkpoint[weight.removesuffix("weight") + "bias"].float()
                rows = functional.linear(rows, checkpoint[weight].float(), bias)
            return rows

        table, codes = "model.generation_embeddings.weight", target.config.vocab_size
        for needed in (table, "model.generation_aligner.fc1.weight"):
            check_kind(checkpoint, needed, self.kind[1])
        words = Piece(_AROUND["transformer.tok_embeddings."] + "weight", (target.config.text_vocab_size or 0) - codes)
        images = Piece(table, codes, aligned, file_shape=(codes, checkpoint.shape(table)[-1]))
        return {**llama_key_map(target, target.config, _AROUND), "transformer.tok_embeddings.weight": (words, images)}

    def image_tokenizer(self, config: Mapping[str, Any], wrong: Wrong) -> VQModel:
        """As `TransformersFamily.image_tokenizer`: LlamaGen's VQ-16, by other names."""
        from lantern_bench.models.vq import VQConfig, VQModel, read_vq_config

        return VQModel(VQConfig(**read_vq_config(section(config, "vq_config", _VQ, wrong), wrong)))

    def tokenizer_keys(self, tokenizer: VQModel) -> KeyMap:
        """As `TransformersFamily.tokenizer_keys`."""
        from lantern_bench.models.vq import vqgan_key_map

        return vqgan_key_map(tokenizer, lowest_first=True)


_SIZE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
_SEVEN = {"text_config": {"vocab_size": 102400, "num_hidden_layers": 30}, "vq_config": {"projection_dim": 4096}}
FAMILY = JanusFamily(
    name="janus",
    licence=JANUS.name,
    defaults={"cfg_scale": 5.0, "tree": "eagle1-25"},  # guidance as in the authors' generation_inference.py
    kind=("model.generation_head.vision_head.weight", "a Janus model"),
    extra=r"model\.(vision_model|aligner|generation_aligner)\.|lm_head\.",
    numbers={_BEGIN: 100000, _PAD: 100002, _IMAGE: 100003},
    words=(0, 99999),
    neighbour_space="normalised",  # codes are scaled to unit length when they are looked up
    published={
        "janus-pro-1b": Published("Janus-Pro 1B", {"text_config": {"vocab_size": 102400, **_SIZE}}),
        "janus-pro-7b": Published("Janus-Pro 7B", _SEVEN),
    },
)
