"""One job of a launch file as a plan: a verdict for every flag, and one command that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torsh_trainer.translate.base import TranslationRequest
from torsh_trainer.translate.deepspeed import keys, versions
from torsh_trainer.translate.deepspeed.auto import AUTO as FILLED
from torsh_trainer.translate.deepspeed.auto import list_needs
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import translate_document
from torsh_trainer.translate.launch import fsdp_file, meshes, trainer_arguments
from torsh_trainer.translate.launch.commands import write_command
from torsh_trainer.translate.launch.configuration import (
    FileFinder,
    settings_for,
)
from torsh_trainer.translate.launch.findings import ASKED, JobFindings
from torsh_trainer.translate.launch.flags import FlagTable, StatedFlag, find_row
from torsh_trainer.translate.launch.job import AUTO, Asked, LaunchLine
from torsh_trainer.translate.launch.lines import GIVE_PLACES, PYTHON, launcher_named
from torsh_trainer.translate.launch.preparing import PreparedJob, prepare_job
from torsh_trainer.translate.launch.script_arguments import (
    FAMILIES,
    table_of_family,
)
from torsh_trainer.translate.launch.scripts import (
    LineOfScript,
    ScriptKind,
)
from torsh_trainer.translate.launch.variables import (
    is_deciding,
    is_set_by_launcher,
    judge_variable,
)
from torsh_trainer.translate.outcomes import Outcome, exact
from torsh_trainer.translate.plan import Fact, Plan
from torsh_trainer.translate.python.arguments import read_words
from torsh_trainer.translate.python.environment import read_environment
from torsh_trainer.translate.shell.words import Word

_SHORTEST = 9
"""Letters of an abbreviation that is taken for an argument of a family."""

_OWN = "the script's own: your task takes what it stands for"


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
    prepared = prepare_job(line, source=source, finder=finder, asked=asked)
    planning = _Planning(prepared, asked, text)
    plan = planning.plan()
    used |= planning.used
    return plan


class _Planning:
    """Collects the verdicts of one job."""

    def __init__(self, prepared: PreparedJob, asked: TranslationRequest, text: str) -> None:
        self.job, self.document, self.script = prepared.job, prepared.document, prepared.script
        self.script_text, self.script_notes = prepared.script_text, prepared.script_notes
        self.reads_defaults = prepared.reads_defaults
        self.asked, self.text = asked, text
        self.used: frozenset[str] = frozenset()
        self.found = JobFindings()
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
        self.settle_mesh()
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
            "strategy.find_unused_parameters": ("ddp", "fsdp", "parallel"),
            **dict.fromkeys(meshes.DDP_ALONE, ("ddp",)),
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
            self.job.ask(
                Fact(
                    hole.name,
                    f"more options (line {said.place.line})",
                    "what your shell holds there: echo it; empty where nothing",
                    said.place.line,
                ),
            )
            self.found.take(said, Outcome("refused", ASKED), "asked")
        elif row is None:
            self.found.take(said, exact("kept in the command below"), "launch.kept")
        else:
            self.judge_by(said, said, row.judge, row.rule)

    def judge_by(self, asked: StatedFlag, said: StatedFlag, judge: Any, rule: str) -> None:
        """A verdict, or a question where the value is not known."""
        try:
            outcome = judge(self.job, asked)
        except Asked as question:
            self.job.ask(question.fact)
            outcome = Outcome("refused", ASKED)
            rule = "asked"
        self.found.take(said, outcome, rule)

    def read_variables(self) -> None:
        """Variables that processes inherit; what they say stays in force around the command."""
        command = self.job.line.command
        decides = self.job.line.launcher.launcher != "accelerate"
        for name, word in {**command.exported, **command.variables}.items():
            named = re.compile(rf"\b{re.escape(name)}\b")
            others = re.sub(rf"^.*\b{re.escape(name)}=.*$", "", self.text, flags=re.MULTILINE)
            outcome = judge_variable(
                name,
                word.text,
                decides=decides,
                in_line=re.search(rf"\$\{{?[#!]?{re.escape(name)}\b", others) is not None,
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
        self.take_default(group, option, Outcome("exact", why, {group: option}))

    def take_default(self, key: str, value: str, outcome: Outcome) -> None:
        """What follows from what the line leaves out."""
        place = self.job.line.links[0].word.place
        said = StatedFlag(key, (Word(value, place),), place)
        self.found.take(said, outcome, "launch.default", given=False)

    # -- the script ------------------------------------------------------------------------------

    def read_script(self, script: Path, kind: ScriptKind) -> Plan:
        """The findings of a script that makes an engine of its own, with the line's words."""
        job = self.job
        words = read_words([word.text for word in job.line.arguments])
        command = job.line.command
        exported = {**command.exported, **command.variables}
        if job.line.launcher.launcher in GIVE_PLACES:
            exported = {n: word for n, word in exported.items() if not is_set_by_launcher(n)}
        words.environment = read_environment(exported)
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
            job.ask(fact)
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
            job.ask(fact)
        keys_asked = self.keys_asked(facts)
        dotted = {name for name in job.settings if name in _deepspeed_keys()}
        job.used |= dotted
        settings |= {name: job.settings[name] for name in dotted}
        processes = self.asked.world_size or job.world.processes
        ranks = meshes.count_model_ranks(job)
        options = Options(
            processes // ranks if processes and processes % ranks == 0 else processes,
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
                verdict, why, becomes = "refused", ASKED, ""
            if ranks > 1:
                becomes = meshes.restate(becomes)
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
        elsewhere = not job.world.is_one_machine or job.line.is_kept or job.world.per_node == AUTO
        if elsewhere or ranks > 1:
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

    def settle_mesh(self) -> None:
        """One strategy cuts a model, whatever else chose one; its replicas are whole, but said."""
        found = self.found
        if not meshes.read_axes(self.job) or not found.choices:
            return
        found.choices["strategy"] = "parallel"
        for knob in meshes.NOT_BESIDE:
            if found.values.pop(knob, False):
                found.refuse(knob, "not in this release beside a cut model")
        sharded = any("reshard_after_forward" in key for key in found.values)
        if not sharded and not any(key.startswith("mesh.dp_") for key in found.values):
            self.take_default("mesh", "1", exact("nothing shards its parameters", mesh__dp_shard=1))

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
        if self.job.line.hands_on:
            yield (
                "the file hands its own arguments on ($@), and none are taken here: --set "
                "@='--lr 0.1 ...' gives them"
            )
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


def _cut(text: str) -> str:
    said = " ".join(text.split())
    return said if len(said) <= 60 else said[:57] + "..."
