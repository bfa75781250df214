"""What a run takes from the checkpoint that it goes on from: compared first, then loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.checkpoint.fit import Fit, slots_of, with_late_slots
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.setup import (
    Setup,
    SetupComparison,
    SetupDifference,
    by_parameter,
    compare,
)
from torsh_trainer.comm.compression.base import Compression
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.stream import reading_processes
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.schedule.base import Schedule, StatefulSchedule
from torsh_trainer.strategies.base import BatchPlan, Engine, Strategy
from torsh_trainer.strategies.state import local_optimizer
from torsh_trainer.tasks.base import Task
from torsh_trainer.training.run_spec import RunSpec

OPTIMIZER: Key = ("engine", "optimizer")
EMA: Key = ("engine", "ema")
OF_RANKS: tuple[Key, ...] = (("engine", "compression"), ("engine", "buffers"))
"""What each rank has of its own: residuals, and running averages of its own micro-batches. What
does not fit is left out, and begins afresh."""


# -- the setup of a run ---------------------------------------------------------------------------


def knob_facts(spec: RunSpec) -> dict[str, Any]:
    """The part of a run's setup that its knobs say, whatever it trains."""
    return {
        "trainer.seed": spec.seed,
        **compression_facts(spec.compression),
        "trainer.max_grad_norm": spec.max_grad_norm,
        "trainer.max_grad_value": spec.max_grad_value,
        "trainer.on_nonfinite": spec.on_nonfinite,
        "trainer.ema_decay": spec.ema_decay,
        "trainer.sync_batchnorm": spec.sync_batchnorm,
        "trainer.deterministic": spec.deterministic,
    }


def data_facts(task: Task, loading: Loading, *, overfit_batches: int | None) -> dict[str, Any]:
    """What the order of training samples follows from, beside the seed."""
    dataset = task.data.train
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    facts: dict[str, Any] = {
        "data.iterable": iterable,
        "data.shuffle": loading.shuffle,
        "data.weighted": loading.weighted,
        "data.drop_last": loading.drop_last,
        "data.seed_samples": loading.seed_samples,
        "trainer.overfit_batches": overfit_batches,
    }
    if hasattr(dataset, "__len__"):
        facts["data.samples"] = len(dataset)
    if iterable:  # over a map dataset the order does not depend on it
        facts["data.num_workers"] = reading_processes(dataset, loading)
    return facts


def batch_facts(batch: BatchPlan) -> dict[str, Any]:
    """The batch arithmetic."""
    return {
        "data.batch_size": batch.batch_size,
        "data.micro_batch_size": batch.micro_batch_size,
        "trainer.accumulate": batch.accumulate,
    }


def task_facts(task: Task) -> dict[str, Any]:
    """What is trained, by name, and what its loss is a mean over."""
    return {"task": type(task).__qualname__, "task.sample_weight": task.sample_weight}


def strategy_facts(strategy: Strategy) -> dict[str, Any]:
    """The strategy with the knobs that are not at their defaults: ``ddp(zero1=True)``."""
    return {"strategy": _describe_knobs(strategy)}


def compression_facts(compression: Compression) -> dict[str, Any]:
    """The compression with the knobs that are not at their defaults: ``topk(ratio=0.1)``."""
    return {"compression": _describe_knobs(compression)}


def place_facts(device: torch.device) -> dict[str, Any]:
    """Where it computes, and with what."""
    facts = {"device": device.type, "torch": torch.__version__}
    return {**facts, "threads": torch.get_num_threads()} if device.type == "cpu" else facts


def schedule_facts(schedule: Schedule | StatefulSchedule | None) -> dict[str, Any]:
    """The schedule by name, and its knobs that are not at their defaults."""
    stateful = isinstance(schedule, StatefulSchedule)
    knobs = {} if schedule is None else _not_default(schedule)
    return {
        "schedule": {
            "name": "constant" if schedule is None else schedule.name,
            "knobs": {name: plain(value) for name, value in knobs.items()},
            "stateful": stateful,
            "takes_new_knobs": isinstance(schedule, StatefulSchedule) and schedule.takes_new_knobs,
            "needs_total": isinstance(schedule, Schedule) and _needs_total(schedule),
        }
    }


def optimizer_facts(engine: Engine) -> dict[str, Any]:
    """Classes and settings as configured: taken before a schedule has changed any."""
    names = engine.name_groups()
    return {
        "optimizer": {
            name: {
                "class": type(local_optimizer(optimizer)).__qualname__,
                "groups": list(map(_settings, optimizer.param_groups, names[name])),
            }
            for name, optimizer in engine.optimizers.items()
        }
    }


def _settings(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    settings = {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}
    return {**settings, "params": list(names)}


def _needs_total(schedule: Schedule) -> bool:
    try:
        schedule.factor(1, None)
    except ConfigError:
        return True
    return False


def _describe_knobs(named: Strategy | Compression) -> str:
    knobs = ", ".join(f"{name}={value}" for name, value in _not_default(named).items())
    return f"{named.name}({knobs})" if knobs else named.name


def _not_default(knobs: Any) -> dict[str, Any]:
    """Fields of a frozen dataclass that are not at their defaults; nothing of another object."""
    if not dataclasses.is_dataclass(knobs):
        return {}
    values = {}
    for field in dataclasses.fields(knobs):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(knobs, field.name) != default:
            values[field.name] = getattr(knobs, field.name)
    return values


def plain(value: Any) -> Any:
    """``value`` as a checkpoint can hold it: what is not plain becomes its name or its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return getattr(value, "__qualname__", None) or str(value)


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumption:
    """What is to be loaded: all but ``leave``, after ``comparison`` had nothing to refuse."""

    comparison: SetupComparison
    leave: tuple[Key, ...] = ()
    fresh_schedule: bool = False

    def complete(self, loaded: dict[str, Any], optimizers: Iterable[str]) -> dict[str, Any]:
        """``loaded`` as a loop takes it: what was left out begins afresh."""
        kept = loaded["engine"].setdefault("optimizer", {})
        for name in optimizers:
            kept.setdefault(name, {"state": {}, "groups": []})
        if self.fresh_schedule:
            loaded["schedule"] = {**loaded["schedule"], "running": None}
        return loaded


def for_training(
    saved: Mapping[str, Any],
    now: Setup,
    fit: Fit,
    *,
    allow: Sequence[str],
    others: Sequence[SetupDifference] = (),
) -> Resumption:
    """How training goes on from a checkpoint: ``saved`` are its plain values.

    ``now`` is the setup of today's run, ``fit`` how the tensors differ, ``others`` what else does.
    """
    before: Setup = saved.get("setup") or {}
    found = [*tensor_differences(fit), *others]
    comparison = compare(before, now, tensors=found, allow=allow)
    let = {one.word for one in comparison.allowed}
    leave: list[Key] = list(fit.below(*OF_RANKS).paths)
    if "optimizer" in let:
        leave += _unfit_optimizers(saved, now, fit)
    if "ema" in let:
        leave.append(EMA)
    names = [setup["schedule"]["name"] for setup in (before, now) if "schedule" in setup]
    return Resumption(comparison, tuple(leave), "schedule" in let or len(set(names)) > 1)


def grow_template(
    template: Mapping[str, Any], fit: Fit, engine: Engine, saved: Setup, now: Setup
) -> dict[str, Any] | None:
    """``template`` with slots that an optimizer makes in a later step; None where it has all.

    Only of optimizers that are set as they were, but for their learning rate: a slot that a
    setting has made (``amsgrad``) is a difference.
    """
    before, after = saved.get("optimizer", {}), now.get("optimizer", {})
    held = {}
    for name, optimizer in engine.optimizers.items():
        if name in before and name in after and _is_set_alike(before[name], after[name]):
            mine = {id(p) for g in local_optimizer(optimizer).param_groups for p in g["params"]}
            held[name] = {n for n, p in engine.model.named_parameters() if id(p) in mine}
    unexpected = {p: shape for p, shape in fit.unexpected.items() if p[2:3] and p[2] in held}
    added = with_late_slots(template["engine"], Fit(unexpected=unexpected), held)
    return None if added is None else {**template, "engine": added}


def _is_set_alike(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    then, today = by_parameter(before), by_parameter(after)
    rates = ("lr", "initial_lr", "params")
    return before.get("class") == after.get("class") and all(
        {k: v for k, v in then[name].items() if k not in rates}
        == {k: v for k, v in today[name].items() if k not in rates}
        for name in then.keys() & today.keys()
    )


def for_evaluation(fit: Fit, *, averaged: bool) -> Resumption:
    """Only weights matter to a run that does not train: the model's, or their average's."""
    leave = (OPTIMIZER, *OF_RANKS) if averaged else (OPTIMIZER, *OF_RANKS, EMA)
    unfit = [
        one for one in tensor_differences(fit) if not one.word or (averaged and one.word == "ema")
    ]
    return Resumption(SetupComparison(refused=tuple(unfit)), leave)


def tensor_differences(fit: Fit) -> list[SetupDifference]:
    """What names and shapes say; a parameter that differs is not named again for its slots."""
    slots, averages = fit.below(OPTIMIZER), fit.below(EMA)
    others = {*slots.paths, *averages.paths, *fit.below(*OF_RANKS).paths}
    model = Fit(
        tuple(p for p in fit.missing if p not in others),
        {p: shape for p, shape in fit.unexpected.items() if p not in others},
        {p: pair for p, pair in fit.other.items() if p not in others},
    )
    found = [SetupDifference(phrase) for phrase in model.phrases()]
    if not found:
        found += [SetupDifference(phrase, "optimizer") for phrase in slots.phrases()]
        found += [SetupDifference(phrase, "ema") for phrase in averages.phrases()]
    return found


def _unfit_optimizers(saved: Mapping[str, Any], now: Setup, fit: Fit) -> list[Key]:
    """Whole optimizers of another class or name, and single parameters whose slots do not fit."""
    before = (saved.get("setup") or {}).get("optimizer")
    if before is None:
        before = saved.get("engine", {}).get("optimizer", {})
    after = now["optimizer"]
    unfit = [
        (*OPTIMIZER, name)
        for name in sorted({*before, *after})
        if name not in before
        or name not in after
        or before[name].get("class", after[name]["class"]) != after[name]["class"]
    ]
    parameters = {slots_of(path) for path in fit.below(OPTIMIZER).paths}
    return unfit + [path for path in sorted(filter(None, parameters)) if path[:3] not in unfit]


# -- after loading --------------------------------------------------------------------------------


def apply_settings(engine: Engine, saved: Setup, now: Setup) -> None:
    """Gives the groups of ``engine`` those settings that are configured otherwise than they were.

    The others keep what the checkpoint has: a task may have changed them while it trained. Learning
    rates belong to the schedule.
    """
    if "optimizer" not in saved:
        return
    for name, optimizer in engine.optimizers.items():
        then = by_parameter(saved["optimizer"][name]) if name in saved["optimizer"] else {}
        today = now["optimizer"][name]["groups"]
        # What was freed while it trained has groups of its own, behind those of the start.
        for group, settings in zip(optimizer.param_groups, today, strict=False):
            before = then.get(settings["params"][0], {}) if settings["params"] else {}
            for key, value in settings.items():
                if key not in ("params", "lr") and key in before and before[key] != value:
                    group[key] = tuple(value) if isinstance(value, list) else value
