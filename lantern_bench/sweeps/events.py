"""Events of a sweep, which all go to one callback, how they are shown, and decoded images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from lantern_bench.config.plan import ImageTask, Plan
from lantern_bench.devices.without_torch import DISTURBED
from lantern_bench.utils.progress import Note, Progress, ProgressEvent

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.storage.pictures import png_bytes, tokens_sha256


class Started(NamedTuple):
    """The first event of decoding."""

    finished: int  # images that the run directory already has
    to_do: Mapping[str, int]  # number of images to decode, by cell id

    @classmethod
    def of(cls, plan: Plan, missing: Iterable[ImageTask]) -> Self:
        """Return the event of a plan of which the `missing` images are decoded."""
        to_do = by_cell(missing)
        return cls(len(plan.tasks) - to_do.total(), to_do)


def by_cell(tasks: Iterable[ImageTask]) -> Counter[str]:
    """Return the number of images by cell id."""
    return Counter(task.cell.cell_id for task in tasks)


class ImageDone(NamedTuple):
    """An image has its record, with status `ok` or `failed`."""

    task: ImageTask
    record: Mapping[str, Any]


Event: TypeAlias = Note | ProgressEvent | Started | ImageDone


def shown_by(progress: Progress, on_note: Callable[[Note], None]) -> Callable[[Event], None]:
    """Return a function that shows events: progress with running means, and notes."""
    images = done = 0
    figures: dict[str, list[float]] = {"mal": [], "s_per_image": []}

    def show(event: Event) -> None:
        nonlocal images, done
        match event:
            case Note():
                on_note(event)
            case ProgressEvent(label, share, total, values):
                progress.share(label, share, total, **values)
            case Started(finished, to_do):
                images = sum(to_do.values())
                if finished:
                    on_note(Note(f"{finished} images kept, {images} to do"))
                if images:
                    progress.share("images", 0, images)
            case ImageDone(task, record):
                done += 1
                if record["status"] != "ok":
                    on_note(Note(f"{task.image} failed: {record['error']}", level="warning"))
                else:
                    figures["s_per_image"].append(record["seconds"])
                    if task.cell.decoding.mode != "ar" and record["mean_accepted_length"]:
                        figures["mal"].append(record["mean_accepted_length"])
                means = {key: fmean(values) for key, values in figures.items() if values}
                progress.share("images", done, images, **means)

    return show


@dataclass(frozen=True)
class DecodedImage:
    """One decoded prompt."""

    prompt: str
    tokens: Tensor  # int32 [N] on the CPU
    trace: ImageTrace  # what every step committed and accepted, seconds, forwards
    # uint8 [H, W, 3]; None for a model without a tokenizer and for part of an image
    pixels: Tensor | None = None
    pixel_seconds: float = 0.0
    peak_memory: int | None = None  # bytes on the device
    logits: Tensor | None = None  # guided [N, V]; only where they were asked for

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed per step, bonus token included; None for an image of one token."""
        return self.trace.mean_accepted_length

    @property
    def seconds(self) -> float:
        """Seconds of decoding, without text encoding and pixels."""
        return self.trace.seconds

    @cached_property
    def picture(self) -> Image | None:
        """The picture in RGB; None without pixels."""
        from PIL import Image

        return None if self.pixels is None else Image.fromarray(self.pixels.cpu().numpy())

    def png(self) -> bytes:
        """Return the picture as a PNG file; raises `ValueError` without pixels."""
        if self.pixels is None:
            raise ValueError("an image without pixels has no picture")
        return png_bytes(self.pixels, self.tokens)

    def __repr__(self) -> str:
        return f"DecodedImage({self.prompt!r}: {len(self.tokens)} tokens, {self.seconds:.3g} s)"

    def _repr_png_(self) -> bytes | None:
        return None if self.picture is None else self.png()

    def lost_share(self, batch: int) -> float:
        """Return the fraction of the decoding time that the threads of its batch lacked a core.

        `batch` is the number of images that were decoded together.
        """
        import torch

        seconds = self.trace.seconds * batch
        if not self.trace.usage or not seconds:
            return 0.0
        return self.trace.usage.lost_seconds(seconds, torch.get_num_threads()) / seconds

    def columns(self, batch: int) -> dict[str, Any]:
        """Return the columns of its record that say how it was decoded, with `batch` images."""
        trace = self.trace
        phases = self.trace.phases
        measured = sum(phases.get(name, 0.0) for name in ("draft", "target", "verify", "prefill"))
        return self._usage_columns(batch) | {
            "tokens": trace.tokens,
            "target_forwards": trace.target_forwards,
            "drafter_forwards": trace.drafter_forwards,
            "start_per_step": trace.start,
            "committed_per_step": trace.committed,
            "accepted_per_step": trace.accepted,
            "offered_depth_per_step": trace.offered_depth,
            "child_rank_per_step": trace.child_rank,
            "mean_accepted_length": trace.mean_accepted_length,
            "mal_uncut": trace.mal_uncut,
            "step_compression": trace.step_compression,
            "seconds": trace.seconds,
            "draft_seconds": phases.get("draft", 0.0),
            "target_seconds": phases.get("target", 0.0) + phases.get("prefill", 0.0),
            "verify_seconds": phases.get("verify", 0.0),
            "other_seconds": max(0.0, trace.seconds - measured),
            "pixel_seconds": self.pixel_seconds,
            "peak_memory_bytes": self.peak_memory,
            "neighbour_mass": trace.neighbour_mass,
            "neighbour_mass_tried": trace.neighbour_mass_tried,
            "tokens_sha256": tokens_sha256(self.tokens),
        }

    def _usage_columns(self, batch: int) -> dict[str, Any]:
        """Return the columns of the processor's counters, per image; none without counters."""
        usage = self.trace.usage
        if usage is None:
            return {}
        waited = usage.waited_seconds
        steal = usage.steal_seconds
        return {
            "cpu_seconds": usage.cpu_seconds / batch,
            "waited_seconds": None if waited is None else waited / batch,
            "steal_seconds": None if steal is None else steal / batch,
            "involuntary_switches": usage.involuntary_switches,
            "disturbed": self.lost_share(batch) > DISTURBED,
        }
