"""Verdicts on what a script does with DeepSpeed beside its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torsh_trainer.translate.outcomes import (
    Outcome,
    approximate,
    dead,
    exact,
    faster,
    refuse,
)
from torsh_trainer.translate.plan import Finding
from torsh_trainer.translate.python.events import Event, ScriptReading
from torsh_trainer.translate.python.lengths import find_length
from torsh_trainer.translate.python.torch_calls import (
    CHANGES_GRADIENT,
    CHANGES_OPTION,
    OTHER_ADAM,
    PLAIN_SCHEDULES,
    RUNS_TEXT,
    STEPS_BESIDE,
    name_positional,
)
from torsh_trainer.translate.python.values import ImportedName, Thing, Unknown, is_number, is_plain

_MESHES = "not in this release: it waits for meshes"
_LOOP = "the trainer's own loop does it"

ENGINE: Mapping[str, Outcome] = {
    "backward": exact(_LOOP),
    "step": exact(_LOOP),
    "zero_grad": exact(_LOOP),
    "train": exact(_LOOP),
    "eval": exact(_LOOP),
    "is_gradient_accumulation_boundary": exact("a callback is called once a step"),
    "save_checkpoint": exact("checkpoint.every says how often, checkpoint.dir where"),
    "save_16bit_model": exact("checkpoint export writes weights"),
    "save_fp16_model": exact("checkpoint export writes weights"),
    "load_checkpoint": exact(
        "resume=RUN goes on; a checkpoint of DeepSpeed's comes in by checkpoint import"
    ),
    "train_batch": refuse(f"a pipeline's step: {_MESHES}"),
    "eval_batch": refuse(f"a pipeline's step: {_MESHES}"),
    "generate": refuse("generation with an engine while it trains"),
    "set_gradient_accumulation_boundary": approximate(
        "the script says which micro-batch ends a step: trainer.accumulate has to say the same"
    ),
    "set_lr": refuse("the script sets the rate itself: write it as a schedule"),
}
"""Method of an engine -> verdict."""

_NOT_WHOLE = "torch refuses a batch that is no whole number: write it with // or int()"
_SETS = refuse("it changes the engine while it trains: say in the recipe what it comes to")
_READ = Outcome("yours", "reads the engine: your task or callback takes what it stands for")

CALLS: tuple[tuple[str, Outcome], ...] = (
    ("init_distributed", exact("the launcher makes the group")),
    ("zero.Init", faster("a model is born in pieces wherever it is cut, without a word")),
    ("zero.GatheredParameters", Outcome("yours", "whole parameters: your task reads them")),
    ("zero.", Outcome("yours", "the script's own use of ZeRO: your task takes its place")),
    ("runtime.zero", Outcome("yours", "the script's own use of ZeRO: your task takes its place")),
    ("pipe.", refuse(f"a pipeline: {_MESHES}")),
    ("runtime.pipe", refuse(f"a pipeline: {_MESHES}")),
    ("PipelineModule", refuse(f"a pipeline: {_MESHES}")),
    ("moe.", refuse(f"experts: {_MESHES}")),
    ("sequence.", refuse(f"sequence parallelism: {_MESHES}")),
    ("init_inference", Outcome("yours", "inference, which is no part of training")),
    ("compression.", refuse("compression while training")),
    ("init_compression", refuse("compression while training")),
    ("checkpointing.", faster("activations are computed again: torch.utils.checkpoint does it")),
    ("comm.", Outcome("yours", "collectives of the script: torsh_trainer.distributed has them")),
    ("profiling.", dead("a profiler, which changes no number")),
    ("monitor.", dead("a log, which changes no number")),
    ("utils.", Outcome("yours", "a helper: your task or callback takes what it does")),
    ("accelerator.", exact("the trainer chooses the device")),
    ("runtime.utils.set_random_seed", exact("trainer.seed")),
    ("runtime.", Outcome("yours", "a helper: your task or callback takes what it does")),
    ("ops.", Outcome("yours", "a kernel of the model, which stays in your model")),
)
"""Beginning of a call of ``deepspeed.`` -> verdict, the first that fits."""

_TORCH_SCHEDULES = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "LinearLR",
    "ConstantLR",
    "PolynomialLR",
    "OneCycleLR",
    "CyclicLR",
)


_IN_GROUPS = "groups of parameters that the script makes: name them in optimizer.groups"
_GROUPS = re.compile(r"group|weight_decay|no_decay")


@dataclass(frozen=True)
class Judged:
    """A finding, and what it sets."""

    finding: Finding
    outcome: Outcome


def judge_arguments(event: Event) -> Iterator[Finding]:
    """Verdicts on what ``deepspeed.initialize`` is given beside model and configuration."""
    optimizer, scheduler = event.facts.get("optimizer"), event.facts.get("lr_scheduler")
    parameters = event.facts.get("model_parameters")
    if isinstance(optimizer, Thing) and "class" in optimizer.facts:
        args, named = optimizer.facts["args"], optimizer.facts["named"]
        parameters = args[0] if args else named.get("params", named.get("model_params"))
        if optimizer.facts.get("of"):
            yield _finding(optimizer.facts["of"], None, event, approximate(OTHER_ADAM))
    if isinstance(parameters, list) or _GROUPS.search(_text(parameters)):
        yield _finding("optimizer.params", None, event, refuse(_IN_GROUPS))
    if scheduler is not None and not isinstance(scheduler, Thing):
        outcome = refuse("its rate is a function of the script; write it as a schedule")
        yield _finding("lr_scheduler", scheduler, event, outcome)


def judge_events(reading: ScriptReading, *, stage: int, accumulate: int) -> Iterator[Judged]:
    """A verdict for everything that the script does with an engine, once for each name."""
    told: set[str] = set()
    steps = reading.all("engine.step")
    length = find_length(reading, steps[0], passes=accumulate) if steps else None
    if length is not None:
        made = _finding(length.key, length.value, length.event, length.outcome)
        yield Judged(made, length.outcome)
    trains = any((step.file, step.place) not in reading.uncalled for step in steps)
    for event in reading.events:
        idle = trains and (event.file, event.place) in reading.uncalled
        for key, value, outcome in _outcomes_of(event, reading, stage, accumulate):
            if idle and outcome.verdict == "refused":
                outcome = dead("nothing that was read calls the function that does it")
            if key not in told:
                told.add(key)
                yield Judged(_finding(key, value, event, outcome), outcome)


def _outcomes_of(
    event: Event, reading: ScriptReading, stage: int, accumulate: int
) -> Iterator[tuple[str, Any, Outcome]]:
    what = event.what
    if what == "engine.backward":
        divided = event.facts.get("divided", 1)
        yield what, None, ENGINE["backward"]
        if divided != 1:
            text = divided if is_plain(divided) else _text(divided)
            why = "beside DeepSpeed's own division: your task's loss keeps it"
            yield "loss / ...", text, Outcome("yours", why)
    elif what.startswith("engine."):
        name = what.partition(".")[2]
        yield what, None, ENGINE.get(name, _SETS if name.startswith("set_") else _READ)
    elif what.startswith("deepspeed."):
        yield what, None, _outcome_of_call(what.partition(".")[2])
    elif what in ("clip_grad_norm", "clip_grad_value"):
        outcome = _outcome_of_clipping(event, stage, accumulate)
        yield f"{what}_", event.facts.get("max_norm"), outcome
    elif what in ("autocast", "GradScaler"):
        why = "torch's own, beside the engine's precision: choose precision=bf16_mixed, say"
        yield what, None, refuse(why)
    elif what == "scheduler":
        yield from _outcomes_of_schedule(event, reading, accumulate)
    elif what == "optimizer.step" and not reading.all("engine.step"):
        why = "past the engine, which counts micro-batches: here the loop steps as engine.step does"
        yield what, None, approximate(why)
    elif what == "hf.trainer":
        why = "Hugging Face's Trainer trains by arguments of its own: translate the line with them"
        yield event.facts["class"], None, refuse(why)
    elif what == "scheduler.unknown":
        why = f"its rate is a function of {event.facts['made']}"[:120]
        yield event.facts["written"], None, refuse(f"{why}; write it as a schedule")
    elif what == "step.unknown":
        yield event.facts["written"], None, refuse(STEPS_BESIDE)
    elif what == "gradient.changed":
        yield event.facts["written"], None, refuse(CHANGES_GRADIENT)
    elif what == "exec":
        yield event.facts["written"], None, refuse(RUNS_TEXT)
    elif what == "param_group.option":
        yield f"param_group.{event.facts['name']}", None, refuse(CHANGES_OPTION)
    elif what == "param_group.lr":
        yield what, None, refuse("the script sets the rate itself: write it as a schedule")
    elif what == "loop.loader" and _trains(event, reading):
        yield from _outcomes_of_loader(event)


def _outcome_of_call(name: str) -> Outcome:
    for beginning, outcome in CALLS:
        if name.startswith(beginning) or name == beginning.rstrip("."):
            return outcome
    return refuse(f"no translation of deepspeed.{name} in this release")


def _outcome_of_clipping(event: Event, stage: int, accumulate: int) -> Outcome:
    if stage > 0:
        return dead("at stages 1 to 3 DeepSpeed leaves no gradients there to clip")
    if accumulate > 1:
        return refuse("it clips a part of a step's gradient: clip by gradient_clipping")
    value = event.facts.get("max_norm")
    if event.what == "clip_grad_value" or not is_number(value):
        return refuse("set trainer.max_grad_norm or trainer.max_grad_value")
    return exact("the same formula", trainer__max_grad_norm=value)


def _trains(event: Event, reading: ScriptReading) -> bool:
    """Whether a loop holds a backward pass; an evaluation does not, and its batches are its own."""
    backwards = reading.all("engine.backward")
    return not backwards or any(event.loops[-1] in backward.loops for backward in backwards)


def _outcomes_of_loader(event: Event) -> Iterator[tuple[str, Any, Outcome]]:
    loader = event.facts["loader"]
    size = loader.facts.get("batch_size")
    if is_number(size):
        if size != int(size) or isinstance(size, float):
            yield "DataLoader.batch_size", size, refuse(_NOT_WHOLE)
            return
        why = "samples of one forward of one process"
        yield "DataLoader.batch_size", size, exact(why, data__micro_batch_size=size)


def _outcomes_of_schedule(
    event: Event, reading: ScriptReading, accumulate: int
) -> Iterator[tuple[str, Any, Outcome]]:
    kind = event.facts["class"]
    own = {**name_positional(kind, event.facts["args"][1:]), **event.facts["named"]}
    if kind in PLAIN_SCHEDULES:
        names = ("optimizer", "num_warmup_steps", "num_training_steps")
        own = {**dict(zip(names, event.facts["args"], strict=False)), **event.facts["named"]}
        chosen = {"schedule": PLAIN_SCHEDULES[kind]}
        yield "lr_scheduler", kind, Outcome("exact", "the same curve", chosen)
        warmup = own.get("num_warmup_steps", 0)
        if is_number(warmup):
            why = "updates of the rise from 0"
            yield "num_warmup_steps", warmup, exact(why, schedule__warmup_steps=warmup)
        else:
            yield "num_warmup_steps", _text(warmup), refuse("state schedule.warmup_steps")
        if "num_training_steps" in own:
            yield _outcome_of_end(own["num_training_steps"])
        if PLAIN_SCHEDULES[kind] != "constant" or warmup != 0:
            for key, value, outcome in _outcomes_of_interval(event, reading, accumulate):
                yield key, value, _PLAIN_INTERVALS.get(value, outcome)
        return
    if kind not in _TORCH_SCHEDULES:
        why = "its rate is a function of the script; write it as a schedule"
        yield "lr_scheduler", kind, refuse(why)
        return
    outcome = Outcome("exact", "torch's own", {"schedule": "torch"}, {"schedule.scheduler": kind})
    yield "lr_scheduler", kind, outcome
    for name, value in own.items():
        if name == "optimizer":
            continue
        key = f"lr_scheduler.{name}"
        if is_plain(value):
            yield key, value, exact("the same option", **{f"schedule__options__{name}": value})
        else:
            yield key, _text(value), refuse(f"state schedule.options.{name}")
    yield from _outcomes_of_interval(event, reading, accumulate)


_PLAIN_INTERVALS = {
    "step": exact("with each update, as schedules here do"),
    "epoch": refuse("the script steps once an epoch a curve that is made for updates"),
}


def _outcome_of_end(steps: Any) -> tuple[str, Any, Outcome]:
    """What becomes of the update at which the script's curve ends."""
    if is_number(steps):
        why = f"here the curve ends with the run: trainer.max_steps={steps} makes both the same"
        return "num_training_steps", steps, approximate(why)
    why = "here the curve ends with the run: the script computes where its own does"
    return "num_training_steps", _text(steps), Outcome("yours", why)


def _outcomes_of_interval(
    event: Event, reading: ScriptReading, accumulate: int
) -> Iterator[tuple[str, Any, Outcome]]:
    handed = any(
        isinstance(made.facts.get("lr_scheduler"), Thing) for made in reading.all("initialize")
    )
    steps = reading.all("scheduler.step")
    loops = next((e.loops for e in reading.all("engine.step")), ())
    if handed and not steps:
        yield "interval", "step", exact("the engine steps it", schedule__interval="step")
    elif handed:
        why = "the engine steps it with every update, and the script steps it once more"
        yield "interval", "both", refuse(why)
    elif not steps:
        yield "interval", "never", refuse("nothing steps it: leave it out")
    elif steps[0].loops == loops and accumulate > 1:
        yield "interval", "batch", refuse(f"it steps {accumulate} times with every update")
    else:
        interval = "step" if steps[0].loops == loops else "epoch"
        why = "as often as in the script"
        yield "interval", interval, exact(why, schedule__interval=interval)


def _text(value: Any) -> Any:
    if isinstance(value, ImportedName):
        return value.dotted
    return value.text if isinstance(value, Unknown) else str(value)


def _finding(key: str, value: Any, event: Event, outcome: Outcome) -> Finding:
    return Finding(
        key=key,
        value=value if is_plain(value) else _text(value),
        line=event.place.line,
        column=event.place.column,
        verdict=outcome.verdict,
        becomes=outcome.said,
        why=outcome.why,
        rule=f"script.{event.what.partition('.')[0]}",
        file=event.file,
    )
