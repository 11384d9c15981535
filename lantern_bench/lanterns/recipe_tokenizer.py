"""How the embedded tokenizer is trained: L1 + L2 + gradient loss, commitment, and dead codes revived from the batch.

The architecture is LlamaGen's (`models.vq`) at a small size; there is no adversarial or perceptual loss, because the
scenes are simple and no pretrained network is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.lanterns.dataset import SceneSet
from lantern_bench.models.vq import VQConfig, VQModel

__all__ = ["TOKENIZER_CONFIG", "TokenizerTask", "pixels_of", "psnr_and_usage", "tokenize"]

TOKENIZER_CONFIG = VQConfig(codes=2048, code_dim=8, z_channels=64, channels=32, channel_mult=(1, 2, 3), res_blocks=1)
_REVIVE_EVERY = 10
_REVIVE_UNTIL = 0.75
_USE_DECAY = 0.95
_DEAD = 0.02
_COMMIT = 0.25
_BATCH = 32


def pixels_of(pictures: Tensor) -> Tensor:
    """Pictures uint8 [n, 64, 64, 3] as the tokenizer takes them: float [n, 3, 64, 64] in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


class TokenizerTask:
    """Train a `VQModel` on scenes."""

    name = "tokenizer"

    def __init__(self, model: VQModel, scenes: SceneSet, held_out: SceneSet, expected_steps: int = 1000) -> None:
        self.model = model
        self.module: nn.Module = model
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
        book = functional.mse_loss(quantised, latents.detach()) + _COMMIT * functional.mse_loss(
            quantised.detach(), latents
        )
        through = latents + (quantised - latents).detach()
        decoded = self.model.decode(through.permute(0, 3, 1, 2)).float()
        error = decoded - pixels
        square, edges = error.pow(2).mean(), _gradients(error)
        self._note_use(indices, latents)
        # Per code dimension the mean squared distance is small; the weight makes the book follow the encoder.
        total = error.abs().mean() + 4.0 * square + 0.5 * edges + 8.0 * book
        psnr = -10 * torch.log10(square.detach() / 4)
        return total, {"psnr": psnr, "used": (self._use > _DEAD).float().mean()}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Every few steps, replace codes that nothing uses by latents of the last batch."""
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
        """How much each code was used of late."""
        return {"use": self._use}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Go on counting from there."""
        self._use = memory["use"].clone()

    def evaluate(self) -> dict[str, float]:
        """PSNR in dB on held-out scenes and the share of codes they use."""
        return psnr_and_usage(self.model, self._held_out)

    def _note_use(self, indices: Tensor, latents: Tensor) -> None:
        counts = torch.bincount(indices.flatten().cpu(), minlength=self.model.config.codes).float()
        self._use = _USE_DECAY * self._use + (1 - _USE_DECAY) * counts
        self._last_latents = latents.detach().reshape(-1, latents.shape[-1]).cpu()


def _gradients(error: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring errors: wrong edges cost more than a wrong level."""
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return across + down


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
