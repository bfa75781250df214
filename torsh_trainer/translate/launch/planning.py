"""One job of a launch file as a plan: a verdict for every flag, and one command that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.auto import AUTO as FILLED
from torsh_trainer.translate.deepspeed.auto import list_needs
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate_document
from torsh_trainer.translate.launch import fsdp_file, trainer_arguments
from torsh_trainer.translate.launch.commands import write_command
from torsh_trainer.translate.launch.configuration import (
    FileFinder,
    list_keys,
    read_accelerate,
    read_argument_file,
    read_deepspeed,
    settings_for,
)
from torsh_trainer.translate.launch.flags import FlagTable, StatedFlag, find_row
from torsh_trainer.translate.launch.fsdp_file import read_fsdp_file
from torsh_trainer.translate.launch.job import AUTO, Asked, LaunchJob, LaunchLine, WorldShape
from torsh_trainer.translate.launch.lines import PYTHON, launcher_named, read_arguments
from torsh_trainer.translate.launch.script_arguments import (
    FAMILIES,
    find_family,
    table_of_family,
)
from torsh_trainer.translate.launch.script_defaults import read_script_defaults
from torsh_trainer.translate.launch.scripts import (
    LineOfScript,
    ScriptKind,
    find_kind,
    has_trainer,
)
from torsh_trainer.translate.launch.variables import is_deciding, judge_variable
from torsh_trainer.translate.outcomes import Outcome, exact
from torsh_trainer.translate.plan import Fact, Finding, Plan
from torsh_trainer.translate.python.arguments import read_words
from torsh_trainer.translate.reading import Document, text_of
from torsh_trainer.translate.shell.words import Word
from torsh_trainer.utils.masking import MASK, is_secret, mask_text

_SHORTEST = 9
"""Letters of an abbreviation that is taken for an argument of a family."""

_ASKED = "asked below: only you know it"
_OWN = "the script's own: your task takes what it stands for"


@dataclass
class _Findings:
    """What a job comes to: findings in their order, options of groups, and knobs."""

    findings: list[Finding] = field(default_factory=list)
    sets: list[Mapping[str, Any]] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def take(self, said: StatedFlag, outcome: Outcome, rule: str, *, given: bool = True) -> None:
        self.choices.update(outcome.choices)
        self.values.update(outcome.values)
        self.sets.append({**outcome.choices, **outcome.values})
        self.findings.append(
            Finding(
                key=said.key,
                value=_report_value(said),
                line=said.place.line if given else 0,
                column=said.place.column if given else 0,
                verdict=outcome.verdict,
                becomes=outcome.said,
                why=outcome.why,
                rule=rule,
                given=given,
                file=said.file,
            )
        )

    def settle(self) -> None:
        """Says of what another line or file overrides that it does not count."""
        final = {**self.choices, **self.values}
        for at, sets in enumerate(self.sets):
            lost = [key for key, value in sets.items() if final.get(key, value) != value]
            if lost:
                says = ", ".join(f"{key}={final[key]}" for key in lost)
                self.findings[at] = replace(
                    self.findings[at],
                    verdict="dead",
                    becomes="",
                    why=f"{says} counts before it, from another of these lines",
                )

    def ask(self, names: set[str]) -> None:
        """Says of a file that is not where the line says that it is asked for."""
        for at in range(len(self.sets)):
            finding = self.findings[at]
            if finding.key.lstrip("-").replace("-", "_") in names:
                self.findings[at] = replace(finding, verdict="refused", why=_ASKED, becomes="")


def plan_job(
    line: LaunchLine,
    *,
    source: str,
    finder: FileFinder,
    asked: TranslationRequest,
    used: set[str],
    text: str = "",
) -> Plan:
    """The plan for one job of a launch file, whose ``text`` may make lines of its variables;
    ``used`` gets the names that its script hangs on.

    Raises:
        ConfigError: a flag or a configuration is invalid, with its place and the next move.
        ResourceError: a file cannot be read.
    """
    job = LaunchJob(line, source, settings=asked.settings or {})
    _check_flags(job)
    job.arguments = tuple(read_arguments(line.arguments))
    root, yaml_name = None, ""
    try:
        job.yaml, root, yaml_name = read_accelerate(job, finder)
    except Asked as question:
        _ask(job, question.fact)
        job.lacks_file = True
    from_file = read_argument_file(job, finder, trainer_arguments.MARKS)
    job.arguments = (*from_file, *job.arguments)
    job.family = find_family({said.name for said in job.arguments})
    job.world = _shape_of(job, asked)
    document = None
    try:
        document = read_deepspeed(job, finder, root, yaml_name)
    except Asked as question:
        _ask(job, question.fact)
        job.lacks_file = True
    if document is not None:
        job.configured = list_keys(document)
    if not job.family and _hands_file_to_trainer(job):
        job.family = "hugging-face"
    try:
        job.fsdp = read_fsdp_file(job, finder)
    except Asked as question:
        _ask(job, question.fact)
    _ask_for_words(job)
    script = _choose_script(job, finder)
    path = _locate_script(job, finder)
    defaults = read_script_defaults(job, path)
    job.arguments = (*defaults.said, *job.arguments)
    planning = _Planning(job, asked, document, script)
    planning.text, planning.script_text = text, _text_of_script(path)
    planning.script_notes, planning.reads_defaults = defaults.notes, defaults.was_read
    plan = planning.plan()
    used |= planning.used
    return plan


def _ask_for_words(job: LaunchJob) -> None:
    """A file that starts what it is given (``torchrun $@``) says nothing about it by itself."""
    word = job.line.script
    hole = None if word is None else next((h for h in word.holes if h.name == "@"), None)
    if word is None or hole is None or word.text != hole.text:
        return
    look = "the script and its arguments, as you give them to this file"
    place = f"{hole.text} (line {word.place.line})"
    _ask(job, Fact("@", place, look, word.place.line, "'train.py ARGS'"))


def _locate_script(job: LaunchJob, finder: FileFinder) -> Path | None:
    """The script of the line, where it is here."""
    word = job.line.script
    if word is None or word.holes or job.line.module or not word.text.endswith(".py"):
        return None
    return finder.find(word.text, job.line.command.folder)


def _text_of_script(path: Path | None) -> str:
    try:
        return "" if path is None else text_of(path)
    except (ConfigError, ResourceError):
        return ""


def _choose_script(job: LaunchJob, finder: FileFinder) -> tuple[Path, ScriptKind] | None:
    """The script that decides, since it makes an engine of its own; the names of its arguments
    decide nothing then. A script of the Trainer's, or of Megatron's, is known by those."""
    path = None if job.family == "megatron" else _locate_script(job, finder)
    if path is None:
        return None
    text = text_of(path)
    kind = find_kind(text)
    if kind is None or (job.family and has_trainer(text, name=str(path))):
        return None
    job.family = ""
    return path, kind


def _hands_file_to_trainer(job: LaunchJob) -> bool:
    """Whether ``--deepspeed FILE`` is the Trainer's: "auto" in that file is a word of its alone."""
    said = job.argument("deepspeed")
    names = {said.name for said in job.arguments}
    return (
        said is not None
        and bool(said.values)
        and FILLED in job.configured.values()
        and bool(names & trainer_arguments.MARKS)
        and not names & trainer_arguments.OTHERS_MARKS
    )


def _check_flags(job: LaunchJob) -> None:
    problems = [problem for link in job.line.links for problem in link.problems]
    if not problems:
        return
    first, *others = problems
    fix = first.fix + "".join(
        f"\n  also {p.place}: {p.what}" + (f"; {p.fix}" if p.fix else "") for p in others[:20]
    )
    raise ConfigError(
        f"{job.source}:{first.place}: {first.what}",
        fix=fix,
        line=first.place.line,
        column=first.place.column,
    )


def _shape_of(job: LaunchJob, asked: TranslationRequest) -> WorldShape:
    """How many processes the launchers of the line start between them."""
    shape = WorldShape()
    outer: WorldShape | None = None
    for link in job.line.links:
        launcher = launcher_named(link.launcher)
        if launcher is None:
            continue
        try:
            found = launcher.shape(job, link)
        except Asked as question:
            _ask(job, question.fact)
            found = WorldShape(None, None if link is not job.line.launcher else 1)
        if launcher.keeps:
            outer = found
        shape = found
    if outer is not None and job.line.launcher.launcher not in ("srun", "mpirun", PYTHON):
        nodes = shape.nodes if shape.nodes != 1 else outer.total or outer.nodes
        shape = WorldShape(shape.per_node, nodes, shape.total)
    elif outer is not None:
        shape = outer
    if asked.world_size is not None:
        return WorldShape(shape.per_node, shape.nodes, asked.world_size)
    return shape


def _ask(job: LaunchJob, fact: Fact) -> None:
    """Enters a question, once for each name."""
    earlier = job.facts.setdefault(fact.name, fact)
    if fact.used not in earlier.used and earlier is not fact:
        job.facts[fact.name] = replace(earlier, used=f"{earlier.used}, {fact.used}")


class _Planning:
    """Collects the verdicts of one job."""

    def __init__(
        self,
        job: LaunchJob,
        asked: TranslationRequest,
        document: Document | None,
        script: tuple[Path, ScriptKind] | None,
    ) -> None:
        self.job, self.asked, self.document, self.script = job, asked, document, script
        self.used: frozenset[str] = frozenset()
        self.script_notes: tuple[str, ...] = ()
        self.reads_defaults = False
        self.text = self.script_text = ""
        self.found = _Findings()
        self.own: list[StatedFlag] = []
        self.is_decided_elsewhere = False

    def plan(self) -> Plan:
        job = self.job
        self.read_launchers()
        self.read_variables()
        found = self.found
        if self.script is not None:
            below: Plan | None = self.read_script(*self.script)
        else:
            self.read_arguments()
            self.read_fsdp_keys()
            self.read_defaults()
            below = self.read_document()
            self.settle_strategy()
        found.settle()
        found.ask(set(job.facts))
        processes = found.values.get("launcher.num_processes")
        world = self.asked.world_size or job.world.processes
        if processes is None and job.world.is_one_machine:
            count = job.world.per_node
            if count is not None and not self.job.line.is_kept:
                found.values["launcher.num_processes"] = count
        return Plan(
            source=job.source,
            engine="launch",
            version=below.version if below else "",
            context=below.context if below else "raw",
            mode=self.asked.mode,
            world_size=world,
            choices=found.choices,
            values={key: value for key, value in found.values.items() if self.fits(key)},
            findings=tuple(found.findings),
            warnings=below.warnings if below else (),
            dtypes=below.dtypes if below and not job.facts else (),
            memory=below.memory if below and not job.facts else None,
            taken_for=self.describe(below),
            notes=tuple(self.notes()),
            facts=tuple(sorted(job.facts.values(), key=lambda fact: fact.line)),
            command=write_command(job),
            script=below.script if below else None,
        )

    def fits(self, key: str) -> bool:
        """A knob of the strategy is one that the strategy has."""
        strategy = self.found.choices.get("strategy", "ddp")
        only = {
            "strategy.find_unused_parameters": ("ddp", "fsdp"),
            "strategy.bucket_cap_mb": ("ddp",),
        }
        if key.startswith("strategy.") and "strategy" not in self.found.choices:
            return False
        return strategy in only.get(key, (strategy,))

    # -- the line --------------------------------------------------------------------------------

    def read_launchers(self) -> None:
        for link in self.job.line.links:
            launcher = launcher_named(link.launcher)
            table: FlagTable = {} if launcher is None else launcher.table
            folds = launcher is not None and launcher.folds_dashes
            last = {said.name: said for said in link.said}
            for said in link.said:
                over = last[said.name] is not said and not (launcher and launcher.keeps)
                self.judge(said, table, folds=folds, over=over)
        accelerate = launcher_named("accelerate")
        assert accelerate is not None
        given = {said.name for link in self.job.line.links for said in link.said}
        for said in self.job.yaml:
            name = said.key.rpartition(".")[2]
            flag = StatedFlag(f"--{name}", said.values, said.place, said.file)
            row = find_row(flag.key, accelerate.table)
            if name in given:
                self.found.take(
                    said, Outcome("dead", "the line counts before the file"), "overridden"
                )
            elif row is None:
                why = "accelerate's own: nothing here reads it"
                self.found.take(said, Outcome("dead", why), "accelerate.others")
            else:
                self.judge_by(flag, said, row.judge, row.rule)

    def judge(
        self, said: StatedFlag, table: FlagTable, *, folds: bool = False, over: bool = False
    ) -> None:
        row = find_row(said.key, table, folds_dashes=folds)
        if over:
            self.found.take(
                said, Outcome("dead", "said again further on: the last counts"), "overridden"
            )
        elif row is None and said.key.startswith("$"):
            hole = said.hole
            assert hole is not None
            _ask(
                self.job,
                Fact(
                    hole.name,
                    f"more options (line {said.place.line})",
                    "what your shell holds there: echo it; empty where nothing",
                    said.place.line,
                ),
            )
            self.found.take(said, Outcome("refused", _ASKED), "asked")
        elif row is None:
            self.found.take(said, exact("kept in the command below"), "launch.kept")
        else:
            self.judge_by(said, said, row.judge, row.rule)

    def judge_by(self, asked: StatedFlag, said: StatedFlag, judge: Any, rule: str) -> None:
        """A verdict, or a question where the value is not known."""
        try:
            outcome = judge(self.job, asked)
        except Asked as question:
            _ask(self.job, question.fact)
            outcome = Outcome("refused", _ASKED)
            rule = "asked"
        self.found.take(said, outcome, rule)

    def read_variables(self) -> None:
        """Variables that processes inherit; what they say stays in force around the command."""
        command = self.job.line.command
        decides = self.job.line.launcher.launcher != "accelerate"
        for name, word in {**command.exported, **command.variables}.items():
            named = re.compile(rf"\b{re.escape(name)}\b")
            outcome = judge_variable(
                name,
                word.text,
                decides=decides,
                in_line=re.search(rf"\$\{{?[#!]?{re.escape(name)}\b", self.text) is not None,
                in_script=named.search(self.script_text) is not None,
                is_prefix=name in command.variables,
            )
            self.is_decided_elsewhere |= decides and is_deciding(name, word.text)
            said = StatedFlag(name, (word,), word.place)
            self.found.take(said, outcome, "launch.variable")

    def read_arguments(self) -> None:
        table = table_of_family(self.job.family)
        last = {said.name: said for said in self.job.arguments}
        for said in self.job.arguments:
            row = _row_of_argument(said, table)
            if row is None:
                self.own.append(said)
                continue
            if last[said.name] is not said:
                over = Outcome("dead", "said again further on: the last counts")
                self.found.take(said, over, "overridden")
                continue
            flag = StatedFlag(f"--{said.name}", said.values, said.place)
            self.judge_by(flag, said, row.judge, row.rule)
        for said in self.own:
            outcome = Outcome("yours", _OWN if _is_flag(said.key) else "a word for the script")
            self.found.take(said, outcome, "script.own")

    def read_fsdp_keys(self) -> None:
        for said in self.job.fsdp:
            flag = StatedFlag(f"--{said.key}", said.values, said.place, said.file)
            row = fsdp_file.TABLE.get(flag.key)
            shown = replace(said, key=f"{fsdp_file.FLAG}.{said.key}")
            if row is None:
                why = "no key that the Trainer knows: it passes over it, and nothing comes of it"
                self.found.take(shown, Outcome("dead", why), "fsdp")
            else:
                self.judge_by(flag, shown, row.judge, row.rule)

    def read_defaults(self) -> None:
        """What the Trainer takes where the line says nothing."""
        job = self.job
        if job.family == "megatron" and job.argument("optimizer") is None:
            self.choose("optimizer", "adamw", "Megatron's default, Adam with decoupled decay")
        if job.family != "hugging-face":
            return
        said_rows = {id(_row_of_argument(s, trainer_arguments.TABLE)) for s in job.arguments}
        for name, outcome in trainer_arguments.DEFAULTS.items():
            if id(trainer_arguments.TABLE[f"--{name}"]) in said_rows:
                continue
            block = trainer_arguments.BLOCKS.get(name)
            fills = trainer_arguments.FILLS.get(name, ())
            said = job.argument(name)
            if said is not None or any(key in job.configured for key in fills):
                continue
            if job.lacks_file and (fills or block):
                continue
            if block is not None and job.holds(f"{block}.type"):
                continue
            if name == "num_train_epochs" and "trainer.max_steps" in self.found.values:
                continue
            if name == "max_grad_norm" and job.is_configured:
                continue  # DeepSpeed clips as its own file says
            place = job.line.links[0].word.place
            default = StatedFlag(f"--{name}", (Word(_default_text(outcome), place),), place)
            self.found.take(default, outcome, "hf.default", given=False)
        if not job.is_configured and "precision" not in self.found.choices:
            self.choose("precision", "fp32", "neither bf16 nor fp16 is switched on")

    def choose(self, group: str, option: str, why: str) -> None:
        """An option that follows from what the line leaves out."""
        place = self.job.line.links[0].word.place
        outcome = Outcome("exact", why, {group: option})
        self.found.take(
            StatedFlag(group, (Word(option, place),), place), outcome, "launch.default", given=False
        )

    # -- the script ------------------------------------------------------------------------------

    def read_script(self, script: Path, kind: ScriptKind) -> Plan:
        """The findings of a script that makes an engine of its own, with the line's words."""
        job = self.job
        words = read_words([word.text for word in job.line.arguments])
        size = self.asked.world_size or job.world.processes
        line = LineOfScript(words, job.settings, size, self.asked, self.document)
        read = kind.plan(script, line)
        plan, self.used = read.plan, read.used
        for said in job.arguments:
            is_read = said.key in read.used or f"--{said.name}" in read.used
            why = _OWN if _is_flag(said.key) else "a word for the script"
            if is_read:
                why = "the script reads it: what it decides stands below, else it is your task's"
            self.found.take(said, Outcome("yours", why), "script.own")
        for fact in plan.facts:
            _ask(job, fact)
        for finding in plan.findings:
            file = finding.file or script.name
            self.found.findings.append(replace(finding, file=file if finding.given else ""))
            self.found.sets.append({})
        values = dict(plan.values)
        if not job.world.is_one_machine or job.line.is_kept or job.world.per_node == AUTO:
            values.pop("launcher.num_processes", None)
        self.found.choices.update(plan.choices)
        self.found.values.update(values)
        self.script_notes = plan.notes
        return plan

    # -- the configuration of DeepSpeed ----------------------------------------------------------

    def read_document(self) -> Plan | None:
        """The findings of the DeepSpeed file, whose knobs count before the line's."""
        if self.document is None:
            return None
        job = self.job
        try:
            settings, facts = settings_for(job, job.configured)
        except Asked as question:
            settings, facts = {}, [question.fact]
        for fact in facts:
            _ask(job, fact)
        keys_asked = self.keys_asked(facts)
        dotted = {name for name in job.settings if name in _deepspeed_keys()}
        job.used |= dotted
        settings |= {name: job.settings[name] for name in dotted}
        options = Options(
            self.asked.world_size or job.world.processes,
            versions.parse(self.asked.version),
            self.context(),
            self.asked.mode,
            self.asked.lenient,
            settings,
            True,
        )
        plan = translate_document(self.document, options)
        file = Path(self.document.name).name if self.document.name != job.source else ""
        lines_own = self.choices_of_line()
        for finding in plan.findings:
            if not finding.given and (finding.key.partition(".")[0] in lines_own or facts):
                continue
            verdict, why, becomes = finding.verdict, self.origin(finding.why), finding.becomes
            if finding.key == "steps_per_print" and "trainer.log_every" in self.found.values:
                verdict, why, becomes = "dead", "the arguments of the script say when", ""
            if finding.key in keys_asked:
                verdict, why, becomes = "refused", _ASKED, ""
            self.found.findings.append(
                replace(
                    finding,
                    file=file,
                    verdict=verdict,
                    why=why,
                    becomes=becomes,
                    given=finding.given and finding.line > 0,
                )
            )
        values = dict(plan.values)
        choices = dict(plan.choices)
        if "scheduler" in lines_own:
            choices.pop("schedule", None)
        if "trainer.log_every" in self.found.values:
            values.pop("trainer.log_every", None)
        if not job.world.is_one_machine or self.job.line.is_kept or job.world.per_node == AUTO:
            values.pop("launcher.num_processes", None)
        self.found.choices.update(choices)
        self.found.values.update(values)
        return plan

    def choices_of_line(self) -> set[str]:
        """Blocks that the file leaves to the script, and that the line decides on."""
        if not self.job.family:
            return set()
        blocks = {"scheduler": "schedule", "optimizer": "optimizer"}
        return {
            block
            for block, group in blocks.items()
            if not self.job.holds(f"{block}.type") and group in self.found.choices
        }

    def origin(self, why: str) -> str:
        """The reason of a filled "auto", where it was filled from the line."""

        def words(match: re.Match[str]) -> str:
            names = [name for name in (match[1] or "").split(", ") if name]
            if not names or set(names) <= set(self.job.settings):
                return match[0]
            return "filled from " + ", ".join(f"--{name}" for name in names)

        why = re.sub(r"filled from --set of ([\w, ]+)", words, why)
        return (
            re.sub(r"filled from --set$", "filled from the line", why)
            if not self.job.settings
            else why
        )

    def keys_asked(self, facts: Sequence[Fact]) -> set[str]:
        """Keys of the file whose values hang on what is asked."""
        names = {fact.name for fact in facts}
        filled = {key for key, value in self.job.configured.items() if value == FILLED}
        asked = {key for key in filled if list_needs(key) & names}
        if names & {"per_device_train_batch_size", "gradient_accumulation_steps"}:
            asked |= filled & {"train_batch_size"}
        blocks = tuple(f"{name}." for name in ("fp16", "bf16") if name in names)
        return asked | {key for key in self.job.configured if key.startswith(blocks) and blocks}

    def context(self) -> str:
        """Who hands the file to DeepSpeed: the Trainer, where its arguments or "auto" say so."""
        if self.asked.context != "raw":
            return self.asked.context
        if self.job.family == "hugging-face" or FILLED in self.job.configured.values():
            return "hf-trainer"
        return "raw"

    def settle_strategy(self) -> None:
        """The Trainer and diffusers wrap the model in DDP where several processes are started."""
        job = self.job
        own = any(
            said is not None and not said.is_empty
            for said in map(job.argument, ("deepspeed", "deepspeed_config", "zero_stage"))
        )
        known = job.family in ("hugging-face", "diffusers") and not own
        alone = job.line.launcher.launcher == PYTHON and not job.line.is_kept
        several = job.world.processes != 1 and not alone
        if (
            known
            and several
            and not self.job.is_configured
            and not self.is_decided_elsewhere
            and "strategy" not in self.found.choices
        ):
            self.choose(
                "strategy", "ddp", "every process holds the model, and gradients are averaged"
            )

    # -- words -----------------------------------------------------------------------------------

    def describe(self, below: Plan | None) -> str:
        """What the job was taken for."""
        line = self.job.line
        started = " in ".join(link.launcher for link in reversed(line.links))
        script = "nothing" if line.script is None else line.script.text
        what = f"{started} starts {'the module ' if line.module else ''}{_cut(script)}"
        parts = [what]
        if self.job.family:
            parts.append(f"with {FAMILIES[self.job.family]}")
        if self.script is not None:
            taken = "" if below is None else below.taken_for
            said = taken.replace(", read and not executed", "")
            parts.append(said or f"a script for {self.script[1].engine}")
        if below is not None and self.document is not None and self.script is None:
            named = (
                "its flags"
                if self.document.name == self.job.source
                else Path(self.document.name).name
            )
            parts.append(f"configured by {named} (DeepSpeed {below.version})")
        return ", ".join(parts)

    def notes(self) -> Iterator[str]:
        command = self.job.line.command
        for condition in command.conditions:
            yield f"it is started where this holds, which nobody here can tell: {condition}"
        for name, value in command.rounds:
            if not value:
                yield f"a loop starts it once for each {name}, which only a shell can list"
        accelerate = next((li for li in self.job.line.links if li.launcher == "accelerate"), None)
        if accelerate is not None and accelerate.find("config_file") is None:
            yield (
                "accelerate launch without --config_file reads its default_config.yaml, where "
                "accelerate config has written one: add --config_file to have it read here"
            )
        yield from self.script_notes
        if self.job.family and self.reads_defaults:
            yield "of the script itself nothing was read but the defaults of its arguments"
        elif self.job.family:
            yield (
                "the script itself was not read: its arguments were recognised by their names alone"
            )
        elif self.job.line.script is not None and self.script is None:
            yield "the script itself was not read: its model, data and arguments stay its own"
        if not self.job.world.is_one_machine and not self.job.line.is_kept:
            yield "several machines: the command below is typed on each of them"


def _deepspeed_keys() -> set[str]:
    return {key.dotted for key in keys.schema().values()}


def _row_of_argument(said: StatedFlag, table: FlagTable) -> Any:
    if not said.file and not _is_flag(said.key):
        return None
    for name in (said.key, f"--{said.name}", f"--{said.name.replace('_', '-')}"):
        if name in table:
            return table[name]
    if len(said.name) < _SHORTEST or said.file:
        return None
    return find_row(f"--{said.name}", table)


def _is_flag(key: str) -> bool:
    return re.match(r"--?[A-Za-z_]", key) is not None


def _default_text(outcome: Outcome) -> str:
    said = [*outcome.values.values(), *outcome.choices.values()]
    return str(said[0]) if said else ""


def _report_value(said: StatedFlag) -> Any:
    """The value for the report, without secrets."""
    if is_secret(said.name):
        return MASK
    return mask_text(said.text) if said.values or not said.file else said.text


def _cut(text: str) -> str:
    said = " ".join(text.split())
    return said if len(said) <= 60 else said[:57] + "..."


def check_settings(settings: Mapping[str, str], text: str, known: set[str]) -> None:
    """Makes sure that every ``--set`` names something of the file or of its jobs.

    Raises:
        ConfigError: one does not.
    """
    variables = set(re.findall(r"\$\{?[#!]?(\w+)", text)) | set(re.findall(r"(\w+)\+?=", text))
    variables |= {"@"} if re.search(r"\$\{?[@*]", text) else set()
    for name in settings:
        if name not in variables and name not in known:
            offer = nearest(name, {*variables, *known} if _is_near(name, known) else variables)
            raise ConfigError(f"--set {name}: nothing of this job hangs on it", fix=offer)


def _is_near(name: str, known: set[str]) -> bool:
    return bool(get_close_matches(name, known, n=1))
