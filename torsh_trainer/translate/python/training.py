"""What an engine's reading of a script says about its step of training, whatever the engine.

A translator fills it from its own events; what writes the user's task knows nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.events import Event, ScriptReading, place_of
from torsh_trainer.translate.python.frames import Frame
from torsh_trainer.translate.python.project import ScriptProject

ENGINE = "engine"
"""The kind of a ``Thing`` that is an engine around the model."""


@dataclass(frozen=True)
class WrittenExpression:
    """An expression where it stands: in ``frame``, before its step number ``at`` ends."""

    node: ast.expr
    frame: Frame
    at: int

    @property
    def file(self) -> str:
        """The module that it stands in; empty for the script itself."""
        return self.frame.module.file

    @property
    def place(self) -> Place:
        """Its line and column."""
        return place_of(self.node)


@dataclass(frozen=True)
class Backward:
    """A backward pass: the expression of the loss, and the event."""

    loss: ast.expr
    event: Event


@dataclass(frozen=True)
class TrainingScript:
    """A script that was read, and where in it a model, data and a loss stand.

    ``engine`` is the beginning of the names of the engine's own calls (``horovod``). ``models`` are
    what the engine or the optimizer is given to train, ``data`` and ``collate`` what the engine
    makes a loader of. ``divided_by``: what the script divides a loss by that the recipe has as
    accumulation; 1 where the division belongs to the loss. ``reduces``: gradients are reduced by
    hand, which the engine's rules judge. ``values`` are known values of expressions, by their text.
    """

    path: Path
    tree: ast.Module
    reading: ScriptReading
    project: ScriptProject
    engine: str
    backwards: tuple[Backward, ...] = ()
    models: tuple[WrittenExpression, ...] = ()
    data: WrittenExpression | None = None
    collate: WrittenExpression | None = None
    divided_by: Any = 1
    reduces: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)


def argument_of(event: Event, name: str, position: int | None = None) -> WrittenExpression | None:
    """What a call was given, by its name or by its place, as it is written."""
    node, frame = event.node, event.frame
    if not isinstance(node, ast.Call) or frame is None:
        return None
    found = next((k.value for k in node.keywords if k.arg == name), None)
    if found is None and position is not None and position < len(node.args):
        found = node.args[position]
    if found is None or isinstance(found, ast.Starred):
        return None
    return WrittenExpression(found, frame, event.step)


def loss_of(event: Event) -> ast.expr | None:
    """The loss that a call of ``backward`` is about: what stands before the dot, or its argument
    (``engine.backward(loss)``); of ``scaler.scale(loss).backward()`` the loss itself."""
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if event.what != "backward":
        return node.args[0] if node.args else next((k.value for k in node.keywords), None)
    owner = node.func.value
    if (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Attribute)
        and owner.func.attr == "scale"
        and owner.args
    ):
        return owner.args[0]
    return owner


def list_backwards(reading: ScriptReading) -> Iterator[Backward]:
    """The backward passes of a script, of an engine's or of a loss itself."""
    for event in reading.events:
        if event.what in ("backward", "engine.backward"):
            loss = loss_of(event)
            if loss is not None:
                yield Backward(loss, event)


def models_of_optimizers(reading: ScriptReading) -> tuple[WrittenExpression, ...]:
    """What optimizers step, as it is written before ``.parameters()``; of the optimizer that the
    engine wraps first."""
    found: dict[str, WrittenExpression] = {}
    for event in (*reading.all("DistributedOptimizer"), *reading.all("optimizer")):
        if event.frame is None or not isinstance(event.node, ast.Call):
            continue
        for part in ast.walk(event.node):
            if isinstance(part, ast.Attribute) and part.attr in ("parameters", "named_parameters"):
                written = WrittenExpression(part.value, event.frame, event.step)
                found.setdefault(ast.unparse(part.value), written)
    return tuple(found.values())
