"""The four tables: columns of the schema, figures by hand, what is missing stays empty."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from lantern_bench.analysis.cells import COLUMNS_READ, run_cells
from lantern_bench.analysis.tables import NAMES, tables_of, write_tables
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.format_tables import readable
from lantern_bench.storage.run_directory import load_runs
from lantern_bench.storage.schema import (
    OPTIONAL_COLUMNS,
    columns,
    csv_text,
    frame,
    write_csv,
)
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import (
    AR,
    LOOSE,
    STRICT,
    WALKS,
    build_tables,
    make_record,
    make_records,
    make_scores,
    run_of,
    token_scores,
    write_run,
)


def read_tables(run):
    (data,) = load_runs([run]).values()
    return tables_of(data)


def _row(table, cell):
    return table.set_index("cell_id").loc[cell.cell_id]


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_the_schemas(tables, name):
    assert list(tables[name].columns) == [column.name for column in columns(name)]
    kinds = {"string": "string", "int": "Int64", "float": "float64"}
    assert [str(kind) for kind in tables[name].dtypes] == [
        kinds[column.dtype] for column in columns(name)
    ]
    assert len(tables[name])


def test_tables_need_only_the_columns_that_are_read(tmp_path):
    records = make_records()
    run = write_run(tmp_path / "run", records, make_scores(records))
    (data,) = load_runs([run], COLUMNS_READ).values()
    assert set(data.records.columns) == set(COLUMNS_READ)
    expected = read_tables(run)
    written = write_tables(run)
    for name in NAMES:
        assert written[name].equals(expected[name])


def test_speed_by_hand(tables):
    row = _row(tables["speed"], STRICT)
    assert (row["images"], row["failed"]) == (4, 0)
    assert row["latency_s"] == pytest.approx(0.645)
    assert row["tokens_per_s"] == pytest.approx(4 * 7 / 2.58)
    assert row["speedup"] == pytest.approx((1.2 + 1.3 + 1.4 + 1.5) / 2.58)  # ratio of sums
    assert row["step_compression"] == pytest.approx(7 / 4)  # 7 tokens, 3 steps and the prefill
    assert row["mean_accepted_length"] == pytest.approx(6 / 3)
    assert row["accepted_drafts"] == pytest.approx(1.0)
    assert row["acceptance_rate"] == pytest.approx(3 / 5)
    assert row["target_forwards"] == 4
    assert row["draft_ms"] == pytest.approx(1000 * 0.2 * 2.58 / 12)
    assert math.isnan(row["peak_memory_mb"])


def test_ar_is_exactly_one(tables):
    row = _row(tables["speed"], AR)
    for name in ("speedup", "mean_accepted_length", "step_compression"):
        assert row[name] == row[f"{name}_low"] == row[f"{name}_high"] == 1.0
    assert row["accepted_drafts"] == 0
    assert math.isnan(row["acceptance_rate"])


def test_failed_images_are_counted_and_left_out(tables):
    row = _row(tables["speed"], LOOSE)
    assert (row["images"], row["failed"]) == (3, 1)
    # over the prompts that both have
    assert row["speedup"] == pytest.approx((1.2 + 1.3 + 1.4) / 1.2)
    assert _row(tables["summary"], LOOSE)["failed"] == 1
    assert _row(tables["quality"], LOOSE)["images"] == 3


def test_uncut_mean_weighs_by_steps_and_peak_memory_is_the_largest():
    short = make_record(
        cell=STRICT, prompt=0, walks=[[0]], seconds=1.0, mal_uncut=4.0, peak_memory_bytes=3_000_000
    )
    long = make_record(
        cell=STRICT,
        prompt=1,
        walks=[[-1]] * 3,
        seconds=1.0,
        mal_uncut=1.0,
        peak_memory_bytes=5_000_000,
    )
    row = _row(build_tables([short, long])["speed"], STRICT)
    assert row["mal_uncut"] == pytest.approx((4 + 3) / 4)
    assert row["peak_memory_mb"] == 5.0


def test_no_speedup_without_a_baseline():
    row = _row(
        build_tables([make_record(cell=STRICT, prompt=0, walks=WALKS, seconds=1.0)])["speed"],
        STRICT,
    )
    assert math.isnan(row["speedup"])
    assert "no ar cell" in row["note"]


def test_baseline_has_the_closest_settings():
    plain = Decoding(mode="ar", cfg_scale=1, cfg_default=2)
    warm = Decoding(mode="ar", temperature=0.5, cfg_scale=2, cfg_default=2)
    greedy = Decoding(mode="speculative", tree="small-7", temperature=0, cfg_scale=2, cfg_default=2)
    records = []
    for prompt in range(3):
        records += [
            make_record(cell=plain, prompt=prompt, walks=[[]] * 6, seconds=9.0),
            make_record(cell=warm, prompt=prompt, walks=[[]] * 6, seconds=3.0),
        ]
        records += [
            make_record(cell=AR, prompt=prompt, walks=[[]] * 6, seconds=2.0),
            make_record(cell=greedy, prompt=prompt, walks=WALKS, seconds=1.0),
        ]
        records += [make_record(cell=STRICT, prompt=prompt, walks=WALKS, seconds=1.0)]
    speed = build_tables(records)["speed"]
    assert _row(speed, STRICT)["speedup"] == pytest.approx(2.0)
    assert _row(speed, greedy)["speedup"] in (pytest.approx(2.0), pytest.approx(3.0))
    assert "speedup against ar with temperature=" in _row(speed, greedy)["note"]
    assert _row(speed, warm)["speedup"] == 1.0
    only_plain = [row for row in records if row["cell_id"] in (plain.cell_id, STRICT.cell_id)]
    assert math.isnan(_row(build_tables(only_plain)["speed"], STRICT)["speedup"])


def test_greedy_cells_are_compared_with_greedy_ar():
    """Filters have no effect on greedy decoding, and do not lead to another baseline."""
    sampling = {"cfg_scale": 2, "cfg_default": 2}
    greedy_ar = Decoding(mode="ar", temperature=0, **sampling)
    greedy = Decoding(
        mode="speculative", tree="small-7", temperature=0, top_k=100, top_p=0.9, **sampling
    )
    filtered = Decoding(mode="ar", top_k=100, top_p=0.9, **sampling)
    records = []
    for prompt in range(3):
        records += [
            make_record(cell=AR, prompt=prompt, walks=[[]] * 6, seconds=2.0),
            make_record(cell=greedy_ar, prompt=prompt, walks=[[]] * 6, seconds=3.0),
        ]
        records += [
            make_record(cell=greedy, prompt=prompt, walks=WALKS, seconds=1.0),
            make_record(cell=filtered, prompt=prompt, walks=[[]] * 6, seconds=4.0),
        ]
    row = _row(build_tables(records)["speed"], greedy)
    assert row["speedup"] == pytest.approx(3.0)
    assert "speedup against" not in str(row["note"])


def test_untimed_run_is_empty_not_zero():
    records = [
        make_record(cell=cell, prompt=n, walks=[[]] if cell is AR else WALKS, seconds=None)
        for cell, n in product((AR, STRICT), range(2))
    ]
    row = _row(build_tables(records)["speed"], STRICT)
    assert "not timed" in row["note"]
    for name in ("latency_s", "tokens_per_s", "speedup", "speedup_over_lossless", "draft_ms"):
        assert math.isnan(row[name])
    assert not isinstance(row["lossless_cell"], str)
    assert row["mean_accepted_length"] == 2.0


def test_quality_by_hand(tables):
    row = _row(tables["quality"], STRICT)
    assert row["clip_score"] == pytest.approx(0.3015)
    assert row["clip_score_low"] < 0.3015 < row["clip_score_high"]
    assert row["prompt_accuracy"] == 0.75
    assert math.isnan(row["fid"])
    assert row["note"].split(" | ")[0] == "fid needs 128 images, twice its features; there are 4"
    assert (row["fid_features"], row["clip_model"]) == (
        "lanterns-features-64@abcd",
        "tiny-clip@1234",
    )
    assert row["neighbour_mass"] == 0.0
    assert _row(tables["quality"], LOOSE)["neighbour_mass"] == pytest.approx(
        0.01
    )  # per accepted draft


def _with_ar_spread(records, **figures):
    """Scores with the spread of ar: fid of ar 10, of the strict cell 12, of the loose one 8."""
    scores = make_scores(records)
    for row in scores:
        if row["level"] == "cell":
            row |= {
                "fid": {AR.cell_id: 10.0, STRICT.cell_id: 12.0, LOOSE.cell_id: 8.0}[row["cell_id"]],
                "n": 4,
            }
    spread = {
        "level": "ar_spread",
        "protocol": "embedded",
        "cell_id": AR.cell_id,
        "n": 4,
        "reference": "r",
        "ar_spread_sets": 3,
    }
    return [*scores, {**spread, "fid": 10.5, "fid_low": 9.0, "fid_high": 12.5, **figures}]


def test_emitted_tv_is_a_figure_per_token(tables):
    quality = tables["quality"].set_index("cell_id")
    assert list(quality["output"]) == ["lossless", "lossless", "relaxed"]
    assert list(quality["emitted_tv"]) == pytest.approx([0.0, 0.0, 0.1])
    assert quality["emitted_tv_high"][STRICT.cell_id] == 0.0
    assert not quality["note"].str.contains("emitted").any()


@pytest.mark.parametrize(
    ("cell", "without", "note"),
    [
        (LOOSE, 2, "emitted TV of 2 of 4 images"),
        (LOOSE, 4, "no emitted TV: not recorded by the version that decoded"),
        (STRICT.changed(rule="block", tree="chain-4"), 4, "the rule block decides on several"),
        (STRICT.changed(temperature=0.0), 4, "no emitted TV: temperature 0"),
        (LOOSE.changed(residual="official"), 4, "no emitted TV: residual official"),
    ],
)
def test_a_missing_emitted_tv_says_why(cell, without, note):
    """Also in a run that an earlier version began and this one finished."""
    records = []
    for prompt in range(4):
        record = make_record(cell=cell, prompt=prompt, walks=[[0, -1]], seconds=1.0)
        if prompt < without:
            del record["emitted_tv"]
        records.append(record)
    (row,) = build_tables(records)["quality"].to_dict("records")
    assert (row["emitted_tv"] >= 0) == (without == 2)
    assert note in row["note"]


def test_a_figure_is_within_or_outside_the_spread_of_ar():
    records = make_records()
    tables = build_tables(records, _with_ar_spread(records))
    quality = tables["quality"]
    assert [_row(quality, cell)["fid_verdict"] for cell in (STRICT, LOOSE)] == ["within", "outside"]
    assert _row(tables["summary"], LOOSE)["fid_verdict"] == "outside", "a gain is drift too"
    notes = " ".join(readable(tables["summary"], "summary").notes)
    assert (
        "fid against ar's own spread (same prompts, other seeds): "
        f"outside are {LOOSE.cell_id} (fid); of all" in notes
    )
    # The longer side of the interval is 2 long: 1.96 standard errors, and power .8 takes .84 more.
    assert _row(quality, STRICT)["fid_detectable"] == pytest.approx(2 * 2.8016 / 1.96, abs=1e-4)
    assert "no shift is detected at 4 images; 80% power detects fid 2.9." in notes
    assert (_row(quality, LOOSE)["fid_ar_spread_low"], _row(quality, LOOSE)["ar_spread_sets"]) == (
        9.0,
        3,
    )
    assert quality["fid_verdict"].isna().sum() == 1
    assert quality["kid_verdict"].isna().all()


@pytest.mark.parametrize("change", [{"n": 3}, {"reference": "other"}])
def test_the_spread_of_another_measurement_judges_nothing(change):
    records = make_records()
    quality = build_tables(records, _with_ar_spread(records, **change))["quality"]
    assert quality["fid_verdict"].isna().all()
    assert "no verdicts: the spread is measured on ar with" in _row(quality, STRICT)["note"]


def test_a_run_without_other_seeds_says_so():
    records = make_records()
    quality = build_tables(records, _with_ar_spread(records)[:-1])["quality"]
    assert quality["fid_verdict"].isna().all()
    assert "no ar cells with other seeds" in _row(quality, STRICT)["note"]
    assert "seeds" not in str(_row(quality, AR)["note"])


def test_other_seeds_of_ar_have_rows_and_spreads_of_their_own():
    again = Decoding(mode="ar", cfg_scale=2, cfg_default=2, seed_set=1)
    records = [
        *make_records(),
        *(
            make_record(cell=again, prompt=prompt, walks=[[]] * 6, seconds=1.0)
            for prompt in range(4)
        ),
    ]
    scores = _with_ar_spread(records[:12])
    scores += [{**row, "cell_id": again.cell_id} for row in scores if row["cell_id"] == AR.cell_id]
    quality = build_tables(records, [row for row in scores if row["level"] != "image"])["quality"]
    assert list(quality["cell_id"])[:2] == ["ar-t1", "ar-t1-seedset1"]
    assert list(quality["fid_ar_spread_high"]) == [12.5] * 4
    assert (
        build_tables(records)["speed"].set_index("cell_id")["speedup"][
            "speculative-static-small-7-t1"
        ]
        > 1
    )


def test_scores_are_compared_with_ar_by_prompt():
    records = make_records()
    scores = make_scores(records)
    for row in scores:
        if row["level"] == "image" and row["cell_id"] == STRICT.cell_id:
            row["clip_score"] += 0.01 * (1 + float(row["prompt_accuracy"]))
    row = _row(build_tables(records, scores)["quality"], STRICT)
    assert row["clip_score_vs_ar"] == pytest.approx(0.01 * 1.75)
    assert row["clip_score_vs_ar_low"] < 0.0175 < row["clip_score_vs_ar_high"]
    assert row["clip_score_vs_ar_p"] == pytest.approx(2 / 2**4), (
        "all four prompts gain: two of 16 exchanges"
    )
    assert (row["prompt_accuracy_vs_ar"], row["prompt_accuracy_vs_ar_p"]) == (0.0, 1.0)
    assert math.isnan(_row(build_tables(records, scores)["quality"], AR)["clip_score_vs_ar"])


@pytest.mark.parametrize("is_complete", [True, False])
def test_every_complete_set_of_ar_is_the_baseline(is_complete):
    """The second set is .02 above the first: a cell .01 above that differs from their mean by
    nothing.
    """
    again = Decoding(mode="ar", cfg_scale=2, cfg_default=2, seed_set=1)
    records = [
        *make_records(),
        *(
            make_record(cell=again, prompt=prompt, walks=[[]] * 6, seconds=1.0)
            for prompt in range(3 + is_complete)
        ),
    ]
    scores = make_scores(records)
    for row in scores:
        if row["level"] == "image":
            row["clip_score"] += {STRICT.cell_id: 0.01, again.cell_id: 0.02}.get(
                row["cell_id"], 0.0
            )
    row = _row(build_tables(records, scores)["quality"], STRICT)
    assert row["clip_score_vs_ar"] == pytest.approx(0.0 if is_complete else 0.01)
    assert row["ar_sets"] == 1 + is_complete
    assert row["clip_score_vs_ar_p"] == pytest.approx(1.0 if is_complete else 2 / 2**4)


def test_one_quality_row_for_each_protocol():
    records = make_records()
    scores = make_scores(records)
    again = [
        {**row, "protocol": "full", "extractor": "inception", "clip_model": "ViT"} for row in scores
    ]
    tables = build_tables(records, scores + again)
    assert list(tables["quality"]["protocol"]) == ["embedded", "full"] * 3
    assert list(tables["summary"]["fid_features"]) == ["lanterns-features-64@abcd", "inception"] * 3


def test_unscored_cells_and_images_say_so():
    records = make_records()
    scores = [
        row
        for row in make_scores(records)
        if row["cell_id"] == STRICT.cell_id and row["level"] == "image"
    ]
    quality = build_tables(records, scores[:3])["quality"]
    assert _row(quality, AR)["note"] == "not scored"
    assert _row(quality, AR)["images"] == 0
    assert _row(quality, STRICT)["note"] == "3 of 4 images scored"


def test_without_scores_of_pictures_the_images_of_the_distance_are_counted():
    records = [record for record in make_records() if record["cell_id"] == STRICT.cell_id]
    of_tokens = list(map(token_scores, records))
    assert build_tables(records, of_tokens[:3])["quality"]["images"].tolist() == [3]
    of_pictures = [row for row in make_scores(records) if row["level"] == "image"]
    both = build_tables(records, of_tokens + of_pictures[:2])["quality"]
    assert both["images"].tolist() == [2]
    assert both["distance"].notna().all()


def test_last_score_counts():
    records = make_records()
    scores = make_scores(records)
    tables = build_tables(records, [*scores, {**scores[-1], "recall": 0.5}])
    assert tables["quality"]["recall"].iloc[-1] == 0.5


def test_parameters_as_text(tables):
    greedy = Decoding(
        mode="speculative", drafting="dynamic", temperature=0, cfg_scale=2, cfg_default=2
    )
    records = [*make_records(), make_record(cell=greedy, prompt=0, walks=WALKS, seconds=1.0)]
    summary = build_tables(records)["summary"].set_index("cell_id")
    assert (
        tables["summary"].set_index("cell_id").loc[LOOSE.cell_id, "parameters"]
        == "small-7 k=10 lambda=2"
    )
    assert summary.loc[greedy.cell_id, "parameters"] == "dynamic 58n5d10b T=0"
    assert summary.loc[STRICT.cell_id, "parameters"] == "small-7"


def test_order_is_fixed():
    """Modes as the papers list them, parameters by value and not as text."""
    cells = [Decoding(mode="lantern", delta=delta) for delta in (0.05, 0.1, 0.005)]
    records = [
        make_record(cell=cell, prompt=n, walks=WALKS, seconds=1.0)
        for cell, n in product((LOOSE, *cells, STRICT, AR), range(2))
    ]
    random.Random(1).shuffle(records)
    speed = build_tables(records)["speed"]
    assert list(speed["mode"]) == [
        "ar",
        "speculative",
        "lantern",
        "lantern",
        "lantern",
        "lantern++",
    ]
    assert list(speed["delta"].dropna()) == [0.005, 0.05, 0.1]


def test_files_do_not_depend_on_the_order_of_records(tmp_path):
    records = make_records()
    scores = make_scores(records)
    ordered = write_run(tmp_path / "one", records, scores)
    shuffled = records[:]
    random.Random(2).shuffle(shuffled)
    shuffled_run = write_run(tmp_path / "two", shuffled, scores[::-1])
    write_tables(ordered)
    write_tables(shuffled_run)
    for name in NAMES:
        content = (ordered / f"{name}.csv").read_bytes()
        assert content == (shuffled_run / f"{name}.csv").read_bytes()
        assert b"nan" not in content
        assert b"inf" not in content.replace(b"info", b"").replace(b"fid_infinity", b"")
        declared = [column.name for column in columns(name)]
        header = content.decode().splitlines()[0].split(",")
        assert header == [column for column in declared if column in header]


def test_files_lack_parameters_and_metrics_that_no_cell_has(tmp_path: Path) -> None:
    records = make_records()
    run = write_run(tmp_path / "run", records, make_scores(records))
    write_tables(run)
    for name in ("speed", "quality", "summary"):
        table = pd.read_csv(run / f"{name}.csv")
        empty = {column for column in table if table[column].isna().all()}
        assert not empty & OPTIONAL_COLUMNS
        assert table["cell_id"].notna().all()
    assert {"speedup_low", "note"} <= set(pd.read_csv(run / "summary.csv"))
    assert "strength" not in pd.read_csv(run / "speed.csv")


def test_six_significant_digits(tmp_path):
    table = frame("acceptance", [{"rate": 1 / 3, "offered": 1234567, "note": None}])
    write_csv(table, tmp_path / "a.csv")
    cells = dict(
        zip(
            *(line.split(",") for line in (tmp_path / "a.csv").read_text().splitlines()),
            strict=True,
        )
    )
    assert (cells["rate"], cells["offered"], cells["note"], cells["rate_low"]) == (
        "0.333333",
        "1234567",
        "",
        "",
    )


def test_unknown_column_is_refused():
    with pytest.raises(ValueError, match="not in the schema of speed: bogus"):
        frame("speed", [{"bogus": 1}])


def test_a_run_without_records_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [], [])
    with pytest.raises(RefusedError, match="no records"):
        read_tables(run)
    with pytest.raises(UserError, match="not a run"):
        read_tables(tmp_path)


def test_a_run_whose_scores_are_in_its_summary_alone_keeps_them(tmp_path):
    records = make_records()
    run = write_run(tmp_path / "run", records, make_scores(records))
    summary = write_tables(run)["summary"]
    for name in ("records.jsonl", "scores.jsonl", "quality.csv"):
        (run / name).unlink()
    (data,) = load_runs([run], tables_suffice=True).values()
    kept = tables_of(data)["summary"]
    assert summary["clip_score"].notna().any()
    assert csv_text(kept) == csv_text(summary)


def test_a_run_without_the_metric_speed_is_not_timed(tmp_path):
    records = make_records()
    timed = write_run(
        folder=tmp_path / "timed",
        records=records,
        scores=[],
        experiment={"metrics": ["speed", "quality"]},
    )
    scored = write_run(
        folder=tmp_path / "scored", records=records, scores=[], experiment={"metrics": ["quality"]}
    )
    before = read_tables(timed)["speed"]
    after = read_tables(scored)["speed"]
    assert before["speedup"].notna().all()
    assert after["speedup"].isna().all()
    assert after["latency_s"].isna().all()
    assert after["note"].str.contains("not timed").all()
    assert after["mean_accepted_length"].equals(before["mean_accepted_length"])


def test_records_of_a_cell_are_ordered_by_prompt_and_lack_its_settings() -> None:
    records = [
        make_record(cell=AR, prompt=prompt, walks=WALKS, seconds=1.0) for prompt in (3, 1, 0, 2)
    ]
    (cell,) = run_cells(run_of(records))
    prompts = cell.completed["prompt_id"].tolist()
    assert prompts == sorted(prompts)
    assert cell.images.index.get_level_values("prompt_id").tolist() == prompts
    assert "mode" not in cell.completed
    assert cell.columns["mode"] == "ar"
