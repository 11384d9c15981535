"""The bundled models of a folder, measured against the quality gates of their design.

The CLIP model is an argument, so that a test can bring its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import (
    TeacherForced,
    drafter_logits_along,
    teacher_forced,
)
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.families.lanterns.description import (
    FILES,
    GUIDANCE,
    HELD_OUT,
    Attributes,
    attributes_of,
)
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.families.lanterns.modules import (
    AttributeClassifier,
    load_classifier,
    load_tokenizer,
    prompt_accuracy,
)
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.training.train_drafter import Observations
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events
from scripts.train_lanterns.part_tasks import held_out_scenes, psnr_and_usage, reconstruct, tokenize

_SCENES = 500
_TEACHER_FORCED = 64
_AT_ONCE = 8
_RETRIEVAL = 100
_ACCEPTANCE_SEED = 977_003

_USES: dict[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "features": ("features", "tokenizer"),
    "clip": ("clip",),
    "target": ("target", "drafter", "tokenizer", "features"),
    "drafter": ("drafter", "target", "tokenizer"),
}
"""The parts that the gates of a part need."""

Wanted = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class QualityGate:
    """One figure and its bounds."""

    part: str
    name: str
    value: float
    # Bounds such as (">=", 28.0), all of which must hold. Without any, the figure is only reported.
    wanted: Wanted = ()
    observations: Observations | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the figure itself, not its interval, is within the bounds; None without any."""
        if not self.wanted:
            return None
        sides = {">=": operator.ge, "<=": operator.le}
        return all(sides[side](self.value, bound) for side, bound in self.wanted)


class Embedder(Protocol):
    """A CLIP model: normalised embeddings of pictures and captions."""

    def images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Embeddings [n, width]."""
        ...

    def captions(self, captions: Sequence[str]) -> Tensor:
        """Embeddings [n, width]."""
        ...


def check_weights(parts: Sequence[str], folder: Path) -> None:
    """Raise `RefusedError` if the folder lacks files that the gates of these parts need."""
    needed: list[str] = []
    for part in parts:
        needed += _USES[part]
    missing = [part for part in dict.fromkeys(needed) if not (folder / FILES[part]).is_file()]
    if missing:
        files = ", ".join(FILES[part] for part in missing)
        raise RefusedError(
            f"--evaluate: the folder of weights has no {files}",
            f"First: python -m scripts.train_lanterns --part {' --part '.join(missing)}",
        )


@dataclass
class Evaluation:
    """Measures the models of a folder at temperature 1 and the default guidance.

    A model is loaded when a gate needs it.
    """

    folder: Path
    clip: Embedder | None
    device: torch.device
    images: int = 500  # autoregressive samples; the drafter is measured over at most 100 prompts
    seed: int = 0
    batch: int = 32  # images decoded at once
    emit: Emit = ignore_events

    def measure(self, parts: Sequence[str]) -> Iterator[QualityGate]:
        """Yield the gates of these parts, one after the other."""
        for part in parts:
            yield from getattr(self, f"_{part}")()

    def _tokenizer(self) -> Iterator[QualityGate]:
        """Measure reconstruction and use of the codes on 500 held-out scenes."""
        pixels, _ = held_out_scenes(_SCENES)
        figures = psnr_and_usage(self.tokenizer, pixels.permute(0, 2, 3, 1))
        yield QualityGate(
            part="tokenizer",
            name="PSNR on held-out scenes, dB",
            value=figures["psnr_db"],
            wanted=((">=", 28.0),),
        )
        yield QualityGate(
            part="tokenizer",
            name="fraction of codes used",
            value=figures["codes_used"],
            wanted=((">=", 0.95),),
        )

    def _features(self) -> Iterator[QualityGate]:
        """Measure how often all five attributes of 500 held-out scenes are right."""
        pixels, attributes = held_out_scenes(_SCENES)
        yield self._accuracy(
            part="features",
            name="all attributes right, scenes",
            pictures=pixels,
            attributes=attributes,
            wanted=0.97,
        )
        pixels = reconstruct(self.tokenizer, pixels)
        yield self._accuracy(
            part="features",
            name="all attributes right, reconstructions",
            pictures=pixels,
            attributes=attributes,
            wanted=0.93,
        )

    def _clip(self) -> Iterator[QualityGate]:
        """Measure top-1 caption retrieval among 100 held-out scenes of different captions."""
        if self.clip is None:
            return
        pixels, attributes = held_out_scenes(_RETRIEVAL)
        captions = [item.caption() for item in attributes]
        of_pictures = self.clip.embed_pictures(pixels)
        of_captions = self.clip.embed_captions(captions)
        nearest = (of_pictures @ of_captions.T).argmax(1)
        right = (nearest == torch.arange(len(captions))).float().tolist()
        yield _observed(
            part="clip",
            name="caption retrieval among 100, top-1",
            observations=_each(right, captions),
            wanted=((">=", 0.70),),
        )

    @torch.inference_mode()
    def _target(self) -> list[QualityGate]:
        """Measure prompt accuracy of samples, and how certain the target is.

        The certainty is the probability of the likeliest and of the ten likeliest codes with
        guidance, and the NLL of held-out sequences without guidance.
        """
        prompts = _prompts(self.images)
        pictures, _ = self._sampled(prompts, _decoding("ar"), "sampling")
        attributes = [item for item in attributes_of(prompts) if item is not None]
        gates = [
            self._accuracy(
                part="target",
                name="prompt accuracy of AR samples",
                pictures=pictures,
                attributes=attributes,
                wanted=0.80,
            )
        ]
        top1 = list[float]()
        top10 = list[float]()
        nll = list[float]()
        captions = list[str]()
        for part, forced in self._forced():
            scores = forced.logits
            top = guide(scores.cond, scores.uncond, GUIDANCE).softmax(-1).topk(10, dim=-1).values
            log_p = scores.cond.float().log_softmax(-1).gather(-1, forced.tokens[..., None])[..., 0]
            top1 += top[..., 0].mean(1).tolist()
            top10 += top.sum(-1).mean(1).tolist()
            nll += (-log_p).mean(1).tolist()
            captions += part
        bounds1 = ((">=", 0.03), ("<=", 0.12))
        bounds10 = ((">=", 0.20), ("<=", 0.45))
        gates.append(
            _observed(
                part="target",
                name="mean top-1 probability",
                observations=_each(top1, captions),
                wanted=bounds1,
            )
        )
        gates.append(
            _observed(
                part="target",
                name="mean top-10 probability",
                observations=_each(top10, captions),
                wanted=bounds10,
            )
        )
        gates.append(_observed("target", "held-out NLL, nats per token", _each(nll, captions)))
        return gates

    def _drafter(self) -> Iterator[QualityGate]:
        """Measure accepted lengths of static and dynamic drafting, and 1 - TV at depth 1."""
        prompts = _prompts(min(self.images, 100))
        lengths = {}
        for drafting, tree in (("static", "eagle1-25"), ("dynamic", None)):
            decoding = _decoding("speculative", drafting=drafting, tree=tree)
            _, traces = self._sampled(prompts, decoding, f"{drafting} drafting")
            committed = [float(sum(trace.committed)) for trace in traces]
            steps = [float(len(trace.committed)) for trace in traces]
            lengths[drafting] = Observations(committed, steps, prompts)
        # Both commit the same tokens, so the ratio of accepted lengths is the ratio of steps,
        # prompt by prompt.
        ratio = Observations(lengths["static"].denominator, lengths["dynamic"].denominator, prompts)
        yield _observed(
            part="drafter",
            name="lossless MAL, eagle1-25",
            observations=lengths["static"],
            wanted=((">=", 2.8),),
        )
        yield _observed("drafter", "lossless MAL, dynamic", lengths["dynamic"])
        # Dynamic drafting is published at half of static's accepted length; this gate asks for a
        # fifth less.
        yield _observed(
            part="drafter",
            name="MAL of dynamic over static",
            observations=ratio,
            wanted=(("<=", 0.8),),
        )
        yield _observed("drafter", "1 - TV at depth 1", self._overlap())

    @torch.inference_mode()
    def _overlap(self) -> Observations:
        """Measure the mean of 1 - TV(p, q) over the positions of each held-out sequence.

        The drafter sees the true features.
        """
        if self.model.drafter is None:
            raise ValueError(f"{self.model.name} has no drafter")
        values = []
        prompts = list[str]()
        for captions, forced in self._forced():
            p = guide(forced.logits.cond, forced.logits.uncond, GUIDANCE).softmax(-1)
            drafts = drafter_logits_along(self.model.drafter, forced)
            q = guide(drafts.cond, drafts.uncond, GUIDANCE).softmax(-1)
            values += torch.minimum(p[:, 1:], q).sum(-1).mean(-1).tolist()
            prompts += captions
        return _each(values, prompts)

    @torch.inference_mode()
    def _forced(self) -> Iterator[tuple[list[str], TeacherForced]]:
        """Yield captions and target of batches of held-out sequences under teacher forcing."""
        pixels, attributes = held_out_scenes(_TEACHER_FORCED, _ACCEPTANCE_SEED)
        tokens = tokenize(self.tokenizer, pixels.permute(0, 2, 3, 1)).long().to(self.device)
        for first in range(0, _TEACHER_FORCED, _AT_ONCE):
            part = tokens[first : first + _AT_ONCE]
            captions = [item.caption() for item in attributes[first : first + _AT_ONCE]]
            condition = self.model.condition(captions)
            yield captions, teacher_forced(self.model.target, condition, part, guided=True)
            self.emit(ProgressEvent("teacher forcing", (first + len(part)) / _TEACHER_FORCED))

    def _sampled(
        self, prompts: Sequence[str], decoding: Decoding, what: str
    ) -> tuple[Tensor, list[ImageTrace]]:
        """Return pictures uint8 [n, 3, h, w] and traces of one image for each prompt."""
        model = self.model
        pictures = list[Tensor]()
        traces = list[ImageTrace]()
        for start in range(0, len(prompts), self.batch):
            batch = prompts[start : start + self.batch]
            generators = []
            for number, prompt in enumerate(batch, start):
                seed = record_seed(self.seed, prompt, number // len(HELD_OUT))
                generators.append(torch.Generator(model.target.device).manual_seed(seed))
            decoded = decode(
                model=model,
                condition=model.condition(batch),
                decoding=decoding,
                generators=generators,
            )
            tokens = torch.stack([image.tokens for image in decoded])
            pictures.append(model.draw(tokens).permute(0, 3, 1, 2))
            traces.extend(image.trace for image in decoded)
            self.emit(ProgressEvent(what, (start + len(batch)) / len(prompts)))
        return torch.cat(pictures).contiguous(), traces

    def _accuracy(
        self,
        *,
        part: str,
        name: str,
        pictures: Tensor,
        attributes: Sequence[Attributes],
        wanted: float,
    ) -> QualityGate:
        right = prompt_accuracy(self.classifier, pictures, attributes).float().tolist()
        return _observed(
            part=part,
            name=name,
            observations=_each(right, [item.caption() for item in attributes]),
            wanted=((">=", wanted),),
        )

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
        return Lanterns(self.folder).load(self.device, torch.float32)


def _decoding(mode: str, **values: Any) -> Decoding:
    return Decoding(mode=mode, cfg_scale=GUIDANCE, cfg_default=GUIDANCE, **values)


def _observed(part: str, name: str, observations: Observations, wanted: Wanted = ()) -> QualityGate:
    return QualityGate(
        part=part, name=name, value=observations.value, wanted=wanted, observations=observations
    )


def _each(values: Sequence[float], prompts: Sequence[str]) -> Observations:
    return Observations(list(values), [1.0] * len(values), list(prompts))


def _prompts(images: int) -> list[str]:
    """Return held-out captions, repeated in order."""
    return [HELD_OUT[number % len(HELD_OUT)].caption() for number in range(images)]
