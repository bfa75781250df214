"""How a LightningModule is trained in a run: knobs to Lightning's flags, parts to a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_trainer.course import Course, Parts, Setting
from torsh_trainer.strategies.base import BatchPlan, Clip
from torsh_trainer_lightning.adapter import Configured, configured
from torsh_trainer_lightning.loop.driver import LightningLoop
from torsh_trainer_lightning.loop.stages import Stages


class LightningCourse(Course):
    """The course of one run; ``stages`` has the module, and ``configured`` its optimizers."""

    sized = False

    def __init__(self, setting: Setting, stages: Stages, *, clip: Clip, manual: bool) -> None:
        trainer = setting.trainer
        self.batch = BatchPlan(
            (trainer.accumulate or 1) * setting.mesh.dp, 1, trainer.accumulate or 1, setting.mesh.dp
        )
        self.manual = manual
        self.total_steps = trainer.max_steps
        self.stages = stages
        self.configured = Configured()
        kind = type(stages.module)  # a sharding engine gives it another class
        self._kind = f"{kind.__module__}.{kind.__qualname__}"
        self._comm = setting.comm
        self._clip = clip
        self._on_nonfinite = trainer.on_nonfinite
        self._allow = trainer.checkpoint.allow

    def setup(self) -> Mapping[str, Any]:
        return {"task": self._kind, "task.order": self.stages.facade.order.name}

    def reads(self, resume: str) -> bool:
        return resume.endswith(".ckpt")

    def goes_on(self) -> None:
        self.stages.without_ckpt()

    def configure(self, module: Any) -> Configured:
        """What ``configure_optimizers`` gives, called once the engine holds the parameters."""
        if self.stages.trains:
            with self.stages.facade.guarded():
                self.configured = configured(module)
        self.stages.configured()
        return self.configured

    def loop(self, parts: Parts) -> LightningLoop:
        self.stages.attach(parts.engine, self.configured)
        return LightningLoop(
            self.stages,
            parts,
            self._comm,
            clip=self._clip,
            on_nonfinite=self._on_nonfinite,
            allow=self._allow,
        )
