"""A Chameleon of a few thousand numbers, written to disk as the published ones are: target,
tokenizers, drafter.

The numbers of its image codes are shuffled, so that nothing works by counting from four.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.families.chameleon import Chameleon
from tests.helpers import tiny_lumina2
from tests.helpers.tiny_hosted import write_tokenizer

DIM = 32
WORDS = 160
CODES = 64
LAYERS = 2
SHAPE = tiny_lumina2.Shape(dim=DIM, layers=LAYERS, parts=4)


def code_name(code: int) -> str:
    """The vocabulary's name of an image code: its digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def vocabulary() -> dict[str, int]:
    """Every token's number below WORDS."""
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(8)).tolist()
    special = [
        "<racm3:break>",
        "<eoss>",
        "<reserved08706>",
        "<reserved08799>",
        "<reserved08802>",
        "<reserved08803>",
    ]
    special.append("<reserved08824>")
    names = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *(code_name(code) for code in order),
        *special,
        "a",
        *tiny_lumina2.TEXT,
    ]
    return {name: number for number, name in enumerate(names)}


def config(**changes: object) -> dict[str, object]:
    """The config.json of the target."""
    own = {"vocab_size": WORDS, "rms_norm_eps": 1e-5, "vocabulary_map": vocabulary()}
    return tiny_lumina2.config(SHAPE) | own | changes


def write_target(folder: Path) -> Path:
    """The target's folder: two shards, and a tensor of the encoder that loading must ignore."""
    draws = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True)
    first = {"model.embed_tokens.weight": torch.randn(WORDS, DIM, generator=draws)}
    first["model.vqmodel.quantize.embedding.weight"] = torch.zeros(4, 2)
    for number in range(LAYERS):
        first |= tiny_lumina2.layer_state(f"model.layers.{number}.", SHAPE, draws)
    second = {
        "model.norm.weight": torch.ones(DIM),
        "lm_head.weight": torch.randn(WORDS, DIM, generator=draws),
    }
    weight_map = {}
    for number, shard in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config()))
    write_tokenizer(folder / "tokenizer.json", vocabulary())
    return folder


def write_drafter(folder: Path) -> Path:
    """The drafter's folder: config.json and a pickle of tensors."""
    draws = torch.Generator().manual_seed(2)
    folder.mkdir(parents=True)
    state = {"embed_tokens.weight": torch.randn(WORDS, DIM, generator=draws)}
    state |= tiny_lumina2.layer_state("layers.0.", SHAPE, draws)
    state["fc.weight"] = torch.randn(DIM, 2 * DIM, generator=draws) / DIM**0.5
    state["fc.bias"] = torch.randn(DIM, generator=draws) * 0.1
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(
        json.dumps(config(num_hidden_layers=1) | {"vocabulary_map": None})
    )
    return folder


def write_vqgan(folder: Path) -> Path:
    """vqgan.ckpt with the names of taming-transformers; returns the checkpoint."""
    from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS
    from lantern_bench.models.networks.vq import VQConfig, VQModel

    folder.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # fresh layers draw from torch's own stream
        model = VQModel(
            VQConfig(
                codes=CODES,
                code_dim=8,
                z_channels=32,
                channels=32,
                channel_mult=(2, 1),
                res_blocks=1,
                unit_codes=False,
                attention=(),
            )
        )
    state = {
        LAYOUTS["chameleon"].rename(name, 2): tensor for name, tensor in model.state_dict().items()
    }
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
    """The model of a target's folder before it is loaded, with pictures of 3 x 4 codes; `config`
    changes its sizes.
    """
    spec = ModelSpec(about="Anole", config=config, vq={}, grid=(3, 4))
    return Chameleon("anole", spec, {"target": folder})
