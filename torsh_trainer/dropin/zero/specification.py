"""From a configuration of DeepSpeed to the objects of an engine, through the translator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from torsh_trainer.emulation import Emulation
from torsh_trainer.emulation.knobs import StartKnobs
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.strategies.base import BatchPlan, Clip, Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.translate import reading
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import fill, translate
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.recipe import nest
from torsh_trainer.utils import registry
from torsh_trainer.utils.lookup import import_object


@dataclass(frozen=True)
class Specification:
    """What an engine is told. ``content`` is the configuration as DeepSpeed would have it."""

    content: Mapping[str, Any]
    stage: int
    strategy: Strategy
    precision: Precision
    batch: BatchPlan
    clip: Clip
    emulation: Emulation
    skips_nonfinite: bool
    optimizer: OptimizerSpec | None
    schedule: Any
    remarks: tuple[str, ...]

    @property
    def reduces_each(self) -> bool:
        """Every micro-batch is reduced over processes, as ZeRO does from stage 2 on."""
        return self.stage >= 2

    @property
    def adds_reduced(self) -> bool:
        """What is reduced is whole here, and each micro-batch's is added to it afterwards."""
        return self.stage == 2 and isinstance(self.strategy, DDP)


def specify(
    source: str | Path | Mapping[str, Any], world_size: int, stated: Mapping[str, Any] | None
) -> Specification:
    """The specification that ``source`` comes to on ``world_size`` processes.

    ``stated`` is the optimizer that the script has made, as a block of a configuration, or None.

    Raises:
        ConfigError: it is invalid, or a key of it cannot be honoured.
    """
    options = Options(world_size=world_size)
    given: str | Path | Mapping[str, Any] = source
    content = fill(source, options)
    from_file = "optimizer" in content
    if stated is not None:
        given = {**content, "optimizer": dict(stated)}  # for what depends on its rate
    plan = translate(given, options)
    _refuse(plan, source)
    values = nest(plan.values)
    strategy = _strategy(plan, values)
    trainer = values.get("trainer", {})
    zero = content.get("zero_optimization")
    stage = int(zero) if isinstance(zero, bool) else int((zero or {}).get("stage", 0))
    takes_optimizer = from_file and stated is None
    return Specification(
        content=content,
        stage=stage,
        strategy=strategy,
        precision=_precision(plan, values),
        batch=_solve(content, world_size),
        clip=Clip(trainer.get("max_grad_norm"), trainer.get("max_grad_value")),
        emulation=StartKnobs(**StartKnobs.among(trainer)).emulation,
        skips_nonfinite=trainer.get("on_nonfinite") == "skip",
        optimizer=OptimizerSpec.from_config(_node(plan, values, "optimizer", ""))
        if takes_optimizer
        else None,
        schedule=_schedule(plan, values) if "scheduler" in content else None,
        remarks=tuple(
            f"{f.key}: {f.why}" for f in plan.findings if f.verdict == "approximate" and f.given
        ),
    )


def _refuse(plan: Plan, source: Any) -> None:
    name = "the configuration" if isinstance(source, Mapping) else str(source)
    for finding in plan.findings:
        if finding.verdict == "refused":
            raise Unsupported(
                f"{name}: {finding.key}: {finding.why}",
                fix="take it out, or run this script with DeepSpeed itself",
            )


def _strategy(plan: Plan, values: Mapping[str, Any]) -> Strategy:
    """The translation's; at stage 2 parameters stay whole, as a script finds them there."""
    knobs = dict(values.get("strategy", {}))
    kind: Any = registry.strategy_class(plan.choices["strategy"])
    strategy = kind(**knobs)
    if isinstance(strategy, DDP):
        return replace(strategy, broadcast_buffers=False)  # each process keeps its own
    if not strategy.cpu_offload and not strategy.reshard_after_forward:
        return DDP(
            zero1=True,
            find_unused_parameters=True,
            zero_unused=strategy.zero_unused,
            broadcast_buffers=False,
        )
    return cast(Strategy, strategy)


def _precision(plan: Plan, values: Mapping[str, Any]) -> Precision:
    low, _, how = plan.choices.get("precision", "fp32").partition("_")
    own = dict(values.get("precision", {}))
    scaling = LossScaling(**own.pop("loss_scaling", {}))
    params: Any = low if how == "true" else "fp32"
    compute: Any = low
    return Precision(params=params, compute=compute, loss_scaling=scaling, **own)


def _schedule(plan: Plan, values: Mapping[str, Any]) -> Any:
    node = _node(plan, values, "schedule", "constant")
    return import_object(node.pop("_target_"), option="schedule")(**node)


def _node(plan: Plan, values: Mapping[str, Any], group: str, default: str) -> dict[str, Any]:
    # Imported here: configuration is above this room, and only files are looked for.
    folder = _conf()
    option = plan.choices.get(group, default)
    made = {
        **yaml.safe_load((folder / group / f"{option}.yaml").read_text("utf-8")),
        **values.get(group, {}),
    }
    made.pop("defaults", None)
    return made


def _conf() -> Path:
    """The folder of options: in the package where it is installed, else beside it."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "_data" / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _solve(content: Mapping[str, Any], world_size: int) -> BatchPlan:
    """The sizes as DeepSpeed solves them; that they agree is checked by then."""
    total = content.get("train_batch_size")
    micro = content.get("train_micro_batch_size_per_gpu")
    steps = content.get("gradient_accumulation_steps")
    if total is not None and micro is not None:
        steps = steps or total // micro // world_size
    elif total is not None:
        steps = steps or 1
        micro = total // world_size // steps
    else:
        assert micro is not None
        steps = steps or 1
        total = micro * steps * world_size
    return BatchPlan(total, micro, steps, world_size)


def read_source(args: Any, config: Any) -> str | Path | Mapping[str, Any]:
    """What ``deepspeed.initialize`` is given: a dictionary, or the name of a file.

    Raises:
        ConfigError: neither ``config`` nor ``args`` says one, or both do.
    """
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and named is not None:
        raise ConfigError(
            "deepspeed.initialize is given config, and args has deepspeed_config",
            fix="give one of them",
        )
    found = config if config is not None else named
    if found is None:
        raise ConfigError(
            "deepspeed.initialize is given no configuration",
            fix="pass config=, or --deepspeed_config FILE to the script",
        )
    if isinstance(found, Mapping):
        return found
    reading.read(found)  # says what is wrong with it
    return str(found)
