"""The report: what it reads, what it draws, and what it says when there is nothing to draw."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from matplotlib.image import imread

from torsh_trainer.callbacks.base import EvaluationReport, RunInfo, StepReport
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.report import main
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


def make_run(
    folder, *, steps=40, lr=0.01, strategy="ddp", scale=1.0, batch_size=8, config=None, **result
):
    """A run directory as a run leaves it: reports by the real logger, every tenth evaluated."""
    info = RunInfo(
        run_dir=folder,
        world=World(),
        strategy=strategy,
        backend="gloo",
        precision="fp32",
        device="cpu",
        batch_size=batch_size,
        micro_batch_size=batch_size,
        accumulate=1,
        max_steps=steps,
        steps_per_epoch=None,
        first_step=0,
        parameters=1,
        trainable_parameters=1,
    )
    logger = Jsonl()
    logger.on_start(info)
    for step in range(1, steps + 1):
        metrics = {
            "loss": scale * (0.1 + math.exp(-step / 10)),
            "lr": lr,
            "grad_norm": 1.0 / step,
            "samples_per_s": 100.0 + step,
            "data_wait_s": 0.001,
            "step_s": 0.01,
            "skipped": 0.0,
        }
        logger.on_step(StepReport(step, 0, batch_size * step, metrics))
        if step % 10 == 0:
            numbers = {"accuracy": 1 - scale / step, "loss": scale / step}
            logger.on_evaluate(
                EvaluationReport("eval", step, 0, batch_size * step, numbers, wall_s=0.1)
            )
    logger.on_end({})
    spread_over_time(folder / "metrics.jsonl")
    content = {
        "strategy": strategy,
        "world_size": 2,
        "steps": steps,
        "train_loss": 0.1 * scale,
        "wall_s": 75.0,
        "samples_per_s": 120.0,
        "peak_memory_bytes": 2**30,
        **result,
    }
    (folder / "result.json").write_text(json.dumps(content))
    tree = {"optimizer": {"lr": lr}, "strategy": {"_target_": f"package.{strategy}.{strategy}"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**tree, "seed": 0, **(config or {})}))
    (folder / "provenance.json").write_text(
        json.dumps({"command": ["python", "-m", "torsh_trainer", f"strategy={strategy}"]})
    )
    return folder


def spread_over_time(path):
    """Half a second between reports, which this test has no time to wait for."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**row, "elapsed_s": 0.5 * i}) for i, row in enumerate(rows, start=1)]
    path.write_text("\n".join(lines) + "\n")


class Page(HTMLParser):
    """A page taken apart; every element must be closed where it should be."""

    VOID = frozenset({"meta", "input", "br", "line", "path", "rect", "circle"})

    def __init__(self, text):
        super().__init__()
        self.tables, self.attributes, self.scripts, self.open = {}, [], [], []
        self.text = ""
        self._table = None
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes.append((tag, attrs))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table" and "id" in attrs:
            self._table = self.tables.setdefault(attrs["id"], [])
        if tag == "tr" and self._table is not None:
            self._table.append((attrs, []))
        if tag in ("td", "th") and self._table is not None:
            self._table[-1][1].append("")
        if tag == "script":
            self.scripts.append((attrs, ""))

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "table":
            self._table = None

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
            return
        self.text += data
        if self._table and self._table[-1][1]:
            self._table[-1][1][-1] += data

    @property
    def plots(self):
        """The numbers behind every chart, by its title and x axis."""
        labels = [attrs["aria-label"] for tag, attrs in self.attributes if tag == "svg"]
        data = [
            json.loads(text)
            for attrs, text in self.scripts
            if attrs.get("type") == "application/json" and attrs.get("id") != "runs"
        ]
        return dict(zip(labels, data, strict=True))


def report(*argv):
    assert main([str(argument) for argument in argv]) == 0


def page_at(path):
    return Page(path.read_text(encoding="utf-8"))


# -- the page -------------------------------------------------------------------------------------


def test_one_run_gives_one_page_beside_it(tmp_path, capsys):
    run = make_run(tmp_path / "digits")
    report(run)
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = page_at(run / "report.html")
    (_, names), (attributes, cells) = page.tables["results"]
    assert attributes["data-points"] == "44"
    row = dict(zip(names, cells, strict=True))
    assert row["run"] == "digits"
    assert row["reports"] == "44"
    assert row["state"] == "done"
    assert row["eval accuracy"] == "0.975"
    assert row["peak memory"] == "1 GiB"
    assert row["wall time"] == "0:01:15"
    assert "python -m torsh_trainer strategy=ddp" in page.text


def test_every_run_stands_on_the_page_with_all_its_points(tmp_path):
    sizes = {"a": 10, "b": 40, "c": 25}
    for name, steps in sizes.items():
        make_run(tmp_path / "runs" / name, steps=steps)
    output = tmp_path / "page.html"
    report(*(tmp_path / "runs" / name for name in sizes), "--output", output)
    page = page_at(output)
    rows = {cells[0].split()[0]: attrs for attrs, cells in page.tables["results"][1:]}
    assert {name: int(attrs["data-points"]) for name, attrs in rows.items()} == {
        name: steps + steps // 10 for name, steps in sizes.items()
    }
    curves = page.plots["Loss by step"]["curves"]
    assert {(c["run"], c["split"]): len(c["x"]) for c in curves} == {
        (run, split): {"train": steps, "eval": steps // 10}[split]
        for run, steps in enumerate(sizes.values())
        for split in ("train", "eval")
    }


def test_a_chart_holds_the_numbers_that_were_logged(tmp_path):
    run = make_run(tmp_path / "digits", steps=20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    report(run)
    plots = page_at(run / "report.html").plots
    for title, split, key in (
        ("Evaluation accuracy", "eval", "accuracy"),
        ("Learning rate", "train", "lr"),
        ("Samples per second", "train", "samples_per_s"),
        ("Gradient norm", "train", "grad_norm"),
    ):
        expected = [row for row in rows if row["split"] == split]
        (by_step,) = plots[f"{title} by step"]["curves"]
        assert by_step["x"] == [row["step"] for row in expected]
        assert by_step["y"] == pytest.approx([row[key] for row in expected], rel=1e-5)
        (by_time,) = plots[f"{title} by time"]["curves"]
        assert by_time["x"] == [row["elapsed_s"] for row in expected]


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path):
    run = make_run(tmp_path / "digits")
    report(run)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert not [a for _, a in page.attributes if a.keys() & {"src", "href", "srcset", "action"}]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text)


def test_every_picture_is_well_formed_and_within_its_frame(tmp_path):
    run = make_run(tmp_path / "digits")
    report(run)
    pictures = re.findall(r"<svg.*?</svg>", (run / "report.html").read_text(), re.DOTALL)
    assert len(pictures) >= 10
    for picture in pictures:
        svg = ElementTree.fromstring(picture)
        _, _, width, height = map(float, svg.get("viewBox").split())
        for path in svg.iter("path"):
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.get("d"))]
            assert all(0 <= x <= width for x in numbers[::2])
            assert all(0 <= y <= height for y in numbers[1::2])


def test_names_from_outside_cannot_become_markup(tmp_path):
    name = "<script>alert(1)<script>"
    run = make_run(
        tmp_path / name, error={"type": "E", "message": "</script><b>boom"}, config={"<i>": "<u>"}
    )
    make_run(tmp_path / "other")
    report(run, tmp_path / "other", "--output", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "<b>boom" not in text
    assert "<i>" not in text
    page = Page(text)
    (names,) = [json.loads(content) for attrs, content in page.scripts if attrs.get("id") == "runs"]
    assert names["names"] == [name, "other"]


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_extremes(tmp_path):
    run = make_run(tmp_path / "long", steps=5000)
    report(run)
    (curve,) = page_at(run / "report.html").plots["Learning rate by step"]["curves"]
    assert len(curve["x"]) < 500
    assert (curve["x"][0], curve["x"][-1]) == (1, 5000)


def test_where_configurations_differ_is_a_table_and_the_rest_a_number(tmp_path):
    make_run(tmp_path / "runs/a", lr=0.01, strategy="ddp")
    make_run(tmp_path / "runs/b", lr=0.001, strategy="fsdp")
    report(tmp_path / "runs")
    page = page_at(tmp_path / "runs/report.html")
    head, *rows = [cells for _, cells in page.tables["differences"]]
    assert head == ["run", "optimizer.lr", "strategy"]
    assert rows == [["a", "0.01", "ddp"], ["b", "0.001", "fsdp"]]
    assert "1 other keys agree" in page.text


def test_many_differing_keys_stand_below_each_other(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, config={f"knob_{i}": f"{name}{i}" for i in range(12)})
    report(tmp_path / "runs")
    table = page_at(tmp_path / "runs/report.html").tables["differences"]
    assert [cell.strip() for cell in table[0][1]] == ["key", "a", "b"]
    assert table[1][1] == ["knob_0", "a0", "b0"]
    assert len(table) == 13


def test_a_failed_and_an_unfinished_run_are_shown_as_such(tmp_path):
    error = {"type": "TrainingError", "message": "the loss is not finite", "fix": "", "facts": {}}
    make_run(tmp_path / "runs/a", error=error)
    make_run(tmp_path / "runs/b", error={"type": "Interrupted", "message": "stopped by SIGTERM"})
    (make_run(tmp_path / "runs/c") / "result.json").unlink()
    report(tmp_path / "runs")
    page = page_at(tmp_path / "runs/report.html")
    states = [cells[1] for _, cells in page.tables["results"][1:]]
    assert states == ["failed", "interrupted", "unfinished"]
    assert "a: failed: the loss is not finite" in page.text
    assert "b: interrupted: stopped by SIGTERM" in page.text


# -- what it reads --------------------------------------------------------------------------------


def test_a_corrupt_line_is_skipped_and_named(tmp_path, capsys):
    run = make_run(tmp_path / "digits", steps=5)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    broken = [*lines[:2], '{"split": "tra', *lines[2:], "[1, 2]", '{"split": "train"}']
    path.write_text("\n".join(broken) + "\n")
    report(run)
    told = capsys.readouterr().err
    for number in (3, 7, 8):
        assert f"metrics.jsonl, line {number}: not a report, skipped" in told
    page = page_at(run / "report.html")
    assert "line 3: not a report" in page.text
    assert page.tables["results"][1][0]["data-points"] == "5"


def test_steps_that_a_resumed_run_made_again_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [1, 10, 20, 30, 20, 30, 30, 40]
    rows = [{"split": "train", "step": s, "loss": i} for i, s in enumerate(steps)]
    rows[2:2] = [{"split": "eval", "step": 10, "loss": 0.5}]
    path.write_text("\n".join(map(json.dumps, rows)))
    run = read_run(tmp_path, name="x")
    kept = [(p.step, p.value) for p in run.curve("train", "loss")]
    assert kept == [(1, 0), (10, 1), (20, 4), (30, 6), (40, 7)]
    assert [p.step for p in run.curve("eval", "loss")] == [10]


def test_a_number_that_was_not_finite_is_a_gap(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    values = [3.0, 2.5, None, 2.0, 1.5]
    rows = [{"split": "train", "step": i, "loss": v} for i, v in enumerate(values, start=1)]
    path.write_text("\n".join(map(json.dumps, rows)))
    report(path)
    page = page_at(path.parent / "report.html")
    (curve,) = page.plots["Training loss by step"]["curves"]
    assert curve["y"] == values
    drawn = [a["d"] for tag, a in page.attributes if tag == "path"]
    assert [d.count("M") for d in drawn] == [2]


def test_a_sweep_folder_stands_for_its_jobs_in_the_order_of_their_numbers(tmp_path):
    for number in (0, 1, 2, 10):
        make_run(tmp_path / "sweep" / str(number), lr=0.1 * (number + 1), steps=10)
    make_run(tmp_path / "sweep/1/checkpoints/no_run_of_its_own", steps=10)
    runs = read_runs([tmp_path / "sweep"])
    assert [run.name for run in runs] == ["0", "1", "2", "10"]
    assert hints(runs, OptionCatalog())[1] == "lr=0.2"


def test_the_same_run_named_twice_counts_once(tmp_path):
    run = make_run(tmp_path / "a", steps=5)
    assert [r.path for r in read_runs([run, tmp_path, run / "metrics.jsonl"])] == [run]


def test_a_run_from_before_secrets_were_masked_shows_none(tmp_path):
    run = make_run(tmp_path / "digits", steps=5, config={"logger": {"api_key": "hush"}})
    command = ["python", "-m", "torsh_trainer", "+logger.api_key=hush"]
    (run / "provenance.json").write_text(json.dumps({"command": command}))
    report(run)
    assert "hush" not in (run / "report.html").read_text()
    assert "+logger.api_key=***" in page_at(run / "report.html").text


def test_one_run_under_two_names_counts_once_and_links_in_circles_end(tmp_path, monkeypatch):
    run = make_run(tmp_path / "z" / "one", steps=5)
    (tmp_path / "z" / "latest").symlink_to(run)
    (tmp_path / "z" / "round").symlink_to(tmp_path / "z")
    monkeypatch.chdir(tmp_path / "z")
    paths = [Path("one"), Path("../z/one"), Path("latest"), Path()]
    assert [run.name for run in read_runs(paths)] == ["one"]


BOMB = "a: &a [1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)
ODD_FILES = {
    "step infinite": ("metrics.jsonl", '{"split": "train", "step": Infinity, "loss": 1}'),
    "step immense": ("metrics.jsonl", '{"split": "train", "step": 1%s, "loss": 1}' % ("0" * 400)),
    "loss of 400 digits": (
        "metrics.jsonl",
        '{"split": "train", "step": 90, "loss": 1%s}' % ("0" * 400),
    ),
    "loss at the edges": (
        "metrics.jsonl",
        (
            '{"split": "train", "step": 90, "loss": 1e308}\n'
            '{"split": "train", "step": 91, "loss": -1e308}\n'
            '{"split": "train", "step": 92, "loss": 5e-324, "elapsed_s": 1e308}'
        ),
    ),
    "samples as text": (
        "metrics.jsonl",
        '{"split": "train", "step": 90, "samples": "many", "loss": "low", "lr": [], "x": {}}',
    ),
    "line nested deeply": ("metrics.jsonl", "[" * 100_000),
    "half a character": ("metrics.jsonl", '{"split": "eval", "step": 90, "\\ud800 $x$": 1}'),
    "result nested deeply": ("result.json", '{"a": ' * 900 + "1" + "}" * 900),
    "result nested more deeply": ("result.json", "[" * 100_000),
    "result of other types": (
        "result.json",
        (
            '{"world_size": [], "steps": "many", "train_loss": {}, "wall_s": 1e400, '
            '"samples_per_s": "x", "peak_memory_bytes": true, "strategy": 3, "error": [1]}'
        ),
    ),
    "aliases that multiply": ("config.yaml", BOMB),
    "an alias of itself": ("config.yaml", "a: &a [*a]"),
    "yaml nested deeply": ("config.yaml", "[" * 100_000),
    "yaml of other types": ("config.yaml", "a: !!timestamp word"),
    "a number of 9000 digits": ("config.yaml", "a: 0x" + "f" * 9000),
}


@pytest.mark.parametrize("case", ODD_FILES)
def test_whatever_a_file_holds_the_rest_is_drawn_and_it_is_noted(case, tmp_path, capsys):
    name, content = ODD_FILES[case]
    run = make_run(tmp_path / "digits", steps=40)
    if name == "metrics.jsonl":
        content = (run / name).read_text() + content + "\n"
    (run / name).write_text(content)
    report(run, "--png")
    page = page_at(run / "report.html")
    assert len(page.plots["Loss by step"]["curves"]) == 2
    noted = case not in ("loss of 400 digits", "loss at the edges", "half a character")
    assert (name in capsys.readouterr().err) == noted


def test_a_file_with_a_thousand_bad_lines_is_noted_in_twenty(tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("no report\n" * 1000)
    problems = read_run(run, name="digits").problems
    assert len(problems) == 21
    assert problems[-1] == "and 980 more like these"


def test_a_pipe_in_the_place_of_a_file_is_noted(tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert read_run(run, name="digits").problems == ["config.yaml is a named pipe"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("x/seed0", "y/seed0"):
        make_run(tmp_path / folder, steps=5)
    assert [run.name for run in read_runs([tmp_path])] == ["x/seed0", "y/seed0"]


def test_all_that_lies_in_a_sweeps_folder_may_be_named(tmp_path):
    make_run(tmp_path / "0", steps=5)
    for name in ("multirun.yaml", "sweep.csv"):
        (tmp_path / name).write_text("")
    assert [run.name for run in read_runs(sorted(tmp_path.iterdir()))] == ["0"]
    with pytest.raises(ConfigError, match=r"sweep\.csv is a file, and a run is a folder"):
        read_runs([tmp_path / "sweep.csv"])


def test_a_run_that_does_not_exist_offers_the_nearest(tmp_path):
    make_run(tmp_path / "digits", steps=5)
    with pytest.raises(ConfigError, match="no such run directory") as caught:
        report(tmp_path / "digit")
    assert "'digits'" in caught.value.fix


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run in .*: neither metrics\.jsonl nor result\.json"):
        report(tmp_path)


def test_a_run_that_has_logged_nothing_yet_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="none of these runs has logged anything yet"):
        report(tmp_path)


def test_a_run_that_failed_before_its_first_report_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    result = {"error": {"type": "ConfigError", "message": "no such file: data.csv"}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    report(tmp_path, "--png")
    text = page_at(tmp_path / "report.html").text
    assert "no such file: data.csv" in text
    assert "metrics.jsonl is empty: no reports" in text
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize("name", ["result.json", "config.yaml", "provenance.json"])
@pytest.mark.parametrize("content", ["{broken: [", "[1, 2]"])
def test_a_broken_file_beside_the_metrics_is_noted(name, content, tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    (run / name).write_text(content)
    report(run)
    assert f"{name} cannot be read: it" in page_at(run / "report.html").text


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    with pytest.raises(ResourceError, match="cannot write"):
        report(run, "--output", run / "metrics.jsonl" / "page.html")


def test_an_output_that_is_no_page_is_refused(tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    with pytest.raises(ConfigError, match="is no name for an HTML page"):
        report(run, "--output", tmp_path / "picture.png")


def test_output_may_be_a_folder(tmp_path):
    report(make_run(tmp_path / "digits", steps=5), "--output", tmp_path / "out")
    assert (tmp_path / "out/report.html").is_file()


def test_the_verb_needs_neither_torch_nor_hydra(tmp_path):
    run = make_run(tmp_path / "digits", steps=5)
    code = (
        "import sys; from torsh_trainer.report import main; main(sys.argv[1:]); "
        "print({'torch', 'hydra', 'omegaconf', 'matplotlib'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(run)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.splitlines()[-1] == "set()"


# -- the picture ----------------------------------------------------------------------------------


def test_png_writes_a_picture_beside_the_page(tmp_path, capsys):
    for name, scale in (("a", 1.0), ("b", 2.0)):
        make_run(tmp_path / "runs" / name, scale=scale)
    report(tmp_path / "runs", "--png")
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "runs/report.html"),
        str(tmp_path / "runs/report.png"),
    ]
    picture = imread(tmp_path / "runs/report.png")
    height, width, _ = picture.shape
    assert width > 1000
    assert height > 1000
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, picture.shape[2])}) > 10


def test_png_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    run = make_run(tmp_path / "digits", steps=5)
    monkeypatch.setattr("torsh_trainer.report.png.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="--png needs matplotlib") as caught:
        report(run, "--png")
    assert 'pip install "torsh-trainer[report]"' in caught.value.fix


# -- charts and scales ----------------------------------------------------------------------------


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
