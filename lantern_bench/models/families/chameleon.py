"""Chameleon (arXiv 2405.09818) as Anole and Lumina-mGPT publish it, and Lumina-mGPT 2.0 (arXiv 2507.17801).

Lumina-mGPT 2.0 is as in Alpha-VLLM/Lumina-mGPT-2.0 at `f44a4d7f`; its weights were not seen (docs/chameleon.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lantern_bench.models.checkpoint_model import Published
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.families.word_model import Wording, WordModel
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_json

if TYPE_CHECKING:
    from lantern_bench.models.checkpoints.checkpoint import Checkpoint
    from lantern_bench.models.checkpoints.key_map import KeyMap
    from lantern_bench.models.networks.target import TransformerTarget


# Chameleon 7B, which Anole and Lumina-mGPT were trained from.
_SIZES: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_SIZES |= {"intermediate_size": 11008, "rms_norm_eps": 1e-5}
_VQGAN: dict[str, Any] = {"codes": 8192, "code_dim": 256, "unit_codes": False, "attention": ()}
# MoVQGAN 270M (arXiv 2209.09002).
_MOVQGAN: dict[str, Any] = {"codes": 16384, "code_dim": 4, "z_channels": 4, "channels": 256}
_MOVQGAN |= {"channel_mult": (1, 2, 2, 4), "unit_codes": False, "code_norms": True}
_ROW_END = "<reserved08799>"
_IMAGE = "<racm3:break>"
_TURN = "<reserved08706>"
_LETTERS = "ABCDEFGHIJ"
# Options of transformers' Chameleon that no published checkpoint uses.
_ONLY = {"model_type": ("chameleon", "chameleon_xllmx", None), "tie_word_embeddings": (False, None)}


class Chameleon(WordModel):
    """Anole."""

    family = "chameleon"
    licence = hub.LICENCES["chameleon"].name
    # What the LANTERN authors sample both with: the defaults of their generate_images.
    defaults: Mapping[str, Any] = {"cfg_scale": 3.0, "top_k": 2000, "tree": "eagle1-25"}
    has_drafter = True
    published: ClassVar = {
        "anole-7b": Published(
            about="Anole",
            config=_SIZES,
            vq=_VQGAN,
            grid=(32, 32),
            parameters=7_013_666_816,
            aliases=("anole",),
        )
    }
    any_model: ClassVar[Published | None] = published["anole-7b"]
    kind = ("model.layers.0.self_attn.q_norm.weight", "a Chameleon model in the HF layout")
    ignored = r"model\.vqmodel\.|.*\.rotary_emb\.inv_freq$"
    vq_layout = "chameleon"
    words = (9000, 65535)
    line_ends: ClassVar[bool] = False

    def read_sizes(self) -> TransformerConfig:
        """Return the sizes of config.json; the vocabulary says how many codes there are."""
        for key, allowed in _ONLY.items():
            if self.config.get(key) not in allowed:
                raise self.wrong(key, f"is {self.config[key]}, and Chameleon's is {allowed[0]}")
        norm_after = bool(self.config.get("swin_norm"))
        return self.llama_config(
            "",
            len(self.image_words()),
            qk_norm=True,
            norm_after=norm_after,
            line_ends=self.line_ends,
        )

    def image_words(self) -> Sequence[int]:
        """Return the words `IMGIMG<digits as letters A to J>Z` and, if rows have ends, the end of a row."""
        digits = str.maketrans(_LETTERS, "0123456789")
        codes = self.vocabulary.codes_named(
            "IMGIMG([A-J]+)Z", lambda letters: int(letters.translate(digits))
        )
        return (*codes, self.vocabulary[_ROW_END]) if self.line_ends else codes

    def published_numbers(self) -> Mapping[str, int]:
        """Return the published numbers of the tokens that a picture needs."""
        numbers = {"<s>": 0, _IMAGE: 8197, _TURN: 8710}
        numbers |= {f"<reserved{number:05d}>": number + 4 for number in range(8799, 8799 + 34)}
        return numbers | {
            f"IMGIMG{''.join(_LETTERS[int(d)] for d in str(code))}Z": code + 4
            for code in range(8192)
        }

    def wording(self) -> Wording:
        """Return the wording: the caption alone; without it the start of the text and that of the image."""
        return Wording(
            template="{caption}",
            before=(self.start,),
            after=(_TURN, _IMAGE),
            without_caption=lambda prompt, *_: [prompt[0], prompt[-1]],
        )

    @property
    def start(self) -> str:
        """The token before a prompt."""
        return "<s>"

    def target_keys(self, target: TransformerTarget, checkpoint: Checkpoint) -> KeyMap:
        """Return transformers' Llama; in the authors' layout all heads of a parallel part share a row of the norms."""
        import torch

        from lantern_bench.models.checkpoints.key_map import llama_key_map, rows_of_tokens

        keys = llama_key_map(target, target.config)
        shapes = {name: tensor.shape for name, tensor in target.state_dict().items()}
        for name, (norm, *_) in list(keys.items()):
            if re.search(r"\.[qk]_norm\.", name) and norm.key in checkpoint:
                heads, width = shapes[name]
                rows, *_ = checkpoint.shape(norm.key)
                if rows < heads and heads % rows == 0:
                    repeat = functools.partial(
                        torch.repeat_interleave, repeats=heads // rows, dim=0
                    )
                    keys[name] = (norm._replace(prepare=repeat, file_shape=(rows, width)),)
        return {
            **keys,
            "transformer.output.weight": (rows_of_tokens("lm_head.weight", target.config),),
        }


class Lumina(Chameleon):
    """Lumina-mGPT: the prompt states the picture's size, and a token ends each row."""

    published: ClassVar = {
        "lumina-mgpt-7b-768": Published(
            about="Lumina-mGPT",
            config=_SIZES,
            vq=_VQGAN,
            grid=(48, 48),
            parameters=7_013_666_816,
            aliases=("lumina-mgpt",),
        )
    }
    any_model = None
    line_ends = True

    def wording(self) -> Wording:
        """Return the wording: the size in words before the caption, and in tokens behind it."""
        height, width = (self.pixels * side for side in self.sizes.grid)
        if height % 32 or width % 32:
            step = 32 // self.pixels
            multiple = "an even number" if step == 2 else f"a multiple of {step}"
            grid = f"grid {self.sizes.grid[0]}x{self.sizes.grid[1]}"
            raise UserError(f"{grid}: this model's pictures have {multiple} of each")
        template = (
            f"Generate an image of {width}x{height} according to the following prompt:\n{{caption}}"
        )
        sides = (f"<reserved{8800 + side // 32:05d}>" for side in (height, width))
        return Wording(
            template=template,
            before=(self.start,),
            after=(_TURN, _IMAGE, *sides),
            without_caption=lambda prompt, *_: prompt[-3:],
        )


class Lumina2(Lumina):
    """Lumina-mGPT 2.0: another vocabulary, and MoVQGAN as the tokenizer."""

    family = "lumina-mgpt2"
    licence = hub.LICENCES["apache"].name
    # What the authors' README samples with. Their guidance decreases within an image, but never below 4.
    defaults: Mapping[str, Any] = {"cfg_scale": 4.0, "top_k": 4096, "tree": "eagle1-25"}
    has_drafter = False  # none was published
    published: ClassVar = {
        "lumina-mgpt2-7b": Published(
            about="Lumina-mGPT 2.0",
            config=_SIZES | {"vocab_size": 171385, "first_code": 155000, "codes": 16384},
            vq=_MOVQGAN,
            grid=(96, 96),
            parameters=7_880_781_824,
            aliases=("lumina-mgpt2",),
        )
    }
    words = (0, 151642)
    vq_layout = "movqgan"
    pixels = 8

    def image_words(self) -> Sequence[int]:
        """Return the words: code n is word `first_code` + n, as in the authors' code."""
        first = self.whole_number("first_code")
        codes = self.whole_number("codes")
        return (*range(first, first + codes), self.vocabulary[_ROW_END])

    def published_numbers(self) -> Mapping[str, int]:
        """Return the numbers: start and end of an image are published, the others invented."""
        numbers = {"<|endoftext|>": 151643, _IMAGE: 151665, "<eoss>": 151666, _TURN: 151667}
        return numbers | {
            f"<reserved{number:05d}>": number - 8799 + 151668 for number in range(8799, 8799 + 130)
        }

    @property
    def start(self) -> str:
        """The tokenizer's start of text, or its end where it has none."""
        path = self.folder / "tokenizer_config.json" if self.folder is not None else None
        stated = read_json(path) if path is not None and path.is_file() else {}
        token = stated.get("bos_token") or stated.get("eos_token") or "<|endoftext|>"
        return str(token["content"] if isinstance(token, dict) else token)
