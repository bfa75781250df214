"""What a training script says about the job, as leaves."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.translate.horovod import script
from torsh_trainer.translate.horovod.job import Leaf, PerProcess, Problem
from torsh_trainer.translate.horovod.script import Event, ScriptReading
from torsh_trainer.translate.horovod.yaml_files import ARGUMENTS, argument_problem, plain_name
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.plan import Fact
from torsh_trainer.translate.python.branches import ask_for_branch
from torsh_trainer.translate.python.events import TOO_LONG
from torsh_trainer.translate.python.lengths import find_length
from torsh_trainer.translate.python.project import ScriptProject
from torsh_trainer.translate.python.torch_calls import name_positional
from torsh_trainer.translate.python.training import (
    TrainingScript,
    list_backwards,
    models_of_optimizers,
)
from torsh_trainer.translate.python.values import ImportedName, Thing, Unknown, is_number, is_plain

WORLD_SIZE = "world_size"
"""The name of the fact that the number of processes is missing."""

_PROBED = (2, 4, 6)
"""Numbers of processes to read a script for where nobody states one."""

_WRAPS = r"\bDistributedOptimizer$"
_REDUCES = ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce_")

_OWN_CALLS = {
    "allreduce": "script.communication",
    "allreduce_": "script.communication",
    "allreduce_async": "script.communication",
    "grouped_allreduce": "script.communication",
    "allgather": "script.communication",
    "allgather_object": "script.communication",
    "alltoall": "script.communication",
    "reducescatter": "script.communication",
    "broadcast": "script.communication",
    "broadcast_": "script.communication",
    "broadcast_object": "script.communication",
    "barrier": "script.communication",
    "synchronize": "script.communication",
    "join": "script.join",
    "start_timeline": "timeline.script",
    "stop_timeline": "timeline.script",
    "SyncBatchNorm": "script.sync-batchnorm",
    "ProcessSet": "process-sets",
    "add_process_set": "process-sets",
    "elastic.run": "elastic.script",
    "elastic.TorchState": "elastic.script",
    "elastic.ElasticSampler": "elastic.script",
}


@dataclass(frozen=True)
class Read:
    """The leaves of a script, what is wrong with it, and which ``--set`` were of use; ``facts`` are
    what only the user knows, ``files`` the modules of its project that were read with it."""

    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    used: frozenset[str]
    facts: tuple[Fact, ...] = ()
    files: tuple[str, ...] = ()
    script: TrainingScript | None = None


def read(
    text: str,
    *,
    name: str,
    file: str,
    size: int | None,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    path: Path | None = None,
) -> Read:
    """The leaves of the script ``text`` on ``size`` processes (None: not known).

    ``arguments`` are those of its command line by option; ``settings`` what ``--set`` states;
    ``path`` is where it lies, for the modules of its project.

    Raises:
        ConfigError: it cannot be parsed, or is not for Horovod and torch.
    """
    tree = script.parse(text, name=name)
    wrapped = _wrappers(tree)
    project = None if path is None else ScriptProject(path)

    def once(processes: int) -> Read:
        reading = script.read(
            tree,
            size=processes,
            arguments=arguments,
            known=settings,
            name=name,
            find_module=None if project is None else project.find_module,
            find_file=None if project is None else project.find_file,
            path=path,
        )
        found = _Leaves(reading, settings, file, name).read(wrapped)
        if project is None or path is None:
            return found
        divided = next((leaf for leaf in found.leaves if leaf.rule == "loss.division"), None)
        training = TrainingScript(
            path,
            tree,
            reading,
            project,
            "horovod",
            backwards=tuple(list_backwards(reading)),
            models=models_of_optimizers(reading),
            divided_by=1 if divided is None else divided.value,
            reduces=not reading.all("DistributedOptimizer"),
            values=settings,
        )
        files = (*project.opened, *map(str, project.files))
        return replace(found, files=files, script=training)

    if size is not None:
        return once(size)
    return _for_any_size([once(processes) for processes in _PROBED], file or Path(name).name)


def _wrappers(tree: ast.Module) -> list[Place]:
    """Where ``DistributedOptimizer`` is called."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else None
            last = node.func.id if isinstance(node.func, ast.Name) else last
            if last == "DistributedOptimizer":
                found.append(Place(node.lineno, node.col_offset + 1))
    return found


def _for_any_size(reads: Sequence[Read], file: str) -> Read:
    """One reading for any number of processes; what is so much for each is ``PerProcess``."""
    first, *others = reads
    if any(read.problems for read in reads):
        return first
    leaves: list[Leaf] = []
    facts, sized = list(first.facts), list[str]()
    same = all(_shape(read) == _shape(first) for read in others)
    for row in zip(*(read.leaves for read in reads), strict=False) if same else ():
        values = [leaf.value for leaf in row]
        if all(value == values[0] for value in values):
            leaves.append(row[0])
        elif row[0].name == "optimizer.lr" and _linear(values):
            leaves.append(replace(row[0], value=PerProcess(values[0] / _PROBED[0])))
        else:
            sized.append(f"{row[0].key} ({row[0].file or file}:{row[0].place.line})")
    if not same:
        sized.append("what this script does")
    if sized and not any(fact.value == "FILE" for fact in facts):
        facts.append(_ask_for_size(", ".join(sized[:3])))
    return replace(first, leaves=tuple(leaves), problems=(), facts=tuple(facts))


def _ask_for_size(where: str) -> Fact:
    return Fact(WORLD_SIZE, where, "processes of the job: machines times GPUs of each", 1, "N")


def _shape(read: Read) -> list[tuple[str, Place]]:
    return [(leaf.key, leaf.place) for leaf in read.leaves]


def _linear(values: Sequence[Any]) -> bool:
    each = [value / size for value, size in zip(values, _PROBED, strict=True) if is_number(value)]
    return len(each) == len(values) and all(math.isclose(one, each[0]) for one in each)


class _Leaves:
    def __init__(
        self, reading: ScriptReading, settings: Mapping[str, Any], file: str, name: str
    ) -> None:
        self.reading, self.settings, self.file, self.name = reading, settings, file, name
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.facts: dict[str, Fact] = {}
        self.reduced_by_hand: list[Event] = []
        self.used = set(reading.used)

    def read(self, wrapped: Sequence[Place]) -> Read:
        self.wrapper(wrapped)
        if self.facts and not self.leaves and not self.reading.all("DistributedOptimizer"):
            facts = tuple(self.facts.values())  # nothing else is sure until they are known
            return Read((), tuple(self.problems), frozenset(self.used), facts)
        self.optimizer()
        self.starts()
        self.data()
        self.loss()
        self.clipping()
        self.precision()
        self.schedule()
        self.length()
        self.others()
        facts = tuple(self.facts.values())
        if not self.reading.is_whole:
            self.problem(Place(1, 1), TOO_LONG, "name the script that trains, or split it")
        missing = self.reading.all("load.missing")
        if facts and missing:  # what it holds answers the rest
            facts = (self.fact_of_file(missing[0]),)
        return Read(tuple(self.leaves), tuple(self.problems), frozenset(self.used), facts)

    # -- what Horovod is asked for ---------------------------------------------------------------

    def wrapper(self, wrapped: Sequence[Place]) -> None:
        events = self.reading.all("DistributedOptimizer")
        seen = {event.place for event in events}
        branch = self.reading.find_skipped(_WRAPS)
        if branch is not None and not events:
            what, file = "wraps the optimizer", self.file or Path(self.name).name
            self.facts |= {f.name: f for f in ask_for_branch(branch, _WRAPS, what, file=file)}
            return
        for place in wrapped:
            if place not in seen:
                what = "DistributedOptimizer is called where reading does not get to"
                fix = "call it in a function that the script calls, or translate its arguments"
                self.problem(place, what, fix)
        if not wrapped and not events and not self.reduces_by_hand():
            what = "nothing in it calls hvd.DistributedOptimizer, or reduces gradients"
            fix = "name the script that trains"
            if self.training is not None and self.reading.all("optimizer.step"):
                what = "it trains, and as far as reading gets it reduces no gradients"
                fix = "lay the module beside it that does; else each process trains by itself, "
                fix += "which Horovod has no part in: write it as a task"
            self.problem(Place(1, 1), what, fix)
        for event in events[1:]:
            self.add("DistributedOptimizer", "several", True, event, "optimizer.several")
        if not events or not self.certain(events[0], "wrapping the optimizer"):
            return
        event = events[0]
        for key, value in event.facts.items():
            if key == "optimizer":
                continue
            dotted = f"DistributedOptimizer.{key}"
            if key not in ARGUMENTS:
                what = f"DistributedOptimizer for torch takes no {key!r}"
                self.problem_at(event, what, "remove it")
            elif key in ("named_parameters", "process_set") or (
                key == "groups" and not is_plain(value)
            ):
                self.add(dotted, key, as_written(value), event, ARGUMENTS[key])
            else:
                named = isinstance(value, ImportedName) and key in ("op", "compression")
                self.argument(dotted, key, as_written(value) if named else value, event)

    def reduces_by_hand(self) -> bool:
        """Whether the script reduces gradients itself, which it then says."""
        for event in self.reading.events:
            if event.what in _REDUCES and event.facts.get("of_gradient"):
                op = event.facts.get("op")
                average = event.facts.get("average", True)
                name = op.dotted.rpartition(".")[2] if isinstance(op, ImportedName) else "Average"
                value = "average" if name == "Average" and average is not False else name.lower()
                file = event.file or self.file
                note = "the script reduces them itself; what else it does to them is your task's"
                leaf = Leaf(f"hvd.{event.what}", "op", value, event.place, "op", file, note=note)
                self.leaves.append(leaf)
                self.reduced_by_hand.append(event)
                self.add("unused parameters", "unused", "not stepped", event, "unused.by-hand")
                for step in self.reading.all("optimizer.step")[:1]:
                    key = "backward passes of a step"
                    self.add(key, "backward_passes_per_step", self.passes, step, "passes")
                return True
        return False

    def argument(self, dotted: str, key: str, value: Any, event: Event) -> None:
        """One argument of the wrapper."""
        known = self.find_value(dotted, value, event)
        if known is None:
            return
        wrong = argument_problem(key, known[0])
        if wrong:
            self.problem_at(event, wrong, "correct the value")
            return
        named = plain_name(key, known[0])
        file = event.file or self.file
        leaf = Leaf(dotted, key, named, event.place, ARGUMENTS[key], file, note=known[1])
        self.leaves.append(leaf)

    def optimizer(self) -> None:
        events = self.reading.all("optimizer")
        if not events:
            if self.reading.all("DistributedOptimizer"):
                self.set_optimizer()
            return
        event = self.find_wrapped(events)
        for other in events:
            if other is not event:
                key = f"optimizer {other.facts['class']}"
                self.add(key, "more", True, other, "optimizer.several")
        if not self.certain(event, f"making the optimizer {event.facts['class']}"):
            return
        kind = event.facts["class"]
        self.add("optimizer", "optimizer", kind, event, "optimizer.type")
        args = event.facts["args"]
        named = dict(event.facts["named"])
        parameters = args[0] if args else named.pop("params", None)
        if event.facts.get("of"):
            self.add(event.facts["of"], "other_adam", True, event, "optimizer.other-adam")
        if isinstance(parameters, list):
            self.add("optimizer.params", "param_groups", len(parameters), event, "optimizer.groups")
        for name, value in {**name_positional(kind, args[1:]), **named}.items():
            if name == "**":
                self.problem_at(event, f"{value.text} cannot be told", "write it out")
                continue
            self.add(f"optimizer.{name}", f"optimizer.{name}", value, event, _rule_of(name))

    def find_wrapped(self, events: Sequence[Event]) -> Event:
        """The optimizer that Horovod's wraps, where reading tells which; else the first."""
        given = [made.facts.get("optimizer") for made in self.reading.all("DistributedOptimizer")]
        places = [one.place for one in given if isinstance(one, Thing)]
        return next((event for event in events if event.place in places), events[0])

    def set_optimizer(self) -> None:
        """An optimizer that only ``--set`` tells of: it is made where reading does not get to."""
        event = self.reading.all("DistributedOptimizer")[0]
        if "optimizer" not in self.settings:
            made = as_written(event.facts.get("optimizer"))
            look = f"its class in torch.optim; the script has {made}"[:160]
            self.ask("optimizer", "the optimizer that is wrapped", event, look)
            self.ask("optimizer.lr", "its rate", event, "as the script sets it for your line")
            return
        for key, value in self.settings.items():
            if key == "optimizer" or key.startswith("optimizer."):
                rule = "optimizer.type" if key == "optimizer" else _rule_of(key.partition(".")[2])
                self.add(key, key, value, event, rule)

    def starts(self) -> None:
        for what, rule in (
            ("broadcast_parameters", "start.parameters"),
            ("broadcast_optimizer_state", "start.optimizer"),
        ):
            for event in self.reading.all(what)[:1]:
                if self.certain(event, f"calling {what}"):
                    called = self.when(event) if rule == "start.optimizer" else "called"
                    self.add(what, what, called, event, rule)
        for event in self.reading.all("init")[:1]:
            self.add("hvd.init", "init", True, event, "script.init")

    def when(self, event: Event) -> str:
        """Of which optimizer, and whether a scheduler has set the first rate by then."""
        order = list(self.reading.events)
        at = order.index(event)
        wrappers = [order.index(e) for e in self.reading.all("DistributedOptimizer")]
        given = (*event.facts["args"], event.facts.get("optimizer"))[0]
        if isinstance(given, Thing):
            wrapped = bool(given.facts.get("wrapped"))
        else:
            wrapped = any(place < at for place in wrappers)
        scheduled = any(order.index(e) < at for e in self.reading.all("scheduler"))
        words = "of the wrapped optimizer" if wrapped else "before it is wrapped"
        return f"{words}, scheduled" if scheduled else words

    @property
    def passes(self) -> Any:
        """Backward passes of a step."""
        wrappers = self.reading.all("DistributedOptimizer")
        said = wrappers[0].facts.get("backward_passes_per_step", 1) if wrappers else 1
        steps = self.reading.all("optimizer.step")
        if not wrappers and steps:  # gradients that are reduced by hand add up until then
            said = steps[0].every
        return self.settings.get("DistributedOptimizer.backward_passes_per_step", said)

    # -- data and loss ---------------------------------------------------------------------------

    @property
    def training(self) -> Event | None:
        """The first backward."""
        return next(iter(self.reading.all("backward")), None)

    def loader(self) -> Thing | None:
        """The loader whose loop holds the backward."""
        around = () if self.training is None else self.training.loops
        for event in reversed(self.reading.all("loop.loader")):
            if event.loops and event.loops[-1] in around:
                loader: Thing = event.facts["loader"]
                return loader
        return None

    def data(self) -> None:
        loader = self.loader()
        if loader is None:
            if self.training is not None:
                where = self.training
                self.add("batch size", "unread_batch", "not read", where, "data.unread")
            return
        event = Event("loader", loader.place, ast.Pass(), loader.facts)
        facts = loader.facts
        self.add(
            "DataLoader.batch_size", "batch_size", facts.get("batch_size", 1), event, "data.batch"
        )
        if "drop_last" in facts:
            self.add(
                "DataLoader.drop_last", "drop_last", facts["drop_last"], event, "data.drop-last"
            )
        if is_number(facts.get("num_workers")):
            workers = facts["num_workers"]
            self.add("DataLoader.num_workers", "num_workers", workers, event, "data.workers")
        if isinstance(facts.get("pin_memory"), bool):
            self.add(
                "DataLoader.pin_memory", "pin_memory", facts["pin_memory"], event, "data.pinned"
            )
        self.sampler(loader, event)
        around = () if self.training is None else self.training.loops
        for slices in self.reading.all("loop.slices"):
            if slices.loops[-1] in around:
                step = slices.facts["step"]
                self.add("loop.slices", "slices", step, slices, "data.slices")

    def sampler(self, loader: Thing, event: Event) -> None:
        sampler = loader.facts.get("sampler")
        if isinstance(sampler, Thing) and sampler.kind == "sampler":
            made = Event("sampler", sampler.place, ast.Pass(), sampler.facts)
            shuffled = sampler.facts.get("shuffle", True)
            self.add("DistributedSampler.shuffle", "shuffle", shuffled, made, "data.sampler")
            return
        own = "shuffle" if sampler is None else "sampler"
        value = as_written(loader.facts.get(own, False))
        self.add(f"DataLoader.{own}", "own_sampler", value, event, "data.own-sampler")

    def loss(self) -> None:
        event = self.training
        if event is None:
            return
        divided = event.facts["divided"]
        if isinstance(divided, Unknown) and self.passes == 1:
            divided = divided.text
        if divided != 1 or "loss.divided_by" in self.settings:
            self.add("loss.divided_by", "loss.divided_by", divided, event, "loss.division")

    def clipping(self) -> None:
        for what in ("clip_grad_norm", "clip_grad_value"):
            for event in self.reading.all(what)[:1]:
                if not self.certain(event, f"calling {what}_"):
                    continue
                order = list(self.reading.events)
                done = self.reading.all("optimizer.synchronize")
                done += self.reduced_by_hand
                late = bool(done) and order.index(done[0]) < order.index(event)
                rule = "clip" if late else "clip.early"
                self.add(f"{what}_", what, event.facts.get("max_norm"), event, rule)
                kind = event.facts.get("norm_type", 2.0)
                if kind != 2:
                    self.add(f"{what}_.norm_type", "norm_type", kind, event, "clip.norm-type")

    def precision(self) -> None:
        for event in self.reading.all("autocast")[:1]:
            if self.certain(event, "autocast"):
                enabled = event.facts.get("enabled", True)
                self.add("autocast.enabled", "autocast", enabled, event, "precision.autocast")
                dtype = event.facts.get("dtype")
                name = (
                    dtype.dotted.rpartition(".")[2]
                    if isinstance(dtype, ImportedName)
                    else "float16"
                )
                self.add("autocast.dtype", "autocast.dtype", name, event, "precision.dtype")
        for event in self.reading.all("GradScaler")[:1]:
            if self.certain(event, "GradScaler"):
                on = event.facts.get("enabled", True)
                self.add("GradScaler", "scaler", on, event, "precision.scaler")

    # -- the rate --------------------------------------------------------------------------------

    def schedule(self) -> None:
        events = self.reading.all("scheduler")
        for event in events[1:]:
            self.add(f"scheduler {event.facts['class']}", "more", True, event, "schedule.several")
        for event in self.reading.all("param_group.lr")[:1]:
            value = as_written(event.facts["value"])
            self.add("param_group['lr']", "hand_lr", value, event, "schedule.by-hand")
        for event in self.reading.all("scheduler.unknown")[:1]:
            key = event.facts["written"]
            self.add(key, "unread_scheduler", event.facts["made"], event, "schedule.unread")
        if not events or not self.certain(events[0], "making the scheduler"):
            return
        event = events[0]
        kind = event.facts["class"]
        self.add("scheduler", "scheduler", kind, event, "schedule.type")
        options = {**name_positional(kind, event.facts["args"][1:]), **event.facts["named"]}
        for name, value in options.items():
            if name == "optimizer":
                continue
            functional = name in ("lr_lambda", "num_training_steps")
            value = as_written(value) if functional else value
            self.add(f"scheduler.{name}", f"scheduler.{name}", value, event, "schedule.option")
        self.interval()

    def interval(self) -> None:
        """Whether the scheduler steps with every update, or once an epoch."""
        steps = self.reading.all("scheduler.step")
        training = self.training
        handed = self.reading.all("scheduler.handed")
        if not steps and handed:
            to = handed[0].facts["to"]
            self.add("scheduler.step", "interval", f"in {to}", handed[0], "schedule.interval")
            return
        if not steps:
            made = self.reading.all("scheduler")[0]
            self.add("scheduler.step", "interval", "never", made, "schedule.interval")
            return
        step = steps[0]
        if not self.certain(step, "stepping the scheduler"):
            return
        updates = self.reading.all("optimizer.step")
        inner = updates[0].loops if updates else () if training is None else training.loops
        if not inner and not step.loops:  # in functions that what is not read calls
            beside = bool(updates) and updates[0].frame is step.frame
            value = "step" if beside else "in a function that is called elsewhere"
            self.add("scheduler.step", "interval", value, step, "schedule.interval")
            return
        each = bool(inner) and step.loops[-1:] == inner[-1:]
        if each and updates and updates[0].every != step.every:
            what = f"the scheduler steps {updates[0].every} times with every step of the optimizer"
            self.problem_at(step, what, "step it where the optimizer steps")
            return
        value = "step" if each else "epoch"
        self.add("scheduler.step", "interval", value, step, "schedule.interval")

    def length(self) -> None:
        """How long it trains, by its loops; and casts of the model."""
        if self.training is not None:
            every = next((one.every for one in self.reading.all("optimizer.step")), 1)
            found = find_length(self.reading, self.training, passes=every)
            if found is not None:
                rule = {"exact": "length", "approximate": "length.sooner"}.get(
                    found.outcome.verdict, "length.untold"
                )
                self.add(found.key, found.key, found.value, found.event, rule)
        for event in self.reading.all("model.cast")[:1]:
            self.add(event.facts["written"], "cast", event.facts["to"], event, "precision.cast")

    def others(self) -> None:
        uncalled, step = self.reading.uncalled, self.training
        trains = step is not None and (step.file, step.place) not in uncalled
        for event in self.reading.events:
            idle = "script.uncalled" if trains and (event.file, event.place) in uncalled else ""
            if event.what in _OWN_CALLS and not event.facts.get("of_gradient"):
                rule = idle or _OWN_CALLS[event.what]
                self.add(f"hvd.{event.what}", event.what, True, event, rule)
            elif event.what == "exec":
                self.add(event.facts["written"], "exec", True, event, idle or "script.exec")
            elif event.what == "param_group.option":
                key = f"param_group['{event.facts['name']}']"
                self.add(key, key, "changed", event, idle or "optimizer.by-hand")
            elif event.what == "step.unknown":
                key = event.facts["written"]
                self.add(key, key, event.facts["made"], event, idle or "step.beside")
            elif event.what == "gradient.changed" and not self.reduced_by_hand:
                key = event.facts["written"]
                self.add(key, key, "changed", event, idle or "gradient.changed")
            elif event.what == "horovod.run":
                self.add("horovod.run", "run", event.facts.get("np", 1), event, "script.run")
            elif event.what == "optimizer.set_backward_passes_per_step":
                self.add(event.what, event.what, True, event, "passes.changed")

    # -- leaves ----------------------------------------------------------------------------------

    def certain(self, event: Event, doing: str) -> bool:
        """Whether it surely happens with every step; else that is a problem."""
        if not event.under and event.every in (1, self.passes):
            return True
        if not event.under:
            what = f"{doing} happens in every {event.every} rounds, and a step has {self.passes}"
            self.problem_at(event, what, "make them one number, the backward passes of a step")
            return False
        self.ask(event.under, doing, event, "whether this holds when you train: true or false")
        return False

    def find_value(self, key: str, value: Any, event: Event) -> tuple[Any, str] | None:
        """(value, note), from ``--set`` where it says; a value that cannot be told is a problem."""
        if key in self.settings:
            self.used.add(key)
            return self.settings[key], "stated by --set"
        if is_plain(value):
            return list(value) if isinstance(value, tuple) else value, ""
        text = value.text if isinstance(value, Unknown) else as_written(value)
        self.ask(key, f"{key}={text}", event, "what it is when you train: print it there")
        return None

    def fact_of_file(self, event: Event) -> Fact:
        """A configuration that the script reads, and that is not here."""
        path = event.facts["path"]
        where = f"{event.file or self.file or self.name}:{event.place.line}"
        look = "the file that your line names there"
        if event.facts["is_known"]:
            look = "it is not here, or beside the script: say where"
            path = repr(path)
        return Fact(path, f"it is read ({where})", look, event.place.line, "FILE")

    def ask(self, name: str, used: str, event: Event, look: str) -> None:
        """Enters a question, once for each name."""
        where = f"{used[:80]} ({event.file or self.file or self.name}:{event.place.line})"
        self.facts.setdefault(name, Fact(name, where, look, event.place.line))

    def add(self, key: str, name: str, value: Any, event: Event, rule: str) -> None:
        known = self.find_value(key, value, event)
        if known is not None:
            value, note = known
            file = event.file or self.file
            self.leaves.append(Leaf(key, name, value, event.place, rule, file, note=note))

    def problem_at(self, event: Event, what: str, fix: str) -> None:
        self.problems.append(Problem(event.file or self.file, event.place, what, fix))

    def problem(self, place: Place, what: str, fix: str) -> None:
        self.problems.append(Problem(self.file, place, what, fix))


def as_written(value: Any) -> Any:
    """A value for the report: as it is, or as it is written."""
    if is_plain(value):
        return value
    if isinstance(value, Unknown):
        return value.text
    return value.dotted if isinstance(value, ImportedName) else getattr(value, "kind", "...")


def _rule_of(option: str) -> str:
    return "optimizer.lr" if option == "lr" else "optimizer.option"


def check_used(settings: Mapping[str, Any], used: frozenset[str], keys: Sequence[str]) -> None:
    """Every ``--set`` has to be of use.

    Raises:
        ConfigError: one names nothing.
    """
    for name in settings:
        if name not in used and name not in keys:
            raise ConfigError(
                f"--set {name}: nothing of this job hangs on it", fix=nearest(name, {*keys, *used})
            )
