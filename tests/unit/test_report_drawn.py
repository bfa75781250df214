"""What a report makes visible: curves that coincide, the best run, what was asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime
from importlib.resources import files
from itertools import pairwise

import pytest
import yaml

from torsh_trainer.config.roots import find_roots
from torsh_trainer.report.charts import Curve, charts_of
from torsh_trainer.report.differences import ABSENT, differences, hints
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.page import page_of
from torsh_trainer.report.png import write_png
from torsh_trainer.report.runs import Point, Run, flat
from torsh_trainer.report.tables import ranking, results
from torsh_trainer.report.together import TOLERANCE, caption, coincident, shares

CONF = [root.conf for root in find_roots().all]
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
    return page_of(runs, charts_of(runs), now=datetime(2031, 1, 31), options=OptionCatalog(CONF))


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
    assert caption(curves, [list(range(7))], "abcdefghijkl").startswith(
        "7 runs coincide: a, b, c, d, e, f, g (within"
    )


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
    write_png(runs, charts_of(runs), tmp_path / "report.png", options=OptionCatalog())
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == [
        "2 runs coincide: a, b (within 0.01% at every point)"
    ]
    assert [line.is_dashed() for line in axes.lines] == [True, True]


# -- what was asked for ---------------------------------------------------------------------------


def of_option(group, name):
    """A group as a run's configuration holds it: an option of ours, nothing changed."""
    (folder,) = [folder for folder in CONF if (folder / group / f"{name}.yaml").is_file()]
    return {group: yaml.safe_load((folder / group / f"{name}.yaml").read_text())}


def with_config(name, *groups, **knobs):
    """A run of ``groups``, with dotted ``knobs`` set."""
    config = {key: value for group in groups for key, value in flat(group)}
    return make_run(name, LOSSES, config=config | knobs, strategy=None)


def cells(runs, column):
    columns, rows = results(runs, OptionCatalog(CONF), ranking(runs))
    return [row[columns.index(column)] for row in rows]


@pytest.mark.parametrize("name", ["auto", "single", "ddp", "fsdp", "gloo", "mpi", "deepspeed"])
def test_a_run_that_failed_shows_the_strategy_that_was_asked_for(name):
    failed = with_config("a", of_option("strategy", name))
    assert [cell.text for cell in cells([failed], "strategy")] == [name]


def test_a_run_that_names_no_strategy_shows_a_dash():
    assert [c.text for c in cells([make_run("a", LOSSES, strategy=None)], "strategy")] == [ABSENT]


def test_whatever_type_a_file_gives_a_value_the_page_is_drawn():
    odd = {"trainer.objective": ["a"], "trainer.objective_mode": {}, "strategy._target_": 7}
    runs = [
        make_run(name, LOSSES, config=odd, strategy=strategy)
        for name, strategy in (("a", 3), ("b", None))
    ]
    runs.append(make_run("c", LOSSES, config=odd, error={"message": [1], "fix": 2}))
    assert [cell.text for cell in cells(runs, "strategy")] == ["3", ABSENT, ABSENT]
    page = draw(*runs)
    assert "failed: [1]; 2" in page
    assert "Equal in <b>train loss</b>" in page


def test_that_a_run_failed_and_why_and_what_helps_is_one_line_for_all_that_it_befell():
    error = {"type": "E", "message": "no\nmemory", "fix": "use fsdp"}
    runs = [make_run(name, LOSSES, error=error) for name in ("a", "b")]
    assert "<p><b>a, b</b>: failed: no memory; use fsdp</p>" in draw(*runs)


# -- where configurations differ ------------------------------------------------------------------


def test_strategies_differ_by_their_names_and_their_defaults_are_folded():
    ddp, fsdp = of_option("strategy", "ddp"), of_option("strategy", "fsdp")
    runs = [with_config("a", ddp), with_config("b", fsdp)]
    found = differences(runs, OptionCatalog(CONF))
    assert found.listed == {"strategy": ["ddp", "fsdp"]}
    assert found.folded["strategy.bucket_cap_mb"] == [25.0, ABSENT]
    assert found.folded["strategy.cpu_offload"] == [ABSENT, False]
    assert hints(runs, OptionCatalog(CONF)) == ["strategy=ddp", "strategy=fsdp"]
    page = draw(*runs)
    assert "knobs that come with strategy, at their defaults</summary>" in page


def test_a_knob_of_a_strategy_that_was_set_is_listed():
    runs = [
        with_config("a", of_option("strategy", "ddp"), **{"strategy.bucket_cap_mb": 5.0}),
        with_config("b", of_option("strategy", "fsdp")),
    ]
    assert differences(runs, OptionCatalog(CONF)).listed == {
        "strategy": ["ddp", "fsdp"],
        "strategy.bucket_cap_mb": [5.0, ABSENT],
    }


def test_optimizers_schedules_and_models_are_folded_alike():
    runs = [
        with_config(
            "a",
            of_option("optimizer", "adamw"),
            of_option("schedule", "cosine"),
            of_option("model", "mlp"),
            **{"optimizer.lr": 0.003},
        ),
        with_config(
            "b",
            of_option("optimizer", "muon"),
            of_option("schedule", "step"),
            of_option("model", "small_cnn"),
            **{"optimizer.lr": 0.01},
        ),
    ]
    found = differences(runs, OptionCatalog(CONF))
    assert found.listed == {
        "optimizer": ["adamw", "muon"],
        "optimizer.lr": [0.003, 0.01],
        "schedule": ["cosine", "step"],
        "model": ["mlp", "small_cnn"],
    }
    assert "optimizer.weight_decay" in found.folded
    assert "optimizer.others._target_" in found.folded
    assert hints(runs, OptionCatalog(CONF))[0] == ""  # four keys are more than a few words


def test_knobs_of_one_class_are_listed_as_they_are():
    ddp = of_option("strategy", "ddp")
    runs = [with_config("a", ddp), with_config("b", ddp, **{"strategy.zero1": True})]
    assert differences(runs, OptionCatalog(CONF)).listed == {"strategy.zero1": [False, True]}


def test_of_options_with_one_class_the_nearest_gives_its_name(tmp_path):
    group = tmp_path / "model"
    group.mkdir()
    (group / "small.yaml").write_text("_target_: my.Net\nwidth: 8\nlayers: 2\n")
    (group / "large.yaml").write_text("defaults: [small, _self_]\nwidth: 64\n")
    (group / "broken.yaml").write_text("{")
    offered = OptionCatalog([tmp_path])
    for width, name in ((8, "small"), (64, "large")):
        config = {"model._target_": "my.Net", "model.width": width, "model.layers": 2}
        chosen = offered.find_option(config, "model")
        assert (chosen.name, chosen.knobs) == (name, {"width": width, "layers": 2})


def test_a_class_of_ones_own_is_named_by_its_last_word_and_shown_in_full():
    own = {"strategy": {"_target_": "my.engines.Fast", "streams": 2}}
    runs = [with_config("a", own), with_config("b", of_option("strategy", "single"))]
    assert differences(runs, OptionCatalog(CONF)).listed == {
        "strategy": ["Fast", "single"],
        "strategy.streams": [2, ABSENT],
    }


def test_the_command_line_knows_the_options_of_plugins(tmp_path):
    for name in ("deepspeed", "ddp"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(of_option("strategy", name)))
        (folder / "metrics.jsonl").write_text('{"split": "train", "step": 1, "loss": 1.0}\n')
        (folder / "result.json").write_text('{"error": {"message": "no"}}')
    command = [sys.executable, "-c", LOADED, "report", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "set()"
    page = (tmp_path / "report.html").read_text()
    for name in ("ddp", "deepspeed"):
        assert f'<td class="value" title="{name}">{name}</td>' in page


LOADED = """
import sys
from torsh_trainer.__main__ import main
assert main() == 0
print({"torch", "hydra", "omegaconf", "matplotlib"} & set(sys.modules))
"""


# -- the best run ---------------------------------------------------------------------------------


def judged(name, accuracy, *, objective="accuracy", mode="max", **result):
    config = {"trainer.objective": objective, "trainer.objective_mode": mode}
    evaluated = [(6, {"accuracy": accuracy, "seconds": 10 * accuracy})]
    return make_run(name, LOSSES, evaluated=evaluated, config=config, **result)


def test_the_best_run_is_marked_in_words_with_its_metric_and_mode():
    page = draw(judged("a", 0.9), judged("b", 0.95))
    assert "Best by <b>eval accuracy</b>, higher is better (trainer.objective): <b>b</b>." in page
    (row,) = re.findall(r'<tr data-points="7" class="best-run"><th.*?</tr>', page)
    assert '</span>b <b class="badge">best</b></th>' in row
    assert '<td class="number best">0.95</td>' in row
    assert page.count('<b class="badge">best</b>') == 2  # the row and the legend


def test_the_mode_is_the_runs_own():
    runs = [
        judged("a", 0.9, objective="seconds", mode="min"),
        judged("b", 0.95, objective="seconds", mode="min"),
    ]
    ranked = ranking(runs)
    assert (ranked.column, ranked.better, ranked.best) == ("eval seconds", -1, (0,))
    # The name does not tell which way is better; the knob does.
    assert [cell.best for cell in cells(runs, "eval seconds")] == [True, False]


def test_values_that_are_shown_alike_are_equally_good():
    runs = [judged("a", 0.95), judged("b", 0.9500000001), judged("c", 0.9)]
    assert ranking(runs).best == (0, 1)
    assert [cell.best for cell in cells(runs, "eval accuracy")] == [True, True, False]
    assert "<b>a, b</b>, equal as far as shown" in draw(*runs)


def test_a_run_that_failed_is_never_the_best():
    failed = judged("c", 0.99, error={"message": "died"})
    assert ranking([judged("a", 0.9), judged("b", 0.95), failed]).best == (1,)
    assert ranking([judged("a", 0.9), failed]) is None


def test_runs_that_are_all_equal_have_no_best_and_the_page_says_so():
    page = draw(judged("a", 0.9), judged("b", 0.9))
    assert "Equal in <b>eval accuracy</b>, higher is better (trainer.objective)" in page
    assert "badge" not in page.split("</style>")[1]


@pytest.mark.parametrize(
    ("objectives", "reason"),
    [
        ((None, None), "no trainer.objective"),
        (("accuracy", "seconds"), "runs differ in trainer.objective"),
        (("acurracy", "acurracy"), "trainer.objective=acurracy was not logged"),
    ],
)
def test_runs_without_an_objective_in_common_are_judged_by_their_training_loss(objectives, reason):
    runs = [judged(name, 0.9, objective=o) for name, o in zip("ab", objectives, strict=True)]
    runs[1].rows[5]["loss"] = 0.1
    ranked = ranking(runs)
    assert (ranked.column, ranked.better, ranked.best) == ("train loss", -1, (1,))
    assert f"lower is better ({reason}): <b>b</b>" in draw(*runs)


def test_an_objective_of_the_test_is_found():
    rows = [{"split": "test", "step": 6, "accuracy": value} for value in (0.9, 0.8)]
    config = {"trainer.objective": "test_accuracy", "trainer.objective_mode": "max"}
    runs = [
        Run(name, path=name, rows=[row], result={"steps": 6}, config=config)
        for name, row in zip("ab", rows, strict=True)
    ]
    assert ranking(runs).column == "test accuracy"
    assert ranking(runs).best == (0,)


# -- one look -------------------------------------------------------------------------------------


def test_the_page_of_a_translation_has_the_colours_of_a_report_in_both_schemes():
    page, translation = (
        [
            dict(re.findall(r"--(\w+): (#\w+)", scheme))
            for scheme in re.split(r"prefers-color-scheme: dark", style.read_text())
        ]
        for style in (
            files("torsh_trainer.report") / "page.css",
            files("torsh_trainer.translate") / "report.css",
        )
    )
    assert len(translation) == 2
    for ours, theirs in zip(page, translation, strict=True):
        assert theirs == {name: ours[name] for name in theirs}
        assert {"ground", "card", "ink", "good", "bad"} <= set(theirs)


def test_a_narrow_screen_and_paper_have_rules_of_their_own():
    style = draw(make_run("a", LOSSES)).split("</style>")[0]
    assert "@media (max-width: 640px)" in style
    on_paper = style.split("@media print")[1]
    assert "print-color-adjust: exact" in on_paper
    assert ".scroll { overflow: visible; }" in on_paper  # paper would cut columns off
