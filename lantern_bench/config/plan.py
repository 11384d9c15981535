"""The plan: which image is made in which cell, from which prompt and seed, and in which order.

For each prompt all cells run in a seeded random order, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import TypeAlias

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import RefusedError, UserError

MOST_IMAGES = 1_000_000
"""Of one run: the largest that is tested; published tables have 50,000 at most for a cell."""


def record_seed(run_seed: int, prompt_id: str, repeat: int, seed_set: int = 0) -> int:
    """Return the 63-bit seed of an image, the same for all cells with this set of seeds."""
    return _hash63(f"record:{run_seed}:{prompt_id}:{repeat}" + (f":{seed_set}" if seed_set else ""))


def order_key(run_seed: int, prompt_id: str, repeat: int, cell_id: str) -> int:
    """Return a cell's sort key among the cells of a prompt; the order of two does not depend on the others."""
    return _hash63(f"order:{run_seed}:{prompt_id}:{repeat}:{cell_id}")


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


ImageKey: TypeAlias = tuple[str, str, int]  # cell id, prompt id and repeat of an image


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image to decode."""

    cell: Cell
    prompt: Prompt
    repeat: int
    seed: int
    image_index: int  # counts within the cell, from 0
    order_index: int  # counts within the whole run, from 0

    @property
    def key(self) -> ImageKey:
        """What tells the image from the others of its run."""
        return self.cell.cell_id, self.prompt.id, self.repeat

    @property
    def image(self) -> str:
        """The PNG file's path relative to the run directory."""
        return f"images/{self.cell.cell_id}/{self.image_index:06d}.png"


@dataclass(frozen=True)
class Shard:
    """One part of a run that is split over several jobs."""

    index: int  # from 1
    count: int


@dataclass(frozen=True)
class Plan:
    """The images of a run."""

    cells: tuple[Cell, ...]
    tasks: tuple[ImageTask, ...]  # in order of execution
    together: int = 1  # so many consecutive images belong to one cell

    def shard(self, shard: Shard) -> Plan:
        """Return the tasks of one shard; all cells of a prompt stay in one shard, because they are compared."""
        mine = (
            task
            for task in self.tasks
            if (task.image_index // self.together) % shard.count == shard.index - 1
        )
        return replace(self, tasks=tuple(mine))

    def deal(self, missing: Plan, count: int, seed: int) -> list[Plan]:
        """Deal `missing`, a part of this plan, to `count` plans: prompts in random order, with all their cells."""
        groups = {task.image_index // self.together for task in missing.tasks}
        order = sorted(groups, key=lambda group: _hash63(f"deal:{seed}:{group}"))
        share_of = {group: number % count for number, group in enumerate(order)}
        shares: list[list[ImageTask]] = [[] for _ in range(count)]
        for task in self.tasks:  # whole batches, so that the arithmetic is the same
            if (group := task.image_index // self.together) in share_of:
                shares[share_of[group]].append(task)
        return [replace(self, tasks=tuple(share)) for share in shares]

    def batches(self) -> Iterator[tuple[ImageTask, ...]]:
        """Yield the tasks that are decoded at once: images of a cell, up to its batch size."""
        for cell, tasks in groupby(self.tasks, key=lambda task: task.cell):
            while group := tuple(islice(tasks, cell.batch)):
                yield group


def parse_shard(text: str) -> Shard:
    """Read `i/n`, i from 1 to n; raises `UserError` otherwise."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"--shard {text}: must be i/n with i from 1 to n", "For example: --shard 2/8"
        )
    return Shard(int(match[1]), int(match[2]))


def make_plan(experiment: ResolvedExperiment, prompts: Sequence[Prompt]) -> Plan:
    """Make the plan of an experiment over prompts, in their order; a repeated prompt counts once."""
    settings = experiment.settings
    unique = list(dict.fromkeys(prompts))
    if not unique:
        raise UserError(
            f"prompts {settings.prompts}: holds no prompt", "Give a file with one prompt a line."
        )
    images = settings.images or len(unique)
    passes = -(-images // len(unique))  # over the prompts
    total = images * settings.repeats * len(experiment.cells)
    if total > MOST_IMAGES:
        text = f"the plan has {total:,} images, and a run at most {MOST_IMAGES:,}"
        raise RefusedError(
            text,
            "Give fewer --images, --repeats or cells; or several runs, of --prompts FILE#0-1000.",
        )
    slots = [
        (unique[index % len(unique)], again * passes + index // len(unique))
        for again in range(settings.repeats)
        for index in range(images)
    ]
    seed_sets = {cell.cell_id: cell.decoding.seed_set for cell in experiment.cells}
    tasks: list[ImageTask] = []
    # The largest batch decides how many images of one cell follow each other: all cells see a prompt at about one time.
    together = max(settings.batch)
    for start in range(0, len(slots), together):
        prompt, repeat = slots[start]
        order = [
            (
                order_key(
                    run_seed=settings.seed, prompt_id=prompt.id, repeat=repeat, cell_id=cell.cell_id
                ),
                cell,
            )
            for cell in experiment.cells
        ]
        for _, cell in sorted(order, key=itemgetter(0)):
            for image_index in range(start, min(start + together, len(slots))):
                prompt, repeat = slots[image_index]
                seed = record_seed(
                    run_seed=settings.seed,
                    prompt_id=prompt.id,
                    repeat=repeat,
                    seed_set=seed_sets[cell.cell_id],
                )
                tasks.append(
                    ImageTask(
                        cell=cell,
                        prompt=prompt,
                        repeat=repeat,
                        seed=seed,
                        image_index=image_index,
                        order_index=len(tasks),
                    )
                )
    return Plan(experiment.cells, tuple(tasks), together)
