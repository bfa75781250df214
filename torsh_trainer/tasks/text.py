"""Text as tokens: the standard library's own source, or a user's files."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.tasks.language_model import IGNORED
from torsh_trainer.tasks.sources import (
    LoadedOnUse,
    Splits,
    check_fractions,
    library,
    row_numbers,
    split,
)


class TokenWindows(Dataset[Tensor]):
    """Samples of one length, (samples, context + 1) tokens; a batch is a tensor of such rows."""

    def __init__(self, windows: Tensor) -> None:
        self.windows = windows

    @classmethod
    def of(cls, stream: Tensor, *, context: int) -> TokenWindows:
        """Windows of a stream (tokens,), each starting ``context`` after the one before: every
        token but the first is a target once. What is left over at the end is not used."""
        return cls(stream.unfold(0, context + 1, context))  # a view: nothing is copied

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Tensor:
        return self.windows[row_numbers(indices)]


class TokenSequences(Dataset[Tensor]):
    """Pieces of a stream (tokens,), from ``starts`` up to ``stops``, of different lengths."""

    def __init__(self, stream: Tensor, *, starts: list[int], stops: list[int]) -> None:
        self.stream, self.starts, self.stops = stream, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.stream[self.starts[index] : self.stops[index]]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> list[Tensor]:
        rows = indices.tolist() if isinstance(indices, Tensor) else indices
        return [self[index] for index in rows]

    def take(self, rows: Sequence[int]) -> TokenSequences:
        """The samples at ``rows``, as a dataset."""
        starts, stops = [self.starts[i] for i in rows], [self.stops[i] for i in rows]
        return TokenSequences(self.stream, starts=starts, stops=stops)


def pad_tokens(samples: Any) -> Any:
    """A batch out of token sequences of different lengths.

    ``tokens`` and ``targets`` are (batch, longest - 1) int64, padded on the right with 0 and with
    -100, which does not count: causal attention never looks to the right, so that no mask is
    needed. A batch that was fetched whole stays as it is.
    """
    if isinstance(samples, Tensor):
        return samples
    tokens = [sample.long() for sample in samples]
    return {
        "tokens": pad_sequence([t[:-1] for t in tokens], batch_first=True),
        "targets": pad_sequence([t[1:] for t in tokens], batch_first=True, padding_value=IGNORED),
    }


@dataclass(frozen=True, kw_only=True)
class StdlibText(LoadedOnUse):
    """The source text of Python's standard library, byte by byte.

    All ``.py`` files under ``folder`` (null: the running Python's own library), without tests,
    installed packages and what programs wrote, in the order of their names and with a zero byte
    between them. Whole files are held out: the ``eval_fraction`` and ``test_fraction`` of them
    whose names hash lowest. A sample is a window of ``context + 1`` bytes.

    Raises:
        ConfigError: the folder has no Python files, or too few for the three parts.
    """

    context: int = 128
    eval_fraction: float = 0.05
    test_fraction: float = 0.05
    folder: str | None = None

    vocab_size: ClassVar[int] = 256
    byte_level: ClassVar[bool] = True
    fixed_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_context(self.context)
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)

    def load(self) -> Splits:
        root = Path(self.folder or sysconfig.get_path("stdlib"))
        names = sorted(path.relative_to(root).as_posix() for path in _library_files(root))
        if not names:
            raise ConfigError(
                f"there are no Python files in {root}",
                fix="point data.folder=FOLDER at Python source (an interpreter may be zipped)",
            )
        by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        held_out = round(len(names) * self.eval_fraction)
        tested = held_out + round(len(names) * self.test_fraction)
        parts = (by_hash[tested:], by_hash[:held_out], by_hash[held_out:tested])
        train, evaluation, test = (self._windows(root, sorted(part)) for part in parts)
        if train is None:
            raise _too_short("training", self.context)
        return Splits(train, evaluation, test, predict=test)

    def _windows(self, root: Path, names: list[str]) -> TokenWindows | None:
        if not names:
            return None
        content = bytearray(b"\0".join(_content(root / name) for name in names))
        if len(content) <= self.context:
            raise _too_short(f"{len(names)} files", self.context)
        return TokenWindows.of(torch.frombuffer(content, dtype=torch.uint8), context=self.context)


def _library_files(root: Path) -> Iterator[Path]:
    passed_over = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    passed_over |= {"encodings", "pydoc_data"}  # tables and a manual, written by programs
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in passed_over and not name.startswith("config-")
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


@dataclass(frozen=True, kw_only=True)
class TextFiles(LoadedOnUse):
    """A user's text files, byte by byte or through a tokenizer.

    ``paths`` are files or patterns (``books/**/*.txt``), read in the order of their names.
    ``sample`` says what one sample is: ``window``, ``context + 1`` tokens out of all text in a
    row, each sample as long as every other; ``line``, one line without its end, blank ones left
    out; ``document``, one file. A line or document longer than ``context`` is cut into several
    samples, and nothing is dropped; a batch is padded to its longest sample, and padding does not
    count.

    ``tokenizer`` is null for bytes, the path of a Hugging Face ``tokenizer.json`` (library
    ``tokenizers``), or a node with a ``_target_`` that has ``encode(text) -> token numbers`` and
    ``vocab_size``. ``end_token`` stands between files, and before and after every line or document
    that is a sample; null is 0 for bytes (text does not hold it), and none for a tokenizer.

    Held out are ``eval_paths`` and ``test_paths`` where they are given, else ``eval_fraction`` and
    ``test_fraction``: of windows the last, of lines and documents as ``split_seed`` draws them.

    Raises:
        ConfigError: a file is missing, empty or not UTF-8, or there is too little text.
        ResourceError: the library ``tokenizers`` is asked for and not installed.
    """

    paths: str | Sequence[str]
    eval_paths: str | Sequence[str] | None = None
    test_paths: str | Sequence[str] | None = None
    sample: Literal["window", "line", "document"] = "window"
    context: int = 128
    tokenizer: Any = None
    end_token: int | None = None
    eval_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0

    collate = staticmethod(pad_tokens)

    def __post_init__(self) -> None:
        _check_context(self.context)
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)
        if self.sample not in ("window", "line", "document"):
            raise ConfigError(
                f"data.sample={self.sample} is unknown", fix="choose window, line or document"
            )
        if self.end_token is not None and not 0 <= self.end_token < self.vocab_size:
            raise ConfigError(
                f"data.end_token={self.end_token} is none of the {self.vocab_size} tokens",
                fix="give the number of the tokenizer's end-of-text token, or null",
            )

    @property
    def fixed_length(self) -> bool:
        """Every sample has ``context`` targets."""
        return self.sample == "window"

    @property
    def byte_level(self) -> bool:
        """A token is a byte."""
        return self.tokenizer is None

    @cached_property
    def vocab_size(self) -> int:
        """How many different tokens there can be."""
        return 256 if self.byte_level else _vocab_size(self._tokenizer)

    @cached_property
    def mean_length(self) -> float:
        """Targets of a training sample, on average."""
        if self.fixed_length:
            return float(self.context)
        train = self.train
        return (sum(train.stops) - sum(train.starts)) / len(train) - 1

    def load(self) -> Splits:
        train = self._read("paths", self.paths)
        shares = {"eval": self.eval_fraction, "test": self.test_fraction}
        given = {"eval": self.eval_paths, "test": self.test_paths}
        read = {
            name: self._read(f"{name}_paths", paths)
            for name, paths in given.items()
            if paths is not None
        }
        parts = _cut(
            train,
            [0.0 if name in read else share for name, share in shares.items()],
            seed=self.split_seed,
        )
        evaluation, test = read.get("eval", parts[1]), read.get("test", parts[2])
        return Splits(parts[0], evaluation, test, predict=test or evaluation)

    def _read(self, knob: str, paths: str | Sequence[str]) -> TokenWindows | TokenSequences:
        files = _files(knob, paths)
        what = str(files[0]) if len(files) == 1 else f"{len(files)} files (data.{knob})"
        if self.sample == "window":
            pieces = [piece for path in files for piece in (self._end, self._tokens(path))]
            stream = self._join_pieces(pieces[1:])
            if len(stream) <= self.context:
                raise _too_short(what, self.context)
            return TokenWindows.of(stream, context=self.context)
        texts = [self._tokens(path, text) for path in files for text in self._texts(path)]
        return self._sequences(what, [self._end + text + self._end for text in texts])

    def _texts(self, path: Path) -> list[bytes]:
        if self.sample == "document":
            return [_content(path)]
        return [line for line in _content(path).splitlines() if line.strip()]

    def _tokens(self, path: Path, text: bytes | None = None) -> Any:
        """``text``, or all of ``path``: bytes, or a list of token numbers."""
        content = _content(path) if text is None else text
        if self.byte_level:
            return content
        try:
            return self._encode(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 text ({error.reason})",
                fix="convert it, or set data.tokenizer=null to read bytes",
            ) from error

    @property
    def _end(self) -> Any:
        if self.byte_level:
            return bytes([self.end_token or 0])
        return [] if self.end_token is None else [self.end_token]

    def _sequences(self, what: str, texts: list[Any]) -> TokenSequences:
        """Samples of at most ``context`` targets; pieces of one text share the token at the cut."""
        starts, stops, offset = [], [], 0
        for tokens in texts:
            edges = [*range(0, len(tokens) - 1, self.context), len(tokens) - 1]
            for start, last in pairwise(edges):
                starts.append(offset + start)
                stops.append(offset + last + 1)
            offset += len(tokens)
        if not starts:
            raise _too_short(what, 1)
        return TokenSequences(self._join_pieces(texts), starts=starts, stops=stops)

    def _join_pieces(self, pieces: Sequence[Any]) -> Tensor:
        if self.byte_level:
            content = bytearray(b"".join(pieces))
            return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
        return torch.cat([torch.tensor(piece, dtype=torch.int32) for piece in pieces])

    @cached_property
    def _tokenizer(self) -> Any:
        if not isinstance(self.tokenizer, str):
            _vocab_size(self.tokenizer)  # now, and not at the first text
            return self.tokenizer
        if not Path(self.tokenizer).is_file():
            raise ConfigError(
                f"there is no tokenizer file {self.tokenizer}",
                fix="give the path of a tokenizer.json, or null to read bytes",
            )
        tokenizers = library("tokenizers", needs="data.tokenizer=FILE", install="tokenizers")
        try:
            return tokenizers.Tokenizer.from_file(self.tokenizer)
        except Exception as error:
            raise ConfigError(
                f"{self.tokenizer} is not a tokenizer file ({error})",
                fix="give a tokenizer.json as Hugging Face writes it",
            ) from error

    @cached_property
    def _encode(self) -> Callable[[str], list[int]]:
        encode = self._tokenizer.encode

        def numbers(text: str) -> list[int]:
            encoded = encode(text)
            return list(getattr(encoded, "ids", encoded))

        return numbers


def _cut(data: TokenWindows | TokenSequences, shares: list[float], *, seed: int) -> list[Any]:
    """``data`` in three: training, and a part for each share (None for a share of 0)."""
    if isinstance(data, TokenSequences):
        rows = split(len(data), fractions=shares, seed=seed)
        return [data.take(part.tolist()) if len(part) else None for part in rows]
    sizes = [round(len(data) * share) for share in shares]
    sizes = [len(data) - sum(sizes), *sizes]
    if any(size < 1 for size, share in zip(sizes, (1.0, *shares), strict=True) if share):
        raise ConfigError(
            f"{len(data)} windows are too few to hold out parts of them",
            fix="bring more text, make data.context smaller, or set data.eval_fraction=0",
        )
    return [TokenWindows(part) if len(part) else None for part in data.windows.split(sizes)]


def _files(knob: str, paths: str | Sequence[str]) -> list[Path]:
    found: set[Path] = set()
    for pattern in [paths] if isinstance(paths, str) else paths:
        if Path(pattern).is_dir():
            raise ConfigError(
                f"data.{knob}={pattern} is a folder", fix=f'give a pattern: "{pattern}/**/*.txt"'
            )
        here = {Path(name) for name in glob.glob(pattern, recursive=True)}  # noqa: PTH207
        files = {path for path in here if path.is_file()}
        if not files:
            raise ConfigError(
                f"data.{knob}: nothing matches {pattern}",
                fix="give a file, or a pattern such as books/**/*.txt",
            )
        found |= files
    if not found:
        raise ConfigError(f"data.{knob} names no file", fix="give a file or a pattern")
    return sorted(found)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})", fix="check the file") from error
    return content


def _vocab_size(tokenizer: Any) -> int:
    for name in ("vocab_size", "n_vocab", "get_vocab_size"):
        size = getattr(tokenizer, name, None)
        if size is not None and hasattr(tokenizer, "encode"):
            return int(size() if callable(size) else size)
    raise ConfigError(
        f"a tokenizer of type {type(tokenizer).__name__} does not say its vocab_size, or cannot "
        "encode",
        fix="give it an attribute vocab_size and a method encode(text)",
    )


def _check_context(context: int) -> None:
    if context < 1:
        raise ConfigError(f"data.context={context} is not a positive number", fix="give 1 or more")


def _too_short(what: str, context: int) -> TorshError:
    return ConfigError(
        f"the text of {what} is too short for one sample of {context + 1} tokens",
        fix="bring more text, or make data.context smaller",
    )
