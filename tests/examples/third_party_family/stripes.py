"""A model in one file: pictures of four grey stripes, by a model that knows only the token before.

It shows what `lantern_bench` asks of a model, and no more. Logits are a table; a prompt is `light`
or `dark`. The drafter is the target with other numbers, so that speculation has something to
reject.
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

CODES = 8
GRID = (4, 4)


class Table(Target, Drafter):
    """Target and drafter alike: the logits of the next token, by prompt and last token [2, CODES +
    1, CODES].
    """

    vocab_size = CODES
    image_tokens = GRID[0] * GRID[1]
    device = torch.device("cpu")

    def __init__(self, noise: float) -> None:
        # Near grey values follow each other; the last row is what an image begins with.
        grey = torch.arange(CODES, dtype=torch.float32)
        follow = -0.5 * (grey[:, None] - grey[None, :]).abs()
        start = torch.stack([grey, grey.flip(0)])[:, None] / CODES
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.cat([follow.expand(2, -1, -1), start], dim=1)
        self.logits = self.logits + noise * torch.randn(self.logits.shape, generator=generator)

    def session(self, batch: int, *, guided: bool, nodes: int) -> Session:
        """A session; there is nothing to keep."""
        return Session(self, guided=guided)


class Session(TargetSession, DrafterSession):
    """Both roles of `decoding.protocol`."""

    def __init__(self, table: Table, *, guided: bool) -> None:
        self.table = table
        self.guided = guided
        self.prompts = torch.zeros(1, dtype=torch.int64)

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, n, CODES] behind tokens [B, n], and those without a prompt where they are
        needed.
        """
        cond = self.table.logits[self.prompts[:, None], tokens]
        return cond, self.table.logits.mean(0)[tokens] if self.guided else None

    def prefill(self, condition: Tensor, features: Tensor | None = None) -> Logits | None:
        """Begin: as a target without `features`, as a drafter with them."""
        self.prompts = condition
        if features is not None:
            return None
        cond, uncond = self.look_up(torch.full((len(condition), 1), CODES))
        return Logits(cond, uncond, torch.zeros(len(condition) * (1 + self.guided), 1, 1))

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        """The nodes of a tree; each depends on its own token alone."""
        cond, uncond = self.look_up(tokens)
        return Logits(
            cond, uncond, torch.zeros(len(tokens) * (1 + self.guided), tokens.shape[1], 1)
        )

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Nothing to keep."""

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        """Drafts behind the last committed token."""
        return DrafterLogits(*self.look_up(tokens.gather(1, (counts[:, None] - 1).clamp_min(0))))

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        """Drafts one level deeper."""
        return DrafterLogits(*self.look_up(tokens))


class Stripes:
    """A `PixelDecoder`: a token is a grey square of 8 x 8 pixels."""

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3]."""
        grey = (tokens.reshape(-1, *GRID) * (255 // (CODES - 1))).to(torch.uint8)
        return (
            grey.repeat_interleave(8, 1)
            .repeat_interleave(8, 2)[..., None]
            .expand(-1, -1, -1, 3)
            .contiguous()
        )


class StripesModel(Model):
    """What plans and listings need before anything is loaded, and how the model is loaded."""

    name = family = "stripes"
    description = "example of a model of another package: 16 grey squares"
    licence = "Apache-2.0"
    defaults: Mapping[str, Any] = {"cfg_scale": 1.5, "tree": "small-7", "neighbours": 2}
    codes = CODES
    tokens = GRID[0] * GRID[1]
    prompt_sets: Mapping[str, Sequence[str]] = {"both": ("light", "dark")}

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt the model cannot take."""
        if text not in ("light", "dark"):
            raise UserError(f"caption {text!r}: unknown", "The stripes are light or dark.")

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Put the model together."""
        return LoadedModel(
            name=self.name,
            target=Table(noise=0.0),
            drafter=Table(noise=0.3),
            pixels=Stripes(),
            codebook=torch.arange(CODES, dtype=torch.float32)[:, None],
            condition=lambda prompts: torch.tensor([int(text == "dark") for text in prompts]),
            weights={"target": "stripes-1", "drafter": "stripes-1"},
            grid=GRID,
        )


MODEL = StripesModel()
