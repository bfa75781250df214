"""The statements of a script that make what an expression needs, in the order of a run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torsh_trainer.translate.own_task.effects import (
    MARK,
    changes,
    is_transparent,
    mark_attribute,
)
from torsh_trainer.translate.own_task.lookup import Lookup, list_references
from torsh_trainer.translate.own_task.meanings import GivenParameter, LocalVariable, Model, Variable
from torsh_trainer.translate.python.frames import Frame, WalkedStep, list_bound
from torsh_trainer.translate.python.training import WrittenExpression


@dataclass(frozen=True)
class CarriedStatement:
    """A statement to carry, with the place from which its names are seen. ``sets`` is a parameter
    that it stands for, where no statement of the script does."""

    order: float
    node: ast.stmt
    frame: Frame
    at: int
    sets: Variable | None = None

    @property
    def line(self) -> int:
        """Where it stands."""
        return getattr(self.node, "lineno", 1)


@dataclass
class Slice:
    """``pieces`` in the order of a run; ``outer`` are variables that were made elsewhere, each as
    it is seen."""

    pieces: list[CarriedStatement] = field(default_factory=list)
    outer: dict[Variable, LocalVariable | GivenParameter] = field(default_factory=dict)


Inside = Callable[[Frame, WalkedStep], bool]
_HEADED = (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)


class Slicer:
    """Gathers statements. ``inside`` says which count; variables of others are ``outer``.

    ``passed`` are statements that the step of training itself stands in: they are not carried.
    ``of_model``: those that make the model count, too.
    """

    def __init__(
        self,
        lookup: Lookup,
        inside: Inside,
        *,
        passed: frozenset[ast.stmt] = frozenset(),
        of_model: bool = False,
    ) -> None:
        self.lookup, self.inside, self.of_model = lookup, inside, of_model
        self.passed = passed
        self.found: dict[object, CarriedStatement] = {}
        self.outer: dict[Variable, LocalVariable | GivenParameter] = {}
        self.done: set[tuple[Variable, int]] = set()
        self.until = float("inf")

    def gather(self, roots: Iterable[WrittenExpression]) -> Slice:
        """What the expressions need."""
        for written in roots:
            if written.at < len(written.frame.steps):
                self.until = written.frame.steps[written.at].order
            self.read(written.node, written.frame, written.at)
        pieces = sorted(self.found.values(), key=lambda piece: piece.order)
        return Slice(pieces, self.outer)

    def gather_variables(self, outer: Iterable[LocalVariable | GivenParameter]) -> Slice:
        """What makes variables that another slice was left with."""
        for meaning in outer:
            if isinstance(meaning, LocalVariable):
                self.follow(meaning)
            else:
                self.give(meaning)
        return self.gather(())

    def read(self, node: ast.AST, frame: Frame, at: int) -> None:
        """Follows everything that an expression or statement reads."""
        for reference in list_references(node):
            if isinstance(reference, ast.Attribute):
                meaning = self.lookup.find_attribute(reference, frame, at)
                if meaning is None and isinstance(reference.value, ast.Name):
                    meaning = self.lookup.find(reference.value.id, frame, at)
            else:
                meaning = self.lookup.find(reference.id, frame, at)
            if isinstance(meaning, LocalVariable):
                self.follow(meaning)
            elif isinstance(meaning, GivenParameter):
                self.give(meaning)
            elif isinstance(meaning, Model) and self.of_model:
                self.follow_model(reference, frame, at)

    def give(self, given: GivenParameter) -> None:
        written = given.written
        if given.variable.frame is None:  # an argument, which stands for its expression
            self.read(written.node, written.frame, written.at)
            return
        step = written.frame.steps[written.at]
        if not self.inside(written.frame, step):
            self.outer[given.variable] = given
            return
        if given.variable in self.found:
            return
        target = ast.Name(given.variable.name, ast.Store())
        node = ast.copy_location(ast.Assign([target], written.node), written.node)
        self.found[given.variable] = CarriedStatement(
            step.order, node, written.frame, written.at, given.variable
        )
        self.read(written.node, written.frame, written.at)

    def follow_model(self, node: ast.expr, frame: Frame, at: int) -> None:
        """The statements that make the model itself."""
        root = self.lookup.find_root(WrittenExpression(node, frame, at))
        if root is None:
            return
        if root.frame is None:
            meaning = None
            if isinstance(node, ast.Attribute):
                kept, self.lookup.models = self.lookup.models, set()
                meaning = self.lookup.find_attribute(node, frame, at)
                self.lookup.models = kept
            if isinstance(meaning, LocalVariable):
                self.follow(meaning)
            return
        self.follow(LocalVariable(root, root.frame, self.lookup.place_in(root.frame, frame, at)))

    def follow(self, local: LocalVariable) -> None:
        """The statements that make or change a variable."""
        if (local.variable, local.at) in self.done:
            return
        self.done.add((local.variable, local.at))
        last = self.lookup.find_step(local)
        if last is None or last.node in self.passed or not self.inside(local.frame, last):
            self.outer.setdefault(local.variable, local)
            return
        if local.variable.frame is None:
            for frame, index in self.list_steps_of_attribute(local):
                self.take(frame, index)
            return
        for index in self.list_steps(local):
            self.take(local.frame, index)

    def list_steps(self, local: LocalVariable) -> list[int]:
        """Those that bind or change a variable, from the last that makes it anew."""
        name, frame = local.variable.name, local.frame
        bound = set(self.lookup.list_bindings(name, frame, local.at))
        changed = [
            i
            for i in range(local.at)
            if i in bound
            or changes(frame.steps[i].node, name, of_model=self.of_model, loud=self.lookup.loud)
        ]
        steps = [i for i in changed if self.inside(frame, frame.steps[i])]
        fresh = [i for i in steps if i in bound and self.is_fresh(frame.steps[i], name)]
        return [i for i in steps if not fresh or i >= fresh[-1]]

    def list_steps_of_attribute(self, local: LocalVariable) -> list[tuple[Frame, int]]:
        """Those that set or change an attribute of an object, in whichever of its methods."""
        found = []
        for frame in self.lookup.script.reading.frames:
            for index, step in enumerate(frame.steps):
                if step.order > self.until or not self.inside(frame, step):
                    continue
                marked = mark_attribute(step.node, self.lookup.names_of(local.variable, frame))
                if marked is None:
                    continue
                sets = MARK in list_bound(marked)
                if sets or changes(marked, MARK, of_model=self.of_model, loud=self.lookup.loud):
                    found.append((frame, index))
        return found

    def is_fresh(self, step: WalkedStep, name: str) -> bool:
        """It makes a variable anew, whatever it was before."""
        if self.enclosing(step) is not None or not isinstance(step.node, ast.Assign):
            return False
        return all(not _names(part, name) for part in ast.walk(step.node.value))

    def take(self, frame: Frame, index: int) -> None:
        """Carries a step, or the whole of the statement that it stands in."""
        step = frame.steps[index]
        whole = self.enclosing(step)
        if whole is None:
            key: object = (id(frame), index)
            if key not in self.found:
                self.found[key] = CarriedStatement(step.order, step.node, frame, index)
                self.read(step.node, frame, index)
            return
        key = (id(frame), id(whole))
        if key in self.found:
            return
        parts = [i for i, other in enumerate(frame.steps) if whole in other.within]
        first, last = (parts[0], parts[-1]) if parts else (index, index)
        if parts and isinstance(whole, _HEADED) and first:
            first -= 1
        order = frame.steps[first].order
        self.found[key] = CarriedStatement(order, whole, frame, last + 1)
        self.read(whole, frame, last + 1)
        for name in sorted({n for i in range(first, last + 1) for n in _list_bound_at(frame, i)}):
            before = LocalVariable(Variable(id(frame), name, frame), frame, first)
            if self.lookup.list_bindings(name, frame, first) and _reads(whole, name):
                self.follow(before)

    def enclosing(self, step: WalkedStep) -> ast.stmt | None:
        """The outermost statement around a step that has to be carried with it."""
        for outer in step.within:
            if not is_transparent(outer) and outer not in self.passed:
                return outer
        head = isinstance(step.node, _HEADED) and not is_transparent(step.node)
        return step.node if head and step.node not in self.passed else None


def _names(part: ast.AST, name: str) -> bool:
    return isinstance(part, ast.Name) and part.id == name


def _list_bound_at(frame: Frame, index: int) -> list[str]:
    return list_bound(frame.steps[index].node)


def _reads(node: ast.AST, name: str) -> bool:
    return any(_names(part, name) and isinstance(part.ctx, ast.Load) for part in ast.walk(node))  # type: ignore[attr-defined]
