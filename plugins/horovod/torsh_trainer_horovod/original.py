"""A Horovod job as its author runs it: what a translation is held against.

``strategy=horovod`` gives Horovod our meaning of a step; this gives it nothing. It does what a
script of plain Horovod does with the same optimizer, wrapper, clipping and scheduler, and watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import (
    Clip,
    Engine,
    Job,
    LossReport,
    Mesh,
    MicroBatch,
    StepOutcome,
    Strategy,
)
from torsh_trainer.strategies.native import NativeEngine
from torsh_trainer.task import Task
from torsh_trainer.world import World
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.strategy import check_installed


@dataclass(frozen=True)
class Original(Strategy):
    """Horovod alone; ``config`` is what ``translate.horovod.translator.original`` has read.

    ``sgd_lr`` trains with plain SGD at that rate instead, without scheduler and clipping.
    """

    name: ClassVar[str] = "horovod-original"
    config: Mapping[str, Any] = field(default_factory=dict)
    sgd_lr: float | None = None

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        check_installed()
        passes = self.config.get("passes", 1)
        if job.batch.accumulate != passes:
            raise ConfigError(
                f"the original adds up {passes} backward passes, and a step here has "
                f"{job.batch.accumulate}",
                fix=f"set trainer.accumulate={passes}, or leave the batch sizes out",
            )
        model = modules.build(job, comm)
        return OriginalEngine(self, job, comm, model=model)

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """The script's own, unwrapped.

        Raises:
            ConfigError: the job names none.
        """
        if self.sgd_lr is not None:
            return torch.optim.SGD(parameters, lr=self.sgd_lr)
        said = self.config.get("optimizer")
        if said is None:
            raise ConfigError(
                "the file names no optimizer: the script builds it, and it is not here",
                fix="verify the script, with --command 'horovodrun ...', or verify.ladder=[sgd]",
            )
        made: Optimizer = getattr(torch.optim, said["class"])(parameters, **said["options"])
        return made


class OriginalEngine(NativeEngine):
    """Calls ``backward``, ``synchronize`` and ``step`` as a script does.

    ``optimizers`` are copies of the groups, so that a schedule of ours moves nothing.
    """

    emulates = False

    def __init__(self, knobs: Original, job: Job, comm: Communicator, *, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        shown = {"main": torch.optim.SGD(parameters, lr=0.0)}
        super().__init__(job, comm, model=model, module=model, eval_module=model, optimizers=shown)
        self._running = runtime.start(comm, {})
        hvd = self._running.hvd
        self._plain = knobs.sgd_lr is not None
        self._config = knobs.config
        optimizer = knobs.optimizer(parameters)
        self._scheduler = self._scheduled(optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        state = str(knobs.config.get("broadcast_optimizer_state", ""))
        if state.startswith("before"):  # it is wrapped, which loses its state
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._distributed: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=knobs.config.get("passes", 1),
            **_wrapping(hvd, knobs.config.get("wrapper", {})),
        )
        if state.startswith("of"):
            hvd.broadcast_optimizer_state(self._distributed, root_rank=0)

    def _scheduled(self, optimizer: Optimizer) -> Any:
        said = self._config.get("scheduler")
        if said is None or self._plain or self._config.get("interval") != "step":
            return None
        return getattr(torch.optim.lr_scheduler, said["class"])(optimizer, **said["options"])

    def zero_grad(self) -> None:
        """The script does so after its step."""

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._distributed.zero_grad()
        parts = []
        for batch, weight, rng_key in micro_batches:
            if rng_key is not None:
                for generator in self._generators:
                    generator.manual_seed(rng_key)
            loss = task.loss(task.forward(self.module, batch), batch)
            (loss / self._config.get("loss_divided_by", 1)).backward()
            parts.append((loss.detach(), weight))
        return LossReport(tuple(parts))

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        self._last = {"lr": float(self._distributed.param_groups[0]["lr"])}
        self._distributed.synchronize()
        norm = self._norm([p.grad for p in self._parameters if p.grad is not None])
        if not self._plain and self._config.get("clip_norm") is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config["clip_norm"])
        if not self._plain and self._config.get("clip_value") is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self._config["clip_value"])
        with self._distributed.skip_synchronize():
            self._distributed.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return StepOutcome(norm, skipped=False)

    def state_dict(self) -> dict[str, Any]:
        """Parameters alone."""
        named = self.model.named_parameters(remove_duplicate=False)
        whole = {name: parameter.detach() for name, parameter in named}
        return {"model": whole, "optimizer": {"main": {"state": {}, "groups": []}}}

    def close(self) -> None:
        # The hooks stay on a model that outlives its engine.
        self._distributed.set_backward_passes_per_step(2**31)
        self._running.close()


def _wrapping(hvd: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """The wrapper's arguments, with Horovod's objects for their names."""
    options = dict(said)
    if "op" in options:
        options["op"] = getattr(hvd, options["op"].capitalize())
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    return options
