"""The statements of a step, split where the forward ends: a task's ``forward`` and ``loss``.

Works on statements that are closed already: the model is called ``model``, the batch ``batch``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torsh_trainer.translate.own_task.effects import root_of

MODEL, OUTPUTS = "model", "outputs"

_REPEATED = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "float",
        "long",
        "int",
        "double",
        "transpose",
        "permute",
        "contiguous",
        "detach",
        "expand",
        "size",
        "dim",
        "items",
        "keys",
        "values",
        "t",
        "type",
        "type_as",
        "to",
        "len",
        "range",
        "dict",
        "list",
        "tuple",
    ]
)
"""Calls that a batch may go through twice: they draw nothing and change nothing."""


@dataclass
class Split:
    """Bodies of ``forward(model, batch)`` and ``loss(outputs, batch)``."""

    forward: list[ast.stmt] = field(default_factory=list)
    loss: list[ast.stmt] = field(default_factory=list)


def split(statements: Sequence[ast.stmt], loss: ast.expr, unpack: ast.stmt | None) -> Split | None:
    """The two bodies of ``statements`` and the ``loss`` after them; None where nothing calls the
    model. ``unpack`` gives parts of the batch their names."""
    end = ast.Return(loss)
    every = [*statements, end]
    calls = [call for node in every for call in list_model_calls(node)]
    if not calls and not any(_mentions(node, MODEL) for node in every):
        return None
    simple = _split_at_call(every, calls[0], unpack) if len(calls) == 1 else None
    return simple or _split_after(every, unpack)


def list_model_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of the model, or of something that is given it; none within another."""
    if isinstance(node, ast.Call):
        handed = [*node.args, *(k.value for k in node.keywords)]
        if _is_of_model(node.func) or any(_is_of_model(part) for part in handed):
            yield node
            return
    for part in ast.iter_child_nodes(node):
        yield from list_model_calls(part)


def _is_of_model(node: ast.expr) -> bool:
    """``model`` or something of it, such as a method."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == MODEL


def _split_at_call(
    every: Sequence[ast.stmt], call: ast.Call, unpack: ast.stmt | None
) -> Split | None:
    """``forward`` is the call alone, with what makes its arguments; None where that would do
    something twice."""
    at = next(i for i, node in enumerate(every) if any(p is call for p in ast.walk(node)))
    if not isinstance(every[at], ast.Assign | ast.Return) or not _is_of_model(call.func):
        return None
    if sum(_mentions(node, MODEL) for node in every) > 1:
        return None
    before = prune(every[:at], _loads(call))
    after = [copy.deepcopy(node) for node in every]
    replaced = _Replacing(ast.unparse(call))
    after[at] = replaced.visit(after[at])
    if replaced.count != 1:
        return None
    last = after[-1]
    kept = prune(after[:-1], _loads(last))
    again = {ast.unparse(node) for node in before} & {ast.unparse(node) for node in kept}
    if any(not _is_repeatable(node) for node in before if ast.unparse(node) in again):
        return None
    early = [node for node in kept if node in after[:at]]
    if any(OUTPUTS in _stores(node) | _loads(node) for node in early):
        return None
    kept = [node for node in kept if not _is_noop(node)]
    forward = [*_unpacking(unpack, [*before, call]), *before, ast.Return(call)]
    loss = [*_unpacking(unpack, [*kept, last]), *kept, last]
    return Split(forward, loss)


def _split_after(every: Sequence[ast.stmt], unpack: ast.stmt | None) -> Split:
    """``forward`` is all up to the last statement with the model, and hands on what is used
    after it."""
    at = max(i for i, node in enumerate(every) if _mentions(node, MODEL))
    if at == len(every) - 1:
        end = ast.Return(ast.Name(OUTPUTS, ast.Load()))
        return Split([*_unpacking(unpack, every), *every], [end])
    first, rest = list(every[: at + 1]), list(every[at + 1 :])
    made = {name for node in first for name in _stores(node)}
    used = [name for name in _list_live(rest) if name in made]
    handed: ast.expr = ast.Tuple([ast.Name(name, ast.Load()) for name in used], ast.Load())
    target: ast.expr = ast.Tuple([ast.Name(name, ast.Store()) for name in used], ast.Store())
    if len(used) == 1:
        handed, target = ast.Name(used[0], ast.Load()), ast.Name(used[0], ast.Store())
    taken: ast.stmt = ast.Assign([target], ast.Name(OUTPUTS, ast.Load()))
    takes = [] if used == [OUTPUTS] else [taken]
    return Split(
        [*_unpacking(unpack, first), *first, ast.Return(handed)],
        [*_unpacking(unpack, rest), *takes, *rest],
    )


def prune(statements: Sequence[ast.stmt], needed: set[str]) -> list[ast.stmt]:
    """Those that make or change what is needed, in their order."""
    wanted, kept = set(needed), list[ast.stmt]()
    for node in reversed(statements):
        if _stores(node) & wanted or _changes(node) & wanted:
            kept.append(node)
            wanted |= _loads(node)
    return kept[::-1]


def _unpacking(unpack: ast.stmt | None, body: Sequence[ast.AST]) -> list[ast.stmt]:
    """The statement that names parts of the batch, where the body uses one."""
    if unpack is None or not _stores(unpack) & {name for node in body for name in _loads(node)}:
        return []
    return [unpack]


class _Replacing(ast.NodeTransformer):
    """Puts ``outputs`` in the place of a call."""

    def __init__(self, text: str) -> None:
        self.text, self.count = text, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node) == self.text:
            self.count += 1
            return ast.Name(OUTPUTS, ast.Load())
        return self.generic_visit(node)


def _is_noop(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and ast.unparse(node.targets[0]) == ast.unparse(node.value)
    )


def _is_repeatable(node: ast.stmt) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            func = part.func
            name = func.attr if isinstance(func, ast.Attribute) else root_of(func)
            if name not in _REPEATED:
                return False
        if isinstance(part, ast.AugAssign | ast.Delete):
            return False
    return True


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _loads(node: ast.AST) -> set[str]:
    found = {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.AugAssign):
            found.add(root_of(part.target))
    return found


def _stores(node: ast.AST) -> set[str]:
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _changes(node: ast.stmt) -> set[str]:
    """Names of what a statement changes without binding it."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            found.add(root_of(part))
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            found.add(root_of(part.value.func))
            found |= {root_of(arg) for arg in part.value.args}
    return found


def _list_live(statements: Sequence[ast.stmt]) -> list[str]:
    """Names that statements read before they make them, in the order of their names."""
    found: set[str] = set()
    made: set[str] = set()
    for node in statements:
        found |= _loads(node) - made
        if isinstance(node, ast.Assign):
            made |= _stores(node)
    return sorted(found)


def inline_batch(statements: Sequence[ast.stmt], loss: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
    """The same without another name for the batch, as the parameter of a function is."""
    for node in statements:
        if not isinstance(node, ast.Assign) or ast.unparse(node.value) != "batch":
            continue
        name = ast.unparse(node.targets[0])
        again = sum(name in _stores(other) for other in statements) + sum(
            "batch" in _stores(other) for other in statements
        )
        if isinstance(node.targets[0], ast.Name) and again == 1:
            renaming = _Renaming(name)
            kept = [renaming.visit(other) for other in statements if other is not node]
            return kept, renaming.visit(loss)
    return list(statements), loss


class _Renaming(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("batch", node.ctx) if node.id == self.name else node


class _Undividing:
    def __init__(self, stated: float) -> None:
        self.divided, self.stated, self.unknown = 1.0, stated, 0

    def take(self, node: ast.expr) -> bool:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            self.divided *= value
        else:  # one number that cannot be told is the one that is known of all
            self.unknown += 1
            self.divided = self.stated if self.unknown == 1 and self.divided == 1 else 0.0
        return True


def undivide(
    statements: Sequence[ast.stmt], loss: ast.expr, stated: float
) -> tuple[list[ast.stmt], ast.expr, float]:
    """The same without divisions of the loss by numbers, and their product, which is to be
    ``stated``."""
    taking, kept = _Undividing(stated), list[ast.stmt]()
    wanted = _loads(loss)
    for node in statements:
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Div(), value=by) if name in wanted:
                if taking.take(by):
                    continue
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="div_"), args=[by])
            ) if name in wanted:
                if taking.take(by):
                    continue
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.BinOp(left=left, op=ast.Div(), right=by)
            ) if name in wanted:
                if taking.take(by):
                    node = ast.copy_location(ast.Assign(node.targets, left), node)
            case _:
                pass
        if not _is_noop(node):
            kept.append(node)
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div) and taking.take(loss.right):
        loss = loss.left
    return kept, loss, taking.divided
