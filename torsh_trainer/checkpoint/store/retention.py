"""Which checkpoints lie in a folder, which is the newest, and which may go.

Needs no torch.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, cast

from torsh_trainer.checkpoint.store.integrity import MANIFEST, Manifest, check_sizes, read_manifest
from torsh_trainer.checkpoint.store.places import StoragePath, Unreachable, names, subfolders
from torsh_trainer.errors import TorshError

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""A file beside those that are not a checkpoint yet, or no longer, where nothing can be hidden."""

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
Place = TypeVar("Place", bound=StoragePath)


class Found(NamedTuple):
    """A complete checkpoint."""

    path: StoragePath
    manifest: Manifest


@dataclass(frozen=True)
class Keep:
    """What stays: a checkpoint that any of the rules keeps, and the newest; without rules all.

    ``last`` is a number of checkpoints, and so is ``best``, by ``monitor`` among the metrics of a
    checkpoint; of two equal ones the older is better. ``every`` keeps steps that it divides.
    """

    last: int | None = None
    best: int | None = None
    every: int | None = None
    monitor: str = "loss"
    monitor_mode: Literal["min", "max"] = "min"

    def find_expired(self, found: Iterable[Found]) -> list[Found]:
        """Those of ``found`` (complete ones of one run) that no rule keeps, oldest first."""
        ordered = newest_first(found)
        if self.last is None and self.best is None and self.every is None:
            return []
        kept = {one.path for one in ordered[: max(1, self.last or 0)]}
        kept |= {one.path for one in self._best(ordered)}
        return [one for one in reversed(ordered) if one.path not in kept and not self._is_due(one)]

    def _is_due(self, one: Found) -> bool:
        return self.every is not None and one.manifest.step % self.every == 0

    def _best(self, ordered: Sequence[Found]) -> list[Found]:
        return [] if self.best is None else self.rank_by_monitor(ordered)[: self.best]

    def rank_by_monitor(self, ordered: Sequence[Found]) -> list[Found]:
        """Those of ``ordered`` (newest first) that were measured by ``monitor``, best first."""
        sign = 1.0 if self.monitor_mode == "min" else -1.0
        measured = []
        for one in reversed(ordered):  # the sort is stable: the older comes first
            value = one.manifest.metrics.get(self.monitor)
            # What is not finite is null in a manifest.
            if value is not None and math.isfinite(value):
                measured.append((sign * value, one))
        measured.sort(key=lambda pair: pair[0])
        return [one for _, one in measured]


def folder_name(step: int, attempt: int = 1) -> str:
    """``step-00000100``: eight digits, so that names sort as steps do.

    Where that name is taken, the second ``attempt`` is called ``step-00000100.2``.
    """
    return f"step-{step:08d}" if attempt == 1 else f"step-{step:08d}.{attempt}"


def is_name(name: str) -> bool:
    """True for what a checkpoint may be called."""
    return bool(_NAME.fullmatch(name))


def is_named(path: StoragePath) -> bool:
    """True for a folder that is called like a checkpoint."""
    return is_name(path.name) and path.is_dir()


def is_unfinished(path: StoragePath) -> bool:
    """True for what somebody still writes, or has never finished writing.

    Raises:
        Unreachable: a remote store did not answer.
    """
    there = names(path)
    return UNFINISHED in there and MANIFEST not in there


def candidates(folder: Place) -> list[Place]:
    """Folders that are called like a checkpoint, by step."""
    named = [path for path in subfolders(folder) if is_name(path.name)]
    return cast("list[Place]", sorted(named, key=_by_step))


def read_manifests(folder: StoragePath, known: dict[str, Manifest] | None = None) -> list[Found]:
    """The checkpoints in ``folder`` whose manifest can be read, by step.

    ``known`` are manifests by name of folder that need no second look; new ones are added.

    Raises:
        Unreachable: a remote store did not answer.
    """
    known = {} if known is None else known
    found = []
    for path in candidates(folder):
        try:
            if path.name not in known:
                known[path.name] = read_manifest(path)
            found.append(Found(path, known[path.name]))
        except Unreachable:
            raise
        except TorshError as error:
            log.debug("passed over %s: %s", path, error.sentence)
    return found


def complete(folder: StoragePath, known: dict[str, Manifest] | None = None) -> list[Found]:
    """The checkpoints in ``folder`` whose files are all there in full size, by step.

    Raises:
        Unreachable: a remote store did not answer.
    """
    return [one for one in read_manifests(folder, known) if _is_whole(one)]


def newest_first(found: Iterable[Found]) -> list[Found]:
    """By the order of saving: a run that went back to an older step saves newer checkpoints."""
    return sorted(found, key=lambda one: one.manifest.sequence, reverse=True)


def next_sequence(folder: StoragePath, known: dict[str, Manifest] | None = None) -> int:
    """The number of the next save into ``folder``."""
    return 1 + max((one.manifest.sequence for one in read_manifests(folder, known)), default=0)


def find_expired(
    folder: StoragePath, *, run: str, keep: Keep, known: dict[str, Manifest] | None = None
) -> list[Found]:
    """What goes of the checkpoints of ``run``, oldest first.

    Checkpoints of other runs, incomplete ones and anything else in the folder are not ours to
    delete.
    """
    ours = [one for one in read_manifests(folder, known) if one.manifest.run == run]
    return keep.find_expired(filter(_is_whole, ours))


def _is_whole(one: Found) -> bool:
    try:
        check_sizes(one.path, one.manifest)
    except Unreachable:
        raise
    except TorshError as error:
        log.debug("passed over %s: %s", one.path, error.sentence)
        return False
    return True


def _by_step(path: StoragePath) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 1)
