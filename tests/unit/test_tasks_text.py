"""Text sources: windows, sequences, tokenizers and bad input."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.tasks.text import StdlibText, TextFiles, TokenWindows, pad_tokens


def text_of(tokens: Tensor) -> bytes:
    return bytes(tokens.tolist())


def test_windows_predict_every_token_of_a_stream_once() -> None:
    stream = torch.arange(24)
    windows = TokenWindows.of(stream, context=5)
    assert len(windows) == 4
    batch = windows.__getitems__([0, 1, 2, 3])
    assert torch.equal(batch[:, 1:].flatten(), stream[1:21])
    assert torch.equal(batch[:, :-1].flatten(), stream[:20])
    assert torch.equal(windows[2], batch[2])
    assert torch.equal(windows.__getitems__(torch.tensor([3, 1])), batch[[3, 1]])


def test_windows_take_no_memory_of_their_own() -> None:
    stream = torch.arange(10_000)
    assert TokenWindows.of(stream, context=100).windows.data_ptr() == stream.data_ptr()


def test_padding_keeps_every_token_and_counts_none_that_it_adds() -> None:
    samples = [torch.tensor([1, 2, 3, 4], dtype=torch.uint8), torch.tensor([5, 6])]
    batch = pad_tokens(samples)
    assert batch["tokens"].tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, 4], [6, -100, -100]]
    assert batch["tokens"].dtype == torch.int64


# ---------------------------------------------------------------------------- standard library


def library(folder: Path, count: int = 40) -> StdlibText:
    (folder / "package").mkdir()
    for number in range(count):
        (folder / "package" / f"module_{number}.py").write_text(f"# file {number:02}\n")
    for name in ("package/test", "site-packages", "encodings"):
        (folder / name).mkdir(parents=True)
        (folder / name / "passed_over.py").write_text("passed over")
    (folder / "_sysconfigdata_x.py").write_text("passed over")
    (folder / "notes.txt").write_text("passed over")
    return StdlibText(folder=str(folder), context=8, eval_fraction=0.25, test_fraction=0.1)


def test_every_library_file_is_in_one_part_and_the_split_does_not_change(tmp_path: Path) -> None:
    source = library(tmp_path)
    parts = [source.train, source.eval, source.test]
    texts = [
        text_of(torch.cat([w[:-1] for w in part.windows] + [part.windows[-1][-1:]]))
        for part in parts
    ]
    numbers = [{line for line in text.split(b"\0") if len(line) == 10} for text in texts]
    assert [text.count(b"\0") + 1 for text in texts] == [26, 10, 4]
    assert not numbers[0] & numbers[1] | numbers[0] & numbers[2] | numbers[1] & numbers[2]
    assert all(b"passed over" not in text for text in texts)
    again = StdlibText(folder=str(tmp_path), context=8, eval_fraction=0.25, test_fraction=0.1)
    assert torch.equal(again.eval.windows, source.eval.windows)


def test_the_default_is_the_source_of_the_running_python() -> None:
    source = StdlibText(context=256)
    own = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()[:2000]
    parts = (source.train, source.eval, source.test)
    assert sum(own in text_of(part.windows[:, :-1].flatten()) for part in parts) == 1
    held_out = len(source.eval) / sum(map(len, parts))
    assert 0.01 < held_out < 0.2


def test_a_folder_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Python files in .*data\.folder"):
        _ = StdlibText(folder=str(tmp_path)).train


def test_a_context_longer_than_a_part_is_refused(tmp_path: Path) -> None:
    library(tmp_path)
    with pytest.raises(ConfigError, match=r"too short for one sample of 1000 tokens"):
        _ = StdlibText(folder=str(tmp_path), context=999).train


# ----------------------------------------------------------------------------------- text files


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def test_windows_hold_the_last_part_of_all_text_out(tmp_path: Path) -> None:
    write(tmp_path, b="second " * 40, a="first " * 40)
    source = TextFiles(
        paths=str(tmp_path / "*.txt"), context=10, eval_fraction=0.2, test_fraction=0
    )
    stream = ("first " * 40 + "\0" + "second " * 40).encode()
    assert (
        text_of(source.train.windows[:, :-1].flatten())
        + text_of(source.eval.windows[:, :-1].flatten())
        == stream[: (len(stream) - 1) // 10 * 10]
    )
    assert len(source.eval) == round(0.2 * (len(stream) // 10))
    assert source.test is None
    assert source.fixed_length
    assert source.vocab_size == 256


def test_a_line_is_a_sample_between_two_ends(tmp_path: Path) -> None:
    write(tmp_path, a="one\n\ntwo lines\n", b="drei\n")
    source = TextFiles(
        paths=[str(tmp_path / "*.txt")], sample="line", eval_fraction=0, test_fraction=0
    )
    assert [text_of(source.train[i]) for i in range(3)] == [
        b"\0one\0",
        b"\0two lines\0",
        b"\0drei\0",
    ]
    assert source.mean_length == (4 + 10 + 5) / 3
    batch = source.collate(source.train.__getitems__([0, 1]))
    assert text_of(batch["tokens"][0][:4]) == b"\0one"
    assert (batch["targets"] != -100).sum() == 4 + 10


def test_a_long_document_is_cut_without_losing_a_target(tmp_path: Path) -> None:
    write(tmp_path, a="abcdefghijk", b="xy")
    source = TextFiles(
        paths=str(tmp_path / "*.txt"),
        sample="document",
        context=5,
        eval_fraction=0,
        test_fraction=0,
    )
    samples = [text_of(source.train[i]) for i in range(len(source.train))]
    assert samples == [b"\0abcde", b"efghij", b"jk\0", b"\0xy\0"]
    assert b"".join(sample[1:] for sample in samples) == b"abcdefghijk\0xy\0"


def test_lines_held_out_are_drawn_by_the_split_seed(tmp_path: Path) -> None:
    write(tmp_path, a="\n".join(f"line {number}" for number in range(50)))

    def held_out(seed: int) -> list[bytes]:
        source = TextFiles(
            paths=str(tmp_path / "a.txt"), sample="line", split_seed=seed, test_fraction=0.2
        )
        parts = [
            [text_of(part[i]) for i in range(len(part))]
            for part in (source.train, source.eval, source.test)
        ]
        assert [len(part) for part in parts] == [35, 5, 10]
        assert len({line for part in parts for line in part}) == 50
        return parts[1]

    assert held_out(1) == held_out(1)
    assert held_out(1) != held_out(2)


def test_files_of_their_own_for_evaluation_and_test(tmp_path: Path) -> None:
    write(tmp_path, a="a" * 50, b="b" * 30, c="c" * 20)
    source = TextFiles(
        paths=str(tmp_path / "a.txt"),
        eval_paths=str(tmp_path / "b.txt"),
        test_paths=[str(tmp_path / "c.txt")],
        context=4,
    )
    parts = (source.train, source.eval, source.test)
    assert [text_of(part.windows.unique()) for part in parts] == [b"a", b"b", b"c"]


class Words:
    """A tokenizer as a user may bring it."""

    vocab_size = 100

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_tokenizer_of_ones_own_makes_the_tokens(tmp_path: Path) -> None:
    write(tmp_path, a="a bb ccc dddd", b="eeeee f")
    source = TextFiles(
        paths=str(tmp_path / "*.txt"),
        tokenizer=Words(),
        end_token=99,
        context=3,
        eval_fraction=0,
        test_fraction=0,
    )
    assert source.train.windows.tolist() == [[1, 2, 3, 4], [4, 99, 5, 1]]
    assert source.vocab_size == 100
    assert not source.byte_level
    lines = TextFiles(
        paths=str(tmp_path / "*.txt"),
        tokenizer=Words(),
        sample="line",
        eval_fraction=0,
        test_fraction=0,
    )
    assert [lines.train[i].tolist() for i in range(2)] == [[1, 2, 3, 4], [5, 1]]


def test_a_tokenizer_file_without_its_library_names_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a="text")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ResourceError, match=r'library tokenizers.*pip install "tokenizers"'):
        _ = TextFiles(
            paths=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json")
        ).vocab_size


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"paths": "nowhere/*.txt"}, r"data\.paths: nothing matches nowhere"),
        ({"paths": []}, r"data\.paths names no file"),
        ({"paths": "."}, r"is a folder; give a pattern"),
        (
            {"paths": "a.txt", "eval_paths": "none.txt", "context": 8},
            r"data\.eval_paths: nothing matches",
        ),
        ({"paths": "empty.txt"}, r"the text of empty\.txt is too short"),
        ({"paths": "empty.txt", "sample": "line"}, r"the text of empty\.txt is too short"),
        ({"paths": "a.txt", "context": 500}, r"too short for one sample of 501 tokens"),
        ({"paths": "a.txt", "context": 30}, r"windows are too few to hold out"),
        ({"paths": "a.txt", "sample": "line"}, r"1 samples are too few to split"),
        ({"paths": "latin.txt", "tokenizer": Words()}, r"latin\.txt is not UTF-8"),
        ({"paths": "a.txt", "tokenizer": "none.json"}, r"no tokenizer file none\.json"),
        ({"paths": "a.txt", "tokenizer": object()}, r"does not say its vocab_size"),
        ({"paths": "a.txt", "sample": "word"}, r"choose window, line or document"),
        ({"paths": "a.txt", "context": 0}, r"data\.context=0"),
        ({"paths": "a.txt", "end_token": 256}, r"data\.end_token=256"),
    ],
)
def test_text_that_cannot_be_used_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a="some text, not much of it " * 4, empty="")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(ConfigError, match=words):
        _ = TextFiles(**knobs).train


def test_reading_text_needs_neither_numpy_nor_scikit_learn(tmp_path: Path) -> None:
    write(tmp_path, a="text " * 100)
    code = (
        "import sys; sys.modules.update(numpy=None, sklearn=None, PIL=None)\n"
        "from torsh_trainer.tasks.text import TextFiles\n"
        f"source = TextFiles(paths={str(tmp_path / 'a.txt')!r}, context=8)\n"
        "source.collate(source.train.__getitems__([0, 1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
