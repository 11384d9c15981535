"""A model without weights: tables of logits by the token before, so that a run takes milliseconds.

Shared by the tests of in-process decoding and of the commands. `TinyModel.broken` are captions at
which the model fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.protocol import (
    Drafter,
    DrafterLogits,
    DrafterSession,
    Logits,
    Target,
    TargetSession,
)
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.model import Model
from lantern_bench.utils.errors import UserError

CODES = 16
TOKENS = 12
WIDTH = 4
PROMPTS = ("one red lantern", "two blue lanterns", "three white lanterns")


class TinyTarget(Target, Drafter):
    """p(next | last token, caption): a table, shifted by the caption's number."""

    vocab_size = CODES
    image_tokens = TOKENS
    device = torch.device("cpu")

    def __init__(self, spread: float, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.cond, self.uncond = spread * torch.randn(2, CODES + 1, CODES, generator=noise)

    def session(self, batch: int, *, guided: bool, nodes: int) -> TinySession:
        return TinySession(self, batch, guided=guided)

    def scores(self, tokens: Tensor, *, guided: bool) -> Logits:
        rows = tokens.shape[0] * (1 + guided)
        features = torch.zeros(rows, tokens.shape[1], WIDTH)
        return Logits(self.cond[tokens], self.uncond[tokens] if guided else None, features)


class TinySession(TargetSession, DrafterSession):
    """Both roles: a table needs no memory of what was committed."""

    def __init__(self, table: TinyTarget, batch: int, *, guided: bool) -> None:
        self.table = table
        self.batch = batch
        self.guided = guided

    def prefill(self, condition: Any, features: Tensor | None = None) -> Any:
        if "broken" in condition:
            raise RuntimeError("no memory\nleft")
        start = torch.full((self.batch, 1), CODES)
        return self.table.scores(start, guided=self.guided) if features is None else None

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        return self.table.scores(tokens, guided=self.guided)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Nothing to keep."""

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        last = tokens.gather(1, (counts[:, None] - 1).clamp_min(0))
        return self.extend(last, last, last)

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        scores = self.table.scores(tokens, guided=self.guided)
        return DrafterLogits(scores.cond, scores.uncond)


class TinyPixels:
    """Every token is a grey dot."""

    def pixels(self, tokens: Tensor) -> Tensor:
        return (tokens.reshape(-1, 3, 4, 1) * 15).to(torch.uint8).expand(-1, -1, -1, 3).contiguous()


class TinyModel(Model):
    """The model `tiny`; it knows the words of its prompts."""

    name = "tiny"
    family = "tiny"
    description = "Tables"
    licence = "none"
    codes = CODES
    defaults: Mapping[str, Any] = {
        "cfg_scale": 2.0,
        "tree": "small-7",
        "nodes": 6,
        "depth": 2,
        "beam": 2,
    }
    prompt_sets: Mapping[str, Sequence[str]] = {"held-out": PROMPTS}

    def __init__(self) -> None:
        self.loads = 0

    def check_prompt(self, text: str) -> None:
        known = {"broken", *" ".join(PROMPTS).split()}
        for word in text.split():
            if word not in known:
                raise UserError(f"caption {text!r}: unknown word {word!r}", "It knows little.")

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        self.loads += 1
        codebook = torch.randn(CODES, WIDTH, generator=torch.Generator().manual_seed(9))
        target = TinyTarget(1.0, 1)
        drafter = TinyTarget(1.0, 1)
        drafter.cond = drafter.cond + 0.3 * torch.randn(
            CODES + 1, CODES, generator=torch.Generator().manual_seed(2)
        )

        def condition(prompts: Sequence[str]) -> list[str]:
            return " ".join(prompts).split()

        weights = {"target": "1", "drafter": "2"}
        return LoadedModel(
            name=self.name,
            target=target,
            drafter=drafter,
            pixels=TinyPixels(),
            codebook=codebook,
            condition=condition,
            weights=weights,
            grid=(3, 4),
        )


EXPERIMENT = """
name: tiny
model: tiny
images: 3
metrics: [speed]
compile: false
cells:
  - {mode: ar}
  - {mode: speculative}
  - {mode: lantern, neighbours: 3, delta: 0.2}
  - {mode: lantern++, neighbours: 3, lambda: [2, 5]}
  - {mode: speculative, temperature: 0}
"""
