"""Configurations of DeepSpeed and jobs of Horovod as a strategy in Lightning's Trainer."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from torsh_trainer.emulation.knobs import StartKnobs
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.integrations.deepspeed import DeepSpeedConfig, DeepSpeedIntegration
from torsh_trainer.optim.precision import DTypeName, LossScaling, Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.translate.horovod.job import Options as HorovodOptions
from torsh_trainer.translate.horovod.translator import translate as horovod
from torsh_trainer.translate.plan import Plan
from torsh_trainer.translate.table import table_of
from torsh_trainer.utils import registry


@dataclass(frozen=True)
class Translation:
    """A plan as parts of a strategy.

    ``flags`` are those that the Trainer must have; ``job`` are further fields of a ``Job``;
    ``left`` are settings that are the script's own business: its loader, its processes.
    """

    plan: Plan
    strategy: Strategy
    precision: Precision | None
    flags: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, Any] = field(default_factory=dict)

    def check(self, has: Mapping[str, Any]) -> None:
        """Raises ConfigError where ``has``, flags of a Trainer, are not those of the source."""
        for name, value in self.flags.items():
            if (has[name] or None) != (value or None):
                raise ConfigError(
                    f"{self.plan.source} says {name}={value}, and the Trainer has {has[name]}",
                    fix=f"give Trainer({name}={value})",
                )

    def show(self) -> None:
        """Prints the report on rank 0: a verdict for every key."""
        width = shutil.get_terminal_size((120, 24)).columns
        rank_zero_only(print)(table_of(self.plan, width=width), end="")


def of_deepspeed(path: str | Path, **reading: Any) -> Translation:
    """What a ``ds_config.json`` says, as Lightning's DeepSpeedStrategy(config=...) takes it.

    ``reading`` are options of ``DeepSpeedConfig.from_file``.

    Raises:
        TorshError: it is invalid, or something of it has no translation.
    """
    config = DeepSpeedConfig.from_file(path, **{"context": "lightning", **reading})
    return _of(DeepSpeedIntegration(config).plan)


def of_horovod(path: str | Path, **reading: Any) -> Translation:
    """What a Horovod job says: whatever the verb ``translate`` reads, with its options.

    Raises:
        TorshError: it is invalid, or something of it has no translation.
    """
    return _of(horovod(path, HorovodOptions(**reading)))


def _of(plan: Plan) -> Translation:
    for finding in plan.findings:
        if finding.verdict == "refused":
            raise Unsupported(
                f"{plan.source}: {finding.key} has no translation: {finding.why}",
                fix="take it out, or train under the engine itself",
            )
    for group, none in (("optimizer", None), ("schedule", "constant")):
        if plan.choices.get(group, none) != none:
            raise ConfigError(
                f"{plan.source} brings its own {group}, {plan.choices[group]}",
                fix="return it from configure_optimizers, and take it out there",
            )
    values = {group: _below(plan, group) for group in ("strategy", "precision", "trainer")}
    trainer = values["trainer"]
    kind = registry.strategy_class(plan.choices["strategy"])
    start = StartKnobs.among(trainer)
    taken = {*_FLAGS, *start, "on_nonfinite"}
    job: dict[str, Any] = {"emulation": StartKnobs(**start).emulation} if start else {}
    if trainer.get("on_nonfinite") == "skip":
        job["skip_nonfinite"] = True
    left = {
        key: value
        for key, value in plan.values.items()
        if key.partition(".")[0] not in ("strategy", "precision")
        and key not in {f"trainer.{name}" for name in taken}
    }
    if "trainer.compile" in left:
        raise Unsupported(
            f"{plan.source} compiles the model, which TorshStrategy does not",
            fix="call module.compile() in the script, and take it out there",
        )
    return Translation(
        plan=plan,
        strategy=kind(**values["strategy"]),
        precision=_precision(plan, values["precision"]),
        flags={flag: trainer[name] for name, flag in _FLAGS.items() if name in trainer},
        job=job,
        left=left,
    )


_FLAGS = {"accumulate": "accumulate_grad_batches", "max_grad_norm": "gradient_clip_val"}
"""Knobs of the trainer's, and the Trainer's flags of that meaning."""


def _below(plan: Plan, group: str) -> dict[str, Any]:
    prefix = f"{group}."
    return {k.removeprefix(prefix): v for k, v in plan.values.items() if k.startswith(prefix)}


def _precision(plan: Plan, knobs: Mapping[str, Any]) -> Precision | None:
    """The precision that is meant; None leaves it to the Trainer's flag."""
    name, _, kind = plan.choices.get("precision", "fp32").partition("_")
    compute: DTypeName = {"bf16": "bf16", "fp16": "fp16"}.get(name, "fp32")  # type: ignore[assignment]
    scaling = {
        key.partition(".")[2]: value
        for key, value in knobs.items()
        if key.startswith("loss_scaling.")
    }
    meant = Precision(
        params=compute if kind == "true" else "fp32",
        compute=compute,
        loss_scaling=LossScaling(**scaling),
    )
    own = {key: value for key, value in knobs.items() if "." not in key}
    meant = dataclasses.replace(meant, **own)
    return None if meant == Precision() else meant
