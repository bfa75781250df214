"""A file with a task of the user's own: his model, data and loss, imported from his script."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_trainer.translate.own_task.closing import Closer
from torsh_trainer.translate.own_task.data import FoundData, find_data
from torsh_trainer.translate.own_task.importing import Importer
from torsh_trainer.translate.own_task.lookup import Lookup
from torsh_trainer.translate.own_task.loop import DataLoop, choose_backward, find_loop
from torsh_trainer.translate.own_task.meanings import GivenParameter, LocalVariable, Lost, Variable
from torsh_trainer.translate.own_task.own_file import ARGUMENTS, FILL_IN, Missing, Names, OwnFile
from torsh_trainer.translate.own_task.residue import (
    list_changes_of_data,
    list_late_changes,
    list_loud_calls,
    list_residue,
)
from torsh_trainer.translate.own_task.slicing import CarriedStatement, Slicer
from torsh_trainer.translate.own_task.splitting import Split, inline_batch, split, undivide
from torsh_trainer.translate.own_task.text import DATA, TASK, TaskBodies, write_text_of
from torsh_trainer.translate.python.frames import Frame, WalkedStep
from torsh_trainer.translate.python.training import Backward, TrainingScript, WrittenExpression

_OURS = ("DataSource", "Task", "Namespace", FILL_IN, ARGUMENTS, TASK, DATA)
_OF_TASK = [
    "data",
    "optimizer",
    "model",
    "forward",
    "loss",
    "weight",
    "evaluate",
    "predict",
    "unit",
    "summarise",
    "notes",
    "build_model",
    "build_optimizers",
    "sample_weight",
    "units_per_sample",
    "running_averages",
    "flops_per_sample",
    "state_dict",
]
"""Names that a task has already."""


@dataclass(frozen=True)
class WrittenTask:
    """``text`` of the file; ``missing`` is what the user has to fill in; ``values`` are knobs of
    the recipe that follow from the script; ``roots`` are folders that Python has to find."""

    text: str
    missing: tuple[Missing, ...]
    values: Mapping[str, Any]
    roots: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def write_task(script: TrainingScript, *, low: bool = False) -> WrittenTask:
    """The task for a script that was read; ``low``: its recipe computes in bf16 or fp16."""
    first = _Writing(script, low, {})
    first.write()
    taken = dict(first.file.names)
    second = _Writing(script, low, taken)  # knows all imports before it names a variable
    return second.write()


class _Writing:
    def __init__(self, script: TrainingScript, low: bool, names: Mapping[str, str]) -> None:
        self.script = script
        importer = Importer(script.path, script.tree, script.project)
        self.lookup = Lookup(script, importer)
        ours = dict.fromkeys(_OURS, "torsh_trainer")
        self.file = OwnFile(importer, script.path.name, low, names={**names, **ours})
        self.parts = TaskBodies()
        self.notes: list[str] = []

    def write(self) -> WrittenTask:
        chosen = choose_backward(self.script)
        loop = None if chosen is None else find_loop(self.lookup, chosen[0])
        self.write_model(loop)
        found = FoundData()
        if chosen is None:
            self.miss_step(1, "no backward pass was found where reading gets to")
        else:
            found = find_data(self.script, self.lookup, loop, self.file)
            if loop is None:
                line = chosen[0].event.place.line
                self.miss_step(line, "the backward pass stands in no loop over batches")
            else:
                self.write_step(chosen[0], chosen[1], loop)
        self.write_data(found, loop)
        values = dict(found.values)
        if loop is not None and (epochs := self.count_epochs(loop)):
            values["trainer.max_epochs"] = epochs
        for name, line in self.file.unknown.items():
            self.file.miss("", line, f"args.{name} cannot be told", "state it here")
        return WrittenTask(
            write_text_of(self.file, self.parts),
            tuple(self.file.missing),
            values,
            tuple(self.file.importer.roots),
            tuple(self.notes),
        )

    def count_epochs(self, loop: DataLoop) -> int | None:
        """Rounds of the loop around the loop over batches."""
        for event in self.script.reading.all("loop.range"):
            around = event.node in loop.passed and event.node not in (loop.node, *loop.inner)
            if around and event.facts["count"] > 0:
                return int(event.facts["count"])
        return None

    # -- the model -------------------------------------------------------------------------------

    def write_model(self, loop: DataLoop | None) -> None:
        models = self.script.models
        if not models:
            fix = "return the model: return YourModel(...)"
            found = self.file.miss("", 1, "which model trains cannot be told by reading", fix)
            self.parts.build = [_filling(found)]
            return
        chosen = models[0]
        for other in models[1:]:
            if self.lookup.find_root(other) != self.lookup.find_root(chosen):
                what = f"a second model is trained: {ast.unparse(other.node)[:60]}"
                fix = "build one module of both, and call its parts in forward; then delete this"
                found = self.file.miss(other.file, other.place.line, what, fix)
                self.parts.build.append(_filling(found))
        passed = frozenset[ast.stmt]() if loop is None else loop.passed

        def inside(frame: Frame, step: WalkedStep) -> bool:
            return loop is None or loop.is_outside(frame, step)

        kept, self.lookup.models = self.lookup.models, set()  # here it is a variable
        slicer = Slicer(self.lookup, inside, passed=passed, of_model=True)
        pieces = slicer.gather([chosen])
        names = Names(self.file, ["self"])
        closer = Closer(self.file, self.lookup, names, outer={}, lost=self.why_lost(pieces.outer))
        self.parts.build += self.close_setup(closer, pieces.pieces)
        end = closer.close_expression(chosen.node, chosen.frame, chosen.at)
        self.parts.build.append(ast.Return(end))
        self.lookup.models = kept

    def close_setup(self, closer: Closer, pieces: Sequence[CarriedStatement]) -> list[ast.stmt]:
        """Statements that are done once, with the seeds of torch under which the script does
        them."""
        draws = any(_may_draw(piece.node) for piece in pieces)
        seeds = self.list_seeds() if draws else []
        found: list[ast.stmt] = []
        before = -1.0
        for piece in pieces:
            passed = [value for order, value in seeds if before < order < piece.order]
            if passed:
                self.file.take_import("import torch", "torch", "torch")
                found += ast.parse(f"torch.manual_seed({passed[-1]})").body
            found += closer.close_pieces([piece])
            before = piece.order
        return found

    def list_seeds(self) -> list[tuple[float, int]]:
        """``torch.manual_seed(N)`` that the script surely calls: (order, N)."""
        return [
            (event.frame.steps[event.step].order, event.facts["value"])
            for event in self.script.reading.all("seed")
            if event.frame is not None
            and not event.under
            and not event.loops
            and isinstance(event.facts.get("value"), int)
        ]

    @staticmethod
    def why_lost(outer: Mapping[Variable, LocalVariable | GivenParameter]) -> Any:
        def why(variable: Variable) -> Lost | None:
            if variable not in outer:
                return None
            what = f"{variable.name} is made anew in the loop"
            return Lost(what, "write what it is here, or make it in the loss")

        return why

    # -- the step --------------------------------------------------------------------------------

    def miss_step(self, line: int, what: str) -> None:
        fix = "write forward and loss"
        found = self.file.miss("", line, what, fix)
        self.parts.split = Split([_filling(found)], [_filling(found)])

    def write_step(self, backward: Backward, others: list[Backward], loop: DataLoop) -> None:
        frame = backward.event.frame
        assert frame is not None

        def inside(where: Frame, step: WalkedStep) -> bool:
            return loop.holds(where, step) and not self.is_batch(step, loop)

        slicer = Slicer(self.lookup, inside, passed=loop.passed)
        loss = WrittenExpression(backward.loss, frame, backward.event.step)
        sliced = slicer.gather([loss])
        outer = {v: m for v, m in sliced.outer.items() if not self.is_of_batch(v, m, loop)}
        names = Names(self.file, ["self", "model"])
        for name in _list_names(loop.target):
            variable = Variable(id(loop.frame), name, loop.frame)
            names.found[variable] = names.name_of(variable)
        attributes = self.name_attributes(outer, loop)
        closer = Closer(
            self.file,
            self.lookup,
            names,
            outer=attributes,
            model="model",
            device="next(model.parameters()).device",
            slices=loop.slices,
            lost=self.why_lost(outer),
        )
        statements = closer.close_pieces(sliced.pieces)
        closed = closer.close_expression(loss.node, loss.frame, loss.at)
        if self.script.divided_by != 1:
            statements, closed, divided = undivide(statements, closed, self.script.divided_by)
            if divided != self.script.divided_by:
                what = f"the loss is divided by {self.script.divided_by}, over its micro-batches"
                fix = "return the mean over the batch, without that division; then delete this"
                found = self.file.miss(frame.module.file, loss.place.line, what, fix)
                statements.insert(0, _filling(found))
        said = ast.unparse(ast.Module([*statements, ast.Expr(closed)], []))
        used = {
            variable: outer[variable]
            for variable, name in attributes.items()
            if re.search(rf"{name}\b", said)
        }
        self.write_start(used, attributes, loop)
        unpack = self.unpack(closer, loop)
        statements, closed = inline_batch(statements, closed)
        made = split(statements, closed, unpack)
        if made is None:
            self.miss_step(loss.place.line, "the loss is not computed by the model that trains")
            return
        self.parts.split = made
        residue = list(list_residue(self.script, self.lookup, loop, backward, others))
        if self.script.models:
            chosen = self.script.models[0]
            order = chosen.frame.steps[chosen.at].order
            residue += list_late_changes(self.lookup, loop, backward, order)
            residue += list_loud_calls(self.script, self.lookup, loop, backward, order)
        told = [_filling(self.file.miss(*row)) for row in dict.fromkeys(residue)]
        self.parts.split.loss = [*told, *self.parts.split.loss]

    def is_batch(self, step: WalkedStep, loop: DataLoop) -> bool:
        """The step that gives a batch its names."""
        if step.node is loop.node:
            return True
        return isinstance(step.node, ast.Assign) and loop.target in step.node.targets

    def is_of_batch(
        self, variable: Variable, meaning: LocalVariable | GivenParameter, loop: DataLoop
    ) -> bool:
        if isinstance(meaning, GivenParameter) or variable.frame is not loop.frame:
            return False
        step = self.lookup.find_step(meaning)
        return step is not None and self.is_batch(step, loop)

    def unpack(self, closer: Closer, loop: DataLoop) -> ast.stmt | None:
        """``data, target = batch``."""
        if loop.target is None:
            return None
        target = _rename(loop.target, closer, loop)
        if isinstance(target, ast.Name) and target.id == "batch":
            return None
        return ast.Assign([target], ast.Name("batch", ast.Load()), lineno=1)

    def name_attributes(
        self, outer: Mapping[Variable, LocalVariable | GivenParameter], loop: DataLoop
    ) -> dict[Variable, str]:
        """What the task calls variables that the script makes once, before the loop."""
        slicer = Slicer(self.lookup, loop.is_outside, passed=loop.passed)
        left = slicer.gather_variables(outer.values()).outer
        return {
            variable: f"self.{variable.name}" + ("_" if variable.name in _OF_TASK else "")
            for variable in outer
            if variable not in left
        }

    def write_start(
        self,
        outer: Mapping[Variable, LocalVariable | GivenParameter],
        attributes: Mapping[Variable, str],
        loop: DataLoop,
    ) -> None:
        """``__init__``: makes what the loss needs, and keeps it."""
        for variable in outer:
            if self.is_carried_over(variable, loop):
                what = f"{variable.name} is carried from one batch to the next"
                fix = "keep it in the task, with state_dict and load_state_dict; then delete this"
                line = _line_of(outer[variable])
                self.parts.start.append(_filling(self.file.miss("", line, what, fix)))
        slicer = Slicer(self.lookup, loop.is_outside, passed=loop.passed)
        sliced = slicer.gather_variables(outer.values())
        names = Names(self.file, ["self", "data", "optimizer"])
        lost = self.why_lost(sliced.outer)
        closer = Closer(self.file, self.lookup, names, outer={}, lost=lost)
        self.parts.start += self.close_setup(closer, sliced.pieces)
        for variable in outer:
            made = f"{attributes[variable]} = {names.name_of(variable)}"
            self.parts.start += ast.parse(made).body

    def is_carried_over(self, variable: Variable, loop: DataLoop) -> bool:
        frame = variable.frame
        if frame is None:
            return False
        bound = self.lookup.list_bindings(variable.name, frame, len(frame.steps))
        return any(loop.holds(frame, frame.steps[i]) for i in bound)

    # -- data ------------------------------------------------------------------------------------

    def write_data(self, found: FoundData, loop: DataLoop | None) -> None:
        self.parts.data += [_filling(missing) for missing in found.missing]
        wanted = {
            "train": found.train,
            "eval": found.evaluates,
            "collate": found.collate or found.evaluates_collate,
        }
        if found.evaluates_collate and found.collate:
            one, other = (ast.unparse(w.node) for w in (found.evaluates_collate, found.collate))
            if one != other:
                del wanted["eval"]
                self.notes.append(
                    f"no evaluation: its loader collates by {one}, training by {other}"
                )
        roots = {name: written for name, written in wanted.items() if written is not None}
        if not roots or loop is None:
            if not found.missing:
                fix = "give the data set: self.train = YourDataset(...)"
                missing = self.file.miss("", 1, "no data set was found", fix)
                self.parts.data.append(_filling(missing))
            return
        for row in list_changes_of_data(self.lookup, loop, found.train):
            self.parts.data.append(_filling(self.file.miss(*row)))
        slicer = Slicer(self.lookup, loop.is_outside, passed=loop.passed)
        sliced = slicer.gather(roots.values())
        closer = Closer(
            self.file,
            self.lookup,
            Names(self.file, ["self"]),
            outer={},
            lost=self.why_lost(sliced.outer),
        )
        self.parts.data += self.close_setup(closer, sliced.pieces)
        for name, written in roots.items():
            value = closer.close_expression(written.node, written.frame, written.at)
            target = ast.parse(f"self.{name}", mode="eval").body
            assert isinstance(target, ast.Attribute)
            target.ctx = ast.Store()
            self.parts.data.append(ast.Assign([target], value, lineno=1))


def _filling(missing: Missing) -> ast.stmt:
    call = ast.Call(ast.Name(FILL_IN, ast.Load()), [ast.Constant(str(missing))], [])
    return ast.fix_missing_locations(ast.Expr(call, lineno=1, col_offset=0))


def _list_names(target: ast.expr | None) -> list[str]:
    if target is None:
        return []
    return [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]


def _rename(target: ast.expr, closer: Closer, loop: DataLoop) -> ast.expr:
    """The target of the loop with the names that its variables have in the file."""
    whole = copy.deepcopy(target)
    for part in ast.walk(whole):
        if isinstance(part, ast.Name):
            variable = Variable(id(loop.frame), part.id, loop.frame)
            part.id = closer.names.name_of(variable)
        if isinstance(part, ast.Name | ast.Tuple | ast.List | ast.Starred):
            part.ctx = ast.Store()
    return whole


def _may_draw(node: ast.stmt) -> bool:
    """It calls something that may draw random numbers: anything but a loss of torch's."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
    return any(not name.endswith("Loss") and name not in ("tensor", "to") for name in names)


def _line_of(meaning: LocalVariable | GivenParameter) -> int:
    if isinstance(meaning, GivenParameter):
        return meaning.written.place.line
    steps = meaning.frame.steps[: meaning.at + 1]
    return steps[-1].node.lineno if steps else 1
