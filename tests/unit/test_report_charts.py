"""Charts, their scales, and tables of a report."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from report_pages import make_run

from torsh_trainer.report.charts import Curve, axes_of, charts_of, smooth, thin_out
from torsh_trainer.report.differences import ABSENT, differences, hints
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.runs import Point, read_run, read_runs
from torsh_trainer.report.scales import (
    Scale,
    along,
    labels,
    linear,
    logarithmic,
    ticks,
    time_ticks,
)
from torsh_trainer.report.tables import direction, results


def points(values):
    return [Point(i, 8 * i, 0.1 * i, value) for i, value in enumerate(values, start=1)]


def test_a_reduced_curve_keeps_ends_extremes_and_gaps():
    values = [math.sin(i / 50) for i in range(10_000)]
    values[1234], values[4321], values[777] = 9.0, -9.0, None
    kept = thin_out(points(values), buckets=100)
    assert len(kept) <= 203
    assert {kept[0].step, kept[-1].step, 1235, 4322, 778} <= {p.step for p in kept}
    assert [p.step for p in kept] == sorted({p.step for p in kept})


def test_a_short_curve_is_not_reduced():
    short = points([1.0, 2.0, 3.0])
    assert thin_out(short, buckets=2) == short


def test_smoothing_keeps_a_straight_line_and_a_gap():
    line = smooth(points([float(i) for i in range(50)]), half_width=3)
    assert [p.value for p in line[:-3]] == pytest.approx([float(i) for i in range(47)])
    gapped = smooth(points([1.0, 1.0, None, 1.0, 1.0]), half_width=1)
    assert [p.value for p in gapped] == [1.0, 1.0, None, 1.0, 1.0]


def test_a_long_noisy_curve_is_smoothed_with_the_raw_one_behind_it(tmp_path):
    runs = [read_run(make_run(tmp_path / "a", steps=200), name="a")]
    chart = next(chart for chart in charts_of(runs) if chart.key == "grad_norm")
    assert [curve.faint for curve in chart.curves] == [True, False]
    assert chart.note == "smoothed over 5 reports, faint: as logged"
    assert list(chart.curves[0].points) == runs[0].curve("train", "grad_norm")


def test_more_than_three_runs_have_their_evaluation_loss_in_a_chart_of_its_own(tmp_path):
    for name in "abcd":
        make_run(tmp_path / name, steps=20)
    few, many = read_runs([tmp_path / n for n in "abc"]), read_runs([tmp_path])
    assert "eval-loss" not in {chart.key for chart in charts_of(few)}
    assert "eval-loss" in {chart.key for chart in charts_of(many)}


def test_a_chart_over_two_decades_takes_a_log_scale(tmp_path):
    make_run(tmp_path / "a", scale=1.0, steps=20)
    make_run(tmp_path / "b", scale=500.0, steps=20)
    together = {chart.key: chart for chart in charts_of(read_runs([tmp_path]))}
    alone = {chart.key: chart for chart in charts_of(read_runs([tmp_path / "a"]))}
    assert together["loss"].log
    assert not alone["loss"].log


def test_the_share_of_waiting_is_of_the_step(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=20), name="a")
    chart = next(chart for chart in charts_of([run]) if chart.key == "data_wait_s")
    (curve,) = chart.curves
    assert isinstance(curve, Curve)
    assert [p.value for p in curve.points] == pytest.approx([0.1] * 20)


def test_tokens_take_the_place_of_samples_in_the_chart_of_speed(tmp_path):
    run = make_run(tmp_path / "a", steps=5)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "tokens_per_s": 32 * row["samples_per_s"]}) for row in rows[:5]]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    read = read_run(run, name="a")
    keys = {chart.key for chart in charts_of([read])}
    assert "tokens_per_s" in keys
    assert "samples_per_s" not in keys
    columns, (row,) = results([read], OptionCatalog())
    assert dict(zip(columns, row, strict=True))["throughput"].text == "3,840 tokens/s"


def test_an_axis_of_samples_is_offered_where_batches_differ(tmp_path):
    make_run(tmp_path / "a", steps=10, batch_size=8)
    make_run(tmp_path / "b", steps=10, batch_size=8)
    make_run(tmp_path / "c", steps=10, batch_size=32)
    assert axes_of(read_runs([tmp_path / "a", tmp_path / "b"])) == ["step", "time"]
    assert axes_of(read_runs([tmp_path])) == ["step", "samples", "time"]


@pytest.mark.parametrize(
    "scale",
    [
        linear([0.0, 1.0], 0, 100),
        linear([3.0, 3.0], 0, 100),
        linear([0.0], 0, 100, zero=True),
        linear([1e-7, 3e-7], 0, 100),
        linear([-5.0, 1e9], 0, 100),
        logarithmic([1e-6, 1e3], 0, 100),
        logarithmic([0.9, 101.0], 0, 100),
        logarithmic([3e-7], 0, 100),
        along([7.0], 0, 100),
        along([5000.0, 10000.0], 0, 100),
    ],
)
def test_ticks_are_few_within_the_scale_and_the_scale_maps_its_ends(scale):
    found = ticks(scale, count=5)
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))
    assert all(0 - 1e-6 <= scale(tick) <= 100 + 1e-6 for tick in found)
    assert scale(scale.low) == pytest.approx(0)
    assert scale(scale.high) == pytest.approx(100)


@pytest.mark.parametrize(
    ("seconds", "step"), [(50, 10), (100, 15), (3600, 600), (40_000, 7200), (900_000, 172_800)]
)
def test_ticks_of_time_stand_at_round_times(seconds, step):
    found = time_ticks(Scale(0, seconds, 0, 100), count=7)
    assert {b - a for a, b in pairwise(found)} == {step}


# -- tables ---------------------------------------------------------------------------------------


def test_the_best_of_each_metric_is_marked_among_runs_that_are_done(tmp_path):
    make_run(tmp_path / "a", scale=1.0)
    make_run(tmp_path / "b", scale=2.0)
    make_run(tmp_path / "c", scale=0.1, error={"type": "E", "message": "died"})
    columns, rows = results(read_runs([tmp_path]), OptionCatalog())
    for name in ("eval accuracy", "eval loss", "train loss"):
        assert [row[columns.index(name)].best for row in rows] == [True, False, False], name
    assert not any(row[columns.index("steps")].best for row in rows)


@pytest.mark.parametrize(
    ("metric", "way"),
    [("eval accuracy", 1), ("test loss", -1), ("eval word_error", -1), ("eval power", 0)],
)
def test_which_way_a_metric_is_better_follows_from_its_name(metric, way):
    assert direction(metric) == way


def test_a_key_that_one_run_lacks_is_a_difference_and_its_own_folder_is_none(tmp_path):
    make_run(tmp_path / "a", config={"run_dir": "runs/a", "extra": 1})
    make_run(tmp_path / "b", config={"run_dir": "runs/b"})
    found = differences(read_runs([tmp_path]), OptionCatalog())
    assert found.listed == {"extra": [1, ABSENT]}
    assert (found.folded, found.agreeing) == ({}, 3)


def test_hints_name_the_class_and_leave_out_the_knobs_that_come_with_it(tmp_path):
    for strategy, knob in (("ddp", "bucket_cap_mb"), ("fsdp", "reshard")):
        node = {"_target_": f"package.{strategy}.{strategy.upper()}", knob: 1}
        make_run(tmp_path / strategy, config={"strategy": node})
    assert hints(read_runs([tmp_path]), OptionCatalog()) == ["strategy=DDP", "strategy=FSDP"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([2.304, 2.306, 2.308], ["2.304", "2.306", "2.308"]),
        ([2.1, 2.2, 2.3], ["2.1", "2.2", "2.3"]),
        ([1500.2, 1500.4, 1500.6], ["1,500.2", "1,500.4", "1,500.6"]),
        ([0.0, 20000.0, 40000.0], ["0", "20k", "40k"]),
        ([123450.0, 123460.0], ["123.45k", "123.46k"]),
    ],
)
def test_labels_have_the_digits_that_tell_them_apart(values, said):
    assert labels(values) == said
