"""Threads of decoding: their number, and how they wait for each other.

docs/log.md has the measurements behind the constants.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Note

_SPINS = "1000"  # how often a waiting thread of GNU OpenMP spins before it sleeps, about 1 us each
_ROUNDS = 15  # blocks timed per number of threads
_ROUNDS_OF_ONE = 3  # blocks where there is one number, and only the load of the machine is asked
_BLOCK = 0.02  # seconds of a block
_LONGEST = 3.0  # seconds after which no further block is timed
_TIE = 0.05  # fewer threads are chosen when more are not faster by this fraction

# An image is disturbed when its threads lacked a core for more than this fraction of its seconds.
DISTURBED = 0.05
BUSY = 0.25  # above this fraction of the timed seconds, speed cannot be measured
QUIET_ADVICE = "Close other programs. Token counts and quality are valid; times may not be."


def prepare_environment() -> None:
    """Set what torch reads when it is loaded: spinning of threads, and the folder of programs."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def set_threads(threads: int | None) -> None:
    """Set the number of threads of torch; None changes nothing."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


class Calibrated(NamedTuple):
    """The result of timing several numbers of threads."""

    threads: int  # the chosen number
    milliseconds: dict[int, float]  # of the timed work, by number of threads
    lost_share: float  # thread-seconds without a core by seconds of the timed work

    def notes(self) -> list[Note]:
        """Say which number was chosen, and warn where other programs take the processor."""
        times = ", ".join(f"{count}: {ms:.3g} ms" for count, ms in self.milliseconds.items())
        notes = [Note(f"threads {self.threads} ({times})", level="detail")]
        if self.lost_share > DISTURBED:
            waited = f"{self.lost_share:.2f} of each second a thread waited for a core"
            text = f"other programs keep the processor busy ({waited}). {QUIET_ADVICE}"
            if self.lost_share > BUSY:
                text = f"speed cannot be measured now: {text}"
            notes.append(Note(text, level="warning"))
        return notes


def calibrate(work: Callable[[], object], recorded: int | None = None) -> Calibrated:
    """Time work on all threads, a quarter of them, and so on to one, in turns.

    Args:
        work: The work, which is repeated.
        recorded: The number that was chosen before. Only it is timed, briefly, for the load of
            the machine.

    Returns:
        The smallest number of threads within 5% of the fastest.
    """
    import torch

    from lantern_bench.utils.clock import now, usage

    most = torch.get_num_threads()
    counts = sorted({max(1, most // 4**power) for power in range(most.bit_length())})
    rounds = _ROUNDS
    if recorded:
        counts = [recorded]
    if len(counts) == 1:
        rounds = _ROUNDS_OF_ONE
    waking = torch.zeros(1 << 18)
    blocks: dict[int, list[float]] = defaultdict(list)
    torch.set_num_threads(counts[-1])
    work()
    began = now()
    work()
    repeats = max(1, round(_BLOCK / max(1e-6, now() - began)))
    lost = 0.0
    start = now()
    for number in range(rounds):
        if number > 0 and now() - start > _LONGEST:
            break
        for threads in counts:
            torch.set_num_threads(threads)
            waking.add_(1)  # the threads start
            if number == 0:
                work()  # compiles its programs
            before = usage()
            began = now()
            for _ in range(repeats):
                work()
            blocks[threads].append(now() - began)
            lost += usage().since(before).lost_seconds(blocks[threads][-1], threads)
    torch.set_num_threads(most)
    milliseconds = {threads: 1e3 * median(blocks[threads]) / repeats for threads in counts}
    slowest_tie = min(milliseconds.values()) / (1 - _TIE)
    chosen = next(count for count in counts if milliseconds[count] <= slowest_tie)
    return Calibrated(chosen, milliseconds, lost / sum(map(sum, blocks.values())))
