"""What a script does beside the loss that would change the result, and has no place in a task."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torsh_trainer.translate.own_task.effects import (
    changes,
    is_of_engine,
    is_quiet,
    name_of,
    root_of,
)
from torsh_trainer.translate.own_task.lookup import Lookup
from torsh_trainer.translate.own_task.loop import DataLoop
from torsh_trainer.translate.own_task.meanings import Model
from torsh_trainer.translate.python.frames import Frame, list_bound, match_arguments
from torsh_trainer.translate.python.training import Backward, TrainingScript, WrittenExpression
from torsh_trainer.translate.python.values import Function

Residue = tuple[str, int, str, str]
"""A file, a line, what happens there, and what to do."""

_GRADIENTS = "gradients are changed by hand"
_GRADIENTS_FIX = "write it as an optimizer of your own (docs/optimization.md), or leave it out"


def list_residue(
    script: TrainingScript,
    lookup: Lookup,
    loop: DataLoop,
    backward: Backward,
    others: list[Backward],
) -> Iterator[Residue]:
    """Everything of the loop that has no place in the task."""
    frame = backward.event.frame
    assert frame is not None
    for other in others:
        where = other.event.file
        if other.event.frame is frame and other.event.loops == backward.event.loops:
            what = "a second backward pass in the same step: several losses"
            fix = "add the losses up, or give the task a loop of its own (docs/tasks.md)"
        else:
            what, fix = "another loop that trains", "write a task for it, too"
        yield where, other.event.place.line, what, fix
    yield from _list_other_calls(script, loop)
    for holder, body in _list_bodies(frame, loop):
        yield from _of_body(script, holder, body)
    for node in loop.inner:
        target = getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in loop.slices:
            continue  # its rounds are micro-batches
        words = ast.unparse(node).splitlines()[0][:60]
        fix = "make its rounds micro-batches: trainer.accumulate"
        yield loop.frame.module.file, node.lineno, f"a loop within the step: {words}", fix
    for node in loop.passed:
        if isinstance(node, ast.If):
            what = f"this trains only if {ast.unparse(node.test)[:60]}, which cannot be told"
            fix = "see that it holds, and delete this line"
            yield frame.module.file, node.lineno, what, fix


def _list_other_calls(script: TrainingScript, loop: DataLoop) -> Iterator[Residue]:
    """Calls of the function of the loop with other arguments than those that were followed."""
    own = {name: ast.unparse(node) for name, node in loop.frame.given.items()}
    for frame in script.reading.frames:
        if frame.node is None or frame.node is not loop.frame.node or frame is loop.frame:
            continue
        other = {name: ast.unparse(node) for name, node in frame.given.items()}
        if frame.caller is None or other == own:
            continue
        line = frame.caller.steps[frame.called_at].node.lineno
        what = f"{frame.node.name} is called again with other arguments"
        fix = "write a task for this call, too; then delete this line"
        yield frame.caller.module.file, line, what, fix


def list_changes_of_data(
    lookup: Lookup, loop: DataLoop, data: WrittenExpression | None
) -> Iterator[Residue]:
    """What changes a data set after its loader is made, and before the loop."""
    if data is None or not isinstance(data.node, ast.Name):
        return
    name, frame = data.node.id, data.frame
    if not lookup.list_bindings(name, frame, data.at):
        return
    for step in frame.steps[data.at + 1 :]:
        if name in list_bound(step.node):
            return
        if loop.is_outside(frame, step) and changes(step.node, name, loud=lookup.loud):
            what = f"{name} is changed after its loader is made"
            fix = "change it before that, or in the data source; then delete this line"
            yield frame.module.file, step.node.lineno, what, fix


def _list_bodies(frame: Frame, loop: DataLoop) -> Iterator[tuple[Frame, ast.AST]]:
    yield loop.frame, loop.node
    for below in loop.below:
        if below.node is not None:
            yield below, below.node


def _of_body(script: TrainingScript, frame: Frame, body: ast.AST) -> Iterator[Residue]:
    file = frame.module.file
    for node in _list_statements(getattr(body, "body", [])):
        line = node.lineno
        if isinstance(node, ast.If) and (leaving := _leaving(node)) is not None:
            what = f"{leaving} if {ast.unparse(node.test)[:60]}"
            fix = "say it by trainer.max_steps, trainer.on_nonfinite or the data; then delete this"
            yield file, line, what, fix
        elif isinstance(node, ast.For) and _walks_parameters(node):
            by_hand = any(changes(part, name) for part in node.body for name in _targets(node))
            if by_hand and ".grad" not in ast.unparse(node):
                what = "parameters are changed by hand in every step"
                yield file, line, what, "write it as an optimizer or callback of your own"
        elif isinstance(node, ast.If | ast.With | ast.For | ast.While):
            continue
        elif (_changes_gradient(node) and not script.reduces) or _hooks(node):
            yield file, line, _GRADIENTS, _GRADIENTS_FIX


def _list_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _list_statements(getattr(node, name, []))


def _leaving(node: ast.If) -> str | None:
    """``break`` or ``continue`` under a condition; None where there is none."""
    for part in node.body:
        if isinstance(part, ast.Break):
            return "the loop ends"
        if isinstance(part, ast.Continue):
            return "a batch is left out"
    return None


def _walks_parameters(node: ast.For) -> bool:
    return any(
        isinstance(part, ast.Attribute)
        and part.attr in ("parameters", "named_parameters", "param_groups")
        for part in ast.walk(node.iter)
    )


def _targets(node: ast.For) -> list[str]:
    return [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]


def _changes_gradient(node: ast.stmt) -> bool:
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and part.attr == "grad"
        ):
            empties = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            return not empties
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            inner = ast.unparse(part.func.value)
            if (inner.endswith((".grad", ".grad.data"))) and part.func.attr.endswith("_"):
                return part.func.attr not in ("zero_", "detach_")
    if isinstance(node, ast.AugAssign):
        return ".grad" in ast.unparse(node.target)
    return False


def _hooks(node: ast.stmt) -> bool:
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in ("register_hook", "register_full_backward_hook")
        for part in ast.walk(node)
    )


def list_loud_calls(
    script: TrainingScript, lookup: Lookup, loop: DataLoop, backward: Backward, made: float
) -> Iterator[Residue]:
    """Calls of functions of the project whose names say that they change nothing, and that do,
    once the optimizer is made and before all is trained."""
    frame = backward.event.frame
    assert frame is not None
    for where, _ in frame.chain():
        for step in where.steps:
            after = where is not frame and not any(o in loop.passed for o in step.within)
            if step.order <= made or (after and step.order > backward_order(backward)):
                continue
            for call in ast.walk(step.node):
                if not isinstance(call, ast.Call):
                    continue
                loud = lookup.loud.get(name_of(call).rpartition(".")[2])
                if loud is not None:
                    inner = f"{loud.file or script.path.name}:{loud.line}: {loud.words}"
                    words = f"{name_of(call)[:60]}() is called as if it changed nothing; {inner}"
                    fix = "do it in a callback, or see that it changes nothing; then delete this"
                    yield where.module.file, call.lineno, words, fix


def list_late_changes(
    lookup: Lookup, loop: DataLoop, backward: Backward, made: float
) -> Iterator[Residue]:
    """What happens to the model once its optimizer is made, before the loop or in it; ``made`` is
    the order of that."""
    frame = backward.event.frame
    assert frame is not None
    for where, _ in frame.chain():
        for i, step in enumerate(where.steps):
            call = step.node.value if isinstance(step.node, ast.Expr) else None
            if step.order <= made or not isinstance(call, ast.Call):
                continue
            if is_of_engine(call) or is_quiet(call):
                continue
            after = where is not frame and not any(o in loop.passed for o in step.within)
            if after and step.order > backward_order(backward):
                continue  # once all is trained
            roots = [root_of(part) for part in [call.func, *call.args]]
            for name in dict.fromkeys(filter(None, roots)):
                if not isinstance(lookup.find(name, where, i), Model):
                    continue
                if changes(step.node, name, of_model=True) and _does_change(
                    lookup, call, name, where, i
                ):
                    words = f"{name_of(call)[:60]}() changes the model that is being trained"
                    fix = "do it in build_model or a callback, or leave it out; then delete this"
                    yield where.module.file, step.node.lineno, words, fix


def backward_order(backward: Backward) -> float:
    """Where in a run the backward pass stands."""
    event = backward.event
    return event.frame.steps[event.step].order if event.frame is not None else 0.0


def _does_change(lookup: Lookup, call: ast.Call, name: str, frame: Frame, at: int) -> bool:
    """Whether a function of the script changes what it is given; true of those of others."""
    called = lookup.find_value(call.func.id, frame, at) if isinstance(call.func, ast.Name) else None
    if not isinstance(called, Function):
        return True
    given = match_arguments(called.node, call, bound=False)
    names = [own for own, node in given.items() if root_of(node) == name]
    return any(changes(part, own, of_model=True) for part in called.node.body for own in names)
