"""The embedded family in a folder, loaded and measured against its bars, part by part.

Which bars there are is in `bars`. The CLIP model comes from above, since instruments are not for families to know.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import Forced, drafts_along, teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.errors import RefusedError
from lantern_bench.models.eagle import fresh_drafter
from lantern_bench.models.lanterns import FILES
from lantern_bench.models.lanterns.captions import HELD_OUT, Attributes, attributes_of
from lantern_bench.models.lanterns.classifier import AttributeClassifier, load_classifier, prompt_accuracy
from lantern_bench.models.lanterns.family import LanternsFamily
from lantern_bench.models.lanterns.model import build_target, caption_condition, fill, load_tokenizer, part_hash
from lantern_bench.models.loaded_model import LoadedModel, VQPixels
from lantern_bench.models.vq import VQModel
from lantern_bench.training.lanterns.scorers import held_out_scenes, reconstruct
from lantern_bench.training.lanterns.tasks import psnr_and_usage, tokenize

# ---- How good is good enough: the embedded family measured against the bars of its design, one row a bar


_SCENES = 500
_RETRIEVAL = 100
_TEACHER_FORCED = 64
_AT_ONCE = 8
_ACCEPTANCE_SEED = 977_003
_SIDES = {">=": operator.ge, "<=": operator.le}
# Dynamic drafting is published at half of static's accepted length; "clearly behind" is taken as a fifth.
_CLEARLY_BEHIND = 0.8


class Observations(NamedTuple):
    """What an interval is made of: a numerator, a denominator and the prompt of each observation."""

    over: list[float]
    under: list[float]
    prompts: list[str]

    @property
    def value(self) -> float:
        """Sum over sum."""
        return sum(self.over) / sum(self.under)


@dataclass(frozen=True)
class Bar:
    """One figure and what is wanted of it: pairs such as (">=", 28.0), all of which must hold; none, only reported."""

    part: str
    name: str
    value: float
    wanted: tuple[tuple[str, float], ...] = ()
    observations: Observations | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the figure itself (not its interval) is as wanted; None where nothing is wanted."""
        return all(_SIDES[side](self.value, bound) for side, bound in self.wanted) if self.wanted else None


@dataclass(frozen=True)
class Settings:
    """How the sampled bars are measured: guidance, seed, images decoded at once, and who hears of progress."""

    cfg_scale: float
    seed: int = 0
    batch: int = 32
    on_progress: OnProgress = unheard

    def decoding(self, mode: str, **values: Any) -> Decoding:
        """A mode at temperature 1 without filters, at this guidance."""
        return Decoding(mode=mode, cfg_scale=self.cfg_scale, cfg_default=self.cfg_scale, **values)


class Embedder(Protocol):
    """A CLIP model: normalised embeddings of pictures and captions."""

    def images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Embeddings [n, width]."""
        ...

    def captions(self, captions: Sequence[str]) -> Tensor:
        """Embeddings [n, width]."""
        ...


def tokenizer_bars(tokenizer: VQModel) -> list[Bar]:
    """Reconstruction and use of the codes on 500 held-out scenes."""
    pixels, _ = held_out_scenes(_SCENES)
    figures = psnr_and_usage(tokenizer, pixels.permute(0, 2, 3, 1))
    return [
        Bar("tokenizer", "PSNR on held-out scenes, dB", figures["psnr_db"], ((">=", 28.0),)),
        Bar("tokenizer", "share of codes used", figures["codes_used"], ((">=", 0.95),)),
    ]


def classifier_bars(classifier: AttributeClassifier, tokenizer: VQModel) -> list[Bar]:
    """All five attributes right on 500 held-out scenes, painted and as the tokenizer gives them back."""
    pixels, attributes = held_out_scenes(_SCENES)
    kinds = ((pixels, "scenes", 0.97), (reconstruct(tokenizer, pixels), "reconstructions", 0.93))
    return [
        _accuracy(f"all attributes right, {kind}", "features", classifier, pictures, attributes, wanted)
        for pictures, kind, wanted in kinds
    ]


def clip_bars(clip: Embedder) -> list[Bar]:
    """Caption retrieval among 100 held-out scenes of different captions: top-1."""
    pixels, attributes = held_out_scenes(_RETRIEVAL)
    captions = [item.caption() for item in attributes]
    pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels]
    nearest = (clip.images(pictures) @ clip.captions(captions).T).argmax(1)
    right = (nearest == torch.arange(len(captions))).float().tolist()
    return [_observed("clip", "caption retrieval among 100, top-1", _each(right, captions), ((">=", 0.70),))]


def target_bars(
    model: LoadedModel, tokenizer: VQModel, classifier: AttributeClassifier, images: int, settings: Settings
) -> list[Bar]:
    """Prompt accuracy of `images` autoregressive samples, and how sure the target is of held-out sequences."""
    prompts = _prompts(images)
    pictures, _ = _sampled(model, prompts, settings.decoding("ar"), settings, "sampling")
    attributes = [item for item in attributes_of(prompts) if item is not None]
    accuracy = _accuracy("prompt accuracy of AR samples", "target", classifier, pictures, attributes, 0.80)
    return [accuracy, *_teacher_forced(model, tokenizer, settings)]


def drafter_bars(model: LoadedModel, tokenizer: VQModel, images: int, settings: Settings) -> list[Bar]:
    """Lossless accepted lengths of static and dynamic drafting over `images` prompts, and 1 - TV at depth 1."""
    prompts = _prompts(images)
    steps = {}
    for drafting, values in (("static", {"tree": "eagle1-25"}), ("dynamic", {})):
        decoding = settings.decoding("speculative", drafting=drafting, **values)
        _, traces = _sampled(model, prompts, decoding, settings, f"{drafting} drafting")
        steps[drafting] = [(float(sum(trace.committed)), float(len(trace.committed))) for trace in traces]
    lengths = {
        drafting: Observations([over for over, _ in rows], [under for _, under in rows], prompts)
        for drafting, rows in steps.items()
    }
    # Both commit the same tokens, so the ratio of their accepted lengths is that of their steps, prompt by prompt.
    behind = Observations(lengths["static"].under, lengths["dynamic"].under, prompts)
    return [
        _observed("drafter", "lossless MAL, eagle1-25", lengths["static"], ((">=", 2.8),)),
        _observed("drafter", "lossless MAL, dynamic", lengths["dynamic"]),
        _observed("drafter", "MAL of dynamic over static", behind, (("<=", _CLEARLY_BEHIND),)),
        _observed("drafter", "1 - TV at depth 1", _overlap(model, tokenizer, settings)),
    ]


def _accuracy(
    name: str,
    part: str,
    classifier: AttributeClassifier,
    pictures: Tensor,
    attributes: Sequence[Attributes],
    wanted: float,
) -> Bar:
    right = prompt_accuracy(classifier, pictures, attributes).float().tolist()
    return _observed(part, name, _each(right, [item.caption() for item in attributes]), ((">=", wanted),))


def _observed(part: str, name: str, observations: Observations, wanted: tuple[tuple[str, float], ...] = ()) -> Bar:
    return Bar(part, name, observations.value, wanted, observations)


def _each(values: Sequence[float], prompts: Sequence[str]) -> Observations:
    return Observations(list(values), [1.0] * len(values), list(prompts))


def _prompts(images: int) -> list[str]:
    """Held-out captions, taken in turn."""
    return [HELD_OUT[number % len(HELD_OUT)].caption() for number in range(images)]


def _sampled(
    model: LoadedModel, prompts: Sequence[str], decoding: Decoding, settings: Settings, what: str
) -> tuple[Tensor, list[ImageTrace]]:
    """Pictures uint8 [n, 3, h, w] and traces of one image for each prompt."""
    pictures, traces = list[Tensor](), list[ImageTrace]()
    for start in range(0, len(prompts), settings.batch):
        batch = prompts[start : start + settings.batch]
        generators = []
        for number, prompt in enumerate(batch, start):
            generator = torch.Generator(model.target.device)
            generators.append(generator.manual_seed(record_seed(settings.seed, prompt, number // len(HELD_OUT))))
        decoded = decode(model, model.condition(batch), decoding, generators)
        pictures.append(model.pixels.pixels(torch.stack([image.tokens for image in decoded])).permute(0, 3, 1, 2))
        traces.extend(image.trace for image in decoded)
        settings.on_progress(what, (start + len(batch)) / len(prompts))
    return torch.cat(pictures).contiguous(), traces


@torch.inference_mode()
def _teacher_forced(model: LoadedModel, tokenizer: VQModel, settings: Settings) -> list[Bar]:
    """Probability of the likeliest and the ten likeliest codes with guidance, and NLL without it."""
    figures: dict[str, list[float]] = {"top1": [], "top10": [], "nll": []}
    prompts: list[str] = []
    for captions, forced in _forced(model, tokenizer, settings):
        scores = forced.scores
        top = guide(scores.cond, scores.uncond, settings.cfg_scale).softmax(-1).topk(10, dim=-1).values
        nll = -scores.cond.float().log_softmax(-1).gather(-1, forced.tokens[..., None])[..., 0]
        figures["top1"] += top[..., 0].mean(1).tolist()
        figures["top10"] += top.sum(-1).mean(1).tolist()
        figures["nll"] += nll.mean(1).tolist()
        prompts += captions
    observed = {name: _each(values, prompts) for name, values in figures.items()}
    return [
        _observed("target", "mean top-1 probability", observed["top1"], ((">=", 0.03), ("<=", 0.12))),
        _observed("target", "mean top-10 probability", observed["top10"], ((">=", 0.20), ("<=", 0.45))),
        _observed("target", "held-out NLL, nats a token", observed["nll"]),
    ]


@torch.inference_mode()
def _overlap(model: LoadedModel, tokenizer: VQModel, settings: Settings) -> Observations:
    """1 - TV(p, q) at each position of held-out sequences, the drafter fed the true features; a mean an image."""
    if model.drafter is None:
        raise ValueError(f"{model.name} has no drafter")
    values, prompts = [], list[str]()
    for captions, forced in _forced(model, tokenizer, settings):
        p = guide(forced.scores.cond, forced.scores.uncond, settings.cfg_scale).softmax(-1)
        overlap = torch.zeros(len(captions), device=p.device)
        for position, drafts in enumerate(drafts_along(model.drafter, forced), start=1):
            q = guide(drafts.cond, drafts.uncond, settings.cfg_scale).softmax(-1)[:, 0]
            overlap += torch.minimum(p[:, position], q).sum(-1)
        values += (overlap / (forced.tokens.shape[1] - 1)).tolist()
        prompts += captions
    return _each(values, prompts)


@torch.inference_mode()
def _forced(model: LoadedModel, tokenizer: VQModel, settings: Settings) -> Iterator[tuple[list[str], Forced]]:
    """Captions and target of batches of held-out sequences under teacher forcing."""
    pixels, attributes = held_out_scenes(_TEACHER_FORCED, _ACCEPTANCE_SEED)
    tokens = tokenize(tokenizer, pixels.permute(0, 2, 3, 1)).long().to(model.target.device)
    for first in range(0, _TEACHER_FORCED, _AT_ONCE):
        part = tokens[first : first + _AT_ONCE]
        captions = [item.caption() for item in attributes[first : first + _AT_ONCE]]
        yield captions, teacher_forced(model.target, model.condition(captions), part, settings.cfg_scale != 1.0)
        settings.on_progress("teacher forcing", (first + len(part)) / _TEACHER_FORCED)


# ----

# What the bars of a part are measured with.
_USES: dict[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "features": ("features", "tokenizer"),
    "clip": ("clip",),
    "target": ("target", "drafter", "tokenizer", "features"),
    "drafter": ("drafter", "target", "tokenizer"),
}
_DRAFTER_PROMPTS = 100

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def check_weights(parts: Sequence[str], folder: Path) -> None:
    """Raise `RefusedError` naming what the bars of these parts need and the folder lacks."""
    needed = dict.fromkeys(part for named in parts for part in _USES[named])
    missing = [part for part in needed if not (folder / FILES[part]).is_file()]
    if missing:
        raise RefusedError(
            f"--evaluate: the folder of weights has no {', '.join(FILES[part] for part in missing)}",
            f"First: lantern-bench train lanterns --part {' --part '.join(missing)}",
        )


@dataclass
class Evaluation:
    """The models of `folder`, loaded when a bar needs them.

    `images` are the autoregressive samples; the drafter is measured over 100 prompts, or fewer where `images` are.
    """

    folder: Path
    clip: Embedder | None
    device: torch.device
    images: int = 500
    seed: int = 0
    batch: int = 32
    on_progress: OnProgress = unheard

    def measure(self, parts: Sequence[str]) -> Iterator[Bar]:
        """Yield the bars of these parts, one after the other."""
        for part in parts:
            yield from getattr(self, f"_{part}")()

    def _tokenizer(self) -> list[Bar]:
        return tokenizer_bars(self.tokenizer)

    def _features(self) -> list[Bar]:
        return classifier_bars(self.classifier, self.tokenizer)

    def _clip(self) -> list[Bar]:
        return clip_bars(self.clip) if self.clip is not None else []

    def _target(self) -> list[Bar]:
        return target_bars(self.model, self.tokenizer, self.classifier, self.images, self._settings)

    def _drafter(self) -> list[Bar]:
        return drafter_bars(self.model, self.tokenizer, min(self.images, _DRAFTER_PROMPTS), self._settings)

    @cached_property
    def _settings(self) -> Settings:
        scale = float(LanternsFamily().cards()[0].defaults["cfg_scale"])
        return Settings(scale, self.seed, self.batch, self.on_progress)

    @cached_property
    def tokenizer(self) -> VQModel:
        """The tokenizer in the folder."""
        return load_tokenizer(self.folder, self.device)

    @cached_property
    def classifier(self) -> AttributeClassifier:
        """The attribute classifier in the folder."""
        return load_classifier(self.folder / FILES["features"], self.device)

    @cached_property
    def model(self) -> LoadedModel:
        """Target, drafter and tokenizer in the folder, in float32."""
        target = self._filled(build_target(), "target")
        drafter = self._filled(fresh_drafter(target), "drafter")
        return LoadedModel(
            name=LanternsFamily().cards()[0].name,
            target=target,
            drafter=drafter,
            pixels=VQPixels(self.tokenizer, target.config.grid),
            codebook=self.tokenizer.codebook(),
            neighbour_space="normalised",
            condition=caption_condition,
            weights={part: part_hash(self.folder / FILES[part]) for part in ("target", "drafter", "tokenizer")},
            grid=target.config.grid,
        )

    def _filled(self, module: AnyModule, part: str) -> AnyModule:
        fill(module, self.folder / FILES[part])
        return module.to(self.device).eval().requires_grad_(False)
