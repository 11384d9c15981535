"""Plans: which images, with which seeds, in which order, and what a shard gets.

Seeds and keys never depend on an image's place in the plan.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import Plan, Prompt, Shard, make_plan, parse_shard, record_seed
from lantern_bench.config.values import Overrides
from lantern_bench.errors import UserError

PROMPTS = [Prompt("one red lantern"), Prompt("two"), Prompt("three")]


def plan(prompts: list[Prompt] = PROMPTS, **flags: int) -> Plan:
    return make_plan(
        load_experiment("lanterns", {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}, Overrides.from_flags(flags)),
        prompts,
    )


def test_prompt_ids_depend_on_the_text_alone() -> None:
    assert Prompt("one red lantern").id == "e9c9c5b78147"
    assert len({prompt.id for prompt in PROMPTS}) == 3


def test_images_go_through_the_prompts_and_then_repeat() -> None:
    made = plan(images=7)
    for cell in made.cells:
        mine = sorted((u for u in made.tasks if u.cell == cell), key=lambda u: u.image_index)
        assert [(PROMPTS.index(u.prompt), u.repeat) for u in mine] == [
            (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)
        ]  # fmt: skip
        assert [u.image for u in mine][:2] == [f"images/{cell.cell_id}/000000.png", f"images/{cell.cell_id}/000001.png"]


def test_repeats_make_the_list_again_with_fresh_seeds() -> None:
    made = plan(images=2, repeats=2)
    mine = [u for u in made.tasks if u.cell == made.cells[0]]
    assert [(u.prompt, u.repeat) for u in mine] == [(PROMPTS[0], 0), (PROMPTS[1], 0), (PROMPTS[0], 1), (PROMPTS[1], 1)]
    assert len({u.seed for u in mine}) == 4


def test_cells_are_interleaved_in_an_order_that_changes() -> None:
    made = plan(images=20)
    cells = len(made.cells)
    rounds = [made.tasks[start : start + cells] for start in range(0, len(made.tasks), cells)]
    orders = [tuple(task.cell.cell_id for task in one) for one in rounds]
    assert all(len({(task.prompt, task.repeat, task.seed) for task in one}) == 1 for one in rounds)
    assert all(len(set(order)) == cells for order in orders)
    assert len(set(orders)) > 10
    assert [task.order_index for task in made.tasks] == list(range(len(made.tasks)))
    first = Counter(order[0] for order in orders)
    assert max(first.values()) < 12


def test_the_order_follows_the_seed() -> None:
    assert plan(images=5).tasks == plan(images=5).tasks
    assert [u.cell for u in plan(images=5).tasks] != [u.cell for u in plan(images=5, seed=1).tasks]


def test_another_seed_set_makes_the_same_prompts_with_other_seeds(tmp_path: Path) -> None:
    (tmp_path / "seeds.yaml").write_text("model: lanterns\nimages: 3\ncells: [{mode: ar, seed_set: [0, 1]}]")
    made = make_plan(load_experiment(tmp_path / "seeds.yaml", {"lanterns": {}}), PROMPTS)
    first, second = ([u for u in made.tasks if u.cell.decoding.seed_set == n] for n in (0, 1))
    assert {u.cell.cell_id for u in second} == {"ar-t1-seedset1"} and "seed_set" not in first[0].cell.settings()
    assert [(u.prompt, u.repeat) for u in first] == [(u.prompt, u.repeat) for u in second]
    assert all(u.seed == record_seed(0, u.prompt.id, u.repeat) for u in first)
    assert not {u.seed for u in first} & {u.seed for u in second}


def test_seeds_do_not_depend_on_cells_order_or_number() -> None:
    for task in plan(images=7, seed=3).tasks:
        assert task.seed == record_seed(3, task.prompt.id, task.repeat)
    few, many = plan(images=2), plan(list(reversed(PROMPTS)), images=9)
    seeds = {(u.prompt.id, u.repeat): u.seed for u in many.tasks}
    assert all(seeds[u.prompt.id, u.repeat] == u.seed for u in few.tasks)


def test_a_prompt_that_comes_twice_counts_once() -> None:
    made = plan([*PROMPTS, PROMPTS[0]], images=4)
    assert sorted({(PROMPTS.index(u.prompt), u.repeat) for u in made.tasks}) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_without_prompts_there_is_no_plan() -> None:
    with pytest.raises(UserError, match="prompts held-out: holds no prompt"):
        plan([])


def test_no_number_of_images_is_every_prompt_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: lanterns\ncells: [{mode: ar}]")
    assert len(make_plan(load_experiment(path, {"lanterns": {}}), PROMPTS).tasks) == 3


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True))
def test_shards_share_the_work_and_keep_cells_of_a_prompt_together(images: int, count: int, batch: list[int]) -> None:
    made = make_plan(
        load_experiment("lanterns", {"lanterns": {}}, Overrides({"images": [images], "batch": batch})), PROMPTS
    )
    shards = [made.shard(Shard(index + 1, count)) for index in range(count)]
    together = [task for shard in shards for task in shard.tasks]
    assert len(together) == len(made.tasks)
    assert set(together) == set(made.tasks)
    for shard in shards:
        assert all(number == len(made.cells) for number in Counter(u.image_index for u in shard.tasks).values())
        for group in shard.batches():
            assert len({task.cell for task in group}) == 1
            assert len(group) <= group[0].cell.batch
        assert [task for group in shard.batches() for task in group] == list(shard.tasks)


def test_batches_are_full_where_they_can_be() -> None:
    sizes = Counter(len(group) for group in plan(images=7, batch=3).batches())
    cells = len(plan().cells)
    assert sizes == {3: 2 * cells, 1: cells}


def test_several_batches_are_an_axis() -> None:
    made = plan(images=6, batch="1,4")
    one = plan(images=6)
    assert [cell.cell_id for cell in made.cells] == [
        f"{cell.cell_id}-batch{batch}" for cell in one.cells for batch in (1, 4)
    ]
    assert {cell.columns()["batch"] for cell in made.cells} == {1, 4}
    sizes = Counter((group[0].cell.batch, len(group)) for group in made.batches())
    assert sizes == {(1, 1): 6 * len(one.cells), (4, 4): len(one.cells), (4, 2): len(one.cells)}
    # The same prompts and seeds with every batch, so that its cells are compared prompt by prompt.
    drawn = {batch: {(u.prompt.id, u.seed) for u in made.tasks if u.cell.batch == batch} for batch in (1, 4)}
    assert drawn[1] == drawn[4] and len(drawn[1]) == 6


def test_one_batch_changes_no_id() -> None:
    assert [cell.cell_id for cell in plan(batch=4).cells] == [cell.cell_id for cell in plan().cells]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="must be i/n with i from 1 to n"):
        parse_shard(text)


def test_a_shard_is_read() -> None:
    assert parse_shard("2/8") == Shard(2, 8)


def test_estimates() -> None:
    made = plan(images=2)
    assert made.estimate().seconds is None
    assert len(made.estimate({"ar-t1": 1.0}).unknown) == len(made.cells) - 1
    seconds = {cell.cell_id: 2.0 for cell in made.cells}
    everything = made.estimate(seconds)
    assert (everything.images, everything.to_do, everything.seconds) == (24, 24, 48.0)
    done = [(u.cell.cell_id, u.prompt.id, u.repeat) for u in made.tasks[:5]]
    rest = made.estimate(seconds, done)
    assert (rest.done, rest.to_do, rest.seconds) == (5, 19, 38.0)
    assert made.estimate(seconds, [*done, ("other", "x", 0)]).done == 5
