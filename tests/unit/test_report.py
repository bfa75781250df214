"""The page of a report, and its picture."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from report_pages import Page, make_run, page_at, report

from torsh_trainer.errors import ResourceError


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
