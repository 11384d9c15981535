"""A Chameleon of a few thousand numbers, written to disk as the published ones are: target, tokenizers, drafter.

The numbers of its image codes are shuffled, so that nothing works by counting from four.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from lantern_bench.models.chameleon import Chameleon
from lantern_bench.models.model import Published

DIM, HEADS, FFN, WORDS, CODES, LAYERS = 32, 4, 48, 160, 64, 2
TEXT = ("a", "red", "lantern", "over", "Generate", "an", "image", "of", "according", "to", "the", "following", "prompt")


def code_name(code: int) -> str:
    """The vocabulary's name of an image code: its digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def vocabulary() -> dict[str, int]:
    """Every token's number below WORDS."""
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(8)).tolist()
    special = ["<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>", "<reserved08802>", "<reserved08803>"]
    special.append("<reserved08824>")
    names = ["<s>", "<pad>", "</s>", "<unk>", *(code_name(code) for code in order), *special, *TEXT]
    return {name: number for number, name in enumerate(names)}


def config(**changes: object) -> dict[str, object]:
    """The config.json of the target."""
    return {
        "model_type": "chameleon",
        "vocab_size": WORDS,
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "swin_norm": False,
        "vocabulary_map": vocabulary(),
    } | changes


def layer(prefix: str, draws: torch.Generator) -> dict[str, Tensor]:
    """The weights of one layer under their published names."""
    shapes = {f"self_attn.{part}_proj.weight": (DIM, DIM) for part in "qkvo"}
    shapes |= {f"self_attn.{part}_norm.{kind}": (HEADS, DIM // HEADS) for part in "qk" for kind in ("weight", "bias")}
    shapes |= {"mlp.gate_proj.weight": (FFN, DIM), "mlp.up_proj.weight": (FFN, DIM), "mlp.down_proj.weight": (DIM, FFN)}
    shapes |= {"input_layernorm.weight": (DIM,), "post_attention_layernorm.weight": (DIM,)}
    return {f"{prefix}{name}": _drawn(name, shape, draws) for name, shape in shapes.items()}


def _drawn(name: str, shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    around = 1.0 if "norm.weight" in name else 0.0
    return around + torch.randn(shape, generator=draws) * (0.2 if "norm" in name else 2 * shape[-1] ** -0.5)


def write_target(folder: Path, shards: int = 2) -> Path:
    """The target's folder, in two shards or more, with the encoder that nobody needs."""
    draws = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True)
    first = {"model.embed_tokens.weight": torch.randn(WORDS, DIM, generator=draws)}
    first["model.vqmodel.quantize.embedding.weight"] = torch.zeros(4, 2)
    for number in range(LAYERS):
        first |= layer(f"model.layers.{number}.", draws)
    second = {"model.norm.weight": torch.ones(DIM), "lm_head.weight": torch.randn(WORDS, DIM, generator=draws)}
    weight_map = {}
    rest = [{f"model.vqmodel.part{number}": torch.zeros(1)} for number in range(shards - 2)]
    for number, shard in enumerate((first, second, *rest), start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config()))
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_tokenizer(path: Path) -> None:
    """A tokenizer.json that splits at spaces and keeps the special tokens whole."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in vocabulary() if name.startswith("<")])
    tokenizer.save(str(path))


def write_drafter(folder: Path) -> Path:
    """The drafter's folder: config.json and a pickle of tensors."""
    draws = torch.Generator().manual_seed(2)
    folder.mkdir(parents=True)
    state = {"embed_tokens.weight": torch.randn(WORDS, DIM, generator=draws)} | layer("layers.0.", draws)
    state["fc.weight"] = torch.randn(DIM, 2 * DIM, generator=draws) / DIM**0.5
    state["fc.bias"] = torch.randn(DIM, generator=draws) * 0.1
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config(num_hidden_layers=1) | {"vocabulary_map": None}))
    return folder


def write_vqgan(folder: Path) -> Path:
    """vqgan.ckpt with the names of taming-transformers; returns the checkpoint."""
    from lantern_bench.models.vq import LAYOUTS, VQConfig, VQModel

    folder.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # fresh layers draw from torch's own stream
        model = VQModel(VQConfig(CODES, 8, 32, 32, (2, 1), 1, unit_codes=False, attention=False))
    state = {LAYOUTS["chameleon"].rename(name, 2): tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state | {"loss.logvar": torch.zeros(1)}}, folder / "vqgan.ckpt")
    return folder / "vqgan.ckpt"


def write_model_file(folder: Path, family: str, grid: tuple[int, int]) -> Path:
    """A whole model and the YAML file that describes it."""
    write_target(folder / "target")
    write_drafter(folder / "drafter")
    write_vqgan(folder / "vq")
    path = folder / "model.yaml"
    path.write_text(
        f"family: {family}\ngrid: {list(grid)}\ntarget: {{checkpoint: target, layout: hf}}\n"
        "tokenizer: {checkpoint: vq/vqgan.ckpt}\ndrafter: {dir: drafter}\n"
    )
    return path


def anole(folder: Path, **config: object) -> Chameleon:
    """The model of a target's folder before it is loaded, with pictures of 3 x 4 codes; `config` changes its sizes."""
    row = Published("Anole", config, {}, (3, 4))
    return Chameleon("anole", row, {"target": folder})
