"""A LlamaGen of a few thousand numbers, written to disk as the published ones are: target,
tokenizer, drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.checkpoints.drafter_files import drafter_config, drafter_key_map
from lantern_bench.models.checkpoints.key_map import export
from lantern_bench.models.families.llamagen import ClassToImage, LlamaGen, TextToImage, key_map
from lantern_bench.models.networks.eagle import published_drafter
from lantern_bench.models.networks.vq import VQConfig, VQModel
from tests.helpers import golden_models
from tests.helpers.tiny_t5 import WIDTH

CODES = 32
FAMILIES = {"t2i": TextToImage, "c2i": ClassToImage}
GRIDS = {"t2i": (4, 4), "c2i": (3, 5)}
CONFIGS: dict[str, dict[str, Any]] = {
    "t2i": {
        "dim": 48,
        "n_layer": 2,
        "n_head": 3,
        "intermediate_size": 64,
        "vocab_size": CODES,
        "cls_token_num": 12,
    },
    "c2i": {
        "dim": 48,
        "n_layer": 2,
        "n_head": 3,
        "intermediate_size": 64,
        "vocab_size": CODES,
        "num_classes": 7,
    },
}
CONFIGS["t2i"]["caption_dim"] = WIDTH


def llamagen(kind: str, grid: tuple[int, int] | None = None, **config: Any) -> LlamaGen:
    """The model of a kind before it is loaded; `config` changes its sizes."""
    spec = ModelSpec(about="tiny", config=CONFIGS[kind] | config, vq={}, grid=grid or GRIDS[kind])
    model: LlamaGen = FAMILIES[kind]("tiny", spec)
    return model


def official_state(model: LlamaGen, seed: int = 5) -> dict[str, Tensor]:
    """The target's weights in the official layout."""
    target = model.new_target()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return export(target, key_map(target, "official"))


def write_drafter(folder: Path, model: LlamaGen, **stated: Any) -> Path:
    """A folder with a drafter in the published layout; `stated` goes into its config.json."""
    target = model.new_target()
    sizes = target.config
    config = {
        "hidden_size": sizes.dim,
        "vocab_size": sizes.vocab_size,
        "num_attention_heads": sizes.heads,
    }
    config |= {
        "num_key_value_heads": sizes.kv_heads or sizes.heads,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    drafter = published_drafter(drafter_config(config, sizes, folder), target)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | stated))
    torch.save(export(drafter, drafter_key_map(drafter)), folder / "pytorch_model.bin")
    return folder


def write_tokenizer(path: Path) -> Path:
    """A tokenizer of CODES codes that halves a picture once."""
    with torch.random.fork_rng():
        torch.manual_seed(3)  # fresh layers draw from torch's own stream
        torch.save(
            {
                "model": VQModel(
                    VQConfig(
                        codes=CODES,
                        code_dim=8,
                        z_channels=32,
                        channels=32,
                        channel_mult=(2, 1),
                        res_blocks=1,
                    )
                ).state_dict()
            },
            path,
        )
    return path


def write_model_file(folder: Path, kind: str, **parts: Any) -> Path:
    """A whole model and the YAML file that describes it; a part given as None is left out of the
    file.
    """
    model = llamagen(kind)
    folder.mkdir(parents=True)
    torch.save({"model": official_state(model)}, folder / "target.pt")
    values: dict[str, Any] = {
        "family": f"llamagen-{kind}",
        "target": {"checkpoint": folder / "target.pt", "config": CONFIGS[kind]},
        "tokenizer": {"checkpoint": write_tokenizer(folder / "vq.pt")},
        "drafter": {"dir": write_drafter(folder / "drafter", model)},
        "grid": list(GRIDS[kind]),
    } | parts
    return golden_models.write_model(
        folder, **{key: part for key, part in values.items() if part is not None}
    )
