"""What ``checkpoint.resume`` means: auto, best, never, or a path.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_trainer.checkpoint.store.integrity import MANIFEST, verify
from torsh_trainer.checkpoint.store.places import (
    StoragePath,
    Unreachable,
    parse_storage_path,
    subfolders,
)
from torsh_trainer.checkpoint.store.retention import (
    Keep,
    candidates,
    complete,
    is_named,
    is_unfinished,
    newest_first,
    read_manifests,
)
from torsh_trainer.errors import ConfigError, ResourceError, TorshError, nearest
from torsh_trainer.utils.files import disk_error

log = logging.getLogger("torsh_trainer")

_ELSEWHERE = "set checkpoint.dir or hydra.run.dir to where they lie, or give auto"
_START_AFRESH = "start with checkpoint.resume=never, or point checkpoint.dir elsewhere"


def find(
    resume: str,
    folder: StoragePath,
    storage_options: Mapping[str, Any] | None = None,
    keep: Keep | None = None,
) -> StoragePath | None:
    """The checkpoint to go on from; None to start afresh.

    ``auto``: the newest one in ``folder`` that verifies, None when there is none at all. ``best``:
    the best one there by the monitor of ``keep``. ``never``: None. Anything else is the path or URL
    (with ``storage_options``) of a checkpoint, of a run directory or of a folder of checkpoints.
    What is skipped is logged, with the reason.

    Raises:
        ConfigError: the path is not there, or holds no checkpoint.
        ResourceError: there are checkpoints, and every one is damaged.
        Unreachable: a remote store did not answer.
    """
    return first_sound(offers(resume, folder, storage_options, keep), verify)


def offers(
    resume: str,
    folder: StoragePath,
    storage_options: Mapping[str, Any] | None = None,
    keep: Keep | None = None,
) -> Sequence[StoragePath]:
    """The checkpoints that ``resume`` may mean, best first; not yet verified.

    Raises:
        ConfigError: the path is not there, or holds no checkpoint; or none was measured (``best``).
        ResourceError: it cannot be read.
        Unreachable: a remote store did not answer.
    """
    if resume == "never":
        return []
    if resume == "auto":
        return _newest_first(folder)
    if resume == "best":
        return _best_first(folder, keep or Keep())
    path = parse_storage_path(resume, storage_options)
    try:
        return _list_candidates(resume, path)
    except OSError as error:
        raise disk_error(error, "read", Path(str(path))) from error


def _list_candidates(resume: str, path: StoragePath) -> Sequence[StoragePath]:
    if not resume.strip() or not path.exists():
        raise _no_path(resume, "nothing is there", offer=_suggest_nearest(resume, path))
    if not path.is_dir():
        raise _no_path(resume, "that is a file, and a checkpoint is a folder")
    if is_named(path) or (path / MANIFEST).exists():
        return [path]
    found = _newest_first(path / "checkpoints") or _newest_first(path)
    if not found:
        runs = [below for below in subfolders(path) if candidates(below / "checkpoints")]
        offer = f"name a run in it, such as {max(runs, key=str)}" if runs else ""
        raise _no_path(resume, f"there is no checkpoint in {path}", offer=offer)
    return found


def _best_first(folder: StoragePath, keep: Keep) -> list[StoragePath]:
    found = newest_first(read_manifests(folder))
    best = keep.rank_by_monitor(found)
    if best:
        return [one.path for one in best]
    if not found:
        raise _no_path("best", f"there is no checkpoint in {folder}", offer=_ELSEWHERE)
    metrics = {name for one in found for name in one.manifest.metrics}
    raise _no_path(
        "best",
        f"no checkpoint in {folder} was measured by checkpoint.monitor={keep.monitor}",
        offer=f"set checkpoint.monitor: {nearest(keep.monitor, metrics)}"
        if metrics
        else "let trainer.eval_every meet checkpoint.every_steps, or give auto or a path",
    )


def _no_path(resume: str, why: str, *, offer: str = "") -> ConfigError:
    fix = "give auto, best, never, or the path of a checkpoint (.../step-00000100) or of a run"
    return ConfigError(f"checkpoint.resume={resume}: {why}", fix=offer or fix, resume=resume)


def _suggest_nearest(resume: str, path: StoragePath) -> str:
    """The nearest of what lies beside a path that is not there, and of the words; or nothing."""
    known = [] if "/" in resume else ["auto", "best", "never"]
    with contextlib.suppress(OSError):
        if resume.strip() and isinstance(path, Path):
            known += [one.name for one in subfolders(path.parent)]
    offer = nearest(path.name.lower(), known)
    return offer if offer.startswith("did you mean") else ""


def first_sound(
    paths: Sequence[StoragePath], check: Callable[[StoragePath], Any]
) -> StoragePath | None:
    """The first of ``paths`` that ``check`` accepts; None when there are none.

    Raises:
        ResourceError: there are some, and ``check`` refuses every one.
        ConfigError: there is one, and it is of a newer format.
        Unreachable: a remote store did not answer.
    """
    refused: list[TorshError] = []
    for path in paths:
        try:
            check(path)
        except Unreachable:  # which says nothing about the checkpoint
            raise
        except TorshError as error:
            refused.append(error)
            if len(paths) > 1:
                log.warning("skipped: %s", error.sentence)
        else:
            return path
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise ResourceError(
            f"none of the {len(refused)} checkpoints in {paths[0].parent} can be used, "
            f"the newest because {refused[0].sentence}",
            fix=_START_AFRESH,
        )
    return None


def locate(folder: StoragePath, step: int | None) -> StoragePath:
    """The complete checkpoint of ``step`` in ``folder`` (None: the newest).

    Raises:
        ConfigError: there is none.
    """
    found = complete(folder)
    for one in newest_first(found):
        if step is None or one.manifest.step == step:
            return one.path
    steps = ", ".join(str(one.manifest.step) for one in found)
    if step is not None and steps:
        raise ConfigError(
            f"no checkpoint of step {step} in {folder}", fix=f"there are those of steps {steps}"
        )
    raise ConfigError(f"no checkpoint in {folder}", fix=_START_AFRESH)


def _newest_first(folder: StoragePath) -> list[StoragePath]:
    """By the order of saving; those without a readable manifest come first, to be refused.

    What was never finished is no checkpoint.
    """
    ordered = [one.path for one in newest_first(read_manifests(folder))]
    others = [path for path in reversed(candidates(folder)) if path not in ordered]
    return [path for path in others if not is_unfinished(path)] + ordered
