"""Batch arithmetic: three numbers of which any two give the third, for a world of some size."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed.rules import (
    Outcome,
    approximate,
    constant_rule,
    dead,
    exact,
    refuse,
    rule,
    switch_rule,
)
from torsh_trainer.translate.deepspeed.source import Leaf, Source

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of a step, of a forward of one process, and forwards a step; None: not known."""

    total: int | None
    micro: int | None
    steps: int | None


def solve(source: Source) -> Batch:
    """The three sizes as DeepSpeed solves them (``_set_batch_related_parameters``).

    Raises:
        ConfigError: they contradict one another, or there are too few.
    """
    total, micro, steps = source.get(TOTAL), source.get(MICRO), source.get(STEPS)
    if total is None and micro is None:
        if (
            source.is_given_or_auto(MICRO)
            or source.is_given_or_auto(TOTAL)
            or _from_outside(source)
        ):
            return Batch(None, None, steps)
        raise ConfigError(
            f"{source.document.name}: neither {TOTAL} nor {MICRO} is given",
            fix=f"DeepSpeed needs one of them; add {MICRO}",
        )
    world = source.world_size
    if world is None:
        _check_without_world(source, total, micro, steps)
        if total is None or micro is None:
            steps = steps or 1
        return Batch(total, micro, steps)
    shard = source.get("sequence_parallel_size")
    ranks = world // shard if shard and world % shard == 0 else world
    if total is not None and micro is not None:
        steps = steps if steps is not None else total // micro // ranks
    elif total is not None:
        steps = steps or 1
        micro = total // ranks // steps
    else:
        assert micro is not None
        steps = steps or 1
        total = micro * steps * ranks
    if total != micro * steps * ranks or not micro or not steps:
        raise _contradiction(source, f"{total} is not {micro} x {steps} x {ranks} processes")
    return Batch(total, micro, steps)


def _from_outside(source: Source) -> bool:
    """Lightning, Accelerate and a script of one's own read the micro-batch from the loader."""
    options = source.options
    return options.sizes_from_loader or (
        options.context in ("lightning", "accelerate")
        or source.document.dialect in ("accelerate", "gpt-neox")
    )


def _check_without_world(
    source: Source, total: int | None, micro: int | None, steps: int | None
) -> None:
    if total is not None and micro is not None and total % (micro * (steps or 1)):
        each = f"{micro} x {steps}" if steps else str(micro)
        raise _contradiction(
            source, f"{total} is no multiple of {each}, for any number of processes"
        )


def _contradiction(source: Source, what: str) -> ConfigError:
    leaf = source.found.get((TOTAL,)) or source.found[(MICRO,)]
    return ConfigError(
        f"{source.document.name}:{leaf.place}: the batch sizes contradict one another: {what}",
        fix="take one of the three out, or state the --world-size that they were written for",
        line=leaf.place.line,
        column=leaf.place.column,
    )


@rule("batch.global", "The global batch stays as it is, on any number of processes.")
def _total(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return exact("follows from the micro-batch, the accumulation and the number of processes")
    return exact("samples of one step, over all processes", data__batch_size=leaf.value)


@rule("batch.micro", "The micro-batch of one process stays as it is.")
def _micro(source: Source, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return exact("follows from the loader, or from the other sizes")
    return exact("samples of one forward of one process", data__micro_batch_size=leaf.value)


@rule("batch.accumulation", "Micro-batches a step: stated where fewer than two sizes are.")
def _steps(source: Source, leaf: Leaf) -> Outcome:
    if source.options.context == "lightning" and leaf.path in source.found:
        raise ConfigError(
            f"{source.document.name}:{leaf.place}: Lightning refuses {STEPS} in DeepSpeed's file",
            fix="set Trainer(accumulate_grad_batches=...) there, and take the key out here",
        )
    total, micro = source.get(TOTAL), source.get(MICRO)
    if total is not None and micro is not None:
        return exact("follows from data.batch_size, data.micro_batch_size and the processes")
    if leaf.value is None and total is None and micro is None:
        return exact("follows from the loader and the script")
    return exact(
        "the loss is a mean over all micro-batches of the step",
        trainer__accumulate=leaf.value or 1,
    )


switch_rule(
    "batch.managed",
    "The loop always ends an accumulation by itself.",
    on=exact("the loop counts micro-batches itself"),
    off=refuse("the script itself ends each accumulation: such a loop has no translation"),
)
switch_rule(
    "batch.elastic",
    "Elastic batch sizes are not searched for: state the one that they give.",
    on=refuse("not in this release: state the batch sizes that DeepSpeed chose for its world"),
    off=dead("switched off"),
)
constant_rule(
    "batch.elastic-tuning",
    "Limits of the search for an elastic batch size.",
    refuse("not in this release: part of the search for an elastic batch size"),
)


@rule("data.drop-last", "The ragged tail of an epoch is left out.")
def _drop_last(source: Source, leaf: Leaf) -> Outcome:
    return approximate(
        "DeepSpeed heeds it only where it builds the loader (training_data=); here it always holds",
        data__drop_last=leaf.value,
    )
