"""A Lumina-mGPT 2.0 of a few thousand numbers in its authors' layout, and what it computes, written
out.

The layout and the arithmetic follow Alpha-VLLM/Lumina-mGPT-2.0 at `f44a4d7f`: nothing here calls
the package's own transformer, tokenizer or key maps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tests.helpers.tiny_hosted import write_tokenizer

TEXT = (
    "Generate",
    "an",
    "image",
    "of",
    "according",
    "to",
    "the",
    "following",
    "prompt",
    "red",
    "lantern",
    "over",
)
SIDES = range(8801, 8840)
SPECIAL = [
    "<|endoftext|>",
    "<|im_end|>",
    "<racm3:break>",
    "<eoss>",
    "<reserved08706>",
    "<reserved08799>",
]
FIRST_CODE = 70


@dataclass(frozen=True)
class Shape:
    """Sizes; `parts`: of the head norms, whose heads share a row (`model_parallel_size`)."""

    dim: int = 32
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 48
    layers: int = 2
    parts: int = 1
    swin: bool = False
    theta: float = 10000.0
    grid: tuple[int, int] = (4, 4)
    codes: int = 40
    code_dim: int = 4
    channels: int = 32
    mult: tuple[int, ...] = (1, 1)
    blocks: int = 1
    attends: bool = True

    @property
    def words(self) -> int:
        return FIRST_CODE + self.codes + 1


def vocabulary() -> dict[str, int]:
    """Every named token's number, below FIRST_CODE."""
    return {
        name: number
        for number, name in enumerate([*TEXT, *SPECIAL, *(f"<reserved{n:05d}>" for n in SIDES)])
    }


def config(shape: Shape) -> dict[str, Any]:
    """The config.json of the target."""
    return {
        "model_type": "chameleon",
        "vocab_size": shape.words,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "model_parallel_size": shape.parts,
        "rope_theta": shape.theta,
        "swin_norm": shape.swin,
        "mask_image_logits": False,
    }


def write(folder: Path, shape: Shape) -> Path:
    """The folder of the target, the tokenizer's checkpoint, and the model file."""
    folder.mkdir(parents=True)
    draws = torch.Generator().manual_seed(3)
    save_file(target_state(shape, draws), folder / "model.safetensors")
    torch.save(movqgan_state(shape, draws), folder / "movqgan_270M.ckpt")
    (folder / "config.json").write_text(json.dumps(config(shape)))
    write_tokenizer(folder / "tokenizer.json", vocabulary(), "<eoss>")
    stated = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    path = folder / "model.yaml"
    path.write_text(
        f"family: lumina-mgpt2-7b\ngrid: {list(shape.grid)}\n"
        f"target: {{checkpoint: ., config: {{first_code: {FIRST_CODE}, codes: {shape.codes}}}}}\n"
        "tokenizer: {checkpoint: movqgan_270M.ckpt}\n"
    )
    return path


def target_state(shape: Shape, draws: torch.Generator) -> dict[str, Tensor]:
    """The target's weights by their names in the authors' files."""
    words = (shape.words, shape.dim)
    state = {
        "model.embed_tokens.weight": _drawn("", words, draws),
        "lm_head.weight": torch.randn(words, generator=draws),
    }
    for number in range(shape.layers):
        state |= layer_state(f"model.layers.{number}.", shape, draws)
    return state | {"model.norm.weight": _drawn("norm", (shape.dim,), draws)}


def layer_state(at: str, shape: Shape, draws: torch.Generator) -> dict[str, Tensor]:
    """The weights of one decoder layer, whose names begin with `at`."""
    dim = shape.dim
    head = shape.dim // shape.heads
    rows = {"q": dim, "k": shape.kv_heads * head, "v": shape.kv_heads * head}
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{part}_proj.weight": (rows[part], dim) for part in rows
    }
    for kind in ("weight", "bias"):
        shapes |= {f"self_attn.{part}_norm.{kind}": (shape.parts, head) for part in "qk"}
    shapes |= {"self_attn.o_proj.weight": (dim, dim), "mlp.down_proj.weight": (dim, shape.ffn)}
    shapes |= {f"mlp.{part}_proj.weight": (shape.ffn, dim) for part in ("gate", "up")}
    shapes |= {f"{part}_layernorm.weight": (dim,) for part in ("input", "post_attention")}
    return {f"{at}{name}": _drawn(name, size, draws) for name, size in shapes.items()}


def _drawn(name: str, size: tuple[int, ...], draws: torch.Generator) -> Tensor:
    noise = torch.randn(size, generator=draws)
    if "norm" in name and "conv_" not in name:
        return (0.0 if name.endswith("bias") else 1.0) + 0.2 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    return noise * 1.5 * noise[0].numel() ** -0.5


class TokenizerShapes(dict[str, tuple[int, ...]]):
    """The shapes of a tokenizer's weights by their names in the published file."""

    def __init__(self, code_dim: int) -> None:
        super().__init__()
        self.code_dim = code_dim

    def conv(self, name: str, inside: int, outside: int, *, side: int) -> None:
        self[f"{name}.weight"] = (outside, inside, side, side)
        self[f"{name}.bias"] = (outside,)

    def norm(self, name: str, width: int) -> None:
        inner = f"{name}.norm_layer" if name.startswith("decoder.") else name
        self[f"{inner}.weight"] = (width,)
        self[f"{inner}.bias"] = (width,)
        for part in ("conv_y", "conv_b") if name.startswith("decoder.") else ():
            self.conv(f"{name}.{part}", self.code_dim, width, side=1)

    def block(self, name: str, inside: int, outside: int) -> None:
        self.norm(f"{name}.norm1", inside)
        self.conv(f"{name}.conv1", inside, outside, side=3)
        self.norm(f"{name}.norm2", outside)
        self.conv(f"{name}.conv2", outside, outside, side=3)
        if inside != outside:
            self.conv(f"{name}.nin_shortcut", inside, outside, side=1)

    def attention(self, name: str, width: int) -> None:
        self.norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            self.conv(f"{name}.{part}", width, width, side=1)


def movqgan_state(shape: Shape, draws: torch.Generator) -> dict[str, Tensor]:
    """The tokenizer's weights by their names in the published file, with some of its training's."""
    z = shape.code_dim
    widths = [shape.channels * multiple for multiple in shape.mult]
    last = len(widths) - 1
    shapes = TokenizerShapes(z)
    shapes.conv("encoder.conv_in", 3, shape.channels, side=3)
    shapes.conv("decoder.conv_in", z, widths[-1], side=3)
    for part, order in (("encoder.down", range(last + 1)), ("decoder.up", range(last, -1, -1))):
        up = part == "decoder.up"
        width = widths[-1] if part == "decoder.up" else shape.channels
        for level in order:
            for number in range(shape.blocks + up):
                shapes.block(f"{part}.{level}.block.{number}", width, widths[level])
                width = widths[level]
                if level == last and shape.attends:
                    shapes.attention(f"{part}.{level}.attn.{number}", width)
            if level != (0 if up else last):
                shapes.conv(
                    f"{part}.{level}.{'upsample' if up else 'downsample'}.conv",
                    width,
                    width,
                    side=3,
                )
    for part in ("encoder", "decoder"):
        shapes.block(f"{part}.mid.block_1", widths[-1], widths[-1])
        shapes.attention(f"{part}.mid.attn_1", widths[-1])
        shapes.block(f"{part}.mid.block_2", widths[-1], widths[-1])
    shapes.norm("encoder.norm_out", widths[-1])
    shapes.conv("encoder.conv_out", widths[-1], z, side=3)
    shapes.norm("decoder.norm_out", widths[0])
    shapes.conv("decoder.conv_out", widths[0], 3, side=3)
    shapes.conv("quant_conv", z, z, side=1)
    shapes.conv("post_quant_conv", z, z, side=1)
    state = {name: _drawn(name, size, draws) for name, size in shapes.items()}
    state["quantize.embedding.weight"] = torch.randn(shape.codes, z, generator=draws)
    return state | {"loss.logvar": torch.zeros(1), "ema_decoder.decay": torch.zeros(1)}


def prompts(caption: list[str], shape: Shape) -> tuple[list[int], list[int]]:
    """The prompt of a caption and the one without, from the names of their tokens."""
    ids = vocabulary()
    rows, columns = shape.grid
    # The words of sizes and the signs have no number of their own in this vocabulary.
    words = ["Generate an image of <eoss> according to the following prompt <eoss>", *caption]
    sides = (f"<reserved{8800 + side // 4:05d}>" for side in (rows, columns))
    end = [ids[name] for name in ("<racm3:break>", *sides)]
    return [
        ids["<|im_end|>"],
        *(ids[word] for word in " ".join(words).split()),
        ids["<reserved08706>"],
        *end,
    ], end


def layer(state: dict[str, Tensor], at: str, shape: Shape, x: Tensor) -> Tensor:
    """One decoder layer, whose names begin with `at`, on a whole sequence [n, dim]."""
    n = len(x)
    head = shape.dim // shape.heads

    def heads(y: Tensor, letter: str, count: int) -> Tensor:
        y = (y @ state[f"{at}self_attn.{letter}_proj.weight"].T).reshape(n, count, head)
        if letter == "v":
            return y
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        weight, bias = (state[f"{at}self_attn.{letter}_norm.{kind}"] for kind in ("weight", "bias"))
        y = y * weight.repeat_interleave(count // shape.parts, 0) + bias.repeat_interleave(
            count // shape.parts, 0
        )
        angles = torch.arange(n)[:, None] / shape.theta ** (torch.arange(0, head, 2) / head)
        cosine, sine = (
            torch.cat([half, half], dim=-1)[:, None] for half in (angles.cos(), angles.sin())
        )
        return y * cosine + torch.cat([-y[..., head // 2 :], y[..., : head // 2]], dim=-1) * sine

    def attention(y: Tensor) -> Tensor:
        q = heads(y, "q", shape.heads)
        k, v = (heads(y, letter, shape.kv_heads) for letter in "kv")
        k, v = (rows.repeat_interleave(shape.heads // shape.kv_heads, 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head**0.5
        seen = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(
            -1
        )
        return (
            torch.einsum("hqk,khd->qhd", seen, v).reshape(n, -1)
            @ state[f"{at}self_attn.o_proj.weight"].T
        )

    def mlp(y: Tensor) -> Tensor:
        gate = functional.silu(y @ state[f"{at}mlp.gate_proj.weight"].T)
        return (gate * (y @ state[f"{at}mlp.up_proj.weight"].T)) @ state[
            f"{at}mlp.down_proj.weight"
        ].T

    first, second = (state[f"{at}{name}_layernorm.weight"] for name in ("input", "post_attention"))
    if shape.swin:
        x = x + rms(attention(x), first)
        return x + rms(mlp(x), second)
    x = x + attention(rms(x, first))
    return x + mlp(rms(x, second))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@torch.no_grad()
def logits(state: dict[str, Tensor], shape: Shape, words: Tensor) -> Tensor:
    """The logits of all words behind each of `words` int64 [n]: [n, words]."""
    x = state["model.embed_tokens.weight"][words]
    for number in range(shape.layers):
        x = layer(state=state, at=f"model.layers.{number}.", shape=shape, x=x)
    return rms(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


def greedy(
    state: dict[str, Tensor], shape: Shape, caption: list[str], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A greedy picture with guidance: tokens [N] (codes, and `codes` at row ends), logits with and
    without prompt.

    The logits are [N, codes], of the codes alone; at row ends they are not compared.
    """
    with_prompt, without = prompts(caption, shape)
    rows, columns = shape.grid
    generated = list[int]()
    pairs = list[tuple[Tensor, Tensor]]()
    codes = slice(FIRST_CODE, FIRST_CODE + shape.codes)
    for place in range(rows * (columns + 1)):
        cond, uncond = (
            logits(state, shape, torch.tensor([*prompt, *generated]))[-1]
            for prompt in (with_prompt, without)
        )
        pairs.append((cond[codes], uncond[codes]))
        end = (place + 1) % (columns + 1) == 0
        guided = scale * (cond - uncond) + uncond
        generated.append(
            vocabulary()["<reserved08799>"] if end else FIRST_CODE + int(guided[codes].argmax())
        )
    ends = torch.tensor(generated) == vocabulary()["<reserved08799>"]
    tokens = torch.where(ends, shape.codes, torch.tensor(generated) - FIRST_CODE)
    cond, uncond = (torch.stack(column) for column in zip(*pairs, strict=True))
    return tokens, cond, uncond


@torch.no_grad()
def pixels(state: dict[str, Tensor], shape: Shape, codes: Tensor) -> Tensor:
    """Codes int64 [rows * columns] -> the decoder's picture [3, H, W], about -1 to 1."""
    zq = state["quantize.embedding.weight"][codes].reshape(1, *shape.grid, -1).permute(0, 3, 1, 2)

    def conv(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.weight"]
        return functional.conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        at = f"decoder.{name}"
        if f"{at}.weight" in state:  # a VQGAN, whose norms know no codes
            return functional.group_norm(
                x, 32, state[f"{at}.weight"], state[f"{at}.bias"], eps=1e-6
            )
        inner = [state[f"{at}.norm_layer.{kind}"] for kind in ("weight", "bias")]
        spread = functional.interpolate(zq, size=x.shape[-2:], mode="nearest")
        return functional.group_norm(x, 32, *inner, eps=1e-6) * conv(spread, f"{at}.conv_y") + conv(
            spread, f"{at}.conv_b"
        )

    def block(x: Tensor, name: str) -> Tensor:
        h = conv(functional.silu(norm(x, f"{name}.norm1")), f"decoder.{name}.conv1")
        h = conv(functional.silu(norm(h, f"{name}.norm2")), f"decoder.{name}.conv2")
        short = f"decoder.{name}.nin_shortcut"
        return (conv(x, short) if f"{short}.weight" in state else x) + h

    def attention(x: Tensor, name: str) -> Tensor:
        h = norm(x, f"{name}.norm")
        q, k, v = (conv(h, f"decoder.{name}.{part}").flatten(2)[0] for part in ("q", "k", "v"))
        mixed = v @ (q.T @ k / len(q) ** 0.5).softmax(-1).T
        return x + conv(mixed.reshape(x.shape), f"decoder.{name}.proj_out")

    x = conv(conv(zq, "post_quant_conv"), "decoder.conv_in")
    x = block(attention(block(x, "mid.block_1"), "mid.attn_1"), "mid.block_2")
    for level in reversed(range(len(shape.mult))):
        for number in range(shape.blocks + 1):
            x = block(x, f"up.{level}.block.{number}")
            if f"decoder.up.{level}.attn.{number}.q.weight" in state:
                x = attention(x, f"up.{level}.attn.{number}")
        if level:
            x = conv(
                functional.interpolate(x, scale_factor=2.0, mode="nearest"),
                f"decoder.up.{level}.upsample.conv",
            )
    return conv(functional.silu(norm(x, "norm_out")), "decoder.conv_out")[0]
