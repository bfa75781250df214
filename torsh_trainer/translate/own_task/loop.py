"""The loop in which a script trains: which one, over what, and what a batch is called in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torsh_trainer.translate.own_task.lookup import Lookup
from torsh_trainer.translate.own_task.meanings import GivenParameter, LocalVariable
from torsh_trainer.translate.python.events import ScriptReading
from torsh_trainer.translate.python.frames import Frame, WalkedStep
from torsh_trainer.translate.python.training import Backward, TrainingScript, WrittenExpression
from torsh_trainer.translate.python.values import Thing

LOOPS = (ast.For, ast.AsyncFor, ast.While)
_AROUND = ("enumerate", "tqdm", "trange", "iter", "cycle", "islice", "track")
"""Calls around a loader that give its batches."""


@dataclass(frozen=True)
class DataLoop:
    """The loop over batches. ``frame`` has it in its steps; ``target`` is what a batch is assigned
    to, and ``over`` what it comes from: None where a batch is made in another way.

    ``inner`` are loops between it and the backward pass, ``passed`` all statements around that.
    """

    node: ast.stmt
    frame: Frame
    head: int
    target: ast.expr | None
    over: WrittenExpression | None
    inner: tuple[ast.stmt, ...]
    passed: frozenset[ast.stmt]
    below: frozenset[Frame]

    @property
    def slices(self) -> frozenset[str]:
        """Variables of inner loops that take a batch apart: ``for i in range(0, len(x), size)``."""
        return frozenset(
            node.target.id
            for node in self.inner
            if isinstance(node, ast.For)
            and isinstance(node.target, ast.Name)
            and isinstance(node.iter, ast.Call)
            and ast.unparse(node.iter.func) == "range"
            and len(node.iter.args) == 3
        )

    def holds(self, frame: Frame, step: WalkedStep) -> bool:
        """Whether a step happens anew for every batch."""
        return frame in self.below or (frame is self.frame and self.node in step.within)

    def is_outside(self, frame: Frame, step: WalkedStep) -> bool:
        """Whether a step happens once, before all batches."""
        if self.holds(frame, step):
            return False
        return not any(isinstance(o, LOOPS) and o in self.passed for o in step.within)


def choose_backward(script: TrainingScript) -> tuple[Backward, list[Backward]] | None:
    """The pass that trains, and others; functions that nothing calls come last."""

    def is_led_to(backward: Backward) -> bool:
        frame = backward.event.frame
        return frame is not None and list(frame.chain())[-1][0].node is None

    ordered = sorted(script.backwards, key=lambda b: not is_led_to(b))
    if not ordered or ordered[0].event.frame is None:
        return None
    others = [b for b in ordered[1:] if is_led_to(b) or not is_led_to(ordered[0])]
    return ordered[0], others


def find_loop(lookup: Lookup, backward: Backward) -> DataLoop | None:
    """The loop around a backward pass whose batches it sees; None where there is none."""
    frame = backward.event.frame
    assert frame is not None
    around = list(_list_around(frame, backward.event.step))
    passed = frozenset(node for _, node, _ in around)
    loops = [(f, node) for f, node, _ in around if isinstance(node, LOOPS)]
    if not loops:
        return None
    chosen = 0
    for i, (where, node) in enumerate(loops):
        if isinstance(node, ast.For | ast.AsyncFor) and _is_loader(lookup, node, where):
            chosen = i
            break
    where, node = loops[chosen]
    below = frozenset(_list_below(frame, where))
    head = _find_head(where, node)
    target, over = _find_batch(lookup, node, where, head)
    inner = tuple(n for _, n in loops[:chosen])
    return DataLoop(node, where, head, target, over, inner, passed, below)


def _list_around(frame: Frame, step: int) -> Iterator[tuple[Frame, ast.stmt, int]]:
    """Statements around a place, from the innermost, in this frame and those that led to it."""
    for where, at in frame.chain():
        at = step if where is frame else at
        if at < len(where.steps):
            for node in reversed(where.steps[at].within):
                yield where, node, at


def _list_below(frame: Frame, where: Frame) -> Iterator[Frame]:
    for one, _ in frame.chain():
        if one is where:
            return
        yield one


def _find_head(frame: Frame, node: ast.stmt) -> int:
    """The step that is a loop itself; of a while loop the first in it."""
    for i, step in enumerate(frame.steps):
        if step.node is node or node in step.within:
            return i
    return 0


def _is_loader(lookup: Lookup, node: ast.For | ast.AsyncFor, frame: Frame) -> bool:
    over = strip_around(node.iter)
    if isinstance(over, ast.Call):
        return ast.unparse(over.func).rpartition(".")[2] in ("DataLoader", "StatefulDataLoader")
    head = _find_head(frame, node)
    value = value_of(lookup, over, frame, head)
    return isinstance(value, Thing) and value.kind == "loader"


def value_of(lookup: Lookup, node: ast.expr, frame: Frame, at: int) -> object:
    """The value that the walk has for a name or ``self.name``."""
    if isinstance(node, ast.Name):
        return lookup.find_value(node.id, frame, at)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = lookup.find_value(node.value.id, frame, at)
        if isinstance(owner, Thing):
            return owner.facts.get(node.attr)
    return None


def strip_around(node: ast.expr) -> ast.expr:
    """``enumerate(tqdm(loader))`` without what is around the loader."""
    while isinstance(node, ast.Call) and node.args:
        if ast.unparse(node.func).rpartition(".")[2] not in _AROUND:
            break
        node = node.args[0]
    return node


def _find_batch(
    lookup: Lookup, node: ast.stmt, frame: Frame, head: int
) -> tuple[ast.expr | None, WrittenExpression | None]:
    """What a batch is assigned to, and where it comes from."""
    if isinstance(node, ast.For | ast.AsyncFor):
        over, target = strip_around(node.iter), node.target
        if ast.unparse(over).startswith("range("):
            return _find_next(lookup, node, frame)
        counted = "enumerate(" in ast.unparse(node.iter)
        if counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        return target, WrittenExpression(over, frame, head)
    return _find_next(lookup, node, frame)


def _find_next(
    lookup: Lookup, node: ast.stmt, frame: Frame
) -> tuple[ast.expr | None, WrittenExpression | None]:
    """``batch = next(batches)`` in a loop, with ``batches = iter(loader)`` before it."""
    for i, step in enumerate(frame.steps):
        if node not in step.within or not isinstance(step.node, ast.Assign):
            continue
        value = step.node.value
        if not isinstance(value, ast.Call) or ast.unparse(value.func) != "next" or not value.args:
            continue
        made = value.args[0]
        written = WrittenExpression(made, frame, i)
        if isinstance(made, ast.Name):
            bound = lookup.list_bindings(made.id, frame, i)
            outside = [b for b in bound if node not in frame.steps[b].within]
            if not outside:
                return step.node.targets[0], None
            before = frame.steps[outside[-1]].node
            if isinstance(before, ast.Assign):
                written = WrittenExpression(strip_around(before.value), frame, outside[-1])
        return step.node.targets[0], WrittenExpression(
            strip_around(written.node), frame, written.at
        )
    return None, None


def resolve(lookup: Lookup, written: WrittenExpression) -> WrittenExpression:
    """An expression behind names: what the variable was last assigned, parameters followed."""
    for _ in range(12):
        node, meaning = written.node, None
        if isinstance(node, ast.Name):
            meaning = lookup.find(node.id, written.frame, written.at)
        elif isinstance(node, ast.Attribute):
            meaning = lookup.find_attribute(node, written.frame, written.at)
        if isinstance(meaning, GivenParameter):
            written = meaning.written
            continue
        if not isinstance(meaning, LocalVariable):
            return written
        step = lookup.find_step(meaning)
        if step is None or not isinstance(step.node, ast.Assign | ast.AnnAssign):
            return written
        targets = step.node.targets if isinstance(step.node, ast.Assign) else [step.node.target]
        value = step.node.value
        if value is None or isinstance(targets[0], ast.Tuple | ast.List):
            return written
        written = WrittenExpression(value, meaning.frame, meaning.frame.steps.index(step))
    return written


def list_data_loops(reading: ScriptReading, loop: DataLoop) -> Sequence[tuple[Frame, ast.For]]:
    """Other loops over loaders, in the order of a run."""
    return [
        (event.frame, event.node)
        for event in reading.all("loop.loader")
        if event.frame is not None
        and event.node is not loop.node
        and isinstance(event.node, ast.For)
    ]
