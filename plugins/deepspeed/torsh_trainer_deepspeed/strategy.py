"""``strategy=deepspeed``: the knobs, and how they become an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import NoCompression
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import DTYPES, Precision
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.base import Engine, Job, Mesh, Strategy
from torsh_trainer_deepspeed import library, needs, operators
from torsh_trainer_deepspeed.config import DeepSpeedConfig, leaves
from torsh_trainer_deepspeed.engine import DeepSpeedEngine, ZeroEngine, without_state
from torsh_trainer_deepspeed.recipe import (
    OPTIMIZER,
    ConfigPlan,
    check_optimizer,
    contradiction,
    in_files,
    plan_config,
    read_run_values,
)

log = logging.getLogger(__name__)

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Optimizers that treat every element alike, so that ZeRO may cut a parameter anywhere. (Adagrad
does too, but DeepSpeed makes a new one of torch's and loses its groups.)"""

OwnOptimizer = Literal["cpu_adam", "cpu_adagrad", "fused_adam"]

_TWINS: dict[OwnOptimizer, tuple[str, ...]] = {
    "cpu_adam": ("Adam", "AdamW"),
    "cpu_adagrad": ("Adagrad",),
    "fused_adam": ("Adam", "AdamW"),
}
"""DeepSpeed's optimizers, and those of torch whose settings they take."""


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """DeepSpeed's ZeRO.

    ``stage`` says what is cut over processes: 0 nothing, 1 optimizer state, 2 gradients too, 3
    parameters too. ``offload_optimizer`` and ``offload_param`` keep that part in host memory
    (``cpu``; parameters at stage 3 alone), or in files below ``nvme_path`` (``nvme``; at stage 3,
    and parameters in bf16 alone). ``optimizer`` is what steps there: ``torch`` is the recipe's own,
    ``cpu_adam`` and ``cpu_adagrad`` are DeepSpeed's for host memory, ``fused_adam`` its Adam
    elsewhere; null takes the former two for Adam, AdamW and Adagrad that are offloaded.
    The other knobs are DeepSpeed's own, under its names.

    ``config`` is a ds_config.json, taken as it is: a knob that is not at its default must agree
    with it. ``unknown_keys`` says what happens to a top-level key that DeepSpeed would ignore in
    silence. ``extra`` is passed through: keys of a ds_config.json that are no knobs.
    """

    name: ClassVar[str] = "deepspeed"
    stage: int = 2
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    offload_param: Literal["cpu", "nvme"] | None = None
    nvme_path: str | None = None
    optimizer: Literal["torch"] | OwnOptimizer | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    config: str | None = None
    unknown_keys: Literal["error", "warn"] = "error"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                offers = ", ".join("null" if one is None else str(one) for one in known)
                raise ConfigError(
                    f"strategy.{name}={value} is not one of {offers}",
                    fix=_INSTEAD.get(value, "see `strategy=deepspeed` in the plugin's README"),
                )

    def mesh(self, world: World) -> Mesh:
        return Mesh.data_parallel(world)

    def brings(self, *, schedule: str | None) -> Mapping[str, Any]:
        found = read_run_values(self._read(), schedule=schedule)
        if self.config is None and found.get("precision") == Precision():
            del found["precision"]  # no file is silent
        return found

    def settings(self) -> DeepSpeedConfig:
        """The file, or an empty one, with the knobs in it.

        Raises:
            ConfigError: the file does not parse, has unknown keys, or contradicts a knob.
        """
        config = self._read()
        for place, offer in config.unknown_keys():
            if self.unknown_keys == "error":
                raise ConfigError(
                    f"{place} is no key of DeepSpeed's, which would ignore it in silence",
                    fix=f"{offer} (strategy.unknown_keys=warn lets it pass)",
                )
            log.warning("%s is no key of DeepSpeed's, which ignores it; %s", place, offer)
        return config

    def _read(self) -> DeepSpeedConfig:
        if self.config is None:
            file = DeepSpeedConfig({}, "strategy")
        else:
            file = DeepSpeedConfig.from_file(self.config)
        values = _deep(file.values)
        zero = values.setdefault("zero_optimization", {})
        if isinstance(zero, bool):
            zero = values["zero_optimization"] = {"stage": int(zero)}
        for name, key, value, is_default in self._as_keys():
            _settle(file, zero, name, key, value, fills=not (is_default and self.config))
        for key, value in leaves(self.extra):
            _settle(file, values, f"extra.{'.'.join(key)}", key, value, fills=True)
        config = replace(file, values=values)
        self._settle_path(config, zero)
        return config

    def _settle_path(self, config: DeepSpeedConfig, zero: dict[str, Any]) -> None:
        """Puts ``nvme_path`` into each block that keeps something in files."""
        if self.nvme_path is None:
            return
        blocks = in_files(config)
        if not blocks:
            raise ConfigError(
                f"strategy.nvme_path={self.nvme_path}, and nothing is offloaded to nvme",
                fix="set strategy.offload_optimizer=nvme, or leave the path out",
            )
        for block in blocks:
            key = (block, "nvme_path")
            _settle(config, zero, "nvme_path", key, self.nvme_path, fills=True)

    def _as_keys(self) -> list[tuple[str, tuple[str, ...], Any, bool]]:
        """(knob, key below zero_optimization, value, is the default) of each knob that has one."""
        found = []
        for knob in dataclasses.fields(self):
            if knob.name in ("nvme_path", "optimizer", "config", "unknown_keys", "extra"):
                continue
            value = getattr(self, knob.name)
            is_default = value == knob.default
            if value is not None:
                below = ("device",) if knob.name.startswith("offload_") else ()
                found.append((knob.name, (knob.name, *below), value, is_default))
        return found

    def cannot_compile(self) -> str:
        return "DeepSpeed gathers weights at stage 3" if self.settings().stage == 3 else ""

    def prepare(self, job: Job, comm: Communicator) -> Engine:
        config = self.settings()
        if not isinstance(job.compression, NoCompression):
            raise self.refuse(f"compression={job.compression.name}", use="set compression=none")
        stage = config.stage
        if job.clip.value is not None and stage:
            raise self.refuse(
                "trainer.max_grad_value from stage 1 on",
                use="use trainer.max_grad_norm, strategy.stage=0, or strategy=fsdp",
            )
        if job.compile is not None and stage == 3:
            raise self.refuse(
                "trainer.compile at stage 3", use="set strategy.stage=2, or use strategy=fsdp"
            )
        deepspeed = library.load(comm)
        model = modules.build(job, comm)
        modules.refuse_sparse(model, "strategy=deepspeed", use="use strategy=ddp")
        modules.refuse_kinds(model, self)
        self._check_parameters(model, job, comm, stage)
        plan = plan_config(config, job, model, device=comm.device.type)
        needs.check_fp16(plan.values, config.find_blamed("fp16 is not supported"))
        if plan.offloads and OPTIMIZER not in plan.swaps:
            library.check_memory(count_trained(model), comm.world, library.available_bytes())
        if comm.world.size > 1:
            self._check_hooks(model, plan)
        job = replace(job, precision=plan.precision)
        self._check_ema(job, plan)
        optimizers = self._optimizers(job, model, config, plan)
        return self._engine(deepspeed, job, comm, config, plan, model, optimizers)

    def _check_parameters(self, model: nn.Module, job: Job, comm: Communicator, stage: int) -> None:
        """Makes parameters and buffers contiguous in memory, as DeepSpeed sends them.

        Raises:
            Unsupported: some share memory, or have hooks that would see another gradient.
        """
        tensors = [*model.parameters(), *model.buffers()]
        if stage or not all(tensor.is_contiguous() for tensor in tensors):
            modules.refuse_overlapping(model, self)
        if comm.world.size > 1 or (stage > 1 and job.batch.accumulate > 1):
            modules.refuse_accumulated(model, self)
        for tensor in tensors:
            tensor.data = tensor.data.contiguous()

    def _check_hooks(self, model: nn.Module, plan: ConfigPlan) -> None:
        """Raises Unsupported for a hook that would see a gradient times the number of ranks."""
        sums = plan.values.get("gradient_allreduce_op") == "sum"
        unscales = plan.stage > 1 or (plan.stage == 1 and not plan.half)
        for name, p in model.named_parameters():
            if p._backward_hooks and not sums and not unscales:
                raise self.refuse(
                    f"the parameter {name!r} with a hook of its own beside prescale_gradients or "
                    f"gradient_predivide_factor at stage {plan.stage}, where the hook sees the "
                    "gradient times the number of processes",
                    use="take these out of the file",
                )

    def _check_ema(self, job: Job, plan: ConfigPlan) -> None:
        if job.ema_decay is not None and (plan.stage == 3 or (plan.half and plan.stage)):
            raise self.refuse(
                "trainer.ema_decay where parameters are cut or rounded",
                use="use stages 0 to 2 without bf16_true, or strategy=fsdp",
            )

    def _optimizers(
        self, job: Job, model: nn.Module, config: DeepSpeedConfig, plan: ConfigPlan
    ) -> dict[str, Optimizer]:
        optimizers = dict(job.build_optimizers(model.named_parameters()))
        if len(optimizers) > 1:
            raise self.refuse(
                f"{len(optimizers)} optimizers",
                use="build one with parameter groups, or use strategy=ddp or strategy=fsdp",
            )
        (optimizer,) = optimizers.values()
        check_optimizer(config, optimizer)
        kind = type(optimizer).__name__
        own = self._own(optimizer, plan)
        if plan.stage:
            self._check_stepped(model, optimizer)
        if plan.stage and kind not in ELEMENTWISE and own is None:
            raise self.refuse(
                f"the optimizer {kind} from stage 1 on, which updates cut and flattened parameters",
                use="take AdamW or SGD, strategy.stage=0, or strategy=ddp",
            )
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizers

    def _check_stepped(self, model: nn.Module, optimizer: Optimizer) -> None:
        """From stage 1 on DeepSpeed has the gradients of what the optimizer has, and no others.

        Raises:
            Unsupported: a parameter trains that the optimizer does not have.
        """
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        left = [name for name, p in trained.items() if p not in stepped]
        if left:
            raise self.refuse(
                f"{len(left)} trainable parameters that the optimizer does not have, {left[0]!r} "
                "among them: from stage 1 on their gradients are left out of the norm that clips",
                use="freeze them (trainer.frozen), or use strategy.stage=0 or strategy=ddp",
            )

    def _inner(self, optimizer: Optimizer, plan: ConfigPlan, comm: Communicator) -> Optimizer:
        """What DeepSpeed steps: a twin of the recipe's, or its own with the same settings."""
        own = self._own(optimizer, plan)
        if own is None:
            return optimizer if plan.stage == 0 else without_state(optimizer)
        # Imported here: they compile when one is made.
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        wanted = ("params", "lr", "betas", "eps", "weight_decay")
        groups = [
            {key: group[key] for key in wanted if key in group} for group in optimizer.param_groups
        ]
        operators.compile_operators([own], comm)
        decoupled = type(optimizer).__name__ == "AdamW"
        made: Optimizer
        if own == "cpu_adagrad":
            made = DeepSpeedCPUAdagrad(groups)
        elif own == "cpu_adam":
            made = DeepSpeedCPUAdam(groups, adamw_mode=decoupled)
        else:
            made = FusedAdam(groups, adam_w_mode=decoupled)
        return made

    def _own(self, optimizer: Optimizer, plan: ConfigPlan) -> OwnOptimizer | None:
        """The optimizer of DeepSpeed's that steps for the recipe's; None: the recipe's own does.

        Raises:
            Unsupported: one is asked for that cannot.
        """
        kind, settings = type(optimizer).__name__, optimizer.defaults
        odd = [name for name in _BEYOND if settings.get(name)]
        if self.optimizer in _TWINS:
            offloads = self.optimizer != "fused_adam"
            fits = kind in _TWINS[self.optimizer] and not odd and plan.offloads == offloads
            if fits and plan.stage:
                return self.optimizer
            with_what = f"{kind} and {odd[0]}" if odd else f"{kind} at stage {plan.stage}"
            raise self.refuse(
                f"strategy.optimizer={self.optimizer} with {with_what}"
                + ("" if plan.offloads else " and without offloading"),
                use=f"take {' or '.join(_TWINS[self.optimizer])} at stages 1 to 3, "
                + ("with" if offloads else "without")
                + " strategy.offload_optimizer=cpu, or strategy.optimizer=null",
            )
        if self.optimizer == "torch" or odd or not plan.offloads or not plan.stage:
            return None
        hosts: tuple[OwnOptimizer, ...] = ("cpu_adam", "cpu_adagrad")
        return next((own for own in hosts if kind in _TWINS[own]), None)

    def _engine(
        self,
        deepspeed: Any,
        job: Job,
        comm: Communicator,
        config: DeepSpeedConfig,
        plan: ConfigPlan,
        model: nn.Module,
        optimizers: dict[str, Optimizer],
    ) -> DeepSpeedEngine:
        masters = _masters(model) if plan.stage and plan.half else {}
        module = _computing(model, plan)
        modules.compile_modules(job, [module])
        (optimizer,) = optimizers.values()
        inner = self._inner(optimizer, plan, comm)
        zero = plan.values["zero_optimization"]
        folders = needs.prepare_swaps(plan.swaps, config, zero, model, optimizer, comm)
        with contextlib.ExitStack() as undoing:
            for folder in folders:
                undoing.callback(folder.remove)
            with library.putting_back() as theirs:
                wrapped = _initialize(deepspeed, module, inner, config, plan, comm)
            common: dict[str, Any] = {
                "model": model,
                "optimizers": optimizers,
                "max_norm": plan.max_norm,
                "autocast": not plan.half,
                "replacement": library.Replacement(theirs),
            }
            if plan.stage == 0:
                return DeepSpeedEngine(wrapped, job, comm, **common)
            engine = ZeroEngine(wrapped, job, comm, masters=masters, folders=folders, **common)
            undoing.pop_all()
            return engine


_BEYOND = ("amsgrad", "lr_decay", "initial_accumulator_value", "maximize")
"""Settings that DeepSpeed's own optimizers do not have."""


def count_trained(model: nn.Module) -> int:
    """Elements that train."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload_optimizer": (None, "cpu", "nvme"),
    "offload_param": (None, "cpu", "nvme"),
    "optimizer": (None, "torch", *_TWINS),
    "unknown_keys": ("error", "warn"),
}


_NO_LION = "Lion has no twin in torch, with which another strategy could go on from its checkpoint"
_INSTEAD = {
    "cpu_lion": f"take cpu_adam: {_NO_LION}",
    "fused_lion": f"take fused_adam: {_NO_LION}",
}
"""What to do instead of a value that is refused for a reason of its own."""


def _deep(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _deep(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _settle(
    file: DeepSpeedConfig,
    values: dict[str, Any],
    knob: str,
    key: tuple[str, ...],
    value: Any,
    *,
    fills: bool,
) -> None:
    """Puts a knob's value where the file has none; where it has another, that is an error."""
    for name in key[:-1]:
        below = values.get(name)
        if below is None and not fills:
            return
        values = values.setdefault(name, {}) if below is None else below
    if key[-1] not in values:
        if fills:
            values[key[-1]] = value
        return
    there = values[key[-1]]
    if there != value and fills and there != "auto":
        where = key if knob.startswith("extra.") else ("zero_optimization", *key)
        raise contradiction(file, where, there, f"strategy.{knob}", value)


def _masters(model: nn.Module) -> dict[str, Tensor]:
    """The fp32 values that DeepSpeed will round."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class CastInputs(nn.Module):
    """Casts the inputs of a module whose parameters are low, and its outputs where asked to.

    ``dtype`` None leaves the inputs as they are, ``outputs`` None the outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        *,
        outputs: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is not None:
            args, kwargs = modules.cast_floats((args, kwargs), self.dtype)
        given = self.module(*args, **kwargs)
        return given if self.outputs is None else modules.cast_floats(given, self.outputs)


class _Autocast(nn.Module):
    """Runs a module under autocast, within DeepSpeed, which would switch off that around it."""

    def __init__(self, module: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.device = device
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, dtype=self.dtype):
            return self.module(*args, **kwargs)


def _computing(model: nn.Module, plan: ConfigPlan) -> nn.Module:
    """What DeepSpeed wraps, in the precision of the plan."""
    dtype = DTYPES[plan.precision.compute]
    if plan.half:
        outputs = None if plan.precision.low_outputs else torch.float32
        if plan.stage == 0:
            return modules.ComputeIn(model, dtype, output_dtype=outputs)
        return CastInputs(model, dtype, outputs=outputs)
    if plan.precision.autocast:
        device = next(model.parameters()).device.type
        return _Autocast(model, device, dtype)
    return model


def _initialize(
    deepspeed: Any,
    module: nn.Module,
    optimizer: Optimizer,
    config: DeepSpeedConfig,
    plan: ConfigPlan,
    comm: Communicator,
) -> Any:
    """DeepSpeed's engine.

    Raises:
        ConfigError: DeepSpeed refuses the configuration; its message, with file, line and key.
    """
    # Its own name for "this cannot be": there is no other way to tell it from a fault of ours.
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    refusals = (
        ValueError,
        AssertionError,
        NotImplementedError,
        DeepSpeedConfigError,
        ZeRORuntimeException,
    )
    if comm.device.type == "cpu":
        operators.compile_operators(["deepspeed_shm_comm"], comm)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # every rank would say that it has them
            wrapped, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=_deep(plan.values),
                dist_init_required=None,
            )
    except refusals as error:
        message = " ".join(str(error).partition("For further information")[0].split())
        place = config.find_blamed(message)
        raise ConfigError(
            f"DeepSpeed refuses the configuration: {place + ': ' if place else ''}{message}",
            fix="change that, or leave it out",
        ) from error
    return wrapped
