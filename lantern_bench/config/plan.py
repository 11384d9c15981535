"""The plan: which image is made in which cell, from which prompt and seed, and in which order.

Cells are interleaved: for each prompt all cells run in a seeded random order, so that a machine that slows down slows
all of them (docs/results-format.md). A plan is pure data, the same on every machine. `runs/store.py` knows which of its
images exist, and earlier seconds per image give an estimate of its time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.errors import UserError


def record_seed(run_seed: int, prompt_id: str, repeat: int, seed_set: int = 0) -> int:
    """Return the 63-bit generator seed of one image, the same for all cells with this set of seeds."""
    return _hash63(f"record:{run_seed}:{prompt_id}:{repeat}" + (f":{seed_set}" if seed_set else ""))


def order_key(run_seed: int, prompt_id: str, repeat: int, cell_id: str) -> int:
    """Return a cell's sort key among the cells of one prompt: sorting by it is a seeded random order.

    It needs no generator, so the order of two cells does not depend on which others run beside them.
    """
    return _hash63(f"order:{run_seed}:{prompt_id}:{repeat}:{cell_id}")


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Prompt:
    """A prompt; its id depends on its text alone, so that lists may be reordered and extended.

    `source` is what its set calls it (`coco:391895`) and makes no prompt another one.
    """

    text: str
    source: str = field(default="", compare=False)

    @cached_property
    def id(self) -> str:
        """12 hex digits of a hash of the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Unit:
    """One image to make. `image_index` counts within the cell, `order_index` within the whole run, both from 0."""

    cell: Cell
    prompt: Prompt
    repeat: int
    seed: int
    image_index: int
    order_index: int

    @property
    def image(self) -> str:
        """The PNG file's path relative to the run directory."""
        return f"images/{self.cell.cell_id}/{self.image_index:06d}.png"


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int


@dataclass(frozen=True)
class Estimate:
    """The remaining work: images, and seconds if every cell's seconds per image are known (else None)."""

    images: int
    done: int
    seconds: float | None
    unknown: tuple[str, ...] = ()

    @property
    def to_do(self) -> int:
        """Images still to make."""
        return self.images - self.done


@dataclass(frozen=True)
class Plan:
    """Cells, and the images in order of execution; `together` consecutive images belong to one cell."""

    cells: tuple[Cell, ...]
    units: tuple[Unit, ...]
    together: int = 1

    def shard(self, shard: Shard) -> Plan:
        """Return the units of one shard; all cells of a prompt stay in one shard, because they are compared."""
        mine = (unit for unit in self.units if (unit.image_index // self.together) % shard.count == shard.index - 1)
        return replace(self, units=tuple(mine))

    def deal(self, left: Plan, count: int, seed: int) -> list[Plan]:
        """Deal the units of `left`, a part of this plan, to `count` plans: prompts in random order, in equal shares.

        All cells of a prompt stay together.
        """
        groups = {unit.image_index // self.together for unit in left.units}
        order = sorted(groups, key=lambda group: _hash63(f"deal:{seed}:{group}"))
        place = {group: number % count for number, group in enumerate(order)}
        parts: list[list[Unit]] = [[] for _ in range(count)]
        for unit in self.units:  # whole batches, so that the arithmetic is the same
            if (group := unit.image_index // self.together) in place:
                parts[place[group]].append(unit)
        return [replace(self, units=tuple(part)) for part in parts]

    def batches(self) -> Iterator[tuple[Unit, ...]]:
        """Yield the units that are decoded at once: as many images of a cell as its batch size, or the rest."""
        group: list[Unit] = []
        for unit in self.units:
            if group and (unit.cell != group[0].cell or len(group) == unit.cell.batch):
                yield tuple(group)
                group = []
            group.append(unit)
        if group:
            yield tuple(group)

    def estimate(
        self, seconds_per_image: Mapping[str, float] | None = None, done: Collection[tuple[str, str, int]] = ()
    ) -> Estimate:
        """Estimate the remaining work from seconds per image by cell id; `done` holds (cell id, prompt id, repeat)."""
        known = seconds_per_image or {}
        finished = set(done)
        left = [u for u in self.units if (u.cell.cell_id, u.prompt.id, u.repeat) not in finished]
        unknown = tuple(dict.fromkeys(u.cell.cell_id for u in left if u.cell.cell_id not in known))
        seconds = None if unknown else sum(known[u.cell.cell_id] for u in left)
        return Estimate(len(self.units), len(self.units) - len(left), seconds, unknown)


def parse_shard(text: str) -> Shard:
    """Read `i/n`, i from 1 to n; raises `UserError` otherwise."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {text}: must be i/n with i from 1 to n", "For example: --shard 2/8")
    return Shard(int(match[1]), int(match[2]))


def make_plan(experiment: ResolvedExperiment, prompts: Sequence[Prompt]) -> Plan:
    """Make the plan of an experiment over prompts, in their order; a repeated prompt counts once.

    Raises `UserError` when there is no prompt.
    """
    settings = experiment.settings
    unique = list(dict.fromkeys(prompts))
    if not unique:
        raise UserError(f"prompts {settings.prompts}: holds no prompt", "Give a file with one prompt a line.")
    slots = _slots(unique, settings.images or len(unique), settings.repeats)
    units: list[Unit] = []
    # The largest batch decides how many images of one cell follow each other: all cells see a prompt at about one time.
    together = max(settings.batch)
    for start in range(0, len(slots), together):
        for cell in _order(experiment.cells, settings.seed, *slots[start]):
            for image_index in range(start, min(start + together, len(slots))):
                prompt, repeat = slots[image_index]
                seed = record_seed(settings.seed, prompt.id, repeat, cell.decoding.seed_set)
                units.append(Unit(cell, prompt, repeat, seed, image_index, len(units)))
    return Plan(experiment.cells, tuple(units), together)


def _order(cells: tuple[Cell, ...], seed: int, prompt: Prompt, repeat: int) -> list[Cell]:
    return sorted(cells, key=lambda cell: order_key(seed, prompt.id, repeat, cell.cell_id))


def _slots(prompts: list[Prompt], images: int, repeats: int) -> list[tuple[Prompt, int]]:
    """Return (prompt, repeat) for each image of a cell: `images` of them, so `repeats` times over."""
    passes = -(-images // len(prompts))
    return [
        (prompts[index % len(prompts)], again * passes + index // len(prompts))
        for again in range(repeats)
        for index in range(images)
    ]
