"""Plans: which images, with which seeds, in which order, and what a shard gets.

Seeds and keys never depend on an image's index in the plan.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import (
    ImageTask,
    Plan,
    Shard,
    make_plan,
    order_key,
    parse_shard,
    record_seed,
)
from lantern_bench.config.settings import Overrides
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import UserError

PROMPTS = [Prompt("one red lantern"), Prompt("two"), Prompt("three")]
MODELS = {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}


def plan_of(prompts: list[Prompt] = PROMPTS, **flags: object) -> Plan:
    return make_plan(load_experiment("lanterns", MODELS, Overrides.from_flags(flags)), prompts)


def uses(tasks: list[ImageTask]) -> list[tuple[int, int]]:
    """The number of the prompt and the repeat of each image."""
    return [(PROMPTS.index(task.prompt), task.repeat) for task in tasks]


def test_seeds_and_order_are_recorded() -> None:
    """A change of these numbers is a change of every result."""
    assert record_seed(0, "a" * 12, 0) == 3293219018698706467
    assert (
        order_key(run_seed=0, prompt_id="a" * 12, repeat=0, cell_id="ar-t1") == 8161787362896149727
    )
    assert Prompt("one red lantern").id == "e9c9c5b78147"


@given(st.integers(0, 2**63 - 1), st.text(max_size=12), st.integers(0, 1000))
def test_seeds_fit_a_signed_integer_of_64_bits(run_seed: int, prompt_id: str, repeat: int) -> None:
    assert 0 <= record_seed(run_seed, prompt_id, repeat) < 2**63


def test_run_prompt_repeat_and_set_change_the_seed() -> None:
    settings = product(range(5), ("a", "b"), range(5), range(3))
    seeds = {
        record_seed(run_seed=run_seed, prompt_id=prompt_id, repeat=repeat, seed_set=seed_set)
        for run_seed, prompt_id, repeat, seed_set in settings
    }
    assert len(seeds) == 150


def test_images_go_through_the_prompts_and_then_repeat() -> None:
    plan = plan_of(images=7)
    for cell in plan.cells:
        tasks = sorted(
            (task for task in plan.tasks if task.cell == cell), key=lambda task: task.image_index
        )
        assert uses(tasks) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
        images = [f"images/{cell.cell_id}/000000.png", f"images/{cell.cell_id}/000001.png"]
        assert [task.image for task in tasks][:2] == images


def test_repeats_make_the_list_again_with_fresh_seeds() -> None:
    plan = plan_of(images=2, repeats=2)
    tasks = [task for task in plan.tasks if task.cell == plan.cells[0]]
    assert uses(tasks) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len({task.seed for task in tasks}) == 4


def test_cells_are_interleaved_in_an_order_that_changes() -> None:
    plan = plan_of(images=20)
    cells = len(plan.cells)
    rounds = [plan.tasks[start : start + cells] for start in range(0, len(plan.tasks), cells)]
    orders = [tuple(task.cell.cell_id for task in tasks) for tasks in rounds]
    assert all(
        len({(task.prompt, task.repeat, task.seed) for task in tasks}) == 1 for tasks in rounds
    )
    assert all(len(set(order)) == cells for order in orders)
    assert len(set(orders)) > 10
    assert [task.order_index for task in plan.tasks] == list(range(len(plan.tasks)))
    assert max(Counter(order[0] for order in orders).values()) < 12


def test_the_order_follows_the_seed() -> None:
    assert plan_of(images=5).tasks == plan_of(images=5).tasks
    assert [task.cell for task in plan_of(images=5).tasks] != [
        task.cell for task in plan_of(images=5, seed=1).tasks
    ]


def test_another_seed_set_makes_the_same_prompts_with_other_seeds(tmp_path: Path) -> None:
    (tmp_path / "seeds.yaml").write_text(
        "model: lanterns\nimages: 3\ncells: [{mode: ar, seed_set: [0, 1]}]"
    )
    plan = make_plan(load_experiment(tmp_path / "seeds.yaml", MODELS), PROMPTS)
    first = [task for task in plan.tasks if task.cell.decoding.seed_set == 0]
    second = [task for task in plan.tasks if task.cell.decoding.seed_set == 1]
    assert {task.cell.cell_id for task in second} == {"ar-t1-seedset1"}
    assert uses(first) == uses(second)
    assert all(task.seed == record_seed(0, task.prompt.id, task.repeat) for task in first)
    assert not {task.seed for task in first} & {task.seed for task in second}


def test_seeds_do_not_depend_on_cells_order_or_number() -> None:
    for task in plan_of(images=7, seed=3).tasks:
        assert task.seed == record_seed(3, task.prompt.id, task.repeat)
    few = plan_of(images=2)
    many = plan_of(list(reversed(PROMPTS)), images=9)
    seeds = {(task.prompt.id, task.repeat): task.seed for task in many.tasks}
    assert all(seeds[task.prompt.id, task.repeat] == task.seed for task in few.tasks)


def test_a_prompt_that_comes_twice_counts_once() -> None:
    plan = plan_of([*PROMPTS, PROMPTS[0]], images=4)
    assert sorted(set(uses(list(plan.tasks)))) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_without_prompts_there_is_no_plan() -> None:
    with pytest.raises(UserError, match="prompts held-out: contains no prompt"):
        plan_of([])


def test_no_number_of_images_is_every_prompt_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: lanterns\ncells: [{mode: ar}]")
    assert len(make_plan(load_experiment(path, MODELS), PROMPTS).tasks) == 3


@settings(max_examples=30)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
)
def test_shards_share_the_work_and_keep_cells_of_a_prompt_together(
    images: int, count: int, batch: list[int]
) -> None:
    plan = plan_of(images=images, batch=batch)
    shards = [plan.shard(Shard(index + 1, count)) for index in range(count)]
    tasks = list(chain.from_iterable(shard.tasks for shard in shards))
    assert len(tasks) == len(plan.tasks)
    assert set(tasks) == set(plan.tasks)
    for shard in shards:
        images_of_prompts = Counter(task.image_index for task in shard.tasks)
        assert all(number == len(plan.cells) for number in images_of_prompts.values())
        for group in shard.batches():
            assert len({task.cell for task in group}) == 1
            assert len(group) <= group[0].cell.batch
        assert list(chain.from_iterable(shard.batches())) == list(shard.tasks)


def test_prompts_are_dealt_in_equal_shuffled_shares() -> None:
    plan = plan_of([Prompt(f"prompt {number}") for number in range(10)], images=10)
    plans = plan.deal(plan, 3, seed=0)
    shares = [list(dict.fromkeys(task.image_index for task in share.tasks)) for share in plans]
    assert sorted(map(len, shares)) == [3, 3, 4]
    assert sorted(chain.from_iterable(shares)) == list(range(10))
    assert shares[0] != [0, 3, 6, 9]
    assert all(
        [u.order_index for u in share.tasks] == sorted(u.order_index for u in share.tasks)
        for share in plans
    )
    assert plans == plan.deal(plan, 3, seed=0) != plan.deal(plan, 3, seed=1)


def test_batches_are_full_where_they_can_be() -> None:
    sizes = Counter(len(group) for group in plan_of(images=7, batch=3).batches())
    cells = len(plan_of().cells)
    assert sizes == {3: 2 * cells, 1: cells}


def test_several_batches_are_an_axis() -> None:
    plan = plan_of(images=6, batch="1,4")
    single = plan_of(images=6)
    ids = [f"{cell.cell_id}-batch{batch}" for cell, batch in product(single.cells, (1, 4))]
    assert [cell.cell_id for cell in plan.cells] == ids
    assert {cell.columns()["batch"] for cell in plan.cells} == {1, 4}
    sizes = Counter((group[0].cell.batch, len(group)) for group in plan.batches())
    assert sizes == {
        (1, 1): 6 * len(single.cells),
        (4, 4): len(single.cells),
        (4, 2): len(single.cells),
    }
    # The same prompts and seeds with every batch, so that its cells are compared prompt by prompt.
    seeds = {
        batch: {(task.prompt.id, task.seed) for task in plan.tasks if task.cell.batch == batch}
        for batch in (1, 4)
    }
    assert seeds[1] == seeds[4]
    assert len(seeds[1]) == 6


def test_a_single_batch_size_changes_no_id() -> None:
    assert [cell.cell_id for cell in plan_of(batch=4).cells] == [
        cell.cell_id for cell in plan_of().cells
    ]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_texts_that_are_no_shard_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be i/n with i from 1 to n"):
        parse_shard(text)
    assert parse_shard("2/8") == Shard(2, 8)


def test_a_text_that_occurs_twice_gets_a_seed_for_each_time() -> None:
    prompts = [Prompt("a", "f:1"), Prompt("b", "f:2"), Prompt("a", "f:3")]
    plan = plan_of(prompts, images=6)
    tasks = [task for task in plan.tasks if task.cell == plan.cells[0]]
    assert [(task.prompt.source, task.repeat) for task in tasks] == [
        ("f:1", 0),
        ("f:2", 0),
        ("f:3", 1),
        ("f:1", 2),
        ("f:2", 1),
        ("f:3", 3),
    ]
    assert len({task.seed for task in tasks}) == 6
    repeated = plan_of(prompts, images=4, repeats=3).tasks
    assert len({task.key for task in repeated}) == len(repeated)
