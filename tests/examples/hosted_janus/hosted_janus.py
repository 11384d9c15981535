"""Janus and Janus-Pro (arXiv 2501.17811), run by transformers in our decode loop."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, JanusForConditionalGeneration

from lantern_bench.models.hosted import HostedModel


class Janus(HostedModel):
    """A language model with a separate embedding and output head for image codes."""

    defaults: ClassVar = {"cfg_scale": 5.0}
    neighbour_space = "normalised"  # the tokenizer scales the rows it looks up to unit length

    def __init__(self, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        loaded = JanusForConditionalGeneration.from_pretrained(
            checkpoint, dtype=dtype, local_files_only=True
        )
        self.model = loaded.to(device).eval().model
        self.model.vqmodel.float()
        self.decoder = self.model.language_model
        side = self.model.config.vq_config.num_patches
        self.grid = (side, side)
        self.codes = self.model.config.vq_config.num_embeddings

    def prompts(self, caption: str) -> tuple[list[int], list[int]]:
        """Return both prompts; padding, which is read, takes the caption's place in one."""
        words = self.tokenizer
        text = words(f"<|User|>: {caption}\n\n<|Assistant|>:<begin_of_image>").input_ids
        special = {words.bos_token_id, words.convert_tokens_to_ids("<begin_of_image>")}
        return text, [word if word in special else words.pad_token_id for word in text]

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed token ids of prompts: [rows, n] -> [rows, n, dim]."""
        return self.decoder.get_input_embeddings()(words)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes: [rows, n] -> [rows, n, dim]."""
        return self.model.generation_aligner(self.model.generation_embeddings(codes))

    def logits(self, features: Tensor) -> Tensor:
        """Map last hidden states [rows, n, dim] to logits [rows, n, codes]."""
        return self.model.generation_head(features)

    def codebook(self) -> Tensor:
        """Return the codebook [codes, d] as stored."""
        return self.model.vqmodel.quantize.embedding.weight

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes [B, N] to RGB [B, H, W, 3] in [-1, 1]."""
        return self.model.vqmodel.decode(codes).permute(0, 2, 3, 1)
