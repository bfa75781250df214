"""What a run would take from a checkpoint, told without running it: ``rerun RUN --dry-run``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.callbacks.base import name_callbacks
from torsh_trainer.checkpoint.setup import WORDS, SetupDifference, as_typed
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.comm import devices
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.single import Single
from torsh_trainer.training import resume
from torsh_trainer.training.program import Position, Restored
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.run_spec import RunSpec, rehearse
from torsh_trainer.training.run_stages import explain_end
from torsh_trainer.utils import registry

_LABEL = 12


@dataclass(frozen=True)
class Preview:
    """The text, and whether the run would refuse to go on."""

    text: str
    refused: bool = False


Row = tuple[str, str]
"""Of the text: a word for the left column, and what there is to say."""


def preview(spec: RunSpec, world: World, *, run_dir: Path) -> Preview:
    """What ``spec`` would do with its ``checkpoint.resume`` as one of ``world``'s processes.

    Builds the model and the optimizers here, on the CPU; reads and verifies the checkpoint; trains
    nothing and writes nothing.

    Raises:
        ConfigError: there is no such checkpoint, or the run contradicts itself.
        ResourceError: every checkpoint there is damaged.
    """
    strategy = spec.strategy
    if isinstance(strategy, str):
        strategy = registry.strategy_class(strategy)()
    strategy, mesh = divide(world, strategy, spec.mesh)
    comm = LocalCommunicator()
    parts = RunParts(rehearse(spec), world, comm, mesh, Single(), run_dir)
    try:
        with _warnings() as skipped:
            origin = parts.origin
        if origin is None:
            if parts.elsewhere:
                return Preview(f"{parts.elsewhere} is the task's own to read, once the run begins")
            never = spec.checkpoint.resume == "never"
            why = "checkpoint.resume=never" if never else f"there is no checkpoint in {run_dir}"
            return Preview(f"nothing is restored: {why}")
        setup = _plan_setup(parts.setup, spec, world, strategy)
        template = parts.program.state(template=True)
        fit = parts.checkpointer.compare(template, origin.path)
        if parts.trains:
            allow, others = spec.checkpoint.allow, parts.factory.find_other_samples(parts.setup)
            found = resume.for_training(origin.plain, setup, fit, allow=allow, others=others)
        else:
            found = resume.for_evaluation(fit, averaged=spec.ema_decay is not None)
        told = _PreviewText(parts, origin.plain, setup, template, found)
        return Preview(told.text(origin.path, skipped), bool(told.refused))
    finally:
        parts.close()


def _plan_setup(
    setup: Mapping[str, Any], spec: RunSpec, world: World, strategy: Strategy
) -> dict[str, Any]:
    """The setup of the run itself, which this process stands in for."""
    planned = {**setup, **resume.place_facts(devices.choose_device(spec.device, world))}
    del planned["precision.matmul"]  # torch is not switched here
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


class _PreviewText:
    """The parts of the text."""

    def __init__(
        self,
        parts: RunParts,
        saved: Mapping[str, Any],
        setup: Mapping[str, Any],
        template: Mapping[str, Any],
        found: resume.Resumption,
    ) -> None:
        self.parts = parts
        self.saved = saved
        self.setup = setup
        self.template = template
        self.found = found
        self.comparison = found.comparison
        self.own = Restored()
        if parts.trains:
            self.own = parts.factory.describe_restored(saved, parts.mesh.dp)

    @property
    def refused(self) -> list[str]:
        """Why the run would not go on."""
        told = [_describe_refused(one) for one in self.comparison.refused]
        return [*told, self.own.refused] if self.own.refused else told

    def text(self, path: StoragePath, skipped: Sequence[str]) -> str:
        refused = self.refused
        lines = [f"{path} is whole{self._origin()}", *(f"  {one}" for one in skipped)]
        for title, rows in (
            ("restored", [] if refused else list(self.restored_rows())),
            ("not restored", [] if refused else list(self.not_restored())),
            ("as configured today", [("", text) for text in self.comparison.applied]),
            (
                "allowed to differ",
                [("", _describe_allowed(one)) for one in self.comparison.allowed],
            ),
            ("inexact", [("", text) for text in self.inexact()]),
            ("refused", [("", text) for text in refused]),
        ):
            if rows:
                lines += ["", title, *map(_format_row, rows)]
        if self.comparison.refused:
            lines += ["", f"It is refused: {self.comparison.way_on}."]
        elif self.parts.trains and not refused and not self._differs():
            lines += ["", "Nothing is known that would make it differ from a run without a stop."]
        over = explain_end(self.parts, self._position())
        if over and self.parts.trains and not refused:
            lines += ["", f"{over[0].upper()}{over[1:]}."]
        return "\n".join(lines)

    def restored_rows(self) -> Iterator[Row]:
        engine, saved = self.template["engine"], self.saved
        numbers = sum(tensor.numel() for tensor in engine["model"].values())
        yield "model", f"{len(engine['model'])} tensors, {numbers:,} numbers"
        if not self.parts.trains:  # nothing else matters to an evaluation
            yield from self._optional(saved["engine"])
            return
        for name, facts in self.setup["optimizer"].items():
            if (*resume.OPTIMIZER, name) not in self.found.leave:
                count = sum(len(group["params"]) for group in facts["groups"])
                yield "optimizer", f"{name}: {facts['class']} of {count} parameters"
        position = self._position()
        total = self.parts.factory.total_steps
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
        spec = self.parts.spec
        if resume.EMA not in self.found.leave and spec.ema_decay is not None and "ema" in engine:
            updates = engine["ema"]["updates"]
            yield "average", f"ema_decay={spec.ema_decay}, after {updates:,} updates"
        if self.parts.trains and self.parts.precision.scales_loss and "loss_scale" in engine:
            yield "loss scale", as_typed(engine["loss_scale"]["scale"])

    def not_restored(self) -> Iterator[Row]:
        engine = self.saved["engine"]
        if not self.parts.trains:
            return
        for path in self.found.leave:
            yield path[1], f"{' '.join(path[2:])} begins afresh".strip()
        if self.found.fresh_schedule:
            yield "schedule", f"{self._schedule or 'constant'} begins afresh"
        precision = self.parts.precision
        if precision.scales_loss and "loss_scale" not in engine:
            yield "loss scale", "the checkpoint has none: it begins at the configured one"
        if "loss_scale" in engine and not precision.scales_loss:
            yield "loss scale", f"precision={precision.name} has none"
        mine, saved = self._callbacks(), self.saved["callbacks"]
        for name in sorted({*saved} - {*mine}):
            yield "callbacks", f"{name} is not part of this run"
        for name in sorted({*mine} - {*saved}):
            yield "callbacks", f"{name} begins afresh: the checkpoint has nothing of it"

    def inexact(self) -> Iterator[str]:
        if not self.parts.trains:
            return
        yield from self.comparison.inexact
        yield from self.own.inexact
        size, held = self.parts.mesh.dp, len(self.saved["rng"])
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
        assert self.parts.origin is not None
        return self.parts.origin.position

    def _callbacks(self) -> list[str]:
        return [name for name, one in name_callbacks(self.parts.callbacks) if one.state_dict()]

    def _random(self) -> str:
        ranks = list(self.saved["rng"].values())[: self.parts.mesh.dp]
        streams = dict.fromkeys(name for rank in ranks for name in ("torch", *rank))
        count = len(ranks)
        return f"{', '.join(streams)} of {count} process{'es' * (count > 1)}" if ranks else ""


def _format_row(row: Row) -> str:
    label, text = row
    return f"  {label:{_LABEL}}{text}" if label else f"  {text}"


def _describe_allowed(one: SetupDifference) -> str:
    return f"{one.text}: {WORDS[one.word]}"


def _describe_refused(one: SetupDifference) -> str:
    return f"{one.text}  [{one.word}]" if one.word else one.text
