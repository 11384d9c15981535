"""Chameleon's files: the target in the HF layout, and the tokenizer's `vqgan.ckpt` in that of taming-transformers.

A picture uses a part of the vocabulary. The target holds only the rows of the output head for that part, so logits are
over image codes and never over words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lantern_bench.config.yaml_source import load_yaml
from lantern_bench.errors import UserError
from lantern_bench.models.eagle import check_kind
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint
from lantern_bench.models.io.state_dict import KeyMap, fill, llama_key_map, rows_of_tokens
from lantern_bench.models.transformer import TransformerConfig, Wrong
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.models.vq import VQConfig, VQModel, vqgan_key_map

PUBLISHED_VQGAN = VQConfig(codes=8192, code_dim=256, unit_codes=False, attention=False)
"""Chameleon's tokenizer, which Anole and Lumina-mGPT share."""


def load_vqgan(path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
    """Load a tokenizer in float32; `config` has the content of vqgan.yaml, else it is read beside the checkpoint.

    Raises `UserError` for a missing or malformed yaml, impossible sizes, and every key that does not fit.
    """
    beside = path.with_suffix(".yaml")
    where = "tokenizer.config" if config is not None else str(beside)
    stated: Any = config
    if stated is None:
        if not beside.is_file():
            advice = "Chameleon's tokenizer is vqgan.ckpt and vqgan.yaml, side by side."
            raise UserError(f"{beside}: no such file", advice)
        try:
            stated, _ = load_yaml(beside.read_text(encoding="utf-8"), str(beside))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{beside}: cannot be read as YAML: {' '.join(str(error).split())}") from error
        if not isinstance(stated, dict):
            raise UserError(f"{beside}: must hold a mapping")
    with torch.device("meta"):
        model = VQModel(read_vqgan_config(stated, lambda key, text: UserError(f"{where}: {key}: {text}")))
    fill(
        model,
        open_checkpoint(path),
        vqgan_key_map(model),
        dtype=torch.float32,
        device=device,
        computed=lambda name: name.startswith("loss."),
        wanted=f"a VQGAN of {model.config.codes} codes",
    )
    return model


def read_vqgan_config(config: Mapping[str, Any], wrong: Wrong) -> VQConfig:
    """The sizes that vqgan.yaml states (`model.params`, or its content); raises what `wrong(key, text)` returns."""
    try:
        params = config["model"]["params"] if "model" in config else config
        network = params["ddconfig"]
        multiples = tuple(network["ch_mult"])
        numbers = {key: params[key] for key in ("n_embed", "embed_dim")}
        numbers |= {key: network[key] for key in ("z_channels", "ch", "num_res_blocks")}
    except (KeyError, TypeError) as error:
        raise wrong(str(error).strip("'"), "missing, or not where vqgan.yaml has it (model.params.ddconfig)") from error
    for key, number in [*numbers.items(), *(("ch_mult", multiple) for multiple in multiples)]:
        if type(number) is not int or number < 1:
            raise wrong(key, f"{number}: must be a whole number above 0")
    if network.get("double_z"):
        raise wrong("double_z", "true: a VQGAN has no variance")
    lowest = int(network.get("resolution", 256)) // 2 ** (len(multiples) - 1)
    attends = list(network.get("attn_resolutions") or [])
    if attends not in ([], [lowest]):
        raise wrong("attn_resolutions", f"{attends}: only the lowest resolution ({lowest}) can attend")
    codes, code_dim, z_channels, channels, res_blocks = numbers.values()
    return VQConfig(codes, code_dim, z_channels, channels, multiples, res_blocks, False, bool(attends))


def load_target(
    checkpoint: Checkpoint, config: TransformerConfig, *, dtype: torch.dtype, device: torch.device
) -> TransformerTarget:
    """Load a target in the HF layout; raises `UserError` for another model, and for every key that does not fit."""
    check_target(checkpoint)
    with torch.device("meta"):
        target = TransformerTarget(config)
    wanted = f"Chameleon of {config.layers} layers of width {config.dim}"

    def unused(name: str) -> bool:
        return name.startswith("model.vqmodel.") or name.endswith(".rotary_emb.inv_freq")

    fill(target, checkpoint, key_map(target), dtype=dtype, device=device, computed=unused, wanted=wanted)
    return target


def check_target(checkpoint: Checkpoint) -> None:
    """Raise `UserError`, in one line, for a checkpoint that is no Chameleon in the HF layout."""
    check_kind(checkpoint, "model.layers.0.self_attn.q_norm.weight", "a Chameleon model in the HF layout")


def key_map(target: TransformerTarget) -> KeyMap:
    """The key map of the HF layout; of the head it takes the rows of the image's tokens."""
    config = target.config
    pieces = llama_key_map(target, config)
    if config.token_ids is not None:
        pieces["transformer.output.weight"] = (rows_of_tokens("lm_head.weight", config),)
    return pieces
