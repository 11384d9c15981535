"""Chameleon's files: the target in the HF layout, and the tokenizer's `vqgan.ckpt` in that of taming-transformers.

A picture uses a part of the vocabulary. The target holds only the rows of the output head for that part, so logits are
over image codes and never over words.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lantern_bench.config.yaml_source import load_yaml
from lantern_bench.errors import UserError
from lantern_bench.models.eagle import check_kind
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint
from lantern_bench.models.io.state_dict import KeyMap, fill, llama_key_map, rows_of_tokens
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer_config import TransformerConfig, Wrong
from lantern_bench.models.vq import VQConfig, VQModel, vqgan_key_map

PUBLISHED_VQGAN = VQConfig(codes=8192, code_dim=256, unit_codes=False, attention=False)
"""Chameleon's tokenizer, which Anole and Lumina-mGPT share."""
PUBLISHED_MOVQGAN = VQConfig(16384, 4, 4, 256, (1, 2, 2, 4), unit_codes=False, code_norms=True)
"""MoVQGAN 270M (arXiv 2209.09002), the tokenizer of Lumina-mGPT 2.0."""


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


def load_movqgan(path: Path, device: torch.device) -> VQModel:
    """Load a MoVQGAN in float32; its shapes tell its sizes. Raises `UserError` for another kind of file."""
    checkpoint, level = open_checkpoint(path), "encoder.down.{}.block.{}.conv1.weight"
    check_kind(checkpoint, "decoder.norm_out.conv_y.weight", "a MoVQGAN")
    try:
        codes, code_dim = checkpoint.shape("quantize.embedding.weight")
        z_channels, channels = checkpoint.shape("quant_conv.weight")[1], checkpoint.shape("encoder.conv_in.weight")[0]
        levels = itertools.takewhile(checkpoint.__contains__, (level.format(n, 0) for n in itertools.count()))
        multiples = tuple(checkpoint.shape(name)[0] // channels for name in levels)
        blocks = itertools.takewhile(checkpoint.__contains__, (level.format(0, n) for n in itertools.count()))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{path}: is no whole MoVQGAN: {error}", "Download it again.") from error
    attends = f"encoder.down.{len(multiples) - 1}.attn.0.q.weight" in checkpoint
    sizes = (codes, code_dim, z_channels, channels, multiples, len(list(blocks)))
    with torch.device("meta"):
        model = VQModel(VQConfig(*sizes, unit_codes=False, attention=attends, code_norms=True))
    fill(
        model,
        checkpoint,
        movqgan_key_map(model),
        dtype=torch.float32,
        device=device,
        computed=lambda name: name.startswith(("loss.", "ema_")),
        wanted=f"a MoVQGAN of {codes} codes",
    )
    return model


def movqgan_key_map(model: VQModel) -> KeyMap:
    """The key map of MoVQGAN's layout: that of a VQGAN, with the group norm inside each norm of the decoder."""

    def rename(name: str) -> str:
        return re.sub(r"^(decoder\..*norm\w*)\.(weight|bias)$", r"\1.norm_layer.\2", name)

    return {
        ours: tuple(piece._replace(key=rename(piece.key)) for piece in pieces)
        for ours, pieces in vqgan_key_map(model).items()
    }


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

    fill(target, checkpoint, key_map(target, checkpoint), dtype=dtype, device=device, computed=unused, wanted=wanted)
    return target


def check_target(checkpoint: Checkpoint) -> None:
    """Raise `UserError`, in one line, for a checkpoint that is no Chameleon in the HF layout."""
    check_kind(checkpoint, "model.layers.0.self_attn.q_norm.weight", "a Chameleon model in the HF layout")


def key_map(target: TransformerTarget, checkpoint: Checkpoint | None = None) -> KeyMap:
    """The key map of the HF layout; of the head it takes the rows of the image's tokens.

    The `checkpoint` decides how many heads share a row of the head norms: in the authors' layout, all heads of one of
    `model_parallel_size` parts do.
    """
    config = target.config
    pieces = llama_key_map(target, config)
    shapes = {name: tensor.shape for name, tensor in target.state_dict().items()}
    for name, (first, *_) in list(pieces.items()) if checkpoint is not None else ():
        if re.search(r"\.[qk]_norm\.", name) and checkpoint is not None and first.key in checkpoint:
            (rows, width), (here, *_) = shapes[name], checkpoint.shape(first.key)
            if here < rows and rows % here == 0:
                repeat = functools.partial(torch.repeat_interleave, repeats=rows // here, dim=0)
                pieces[name] = (first._replace(prepare=repeat, file_shape=(here, width)),)
    if config.token_ids is not None:
        pieces["transformer.output.weight"] = (rows_of_tokens("lm_head.weight", config),)
    return pieces
