"""Tables: comma-separated values with a header."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.sources import (
    LoadedOnUse,
    Splits,
    TensorData,
    balance_classes,
    check_fractions,
    split,
)
from torsh_trainer.utils.files import check_plain

Columns = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class CSV(LoadedOnUse):
    """A table whose first row names the columns: features (columns,) float32 and a target.

    ``kind`` says what ``target`` is: ``classification``, a label (any text; classes are numbered
    in sorted order), or ``regression``, a number (a list of columns: several). ``features`` null
    takes all columns but the target and ``weight``. ``standardise`` shifts and scales each feature
    to mean 0 and standard deviation 1 over the training rows. ``weight`` names a column of
    sampling weights for ``data.weighted=true``; without it, classes are drawn equally often.

    Held out are the rows of ``eval_path`` and ``test_path`` where they are given, else
    ``eval_fraction`` and ``test_fraction`` of the rows of ``path``, drawn by ``split_seed`` (each
    class alike). ``predict_path`` needs no target column.

    Raises:
        ConfigError: a file or column is missing, a cell is not a number (its row and column are
            named), or there are too few rows.
    """

    path: str
    target: str | Sequence[str]
    kind: Literal["classification", "regression"] = "classification"
    features: Sequence[str] | None = None
    weight: str | None = None
    standardise: bool = True
    eval_path: str | None = None
    test_path: str | None = None
    predict_path: str | None = None
    eval_fraction: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0
    delimiter: str = ","

    def __post_init__(self) -> None:
        check_fractions(eval_fraction=self.eval_fraction, test_fraction=self.test_fraction)
        if self.kind not in ("classification", "regression"):
            raise ConfigError(
                f"data.kind={self.kind} is unknown", fix="choose classification or regression"
            )
        if self.kind == "classification" and len(self._targets) != 1:
            raise ConfigError(
                f"classification has one target column, not {len(self._targets)}",
                fix="give data.target one name, or set data.kind=regression",
            )
        if len(self.delimiter) != 1:
            raise ConfigError(
                f"data.delimiter={self.delimiter!r} is not one character", fix='e.g. ";" or "\\t"'
            )

    @property
    def in_features(self) -> int:
        """Numbers of a sample."""
        return len(self._features)

    @property
    def num_targets(self) -> int | None:
        """Numbers of a regression target; None for classes."""
        return len(self._targets) if self.kind == "regression" else None

    @property
    def num_classes(self) -> int | None:
        """How many classes the training rows have; None for numbers."""
        return None if self.classes is None else len(self.classes)

    @cached_property
    def classes(self) -> list[str] | None:
        """The classes of the training rows by number; None for numbers."""
        if self.kind == "regression":
            return None
        return sorted(set(column_of(self._table, self._targets[0], self.path)))

    def load(self) -> Splits:
        if self.weight is not None:
            column_of(self._table, self.weight, self.path)  # now, not when weights are asked for
        features, targets = self._rows
        parts = self._parts
        scale = _Standardise(features[parts[0]] if self.standardise else None)
        data = TensorData(scale(features), targets)
        train, held_out, test = (data.take(part) for part in parts)
        if self.eval_path:
            held_out = self._other(self.eval_path, scale)
        if self.test_path:
            test = self._other(self.test_path, scale)
        predict = test
        if self.predict_path:
            table = read_table(self.predict_path, self.delimiter)
            predict = TensorData(scale(self._numbers(table, self._features, self.predict_path)))
        return Splits(train, held_out, test, predict)

    def sample_weights(self) -> Tensor | None:
        """The column ``weight``, else every class alike; None for numbers without the column."""
        rows = self._parts[0]
        if self.weight is None:
            return None if self.kind == "regression" else balance_classes(self._rows[1][rows])
        weights = self._numbers(self._table, [self.weight], self.path).squeeze(1)[rows]
        if weights.min() < 0 or not weights.any():
            raise ConfigError(
                f"{self.path}: column {self.weight!r} holds no sampling weights",
                fix="give weights of 0 or more, not all of them 0",
            )
        return weights.double()

    @property
    def _targets(self) -> list[str]:
        return [self.target] if isinstance(self.target, str) else list(self.target)

    @cached_property
    def _features(self) -> list[str]:
        if self.features is not None:
            return list(self.features)
        others = {*self._targets, self.weight}
        return [name for name in self._table if name not in others]

    @cached_property
    def _table(self) -> Columns:
        return read_table(self.path, self.delimiter)

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return self._pairs(self._table, self.path)

    @cached_property
    def _parts(self) -> list[Tensor]:
        """Rows of ``path`` for training, evaluation and test."""
        features, targets = self._rows
        shares = [
            0.0 if self.eval_path else self.eval_fraction,
            0.0 if self.test_path else self.test_fraction,
        ]
        labels = targets if self.kind == "classification" else None
        return split(len(features), fractions=shares, seed=self.split_seed, labels=labels)

    def _other(self, path: str, scale: _Standardise) -> TensorData:
        features, targets = self._pairs(read_table(path, self.delimiter), path)
        return TensorData(scale(features), targets)

    def _pairs(self, table: Columns, path: str) -> tuple[Tensor, Tensor]:
        features = self._numbers(table, self._features, path)
        if self.classes is None:
            return features, self._numbers(table, self._targets, path)
        numbers = {name: number for number, name in enumerate(self.classes)}
        column = column_of(table, self._targets[0], path)
        unseen = set(column) - numbers.keys()
        if unseen:
            raise ConfigError(
                f"{path}: no training row has the class {min(unseen)!r}",
                fix=f"add one to {self.path}, or leave those rows out",
            )
        return features, torch.tensor([numbers[name] for name in column])

    def _numbers(self, table: Columns, names: Sequence[str], path: str) -> Tensor:
        """Columns as float32, (rows, columns)."""
        if not names:
            raise ConfigError(
                f"{path} has no feature columns beside the target",
                fix="name them: data.features=[COLUMN, ...]",
            )
        columns = [_floats(column_of(table, name, path), name, path) for name in names]
        return torch.tensor(columns, dtype=torch.float32).t().contiguous()


class _Standardise:
    """Shifts and scales columns to mean 0 and standard deviation 1 over ``training`` (rows,
    columns); a column that never changes becomes 0. None changes nothing."""

    def __init__(self, training: Tensor | None) -> None:
        self.mean: Tensor | float = 0.0
        self.deviation: Tensor | float = 1.0
        if training is not None:
            deviation = training.std(0, correction=0)
            self.mean = training.mean(0)
            self.deviation = torch.where(deviation > 0, deviation, 1.0)

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.deviation


def read_table(path: str, delimiter: str) -> Columns:
    """Column name -> its cells.

    Raises:
        ConfigError: there is no such file, or it is no table with a header.
    """
    check_plain(Path(path))
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, delimiter=delimiter))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}", fix="check the path (relative to where you start the run)"
        ) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"cannot read {path} ({error})", fix="give a CSV file in UTF-8"
        ) from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise ConfigError(
            f"{path} has no rows", fix="give a CSV file whose first line names the columns"
        )
    header = [name.strip() for name in rows[0]]
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ConfigError(f"{path} has two columns {twice!r}", fix="rename one of them")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            raise ConfigError(
                f"{path}: row {number} has {len(row)} cells, the header {len(header)}",
                fix="correct the row, or set data.delimiter",
            )
    return dict(zip(header, map(list, zip(*rows[1:], strict=True)), strict=True))


def column_of(table: Columns, name: str, path: str) -> list[str]:
    """The cells of a column.

    Raises:
        ConfigError: the table of ``path`` has no such column.
    """
    if name not in table:
        raise ConfigError(f"{path} has no column {name!r}", fix=nearest(name, table))
    return table[name]


def _floats(cells: list[str], name: str, path: str) -> list[float]:
    numbers = []
    for row, cell in enumerate(cells, start=1):
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"{path}: row {row}, column {name!r} is {cell!r}, not a number",
                fix="correct it, or leave the column out with data.features=[...]",
                row=row,
                column=name,
            )
        numbers.append(number)
    return numbers
