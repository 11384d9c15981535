"""The race: which tokens a frame shows, how fast it runs, and the GIF."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageColor

from lantern_bench.report.race import FRAME_SECONDS, Lane, Step, frame_times, pace, painted, race_gif

STEPS = (Step(0.1, 0, 1, 0), Step(0.2, 1, 3, 2), Step(0.3, 4, 1, 0), Step(0.4, 5, 3, 3))
"""The first token; two drafts and the bonus token; a rejection; three drafts, cut at the end of the image."""


def lane(steps: tuple[Step, ...] = STEPS, **changes: object) -> Lane:
    count = steps[-1].start + steps[-1].committed
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    made = Lane("LANTERN++ λ=2", "#009E73", steps[-1].ended + 0.01, steps, count, noise, (count // 4, 4), 1.5)
    return made._replace(**changes)


@pytest.mark.parametrize(
    ("since", "until", "state"),
    [
        (0.0, 0.0, "00000000"),
        (0.05, 0.1, "10000000"),
        (0.15, 0.2, "12210000"),  # accepted drafts are tinted, the bonus token is not
        (0.22, 0.29, "12210000"),  # nothing has ended since: the last step stays
        (0.25, 0.35, "11111000"),  # a step without accepted drafts
        (0.05, 0.35, "12211000"),  # all steps since the frame before
        (0.35, 0.4, "11111222"),
        (0.4, 0.5, "11111111"),  # finished
        (math.inf, math.inf, "11111111"),
    ],
)
def test_tokens_are_painted_when_their_step_ends(since: float, until: float, state: str) -> None:
    assert "".join(map(str, painted(lane(), since, until))) == state


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [
        ([3.0, 5.0], 1),  # real time
        ([0.13, 0.3], 16),  # the fastest lasts two seconds
        ([0.1, 6.0], 2),  # but the slowest at most twelve
        ([0.1, 11.0], 1),
        ([2.0, 12.1], -2),
        ([100.0], -9),
    ],
)
def test_pace_shows_short_runs_slower_and_long_runs_faster(seconds: list[float], factor: int) -> None:
    assert pace(seconds) == factor


@pytest.mark.parametrize("seconds", [[0.004], [0.3, 0.9], [2.0, 12.0], [31.0, 700.0]])
def test_frames_cover_the_slowest_lane_at_the_pace(seconds: list[float]) -> None:
    *times, last = frame_times(seconds)
    factor = pace(seconds)
    real = FRAME_SECONDS / factor if factor > 0 else -FRAME_SECONDS * factor
    assert times[0] == 0 and last == math.inf and times[-2] < max(seconds) <= times[-1] and len(times) <= 151
    assert all(after - before == pytest.approx(real) for before, after in pairwise(times))


def frames_of(gif: bytes) -> tuple[list[np.ndarray], list[int], int]:
    """Every frame in RGB, milliseconds of each, and how often it repeats (0: endlessly)."""
    with Image.open(io.BytesIO(gif)) as image:
        shown, durations = [], []
        for number in range(image.n_frames):
            image.seek(number)
            shown.append(np.asarray(image.convert("RGB")).astype(int))
            durations.append(image.info["duration"])
        return shown, durations, image.info["loop"]


def near(frame: np.ndarray, colour: np.ndarray, tolerance: int = 12) -> int:
    """How many pixels have about this colour."""
    return int((np.abs(frame - colour).max(-1) <= tolerance).sum())


def test_gif_has_all_frames_loops_and_holds_the_last() -> None:
    lanes = [lane(), lane(label="AR", colour="#000000", speedup=1.0, seconds=0.8)]
    shown, durations, loop = frames_of(race_gif(lanes, "a lantern", "lanterns"))
    # Pillow joins equal frames: their durations add up.
    assert loop == 0 and sum(durations) == 80 * (len(frame_times([0.41, 0.8])) - 1) + 3000
    assert durations[-1] >= 3000 and set(durations[:-1]) == {80} and (shown[-1][0, 0] == 255).all()
    assert len({frame.shape for frame in shown}) == 1 and shown[0].shape[1] == 2 * 192 + 3 * 12


def test_accepted_drafts_are_tinted_until_the_lane_is_finished() -> None:
    grey = np.full((64, 64, 3), 128, np.uint8)
    shown, _, _ = frames_of(race_gif([lane(picture=grey)], "a lantern", "lanterns"))
    tinted = 0.4 * grey[0, 0] + 0.6 * np.array(ImageColor.getrgb("#009E73"))
    patch = 96 * 48  # 8 tokens in two rows, 192 pixels wide
    counts = [near(frame, tinted) for frame in shown]
    assert {round(count / patch) for count in counts} == {0, 2, 3}
    assert counts[-1] < patch / 10 and near(shown[-1], grey[0, 0]) > 7.9 * patch
    assert near(shown[0], grey[0, 0]) < patch / 10


def test_forced_tokens_at_row_ends_have_no_patch() -> None:
    steps = (Step(1.0, 0, 5, 0), Step(2.0, 5, 5, 0))
    picture = np.zeros((2, 4, 3), np.uint8)
    picture[1] = 255, 0, 0
    one = lane(steps, tokens=10, grid=(2, 4), picture=picture)
    shown, _, _ = frames_of(race_gif([one], "a lantern", "lanterns"))
    counts = [(near(frame, np.zeros(3)), near(frame, picture[1, 0])) for frame in shown]
    # Labels have some pixels of these colours as well.
    assert {(round(black / (192 * 48)), round(red / (192 * 48))) for black, red in counts} == {(0, 0), (1, 0), (1, 1)}


def test_many_lanes_stand_in_rows_and_long_captions_are_cut() -> None:
    lanes = [lane(label=f"mode {number} with a long label of many words", speedup=None) for number in range(9)]
    shown, _, _ = frames_of(race_gif(lanes, "red lantern " * 50, "lanterns"))
    assert shown[0].shape[:2] == (64 + 2 * (192 + 2 * 20 + 12), 5 * 192 + 6 * 12)
    assert (shown[0][:, -12:] >= 250).all()
