"""Figures made of seconds: their intervals cover a repeat, and single held-up or disturbed images
do not move them.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from lantern_bench.analysis.cells import HELD_UP, run_cells, timed_images
from lantern_bench.analysis.statistics import (
    NEEDS_PROCESSES,
    compare_timings,
    ratio_of_sums,
    repeat_interval,
    timing,
)
from tests.helpers.made_up_run import AR, STRICT, build_tables, make_record, run_of

STEPS = 40
PACE = 0.01


def make_cells(generator, steps, processes=3, process_sd=0.04, held_up=0.05, run_sd=0.0):
    """Records of two cells whose pace depends on the process and the image, and the true seconds of
    a step are one.
    """
    records = []
    for cell, counts in ((AR, np.full(len(steps), 2 * STEPS)), (STRICT, steps)):
        moved = generator.normal(0.0, process_sd / math.sqrt(2), processes)
        moved += generator.normal(0.0, run_sd / math.sqrt(2)) if run_sd else 0.0
        for prompt, count in enumerate(counts):
            seconds = (
                PACE * count * math.exp(moved[prompt % processes] + generator.normal(0.0, 0.05))
            )
            seconds *= generator.uniform(2.0, 8.0) if generator.random() < held_up else 1.0
            records.append(
                make_record(
                    cell=cell,
                    prompt=prompt,
                    walks=[[]] * count,
                    seconds=seconds,
                    process=prompt % processes,
                )
            )
    return run_cells(run_of(records))


def make_repeats(generator, runs=2, images=24, **settings):
    """Runs over the same prompts, which decode the same tokens."""
    steps = np.round(STEPS * np.exp(generator.normal(0.0, 0.08, images))).astype(int)
    return [make_cells(generator, steps, **settings) for _ in range(runs)]


def speedup(cells):
    ar, cell = cells
    return timing(timed_images(cell, ar))


def test_images_are_paired_by_prompt_whatever_their_order():
    ar, cell = make_cells(np.random.default_rng(0), np.full(12, STEPS))
    same = timed_images(cell, ar)
    assert len(same) == 12
    assert (same["numerator"] == ar.images["seconds"]).all()
    vars(cell)["images"] = cell.images.drop(cell.images.index[3])
    vars(cell).pop("timed")  # made of the images
    fewer = timed_images(cell, ar)
    pd.testing.assert_frame_equal(
        fewer, same.drop(same.index[3]), check_like=True, check_exact=True
    )


def test_seconds_of_two_devices_are_not_divided():
    """A continued run may have decoded an image of `ar` elsewhere."""
    ar, cell = make_cells(np.random.default_rng(0), np.full(12, STEPS))
    ar.images.loc[ar.images.index[3], "device_id"] = "another"
    assert (
        timed_images(cell, ar).index.tolist() == cell.images.index.drop(ar.images.index[3]).tolist()
    )


def ratio_over_prompts(cells):
    """The ratio of sums with an interval over prompts, as figures of tokens have it."""
    ar, cell = (cell.completed["seconds"].tolist() for cell in cells)
    return ratio_of_sums(ar, cell, cells[0].completed["prompt_id"])


def covers(interval, value):
    return interval.low <= value <= interval.high


@pytest.mark.parametrize(
    ("processes", "count"),
    [(3, 20), *(pytest.param(n, 80, marks=pytest.mark.long) for n in (3, 5))],
)
def test_intervals_cover_a_repeat_and_false_verdicts_are_rare(processes, count):
    generator = np.random.default_rng(7)
    pairs = [
        [speedup(run) for run in make_repeats(generator, processes=processes)] for _ in range(count)
    ]
    intervals = [[repeat_interval(run) for run in pair] for pair in pairs]
    assert np.mean([[covers(a, b.value), covers(b, a.value)] for a, b in intervals]) >= 0.9
    assert np.mean([compare_timings(*pair).p_value < 0.05 for pair in pairs]) <= 0.1


def test_interval_over_prompts_does_not_cover_a_repeat():
    """Not even without held-up images: prompts know nothing of processes."""
    for held_up in (0.0, 0.05):
        generator = np.random.default_rng(8)
        pairs = [make_repeats(generator, held_up=held_up) for _ in range(12)]
        intervals = [[ratio_over_prompts(run) for run in pair] for pair in pairs]
        assert np.mean([[covers(a, b.value), covers(b, a.value)] for a, b in intervals]) < 0.85


def test_interval_does_not_cover_a_repeat_in_another_state_of_the_machine():
    """What a whole run has in common, three times what processes differ by, is in no interval."""
    generator = np.random.default_rng(9)
    pairs = [
        [speedup(run) for run in make_repeats(generator, run_sd=0.12, held_up=0.0)]
        for _ in range(20)
    ]
    intervals = [[repeat_interval(run) for run in pair] for pair in pairs]
    assert np.mean([[covers(a, b.value), covers(b, a.value)] for a, b in intervals]) < 0.85


def test_a_real_change_is_found():
    generator = np.random.default_rng(11)
    slow, fast = make_repeats(generator, processes=5)
    a = timing(timed_images(slow[1], slow[0]))
    b = timing(timed_images(fast[1], fast[0]).assign(numerator=lambda x: 2 * x.numerator))
    effect = compare_timings(a, b)
    assert effect.p_value < 0.001
    assert covers(effect, 2.0)


def frame(numerator, processes, prompts=None, steps=None):
    images = pd.DataFrame(
        {
            "numerator": numerator,
            "denominator": 1.0,
            "numerator_steps": steps or 1.0,
            "denominator_steps": 1.0,
        }
    )
    names = prompts or [f"p{number}" for number in range(len(numerator))]
    return images.assign(process=processes).set_index(pd.Index(names, name="prompt_id"))


def test_equal_steps_leave_welchs_test_over_processes():
    """But for the effect, which is of arithmetic means."""
    a = [1.0, 1.1, 1.25]
    b = [1.4, 1.3, 1.7, 1.5]
    both = (
        frame(np.repeat(x, 4), np.repeat(range(len(x)), 4), list("pqrs") * len(x)) for x in (a, b)
    )
    effect = compare_timings(*map(timing, both))
    assert effect.p_value == pytest.approx(
        ttest_ind(np.log(a), np.log(b), equal_var=False).pvalue, rel=0.05
    )


@pytest.mark.parametrize(
    ("images", "has_interval"),
    [
        pytest.param([6], False, id="one process"),
        pytest.param([3, 3], False, id="two merged shards"),
        pytest.param([5, 1], False, id="resumed for the last image"),
        pytest.param([4, 4, 1], False, id="two processes, resumed for an image"),
        pytest.param([2, 2, 1], True, id="five images in three processes"),
        pytest.param([3, 3, 3, 1], True, id="three processes, resumed for an image"),
    ],
)
def test_only_three_processes_in_effect_have_an_interval(images, has_interval):
    processes = np.repeat(range(len(images)), images)
    interval = repeat_interval(
        timing(frame([1.0 + 0.1 * (n % 3) for n in range(len(processes))], processes))
    )
    assert (interval.low is not None, interval.high is not None) == (has_interval, has_interval)
    assert interval.note == (None if has_interval else NEEDS_PROCESSES)
    assert "--processes 5" in NEEDS_PROCESSES


def test_steps_of_prompts_and_pace_of_processes_are_told_apart():
    """Twice the steps take twice as long: with the same pace everywhere all spread is one of
    prompts.
    """
    measured = timing(
        frame([1.0, 2.0, 3.0, 5.0, 4.0], [0, 0, 1, 1, 2], steps=[10.0, 20.0, 30.0, 50.0, 40.0])
    )
    assert measured.of_processes == pytest.approx(0.0, abs=1e-20)
    assert measured.influence.var(ddof=1) / 5 == pytest.approx(
        np.var([1, 2, 3, 5, 4], ddof=1) / 5 / 3.0**2
    )


def speed_of(seconds, **changes):
    records = [
        make_record(
            cell=STRICT,
            prompt=n,
            walks=[[]] * 10,
            seconds=duration,
            **{"process": 0} | {k: v[n] for k, v in changes.items()},
        )
        for n, duration in enumerate(seconds)
    ]
    return build_tables(records)["speed"].iloc[0]


@pytest.mark.parametrize(
    ("seconds", "changes", "latency", "disturbed", "held_up"),
    [
        pytest.param([1.0, 1.1, 1.2, 1.0], {}, 1.075, None, 0, id="quiet"),
        pytest.param(
            [1.0, 1.0, 2.0, 2.0], {"process": [0, 0, 1, 1]}, 1.5, None, 0, id="a slow process"
        ),
        pytest.param(
            [1.0, 1.0, 1.2, 1.1],
            {"disturbed": [False, False, True, False]},
            4.1 / 4,
            1,
            1,
            id="disturbed",
        ),
        pytest.param(
            [1.0, 1.0, 1.2, 1.1],
            {"disturbed": [False, True, True, True]},
            4.3 / 4,
            3,
            0,
            id="busy machine",
        ),
    ],
)
def test_only_single_disturbed_images_lose_seconds(seconds, changes, latency, disturbed, held_up):
    row = speed_of(seconds, **changes)
    assert row["latency_s"] == pytest.approx(latency)
    assert row["held_up"] == held_up
    assert pd.isna(row["disturbed"]) if disturbed is None else row["disturbed"] == disturbed
    assert ("3 of 4 images disturbed" in str(row["note"])) == (disturbed == 3)


def test_a_held_up_image_counts_as_slow_as_the_limit():
    row = speed_of([1.0, 1.0, 9.0, 1.0])
    assert row["latency_s"] == pytest.approx((3 + HELD_UP) / 4)
    assert row["held_up"] == 1
    assert row["tokens_per_s"] == pytest.approx(11 / row["latency_s"])
    assert (row["latency_p50_s"], row["latency_p95_s"]) == pytest.approx(
        (1.0, 1.0 + 0.85 * (HELD_UP - 1.0))
    )
    assert row[["draft_ms", "target_ms", "verify_ms", "other_ms"]].sum() == pytest.approx(
        100 * row["latency_s"]
    )
