"""Threads of decoding: how many, and how they wait for each other (docs/log.md has the measurements)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Note

# of GNU OpenMP: a waiting thread spins so often (microseconds), then sleeps
_SPINS = ("GOMP_SPINCOUNT", "1000")
# blocks timed for each number of threads, and their seconds
_ROUNDS = 15
_BLOCK = 0.02
_LONGEST = 3.0  # seconds after which no further block is timed
# with one number of threads nothing is chosen: blocks that say how much of a core others take
_ROUNDS_OF_ONE = 3
_TIE = 0.05  # fewer threads are chosen when more are not faster by this share


def prepare_environment() -> None:
    """Set what torch reads when it is loaded: how long threads spin, and where compiled code is kept."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*_SPINS)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def set_threads(threads: int | None) -> None:
    """Decode on so many threads; None changes nothing."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


# an image is disturbed when its threads lacked a core for more than this share of its seconds
DISTURBED = 0.05
BUSY = 0.25  # above this share of the time in which threads are tried, speed cannot be measured
QUIET_ADVICE = "Close other programs. Figures of tokens and quality hold; those of seconds may not."


class Calibrated(NamedTuple):
    """The number of threads that a calibration has chosen."""

    threads: int
    milliseconds: dict[int, float]  # of the timed work, by number of threads
    lost_share: float  # seconds without a core by seconds of the trial

    def notes(self) -> list[Note]:
        """Say which number was chosen, and warn where other programs take the processor."""
        times = ", ".join(
            f"{count}: {milliseconds:.3g} ms" for count, milliseconds in self.milliseconds.items()
        )
        notes = [Note(f"threads {self.threads} ({times})", level="detail")]
        if self.lost_share > DISTURBED:
            share = f"{self.lost_share:.2f} of each second a thread waited for a core"
            text = f"other programs keep the processor busy ({share}). {QUIET_ADVICE}"
            busy = "speed cannot be measured now: " if self.lost_share > BUSY else ""
            notes.append(Note(busy + text, level="warning"))
        return notes


def calibrate(work: Callable[[], object], recorded: int | None = None) -> Calibrated:
    """Time work on all threads, a quarter of them, and so on to one, in turns; or on a `recorded` number, briefly."""
    import torch

    from lantern_bench.utils.clock import now, usage

    most = torch.get_num_threads()
    counts = (
        [recorded]
        if recorded
        else sorted({max(1, most // 4**power) for power in range(most.bit_length())})
    )
    waking = torch.zeros(1 << 18)
    blocks: dict[int, list[float]] = defaultdict(list)
    torch.set_num_threads(counts[-1])
    work()
    began = now()
    work()
    repeats = max(1, round(_BLOCK / max(1e-6, now() - began)))
    lost = 0.0
    start = now()
    rounds = _ROUNDS if len(counts) > 1 else _ROUNDS_OF_ONE
    while len(blocks[counts[-1]]) < rounds and not (
        blocks[counts[-1]] and now() - start > _LONGEST
    ):
        for threads in counts:
            torch.set_num_threads(threads)
            waking.add_(1)  # the threads start
            if not blocks[threads]:
                work()  # its programs are compiled
            before = usage()
            began = now()
            for _ in range(repeats):
                work()
            blocks[threads].append(now() - began)
            lost += usage().since(before).lost_seconds(blocks[threads][-1], threads)
    torch.set_num_threads(most)
    milliseconds = {threads: 1e3 * median(blocks[threads]) / repeats for threads in counts}
    chosen = next(
        count for count in counts if milliseconds[count] * (1 - _TIE) <= min(milliseconds.values())
    )
    return Calibrated(chosen, milliseconds, lost / sum(map(sum, blocks.values())))
