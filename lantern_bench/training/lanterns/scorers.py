"""The training tasks of the two scorers: the attribute classifier (fidelity features, prompt accuracy) and CLIP.

Both learn from scenes of the training captions, a share of them reconstructed by the tokenizer, each degraded anew at
every use, so that decoded pictures are scored as fairly as painted ones.
"""

from __future__ import annotations

import json
import math
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

from lantern_bench.models.lanterns.captions import ALL_ATTRIBUTES, HELD_OUT, Attributes
from lantern_bench.models.lanterns.classifier import AttributeClassifier, prompt_accuracy
from lantern_bench.models.vq import VQModel
from lantern_bench.training.lanterns.scenes import SceneSet, degrade, render
from lantern_bench.training.lanterns.tasks import caption_numbers
from lantern_bench.training.loop import Task

Reconstruct = Callable[[Tensor], Tensor]

# An open_clip configuration like those it ships; the text tower is mostly the embedding of its byte-pair vocabulary.
CLIP_CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 64, "patch_size": 8, "layers": 4, "width": 128, "head_width": 32},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic"},
}
_RECONSTRUCTED_SHARE = 0.4
_EVALUATED = 500
_EVALUATION_SEED = 977_001
_RETRIEVAL = 100
_BATCH_RECONSTRUCTED = 32
_MOST_LOGIT_SCALE = math.log(100)
_GPU_ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Pool(NamedTuple):
    """Pictures to learn from: uint8 [n, 3, 64, 64], and the indices of their attributes int64 [n, 5]."""

    pixels: Tensor
    attributes: Tensor


def training_pool(scenes: SceneSet, through: Reconstruct | None, share: float = _RECONSTRUCTED_SHARE) -> Pool:
    """Scenes to learn from, the first `share` of them reconstructed by `through`, if any."""
    pixels = torch.from_numpy(scenes.pixels).permute(0, 3, 1, 2).contiguous()
    if through is not None:
        count = int(len(pixels) * share)
        pixels[:count] = through(pixels[:count])
    return Pool(pixels, torch.from_numpy(scenes.attributes))


@torch.inference_mode()
def reconstruct(tokenizer: VQModel, pictures: Tensor) -> Tensor:
    """Encode and decode pictures: uint8 [n, 3, h, w] to the same; computed in bfloat16."""
    device = next(tokenizer.parameters()).device
    batches = []
    for batch in pictures.split(_BATCH_RECONSTRUCTED):
        with torch.autocast(device.type, torch.bfloat16):
            decoded = tokenizer.decode(tokenizer.encode(batch.to(device).float() / 127.5 - 1).quantised)
        batches.append(((decoded.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu())
    return torch.cat(batches) if batches else pictures


def held_out_scenes(n: int, seed: int = _EVALUATION_SEED) -> tuple[Tensor, list[Attributes]]:
    """New scenes of the held-out captions, in order: uint8 [n, 3, 64, 64] and their attributes."""
    attributes = [HELD_OUT[number % len(HELD_OUT)] for number in range(n)]
    pixels = torch.from_numpy(np.ascontiguousarray(render(attributes, seed).transpose(0, 3, 1, 2)))
    return pixels, attributes


class FeaturesTask(Task):
    """Train the attribute classifier: the mean of five cross-entropies, slightly smoothed."""

    name = "features"

    def __init__(self, pool: Pool, through: Reconstruct | None = None, batch: int = 128, seed: int = 0) -> None:
        self._pool, self._through, self._batch = pool, through, batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # noqa: TID251  # layers draw from the global stream; this forks it
            self.classifier = AttributeClassifier()
        self.module = self.classifier.to(memory_format=torch.channels_last)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One batch drawn with replacement."""
        device = next(self.module.parameters()).device
        rows = torch.randint(len(self._pool.pixels), (self._batch,), generator=generator)
        wanted = self._pool.attributes[rows].to(device)
        logits = self.module(_degraded(self._pool.pixels[rows], generator, device))
        losses = [
            functional.cross_entropy(answer.float(), column, label_smoothing=0.02)
            for answer, column in zip(logits, wanted.T, strict=True)
        ]
        right = torch.stack([answer.argmax(1) == column for answer, column in zip(logits, wanted.T, strict=True)])
        return torch.stack(losses).mean(), {"all_right": right.all(0).float().mean().detach()}

    def evaluate(self) -> dict[str, float]:
        """Share of held-out scenes with all five attributes right, painted and reconstructed."""
        self.classifier.eval()
        pixels, attributes = held_out_scenes(_EVALUATED)
        figures = {"accuracy_scenes": float(prompt_accuracy(self.classifier, pixels, attributes).float().mean())}
        if self._through is not None:
            answers = prompt_accuracy(self.classifier, self._through(pixels), attributes)
            figures["accuracy_reconstructions"] = float(answers.float().mean())
        return figures


class ClipTask(Task):
    """Train the CLIP model on pairs of picture and caption, contrastively.

    A batch never holds one caption twice: a picture of the same caption would count as a wrong answer.
    """

    name = "clip"

    def __init__(self, pool: Pool, through: Reconstruct | None = None, batch: int = 256, seed: int = 0) -> None:
        self._pool, self._through = pool, through
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # noqa: TID251  # layers draw from the global stream; this forks it
            self.clip = open_clip.CLIP(**CLIP_CONFIG["model_cfg"])
        self.module = self.clip
        self._tokens = _caption_tokens(ALL_ATTRIBUTES)
        self._of_caption = _rows_of_captions(pool.attributes)
        self._batch = min(batch, len(self._of_caption))

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One batch of different captions, one picture of each."""
        device = next(self.module.parameters()).device
        captions = torch.tensor(list(self._of_caption))
        chosen = captions[torch.randperm(len(captions), generator=generator)[: self._batch]]
        choices = [self._of_caption[int(caption)] for caption in chosen]
        rows = torch.stack([one[torch.randint(len(one), (), generator=generator)] for one in choices])
        pixels = _degraded(self._pool.pixels[rows], generator, device) * 2 - 1
        # The fused attention kernel's backward pass is slow on CPUs; written out, a step takes two thirds of the time.
        with sdpa_kernel([SDPBackend.MATH] if device.type == "cpu" else list(_GPU_ATTENTION)):
            images, texts, scale = self.clip(pixels, self._tokens[chosen].to(device))
        logits = scale.float() * images.float() @ texts.float().T
        target = torch.arange(self._batch, device=device)
        loss = (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2
        return loss, {"top1": (logits.argmax(1) == target).float().mean().detach()}

    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: ARG002  # the loop's protocol
        """Keep the temperature of the softmax from freezing, as CLIP does (arXiv 2103.00020, section 2.5)."""
        with torch.no_grad():
            self.clip.logit_scale.clamp_(0, _MOST_LOGIT_SCALE)

    @torch.inference_mode()
    def evaluate(self) -> dict[str, float]:
        """Caption retrieval among 100 held-out scenes, painted and reconstructed; mean cosines."""
        self.clip.eval()
        pixels, attributes = held_out_scenes(_RETRIEVAL)
        figures = self._retrieval(pixels, attributes, "scenes")
        if self._through is not None:
            figures |= self._retrieval(self._through(pixels), attributes, "reconstructions")
        return figures

    def _retrieval(self, pixels: Tensor, attributes: Sequence[Attributes], kind: str) -> dict[str, float]:
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
    """Write a folder open_clip loads with its `local-dir:` schema: configuration and float16 safetensors.

    Embedding rows of byte pairs that no caption uses are written as zeros: they were never trained, and without
    their noise the file packs to a third.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half().cpu().contiguous() for name, value in model.state_dict().items()}
    used = torch.zeros(len(state["token_embedding.weight"]), 1, dtype=torch.bool)
    used[_caption_tokens(ALL_ATTRIBUTES).unique()] = True
    state["token_embedding.weight"] = state["token_embedding.weight"] * used
    save_file(state, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(CLIP_CONFIG, indent=2) + "\n", encoding="utf-8")


def _caption_tokens(attributes: Sequence[Attributes]) -> Tensor:
    """Captions as open_clip's byte-pair tokens: int64 [n, context length]."""
    tokenizer = open_clip.SimpleTokenizer(context_length=CLIP_CONFIG["model_cfg"]["text_cfg"]["context_length"])
    tokens: Tensor = tokenizer([item.caption() for item in attributes])
    return tokens


def _rows_of_captions(attributes: Tensor) -> dict[int, Tensor]:
    """For each caption (its place in `ALL_ATTRIBUTES`) that has pictures, their rows in the pool."""
    number = caption_numbers(attributes)
    order = number.argsort(stable=True)
    captions, counts = number[order].unique_consecutive(return_counts=True)
    return dict(zip(captions.tolist(), order.split(counts.tolist()), strict=True))


def _degraded(pixels: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Degrade uint8 pictures [n, 3, h, w] to float in [0, 1] on the device, outside autocast."""
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        return degrade(pixels.float() / 255, generator).to(device)
