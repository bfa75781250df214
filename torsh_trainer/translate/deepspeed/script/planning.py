"""A script for DeepSpeed as a plan: its configuration, and all else that it does with an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.translate.deepspeed.script.calls import DEEPSPEED, DeepSpeedWalk
from torsh_trainer.translate.deepspeed.script.configuration import (
    CONFIG,
    WORLD_SIZE,
    ScriptConfiguration,
    document_root,
    find_path,
    list_facts,
    take_own,
    take_own_keys,
)
from torsh_trainer.translate.deepspeed.script.engines import CALL, choose_engine
from torsh_trainer.translate.deepspeed.script.verdicts import judge_arguments, judge_events
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate_document
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.outcomes import refuse
from torsh_trainer.translate.plan import RECIPE, Fact, Finding, Plan, ScriptPlan
from torsh_trainer.translate.python.arguments import read_setting
from torsh_trainer.translate.python.branches import ask_for_branch
from torsh_trainer.translate.python.environment import note_assumed
from torsh_trainer.translate.python.events import TOO_LONG, Event, ScriptReading
from torsh_trainer.translate.python.files import name_path
from torsh_trainer.translate.python.parsing import (
    note_lines,
    parse,
    read_source,
)
from torsh_trainer.translate.python.project import ScriptProject, note_unread, record_of
from torsh_trainer.translate.python.training import TrainingScript, argument_of, list_backwards
from torsh_trainer.translate.python.values import ScriptDict, Unknown, is_plain
from torsh_trainer.translate.reading import Document, read_text, text_of

_RUN = f"python -m torsh_trainer +recipe={RECIPE} task=TASK data=DATA"
_TRAINS = ("backward", "step", "train_batch")
_NO_STEP = (
    "as far as reading gets, nothing steps the engine: its loop is elsewhere, or it only infers"
)
_LOADS = re.compile(r"\bloads?\(")
_ASKED = "asked below: only you know it"
_HANGS = "its block is switched on or off by what is asked below"


@dataclass(frozen=True)
class ScriptRequest:
    """How a script is to be read: the words of its command line, what ``--set`` states, and how the
    configuration in it is to be translated.

    ``document`` is the configuration that its launch line names, where that has been read.
    ``is_whole``: all of ``settings`` are about the script.
    """

    arguments: Mapping[str, Any]
    settings: Mapping[str, str]
    options: Options
    document: Document | None = None
    is_whole: bool = True


def plan_script(path: Path, request: ScriptRequest) -> ScriptPlan:
    """The plan for the script in ``path``.

    Raises:
        ConfigError: it is no Python, makes no engine, or its configuration is invalid.
        ResourceError: it cannot be read.
    """
    planning = _ScriptPlanning(path, request)
    return ScriptPlan(planning.plan(), frozenset(planning.used))


class _ScriptPlanning:
    def __init__(self, path: Path, request: ScriptRequest) -> None:
        self.path, self.request = path, request
        self.name = str(path)
        self.project = ScriptProject(path)
        self.settings = {key: read_setting(text) for key, text in request.settings.items()}
        self.used: set[str] = set()
        self.facts: list[Fact] = []
        self.config_words = ""

    def plan(self) -> Plan:
        self.tree = tree = parse(read_source(self.path), name=self.name)
        walk = DeepSpeedWalk(
            self.world_size(),
            self.request.arguments,
            self.settings,
            self.project.find_module,
            self.project.find_file,
        )
        reading = walk.read(tree, name=self.name, script=self.path)
        self.used |= reading.used
        branch = None if reading.all("initialize") else reading.find_skipped(CALL)
        if branch is not None:
            what = "makes DeepSpeed's engine"
            self.facts += ask_for_branch(branch, CALL, what, file=self.path.name)
            return self.state_facts(reading)
        event, others = choose_engine(tree, reading, name=self.name)
        below = self.read_configuration(event, reading)
        plan = self.join(below, event, others, reading)
        if self.request.is_whole:
            self.check_used()
        return plan

    def world_size(self) -> int | None:
        """How many processes: stated as an option, or as a fact that was asked for."""
        stated = self.settings.get(WORLD_SIZE)
        if stated is None:
            return self.request.options.world_size
        self.used.add(WORLD_SIZE)
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
            raise ConfigError(
                f"--set {WORLD_SIZE}={stated} is no number of processes", fix="give 1 or more"
            )
        options = self.request.options
        self.request = replace(self.request, options=replace(options, world_size=stated))
        return stated

    # -- the configuration -----------------------------------------------------------------------

    def read_configuration(self, event: Event, reading: ScriptReading) -> Plan | None:
        """What the configuration comes to; None where it is asked for."""
        config: Any = self.settings.get(CONFIG)
        if config is None:
            config = find_path(event)
        else:
            self.used.add(CONFIG)
        place, file = event.place, event.file
        self.refuse_two(event)
        document = self.request.document
        written = event.facts["written"].get(name_path(config))
        if isinstance(written, Unknown):
            look = f"line {written.place.line} writes it: {written.text}"[:160]
            self.ask_for_file(event, look)
            return None
        if written is not None:
            self.config_words = "its configuration in the script, which writes it"
            config = written
        elif document is not None and (config is None or isinstance(config, str)):
            self.config_words = f"its configuration in {Path(document.name).name}"
            if document.dialect != DEEPSPEED:
                return translate_document(document, self.request.options)
            config = record_of(document.root, document.name)
        elif isinstance(config, str):
            found = self.project.find_file(config)
            if found is None:
                self.ask_for_file(event, f"there is no {config} here, or beside the script")
                return None
            document = read_text(text_of(found), name=str(found))
            self.config_words = f"its configuration in {config}"
            if document.dialect != DEEPSPEED:
                return translate_document(document, self.request.options)
            config = record_of(document.root, str(found))
        elif isinstance(config, ScriptDict):
            self.config_words = "its configuration in the script"
        elif isinstance(config, Unknown) and config.under:
            where = f"the configuration ({event.file or self.path.name}:{config.place.line})"
            look = "whether this holds when you train: true or false"
            self.facts.append(Fact(config.under, where, look, config.place.line))
            return None
        else:
            look = "the file behind --deepspeed_config in the line that starts the script"
            if isinstance(config, Unknown) and not _LOADS.search(config.text):
                look = f"the file or the values that the script makes of {config.text}"[:160]
            made = config.place if isinstance(config, Unknown) else None
            for load in [one for one in reading.all("load.missing") if one.place == made][:1]:
                path = load.facts["path"]
                look = f"the file that line {load.place.line} reads: {path}"
                if load.facts["is_known"]:
                    look = f"there is no {path} here, or beside the script"
            self.ask_for_file(event, look)
            return None
        config = config.copy()
        own_keys = take_own_keys(config)
        passed = take_own(config, event)
        options_size = self.request.options.world_size
        is_filled = self.request.options.context != "raw"
        root = document_root(config, place, self.settings, is_filled=is_filled)
        self.used |= root.stated
        for fact in list_facts(root, self.path.name, knows_size=options_size is not None):
            if fact.name not in (known.name for known in self.facts):
                self.facts.append(fact)
        document = Document(self.name, root.root, DEEPSPEED, {})
        options = replace(self.request.options, settings={}, sizes_from_loader=True)
        below = translate_document(document, options)
        findings = self.move(below.findings, root, file)
        findings += [_dead_block(*block) for block in passed]
        findings += [_own_key(*said) for said in own_keys]
        handed = event.facts.get("lr_scheduler") is not None
        if handed or reading.all("scheduler"):  # the default speaks of a script without one
            findings = [f for f in findings if f.given or f.key != "scheduler.type"]
        return replace(below, findings=tuple(findings))

    def refuse_two(self, event: Event) -> None:
        """A configuration in the call, and one behind --deepspeed_config.

        Raises:
            ConfigError: there are both, on which DeepSpeed stops.
        """
        named = event.facts.get("args_config")
        if event.facts.get("config") is not None and isinstance(named, str):
            raise ConfigError(
                f"{event.file or self.name}:{event.place.line}: deepspeed.initialize is given a "
                f"configuration, and --deepspeed_config {named} another: "
                "DeepSpeed stops there",
                fix="leave one of them out",
                line=event.place.line,
            )

    def ask_for_file(self, event: Event, look: str) -> None:
        where = f"{event.file or self.path.name}:{event.place.line}"
        self.facts.append(
            Fact(CONFIG, f"deepspeed.initialize ({where})", look, event.place.line, "FILE")
        )

    def move(
        self, findings: Sequence[Finding], root: ScriptConfiguration, file: str
    ) -> list[Finding]:
        """Findings with the file that each key stands in."""
        asked = {dotted for dotted, *_ in root.unknown}
        moved = []
        for finding in findings:
            if not finding.given and any(finding.key.startswith(name) for name in asked):
                continue
            block = finding.key.partition(".")[0]
            if f"{block}.enabled" in asked and finding.key.startswith(f"{block}."):
                if not finding.given:
                    continue
                finding = replace(finding, verdict="refused", becomes="", why=_HANGS)
            source = root.files.get(tuple(finding.key.split(".")), file)
            name = Path(source).name if source and source != self.name else ""
            moved.append(replace(finding, file=name if finding.given else ""))
        for text, place, source in root.untold:
            moved.append(
                Finding(
                    text,
                    None,
                    place.line,
                    place.column,
                    "refused",
                    "",
                    "it changes the configuration, and which key cannot be told by reading: set in "
                    "the recipe what it does",
                    "script.untold",
                    file=Path(source).name if source else "",
                )
            )
        for dotted, hole, place, source in root.unknown:
            moved.append(
                Finding(
                    dotted,
                    hole.text[:80],
                    place.line,
                    place.column,
                    "refused",
                    "",
                    _ASKED,
                    "asked",
                    file=Path(source).name if source else "",
                )
            )
        return moved

    # -- all of it -------------------------------------------------------------------------------

    def join(
        self, below: Plan | None, event: Event, others: Sequence[Event], reading: ScriptReading
    ) -> Plan:
        choices = dict(below.choices) if below else {}
        values = dict(below.values) if below else {}
        stage = _stage_of(below)
        accumulate = values.get("trainer.accumulate", 1)
        findings = list(below.findings) if below else []
        made = "the engine: strategy= and the knobs of the configuration"
        findings.append(_make_finding("deepspeed.initialize", event, "exact", made))
        for other in others:
            why = refuse("a second engine: a recipe trains one model").why
            findings.append(
                _make_finding(f"deepspeed.initialize ({other.place.line})", other, "refused", why)
            )
        findings += judge_arguments(event)
        for judged in judge_events(reading, stage=stage, accumulate=accumulate):
            finding = judged.finding
            lost = [key for key in judged.outcome.values if key in values]
            if finding.key == "DataLoader.batch_size" and lost:
                if values[lost[0]] != judged.outcome.values[lost[0]]:
                    why = f"{values[lost[0]]} in the configuration counts for the accumulation"
                    finding = replace(finding, verdict="approximate", why=why)
                    values.update(judged.outcome.values)
            else:
                choices.update(judged.outcome.choices)
                values.update(judged.outcome.values)
            findings.append(finding)
        where = f", {self.config_words}" if self.config_words else ""
        options = self.request.options
        return Plan(
            source=self.name,
            engine=DEEPSPEED,
            version=below.version if below else "",
            context=options.context,
            mode=options.mode,
            world_size=options.world_size,
            choices=choices,
            values=values,
            findings=tuple(sorted(findings, key=_order)),
            warnings=below.warnings if below else (),
            dtypes=below.dtypes if below and not self.facts else (),
            memory=below.memory if below and not self.facts else None,
            taken_for=f"a script for DeepSpeed, read and not executed{where}",
            notes=tuple(self.notes(reading)),
            facts=tuple(self.facts),
            command=_RUN,
            files=(*self.project.opened, *map(str, self.project.files)),
            script=TrainingScript(
                self.path,
                self.tree,
                reading,
                self.project,
                DEEPSPEED,
                backwards=tuple(list_backwards(reading)),
                models=tuple(filter(None, [argument_of(event, "model", 1)])),
                data=argument_of(event, "training_data", 4),
                collate=argument_of(event, "collate_fn", 9),
                values=self.settings,
            ),
        )

    def state_facts(self, reading: ScriptReading) -> Plan:
        """A plan of nothing but what has to be known first."""
        options = self.request.options
        return Plan(
            source=self.name,
            engine=DEEPSPEED,
            version="",
            context=options.context,
            mode=options.mode,
            world_size=options.world_size,
            choices={},
            values={},
            findings=(),
            taken_for="a script for DeepSpeed, read and not executed",
            notes=tuple(self.notes(reading)),
            facts=tuple(self.facts),
            command=_RUN,
            files=(*self.project.opened, *map(str, self.project.files)),
        )

    def notes(self, reading: ScriptReading) -> list[str]:
        said = ["model, data and loss are yours: write them as a task, or name a ready one"]
        said += [] if reading.is_whole else [TOO_LONG]
        engines = reading.all("initialize") and not reading.all("hf.trainer")
        trains = any(reading.all(f"engine.{name}") for name in _TRAINS)
        if engines and not trains and not reading.all("optimizer.step"):
            said.append(_NO_STEP)
        said += note_lines(self.path)
        said += note_assumed(reading.assumed)
        read = [path.name for path, tree in self.project.files.items() if tree is not None]
        if read:
            said.append(f"read with it: {', '.join(read)}")
        return said + note_unread(self.project)

    def check_used(self) -> None:
        for name in self.settings:
            if name not in self.used:
                known = {*self.used, *(fact.name for fact in self.facts)}
                raise ConfigError(
                    f"--set {name}: nothing of this script hangs on it", fix=nearest(name, known)
                )


def _make_finding(key: str, event: Event, verdict: Any, why: str) -> Finding:
    return Finding(
        key,
        None,
        event.place.line,
        event.place.column,
        verdict,
        "",
        why,
        "script.engine",
        file=event.file,
    )


def _own_key(name: str, value: Any, place: Place, source: str) -> Finding:
    why = "the script reads it itself, and DeepSpeed knows no such key"
    file = Path(source).name if source else ""
    shown = value if is_plain(value) else str(getattr(value, "text", type(value).__name__))
    line, column = place.line, place.column
    return Finding(name, shown, line, column, "yours", "", why, "script.own-key", file=file)


def _dead_block(name: str, place: Place, source: str) -> Finding:
    why = "the script hands its own to deepspeed.initialize, which counts before it"
    file = Path(source).name if source else ""
    line, column = place.line, place.column
    return Finding(name, None, line, column, "dead", "", why, "script.overridden", file=file)


def _stage_of(plan: Plan | None) -> int:
    found = [f.value for f in plan.findings if f.key == "zero_optimization.stage"] if plan else []
    return found[0] if found and isinstance(found[0], int) else 0


def _order(finding: Finding) -> tuple[Any, ...]:
    return (not finding.given, bool(finding.file), finding.file, finding.line, finding.column)
