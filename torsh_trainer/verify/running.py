"""The runs of a verification, one after another, and what each of them came to."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torsh_trainer.errors import Interrupted, TorshError
from torsh_trainer.verify.compare import Bounds, Comparison, compare
from torsh_trainer.verify.options import Entry, VerifyOptions
from torsh_trainer.verify.record import Record
from torsh_trainer.verify.suspects import Suspect, suspect_of

Status = Literal["reference", "agrees", "apart", "refused", "missing", "failed"]
Config = dict[str, Any]
Run = Callable[[Config, Path, str], None]
"""Runs a resolved configuration in a directory, on a rung, watched by a witness."""
Planned = Callable[[Entry], tuple[Config, int]]
"""The configuration of an entry, and on how many processes it is trained."""

EXIT_CODES: tuple[tuple[Status, int], ...] = (
    ("apart", 12),
    ("failed", 3),
    ("missing", 1),
    ("refused", 11),
)
"""What a verification exits with: the first of these that any strategy came to, else 0."""

_FP32, _FP16, _BF16 = 1e-6, 2.0**-10, 2.0**-7
"""Bounds after one step. fp32: 16 units in the last place, for a sum in another order and the
factors that round. fp16 and bf16: parameters that differ by a rounding of fp32 may fall on two
sides of a rounding to the low precision, so twice its unit."""

_ADAPTIVE = 100.0
"""What the rung ``recipe`` is allowed beyond the rung ``sgd`` in fp32: an optimizer that divides a
gradient by its own size makes a rounding larger where the terms of the gradient cancel. Roundings
of a low precision are larger already. Parameters are shown there, not judged: one whose gradient is
nothing but rounding moves at the full rate."""


@dataclass(frozen=True)
class RungOutcome:
    """What a strategy came to on one rung. ``words`` say why it could not run."""

    rung: str
    entry: Entry
    status: Status
    run_dir: Path
    processes: int
    comparison: Comparison | None = None
    suspect: Suspect | None = None
    words: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Verdict:
    """All outcomes of a verification, rung by rung, each in the order of the list.

    ``order`` says whose the order of samples is, where the task brings one of its own.
    """

    recipe: str
    options: VerifyOptions
    batch: Mapping[str, int]
    precision: Mapping[str, Any]
    outcomes: tuple[RungOutcome, ...]
    order: str = ""

    @property
    def batch_words(self) -> str:
        """``64 samples, 32 in a micro-batch``."""
        size, micro = self.batch["batch_size"], self.batch["micro_batch_size"]
        if not size:
            return "samples that nobody counts"
        return f"{size} samples, {micro} in a micro-batch"

    @property
    def exit_code(self) -> int:
        """See ``EXIT_CODES``."""
        statuses = {outcome.status for outcome in self.outcomes}
        return next((code for status, code in EXIT_CODES if status in statuses), 0)


def bounds_of(options: VerifyOptions, precision: Mapping[str, Any], rung: str) -> Bounds:
    """What is allowed on ``rung`` for the recipe's precision (the node of its group)."""
    lowest = default_bound(precision)
    values = options.bound or lowest
    if rung == "sgd":
        return Bounds(values, values)
    return Bounds(values * (_ADAPTIVE if lowest == _FP32 else 1.0), None)


def default_bound(precision: Mapping[str, Any]) -> float:
    """The bound after one step, by the lowest precision that numbers are held or sent in."""
    used = {str(precision.get(name, "fp32")) for name in ("params", "compute", "reduce")}
    return _BF16 if "bf16" in used else _FP16 if "fp16" in used else _FP32


def on_rung(
    config: Config, rung: str, options: VerifyOptions, *, own_optimizer: bool = False
) -> Config:
    """``config`` as it is trained on ``rung``; ``own_optimizer`` leaves that to the task."""
    config = copy.deepcopy(config)
    if rung == "sgd":
        if not own_optimizer:
            config["optimizer"] = {"_target_": "torch.optim.SGD", "lr": options.sgd_lr}
            config["schedule"] = None
        config["trainer"] |= {"max_grad_norm": None, "max_grad_value": None, "ema_decay": None}
        if "sgd_lr" in (config.get("strategy") or {}):  # an engine that brings its own optimizer
            config["strategy"] |= {"sgd_lr": options.sgd_lr}
    return config


def verify(
    options: VerifyOptions,
    planned: Planned,
    home: Path,
    *,
    run: Run,
) -> tuple[RungOutcome, ...]:
    """Trains every strategy on every rung, and compares it with the reference.

    Raises:
        TorshError: the reference could not be trained, so that nothing can be said.
    """
    outcomes = []
    for rung in options.ladder:
        outcomes += _rung(rung, options, planned, home, run)
    return tuple(outcomes)


def _rung(
    rung: str, options: VerifyOptions, planned: Planned, home: Path, run: Run
) -> list[RungOutcome]:
    def train_entry(entry: Entry) -> RungOutcome:
        config, processes = planned(entry)
        run_dir = home / rung / entry.folder
        many = f"{processes} processes" if processes > 1 else "1 process"
        print(f"{rung}: {entry.label}, {many}", file=sys.stderr, flush=True)
        run(config, run_dir, rung)
        record = Record(run_dir)
        return RungOutcome(
            rung, entry, "reference", run_dir, processes, facts=record.facts, rows=record.rows
        )

    first = train_entry(options.reference)
    found = {options.reference.label: first}
    bounds = bounds_of(options, planned(options.reference)[0].get("precision") or {}, rung)
    for entry in options.entries:
        if entry == options.reference:
            continue
        try:
            found[entry.label] = _compare_outcome(train_entry(entry), first, bounds)
        except Interrupted:
            raise
        except TorshError as error:
            found[entry.label] = _not_run(error, rung, entry, home, planned(entry)[1])
    Record(first.run_dir).forget_parameters()
    return [found[entry.label] for entry in options.entries]


def _compare_outcome(outcome: RungOutcome, reference: RungOutcome, bounds: Bounds) -> RungOutcome:
    record = Record(outcome.run_dir)
    comparison = compare(record, Record(reference.run_dir), bounds)
    record.forget_parameters()
    suspect = suspect_of(comparison, outcome.facts, reference.facts)
    return replace(
        outcome,
        status="agrees" if suspect is None else "apart",
        comparison=comparison,
        suspect=suspect,
    )


def _not_run(error: TorshError, rung: str, entry: Entry, home: Path, processes: int) -> RungOutcome:
    code = getattr(error, "cause_exit_code", error.exit_code)
    statuses: dict[int, Status] = {1: "missing", 2: "refused"}
    status = statuses.get(code, "failed")
    run_dir = home / rung / entry.folder
    Record(run_dir).forget_parameters()
    return RungOutcome(rung, entry, status, run_dir, processes, words=str(error))
