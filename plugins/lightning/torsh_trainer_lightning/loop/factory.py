"""How a LightningModule is trained in a run: knobs to Lightning's flags, parts to a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Clip
from torsh_trainer.training.program import (
    ProgramContext,
    ProgramParts,
    Restored,
    TrainingProgramFactory,
)
from torsh_trainer_lightning.adapter import Configured, configure
from torsh_trainer_lightning.loop.driver import LightningLoop
from torsh_trainer_lightning.loop.loaded import check_processes, lightning_state
from torsh_trainer_lightning.loop.picked import Own
from torsh_trainer_lightning.loop.stages import Stages


class LightningProgramFactory(TrainingProgramFactory):
    """The program of one run; ``stages`` has the module, and ``configure`` its optimizers."""

    sized = False

    def __init__(
        self,
        context: ProgramContext,
        stages: Stages,
        *,
        clip: Clip,
        manual: bool,
        own_order: bool,
        sgd_lr: float | None = None,
    ) -> None:
        spec = context.spec
        self._batch = BatchPlan(
            (spec.accumulate or 1) * context.mesh.dp, 1, spec.accumulate or 1, context.mesh.dp
        )
        self.manual = manual
        self.knows_samples = stages.facade.order.portable
        self._max_steps = spec.max_steps
        self.stages = stages
        self.configured = Configured()
        kind = type(stages.module)  # a sharding engine gives it another class
        self._kind = f"{kind.__module__}.{kind.__qualname__}"
        self._task = type(context.task).__name__
        self._comm = context.comm
        self._clip = clip
        self._own_order = own_order
        self._sgd_lr = sgd_lr
        self._on_nonfinite = spec.on_nonfinite
        self._allow = spec.checkpoint.allow
        self._own = Own(spec.checkpoint.monitor, spec.checkpoint.monitor_mode)

    @property
    def batch(self) -> BatchPlan:
        return self._batch

    @property
    def total_steps(self) -> int | None:
        return self._max_steps

    @property
    def changes_loaded(self) -> str:
        return self._task

    def setup_facts(self) -> Mapping[str, Any]:
        return {"task": self._kind, "task.order": self.stages.facade.order.name}

    def reads_checkpoint(self, resume: str) -> bool:
        return resume.endswith(".ckpt")

    def resume_from(self, saved: Mapping[str, Any]) -> None:
        if "lightning" in saved.get("task", {}):
            own = lightning_state(saved)["torsh_trainer"]
            self.stages.without_ckpt(*(frozenset(own.get(n, ())) for n in ("left_out", "freed")))
        else:
            self.stages.without_ckpt(frozenset(), frozenset())

    def set_precision(self, precision: Precision) -> None:
        self.stages.facade.strategy.compute_in(precision)

    def describe_restored(self, saved: Mapping[str, Any], processes: int) -> Restored:
        if "lightning" not in saved["task"]:
            return Restored()
        state = lightning_state(saved)
        before = state["torsh_trainer"]["world_size"]
        if not self._own_order:
            return Restored(tuple(self._rows(state)))
        try:
            check_processes(state["torsh_trainer"], processes)
        except ConfigError as error:
            return Restored(refused=str(error))
        inexact = (
            f"Lightning's order of samples, and how many make a step, follow the processes: they "
            f"were {before} and are {processes}"
        )
        return Restored(tuple(self._rows(state)), (inexact,) if before != processes else ())

    def _rows(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        batches = state["torsh_trainer"]["batches"]
        whose = " of each process" if self._own_order else ""
        after = f"goes on after {batches or 0:,} batches{whose}"
        yield "data", f"epoch {state['epoch']} {'begins' if batches is None else after}"
        schedulers = [type(one.scheduler).__name__ for one in self.configured.schedulers]
        if schedulers:
            yield "schedules", ", ".join(schedulers)
        if state["callbacks"]:
            yield "callbacks", f"of Lightning: {', '.join(state['callbacks'])}"

    def configure(self, module: Any) -> Configured:
        """What ``configure_optimizers`` gives, called once the engine holds the parameters."""
        if self.stages.trains:
            with self.stages.facade.guard(), self.stages.thaw.undo():
                self.configured = configure(module)
            if self._sgd_lr is not None:
                self.configured = self.configured.plain(self._sgd_lr, manual=self.manual)
        self.stages.after_configuration()
        return self.configured

    def make_program(self, parts: ProgramParts) -> LightningLoop:
        self.stages.attach(parts.engine, self.configured)
        return LightningLoop(
            self.stages,
            parts,
            self._comm,
            clip=self._clip,
            on_nonfinite=self._on_nonfinite,
            allow=self._allow,
            own=self._own,
        )
