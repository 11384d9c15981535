"""A T5 encoder of a few thousand numbers, saved in the Hugging Face layout, for the tests of
caption features.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

WORDS = ["a", "cat", "on", "the", "grass", "two", "red", "lanterns", "over", "lake", "at", "dusk"]
WIDTH = 32


def save_tiny_t5(folder, *, seed=0, whole=False, d_model=WIDTH):
    """Write config, weights and tokenizer; `whole` writes the decoder as well, as the published
    checkpoint does.
    """
    config = T5Config(
        vocab_size=40,
        d_model=d_model,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    noise = torch.Generator().manual_seed(seed)
    model = T5ForConditionalGeneration(config) if whole else T5EncoderModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.2)
    model.save_pretrained(folder)
    tokens = [
        "<pad>",
        "</s>",
        "<unk>",
        *("\u2581" + word for word in WORDS),
        "\u2581",
        *"abcdefghijklmnopqrst",
    ]
    pieces = [(token, 0.0 if number < 3 else -float(number)) for number, token in enumerate(tokens)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=512,
    )
    fast.save_pretrained(folder)
    return folder
