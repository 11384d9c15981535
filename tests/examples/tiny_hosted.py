"""A Janus of a few thousand numbers, saved by transformers, and the model file that hosts it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

EXAMPLE = Path(__file__).parent / "hosted_janus"
CAPTIONS = ["a red lamp", "two cats on a green sofa"]
WORDS = ["<pad>", "<bos>", "<begin_of_image>", "<|User|>:", "<|Assistant|>:", "<image>", "<end_of_image>", "<unk>"]


def write_checkpoint(folder: Path, **text: Any) -> None:
    """A Janus of 3x3 codes with random weights, saved by transformers."""
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*WORDS, *" ".join(CAPTIONS).split()])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<begin_of_image>"]})
    fast.save_pretrained(folder)
    language = LlamaConfig(
        **{
            "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
        }
        | text
    )  # fmt: skip
    vision = JanusVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=6, patch_size=2, num_image_tokens=9,
        projection_dim=language.hidden_size,
    )  # fmt: skip
    vq = JanusVQVAEConfig(
        embed_dim=8, num_embeddings=64, latent_channels=32, base_channels=32, channel_multiplier=[1, 1],
        num_res_blocks=1, projection_dim=language.hidden_size, image_token_embed_dim=language.hidden_size,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)  # fresh layers draw from torch's own stream
        model = JanusForConditionalGeneration(
            JanusConfig(text_config=language, vision_config=vision, vq_config=vq)
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "vision_model" not in name:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
            model.model.generation_embeddings.weight.normal_()
            model.model.vqmodel.quantize.embedding.weight.normal_()
    model.save_pretrained(folder)


def write_model(folder: Path, **text: Any) -> Path:
    """The model file of the example beside its code and a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("hosted_janus.py", "janus.yaml"):
        shutil.copy(EXAMPLE / name, folder / name)
    write_checkpoint(folder / "Janus-Pro-1B", **text)
    return folder / "janus.yaml"
