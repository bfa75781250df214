"""The README's picture and its table say what the report and the benchmarks say."""

from __future__ import annotations

import importlib
import re
from xml.etree import ElementTree

import pytest

from torsh_trainer.report.runs import Run

LARGEST_BYTES = 150_000
LOOPS = {  # in the README: in docs/benchmarks.md
    "ToRSh Trainer": "ToRSh Trainer (progress bar, metrics, checkpoints on)",
    "Lightning Fabric": "Lightning Fabric (nothing on)",
    "Accelerate": "Accelerate (nothing on)",
    "Lightning Trainer, nothing logged": "Lightning Trainer (nothing logged)",
    "Lightning Trainer, loss logged": "Lightning Trainer (loss logged)",
    "Hugging Face Trainer": "Hugging Face Trainer",
}


@pytest.fixture
def picture(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("benchmarks.picture")


def cells_of(text, first):
    """The rows of Markdown tables whose first cell is ``first``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[0] == first]


def make_run(name, losses):
    rows = [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return Run(name, name, rows=rows)


def read(svg):
    return ElementTree.fromstring(svg), " ".join(ElementTree.fromstring(svg).itertext())


def test_the_picture_needs_nothing_else_and_says_which_runs_coincide(picture):
    svg = picture.picture_of(
        [make_run("a & b", [2, 1]), make_run("c", [2, 1]), make_run("d", [2, 2])]
    )
    root, text = read(svg)
    assert "2 runs coincide: a & b, c (within 0.01% at every point)" in text
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r"<script|href|url\(|@import|class=\"(field|cross)", svg)
    lines = [path for path in root.iter() if path.get("style", "").startswith("stroke-dasharray")]
    assert len(lines) == 2


def test_the_picture_in_the_readme_is_that_of_its_command_and_small(picture, repository):
    path = repository / "docs" / "pictures" / "coincide.svg"
    assert path == picture.OUTPUT
    assert path.relative_to(repository).as_posix() in (repository / "README.md").read_text()
    assert path.stat().st_size < LARGEST_BYTES
    _, text = read(path.read_text(encoding="utf-8"))
    assert f"{len(picture.RUNS) - 1} runs coincide" in text
    for name in picture.RUNS:
        assert name in text


def test_every_figure_of_the_readme_stands_in_the_page_of_benchmarks(repository):
    readme = (repository / "README.md").read_text()
    page = (repository / "docs" / "benchmarks.md").read_text()
    for name, loop in LOOPS.items():
        title, _, logged = name.partition(", ")
        (row,) = [row for row in cells_of(readme, title) if logged in ("", row[1])]
        tiny = next(row for row in cells_of(page, "tiny MLP (32-64-10)") if row[1] == loop)
        assert row[2] == f"{tiny[2]} us", name
    for title, ddp, script in (
        ("ToRSh Trainer", "ToRSh Trainer, strategy=ddp", "ToRSh Trainer (+recipe=digits)"),
        ("Lightning Trainer", "Lightning, strategy=ddp", "Lightning Trainer"),
    ):
        (beside_ddp,), (beside_script,) = cells_of(page, ddp), cells_of(page, script)
        columns = list(zip(*(row[3:] for row in cells_of(readme, title)), strict=True))
        expected = beside_ddp[1], beside_script[2], beside_script[4]
        assert [set(column) - {"-"} for column in columns] == [{f"{x} x"} for x in expected], title
    (versions,) = re.findall(r"Python 3[^:]*?transformers [\d.]+\d", readme.replace("\n", " "))
    assert versions in page
