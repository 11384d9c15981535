"""Choose the number of threads that decodes fastest.

docs/log.md has the measurements behind the constants.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import ImageTask
from lantern_bench.decoding.loop import cached_step, decode
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.sweeps.decoded_image import DISTURBED, quiet_advice
from lantern_bench.utils import signals
from lantern_bench.utils.clock import now, usage
from lantern_bench.utils.files import write_atomically
from lantern_bench.utils.progress import Emit, Note

_TOKENS = 12  # tokens that are decoded at a time without drafts
_FORWARDS = 4  # forwards over a draft at a time
_ROUNDS = 15  # blocks timed per number of threads
_ROUNDS_OF_ONE = 3  # blocks for a single number, which measure only the load of the machine
_BLOCK = 0.02  # seconds of a block
_LONGEST = 3.0  # seconds after which no further block is timed
_TIE = 0.05  # more threads must be faster by more than this fraction
_BUSY = 0.25  # above this fraction of the timed seconds, speed cannot be measured


class Calibrated(NamedTuple):
    """The result of timing several numbers of threads."""

    threads: int  # the chosen number
    milliseconds: dict[int, float]  # of the timed work, by number of threads
    lost_share: float  # thread-seconds without a core by seconds of the work

    def notes(self) -> list[Note]:
        """Report the chosen number, and warn if other programs keep the processor busy."""
        times = ", ".join(f"{count}: {ms:.3g} ms" for count, ms in self.milliseconds.items())
        notes = [Note(f"threads {self.threads} ({times})", level="detail")]
        if self.lost_share > DISTURBED:
            waited = f"{self.lost_share:.2f} of each second a thread waited for a core"
            text = f"other programs keep the processor busy ({waited}). {quiet_advice()}"
            if self.lost_share > _BUSY:
                text = f"speed cannot be measured now: {text}"
            notes.append(Note(text, level="warning"))
        return notes


def thread_counts() -> list[int]:
    """Return the numbers of threads that are timed: all threads, a quarter, and so on to one."""
    most = torch.get_num_threads()
    return sorted({max(1, most // 4**power) for power in range(most.bit_length())})


def calibrate(work: Callable[[], object], recorded: int | None = None) -> Calibrated:
    """Time work on all threads, a quarter of them, and so on to one, in turns.

    Args:
        work: The work, which is repeated.
        recorded: The number that was chosen before. Only this number is timed, briefly, to
            measure the load of the machine.

    Returns:
        The smallest number of threads within 5% of the fastest.
    """
    most = torch.get_num_threads()
    counts = thread_counts() if recorded is None else [recorded]
    rounds = _ROUNDS if len(counts) > 1 else _ROUNDS_OF_ONE
    torch.set_num_threads(counts[-1])
    work()
    start = now()
    work()
    repeats = max(1, round(_BLOCK / max(1e-6, now() - start)))
    blocks: dict[int, list[float]] = defaultdict(list)
    lost = 0.0
    start = now()
    for _ in range(rounds):
        for threads in counts:
            torch.set_num_threads(threads)
            work()  # compiles its programs, and the threads start
            before = usage()
            began = now()
            for _ in range(repeats):
                work()
            seconds = now() - began
            blocks[threads].append(seconds)
            lost += usage().since(before).lost_seconds(seconds, threads)
        if now() - start > _LONGEST:
            break
    torch.set_num_threads(most)
    milliseconds = {count: 1e3 * median(times) / repeats for count, times in blocks.items()}
    slowest_tie = min(milliseconds.values()) / (1 - _TIE)
    chosen = min(count for count, time in milliseconds.items() if time <= slowest_tie)
    return Calibrated(chosen, milliseconds, lost / sum(map(sum, blocks.values())))


def timed_work(
    model: LoadedModel, prompt: str, decodings: Iterable[Decoding]
) -> Callable[[], None]:
    """Return the work whose time decides: tokens without drafts, and forwards over a draft.

    Single products would not do: between them the threads would sleep. Drafts gain more from
    threads than autoregressive steps, so forwards over a draft are timed too. The rest of a
    speculative step is not: it would have to be compiled for every number of threads.

    Args:
        model: The model that decodes.
        prompt: The prompt of the timed image.
        decodings: Of these, the first one without drafts and the first one with drafts are timed.
    """
    kinds = _kinds(decodings)
    plain = kinds.get(False)
    with torch.inference_mode():
        condition = model.condition([prompt])
    prefilled = set[int]()  # numbers of threads, each of which has its own programs

    @torch.inference_mode()
    def work() -> None:
        signals.check()
        if plain is not None:
            generator = torch.Generator(model.target.device).manual_seed(0)
            decode(
                model=model,
                condition=condition,
                decoding=plain,
                generators=[generator],
                tokens=_TOKENS,
                engine=model.engine,
            )
        if True in kinds:
            step = cached_step(model, kinds[True], batch=1, engine=model.engine)
            if torch.get_num_threads() not in prefilled:
                step.session.prefill(condition)
                prefilled.add(torch.get_num_threads())
            for _ in range(_FORWARDS):
                step.score()

    return work


def choose_threads(
    model: LoadedModel, prompt: str, decodings: Iterable[Decoding], emit: Emit
) -> None:
    """Time forwards on several numbers of threads and set the fastest. On a GPU, do nothing.

    The choice is stored with the compiled programs of the model. Later runs read it.

    Args:
        model: The model that decodes.
        prompt: The prompt of the timed image.
        decodings: As of `timed_work`.
        emit: Receives a note with the times, and a warning on a busy machine.
    """
    if model.target.device.type != "cpu":
        return
    decodings = list(decodings)
    kinds = sorted(_kinds(decodings).items())
    timed = " and ".join("drafting" if drafts else plain.mode for drafts, plain in kinds)
    name = f"{timed}, at most {torch.get_num_threads()}"
    file = model.engine.folder and model.engine.folder / "threads.json"
    choices: dict[str, Any] = {}
    if file is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):  # missing or damaged
            choices = dict(json.loads(file.read_bytes()))
    recorded = choices.get(name)
    if type(recorded) is not int or not 1 <= recorded <= torch.get_num_threads():
        recorded = None  # missing or damaged
    try:
        calibrated = calibrate(timed_work(model, prompt, decodings), recorded)
    except (RuntimeError, MemoryError):
        return  # an image that fails to decode fails again in the run, which records the error
    torch.set_num_threads(calibrated.threads)
    for note in calibrated.notes():
        emit(note)
    # A choice on a busy machine is not stored for the next run.
    if file is not None and recorded is None and calibrated.lost_share <= DISTURBED:
        content = json.dumps(choices | {name: calibrated.threads}, indent=1)
        with contextlib.suppress(OSError):  # the next run times threads again
            write_atomically(file, content.encode() + b"\n")


def _kinds(decodings: Iterable[Decoding]) -> dict[bool, Decoding]:
    """Return the first decoding of each kind, by whether it drafts."""
    return {decoding.drafts: decoding for decoding in reversed(list(decodings))}


def timed_tasks(tasks: Sequence[ImageTask]) -> list[ImageTask]:
    """Return one task of each kind that is timed, drafting or not, of the first task's model.

    The first task is the first one here too: its prompt is the one that is timed.
    """
    kinds: dict[bool, ImageTask] = {}
    for task in tasks:
        if task.cell.model == tasks[0].cell.model:
            kinds.setdefault(task.cell.decoding.drafts, task)
    return list(kinds.values())


def choose_threads_for(
    tasks: Sequence[ImageTask], models: Mapping[str, LoadedModel], emit: Emit
) -> None:
    """Set the number of threads that decodes fastest, by images of the first task's model.

    Args:
        tasks: The images to decode; without any, nothing is set.
        models: The loaded models by name.
        emit: Receives the notes of `choose_threads`.
    """
    if not tasks:
        return
    decodings = [task.cell.decoding for task in timed_tasks(tasks)]
    model = models[tasks[0].cell.model]
    choose_threads(model, tasks[0].prompt.text, decodings, emit=emit)


def timed_work_of(
    tasks: Sequence[ImageTask], models: Mapping[str, LoadedModel]
) -> Callable[[], None]:
    """Return the work by whose time `choose_threads_for` chooses.

    Args:
        tasks: The result of `timed_tasks`.
        models: The loaded models by name.
    """
    decodings = [task.cell.decoding for task in tasks]
    return timed_work(models[tasks[0].cell.model], tasks[0].prompt.text, decodings)
