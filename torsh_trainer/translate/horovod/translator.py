"""Horovod to native: everything that a job says through the rules, into one plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.base import TranslationRequest, Translator
from torsh_trainer.translate.horovod import rules_launch, rules_script, versions
from torsh_trainer.translate.horovod.job import HorovodJob, Leaf, Options, PerProcess
from torsh_trainer.translate.horovod.rules import RULES, HorovodRule
from torsh_trainer.translate.horovod.script_leaves import WORLD_SIZE
from torsh_trainer.translate.horovod.source import READS, job_of, script_job, sort_of
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.outcomes import Outcome
from torsh_trainer.translate.plan import DTypes, Finding, Ledger, Memory, Plan, ScriptPlan
from torsh_trainer.translate.proofs import find_proofs
from torsh_trainer.translate.python.environment import note_assumed
from torsh_trainer.translate.python.parsing import note_lines, read_source
from torsh_trainer.translate.reading import exists

RULE_MODULES = (rules_launch, rules_script)
"""Importing them enters their rules."""

AS_IT_STANDS = Options()
"""No world, the newest version, exact."""

_OVERRIDDEN = "overridden"
_DEFAULTS = (
    ("strategy", "engine", "Horovod", "engine"),
    ("op", "op", "average", "op"),
    ("compression", "compression", "none", "compression"),
    ("backward_passes_per_step", "backward_passes_per_step", 1, "passes"),
    ("buffers", "buffers", "each process its own", "start.buffers"),
    ("unused parameters", "unused", "gradients of zero", "start.unused"),
)
"""(key, name, value, rule) of what holds wherever nothing says otherwise."""


def translate(source: str | Path, options: Options = AS_IT_STANDS) -> Plan:
    """The native plan for the Horovod job ``source``: a path, or empty with a command alone.

    Raises:
        ConfigError: the job is invalid; the message has the place and the next move.
        ResourceError: a file cannot be read.
    """
    return _plan_of(job_of(source, options))


def translate_script(path: Path, options: Options, arguments: Mapping[str, Any]) -> ScriptPlan:
    """The plan for a script that another launcher starts with ``arguments``.

    Raises:
        ConfigError, ResourceError: as ``translate``.
    """
    job, used = script_job(path, options, arguments)
    return ScriptPlan(_plan_of(job), used)


def _plan_of(job: HorovodJob) -> Plan:
    options = job.options
    ledger = Ledger()
    choices = {"precision": "fp32"}  # said, since silence is auto
    values: dict[str, Any] = {}
    for leaf in job.leaves:
        ledger.enter(
            leaf.key, _report_value(leaf.value), line=leaf.place.line, column=leaf.place.column
        )
    for leaf, given in [(leaf, True) for leaf in job.leaves] + [(d, False) for d in _defaults(job)]:
        rule = RULES[_OVERRIDDEN if leaf.over else leaf.rule]
        outcome = rule.apply(job, leaf)
        choices.update(outcome.choices)
        values.update(outcome.values)
        ledger.take([_finding(leaf, rule, outcome, given=given)])
    if job.world_size is not None and not job.several_hosts and not job.elastic:
        values["launcher.num_processes"] = job.world_size
    return Plan(
        source=job.name,
        engine="horovod",
        version=options.version,
        context="raw",
        mode=options.mode,
        world_size=job.world_size,
        choices=choices,
        values=values,
        findings=ledger.close(),
        warnings=job.warnings,
        dtypes=() if job.facts else _dtypes(job, values),
        memory=None if job.facts else _memory(job),
        notes=_notes(job),
        facts=job.facts,
        files=job.files,
        script=job.training,
    )


def _notes(job: HorovodJob) -> tuple[str, ...]:
    names = [Path(name).name for name in job.files]
    said = [f"read with it: {', '.join(names)}"] if names else []
    assumed = () if job.training is None else job.training.reading.assumed
    return (*said, *note_lines(Path(job.name)), *note_assumed(assumed))


def _defaults(job: HorovodJob) -> Iterator[Leaf]:
    if job.script and job.facts and not job.leaves:  # nothing is sure yet
        return
    for key, name, value, rule in _DEFAULTS:
        if not job.is_given(name):
            yield Leaf(key, name, value, Place(), rule)
    if job.script and not job.facts and not job.is_given("broadcast_parameters"):
        yield Leaf(
            "broadcast_parameters", "broadcast_parameters", None, Place(), "start.parameters"
        )


def _finding(leaf: Leaf, rule: HorovodRule, outcome: Outcome, *, given: bool) -> Finding:
    return Finding(
        key=leaf.key,
        value=_report_value(leaf.value),
        line=leaf.place.line,
        column=leaf.place.column,
        verdict=outcome.verdict,
        becomes=outcome.said,
        why="; ".join(filter(None, [outcome.why, leaf.note])),
        rule=rule.id,
        engine_takes=outcome.engine_takes,
        given=given,
        file=leaf.file,
        proved_by=find_proofs("horovod", rule.id, outcome.verdict),
    )


def _report_value(value: Any) -> Any:
    if isinstance(value, PerProcess):
        return str(value)
    if isinstance(value, tuple):
        return ",".join(f"{host.name}:{host.slots}" for host in value)
    return value


def _dtypes(job: HorovodJob, values: Mapping[str, Any]) -> tuple[DTypes, ...]:
    cast = {"double": "fp64", "half": "fp16", "bfloat16": "bf16"}.get(job.get("cast", ""))
    if cast:
        rows = (
            "parameters",
            "compute",
            "gradient communication",
            "accumulation",
            "optimizer state",
        )
        return (
            *(DTypes(row, cast, cast) for row in rows),
            DTypes("buffers", "as the model has them", "as the model has them"),
        )
    half = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
    low = half.get(job.get("autocast.dtype", ""), "fp32") if job.get("autocast") else ""
    computes = f"{low} by autocast" if low else "fp32"
    sent = "fp16" if job.get("compression") == "fp16" else "fp32"
    return (
        DTypes("parameters", "fp32", "fp32"),
        DTypes("compute", computes, computes),
        DTypes("gradient communication", sent, values.get("precision.reduce", "fp32")),
        DTypes("accumulation", "fp32", "fp32"),
        DTypes("master", "fp32", "fp32"),
        DTypes("optimizer state", "fp32", "fp32"),
        DTypes("buffers", "as the model has them", "as the model has them"),
    )


def _memory(job: HorovodJob) -> Memory | None:
    """Bytes per parameter and process, for an Adam: both hold all of it."""
    if job.get("optimizer") not in ("Adam", "AdamW") or job.is_given("cast"):
        return None
    note = "bytes a parameter and process, Adam, without activations and Horovod's fusion buffer"
    return Memory(16.0, 16.0, note)


# -- the original, for verify --------------------------------------------------------------------


def original(source: str | Path, options: Options = AS_IT_STANDS) -> dict[str, Any]:
    """What a script of plain Horovod needs to train as the job ``source`` does.

    Raises:
        ConfigError, ResourceError: as ``translate``.
    """
    job = job_of(source, options)
    if job.facts:
        names = [fact.name for fact in job.facts]
        raise ConfigError(
            f"{job.name}: something that only you know is not known: {', '.join(names)}",
            fix=" ".join(f"--set {name}=VALUE" for name in names),
        )
    wrapper = (
        "op",
        "compression",
        "gradient_predivide_factor",
        "sparse_as_dense",
        "num_groups",
        "process_set",
    )
    found: dict[str, Any] = {
        "wrapper": {name: job.get(name) for name in wrapper if job.get(name) is not None},
        "passes": job.get("backward_passes_per_step", 1),
        "loss_divided_by": job.get("loss.divided_by", 1),
        "broadcast_optimizer_state": job.get("broadcast_optimizer_state", ""),
        "clip_norm": job.get("clip_grad_norm"),
        "clip_value": job.get("clip_grad_value"),
        "autocast": job.get("autocast.dtype") if job.get("autocast") else None,
        "scaler": bool(job.get("scaler")),
    }
    if isinstance(job.get("groups"), int):
        found["wrapper"]["groups"] = job.get("groups")
    if job.is_given("optimizer"):
        found["optimizer"] = {"class": job.get("optimizer"), "options": _options(job, "optimizer.")}
    if job.is_given("scheduler") and job.get("interval") != "never":
        options_of = _options(job, "scheduler.")
        found["scheduler"] = {"class": job.get("scheduler"), "options": options_of}
        found["interval"] = job.get("interval")
    return found


def _options(job: HorovodJob, beginning: str) -> dict[str, Any]:
    return {
        leaf.name.removeprefix(beginning): leaf.value
        for leaf in job.leaves
        if leaf.name.startswith(beginning) and not leaf.over
    }


class HorovodTranslator(Translator):
    """A job on Horovod: the line that starts it, its settings, its script."""

    name = "horovod"
    title = "Horovod"
    reads = READS
    priority = 20
    original = "torsh_trainer_horovod.original"

    def recognises(self, source: Path, command: str | None) -> bool:
        if command is not None:
            return True
        if not exists(source) or source.is_dir() or source.suffix.lower() == ".json":
            return False
        return sort_of(source, read_source(source)) is not None

    def identifies(self, source: Path) -> bool:
        if not self.recognises(source, None):
            return False
        text = read_source(source)
        sort = sort_of(source, text)
        return sort != "environment" and (sort != "script" or "DistributedOptimizer" in text)

    def translate(self, source: str | Path, asked: TranslationRequest) -> Plan:
        return translate(source, _make_options(asked))

    def content(self, source: str | Path, asked: TranslationRequest) -> dict[str, Any]:
        return original(source, _make_options(asked))


def _make_options(asked: TranslationRequest) -> Options:
    if asked.context != "raw":
        raise ConfigError(
            f"--context {asked.context} is about DeepSpeed's files", fix="leave it out"
        )
    settings = dict(asked.settings or {})
    size = settings.pop(WORLD_SIZE, "")
    if size and (not size.isdigit() or int(size) < 1):
        raise ConfigError(
            f"--set {WORLD_SIZE}={size} is no number of processes", fix="give 1 or more"
        )
    return Options(
        int(size) if size else asked.world_size,
        versions.parse(asked.version),
        asked.mode,
        asked.lenient,
        settings,
        asked.command,
    )
