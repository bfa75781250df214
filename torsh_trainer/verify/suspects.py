"""Which rule a difference points at: the quantity that parts first names it.

Within a step causes come in one order: parameters make the loss, the loss the gradient, gradient
and learning rate the next parameters. So what parts first while everything before it agrees is
where to look. The order and the rules behind it: docs/verify.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torsh_trainer.verify.compare import Comparison, Moment, Quantity

_DRIFT = 0.3  # of what is allowed: so near the bound one step earlier, nothing has happened at once
_SAME_FACTOR = 0.02  # relative: a ratio that is meant to be a whole number


@dataclass(frozen=True)
class Suspect:
    """Where a run parts from the reference: step, quantity, the rule, and why it is that one."""

    step: int
    quantity: str
    rule: str
    because: str


class SuspectRule(NamedTuple):
    """What is likely broken, and why that."""

    name: str
    because: str


def suspect_of(
    comparison: Comparison, facts: Mapping[str, Any], reference: Mapping[str, Any]
) -> Suspect | None:
    """The likely cause of a difference beyond the bounds; None where there is no such difference.

    ``facts`` and ``reference`` are those of the two records.
    """
    torn = [m.step for m in comparison.moments if not m.mine["replicas_agree"]]
    if comparison.first is None:
        if not torn:
            return None
        return Suspect(torn[0], "parameters", "replicas", _TORN)
    moment, quantity = comparison.first
    if torn and torn[0] <= moment.step:
        return Suspect(torn[0], "parameters", "replicas", _TORN)
    if moment.step > 1 and _has_drifted(comparison, moment, quantity):
        return Suspect(
            moment.step,
            quantity,
            "rounding",
            "it grew step by step and no step made it at once: rounding, or a small error in "
            "every step; see whether fewer steps (verify.steps) or a lower rate agree",
        )
    rule = _RULES[quantity](moment, facts, reference)
    if quantity == "loss" and rule.name != "buffers":
        rule = _update_before(comparison, moment) or rule
    return Suspect(moment.step, quantity, rule.name, rule.because)


_TORN = (
    "the ranks hold different parameters: gradients are not communicated, or the weights were not "
    "the same on all ranks to begin with"
)


def _initial(moment: Moment, facts: Mapping[str, Any], _: Mapping[str, Any]) -> SuspectRule:
    worst = moment.differences["parameters"].worst
    if math.isinf(moment.differences["parameters"].absolute):
        return SuspectRule(
            "initialisation", f"the two models have not the same parameters: {worst}"
        )
    return SuspectRule(
        "initialisation",
        f"the parameters differ before the first step, {worst} most: another seed or order of "
        "initialisation, or weights that were rounded to a lower precision",
    )


def _optimizer(moment: Moment, facts: Mapping[str, Any], ref: Mapping[str, Any]) -> SuspectRule:
    if moment.step == 0:
        return _initial(moment, facts, ref)
    return SuspectRule(
        "optimizer",
        "loss, gradient norm and learning rate agree and the parameters do not, "
        f"{moment.differences['parameters'].worst} most: what the optimizer does with the "
        "gradient (clipping, weight decay, momentum, epsilon, groups)",
    )


def _forward(moment: Moment, facts: Mapping[str, Any], _: Mapping[str, Any]) -> SuspectRule:
    if moment.mine.get("samples") != moment.reference.get("samples"):
        return SuspectRule(
            "data",
            f"{moment.mine.get('samples')} samples were consumed instead of "
            f"{moment.reference.get('samples')}: the batch arithmetic, or the end of an epoch",
        )
    changing = moment.mine.get("changing_buffers") or moment.reference.get("changing_buffers")
    if changing:
        return SuspectRule(
            "buffers",
            f"training forwards change {', '.join(changing)} and read what they have changed: "
            "another number of processes or micro-batches gives other values, and another loss",
        )
    return SuspectRule(
        "data",
        "the same weights give another loss: other samples or another order of them, other random "
        "numbers (dropout, augmentation), or another forward (precision, loss, its mean)",
    )


def _gradient(
    moment: Moment, facts: Mapping[str, Any], reference: Mapping[str, Any]
) -> SuspectRule:
    words = (
        "the loss agrees and the gradient's norm does not: averaging over ranks or micro-batches"
    )
    ratio = _ratio(moment, "grad_norm")
    if ratio is None:
        return SuspectRule("averaging", words)
    for factor, meaning in _factors(facts, reference):
        if abs(ratio / factor - 1) < _SAME_FACTOR:
            return SuspectRule(
                "averaging", f"the gradient is {_times(ratio)} the reference's: {meaning}"
            )
    return SuspectRule("averaging", f"{words}; it is {_times(ratio)} the reference's")


def _factors(facts: Mapping[str, Any], reference: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Ratios that a known mistake makes; the likeliest first, since numbers may coincide."""
    ranks, micro = facts["world_size"], facts["accumulate"]
    found = []
    scale = facts["gradient_scale"] / reference["gradient_scale"]
    if scale != 1:
        found.append((scale, "that is what its knobs say (gradient_scale); choose a mean"))
    if ranks > 1:
        found += [
            (1 / ranks, f"divided by the {ranks} ranks once too often"),
            (float(ranks), f"summed over the {ranks} ranks, and not averaged"),
        ]
    if micro > 1:
        found += [
            (1 / micro, f"divided by the {micro} accumulated micro-batches once too often"),
            (float(micro), f"not divided by the {micro} accumulated micro-batches"),
        ]
    return found


def _rate(moment: Moment, facts: Mapping[str, Any], _: Mapping[str, Any]) -> SuspectRule:
    ratio = _ratio(moment, "lr")
    words = "the learning rate is another: the schedule, its count of updates, or a scaled rate"
    return SuspectRule(
        "schedule", words + (f"; it is {_times(ratio)} the reference's" if ratio else "")
    )


def _scale(moment: Moment, facts: Mapping[str, Any], _: Mapping[str, Any]) -> SuspectRule:
    mine, expected = moment.mine.get("loss_scale"), moment.reference.get("loss_scale")
    return SuspectRule(
        "loss_scaling",
        f"the loss is scaled by {mine} instead of {expected}: its start, window, patience or floor",
    )


_RULES = {
    "loss": _forward,
    "grad_norm": _gradient,
    "lr": _rate,
    "loss_scale": _scale,
    "parameters": _optimizer,
}


def _update_before(comparison: Comparison, moment: Moment) -> SuspectRule | None:
    """Where parameters are not judged, a later loss tells of the update before it."""
    before = comparison.before(moment)
    if before is None or before.step == 0 or comparison.bounds.parameters is not None:
        return None
    difference = before.differences["parameters"]
    if difference.relative <= comparison.bounds.limit_after("loss", before.step):
        return None
    return SuspectRule(
        "optimizer",
        f"up to step {before.step} loss, gradient norm and learning rate agree, and its update "
        f"left other parameters, {difference.worst} most: what the optimizer does with the "
        "gradient (clipping, weight decay, momentum, epsilon, groups)",
    )


def _has_drifted(comparison: Comparison, moment: Moment, quantity: Quantity) -> bool:
    before = comparison.before(moment)
    if before is None or quantity not in before.differences:
        return False
    allowed = comparison.bounds.limit_after(quantity, before.step)
    return before.differences[quantity].relative > _DRIFT * allowed


def _ratio(moment: Moment, name: str) -> float | None:
    mine, expected = moment.mine.get(name), moment.reference.get(name)
    if not mine or not expected or not math.isfinite(mine) or not math.isfinite(expected):
        return None
    return float(mine / expected)


def _times(ratio: float) -> str:
    return f"{ratio:.4g} times"
