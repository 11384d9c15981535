"""The plan of a run: the cell, prompt, seed and order of every image.

All cells of a prompt run one after the other, in a random order that depends on the seed. A machine
that slows down therefore slows all cells alike.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import TypeAlias

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import RefusedError, UserError

MOST_IMAGES = 1_000_000
"""The largest number of images of a run. Published tables have at most 50,000 a cell."""


def record_seed(run_seed: int, prompt_id: str, repeat: int, seed_set: int = 0) -> int:
    """Return the seed of an image.

    Args:
        run_seed: The seed of the run.
        prompt_id: The id of the prompt.
        repeat: Which repetition of the prompt the image is, from 0.
        seed_set: The set of seeds. All cells with one set of seeds share the seeds of images.

    Returns:
        A number of 63 bits.
    """
    suffix = f":{seed_set}" if seed_set else ""
    return _hash63(f"record:{run_seed}:{prompt_id}:{repeat}{suffix}")


def order_key(run_seed: int, prompt_id: str, repeat: int, cell_id: str) -> int:
    """Return a cell's sort key among the cells of a prompt.

    The order of two cells does not depend on the other cells of the run.

    Args:
        run_seed: The seed of the run.
        prompt_id: The id of the prompt.
        repeat: Which repetition of the prompt the image is, from 0.
        cell_id: The cell.
    """
    return _hash63(f"order:{run_seed}:{prompt_id}:{repeat}:{cell_id}")


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


ImageKey: TypeAlias = tuple[str, str, int]
"""Cell id, prompt id and repeat of an image."""


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image to decode."""

    cell: Cell
    prompt: Prompt
    repeat: int
    seed: int
    image_index: int  # number within the cell, from 0
    order_index: int  # number within the whole run, from 0

    @property
    def key(self) -> ImageKey:
        """The key that identifies the image in its run."""
        return self.cell.cell_id, self.prompt.id, self.repeat

    @property
    def image(self) -> str:
        """Path of the PNG file, relative to the run directory."""
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
    together: int = 1  # how many consecutive images of a cell are never split up

    def shard(self, shard: Shard) -> Plan:
        """Return the tasks of one shard, with all cells of a prompt, because these are compared."""
        wanted = shard.index - 1
        tasks = [task for task in self.tasks if self._group(task) % shard.count == wanted]
        return replace(self, tasks=tuple(tasks))

    def _group(self, task: ImageTask) -> int:
        """Return the number of the group of images that stay together, in all cells."""
        return task.image_index // self.together

    def deal(self, missing: Plan, count: int, seed: int) -> list[Plan]:
        """Deal the prompts of a part of this plan to several plans, in random order.

        Each prompt keeps all its cells. A batch stays whole even if some of its images are
        finished, so that the arithmetic is the same.

        Args:
            missing: The part that is dealt.
            count: The number of plans.
            seed: The seed of the random order.
        """
        groups = {self._group(task) for task in missing.tasks}
        order = sorted(groups, key=lambda group: _hash63(f"deal:{seed}:{group}"))
        plan_of = {group: number % count for number, group in enumerate(order)}
        dealt: list[list[ImageTask]] = [[] for _ in range(count)]
        for task in self.tasks:
            group = self._group(task)
            if group in plan_of:
                dealt[plan_of[group]].append(task)
        return [replace(self, tasks=tuple(tasks)) for tasks in dealt]

    def batches(self) -> Iterator[tuple[ImageTask, ...]]:
        """Yield the tasks that are decoded at once: images of a cell, up to its batch size."""
        for cell, tasks in groupby(self.tasks, key=lambda task: task.cell):
            while group := tuple(islice(tasks, cell.batch)):
                yield group


def parse_shard(text: str) -> Shard:
    """Parse `i/n` with i from 1 to n; raises `UserError` for any other text."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"--shard {text}: must be i/n with i from 1 to n", "For example: --shard 2/8"
        )
    return Shard(int(match[1]), int(match[2]))


def make_plan(experiment: ResolvedExperiment, prompts: Sequence[Prompt]) -> Plan:
    """Make the plan of an experiment over prompts, in their order.

    A text that occurs several times has several images, each with its own number of repeats, and
    so with its own seed.

    Raises `UserError` without a prompt, and `RefusedError` for too many images.
    """
    settings = experiment.settings
    if not prompts:
        raise UserError(
            f"prompts {settings.prompts}: contains no prompt",
            "Give a file with one prompt a line.",
        )
    images = settings.images or len(prompts)
    total = images * settings.repeats * len(experiment.cells)
    if total > MOST_IMAGES:
        raise RefusedError(
            f"the plan has {total:,} images, and a run at most {MOST_IMAGES:,}",
            "Give fewer --images, --repeats or cells; or several runs, of --prompts FILE#0-1000.",
        )

    # The prompt and the repeat of each image of a cell.
    passes = -(-images // len(prompts))
    times = Counter(prompts)
    earlier = _earlier(prompts)
    slots = []
    for index in range(images * settings.repeats):
        again, number = divmod(index, images)
        entry = number % len(prompts)
        prompt = prompts[entry]
        one_pass = again * passes + number // len(prompts)
        slots.append((prompt, one_pass * times[prompt] + earlier[entry]))

    # Images of one cell follow each other up to the largest batch. All cells see a prompt at about
    # the same time.
    tasks: list[ImageTask] = []
    cells = {cell.cell_id: cell for cell in experiment.cells}
    together = max(settings.batch)
    for start in range(0, len(slots), together):
        prompt, repeat = slots[start]
        for cell_id in sorted(cells, key=partial(order_key, settings.seed, prompt.id, repeat)):
            cell = cells[cell_id]
            for image_index in range(start, min(start + together, len(slots))):
                prompt, repeat = slots[image_index]
                seed = record_seed(
                    run_seed=settings.seed,
                    prompt_id=prompt.id,
                    repeat=repeat,
                    seed_set=cell.decoding.seed_set,
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


def _earlier(prompts: Sequence[Prompt]) -> list[int]:
    """Return how often the text of each prompt came before in the list."""
    seen = Counter[Prompt]()
    earlier = []
    for prompt in prompts:
        earlier.append(seen[prompt])
        seen[prompt] += 1
    return earlier
