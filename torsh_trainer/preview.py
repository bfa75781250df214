"""What a run would take from a checkpoint, told without running it: ``rerun RUN --dry-run``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_trainer import hardware, registry, resume
from torsh_trainer.checkpoint.setup import WORDS, Difference, shown
from torsh_trainer.checkpoint.store.places import Location
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.course import Restored
from torsh_trainer.coursed import rank_class
from torsh_trainer.loop import Position, named_callbacks
from torsh_trainer.rank import Rank, rehearsal
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.single import Single
from torsh_trainer.world import World

if TYPE_CHECKING:  # the trainer is above: assemble hands one in
    from torsh_trainer.trainer import Trainer

_LABEL = 12


@dataclass(frozen=True)
class Preview:
    """The text, and whether the run would refuse to go on."""

    text: str
    refused: bool = False


Row = tuple[str, str]
"""Of the text: a word for the left column, and what there is to say."""


def preview(trainer: Trainer, world: World, *, run_dir: Path) -> Preview:
    """What ``trainer`` would do with its ``checkpoint.resume`` as one of ``world``'s processes.

    Builds the model and the optimizers here, on the CPU; reads and verifies the checkpoint; trains
    nothing and writes nothing.

    Raises:
        ConfigError: there is no such checkpoint, or the run contradicts itself.
        ResourceError: every checkpoint there is damaged.
    """
    strategy = trainer.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    comm = LocalCommunicator()
    rank = rank_class(trainer.task)(
        rehearsal(trainer),
        world,
        comm,
        strategy.mesh(world),
        Single(),
        run_dir,
        time.perf_counter(),
    )
    try:
        with _warnings() as skipped:
            origin = rank.origin
        if origin is None:
            if rank.elsewhere:
                return Preview(f"{rank.elsewhere} is the task's own to read, once the run begins")
            never = trainer.checkpoint.resume == "never"
            why = "checkpoint.resume=never" if never else f"there is no checkpoint in {run_dir}"
            return Preview(f"nothing is restored: {why}")
        setup = _planned(rank.setup, trainer, world, strategy)
        template = rank.loop.state(template=True)
        fit = rank.checkpointer.compare(template, origin.path)
        if rank.trains:
            allow, others = trainer.checkpoint.allow, rank.other_samples()
            found = resume.for_training(origin.plain, setup, fit, allow=allow, others=others)
        else:
            found = resume.for_evaluation(fit, averaged=trainer.ema_decay is not None)
        told = _Told(rank, origin.plain, setup, template, found)
        return Preview(told.text(origin.path, skipped), bool(told.refused))
    finally:
        rank.close()


def _planned(
    setup: Mapping[str, Any], trainer: Trainer, world: World, strategy: Strategy
) -> dict[str, Any]:
    """The setup of the run itself, which this process stands in for."""
    planned = {**setup, **resume.place_facts(hardware.choose_device(trainer.device, world))}
    if world.size > 1:
        del planned["threads"]  # the launcher divides the cores
    if strategy.name != "auto":
        return {**planned, **resume.strategy_facts(strategy)}
    if world.size > 1:
        del planned["strategy"]  # only the processes themselves can choose: see strategies/auto.py
    return planned


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Warnings of ours in the block, which nobody has asked a handler for."""
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, ours = Keep(logging.WARNING), logging.getLogger("torsh_trainer")
    ours.addHandler(handler)
    try:
        yield told
    finally:
        ours.removeHandler(handler)


class _Told:
    """The parts of the text."""

    def __init__(
        self,
        rank: Rank,
        saved: Mapping[str, Any],
        setup: Mapping[str, Any],
        template: Mapping[str, Any],
        found: resume.Resumption,
    ) -> None:
        self.rank = rank
        self.saved = saved
        self.setup = setup
        self.template = template
        self.found = found
        self.comparison = found.comparison
        self.own = rank.restored(saved) if rank.trains else Restored()

    @property
    def refused(self) -> list[str]:
        """Why the run would not go on."""
        told = [_refused(one) for one in self.comparison.refused]
        return [*told, self.own.refused] if self.own.refused else told

    def text(self, path: Location, skipped: Sequence[str]) -> str:
        refused = self.refused
        parts = [f"{path} is whole{self._origin()}", *(f"  {one}" for one in skipped)]
        for title, rows in (
            ("restored", [] if refused else list(self.restored())),
            ("not restored", [] if refused else list(self.not_restored())),
            ("as configured today", [("", text) for text in self.comparison.applied]),
            ("allowed to differ", [("", _allowed(one)) for one in self.comparison.allowed]),
            ("inexact", [("", text) for text in self.inexact()]),
            ("refused", [("", text) for text in refused]),
        ):
            if rows:
                parts += ["", title, *map(_shown, rows)]
        if self.comparison.refused:
            parts += ["", f"It is refused: {self.comparison.way_on}."]
        elif self.rank.trains and not refused and not self._differs():
            parts += ["", "Nothing is known that would make it differ from a run without a stop."]
        over = self.rank.is_over(self._position())
        if over and self.rank.trains and not refused:
            parts += ["", f"{over[0].upper()}{over[1:]}."]
        return "\n".join(parts)

    def restored(self) -> Iterator[Row]:
        engine, saved = self.template["engine"], self.saved
        numbers = sum(tensor.numel() for tensor in engine["model"].values())
        yield "model", f"{len(engine['model'])} tensors, {numbers:,} numbers"
        if not self.rank.trains:  # nothing else matters to an evaluation
            yield from self._optional(saved["engine"])
            return
        for name, facts in self.setup["optimizer"].items():
            if (*resume.OPTIMIZER, name) not in self.found.leave:
                count = sum(len(group["params"]) for group in facts["groups"])
                yield "optimizer", f"{name}: {facts['class']} of {count} parameters"
        position = self._position()
        total = self.rank.total_steps
        of = "" if total is None else f" of {total:,}"
        step = f"step {position.step:,}{of}"
        yield "position", f"{step}, epoch {position.epoch}, {position.samples:,} samples"
        schedule = self._schedule
        if schedule and not self.found.fresh_schedule:
            yield "schedule", f"{schedule}, at update {position.updates:,}"
        yield from self._optional(saved["engine"])
        yield from self.own.rows
        streams = self._random()
        if streams:
            yield "random", streams
        kept = [name for name in saved["callbacks"] if name in self._callbacks()]
        if kept:
            yield "callbacks", ", ".join(kept)
        if saved["task"]:
            yield "task", f"its own state: {', '.join(saved['task'])}"

    @property
    def _schedule(self) -> str:
        """The name of the run's schedule; empty for a constant rate, and a task's own."""
        name = str(self.setup.get("schedule", {}).get("name", "constant"))
        return "" if name == "constant" else name

    def _optional(self, engine: Mapping[str, Any]) -> Iterator[Row]:
        trainer = self.rank.trainer
        if resume.EMA not in self.found.leave and trainer.ema_decay is not None and "ema" in engine:
            updates = engine["ema"]["updates"]
            yield "average", f"ema_decay={trainer.ema_decay}, after {updates:,} updates"
        if self.rank.trains and trainer.precision.scales_loss and "loss_scale" in engine:
            yield "loss scale", shown(engine["loss_scale"]["scale"])

    def not_restored(self) -> Iterator[Row]:
        engine, trainer = self.saved["engine"], self.rank.trainer
        if not self.rank.trains:
            return
        for path in self.found.leave:
            yield path[1], f"{' '.join(path[2:])} begins afresh".strip()
        if self.found.fresh_schedule:
            yield "schedule", f"{self._schedule or 'constant'} begins afresh"
        if trainer.precision.scales_loss and "loss_scale" not in engine:
            yield "loss scale", "the checkpoint has none: it begins at the configured one"
        if "loss_scale" in engine and not trainer.precision.scales_loss:
            yield "loss scale", f"precision={trainer.precision.name} has none"
        mine, saved = self._callbacks(), self.saved["callbacks"]
        for name in sorted({*saved} - {*mine}):
            yield "callbacks", f"{name} is not part of this run"
        for name in sorted({*mine} - {*saved}):
            yield "callbacks", f"{name} begins afresh: the checkpoint has nothing of it"

    def inexact(self) -> Iterator[str]:
        if not self.rank.trains:
            return
        yield from self.comparison.inexact
        yield from self.own.inexact
        size, held = self.rank.world.size, len(self.saved["rng"])
        if held < size:
            where = f" on {size - held} of {size} processes" if held else ""
            yield (
                f"random numbers outside of forwards begin afresh{where}: "
                f"the checkpoint has none{' of theirs' if held else ''}"
            )
        if not self.setup["trainer.deterministic"] and self.setup["device"] != "cpu":
            yield "trainer.deterministic=false: some kernels add in an order of their own"
        if not self.saved.get("setup"):
            yield "the checkpoint says nothing of seed, data and batch: they are not compared"

    def _differs(self) -> bool:
        comparison = self.comparison
        return bool(comparison.applied or comparison.allowed or list(self.inexact()))

    def _origin(self) -> str:
        before = self.saved.get("setup")
        if not before:
            return ""
        size = before["world_size"]
        return f"; {before['strategy']} on {size} process{'es' * (size > 1)} saved it"

    def _position(self) -> Position:
        assert self.rank.origin is not None
        return self.rank.origin.position

    def _callbacks(self) -> list[str]:
        return [name for name, one in named_callbacks(self.rank.callbacks) if one.state_dict()]

    def _random(self) -> str:
        ranks = list(self.saved["rng"].values())[: self.rank.world.size]
        streams = dict.fromkeys(name for rank in ranks for name in ("torch", *rank))
        count = len(ranks)
        return f"{', '.join(streams)} of {count} process{'es' * (count > 1)}" if ranks else ""


def _shown(row: Row) -> str:
    label, text = row
    return f"  {label:{_LABEL}}{text}" if label else f"  {text}"


def _allowed(one: Difference) -> str:
    return f"{one.text}: {WORDS[one.word]}"


def _refused(one: Difference) -> str:
    return f"{one.text}  [{one.word}]" if one.word else one.text
