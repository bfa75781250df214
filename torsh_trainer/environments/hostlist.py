"""SLURM's compressed lists: hosts ``node[01-03,07]`` and task counts ``4(x2),3``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torsh_trainer.errors import ConfigError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(text: str) -> Iterator[str]:
    """The host names of a list, in order, as ``scontrol show hostnames`` prints them.

    Raises:
        ConfigError: brackets or ranges are malformed.
    """
    for entry in _entries(text):
        yield from _expand(entry, text)


def first_host(text: str) -> str:
    """The first host of a list."""
    for host in hosts(text):
        return host
    raise _hostlist_error(text)


def counts(text: str) -> list[int]:
    """``4(x2),3`` as [4, 4, 3]: SLURM_TASKS_PER_NODE.

    Raises:
        ConfigError: it is not such a list.
    """
    result: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"cannot read the list of tasks per node {text!r}",
                fix="it should look like 4(x2),3; launcher.explain=true prints what is set",
            )
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _entries(text: str) -> Iterator[str]:
    """Splits at the commas that stand outside brackets."""
    depth, start = 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _hostlist_error(text)
        if char == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if depth:
        raise _hostlist_error(text)
    yield text[start:].strip()


def _expand(entry: str, text: str) -> Iterator[str]:
    match = re.search(r"\[([^\[\]]*)\]", entry)
    if match is None:
        if not entry:
            raise _hostlist_error(text)
        yield entry
        return
    head, tail = entry[: match.start()], entry[match.end() :]
    for number in _numbers(match[1], text):
        for rest in _expand(tail, text) if tail else ("",):
            yield f"{head}{number}{rest}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()) or int(last) < int(first):
            raise _hostlist_error(text)
        for value in range(int(first), int(last) + 1):
            yield str(value).zfill(len(first))  # node[08-10]: leading zeros are part of the name


def _hostlist_error(text: str) -> ConfigError:
    return ConfigError(
        f"cannot read the list of hosts {text!r}", fix="set MASTER_ADDR to rank 0's host"
    )
