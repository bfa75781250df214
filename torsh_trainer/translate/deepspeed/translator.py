"""DeepSpeed to native: every key of a configuration through the rules, into one plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed import (
    job,
    keys,
    rules_batch,
    rules_gradients,
    rules_optimizer,
    rules_other,
    rules_precision,
    rules_zero,
    versions,
)
from torsh_trainer.translate.deepspeed.normalising import ELSEWHERE, normalise
from torsh_trainer.translate.deepspeed.rules import RULES, DeepSpeedRule, Outcome
from torsh_trainer.translate.deepspeed.rules_batch import solve
from torsh_trainer.translate.deepspeed.source import Leaf, Options, Source
from torsh_trainer.translate.deepspeed.tables import dtypes_of, memory_of
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.plan import Finding, Ledger, Plan
from torsh_trainer.translate.proofs import find_proofs
from torsh_trainer.translate.reading import Document, read

RULE_MODULES = (
    rules_batch,
    rules_gradients,
    rules_optimizer,
    rules_other,
    rules_precision,
    rules_zero,
)
"""Importing them enters their rules."""

AS_IT_STANDS = Options()
"""No world, the newest version, nothing around DeepSpeed."""

_SECRET = "api_key"
_DEFAULTS = (
    "zero_optimization.stage",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "optimizer.type",
    "scheduler.type",
)
_DEFAULTS_HALF = ("communication_data_type", "data_types.grad_accum_dtype")
_DEFAULTS_SCALE = (
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.min_loss_scale",
)
_DEFAULTS_ADAM = tuple(
    f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "torch_adam")
)
_DEFAULTS_WARMUP = tuple(f"scheduler.params.{name}" for name in ("warmup_num_steps", "warmup_type"))
_DEFAULTS_RANGE = tuple(f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr"))


def translate(source: str | Path | Mapping[str, Any], options: Options = AS_IT_STANDS) -> Plan:
    """The native plan for the DeepSpeed configuration ``source`` (a path, a dict, or base64).

    Raises:
        ConfigError: the configuration is invalid; the message has the place and the next move.
        ResourceError: the file cannot be read.
    """
    return translate_document(read(source), options)


def translate_document(document: Document, options: Options = AS_IT_STANDS) -> Plan:
    """The same for a configuration that has been read.

    Raises:
        ConfigError: as ``translate``.
    """
    if document.dialect == "accelerate" and options.context == "raw":
        options = replace(options, context="accelerate")
    found = normalise(document, options)
    batch = solve(found)
    ledger = Ledger()
    choices = {"precision": "fp32"}  # said, since silence is auto
    values: dict[str, Any] = {}
    for leaf in found.leaves:
        line, column = leaf.place.line, leaf.place.column
        ledger.enter(leaf.written, _report_value(leaf), line=line, column=column)
    every = [(leaf, True) for leaf in found.leaves] + [(leaf, False) for leaf in _defaults(found)]
    for leaf, given in every:
        chosen = _rule_for(found, leaf)
        if chosen is None:
            continue
        outcome = chosen.apply(found, leaf)
        choices.update(outcome.choices)
        values.update(outcome.values)
        ledger.take([_finding(leaf, chosen, outcome, given=given)])
    values.update(_launcher_values(options))
    return Plan(
        source=document.name,
        engine="deepspeed",
        version=versions.format_version(options.version),
        context=options.context,
        mode=options.mode,
        world_size=found.world_size,
        choices=choices,
        values=values,
        findings=ledger.close(),
        warnings=found.warnings,
        dtypes=dtypes_of(found, choices, values),
        memory=memory_of(found, batch, choices, values),
    )


def _rule_for(source: Source, leaf: Leaf) -> DeepSpeedRule | None:
    if leaf.mismatch:
        return RULES["mismatch"]
    if leaf.key is None:
        return _rule_for_stranger(source, leaf)
    if _is_switched_off(source, leaf):
        return RULES["block.off"]
    for name in leaf.key.rule.split("|"):
        if name in RULES and RULES[name].holds(source.options.version):
            return RULES[name]
    return None


def _rule_for_stranger(source: Source, leaf: Leaf) -> DeepSpeedRule:
    if leaf.path == ("zero_optimization",):
        return RULES["zero.short-form"]
    if leaf.path in keys.blocks():
        return RULES["block.empty"]
    if leaf.path[0] in ELSEWHERE:
        return RULES["elsewhere"]
    if leaf.path[0].startswith(("_", "#", "//")) or leaf.path[0] in ("comment", "comments"):
        return RULES["remark"]
    return RULES["neox.argument" if source.document.dialect == "gpt-neox" else "unknown"]


def _is_switched_off(source: Source, leaf: Leaf) -> bool:
    assert leaf.key is not None
    switches = [(*leaf.path[:n], "enabled") for n in range(1, len(leaf.path))]
    if leaf.key.switch is not None:
        switches.append(leaf.key.switch)
    return any(_is_off(source, switch) for switch in switches if switch != leaf.path)


def _is_off(source: Source, switch: keys.Path) -> bool:
    if switch in source.found:
        return source.found[switch].value is False
    return switch in keys.schema() and keys.schema()[switch].default is False


def _defaults(source: Source) -> Iterator[Leaf]:
    """Keys that the file leaves out and whose default decides something."""
    for dotted in _find_defaults(source):
        path = tuple(dotted.split("."))
        short = source.found.get(path[:1])  # zero_optimization: true
        if path not in source.found and not (short and isinstance(short.value, bool)):
            key = keys.schema()[path]
            yield Leaf(path, dotted, key.default, Place(), key)


def _find_defaults(source: Source) -> Iterator[str]:
    yield from _DEFAULTS
    if job.precision(source) != "fp32":
        yield from _DEFAULTS_HALF
        if job.stage(source) == 3:
            yield "zero_optimization.memory_efficient_linear"
    if job.precision(source) == "fp16":
        yield from _DEFAULTS_SCALE
    if job.precision(source) == "bf16":
        yield "bf16.check_grad_overflow"
    if job.optimizer_name(source) in rules_optimizer.ADAM:
        yield from _DEFAULTS_ADAM
    name = source.get("scheduler.type")
    if name in rules_optimizer.WARMUP:
        yield from _DEFAULTS_WARMUP
        if name != "WarmupCosineLR":
            yield from _DEFAULTS_RANGE
        if name != "WarmupLR":
            yield "scheduler.params.total_num_steps"


def _finding(leaf: Leaf, chosen: DeepSpeedRule, outcome: Outcome, *, given: bool) -> Finding:
    why = "; ".join(filter(None, [leaf.mismatch or outcome.why, leaf.note]))
    removed = leaf.key is not None and leaf.key.removed
    if removed:
        why += "; DeepSpeed 0.19.8 refuses the key"
    value = _report_value(leaf)
    if not given and value is None and len(outcome.values) == 1:
        value = next(iter(outcome.values.values()))  # the default that the rule knows
    return Finding(
        key=leaf.written,
        value=value,
        line=leaf.place.line,
        column=leaf.place.column,
        verdict=outcome.verdict,
        becomes=outcome.said,
        why=why,
        rule=chosen.id,
        engine_takes=outcome.engine_takes and not removed,
        given=given,
        proved_by=find_proofs("deepspeed", chosen.id, outcome.verdict),
    )


def _report_value(leaf: Leaf) -> Any:
    """The value for the report; a key to somebody's account never stands in it."""
    return "***" if leaf.path[-1] == _SECRET and leaf.value else leaf.value


def _launcher_values(options: Options) -> dict[str, Any]:
    if options.world_size is None:
        return {}
    return {"launcher.num_processes": options.world_size}


def fill(source: str | Path | Mapping[str, Any], options: Options = AS_IT_STANDS) -> dict[str, Any]:
    """The content of the configuration as the engine is to have it: "auto" filled, names current.

    Raises:
        ConfigError, ResourceError: as ``translate``.
    """
    content: dict[str, Any] = {}
    for leaf in normalise(read(source), options).leaves:
        if leaf.key is None or leaf.mismatch or leaf.key.removed:
            continue
        if leaf.value is None and leaf.note:  # "auto" that moves no number: the engine's default
            if leaf.key.dotted == "scheduler.params.total_num_steps":
                raise ConfigError(
                    f'{leaf.written} is "auto", which follows from the steps of a whole run',
                    fix="state them: --set max_steps=STEPS",
                )
            continue
        node = content
        for name in leaf.path[:-1]:
            node = node.setdefault(name, {})
        node[leaf.path[-1]] = leaf.value
    return content
