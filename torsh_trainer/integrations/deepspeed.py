"""A DeepSpeed configuration in a script of one's own, trained natively: no engine is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.integrations.sharded import FSDPConfig
from torsh_trainer.optim import schedule as schedules
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.optim.precision import DTypeName, LossScaling, Precision
from torsh_trainer.optim.schedule import Schedule, StatefulSchedule
from torsh_trainer.optim.schedule import deepspeed as emulated
from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.translate.deepspeed import versions
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate_document
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.reading import Document, read

_SCHEDULES: Mapping[str, type[Schedule] | type[StatefulSchedule]] = {
    found.name: found
    for room in (schedules, emulated)
    for found in (getattr(room, name) for name in room.__all__)
    if issubclass(found, Schedule | StatefulSchedule) and hasattr(found, "name")
}
"""By the name of the option."""
_TAKEN = ("strategy", "precision", "optimizer", "schedule")
_TAKEN_KNOBS = tuple(
    f"trainer.{name}" for name in ("accumulate", "max_grad_norm", "on_nonfinite", "compile")
)


IN_A_SCRIPT = Options(sizes_from_loader=True)
"""The newest version, nothing around DeepSpeed, and a loader that knows its own batch."""


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration, read and not yet translated.

    ``document`` is its content with the line of every key, ``options`` how it is to be read: the
    version of DeepSpeed, what hands it the file, what fills "auto".
    """

    document: Document
    options: Options = IN_A_SCRIPT

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        version: str = "newest",
        context: str = "raw",
        mode: str = "exact",
        lenient: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> DeepSpeedConfig:
        """Reads a file as DeepSpeed does; the options are those of the verb ``translate``.

        Raises:
            ConfigError: it is no configuration of DeepSpeed.
            ResourceError: it cannot be read.
        """
        options = Options(
            version=versions.parse(version),
            context=context,
            mode=mode,
            lenient=lenient,
            settings=settings or {},
            sizes_from_loader=True,
        )
        return cls(read(path), options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeepSpeedConfig:
        """The same of a dict.

        Raises:
            ConfigError: it is nested too deep.
        """
        return cls(read(values))

    @property
    def values(self) -> Mapping[str, Any]:
        """What the file says, as it says it."""
        content: Mapping[str, Any] = self.document.root.plain()
        return content


class DeepSpeedIntegration:
    """``DeepSpeedIntegration(DeepSpeedConfig.from_file("ds_config.json")).to_fsdp_config()``."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config
        self.is_initialized = False

    @classmethod
    def from_file(cls, path: str | Path) -> DeepSpeedIntegration:
        """Of a file; see ``DeepSpeedConfig.from_file``."""
        return cls(DeepSpeedConfig.from_file(path))

    def initialize(self, rank: int, world_size: int) -> None:
        """Checks that this process is ``rank`` of ``world_size``, and batch sizes for so many.

        Raises:
            ConfigError: torch.distributed says otherwise, or the sizes contradict one another.
        """
        joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if (rank, world_size) != joined:
            raise ConfigError(
                f"this process is rank {joined[0]} of {joined[1]}, not {rank} of {world_size}",
                fix="call torch.distributed.init_process_group first",
            )
        options = replace(self.config.options, world_size=world_size)
        translate_document(self.config.document, options)
        self.config = replace(self.config, options=options)
        self.is_initialized = True

    @property
    def plan(self) -> Plan:
        """The translation, with a verdict for every key.

        Raises:
            ConfigError: the configuration is invalid; the message has the place.
        """
        return translate_document(self.config.document, self.config.options)

    def to_fsdp_config(self) -> FSDPConfig:
        """What ``FullyShardedDataParallel(model, config)`` takes: stages 2 and 3, and offloading.

        Raises:
            ConfigError: the configuration is invalid.
            Unsupported: a key has no translation, or the stage shards nothing but the optimizer.
        """
        plan = self.plan
        _refuse(plan)
        if plan.choices["strategy"] != "fsdp":
            zero1 = plan.values.get("strategy.zero1", False)
            raise Unsupported(
                f"{plan.source}: stage {int(zero1)} keeps parameters whole in every process, so "
                "it is no FSDP",
                fix=f"train it with Trainer(strategy=DDP(zero1={zero1})), or by the recipe that "
                "the verb translate writes",
            )
        return _fsdp_config(plan)


def _refuse(plan: Plan) -> None:
    refused = [f for f in plan.findings if f.verdict == "refused"]
    if refused:
        others = [f"\n  also {f.key}: {f.why}" for f in refused[1:]]
        raise Unsupported(
            f"{plan.source}: {refused[0].key} has no translation: {refused[0].why}",
            fix="take it out, or train under the engine itself" + "".join(others),
        )


def _fsdp_config(plan: Plan) -> FSDPConfig:
    groups = _group_values(plan.values)
    trainer = groups.get("trainer", {})
    return FSDPConfig(
        strategy=FSDP(**groups.get("strategy", {})),
        precision=_precision(plan, groups.get("precision", {})),
        clip=Clip(trainer.get("max_grad_norm")),
        accumulate=_accumulation(plan),
        skip_nonfinite=trainer.get("on_nonfinite") == "skip",
        compile=bool(trainer.get("compile")),
        optimizer=_optimizer(plan, groups.get("optimizer", {})),
        schedule=_schedule(plan, groups.get("schedule", {})),
        plan=plan,
        left={
            key: value
            for key, value in plan.values.items()
            if key.partition(".")[0] not in _TAKEN and key not in _TAKEN_KNOBS
        },
    )


def _group_values(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups


def _precision(plan: Plan, knobs: Mapping[str, Any]) -> Precision:
    name, _, kind = plan.choices.get("precision", "fp32_true").partition("_")
    compute: DTypeName = {"bf16": "bf16", "fp16": "fp16"}.get(name, "fp32")  # type: ignore[assignment]
    scaling = {k.partition(".")[2]: v for k, v in knobs.items() if k.startswith("loss_scaling.")}
    own = {k: v for k, v in knobs.items() if "." not in k}
    return Precision(
        params=compute if kind == "true" else "fp32",
        compute=compute,
        loss_scaling=LossScaling(**scaling),
        **own,
    )


def _accumulation(plan: Plan) -> int:
    """Micro-batches a step; with both sizes given, it takes the number of processes.

    Raises:
        ConfigError: that number is not known.
    """
    values = plan.values
    if "trainer.accumulate" in values:
        return int(values["trainer.accumulate"])
    total, micro = values.get("data.batch_size"), values.get("data.micro_batch_size")
    if total is None or micro is None:
        return 1
    if plan.world_size is None:
        raise ConfigError(
            f"{plan.source}: how many micro-batches a step has depends on the number of processes",
            fix="call initialize(rank, world_size) first",
        )
    return int(total) // int(micro) // plan.world_size


def _optimizer(plan: Plan, knobs: Mapping[str, Any]) -> OptimizerSpec | None:
    name = plan.choices.get("optimizer")
    return None if name is None else OptimizerSpec.from_config({"_target_": name, **knobs})


def _schedule(plan: Plan, knobs: Mapping[str, Any]) -> Schedule | StatefulSchedule | None:
    name = plan.choices.get("schedule", "constant")
    if name == "constant":
        return None
    plain = {k: v for k, v in knobs.items() if "." not in k}
    options = {k.partition(".")[2]: v for k, v in knobs.items() if "." in k}
    return _SCHEDULES[name](**plain, **({"options": options} if options else {}))
