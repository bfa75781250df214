"""What the report reads, and what it says when there is nothing to draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from report_pages import make_run, page_at, report

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.report.differences import hints
from torsh_trainer.report.options import OptionCatalog
from torsh_trainer.report.runs import read_run, read_runs


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


@pytest.mark.matrix(6)
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
