"""A Horovod job as its author runs it: what a translation is held against.

``strategy=horovod`` gives Horovod our meaning of a step; this gives it nothing. It does what a
script of plain Horovod does with the same optimizer, wrapper, clipping and scheduler, and watches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.base import RunningSchedule, StatefulSchedule
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
from torsh_trainer.tasks.base import Task
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
        shown = {"main": _Shown(parameters, self._end_epoch)}
        super().__init__(job, comm, model=model, module=model, eval_module=model, optimizers=shown)
        self._running = runtime.start(comm, {})
        hvd = self._running.hvd
        self._plain = knobs.sgd_lr is not None
        self._config = knobs.config
        self._half = _half(knobs.config)
        scales = knobs.config.get("scaler") and self._half == torch.float16
        self._grad_scaler = torch.amp.GradScaler(comm.device.type) if scales else None
        optimizer = knobs.optimizer(parameters)
        state = str(knobs.config.get("broadcast_optimizer_state", ""))
        self._scheduler = self._make_scheduler(optimizer) if state.endswith("scheduled") else None
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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
        if self._scheduler is None:
            self._scheduler = self._make_scheduler(self._distributed)

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        said = self._config.get("scheduler")
        if said is None or self._plain:
            return None
        return getattr(torch.optim.lr_scheduler, said["class"])(optimizer, **said["options"])

    def _end_epoch(self) -> None:
        if self._scheduler is not None and self._config.get("interval") == "epoch":
            self._scheduler.step()

    def zero_grad(self) -> None:
        """The script does so after its step."""

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        self._distributed.zero_grad()
        parts = []
        for micro in micro_batches:
            with self._draws.of(micro):
                with self._casting():
                    loss = task.loss(task.forward(self.module, micro.batch), micro.batch)
                divided = loss / self._config.get("loss_divided_by", 1)
                if self._grad_scaler is not None:
                    divided = self._grad_scaler.scale(divided)
                divided.backward()
            parts.append((loss.detach(), micro.weight))
        return LossReport(tuple(parts))

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._half is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._half)

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        self._last = {"lr": float(self._distributed.param_groups[0]["lr"])}
        self._distributed.synchronize()
        if self._grad_scaler is not None:
            self._last["loss_scale"] = self._grad_scaler.get_scale()
            self._grad_scaler.unscale_(self._distributed)
        norm = self._gradients.norm(
            [_dense(p.grad) for p in self._parameters if p.grad is not None]
        )
        if not self._plain and self._config.get("clip_norm") is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config["clip_norm"])
        if not self._plain and self._config.get("clip_value") is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self._config["clip_value"])
        with self._distributed.skip_synchronize():
            skipped = self._step_unless_infinite()
        if self._scheduler is not None and self._config.get("interval") == "step":
            self._scheduler.step()
        return StepOutcome(norm, skipped=skipped)

    def _step_unless_infinite(self) -> bool:
        """A script's step, with its scaler where it has one; whether that passed over it."""
        if self._grad_scaler is None:
            self._distributed.step()
            return False
        self._grad_scaler.step(self._distributed)
        self._grad_scaler.update()
        return self._grad_scaler.get_scale() < self._last["loss_scale"]

    def state_dict(self) -> dict[str, Any]:
        """Parameters alone."""
        named = self.model.named_parameters(remove_duplicate=False)
        whole = {name: parameter.detach() for name, parameter in named}
        return {"model": whole, "optimizer": {"main": {"state": {}, "groups": []}}}

    def close(self) -> None:
        # The hooks stay on a model that outlives its engine.
        self._distributed.set_backward_passes_per_step(2**31)
        self._running.close()


class _Shown(torch.optim.SGD):
    """What the loop sees for an optimizer; ``on_epoch`` is called when an epoch has ended."""

    def __init__(self, parameters: Sequence[nn.Parameter], on_epoch: Callable[[], None]) -> None:
        super().__init__(parameters, lr=0.0)
        self.on_epoch = on_epoch


@dataclass(frozen=True)
class Epochs(StatefulSchedule):
    """The schedule to train an ``Original`` with whose script steps its scheduler once an epoch.

    It sets no rate: it tells the original that its loop over the loader has ended.
    """

    name: ClassVar[str] = "horovod-epochs"

    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        (shown,) = optimizers.values()
        assert isinstance(shown, _Shown), "it goes with Original alone"
        return _RunningEpochs(shown.on_epoch)


class _RunningEpochs(RunningSchedule):
    def __init__(self, on_epoch: Callable[[], None]) -> None:
        self._on_epoch = on_epoch

    def on_update(self) -> None:
        """The original's own step has stepped what steps with updates."""

    def on_epoch(self) -> None:
        self._on_epoch()

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        """Nothing that is translated follows an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An original is never resumed."""


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}


def _half(config: Mapping[str, Any]) -> torch.dtype | None:
    """What the script's autocast computes in."""
    return _HALF.get(str(config.get("autocast")))


def _wrapping(hvd: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """The wrapper's arguments, with Horovod's objects for their names."""
    options = dict(said)
    if "op" in options:
        options["op"] = getattr(hvd, options["op"].capitalize())
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    if "process_set" in options:  # what is no set of all processes has no translation
        options["process_set"] = hvd.global_process_set
    return options
