"""The columns: complete, declared once, in the order of the design.

The list of records' columns is written out, since files of earlier runs must stay readable.
"""

from __future__ import annotations

import re

import pytest

from lantern_bench.methods.metrics import Metric
from lantern_bench.storage import schema
from lantern_bench.storage.schema import CELL_COLUMNS, TABLES, columns
from lantern_bench.utils.errors import UserError
from scripts.docs.results_format import PAGE, families

RECORDS = """schema_version, record_key, cell_id, mode, drafting, tree, rule, neighbours,
neighbour_metric, delta, lambda, strength, decay, cluster, probability_gap, code_gap,
entropy_scale, epsilon, alpha, tv_limit, entropy_weight, added, bound, residual, temperature, top_k,
top_p, cfg_scale, seed_set,
batch, model, prompt_id, prompt, prompt_source, prompt_metadata, repeat, seed, order_index, process,
device, device_id, clock_mhz, clock_max_mhz, driver, status, error, decoded_together,
tokens, target_forwards, drafter_forwards, start_per_step, committed_per_step, accepted_per_step,
offered_depth_per_step, child_rank_per_step, mean_accepted_length, mal_uncut, step_compression,
seconds, draft_seconds, target_seconds, verify_seconds, other_seconds, pixel_seconds, cpu_seconds,
waited_seconds, involuntary_switches, steal_seconds, disturbed, attempts, peak_memory_bytes,
neighbour_mass, neighbour_mass_tried, emitted_tv, tokens_sha256, image_sha256, image, checksum"""


def test_records_have_the_columns_of_the_design_in_its_order() -> None:
    assert [column.name for column in columns("records")] == [
        name.strip() for name in RECORDS.split(",")
    ]


@pytest.mark.parametrize("table", TABLES)
def test_columns_are_unique_and_explained(table: str) -> None:
    names = [column.name for column in columns(table)]
    assert len(set(names)) == len(names)
    for column in columns(table):
        assert column.dtype in (
            "string",
            "int",
            "float",
            "bool",
            "object",
            "list[int]",
            "list[list[int]]",
            "list[float]",
        )
        assert column.name.replace("_", "").islower()
        assert len(column.meaning) > 5


def test_a_name_has_one_type() -> None:
    types: dict[str, set[str]] = {}
    for name, table in TABLES.items():
        for column in table:
            # A mean in the table of speed and a count in records; a count in tables and a mark in
            # records.
            if (
                not (column.name.endswith("_forwards") and name == "speed")
                and column.name != "disturbed"
            ):
                types.setdefault(column.name, set()).add(column.dtype)
    assert {name: kinds for name, kinds in types.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize("table", ["speed", "quality", "acceptance"])
def test_tables_of_cells_begin_with_the_cell(table: str) -> None:
    assert columns(table)[: len(CELL_COLUMNS)] == CELL_COLUMNS


def test_intervals_stand_beside_their_figure() -> None:
    for table in ("speed", "quality", "acceptance", "summary", "reproduction"):
        names = [column.name for column in columns(table)]
        for name in names:
            if name.endswith("_low"):
                index = names.index(name)
                assert names[index - 1 : index + 2] == [name[:-4], name, f"{name[:-4]}_high"]


@pytest.mark.parametrize("table", TABLES)
def test_the_page_of_formats_names_every_column(table: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {table}\n")[1].split("\n## ")[0]
    if tuple(column for column in columns(table) if column in CELL_COLUMNS) == CELL_COLUMNS:
        assert "\n- the columns of a cell\n" in section
        section += "".join(f"`{column.name}`" for column in CELL_COLUMNS)
    section = re.sub(r"`(\w*)`±", r"`\1`, `\1_low`, `\1_high`, `_low`, `_high`", section)
    for figure, *others in families(columns(table)):
        assert f"`{figure.name}`" in section
        assert [
            column
            for column in others
            if f"`{column.name.removeprefix(figure.name)}`" not in section
        ] == []


def test_unknown_table_lists_the_tables() -> None:
    with pytest.raises(UserError, match="unknown table 'sped'") as caught:
        columns("sped")
    assert "acceptance" in str(caught.value.advice)


def test_texts_of_a_metric_are_taken_as_they_are() -> None:
    extras = (("blur", "float", "", "share of pixels in {0, 1}"),)
    (column,) = schema._extras(Metric("sharpness", "how sharp", extras=extras))
    assert column.meaning == "share of pixels in {0, 1}"
