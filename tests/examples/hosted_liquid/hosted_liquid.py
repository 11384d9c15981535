"""Liquid (arXiv 2412.04332), run by transformers in our decode loop."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, GemmaForCausalLM

from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
from lantern_bench.models.hosted import HostedModel

PROMPT = "{} Generate an image based on this description.<boi>"
UNCONDITIONAL = "<unconditional><boi>"


class Liquid(HostedModel):
    """A Gemma whose codes follow the words, with Chameleon's image tokenizer."""

    defaults: ClassVar = {"cfg_scale": 7.0, "temperature": 0.99, "top_k": 4096, "top_p": 0.96}
    grid = (32, 32)  # 512x512 px

    def __init__(self, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        loaded = GemmaForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
        self.model = loaded.to(device).eval()
        self.decoder = self.model.model
        # The authors publish the image tokenizer in another place.
        pictures = open_checkpoint(checkpoint / "vqgan.ckpt")
        self.vq = load_vq(pictures, LAYOUTS["chameleon"], device)
        self.codes = self.vq.config.codes
        self.first = len(self.tokenizer)  # word of code 0

    def prompts(self, caption: str) -> tuple[list[int], list[int]]:
        """Return the prompt with the caption, and the one without."""
        text = self.tokenizer(PROMPT.format(caption)).input_ids
        return text, self.tokenizer(UNCONDITIONAL).input_ids

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed token ids of prompts: [rows, n] -> [rows, n, dim]."""
        return self.decoder.embed_tokens(words)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes: [rows, n] -> [rows, n, dim]."""
        return self.decoder.embed_tokens(codes + self.first)

    def logits(self, features: Tensor) -> Tensor:
        """Map last hidden states [rows, n, dim] to logits [rows, n, codes]."""
        rows = self.model.lm_head.weight[self.first : self.first + self.codes]
        return functional.linear(features, rows)

    def codebook(self) -> Tensor:
        """Return the codebook [codes, d] as stored."""
        return self.vq.quantize.embedding.weight

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes [B, N] to RGB [B, H, W, 3] in [-1, 1]."""
        return self.vq.decode_tokens(codes, self.grid).permute(0, 2, 3, 1)
