"""What comes from files of others: told in words, kept within bounds, printed as plain text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torsh_trainer.__main__ import main
from torsh_trainer.callbacks.formatting import nearby
from torsh_trainer.checkpoint.cli.parameter_order import read_names
from torsh_trainer.checkpoint.cli.printing import print_json
from torsh_trainer.distributed.tuning import AlgorithmTable
from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.csv_file import CSV
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed import normalising
from torsh_trainer.translate.engines import work_of
from torsh_trainer.utils.files import parse_yaml
from torsh_trainer.utils.foreign import check_nest, escape_controls, in_words, readable

ODD = "\x1b[31mred\x07\x9b2J\u202eevil\ud800\U000e0001"


def test_what_moves_a_terminal_is_shown_as_text():
    assert escape_controls(ODD) == r"\x1b[31mred\x07\u009b2J\u202eevil\ud800\U000e0001"
    assert escape_controls("Grüße,\n漢字") == "Grüße,\n漢字"
    assert nearby("\x07dir") == r"\x07dir"


def test_words_and_lines_without_end_are_cut_in_their_middle():
    assert len(readable("a" * 10_000)) == 400
    assert len(readable("a b " * 10_000)) == 4000
    assert readable("tensor " + "b" * 300) == "tensor " + "b" * 300


def test_json_is_escaped_and_whole(capsys):
    value = {ODD: "b" * 10_000}
    print_json(value)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert json.loads(out) == value


def test_the_door_escapes_and_shortens_what_it_says(capsys):
    assert main(["translate", f"no\x1b[2Jfile{'x' * 5000}"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert len(err) < 1000


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyError("module"), "it has no 'module'"), (TypeError("x"), "of another type or size")],
)
def test_what_python_says_of_odd_content_becomes_a_sentence(error, words):
    with pytest.raises(ConfigError, match=words) as told, in_words("a.pt", "a checkpoint"):
        raise error
    assert type(error).__name__ not in str(told.value)


def test_a_nest_that_holds_itself_or_multiplies_is_refused():
    ring: list = []
    ring.append(ring)
    bomb: list = []
    for _ in range(64):
        bomb = [bomb, bomb]
    for content in (ring, {"a": bomb}):
        with pytest.raises(ConfigError, match="holds itself, or more than"):
            check_nest(content, "a.pt")
    check_nest({"a": [1, {"b": (2,)}]}, "a.pt")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "a: &a [*a]", "!!timestamp word", "!!int ''", "a: [", "a: \x00"]
)
def test_yaml_of_any_kind_is_read_or_refused_in_words(text):
    with pytest.raises(ValueError, match=r"^it "):
        parse_yaml(text)


def test_ordinary_yaml_with_anchors_is_read():
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n"
    assert parse_yaml(text) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert parse_yaml("") is None


READERS = {
    "translate": lambda pipe: work_of(pipe, TranslationRequest()).translate(),
    "csv": lambda pipe: CSV(path=pipe, target="y", kind="regression").load(),
    "comm bench": lambda pipe: AlgorithmTable.from_file(pipe, backend="gloo", world_size=2),
    "--parameters": lambda pipe: read_names(Path(pipe), 1, {}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
def test_a_named_pipe_is_refused_where_it_would_block(reader, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is a named pipe"):
        READERS[reader](str(pipe))


@pytest.mark.parametrize("name", ["r.html", "r.json"])
def test_half_of_a_character_is_written_as_json_has_it(name, tmp_path, capsys):
    file, report = tmp_path / "ds.json", tmp_path / name
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "_\\ud800": "\\ud800"}')
    assert main(["translate", str(file), "--report", str(report)]) == 10
    assert "\\ud800" in report.read_text()
    assert "\\ud800" in capsys.readouterr().out


def test_only_the_first_of_many_unknown_keys_are_looked_up(tmp_path, monkeypatch, capsys):
    looked = []
    close = normalising.difflib.get_close_matches
    monkeypatch.setattr(
        normalising.difflib, "get_close_matches", lambda *a, **k: looked.append(a) or close(*a, **k)
    )
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({f"unknown_{i}": i for i in range(3000)}))
    assert main(["translate", str(file)]) == 2
    assert "and 2979 more" in capsys.readouterr().err
    assert len(looked) <= 200
