"""Which all-reduce is fastest for which size: what was measured, and the choice made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torsh_trainer.distributed.bench import FLAT
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.files import check_plain


@dataclass(frozen=True)
class AlgorithmTable:
    """Times of all-reduce, by algorithm and size, of one backend among so many processes.

    ``times_us`` maps an algorithm to (bytes, microseconds) pairs, ascending.
    """

    backend: str
    world_size: int
    times_us: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls, records: Iterable[Mapping[str, Any]], *, backend: str, world_size: int
    ) -> AlgorithmTable:
        """Of what ``comm bench`` has measured; empty when it measured something else."""
        found: dict[str, dict[int, float]] = {}
        for record in records:
            fits = (record["backend"], record["processes"]) == (backend, world_size)
            if fits and record["collective"] == "all_reduce":
                sizes = found.setdefault(record["algorithm"], {})
                sizes[int(record["bytes"])] = float(record["time_us"])
        times = {name: tuple(sorted(sizes.items())) for name, sizes in found.items()}
        return cls(backend, world_size, times)

    @classmethod
    def from_file(cls, path: str | Path, *, backend: str, world_size: int) -> AlgorithmTable:
        """Of a file that ``comm bench --json`` has written.

        Raises:
            ResourceError: the file cannot be read.
            ConfigError: it is no such file.
        """
        check_plain(Path(path))
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            return cls.from_records(content["records"], backend=backend, world_size=world_size)
        except OSError as error:
            raise ResourceError(
                f"cannot read {path}: {error.strerror}", fix="write it with comm bench --json"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not what comm bench --json writes", fix="measure again, or drop it"
            ) from error

    def choose(self, nbytes: int) -> str:
        """The fastest algorithm for a tensor of ``nbytes``; flat where nothing was measured.

        Between two sizes times are interpolated on logarithmic axes, beyond them taken as
        proportional to the size (above) or constant (below).
        """
        guesses = {name: _at(nbytes, points) for name, points in self.times_us.items() if points}
        return min(guesses, key=guesses.__getitem__) if guesses else FLAT

    def rows(self) -> list[tuple[int, str]]:
        """(bytes, fastest algorithm) for every size that was measured."""
        sizes = sorted({nbytes for points in self.times_us.values() for nbytes, _ in points})
        return [(nbytes, self.choose(nbytes)) for nbytes in sizes]


def _at(nbytes: int, points: tuple[tuple[int, float], ...]) -> float:
    if nbytes <= points[0][0]:
        return points[0][1]
    if nbytes >= points[-1][0]:
        size, time = points[-1]
        return time * nbytes / size
    for (low, time_low), (high, time_high) in pairwise(points):
        if low <= nbytes <= high:
            share = math.log(nbytes / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(time_low) + share * math.log(time_high))
    raise AssertionError("sizes ascend")
