"""A DeepSpeed job as its author runs it: what a translation is held against.

``strategy=deepspeed`` gives DeepSpeed our meaning of a step; this gives it nothing. The file's own
optimizer, scheduler, clipping and loss scaling do what they do in a script that calls
``deepspeed.initialize``, ``backward`` and ``step``, and the engine only watches.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision
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
from torsh_trainer_deepspeed import library, needs, operators
from torsh_trainer_deepspeed.engine import without_state
from torsh_trainer_deepspeed.strategy import CastInputs

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Original(Strategy):
    """DeepSpeed alone, as ``config`` (the content of a ds_config.json, without "auto") has it.

    ``sgd_lr`` trains with plain SGD at that rate instead, without scheduler and clipping.
    ``fp16_on_cpu`` is for tests: DeepSpeed refuses fp16 on a CPU, where torch computes in it.
    """

    name: ClassVar[str] = "deepspeed-original"
    config: Mapping[str, Any] = field(default_factory=dict)
    sgd_lr: float | None = None
    fp16_on_cpu: bool = False

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        deepspeed = library.load(comm)
        with _allowing_fp16() if self.fp16_on_cpu else contextlib.nullcontext():
            return self._prepare(deepspeed, job, comm)

    def _prepare(self, deepspeed: Any, job: Job, comm: Communicator) -> Engine:
        model = modules.build(job, comm)
        values = self._values(job)
        needs.check_fp16(values)
        low = next((name for name in _LOW if values.get(name, {}).get("enabled")), None)
        casts = bool(values.get("fp16", {}).get("auto_cast"))  # DeepSpeed does, of the inputs
        module = model if low is None else CastInputs(model, None if casts else _LOW[low])
        if comm.device.type == "cpu":
            operators.compile_operators(["deepspeed_shm_comm", *_kernels(values)], comm)
        try:
            with library.putting_back() as theirs, contextlib.redirect_stdout(io.StringIO()):
                wrapped, optimizer, *_ = deepspeed.initialize(
                    model=module,
                    model_parameters=[p for p in model.parameters() if p.requires_grad],
                    config=values,
                    dist_init_required=None,
                )
        except (ValueError, AssertionError, NotImplementedError) as error:
            words = " ".join(str(error).split())
            raise ConfigError(
                f"DeepSpeed refuses the original: {words}", fix="correct the file"
            ) from error
        replacement = library.Replacement(theirs)
        replacement.within(model)
        return OriginalEngine(wrapped, optimizer, job, comm, model=model, replacement=replacement)

    def _values(self, job: Job) -> dict[str, Any]:
        values = copy.deepcopy(dict(self.config))
        values["train_batch_size"] = job.batch.batch_size
        values["train_micro_batch_size_per_gpu"] = job.batch.micro_batch_size
        values["gradient_accumulation_steps"] = job.batch.accumulate
        values.setdefault("zero_allow_untested_optimizer", True)
        if self.sgd_lr is not None:
            values["optimizer"] = {"type": "SGD", "params": {"lr": self.sgd_lr}}
            values["gradient_clipping"] = 0.0
            values.pop("scheduler", None)
            values["zero_force_ds_cpu_optimizer"] = False
        if "optimizer" not in values:
            raise ConfigError(
                "the file names no optimizer: the script builds it, and it is not here",
                fix="add the optimizer block, or verify.ladder=[sgd]",
            )
        return values


def _kernels(values: Mapping[str, Any]) -> list[str]:
    """The operator that the file's optimizer is, on a CPU."""
    optimizer, zero = values["optimizer"], values.get("zero_optimization") or {}
    offload = (zero.get("offload_optimizer") or {}) if isinstance(zero, Mapping) else {}
    offloads = offload.get("device", "none") != "none"
    name = str(optimizer.get("type")).lower()
    if name in ("adam", "adamw"):
        own = not (optimizer.get("params") or {}).get("torch_adam")
        return [] if not own else ["cpu_adam"] if offloads else ["fused_adam"]
    return [f"cpu_{name}"] if offloads and name in ("adagrad", "lion") else []


class OriginalEngine(NativeEngine):
    """Calls ``backward`` and ``step`` as a script does, and reads what they have done.

    ``optimizers`` are copies of the groups, so that a schedule of ours moves nothing.
    """

    emulates = False

    def __init__(
        self,
        wrapped: Any,
        optimizer: Any,
        job: Job,
        comm: Communicator,
        *,
        model: nn.Module,
        replacement: library.Replacement,
    ) -> None:
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
        shown = {"main": without_state(inner)}
        # Precision and what is skipped are DeepSpeed's business.
        job = replace(job, precision=Precision(), skip_nonfinite=False)
        super().__init__(
            job, comm, model=model, module=wrapped, eval_module=wrapped, optimizers=shown
        )
        self._wrapped, self._zero, self._inner = wrapped, optimizer, inner
        self._replacement = replacement

    def zero_grad(self) -> None:
        """DeepSpeed's step has done it."""

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], total_weight: float, task: Task
    ) -> LossReport:
        parts = []
        for i, micro in enumerate(micro_batches):
            if i:
                self._wrapped.step()  # of the micro-batch before: no more than its count
            with self._draws.of(micro):
                loss = task.loss(task.forward(self._wrapped, micro.batch), micro.batch)
                with self._replacement.in_force():
                    self._wrapped.backward(loss)
            parts.append((loss.detach(), micro.weight))
        return LossReport(tuple(parts))

    def step(self, clip: Clip, *, measure_norm: bool = False) -> StepOutcome:
        self._last = {"lr": float(self._inner.param_groups[0]["lr"])}
        if self._wrapped.fp16_enabled():
            self._last["loss_scale"] = float(self._zero.loss_scale)
        norm: Any = None
        if self._zero is self._inner:  # DeepSpeed reports no norm at stage 0 in fp32
            norm = self._gradients.norm([p.grad for p in self._parameters if p.grad is not None])
        self._wrapped.step()
        if norm is None:
            norm = torch.as_tensor(self._wrapped.get_global_grad_norm() or 0.0).float()
            norm = norm * self._scale_growth()
        skipped = bool(getattr(self._zero, "overflow", False))
        return StepOutcome(norm, skipped=skipped)

    def _scale_growth(self) -> float:
        """Stage 3 reports the norm divided by the scale that a step has just made larger."""
        if "loss_scale" not in self._last or self._wrapped.zero_optimization_stage() != 3:
            return 1.0
        return max(1.0, float(self._zero.loss_scale) / self._last["loss_scale"])

    def state_dict(self) -> dict[str, Any]:
        """Parameters alone, fp32 masters. Collective."""
        # Imported here: DeepSpeed chooses its accelerator when it is imported.
        from deepspeed.utils import safe_get_full_fp32_param

        whole: dict[str, Any] = {}
        masters = self._stage_0_masters()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            value: Any = masters.get(id(parameter), parameter)
            if value is parameter and self._zero is not self._inner and parameter.requires_grad:
                value = safe_get_full_fp32_param(parameter)
            whole[name] = (parameter if value is None else value).detach()
        return {"model": whole, "optimizer": {"main": {"state": {}, "groups": []}}}

    def _stage_0_masters(self) -> dict[int, Tensor]:
        groups = getattr(self._zero, "fp32_groups", None)
        if groups is None:
            return {}
        lows = self._zero.fp16_groups
        return {
            id(low): high
            for low_group, group in zip(lows, groups, strict=True)
            for low, high in zip(low_group, group, strict=True)
        }

    def close(self) -> None:
        self._wrapped.destroy()


@contextlib.contextmanager
def _allowing_fp16() -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator  # see state_dict

    kind = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = before
