"""Functions of a project that are called as if they changed nothing, and do train or write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_trainer.translate.own_task.effects import is_quiet, name_of, root_of
from torsh_trainer.translate.python.frames import Frame
from torsh_trainer.translate.python.training import TrainingScript

_STEPS = re.compile(r"optim|engine|^opt$")
_WRITES = ("data", "grad", "requires_grad", "weight", "bias")
_OF_PARAMETERS = ("parameters", "named_parameters", "state_dict", "param_groups")
_QUIET_WRITES = ("zero_", "detach_", "requires_grad_")
_GIVES = re.compile(
    r"^(load_state_dict|copy_to|apply_shadow|restore|swap\w*|copy_params\w*|load_\w+)$"
)


@dataclass(frozen=True)
class LoudCall:
    """A function of the project, by its name, and where in it something is trained or written."""

    name: str
    file: str
    line: int
    words: str


def list_loud(script: TrainingScript) -> dict[str, LoudCall]:
    """Functions of the project whose names say that nothing is changed, and that do it, by name;
    what they call themselves counts as well."""
    own: dict[str, list[Frame]] = {}
    for frame in script.reading.frames:
        if frame.node is not None:
            own.setdefault(frame.node.name, []).append(frame)
    found: dict[str, LoudCall] = {}
    for name, frames in own.items():
        called = ast.Call(ast.Name(name), [], [])
        if is_quiet(called):
            loud = next(filter(None, (_find_write(frame, own, {name}) for frame in frames)), None)
            if loud is not None:
                found[name] = LoudCall(name, *loud)
    return found


def _find_write(
    frame: Frame, own: dict[str, list[Frame]], seen: set[str]
) -> tuple[str, int, str] | None:
    """The file, the line and the words of the first thing that trains or writes."""
    assert frame.node is not None
    walked = _list_walked(frame.node)
    for part in ast.walk(frame.node):
        if _trains(part) or _writes(part, walked):
            words = ast.unparse(part).splitlines()[0][:60]
            return frame.module.file, getattr(part, "lineno", frame.node.lineno), words
        if isinstance(part, ast.Call):
            name = name_of(part).rpartition(".")[2]
            if name in own and name not in seen:
                seen.add(name)
                inner = next(filter(None, (_find_write(f, own, seen) for f in own[name])), None)
                if inner is not None:
                    return inner
    return None


def _list_walked(node: ast.AST) -> set[str]:
    """Names that loops over parameters give to them."""
    return {
        part.id
        for loop in _list_loops(node)
        if any(
            isinstance(inner, ast.Attribute) and inner.attr in _OF_PARAMETERS
            for inner in ast.walk(loop.iter)
        )
        for part in ast.walk(loop.target)
        if isinstance(part, ast.Name)
    }


def _list_loops(node: ast.AST) -> Iterator[ast.For]:
    return (part for part in ast.walk(node) if isinstance(part, ast.For))


def _trains(node: ast.AST) -> bool:
    """A backward pass, or a step of something that is called an optimizer or engine."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = ast.unparse(node.func.value).rpartition(".")[2]
    return node.func.attr == "backward" or (
        node.func.attr == "step" and _STEPS.search(owner) is not None
    )


def _writes(node: ast.AST, walked: set[str]) -> bool:
    """Parameters or their gradients are written: assigned, changed in place, loaded anew."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(
            (isinstance(target, ast.Attribute) and target.attr in _WRITES)
            or (isinstance(node, ast.AugAssign) and root_of(target) in walked)
            for target in targets
        )
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    if _GIVES.match(name) and "optim" not in ast.unparse(node.func.value):
        return bool(node.args)
    in_place = name.endswith("_") and not name.endswith("__") and name not in _QUIET_WRITES
    return in_place and (root_of(node.func) in walked or _names_parameter(node.func.value))


def _names_parameter(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Attribute) and part.attr in (*_WRITES, *_OF_PARAMETERS)
        for part in ast.walk(node)
    )
