"""Janus-Pro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from lantern_bench.models.checkpoint_model import Published
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.families.word_model import Encode, Vocabulary, Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


_JANUS_START = "<｜begin▁of▁sentence｜>"
_PAD = "<｜▁pad▁｜>"
_BEGIN_IMAGE = "<begin_of_image>"


def _janus(vocab_size: int, dim: int, ffn_dim: int, layers: int, heads: int) -> Mapping[str, Any]:
    text = {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": ffn_dim,
        "rms_norm_eps": 1e-6,
    }
    text |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    vision = {"image_size": 384, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "vq_config": {"num_embeddings": 16384}}


class Janus(WordModel):
    """Janus-Pro 1B and 7B."""

    family = "janus"
    licence = hub.LICENCES["janus"].name
    # as in the authors' generation_inference.py
    defaults: Mapping[str, Any] = {"cfg_scale": 5.0, "tree": "eagle1-25"}
    published: ClassVar = {
        "janus-pro-1b": Published(
            about="Janus-Pro 1B",
            config=_janus(vocab_size=102400, dim=2048, ffn_dim=5632, layers=24, heads=16),
            vq={},
            grid=(24, 24),
            parameters=1_514_262_528,
        ),
        "janus-pro-7b": Published(
            about="Janus-Pro 7B",
            config=_janus(vocab_size=102400, dim=4096, ffn_dim=11008, layers=30, heads=32),
            vq={},
            grid=(24, 24),
            parameters=6_641_950_720,
        ),
    }
    # What transformers takes where a config.json states nothing.
    any_model = Published(
        about="a Janus model",
        config=_janus(vocab_size=32000, dim=4096, ffn_dim=11008, layers=32, heads=32),
        vq={},
        grid=None,
    )
    kind = ("model.generation_head.vision_head.weight", "a Janus model")
    ignored = r"model\.(vqmodel|vision_model|aligner|generation_aligner)\.|lm_head\."
    words = (0, 99999)
    vq_layout = "janus"
    neighbour_space = "normalised"  # codes are scaled to unit length when they are looked up
    tokenizer_in_target = True

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json; the rows of image tokens stand behind those of the words."""
        codes = self.whole_number("vq_config.num_embeddings")
        side = self.whole_number("vision_config.image_size") // self.whole_number(
            "vision_config.patch_size"
        )
        sizes = self.llama_config("text_config", codes, grid=(side, side), head_layer=True)
        return replace(sizes, text_vocab_size=(sizes.text_vocab_size or 0) + codes)

    def image_words(self) -> Sequence[int]:
        """Return the rows behind those of the words."""
        rows = self.sizes.text_vocab_size or 0
        return range(rows - self.sizes.vocab_size, rows)

    def published_numbers(self) -> Mapping[str, int]:
        """Return the numbers of the tokens that a prompt needs."""
        return {_JANUS_START: 100000, _PAD: 100002, _BEGIN_IMAGE: 100003}

    def wording(self) -> Wording:
        """Return a turn of the user, and the answer that begins with an image."""

        def padding(prompt: list[int], vocabulary: Vocabulary, _encode: Encode) -> list[int]:
            return [prompt[0], *[vocabulary[_PAD]] * (len(prompt) - 2), prompt[-1]]

        return Wording(
            template="<|User|>: {caption}\n\n<|Assistant|>:",
            before=(_JANUS_START,),
            after=(_BEGIN_IMAGE,),
            without_caption=padding,
        )

    def prompt_tokens(self, caption: str, encode: Encode, bare: bool = False) -> list[int]:
        """Return the prompt of a caption without the spaces around it."""
        return super().prompt_tokens(caption.strip(), encode, bare)

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return a Llama by other names; rows of image tokens go through the aligner, once."""
        from torch.nn import functional

        from lantern_bench.models.checkpoints.key_map import LLAMA, Slice, llama_key_map

        names = {
            ours: theirs.replace("model.", "model.language_model.")
            for ours, theirs in LLAMA.items()
        }
        names["transformer.head_layer."] = "model.generation_head.proj_out."
        names["transformer.output."] = "model.generation_head.vision_head."
        keys = llama_key_map(target, target.config, names)
        if (kind := self.section("text_config").get("model_type")) not in ("llama", None):
            raise self.wrong("text_config.model_type", f"is {kind}, and only llama is supported")
        table = "model.generation_embeddings.weight"
        aligner = "model.generation_aligner."
        for needed in (table, f"{aligner}fc1.weight"):
            checkpoint.require(needed, self.kind[1])
        layers = sorted(
            name.removesuffix("weight")
            for name in checkpoint
            if name.startswith(aligner) and name.endswith(".weight")
        )

        def aligned(rows: Tensor) -> Tensor:
            for number, layer in enumerate(layers):
                rows = functional.gelu(rows) if number else rows.float()
                rows = functional.linear(
                    rows, checkpoint[layer + "weight"].float(), checkpoint[layer + "bias"].float()
                )
            return rows

        codes = self.sizes.vocab_size
        (words,) = keys["transformer.tok_embeddings.weight"]
        images = Slice(table, codes, aligned, file_shape=(codes, checkpoint.shape(table)[-1]))
        words = words._replace(rows=(self.sizes.text_vocab_size or 0) - codes)
        return {**keys, "transformer.tok_embeddings.weight": (words, images)}
