"""The language model of GLM-Image, run by transformers in our decode loop."""

from pathlib import Path
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GlmImageForConditionalGeneration

from lantern_bench.models.hosted import HostedModel

FINE = (32, 32)
COARSE = (16, 16)


class GlmImage(HostedModel):
    """A decoder with positions on three axes and two grids. A diffusion model makes the pixels."""

    defaults: ClassVar = {"cfg_scale": 1.0, "temperature": 0.9, "top_p": 0.75}
    neighbour_space = "normalised"
    grid = FINE
    coarse_grid = COARSE

    def __init__(self, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.words = Tokenizer.from_file(str(checkpoint / "processor" / "tokenizer.json"))
        loaded = GlmImageForConditionalGeneration.from_pretrained(
            checkpoint / "vision_language_encoder", dtype=dtype, local_files_only=True
        )
        self.model = loaded.to(device).eval()
        self.decoder = self.model.model.language_model
        self.codes = self.model.config.vq_config.num_embeddings

        # The cells of the image on three axes, from its first position, [3, tokens].
        cells = []
        start = 0
        for rows, columns in (COARSE, FINE):
            of_grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            cells.append(start + functional.pad(of_grid, (1, 0)))
            start += max(rows, columns)
        end = torch.full((1, 3), start)
        self.cells = torch.cat([*cells, end]).T.contiguous().to(device)

    def prompts(self, caption: str) -> tuple[list[int], list[int]]:
        """Return the prompt twice: the model has no guidance."""
        sizes = "".join(f"<sop>{rows} {columns}<eop>" for rows, columns in (FINE, COARSE))
        text = f"{caption}{sizes}<|dit_token_16384|>"
        words = self.words.encode(text, add_special_tokens=False).ids
        return words, words

    def positions(self, counted: Tensor, words: Tensor) -> Tensor:
        """Words have the same position on all axes, cells their own: [3, rows, n]."""
        place = counted - words
        last = self.cells.shape[1] - 1
        return torch.where(place < 0, counted, words + self.cells[:, place.clamp(0, last)])

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed token ids of prompts: [rows, n] -> [rows, n, dim]."""
        return self.model.get_input_embeddings()(words)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes, the first words of the vocabulary: [rows, n] -> [rows, n, dim]."""
        return self.model.get_input_embeddings()(codes)

    def logits(self, features: Tensor) -> Tensor:
        """Map last hidden states [rows, n, dim] to logits [rows, n, codes]."""
        return self.model.lm_head(features)[..., : self.codes]

    def codebook(self) -> Tensor:
        """Return the codebook [codes, d] as stored."""
        return self.model.model.vqmodel.quantize.embedding.weight
