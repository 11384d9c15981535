"""How good is good enough: the embedded family measured against the bars of its design, one row a bar.

Every function is given loaded models and returns bars; what a bar measures by sampling keeps its single observations,
so that an interval over prompts can be made of them where tables are made. Held-out captions, default guidance,
temperature 1, no filters. Nothing here trains, and nothing is timed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor

from lantern_bench.decode.interface import Scores
from lantern_bench.decode.loop import decode
from lantern_bench.decode.sampling import guide
from lantern_bench.decode.trace import ImageTrace
from lantern_bench.lanterns.captions import HELD_OUT, Attributes, attributes_of
from lantern_bench.lanterns.classifier import AttributeClassifier, prompt_accuracy
from lantern_bench.lanterns.recipe_metrics import held_out_scenes, reconstruct
from lantern_bench.lanterns.recipe_tokenizer import psnr_and_usage, tokenize
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.vq import VQModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.seeds import record_seed

__all__ = [
    "Bar",
    "Embedder",
    "Observations",
    "OnProgress",
    "Settings",
    "classifier_bars",
    "clip_bars",
    "drafter_bars",
    "target_bars",
    "tokenizer_bars",
    "unheard",
]

OnProgress = Callable[[str, float], None]
"""What is being measured, and the share that is done."""


def unheard(_what: str, _done: float) -> None:
    """Progress that nobody listens to."""


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
    for captions, tokens, _start, scores in _forced(model, tokenizer, settings):
        top = guide(scores.cond, scores.uncond, settings.cfg_scale).softmax(-1).topk(10, dim=-1).values
        nll = -scores.cond.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
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
    for captions, tokens, start, scores in _forced(model, tokenizer, settings):
        session = model.drafter.session(len(captions), start.uncond is not None, 1)
        session.prefill(model.condition(captions), start.features)
        p = guide(scores.cond, scores.uncond, settings.cfg_scale).softmax(-1)
        ones = torch.ones(len(captions), dtype=torch.int64, device=tokens.device)
        overlap = torch.zeros(len(captions), device=tokens.device)
        drafts = session.observe(tokens[:, :1], start.features[:, -1:], ones)
        for position in range(1, tokens.shape[1]):
            q = guide(drafts.cond, drafts.uncond, settings.cfg_scale).softmax(-1)[:, 0]
            overlap += torch.minimum(p[:, position], q).sum(-1)
            feature = scores.features[:, position - 1 : position]
            drafts = session.observe(tokens[:, position : position + 1], feature, ones)
        values += (overlap / (tokens.shape[1] - 1)).tolist()
        prompts += captions
    return _each(values, prompts)


@torch.inference_mode()
def _forced(
    model: LoadedModel, tokenizer: VQModel, settings: Settings
) -> Iterator[tuple[list[str], Tensor, Scores, Scores]]:
    """Batches of held-out sequences under teacher forcing.

    Yields captions, tokens int64 [B, N], the prefill's scores, and scores whose logits [B, N, V] predict the tokens
    and whose features [rows, N, width] are those of the tokens.
    """
    pixels, attributes = held_out_scenes(_TEACHER_FORCED, _ACCEPTANCE_SEED)
    device = model.target.device
    tokens = tokenize(tokenizer, pixels.permute(0, 2, 3, 1)).long().to(device)
    for first in range(0, _TEACHER_FORCED, _AT_ONCE):
        part = tokens[first : first + _AT_ONCE]
        captions = [item.caption() for item in attributes[first : first + _AT_ONCE]]
        batch, n = part.shape
        session = model.target.session(batch, settings.cfg_scale != 1.0, n)
        start = session.prefill(model.condition(captions))
        # A whole picture is a chain hanging on the prefix: one forward, as if every token had been drafted.
        chain = torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
        after = session.score(part, torch.arange(n, device=device).expand(batch, -1), chain)
        cond = torch.cat([start.cond, after.cond[:, :-1]], dim=1)
        uncond = None
        if start.uncond is not None and after.uncond is not None:
            uncond = torch.cat([start.uncond, after.uncond[:, :-1]], dim=1)
        yield captions, part, start, Scores(cond, uncond, after.features)
        settings.on_progress("teacher forcing", (first + batch) / _TEACHER_FORCED)
