"""Texts in a file: its lines, the rows of a table, or objects of JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.csv_file import column_of, read_table

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OBJECTS = (".jsonl", ".ndjson")


def columns_of(path: str, names: Sequence[str]) -> list[list[str]]:
    """The columns ``names`` of a .csv, .tsv or .jsonl file; of any other, its lines as one column.

    Lines without text are left out.

    Raises:
        ConfigError: the file or a column is missing, or a row is not readable; names the row.
    """
    suffix = Path(path).suffix.lower()
    if suffix in _DELIMITERS:
        table = read_table(path, _DELIMITERS[suffix])
        return [column_of(table, name, path) for name in names]
    lines = [(n, line) for n, line in enumerate(_lines(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no text", fix="give a file with a text on every line")
    if suffix in _OBJECTS:
        rows = [_values(path, number, line, names) for number, line in lines]
        return [list(column) for column in zip(*rows, strict=True)]
    if len(names) > 1:
        raise ConfigError(
            f"{path} is read by lines, which have no column {names[-1]!r}",
            fix="give a .csv, .tsv or .jsonl file",
        )
    return [[line for _, line in lines]]


def _lines(path: str) -> list[str]:
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # by \n alone, as JSON Lines has it
            return [line.rstrip("\n") for line in file]
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}", fix="check the path (relative to where you start the run)"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error})", fix="give text in UTF-8") from error


def _values(path: str, number: int, line: str, names: Sequence[str]) -> list[str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: line {number} is not JSON ({error})", fix="write one object a line"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: line {number} is no object", fix='write {"text": ...} on every line'
        )
    values = []
    for name in names:
        if name not in found:
            raise ConfigError(
                f"{path}: line {number} has no column {name!r}", fix=nearest(name, found)
            )
        value = found[name]
        if value is None or isinstance(value, dict | list):
            raise ConfigError(
                f"{path}: line {number}, column {name!r} is no text", fix="write it as a string"
            )
        values.append(value if isinstance(value, str) else json.dumps(value))
    return values
