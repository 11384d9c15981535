"""SimpleAR (arXiv 2504.11455), run by transformers in our decode loop."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, Qwen2ForCausalLM

from lantern_bench.models.hosted import HostedModel

LEVELS = (8, 8, 8, 5, 5, 5)  # of each number of a code, in Cosmos' finite scalar quantiser
PROMPT = "<|t2i|>A highly realistic image of {}<|soi|>"
UNWANTED = (
    "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, "
    "bad hands, bad teeth, bad eyes, bad limbs, distortion<|soi|>"
)


class SimpleAR(HostedModel):
    """A Qwen2 whose last words are codes. Cosmos' decoder, which makes the pixels, is not here."""

    defaults: ClassVar = {"cfg_scale": 6.0}
    grid = (64, 64)  # 1024x1024 px
    prefix = 512
    levels = LEVELS

    def __init__(self, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        loaded = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
        self.model = loaded.to(device).eval()
        self.decoder = self.model.model
        self.codes = len(self.codebook())
        self.first = self.model.config.vocab_size - self.codes  # word of code 0

    def prompts(self, caption: str) -> tuple[list[int], list[int]]:
        """Return the prompt, and the negative prompt of the authors."""
        text = self.tokenizer(PROMPT.format(caption)).input_ids
        return text, self.tokenizer(UNWANTED).input_ids

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed token ids of prompts: [rows, n] -> [rows, n, dim]."""
        return self.decoder.embed_tokens(words)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes: [rows, n] -> [rows, n, dim]."""
        return self.decoder.embed_tokens(codes + self.first)

    def logits(self, features: Tensor) -> Tensor:
        """Map last hidden states [rows, n, dim] to logits [rows, n, codes]."""
        return functional.linear(features, self.model.lm_head.weight[self.first :])

    def codebook(self) -> Tensor:
        """Return the vectors [codes, 6] of the quantiser, whose numbers are from -1 to 1."""
        places = [torch.arange(level) - level // 2 for level in reversed(self.levels)]
        halves = torch.tensor(self.levels) // 2
        # The first number of a vector changes from each code to the next.
        return torch.cartesian_prod(*places).flip(1) / halves
