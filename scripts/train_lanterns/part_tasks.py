"""The training tasks of the bundled models: tokenizer, target, attribute classifier and CLIP model.

All learn from painted scenes. The tokenizer minimises reconstruction error; its codebook follows
the encoder, and dead codes are revived. The target minimises next-token cross-entropy, with the
caption dropped one time in ten. The two scorers, classifier and CLIP, learn from scenes of which
some are reconstructed by the tokenizer. Each scene is degraded anew at every use, so that decoded
pictures are scored as fairly as painted ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lantern_bench.decoding.sampling import guide
from lantern_bench.devices.compute import has_bfloat16
from lantern_bench.models.families.lanterns.description import (
    ALL_ATTRIBUTES,
    FIELDS,
    GUIDANCE,
    HELD_OUT,
    Attributes,
)
from lantern_bench.models.families.lanterns.modules import (
    AttributeClassifier,
    caption_condition,
    prompt_accuracy,
)
from lantern_bench.models.networks.target import Condition, TransformerTarget
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.training.drafter_task import target_features
from lantern_bench.training.trainer import Task
from scripts.train_lanterns.scenes import SceneSet, degrade, render

Reconstruct = Callable[[Tensor], Tensor]

# A configuration of open_clip. Most of the text tower is the embedding of its byte-pair vocabulary.
CLIP_CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": 64,
            "patch_size": 8,
            "layers": 4,
            "width": 128,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 64,
            "heads": 2,
            "layers": 2,
        },
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic"},
}
_EVALUATED = 500
_RETRIEVED = 100
_EVALUATION_SEED = 977_001
_REFERENCE = 1024
_REFERENCE_SEED = 730_113
_REVIVE_EVERY = 10
_USE_DECAY = 0.95
_DEAD = 0.02
_BATCH = 32
_SEQUENCES = 128


def pixels_of(pictures: Tensor) -> Tensor:
    """Convert uint8 [n, 64, 64, 3] to the input of the tokenizer: [n, 3, 64, 64] in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


class EvaluatedTask(Task):
    """A task with an evaluation."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return figures on held-out data, for the training report."""


class TokenizerTask(EvaluatedTask):
    """Train a `VQModel` on scenes."""

    name = "tokenizer"

    def __init__(
        self, model: VQModel, scenes: SceneSet, held_out: SceneSet, expected_steps: int = 1000
    ) -> None:
        self.model = self.module = model
        self._pictures = torch.from_numpy(scenes.pixels)
        self._held_out = torch.from_numpy(held_out.pixels)
        self._use = torch.ones(model.config.codes)
        self._last_latents: Tensor | None = None
        self._revive_until = int(expected_steps * 0.75)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of reconstructing a random batch, mirrored half of the time."""
        device = self.model.quantize.embedding.weight.device
        rows = torch.randint(len(self._pictures), (_BATCH,), generator=generator)
        pixels = pixels_of(self._pictures[rows]).to(device)
        mirror = (torch.rand(_BATCH, 1, 1, 1, generator=generator) < 0.5).to(device)
        pixels = torch.where(mirror, pixels.flip(3), pixels)
        latents = functional.normalize(
            self.model.latents(pixels).float().permute(0, 2, 3, 1), dim=-1
        )
        with torch.autocast(device.type, enabled=False):
            indices = self.model.quantize.nearest(latents.detach())
            quantised = self.model.quantize.rows()[indices]
        commitment = functional.mse_loss(quantised.detach(), latents)
        book = functional.mse_loss(quantised, latents.detach()) + 0.25 * commitment
        through = latents + (quantised - latents).detach()
        decoded = self.model.decode(through.permute(0, 3, 1, 2)).float()
        error = decoded - pixels
        # Mean absolute difference of neighbouring errors: wrong edges cost more than a wrong level.
        across = (error[..., 1:] - error[..., :-1]).abs().mean()
        down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
        edges = across + down
        square = error.pow(2).mean()
        counts = torch.bincount(indices.flatten().cpu(), minlength=self.model.config.codes).float()
        self._use = _USE_DECAY * self._use + (1 - _USE_DECAY) * counts
        self._last_latents = latents.detach().reshape(-1, latents.shape[-1]).cpu()
        # The mean squared distance per code dimension is small. Its weight makes the book follow
        # the encoder.
        total = error.abs().mean() + 4.0 * square + 0.5 * edges + 8.0 * book
        psnr = -10 * torch.log10(square.detach() / 4)
        return total, {"psnr": psnr, "used": (self._use > _DEAD).float().mean()}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Replace unused codes by latents of the last batch, every few steps."""
        dead = (self._use < _DEAD).nonzero().flatten()
        too_late = step > self._revive_until
        if step % _REVIVE_EVERY or too_late or self._last_latents is None or len(dead) == 0:
            return
        chosen = torch.randint(len(self._last_latents), (len(dead),), generator=generator)
        with torch.no_grad():
            table = self.model.quantize.embedding.weight
            table[dead.to(table.device)] = self._last_latents[chosen].to(table)
        self._use[dead] = 1.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running count of the uses of each code."""
        return {"use": self._use}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the count."""
        self._use = state["use"].clone()

    def evaluate(self) -> dict[str, float]:
        """Return PSNR in dB on held-out scenes, and the fraction of codes that they use."""
        return psnr_and_usage(self.model, self._held_out)


def decode_codes(model: VQModel, codes: Tensor) -> Tensor:
    """Decode codes int64 [B, h, w] to pixels [B, 3, H, W], not clamped."""
    return model.decode(model.quantize.rows()[codes].permute(0, 3, 1, 2))


@torch.no_grad()
def psnr_and_usage(model: VQModel, pictures: Tensor) -> dict[str, float]:
    """Return PSNR (dB, mean over pictures) and the fraction of codes used, in float32.

    `pictures` are uint8 [n, 64, 64, 3].
    """
    device = model.quantize.embedding.weight.device
    used = torch.zeros(model.config.codes, dtype=torch.bool)
    errors = []
    for batch in pictures.split(_BATCH):
        pixels = pixels_of(batch).to(device)
        codes = model.encode(pixels)
        decoded = decode_codes(model, codes).clamp(-1, 1)
        errors.append((decoded - pixels).pow(2).mean((1, 2, 3)).cpu())
        used[codes.flatten().cpu()] = True
    psnr = -10 * torch.log10(torch.cat(errors) / 4)
    return {"psnr_db": float(psnr.mean()), "codes_used": float(used.float().mean())}


@torch.inference_mode()
def tokenize(model: VQModel, pictures: Tensor, *, mirrored: bool = False) -> Tensor:
    """Return the tokens of pictures, row by row, or of their mirror images.

    Pictures are uint8 [n, 64, 64, 3], tokens int16 [n, h * w].
    """
    device = model.quantize.embedding.weight.device
    out = []
    for batch in pictures.split(_BATCH):
        pixels = pixels_of(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
            codes = model.encode(pixels.flip(3) if mirrored else pixels)
        out.append(codes.flatten(1).to(torch.int16).cpu())
    return torch.cat(out)


class Sequences(NamedTuple):
    """Tokens int16 [n, 256] of pictures and the indices of their attributes int64 [n, 5]."""

    tokens: Tensor
    attributes: Tensor

    def chosen(self, rows: Tensor | slice) -> Sequences:
        """Return some of the sequences."""
        return Sequences(self.tokens[rows], self.attributes[rows])


class TargetTask(EvaluatedTask):
    """Train the target on token sequences; `sequences` include the mirror image of every scene."""

    name = "target"

    def __init__(
        self, target: TransformerTarget, sequences: Sequences, held_out: Sequences
    ) -> None:
        self.target = self.module = target
        self._sequences = sequences
        self._held_out = held_out
        self._conditions = all_conditions()

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the cross-entropy of a random batch."""
        rows = torch.randint(len(self._sequences.tokens), (_BATCH,), generator=generator)
        drop = torch.rand(_BATCH, generator=generator) < 0.1
        return self._nll(self._sequences.chosen(rows), drop), {}

    def evaluate(self) -> dict[str, float]:
        """Return figures of held-out sequences, teacher forced.

        They are the NLL in nats per token, and the mean top-1 and top-10 probability at the default
        guidance.
        """
        held_out = self._held_out.chosen(slice(_SEQUENCES))
        count = len(held_out.tokens)
        keep = torch.zeros(count, dtype=torch.bool)
        nll = 0.0
        for start in range(0, count, _BATCH):
            batch = slice(start, start + _BATCH)
            nll += float(self._nll(held_out.chosen(batch), keep[batch]))
        nll /= count // _BATCH

        first = held_out.chosen(slice(_BATCH))
        cond, uncond = (
            self.logits(first, torch.full((_BATCH,), dropped)) for dropped in (False, True)
        )
        top = guide(cond, uncond, GUIDANCE).softmax(-1).topk(10, dim=-1).values
        return {
            "nll_held_out": nll,
            "top1": float(top[..., 0].mean()),
            "top10": float(top.sum(-1).mean()),
        }

    def logits(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        """Return the logits [B, 256, V] that predict each token, under teacher forcing."""
        number = caption_numbers(sequences.attributes)
        condition = Condition(self._conditions.values[number], self._conditions.valid[number])
        hidden = target_features(
            target=self.target, condition=condition, tokens=sequences.tokens.long(), dropped=dropped
        ).hidden
        out: Tensor = self.target.transformer.output(hidden[:, self.target.config.prefix - 1 :])
        return out

    def _nll(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        logits = self.logits(sequences, dropped)
        wanted = sequences.tokens.long().to(logits.device)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def all_conditions() -> Condition:
    """Return the condition of every caption, in the order of `ALL_ATTRIBUTES`."""
    return caption_condition([item.caption() for item in ALL_ATTRIBUTES])


def caption_numbers(attributes: Tensor) -> Tensor:
    """Convert attribute indices int64 [n, 5] to places in `ALL_ATTRIBUTES` [n]."""
    number = torch.zeros(len(attributes), dtype=torch.int64)
    for column, values in enumerate(FIELDS.values()):
        number = number * len(values) + attributes[:, column]
    return number


class Pool(NamedTuple):
    """Pictures to learn from."""

    pixels: Tensor  # uint8 [n, 3, 64, 64]
    attributes: Tensor  # their indices, int64 [n, 5]


def training_pool(scenes: SceneSet, through: Reconstruct | None, fraction: float = 0.4) -> Pool:
    """Return scenes to learn from; a fraction of them is reconstructed by `through`."""
    pixels = torch.from_numpy(scenes.pixels).permute(0, 3, 1, 2).contiguous()
    if through is not None:
        count = int(len(pixels) * fraction)
        pixels[:count] = through(pixels[:count])
    return Pool(pixels, torch.from_numpy(scenes.attributes))


@torch.inference_mode()
def reconstruct(tokenizer: VQModel, pictures: Tensor) -> Tensor:
    """Encode and decode pictures uint8 [n, 3, h, w], in bfloat16 if that is fast."""
    device = next(tokenizer.parameters()).device
    batches = []
    for batch in pictures.split(_BATCH):
        with torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
            codes = tokenizer.encode(batch.to(device).float() / 127.5 - 1)
            decoded = decode_codes(tokenizer, codes)
        pixels = (decoded.float().clamp(-1, 1) + 1) * 127.5
        batches.append(pixels.round().to(torch.uint8).cpu())
    return torch.cat(batches) if batches else pictures


def held_out_scenes(n: int, seed: int = _EVALUATION_SEED) -> tuple[Tensor, list[Attributes]]:
    """Paint scenes of the held-out captions, in order: uint8 [n, 3, 64, 64], and attributes."""
    attributes = [HELD_OUT[number % len(HELD_OUT)] for number in range(n)]
    pixels = torch.from_numpy(np.ascontiguousarray(render(attributes, seed).transpose(0, 3, 1, 2)))
    return pixels, attributes


def reference_scenes() -> tuple[Tensor, str]:
    """Return the scenes of the embedded reference, uint8 [1024, 3, 64, 64], and their label.

    No training uses the seed. The label includes a hash of the pixels.
    """
    scenes, _ = held_out_scenes(_REFERENCE, _REFERENCE_SEED)
    digest = hashlib.sha256(scenes.numpy().tobytes()).hexdigest()
    described = f"n={_REFERENCE}, seed={_REFERENCE_SEED}, sha256={digest[:8]}"
    return scenes, f"lanterns held-out scenes, {described}"


class FeaturesTask(EvaluatedTask):
    """Train the attribute classifier: the mean of five cross-entropies, slightly smoothed."""

    name = "features"

    def __init__(
        self, pool: Pool, through: Reconstruct | None = None, batch: int = 128, seed: int = 0
    ) -> None:
        self._pool = pool
        self._through = through
        self._batch = batch
        with torch.random.fork_rng(devices=[]):
            # Layers draw from the global stream, which is forked here.
            torch.manual_seed(seed)  # noqa: TID251
            self.classifier = AttributeClassifier()
        self.module = self.classifier.to(memory_format=torch.channels_last)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of a batch drawn with replacement."""
        device = next(self.module.parameters()).device
        rows = torch.randint(len(self._pool.pixels), (self._batch,), generator=generator)
        wanted = self._pool.attributes[rows].to(device)
        logits = self.module(_degraded(self._pool.pixels[rows], generator, device))
        pairs = list(zip(logits, wanted.T, strict=True))
        losses = [
            functional.cross_entropy(answer.float(), values, label_smoothing=0.02)
            for answer, values in pairs
        ]
        right = torch.stack([answer.argmax(1) == values for answer, values in pairs])
        return torch.stack(losses).mean(), {"all_right": right.all(0).float().mean().detach()}

    def evaluate(self) -> dict[str, float]:
        """Return the fraction of held-out scenes with all five attributes right."""
        self.classifier.eval()
        pixels, attributes = held_out_scenes(_EVALUATED)
        sets = {"scenes": pixels}
        if self._through is not None:
            sets["reconstructions"] = self._through(pixels)
        figures = {}
        for name, pictures in sets.items():
            answers = prompt_accuracy(self.classifier, pictures, attributes)
            figures[f"accuracy_{name}"] = float(answers.float().mean())
        return figures


class ClipTask(EvaluatedTask):
    """Train the CLIP model on pairs of picture and caption, contrastively.

    A batch never holds one caption twice, since a picture of the same caption would count as a
    wrong answer.
    """

    name = "clip"

    def __init__(
        self, pool: Pool, through: Reconstruct | None = None, batch: int = 256, seed: int = 0
    ) -> None:
        self._pool = pool
        self._through = through
        with torch.random.fork_rng(devices=[]):
            # Layers draw from the global stream, which is forked here.
            torch.manual_seed(seed)  # noqa: TID251
            self.clip = open_clip.CLIP(**CLIP_CONFIG["model_cfg"])
        self.module = self.clip
        self._tokens = _caption_tokens(ALL_ATTRIBUTES)
        number = caption_numbers(pool.attributes)
        order = number.argsort(stable=True)
        captions, counts = number[order].unique_consecutive(return_counts=True)
        # The rows in the pool of each caption (its place in `ALL_ATTRIBUTES`) that has pictures.
        rows = order.split(counts.tolist())
        self._of_caption: dict[int, Tensor] = dict(zip(captions.tolist(), rows, strict=True))
        self._batch = min(batch, len(self._of_caption))

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of a batch of different captions, with one picture of each."""
        device = next(self.module.parameters()).device
        captions = torch.tensor(list(self._of_caption))
        chosen = captions[torch.randperm(len(captions), generator=generator)[: self._batch]]
        choices = [self._of_caption[int(caption)] for caption in chosen]
        rows = torch.stack(
            [choice[torch.randint(len(choice), (), generator=generator)] for choice in choices]
        )
        pixels = _degraded(self._pool.pixels[rows], generator, device) * 2 - 1
        # The backward pass of the fused attention kernel is slow on CPUs. With plain operations a
        # step takes two thirds of the time.
        kernels = [SDPBackend.MATH]
        if device.type != "cpu":
            kernels += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(kernels):
            images, texts, scale = self.clip(pixels, self._tokens[chosen].to(device))
        logits = scale.float() * images.float() @ texts.float().T
        target = torch.arange(self._batch, device=device)
        of_images = functional.cross_entropy(logits, target)
        of_texts = functional.cross_entropy(logits.T, target)
        loss = (of_images + of_texts) / 2
        return loss, {"top1": (logits.argmax(1) == target).float().mean().detach()}

    # The parameters are the loop's protocol.
    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: ARG002
        """Bound the temperature of the softmax, as CLIP does (arXiv 2103.00020, section 2.5)."""
        with torch.no_grad():
            self.clip.logit_scale.clamp_(0, math.log(100))

    @torch.inference_mode()
    def evaluate(self) -> dict[str, float]:
        """Return caption retrieval among held-out scenes, and mean cosines."""
        self.clip.eval()
        pixels, attributes = held_out_scenes(_RETRIEVED)
        figures = self._retrieval(pixels, attributes, "scenes")
        if self._through is not None:
            figures |= self._retrieval(self._through(pixels), attributes, "reconstructions")
        return figures

    def _retrieval(
        self, pixels: Tensor, attributes: Sequence[Attributes], kind: str
    ) -> dict[str, float]:
        device = next(self.module.parameters()).device
        images = self.clip.encode_image(pixels.to(device).float() / 127.5 - 1, normalize=True)
        texts = self.clip.encode_text(_caption_tokens(attributes).to(device), normalize=True)
        cosines = images @ texts.T
        right = (cosines.argmax(1) == torch.arange(len(pixels), device=device)).float().mean()
        others = (cosines.sum() - cosines.trace()) / (cosines.numel() - len(cosines))
        return {
            f"retrieval_{kind}": float(right),
            f"cosine_{kind}": float(cosines.diagonal().mean()),
            f"cosine_{kind}_other_captions": float(others),
        }


def save_clip(model: nn.Module, folder: Path) -> None:
    """Write a folder that open_clip loads as `local-dir:`: configuration and float16 safetensors.

    Embedding rows of byte pairs that no caption uses are written as zeros. They were never trained,
    and without their noise the file packs to a third.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, value in model.state_dict().items():
        state[name] = value.detach().half().cpu().contiguous()
    used = torch.zeros(len(state["token_embedding.weight"]), 1, dtype=torch.bool)
    used[_caption_tokens(ALL_ATTRIBUTES).unique()] = True
    state["token_embedding.weight"] = state["token_embedding.weight"] * used
    save_file(state, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(
        json.dumps(CLIP_CONFIG, indent=2) + "\n", encoding="utf-8"
    )


def _caption_tokens(attributes: Sequence[Attributes]) -> Tensor:
    """Return captions as open_clip's byte-pair tokens: int64 [n, context length]."""
    tokenizer = open_clip.SimpleTokenizer(
        context_length=CLIP_CONFIG["model_cfg"]["text_cfg"]["context_length"]
    )
    tokens: Tensor = tokenizer([item.caption() for item in attributes])
    return tokens


def _degraded(pixels: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Degrade uint8 pictures [n, 3, h, w] to float in [0, 1] on the device, outside autocast."""
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        return degrade(pixels.float() / 255, generator).to(device)
