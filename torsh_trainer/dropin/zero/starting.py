"""``deepspeed.initialize``: a script's model and configuration become an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torsh_trainer.dropin.zero import plain_backward
from torsh_trainer.dropin.zero.engine import DeepSpeedEngine
from torsh_trainer.dropin.zero.gathering import mark_cut, refuse_saved_parts
from torsh_trainer.dropin.zero.optimizer import EngineOptimizer
from torsh_trainer.dropin.zero.processes import cuts_models, meet
from torsh_trainer.dropin.zero.schedule import ConfiguredScheduler
from torsh_trainer.dropin.zero.specification import Specification, read_source, specify
from torsh_trainer.dropin.zero.task import MAIN, GivenModel, describe_optimizer
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.precision import DTYPES
from torsh_trainer.strategies.base import Engine, Job

log = logging.getLogger("torsh_trainer")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """(engine, optimizer, loader of ``training_data``, scheduler), as DeepSpeed gives them.

    Raises:
        ConfigError: the configuration is wrong, or something of it cannot be honoured.
    """
    if model is None:
        raise ConfigError("deepspeed.initialize is given no model", fix="pass model=")
    if mesh_param is not None or cuts_models(mpu):
        raise Unsupported(
            "deepspeed.initialize with mpu or mesh_param: parallelism within a model",
            fix="run this script with DeepSpeed itself",
        )
    comm = meet()
    source = read_source(args, config if config is not None else config_params)
    chosen = None if model_parameters is None else list(model_parameters)
    made = optimizer if optimizer is None or isinstance(optimizer, Optimizer) else optimizer(chosen)
    stated = None if made is None else describe_optimizer(made)
    specification = specify(source, comm.size, stated)
    _check(specification, made, stated)
    if comm.rank == 0:
        for remark in specification.remarks:
            print(f"drop-in: {remark}", flush=True)
    task = GivenModel(model, made, specification.optimizer, chosen)
    job = Job(
        task=task,
        build_model=lambda: model,
        batch=specification.batch,
        precision=specification.precision,
        clip=specification.clip,
        emulation=specification.emulation,
        skip_nonfinite=specification.skips_nonfinite or specification.precision.scales_loss,
    )
    training = [(module, module.training) for module in model.modules()]
    native = specification.strategy.resolve(job, comm).prepare(job, comm)
    for module, mode in training:
        module.training = mode
    stepped = native.optimizers[MAIN]
    if made is not None and stepped is not made:
        made.param_groups = stepped.param_groups
    shown = _show(native, specification, made or stepped)
    scheduler = _schedule(lr_scheduler, specification, native, made or stepped)
    plain_backward.install()
    if specification.stage == 3:
        refuse_saved_parts()
        mark_cut(model, DTYPES[specification.precision.params])
    engine = DeepSpeedEngine(
        native,
        specification,
        comm,
        model=model,
        optimizer=shown,
        lr_scheduler=scheduler,
        collate_fn=collate_fn,
        client_optimizer=optimizer,
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, shown, engine.training_dataloader, scheduler


def _check(specification: Specification, made: Optimizer | None, stated: Any) -> None:
    if made is None and specification.optimizer is None:
        raise ConfigError(
            "neither the script nor the configuration has an optimizer",
            fix="pass optimizer=, or add the block optimizer",
        )
    low = specification.precision.params != "fp32"
    if made is not None and stated is None and low and specification.stage == 0:
        raise Unsupported(
            f"{type(made).__name__} with several rates, or of its own kind, at stage 0 in "
            f"{specification.precision.params}: DeepSpeed begins with a step of it",
            fix="set zero_optimization.stage to 1, or run this script with DeepSpeed itself",
        )


def _show(native: Engine, specification: Specification, optimizer: Optimizer) -> Any:
    """The optimizer itself where DeepSpeed wraps none, else what stands for its wrapper."""
    if specification.stage == 0 and specification.precision.params == "fp32":
        return optimizer
    return EngineOptimizer(native, optimizer)


def _schedule(
    given: Any, specification: Specification, native: Engine, optimizer: Optimizer
) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) else given
    if specification.schedule is None:
        return None
    return ConfiguredScheduler(specification.schedule, native.optimizers)
