"""A native recipe as rules look at it: every knob of the composed configuration, and its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torsh_trainer import __version__
from torsh_trainer.translate.deepspeed.versions import NEWEST, Version
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.outcomes import Outcome as Outcome
from torsh_trainer.translate.outcomes import approximate as approximate
from torsh_trainer.translate.outcomes import dead as dead
from torsh_trainer.translate.outcomes import exact as exact
from torsh_trainer.translate.outcomes import faster as faster
from torsh_trainer.translate.plan import Finding, Ledger, Plan, Verdict

GROUPS = (
    "trainer",
    "data",
    "optimizer",
    "schedule",
    "strategy",
    "precision",
    "compression",
    "launcher",
    "logger",
)
"""Groups of which a knob may matter to another engine; the others are the script's."""

NO_CLASS = "None"


@dataclass(frozen=True)
class Native:
    """A composed configuration in plain values.

    ``given`` are the knobs that recipe and command line set themselves, with their places, and the
    groups of which they choose the option; ``options`` are those options. ``version`` is the target
    engine's.
    """

    name: str
    config: Mapping[str, Any]
    given: Mapping[str, Place]
    options: Mapping[str, str] = field(default_factory=dict)
    version: Version = NEWEST

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value of a knob; ``default`` where there is none, or null."""
        node: Any = self.config
        for key in dotted.split("."):
            if not isinstance(node, Mapping) or node.get(key) is None:
                return default
            node = node[key]
        return node

    def kind(self, group: str) -> str:
        """The class that the group's option names, without its module: ``FSDP``."""
        node = self.config.get(group) or {}
        return str(node.get("_target_", NO_CLASS)).rpartition(".")[2]

    @property
    def computes(self) -> str:
        """fp32, bf16 or fp16: what auto is on a GPU, for which such files are written."""
        compute = self.get("precision.compute", "fp32")
        return "bf16" if compute == "auto" else str(compute)

    @property
    def by_auto(self) -> str:
        """What ``why`` begins with where ``precision=auto`` has decided; else empty."""
        is_auto = self.get("precision.compute") == "auto"
        return "precision=auto is bf16_mixed on a GPU: " if is_auto else ""

    @property
    def processes(self) -> int | None:
        """How many the launcher starts, where it is said in numbers."""
        count = self.get("launcher.num_processes")
        return count if type(count) is int else None

    @property
    def accumulates(self) -> bool:
        """More than one micro-batch a step, as far as the recipe alone says."""
        steps = self.get("trainer.accumulate")
        if steps is not None:
            return bool(steps > 1)
        total, micro = self.get("data.batch_size"), self.get("data.micro_batch_size")
        if total is None or micro is None:
            return False
        return self.processes is None or total // micro // self.processes > 1

    def knobs(self) -> Iterator[tuple[str, Any]]:
        """(dotted key, value) of every knob; a group's own name stands for its option."""
        for group in GROUPS:
            if group in self.config:
                yield group, self.kind(group)
                yield from _leaves(self.config[group] or {}, group)
        for name, node in self.config.items():
            if name not in GROUPS:
                yield name, self.kind(name) if isinstance(node, Mapping) else node
                yield from _leaves(node if isinstance(node, Mapping) else {}, name)


def _leaves(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key == "_target_":
            continue
        dotted = f"{path}.{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, dotted)
        else:
            yield dotted, value


def matters(outcome: Outcome) -> bool:
    """It is worth a line, though the recipe leaves the knob at its default."""
    return bool(outcome.values) or outcome.verdict in ("approximate", "refused")


Apply = Callable[[Native, str, Any], Outcome]
"""(recipe, dotted key, value) -> outcome."""


@dataclass
class RuleTable:
    """The rules of one target, by dotted knob; ``optimizer.*`` takes what no other rule does."""

    target: str
    rules: dict[str, Apply] = field(default_factory=dict)

    def rule(self, *knobs: str) -> Callable[[Apply], Apply]:
        """Enters the decorated function for these knobs."""

        def enter(apply: Apply) -> Apply:
            for knob in knobs:
                assert knob not in self.rules, knob
                self.rules[knob] = apply
            return apply

        return enter

    def fixed_rules(self, verdict: Verdict, why: str, *knobs: str) -> None:
        """Rules whose verdict hangs on nothing."""
        self.rule(*knobs)(lambda native, key, value: Outcome(verdict, why))

    def find(self, key: str) -> tuple[str, Apply] | None:
        """(id, rule) for a knob: its own, or that of the nearest ``*`` above it."""
        if key in self.rules:
            return f"{self.target}.{key}", self.rules[key]
        parts = key.split(".")
        for length in range(len(parts) - 1, -1, -1):
            wild = ".".join([*parts[:length], "*"])
            if wild in self.rules:
                return f"{self.target}.{wild}", self.rules[wild]
        return None

    def plan(self, native: Native, *, target_version: str) -> Plan:
        """The whole translation: ``values`` are the content of the other file, by dotted key."""
        native = replace(native, given=dict(_expand_given(native)))
        ledger = Ledger()
        for key, place in native.given.items():
            ledger.enter(key, native.get(key), line=place.line, column=place.column)
        values: dict[str, Any] = {}
        for key, value in native.knobs():
            found = self.find(key)
            if found is None:
                continue
            rule_id, apply = found
            outcome = apply(native, key, value)
            values.update(outcome.values)
            if key in native.given or matters(outcome):
                ledger.take([_finding(native, key, value, rule_id, outcome)])
        return Plan(
            source=native.name,
            engine="native",
            version=__version__,
            context="raw",
            mode="exact",
            world_size=native.processes,
            choices={},
            values=values,
            findings=ledger.close(),
            target=f"{self.target} {target_version}",
        )


def _expand_given(native: Native) -> Iterator[tuple[str, Place]]:
    """The given knobs; a mapping that is given gives all that is in it."""
    for key, place in native.given.items():
        node = native.get(key)
        if "." in key and isinstance(node, Mapping) and node:
            yield from ((leaf, place) for leaf, _ in _leaves(node, key))
        else:
            yield key, place


def _finding(native: Native, key: str, value: Any, rule_id: str, outcome: Outcome) -> Finding:
    place = native.given.get(key, Place())
    return Finding(
        key=key,
        value=native.options.get(key, value),
        line=place.line,
        column=place.column,
        verdict=outcome.verdict,
        becomes=outcome.said,
        why=outcome.why,
        rule=rule_id,
        given=key in native.given,
    )


def refuse(why: str, *, script: str = "") -> Outcome:
    """The other file cannot hold it; ``script`` is what does it in the script instead."""
    return Outcome("refused", why, becomes=f"in the script: {script}" if script else "")


SCRIPTS = (
    "task",
    "model",
    "comm",
    "checkpoint",
    "callbacks",
    "launcher",
    "vars",
    "debug",
    "data",
)
"""Groups and settings of which no other engine's file speaks."""

_OF_THE_RUN = (
    "stages",
    "max_steps",
    "max_epochs",
    "max_time",
    "eval_every",
    "eval_every_epochs",
    "eval_batches",
    "seed",
    "randomness",
    "deterministic",
    "attention",
    "cudnn_benchmark",
    "device",
    "peak_tflops",
    "pretrained",
    "pretrained_strict",
    "frozen",
    "fast_dev_run",
    "overfit_batches",
    "objective",
    "objective_mode",
)


def enter_scripts(table: RuleTable) -> None:
    """Rules for all that a run is made of and no other engine's file holds."""
    why = "the script's: no other engine's file says it"
    table.fixed_rules("dead", why, *SCRIPTS, *(f"{name}.*" for name in SCRIPTS))
    table.fixed_rules("dead", "sizes below say it", "mesh")
    elsewhere = "strategy.shard_size says it in a way that is translated"
    table.rule("mesh.*")(off(elsewhere, 1, -1))
    cuts = "it cuts layers over mesh.tp, for which this translation has no key"
    table.rule("strategy.plan", "strategy.plan.*")(off(cuts, {}))
    table.fixed_rules("dead", why, "trainer", *(f"trainer.{name}" for name in _OF_THE_RUN))
    table.fixed_rules("dead", why, "logger", "logger.*")
    table.fixed_rules("performance-only", "the level of a log", "log_level")
    table.fixed_rules("exact", "says the mode", "precision.params", "precision.compute")
    table.fixed_rules("dead", why, "precision.matmul")


def enter_torchs(table: RuleTable, engine: str) -> None:
    """Rules for an engine that does as torch does where DeepSpeed has ways of its own."""
    ways = off(f"a way of DeepSpeed's, which {engine} has not", False)
    table.rule(
        "precision.rounded_start",
        "precision.rounded_products",
        "precision.low_outputs",
        "trainer.phantom_lr",
    )(ways)
    table.fixed_rules("dead", "there is no such step", "trainer.phantom_state")
    table.rule("precision.gradients")(off("gradients are held in fp32", "fp32"))
    table.rule("strategy.zero_unused")(off(f"{engine} leaves unused parameters alone", False))

    @table.rule("compression", "compression.*")
    def compression(native: Native, key: str, value: Any) -> Outcome:
        if native.kind("compression") in ("NoCompression", "None"):
            return exact("gradients travel as they are")
        return refuse(f"{engine} compresses nothing")


def off(why: str, *neutral: Any) -> Apply:
    """A rule for a knob that the other engine lacks: only its neutral values pass."""

    def apply(native: Native, key: str, value: Any) -> Outcome:
        if value in neutral or value is None:
            return exact("off")
        return refuse(why)

    return apply
