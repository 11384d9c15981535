"""Checkpoints of a few thousand numbers that transformers itself writes, and what transformers
makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

TEXT = ("a", "red", "lantern", "over", "lake", "the", "at", "dusk", "lowres", "bad")
JANUS_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<begin_of_image>",
)
JANUS_SPECIAL += ("<|User|>", "<|Assistant|>")


class Shape(NamedTuple):
    """Sizes of a tiny model; `side` is that of the grid, `mult` the channels of the image tokenizer
    by resolution.
    """

    dim: int = 32
    heads: int = 4
    kv_heads: int = 4
    head_dim: int | None = None
    ffn: int = 48
    layers: int = 2
    tied: bool = False
    codes: int = 40
    side: int = 4
    mult: tuple[int, ...] = (1, 2)
    blocks: int = 1
    code_dim: int = 8
    theta: float = 10000.0
    # resolutions of Emu3's image tokenizer, from the highest; None: the lowest
    attends: tuple[int, ...] | None = None
    frames: int = 4


class Expected(NamedTuple):
    """What transformers computes: logits [2, N, V] with and without caption, greedy tokens [N],
    pixels [H, W, 3].
    """

    logits: Tensor
    tokens: Tensor
    pixels: Tensor


def write_tokenizer(path: Path, names: Iterable[str], unknown: str = "<unk>") -> dict[str, int]:
    """A tokenizer.json that splits at spaces and keeps names in angle brackets whole; returns its
    vocabulary.
    """
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in vocabulary if name.startswith("<")]
    )
    tokenizer.save(str(path))
    return vocabulary


def vocabulary_of(folder: Path) -> dict[str, int]:
    """The vocabulary of a model's tokenizer."""
    return dict(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights with which the tokens of a greedy image differ; those of transformers are nearly
    zero.
    """
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 1.0 if "embed" in name else 1.4 * parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * scale)
        else:
            base = 1.0 if name.endswith("weight") else 0.0
            parameter.copy_(base + 0.1 * torch.randn(parameter.shape, generator=draws))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(
                (0.3 * torch.randn(buffer.shape, generator=draws)).exp() - int("mean" in name)
            )


def write_janus(folder: Path, shape: Shape, seed: int = 1) -> Any:
    """A Janus with its tokenizer; returns transformers' model."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder / "tokenizer.json", ("<unk>", *JANUS_SPECIAL, *TEXT))
    text = {"model_type": "llama", "vocab_size": len(vocabulary) + 7, "hidden_size": shape.dim}
    text |= {
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    text |= {"num_key_value_heads": shape.kv_heads, "rope_theta": shape.theta, "rms_norm_eps": 1e-6}
    text |= {
        "bos_token_id": vocabulary[JANUS_SPECIAL[0]],
        "pad_token_id": vocabulary[JANUS_SPECIAL[2]],
    }
    text |= {} if shape.head_dim is None else {"head_dim": shape.head_dim}
    seen = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": shape.dim,
    }
    seen |= {"image_size": 4 * shape.side, "patch_size": 4, "num_image_tokens": shape.side**2}
    vq = {
        "num_embeddings": shape.codes,
        "embed_dim": shape.code_dim,
        "latent_channels": 32,
        "base_channels": 32,
    }
    vq |= {"channel_multiplier": list(shape.mult), "num_res_blocks": shape.blocks}
    vq |= {"projection_dim": shape.dim, "image_token_embed_dim": shape.dim, "num_hidden_layers": 2}
    config = JanusConfig(
        text_config=text, vision_config=seen, vq_config=vq, tie_word_embeddings=shape.tied
    )
    model = JanusForConditionalGeneration(config).eval()
    draw_weights(model, seed)
    model.generation_config.bos_token_id = vocabulary[JANUS_SPECIAL[0]]
    model.generation_config.pad_token_id = vocabulary[JANUS_SPECIAL[2]]
    model.generation_config.generation_kwargs = {"boi_token_id": vocabulary[JANUS_SPECIAL[3]]}
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def expect_janus(
    model: Any, prompt: Tensor, null: Tensor, grid: tuple[int, int], scale: float
) -> Expected:
    """What transformers makes of a prompt int64 [P]; it makes the one without caption itself."""
    ids = prompt[None]
    config = model.generation_config
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_mode="image",
        do_sample=False,
        guidance_scale=scale,
    )
    special = (ids == config.bos_token_id) | (ids == config.generation_kwargs["boi_token_id"])
    both = torch.cat([ids, torch.where(special, ids, config.pad_token_id)])
    embedded = model.get_input_embeddings()(both)
    drawn = model.prepare_embeddings_for_image_generation(tokens[:, :-1]).expand(2, -1, -1)
    hidden = model.model.language_model(
        inputs_embeds=torch.cat([embedded, drawn], dim=1)
    ).last_hidden_state
    logits = model.model.generation_head(hidden)[:, ids.shape[1] - 1 :]
    return Expected(logits, tokens[0], to_bytes(model.decode_image_tokens(tokens)[0]))


EMU3_SPECIAL = ("<|endoftext|>", "<|extra_203|>", "<|extra_204|>", "<|extra_200|>", "<|extra_201|>")
EMU3_SPECIAL += ("<|image start|>", "<|image token|>", "<|image end|>", "<image>")


def write_emu3(folder: Path, shape: Shape, seed: int = 2) -> Any:
    """An Emu3 with its tokenizer; the numbers of its codes are shuffled.

    Returns transformers' model.
    """
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    order = torch.randperm(shape.codes, generator=torch.Generator().manual_seed(8)).tolist()
    names = (
        "<unk>",
        *EMU3_SPECIAL,
        *(f"<|visual token {code:06}|>" for code in order),
        *TEXT,
        *"0123456789*",
    )
    vocabulary = write_tokenizer(folder / "tokenizer.json", names)
    text = {
        "vocab_size": len(vocabulary) + 5,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
    }
    text |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    text |= {"num_key_value_heads": shape.kv_heads, "tie_word_embeddings": shape.tied}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": shape.theta}}
    text |= {
        "bos_token_id": vocabulary["<|extra_203|>"],
        "eos_token_id": vocabulary["<|extra_204|>"],
    }
    text |= {"pad_token_id": 0}
    vq = {
        "codebook_size": shape.codes,
        "embed_dim": shape.code_dim,
        "latent_channels": shape.code_dim,
    }
    vq |= {
        "base_channels": 32,
        "channel_multiplier": list(shape.mult),
        "num_res_blocks": shape.blocks,
    }
    attending = [len(shape.mult) - 1] if shape.attends is None else list(shape.attends)
    vq |= {"attn_resolutions": attending, "hidden_size": 32 * shape.mult[-1]}
    vq |= {"temporal_downsample_factor": shape.frames}
    config = Emu3Config(
        text_config=text, vq_config=vq, vocabulary_map=vocabulary, tie_word_embeddings=shape.tied
    )
    model = Emu3ForConditionalGeneration(config).eval()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def generate_words(
    model: Any,
    prompts: Tensor,
    null: Tensor,
    *,
    allowed: Callable[[int], list[int]],
    length: int,
    **options: Any,
) -> Tensor:
    """What transformers generates, with guidance, behind equal prompts int64 [B, P].

    Args:
        model: A language model of transformers.
        prompts: The prompts.
        null: The unconditional prompt int64 [n].
        allowed: The words that may be drawn, by the number of words drawn before.
        length: Number of words to draw.
        options: For `generate`.

    Returns:
        The drawn words int64 [B, length].
    """
    bare = null.expand(len(prompts), -1)
    made: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        negative_prompt_ids=bare,
        negative_prompt_attention_mask=torch.ones_like(bare),
        prefix_allowed_tokens_fn=lambda _batch, ids: allowed(len(ids) - prompts.shape[1]),
        max_new_tokens=length,
        min_new_tokens=length,
        **options,
    )
    return made[:, prompts.shape[1] :]


def emu3_words(model: Any) -> list[int]:
    """The words of the codes of an Emu3, then the word that ends a row."""
    words = model.config.vocabulary_map
    codes = range(model.config.vq_config.codebook_size)
    return [words[f"<|visual token {code:06}|>"] for code in codes] + [words["<|extra_200|>"]]


def generate_emu3(
    model: Any, prompts: Tensor, null: Tensor, grid: tuple[int, int], **options: Any
) -> Tensor:
    """What transformers generates behind equal prompts int64 [B, P], with ends of rows forced as
    published: words int64 [B, N].
    """
    *codes, end = emu3_words(model)
    rows, columns = grid
    return generate_words(
        model,
        prompts,
        null,
        allowed=lambda count: [end] if (count + 1) % (columns + 1) == 0 else codes,
        length=rows * (columns + 1),
        **options,
    )


@torch.no_grad()
def expect_emu3(
    model: Any, prompt: Tensor, null: Tensor, grid: tuple[int, int], scale: float
) -> Expected:
    """What transformers makes of prompts int64 [P] with and without caption; ends of rows are
    forced as published.
    """
    rows, columns = grid
    given = prompt[None]
    bare = null[None]
    generated = generate_emu3(model, given, null, grid, guidance_scale=scale, do_sample=False)
    numbers = emu3_words(model)
    logits = [
        model(input_ids=torch.cat([start, generated[:, :-1]], dim=1)).logits[
            0, start.shape[1] - 1 :, numbers
        ]
        for start in (given, bare)
    ]
    tokens = torch.tensor([numbers.index(word) for word in generated[0].tolist()])
    # Three tokens follow the last row there: end of file, of image, of text.
    picture = model.decode_image_tokens(
        image_tokens=torch.cat([generated, generated[:, -3:]], dim=1), height=rows, width=columns
    )[0]
    return Expected(torch.stack(logits), tokens, to_bytes(picture.permute(1, 2, 0)))


class GlmShape(NamedTuple):
    """Sizes of a tiny GLM-Image; `sections` are the pairs that turn with grid, row and column."""

    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 48
    layers: int = 3
    codes: int = 40
    sections: tuple[int, int, int] = (2, 3, 3)
    theta: float = 10000.0
    grid: tuple[int, int] = (6, 5)


def write_glm_image(folder: Path, shape: GlmShape, seed: int = 1) -> Any:
    """A GLM-Image with its tokenizer, in the folders of the published repository.

    Returns transformers' model.
    """
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    weights = folder / "vision_language_encoder"
    weights.mkdir(parents=True)
    (folder / "processor").mkdir()
    names = [f"<|dit_token_{code}|>" for code in range(shape.codes)]
    # The words that begin and end an image follow the codes, with spare rows of the head.
    names += ["<|dit_token_16384|>", "<|dit_token_16385|>", *(f"<spare_{n}>" for n in range(6))]
    names += ["<sop>", "<eop>", "<unk>", *"0123456789", *TEXT]
    vocabulary = write_tokenizer(folder / "processor" / "tokenizer.json", names)
    text = {
        "vocab_size": len(names) + 3,
        "vision_vocab_size": shape.codes + 8,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": vocabulary["<unk>"],
        "eos_token_id": shape.codes + 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.theta,
            "partial_rotary_factor": 0.5,
            "mrope_section": list(shape.sections),
        },
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    vision |= {"image_size": 64, "patch_size": 16}
    config = GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config={"embed_dim": 12, "num_embeddings": shape.codes, "latent_channels": 16},
        image_start_token_id=shape.codes,
        image_end_token_id=shape.codes + 1,
        image_token_id=vocabulary["<spare_0>"],
    )
    model = GlmImageForConditionalGeneration(config).eval()
    draw_weights(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            parameter.data.mul_(5)  # so that a missing bias shows
    model.save_pretrained(weights)
    rows, columns = shape.grid
    target = "target: {checkpoint: vision_language_encoder}"
    (folder / "model.yaml").write_text(f"family: glm-image\ngrid: [{rows}, {columns}]\n{target}\n")
    return model


@torch.no_grad()
def generate_glm_image(
    model: Any, prompts: Tensor, grids: tuple[tuple[int, int], ...], **options: Any
) -> Any:
    """What transformers generates behind prompts int64 [B, P].

    `grids` are rows and columns of the coarse and the fine grid.
    """
    codes = model.config.vq_config.num_embeddings
    model.model.rope_deltas = None  # of another prompt
    last_first = [[1, *grid] for grid in reversed(grids)]
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        image_grid_thw=torch.tensor(last_first * len(prompts)),
        images_per_sample=torch.full((len(prompts),), len(grids)),
        max_new_tokens=sum(rows * columns for rows, columns in grids),
        eos_token_id=None,
        suppress_tokens=list(range(codes, codes + 8)),
        return_dict_in_generate=True,
        **options,
    )


def expect_glm_image(
    model: Any, prompt: Tensor, grids: tuple[tuple[int, int], ...]
) -> tuple[Tensor, Tensor]:
    """Logits [N, codes] and greedy tokens [N] of transformers, one cached step after the other."""
    made = generate_glm_image(model, prompt[None], grids, do_sample=False, output_logits=True)
    codes = model.config.vq_config.num_embeddings
    return torch.cat(made.logits)[:, :codes], made.sequences[0, len(prompt) :]


class WordsShape(NamedTuple):
    """Sizes of a tiny language model whose last words are codes."""

    dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    layers: int = 2
    codes: int = 48


def write_simplear(folder: Path, shape: WordsShape, seed: int = 1) -> Any:
    """A SimpleAR with its tokenizer; returns transformers' model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Transformers reads it as a Qwen2 tokenizer: here each byte is a word.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ("<|endoftext|>", "<|t2i|>", "<|soi|>")
    words.add_special_tokens([AddedToken(name, special=True) for name in special])
    return _write_words(folder, shape, words, (Qwen2Config, Qwen2ForCausalLM), seed=seed)


def write_liquid(folder: Path, shape: WordsShape, seed: int = 1) -> Any:
    """A Liquid with its tokenizer, without an image tokenizer; returns transformers' model."""
    from transformers import GemmaConfig, GemmaForCausalLM

    names = ("<unk>", "<bos>", "<boi>", "<unconditional>", "Generate", "an", "image", *TEXT)
    folder.mkdir(parents=True)
    vocabulary = write_tokenizer(folder / "tokenizer.json", names)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = [("<bos>", vocabulary["<bos>"])]
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=start)
    return _write_words(folder, shape, words, (GemmaConfig, GemmaForCausalLM), seed=seed)


@torch.no_grad()
def _write_words(
    folder: Path, shape: WordsShape, words: Tokenizer, classes: tuple[Any, Any], *, seed: int
) -> Any:
    """A language model whose codes follow its words. Its head is its embedding."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    make_config, make_model = classes
    config = make_config(
        vocab_size=words.get_vocab_size() + shape.codes,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = make_model(config).eval()
    draw_weights(model, seed)
    # As the head, rows of unit size would leave almost no choice between codes.
    model.get_input_embeddings().weight.mul_(0.3)
    model.save_pretrained(folder)
    return model


def to_bytes(picture: Tensor) -> Tensor:
    """Pixels float in [-1, 1] -> uint8."""
    return ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
