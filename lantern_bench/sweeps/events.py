"""Events of a sweep. All events go to one callback, and `shown_by` makes one that shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple, Self, TypeAlias

from lantern_bench.config.plan import ImageTask, Plan
from lantern_bench.utils.progress import Note, Progress, ProgressEvent


class Started(NamedTuple):
    """The first event of decoding."""

    finished: int  # images that the run directory already has
    to_do: Mapping[str, int]  # number of images to decode, by cell id

    @classmethod
    def of(cls, plan: Plan, missing: Iterable[ImageTask]) -> Self:
        """Return the event for a plan whose `missing` images will be decoded."""
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
            case ProgressEvent(label, share, total, values, elapsed):
                progress.share(label, share, total, elapsed=elapsed, **values)
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
                # What came before the first image, such as compiling, says nothing on the others.
                progress.share(
                    "images", done, images, elapsed=record.get("seconds") or 0.0, **means
                )

    return show
