"""The training tasks of the bundled tokenizer and target, on painted scenes and their tokens.

The tokenizer minimises reconstruction error and its codebook follows the encoder; dead codes are revived. The target
minimises next-token cross-entropy, with the caption dropped one time in ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.decoding.sampling import guide
from lantern_bench.models.lanterns import GUIDANCE
from lantern_bench.models.lanterns.captions import ALL_ATTRIBUTES, FIELDS
from lantern_bench.models.lanterns.model import caption_condition
from lantern_bench.models.transformer.conditioning import Condition
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.models.vq import VQModel
from lantern_bench.training.drafter.features import target_features
from lantern_bench.training.lanterns.scenes import SceneSet
from lantern_bench.training.loop import Task

_REVIVE_EVERY = 10
_REVIVE_UNTIL = 0.75
_USE_DECAY = 0.95
_DEAD = 0.02
_COMMIT = 0.25
_BATCH = 32
_DROPPED = 0.1
_EVALUATED = 128


def pixels_of(pictures: Tensor) -> Tensor:
    """Pictures uint8 [n, 64, 64, 3] as input of the tokenizer: float [n, 3, 64, 64] in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


class TokenizerTask(Task):
    """Train a `VQModel` on scenes."""

    name = "tokenizer"

    def __init__(self, model: VQModel, scenes: SceneSet, held_out: SceneSet, expected_steps: int = 1000) -> None:
        self.model = model
        self.module = model
        self._pictures = torch.from_numpy(scenes.pixels)
        self._held_out = torch.from_numpy(held_out.pixels)
        self._use = torch.ones(model.config.codes)
        self._last_latents: Tensor | None = None
        self._revive_until = int(expected_steps * _REVIVE_UNTIL)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Reconstruction of a random batch, mirrored half of the time."""
        device = self.model.quantize.embedding.weight.device
        rows = torch.randint(len(self._pictures), (_BATCH,), generator=generator)
        pixels = pixels_of(self._pictures[rows]).to(device)
        mirror = (torch.rand(_BATCH, 1, 1, 1, generator=generator) < 0.5).to(device)
        pixels = torch.where(mirror, pixels.flip(3), pixels)
        latents = functional.normalize(self.model.latents(pixels).float().permute(0, 2, 3, 1), dim=-1)
        with torch.autocast(device.type, enabled=False):
            indices = self.model.quantize.nearest(latents.detach())
            quantised = self.model.quantize.rows()[indices]
        commitment = functional.mse_loss(quantised.detach(), latents)
        book = functional.mse_loss(quantised, latents.detach()) + _COMMIT * commitment
        through = latents + (quantised - latents).detach()
        decoded = self.model.decode(through.permute(0, 3, 1, 2)).float()
        error = decoded - pixels
        square, edges = error.pow(2).mean(), _gradients(error)
        counts = torch.bincount(indices.flatten().cpu(), minlength=self.model.config.codes).float()
        self._use = _USE_DECAY * self._use + (1 - _USE_DECAY) * counts
        self._last_latents = latents.detach().reshape(-1, latents.shape[-1]).cpu()
        # Per code dimension the mean squared distance is small; the weight makes the book follow the encoder.
        total = error.abs().mean() + 4.0 * square + 0.5 * edges + 8.0 * book
        psnr = -10 * torch.log10(square.detach() / 4)
        return total, {"psnr": psnr, "used": (self._use > _DEAD).float().mean()}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Replace unused codes by latents of the last batch, every few steps."""
        if step % _REVIVE_EVERY or step > self._revive_until or self._last_latents is None:
            return
        dead = (self._use < _DEAD).nonzero().flatten()
        if len(dead) == 0:
            return
        chosen = torch.randint(len(self._last_latents), (len(dead),), generator=generator)
        with torch.no_grad():
            table = self.model.quantize.embedding.weight
            table[dead.to(table.device)] = self._last_latents[chosen].to(table)
        self._use[dead] = 1.0

    def memory(self) -> dict[str, Tensor]:
        """A running count of the uses of each code."""
        return {"use": self._use}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Continue the count."""
        self._use = memory["use"].clone()

    def evaluate(self) -> dict[str, float]:
        """PSNR in dB on held-out scenes and the share of codes they use."""
        return psnr_and_usage(self.model, self._held_out)


def _gradients(error: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring errors: wrong edges cost more than a wrong level."""
    return (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()


@torch.no_grad()
def psnr_and_usage(model: VQModel, pictures: Tensor) -> dict[str, float]:
    """PSNR (dB, mean over pictures) and share of codes used by uint8 pictures [n, 64, 64, 3], in float32."""
    device = model.quantize.embedding.weight.device
    used = torch.zeros(model.config.codes, dtype=torch.bool)
    errors = []
    for batch in pictures.split(_BATCH):
        pixels = pixels_of(batch).to(device)
        encoded = model.encode(pixels)
        decoded = model.decode(encoded.quantised).clamp(-1, 1)
        errors.append((decoded - pixels).pow(2).mean((1, 2, 3)).cpu())
        used[encoded.indices.flatten().cpu()] = True
    psnr = -10 * torch.log10(torch.cat(errors) / 4)
    return {"psnr_db": float(psnr.mean()), "codes_used": float(used.float().mean())}


@torch.inference_mode()
def tokenize(model: VQModel, pictures: Tensor, mirrored: bool = False) -> Tensor:
    """Tokens int16 [n, h*w] of uint8 pictures [n, 64, 64, 3], row by row; of their mirror images if asked."""
    device = model.quantize.embedding.weight.device
    out = []
    for batch in pictures.split(_BATCH):
        pixels = pixels_of(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            encoded = model.encode(pixels.flip(3) if mirrored else pixels)
        out.append(encoded.indices.flatten(1).to(torch.int16).cpu())
    return torch.cat(out)


class Sequences(NamedTuple):
    """Tokens int16 [n, 256] of pictures and the indices of their attributes int64 [n, 5]."""

    tokens: Tensor
    attributes: Tensor


class TargetTask(Task):
    """Train the target on token sequences; `sequences` has the mirror image of every scene as well."""

    name = "target"

    def __init__(self, target: TransformerTarget, sequences: Sequences, held_out: Sequences) -> None:
        self.target = target
        self.module = target
        self._sequences, self._held_out = sequences, held_out
        self._conditions = all_conditions()

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of a random batch."""
        rows = torch.randint(len(self._sequences.tokens), (_BATCH,), generator=generator)
        drop = torch.rand(_BATCH, generator=generator) < _DROPPED
        loss = self._nll(Sequences(self._sequences.tokens[rows], self._sequences.attributes[rows]), drop)
        return loss, {}

    def evaluate(self) -> dict[str, float]:
        """Held-out NLL (nats a token); mean top-1 and top-10 probability, default guidance, teacher forced."""
        part = Sequences(*(tensor[:_EVALUATED] for tensor in self._held_out))
        keep = torch.zeros(len(part.tokens), dtype=torch.bool)
        nll = sum(
            float(self._nll(Sequences(*(t[i : i + _BATCH] for t in part)), keep[i : i + _BATCH]))
            for i in range(0, len(keep), _BATCH)
        ) / (len(keep) // _BATCH)
        sharp = Sequences(*(tensor[:_BATCH] for tensor in part))
        logits = [self.logits(sharp, torch.full((_BATCH,), dropped)) for dropped in (False, True)]
        top = guide(logits[0], logits[1], GUIDANCE).softmax(-1).topk(10, dim=-1).values
        return {"nll_held_out": nll, "top1": float(top[..., 0].mean()), "top10": float(top.sum(-1).mean())}

    def logits(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        """Logits [B, 256, V] that predict each token, under teacher forcing."""
        number = caption_numbers(sequences.attributes)
        condition = Condition(self._conditions.values[number], self._conditions.valid[number])
        hidden = target_features(self.target, condition, sequences.tokens.long(), dropped).hidden
        out: Tensor = self.target.transformer.output(hidden[:, self.target.config.prefix - 1 :])
        return out

    def _nll(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        logits = self.logits(sequences, dropped)
        wanted = sequences.tokens.long().to(logits.device)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def all_conditions() -> Condition:
    """The condition of every caption, in the order of `ALL_ATTRIBUTES`."""
    return caption_condition([item.caption() for item in ALL_ATTRIBUTES])


def caption_numbers(attributes: Tensor) -> Tensor:
    """Attribute indices int64 [n, 5] -> place in `ALL_ATTRIBUTES` [n]."""
    number = torch.zeros(len(attributes), dtype=torch.int64)
    for column, values in enumerate(FIELDS.values()):
        number = number * len(values) + attributes[:, column]
    return number
