"""What a report makes visible: curves that coincide, the best run, what was asked for."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise

import pytest

from torsh_trainer.report.charts import Curve, charts_of
from torsh_trainer.report.page import page_of
from torsh_trainer.report.png import write_png
from torsh_trainer.report.runs import Point, Run
from torsh_trainer.report.together import TOLERANCE, caption, coincident, shares

LOSSES = [2.3, 1.7, 0.9, 0.4, 0.25, 0.21]


def curve(run, values, *, split="train", dashed=False, every_s=1.0):
    drawn = [Point(i, 8 * i, every_s * i, value) for i, value in enumerate(values)]
    return Curve(run, split, tuple(drawn), dashed=dashed)


def make_run(name, losses, *, evaluated=(), config=None, **result):
    """A run as read: a report of each loss, and ``evaluated`` as {step: {metric: value}}."""
    rows = [
        {"split": "train", "step": step, "elapsed_s": float(step), "loss": loss}
        for step, loss in enumerate(losses, start=1)
    ]
    rows += [{"split": "eval", "step": step, **numbers} for step, numbers in evaluated]
    return Run(
        name, path=name, rows=rows, result={"steps": len(losses), **result}, config=config or {}
    )


def draw(*runs):
    return page_of(runs, charts_of(runs), now=datetime(2031, 1, 31))


# -- curves that coincide -------------------------------------------------------------------------


def test_curves_within_the_tolerance_at_every_point_coincide():
    near = [value * (1 + 0.4 * TOLERANCE) for value in LOSSES]
    far = [*LOSSES[:-1], LOSSES[-1] * (1 + 2 * TOLERANCE)]
    curves = [curve(0, LOSSES), curve(1, far), curve(2, near)]
    assert coincident(curves, "step") == [[0, 2]]
    assert caption(curves, [[0, 2]], "abc") == "2 runs coincide: a, c (within 0.01% at every point)"


def test_any_two_that_are_said_to_coincide_are_within_the_tolerance():
    steps = [1 + 0.25 * TOLERANCE * i for i in range(-6, 7)]
    curves = [curve(i, [value * factor for value in LOSSES]) for i, factor in enumerate(steps)]
    for group in coincident(curves, "step"):
        values = [curves[i].points[0].value for i in group]
        assert max(values) - min(values) <= TOLERANCE * max(values)


def test_curves_of_equal_values_at_other_times_do_not_coincide_over_time():
    curves = [curve(0, LOSSES), curve(1, LOSSES, every_s=2.0)]
    assert coincident(curves, "step") == [[0, 1]]
    assert coincident(curves, "time") == []


def test_a_curve_that_ends_early_coincides_as_far_as_it_goes():
    curves = [curve(0, LOSSES[:4]), curve(1, LOSSES)]
    groups = coincident(curves, "step")
    assert groups == [[0, 1]]
    assert caption(curves, groups, "ab").endswith("(within 0.01%, as far as each goes)")


@pytest.mark.parametrize("values", [[], [1.0], [None, None], [2.3, None, 0.9, 0.4, 0.25, 0.21]])
def test_a_point_alone_and_a_gap_elsewhere_coincide_with_nothing(values):
    assert coincident([curve(0, LOSSES), curve(1, values), curve(2, values)][:2], "step") == []


def test_training_and_evaluation_never_coincide_and_are_told_apart_in_the_caption():
    curves = [curve(run, LOSSES) for run in range(3)]
    curves += [curve(run, LOSSES, split="eval", dashed=True) for run in range(2)]
    groups = coincident(curves, "step")
    assert groups == [[0, 1, 2], [3, 4]]
    told = caption(curves, groups, "abc")
    assert "3 runs coincide in train: a, b, c" in told
    assert "2 runs coincide in eval: a, b" in told


def test_a_caption_of_many_runs_names_the_first_few():
    curves = [curve(run, LOSSES) for run in range(12)]
    told = caption(curves, coincident(curves, "step"), [f"job{i}" for i in range(12)])
    assert told.startswith("12 runs coincide: job0, job1, job2, job3, job4, job5 and 6 more ")


@pytest.mark.parametrize("turns", [2, 3, 12])
@pytest.mark.parametrize("dashed", [False, True])
def test_every_curve_of_a_common_line_is_seen_on_an_equal_part_of_it(turns, dashed):
    curves = [curve(run, LOSSES, dashed=dashed) for run in range(turns)]
    found = shares(curves, [list(range(turns))])
    assert sorted(found) == list(range(turns))
    ends = []
    for share in found.values():
        on, off = share.dashes
        assert on + off == pytest.approx(turns * share.pitch)
        assert share.offset + on <= on + off + 1e-9
        ends.append((share.offset, share.offset + on))
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(ends))
    radii = [share.radius for share in found.values()]
    assert radii == sorted(set(radii), reverse=True)
    assert radii[0] <= 7.0


def test_the_page_says_how_many_runs_coincide_and_draws_them_in_turns():
    other = [2 * value for value in LOSSES]
    page = draw(make_run("a", LOSSES), make_run("b", LOSSES), make_run("<c>", other))
    by_step = page[page.index('aria-label="Training loss by step"') :]
    assert "2 runs coincide: a, b (within 0.01% at every point)" in by_step
    drawn = re.findall(
        r'data-run="(\d)"( data-share="0 14 14")?><path d="[^"]*"( style="[^"]*")?', by_step
    )[:3]
    assert drawn == [
        ("0", ' data-share="0 14 14"', ' style="stroke-dasharray:14 14;stroke-dashoffset:-0"'),
        ("1", ' data-share="0 14 14"', ' style="stroke-dasharray:14 14;stroke-dashoffset:-14"'),
        ("2", "", ""),
    ]


def test_a_name_in_a_caption_cannot_become_markup():
    page = draw(make_run("<i>a", LOSSES), make_run("b", LOSSES))
    assert "2 runs coincide: &lt;i&gt;a, b" in page


def test_runs_that_differ_are_said_to_coincide_nowhere():
    page = draw(make_run("a", LOSSES), make_run("b", LOSSES[::-1]))
    assert "coincide" not in page.replace("Curves that coincide draw", "")


def test_the_picture_draws_them_in_turns_and_says_so(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    runs = [make_run("a", LOSSES), make_run("b", LOSSES)]
    write_png(runs, charts_of(runs), tmp_path / "report.png")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == [
        "2 runs coincide: a, b (within 0.01% at every point)"
    ]
    assert [line.is_dashed() for line in axes.lines] == [True, True]
