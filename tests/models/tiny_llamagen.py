"""A LlamaGen of a few thousand numbers, written to disk as the published ones are: target, tokenizer, drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_bench.models.eagle import build_drafter, drafter_config, drafter_key_map
from lantern_bench.models.io.state_dict import export
from lantern_bench.models.llamagen import LlamaGenSize
from lantern_bench.models.llamagen.checkpoint import build_target, key_map
from lantern_bench.models.vq import VQConfig, VQModel
from tests.models import golden_models
from tests.models.tiny_t5 import WIDTH

CODES = 32
SIZES = {
    "t2i": LlamaGenSize("t2i", 48, 2, 3, 64, (4, 4), 12, vocab_size=CODES, width=WIDTH),
    "c2i": LlamaGenSize("c2i", 48, 2, 3, 64, (3, 5), 1, vocab_size=CODES, classes=7),
}


def official_state(size: LlamaGenSize, seed: int = 5) -> dict[str, Tensor]:
    """The target's weights in the official layout."""
    target = build_target(size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return export(target, key_map(target, "official"))


def write_drafter(folder: Path, size: LlamaGenSize, **stated: Any) -> Path:
    """A folder with a drafter in the published layout; `stated` goes into its config.json."""
    target = build_target(size)
    config = {"hidden_size": size.dim, "vocab_size": size.vocab_size, "num_attention_heads": size.heads}
    config |= {"num_key_value_heads": size.kv_heads or size.heads, "intermediate_size": 32, "num_hidden_layers": 1}
    drafter = build_drafter(drafter_config(config, target.config, folder), target)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | stated))
    torch.save(export(drafter, drafter_key_map(drafter)), folder / "pytorch_model.bin")
    return folder


def write_tokenizer(path: Path) -> Path:
    """A tokenizer of CODES codes that halves a picture once."""
    with torch.random.fork_rng():
        torch.manual_seed(3)  # fresh layers draw from torch's own stream
        torch.save({"model": VQModel(VQConfig(CODES, 8, 32, 32, (2, 1), 1)).state_dict()}, path)
    return path


def write_model_file(folder: Path, kind: str, **parts: Any) -> Path:
    """A whole model and the YAML file that describes it; a part given as None is left out of the file."""
    size = SIZES[kind]
    folder.mkdir(parents=True)
    torch.save({"model": official_state(size)}, folder / "target.pt")
    given: dict[str, Any] = {
        "family": f"llamagen-{kind}",
        "target": {"checkpoint": folder / "target.pt", "config": {"n_head": size.heads}},
        "tokenizer": {"checkpoint": write_tokenizer(folder / "vq.pt")},
        "drafter": {"dir": write_drafter(folder / "drafter", size)},
        "grid": list(size.grid),
    } | parts
    return golden_models.write_model(folder, **{key: part for key, part in given.items() if part is not None})
