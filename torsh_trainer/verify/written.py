"""The verdict as JSON, for programs; docs/verify.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ResourceError
from torsh_trainer.utils.files import disk_error, strict_json, write_file
from torsh_trainer.verify.compare import QUANTITIES, Difference, Moment
from torsh_trainer.verify.running import RungOutcome, Verdict, bounds_of

FORMAT, VERSION = "torsh-verify", 1


def write(verdict: Verdict, home: Path, beside: Mapping[str, Any] | None = None) -> Path:
    """Writes ``verify.json``, with what stands ``beside`` the verdict, into ``home``.

    Returns its path.

    Raises:
        ResourceError: the disk refused.
    """
    content = {**content_of(verdict, home), **(beside or {})}
    return write_text(home / "verify.json", strict_json(content))


def write_text(path: Path, text: str) -> Path:
    """Writes a file of the verdict; returns its path.

    Raises:
        ResourceError: the disk refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        told: ResourceError = disk_error(error, "write", path, setting="verify.dir")
        raise told from error
    return path


def content_of(verdict: Verdict, home: Path) -> dict[str, Any]:
    """The content of verify.json."""
    options = verdict.options
    return {
        "format": FORMAT,
        "version": VERSION,
        "exit_code": verdict.exit_code,
        "recipe": verdict.recipe,
        "steps": options.steps,
        "reference": options.reference.label,
        "precision": verdict.precision,
        **verdict.batch,
        **({"order": verdict.order} if verdict.order else {}),
        "rungs": [_rung(verdict, rung, home) for rung in options.ladder],
    }


def _rung(verdict: Verdict, rung: str, home: Path) -> dict[str, Any]:
    bounds = bounds_of(verdict.options, verdict.precision, rung)
    return {
        "rung": rung,
        "bound": bounds.values,
        "bound_of_parameters": bounds.parameters,
        "strategies": [_outcome(o, home) for o in verdict.outcomes if o.rung == rung],
    }


def _outcome(outcome: RungOutcome, home: Path) -> dict[str, Any]:
    comparison, suspect = outcome.comparison, outcome.suspect
    largest = {q: comparison.largest(q) for q in QUANTITIES} if comparison else {}
    return {
        "label": outcome.entry.label,
        "strategy": outcome.entry.strategy,
        "knobs": outcome.entry.knobs,
        "processes": outcome.processes,
        "status": outcome.status,
        "words": outcome.words,
        "largest": {
            quantity: None if found is None else {"step": found[0], **_difference(found[1])}
            for quantity, found in largest.items()
        },
        "suspect": None if suspect is None else vars(suspect),
        "run_dir": outcome.run_dir.relative_to(home).as_posix(),
        "facts": outcome.facts,
        "rows": outcome.rows,
        "differences": [_moment(moment) for moment in comparison.moments] if comparison else [],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    differences = {str(q): _difference(d) for q, d in moment.differences.items()}
    return {"step": moment.step, **differences}


def _difference(difference: Difference) -> dict[str, Any]:
    worst = {"parameter": difference.worst} if difference.worst else {}
    return {"absolute": difference.absolute, "relative": difference.relative, **worst}
