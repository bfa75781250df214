"""The user's own statements and expressions, made to stand in a file of their own.

Names become imports, constants, attributes of the task or variables; what belongs to the engine or
the device is left out. What cannot be carried becomes a call of ``fill_in``, which names it.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torsh_trainer.translate.own_task.detaching import Detaching
from torsh_trainer.translate.own_task.effects import is_transparent
from torsh_trainer.translate.own_task.lookup import is_self
from torsh_trainer.translate.own_task.meanings import (
    Arguments,
    ConstantValue,
    GivenParameter,
    ImportBinding,
    LocalVariable,
    Lost,
    Meaning,
    Model,
    ProjectName,
    Variable,
)
from torsh_trainer.translate.own_task.own_file import ARGUMENTS
from torsh_trainer.translate.own_task.slicing import CarriedStatement
from torsh_trainer.translate.python.frames import Frame
from torsh_trainer.translate.python.values import is_plain

_DEVICES = re.compile(r"^torch\.device\(|^get_accelerator\(|current_device\(\)|device_name\(")
"""What makes a device."""


class Closer(Detaching, ast.NodeTransformer):
    """Transforms what is seen from step ``at`` of ``frame``.

    ``outer`` are variables with the expressions that stand for them (``self.criterion``);
    ``model`` is the name of the model, ``device`` an expression for its device; empty where there
    is none: then ``device=`` is left out, and the trainer moves what is made. ``slices`` are
    variables by which a batch is taken apart, which the trainer does. ``lost`` says of a variable
    why it cannot be carried.
    """

    def close_expression(self, node: ast.expr, frame: Frame, at: int) -> ast.expr:
        """An expression, as it can stand in the file."""
        self.frame, self.at = frame, at
        closed = self.visit(copy.deepcopy(node))
        return ast.fix_missing_locations(closed)

    def close_pieces(self, pieces: Iterable[CarriedStatement]) -> list[ast.stmt]:
        """Statements, as they can stand in the file; those of which nothing is left are gone."""
        found: list[ast.stmt] = []
        for piece in pieces:
            self.frame, self.at = piece.frame, piece.at
            node = copy.deepcopy(piece.node)
            if piece.sets is not None and isinstance(node, ast.Assign):
                closed: Any = ast.Assign(
                    [ast.Name(self.names.name_of(piece.sets), ast.Store())], self.visit(node.value)
                )
            else:
                closed = self.visit(node)
            made = closed if isinstance(closed, list) else [closed]
            found += [ast.fix_missing_locations(one) for one in made if one is not None]
        return found

    # -- names -----------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if any(node.id in own for own in self.own):
            return node
        if not isinstance(node.ctx, ast.Load):
            variable = Variable(id(self.frame), node.id, self.frame)
            if variable in self.lookup.models:
                return ast.Name(self.model or "model", node.ctx)
            return ast.Name(self.names.name_of(variable), node.ctx)
        return self.write(self.lookup.find(node.id, self.frame, self.at), node)

    def write(self, meaning: Meaning, node: ast.expr) -> ast.expr:
        """What stands for a name that is read."""
        file = self.frame.module.file
        match meaning:
            case ConstantValue(value):
                return _literal(value)
            case Model():
                if self.model:
                    return ast.Name(self.model, ast.Load())
                fix = "build it from the configuration, or in build_model"
                return self.file.fill_in(file, node, "this needs the model", fix)
            case ImportBinding():
                return self.write_import(meaning, node)
            case ProjectName():
                return self.write_own(meaning, node)
            case Arguments(thing):
                self.take_arguments(thing.facts, node)
                return ast.Name(ARGUMENTS, ast.Load())
            case GivenParameter(variable, written) if variable.frame is None:
                kept = self.frame, self.at
                self.frame, self.at = written.frame, written.at
                closed: ast.expr = self.visit(copy.deepcopy(written.node))
                self.frame, self.at = kept
                return closed
            case LocalVariable(variable) | GivenParameter(variable):
                if self.device and isinstance(meaning, LocalVariable) and self.is_device(meaning):
                    return ast.parse(self.device, mode="eval").body
                if variable in self.outer:
                    return ast.parse(self.outer[variable], mode="eval").body
                why = self.lost(variable)
                if why is not None:
                    return self.file.fill_in(file, node, why.why, why.fix)
                return ast.Name(self.names.name_of(variable), ast.Load())
            case Lost(why, fix):
                return self.file.fill_in(file, node, why, fix)
            case _:
                return node

    def is_device(self, meaning: LocalVariable) -> bool:
        """Whether the script makes a device of it."""
        step = self.lookup.find_step(meaning)
        value = getattr(step.node, "value", None) if step is not None else None
        return isinstance(value, ast.expr) and _DEVICES.search(ast.unparse(value)) is not None

    def write_import(self, meaning: ImportBinding, node: ast.expr) -> ast.expr:
        name = meaning.name
        for step in meaning.steps:
            statement = step.node
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        line = f"import {alias.name}" + _as(alias)
                        root = alias.name if alias.asname else alias.name.partition(".")[0]
                        name = self.file.take_import(line, meaning.name, root)
            elif isinstance(statement, ast.ImportFrom):
                alias = next(a for a in statement.names if (a.asname or a.name) == meaning.name)
                if statement.level:
                    why = f"{meaning.name} comes from a module that was not read"
                    return self.file.fill_in(self.frame.module.file, node, why, "import it here")
                line = f"from {statement.module} import {alias.name}" + _as(alias)
                name = self.file.take_import(line, meaning.name, f"{statement.module}.{alias.name}")
        return ast.Name(name, ast.Load())

    def write_own(self, meaning: ProjectName, node: ast.expr) -> ast.expr:
        """An import of something of the user's, where its module can be imported."""
        importer = self.file.importer
        wrong = importer.explain(meaning.file)
        what = meaning.attribute or meaning.file
        if wrong is not None:
            why = f"{what} cannot be imported: {wrong.what}"
            return self.file.fill_in(meaning.file or self.file.script, node, why, wrong.fix)
        module = importer.import_name(meaning.file)
        if not meaning.attribute:
            package, _, last = module.rpartition(".")
            line = f"from {package} import {last}" if package else f"import {module}"
            return ast.Name(self.file.take_import(line, last, module), ast.Load())
        line = f"from {module} import {meaning.attribute}"
        root = f"{module}.{meaning.attribute}"
        return ast.Name(self.file.take_import(line, meaning.attribute, root), ast.Load())

    def take_arguments(self, facts: Mapping[str, Any], node: ast.expr) -> None:
        known = {name: value for name, value in facts.items() if is_plain(value)}
        self.file.arguments = {**(self.file.arguments or {}), **known}
        for name in facts:
            if name not in known:
                self.file.unknown[name] = node.lineno

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and not any(node.value.id in own for own in self.own):
            if isinstance(node.ctx, ast.Load):
                meaning = self.lookup.find_attribute(node, self.frame, self.at)
                if meaning is not None:
                    return self.write(meaning, node)
                of_engine = self.write_of_engine(node)
                if of_engine is not None:
                    return of_engine
            owner = self.lookup.find_value(node.value.id, self.frame, self.at)
            if not isinstance(node.ctx, ast.Load) and is_self(node.value.id, owner, self.frame):
                variable = Variable(id(owner), node.attr)
                if variable in self.lookup.models:
                    return ast.Name("model", node.ctx)
                return ast.Name(self.names.name_of(variable), node.ctx)
        closed = self.generic_visit(node)
        owner_is_model = isinstance(node.value, ast.Name) and node.value.id == self.model
        return node.value if node.attr == "module" and self.model and owner_is_model else closed

    # -- scopes of their own ---------------------------------------------------------------------

    def visit_comprehension_of(self, node: Any) -> ast.AST:
        names: set[str] = set()
        for part in node.generators:
            names |= {p.id for p in ast.walk(part.target) if isinstance(p, ast.Name)}
        node.generators[0].iter = self.visit(node.generators[0].iter)
        self.own.append(names)
        for i, part in enumerate(node.generators):
            if i:
                part.iter = self.visit(part.iter)
            part.ifs = [self.visit(test) for test in part.ifs]
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                setattr(node, name, self.visit(getattr(node, name)))
        self.own.pop()
        return _same_mapping(node) or node

    visit_ListComp = visit_comprehension_of  # noqa: N815
    visit_SetComp = visit_comprehension_of  # noqa: N815
    visit_DictComp = visit_comprehension_of  # noqa: N815
    visit_GeneratorExp = visit_comprehension_of  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        args = node.args
        every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
        args.defaults = [self.visit(default) for default in args.defaults]
        self.own.append({part.arg for part in every if part is not None})
        node.body = self.visit(node.body)
        self.own.pop()
        return node

    # -- statements ------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        node.value = self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        value = ast.unparse(node.value)
        node.targets = [t for t in node.targets if ast.unparse(t) != value]
        return node if node.targets else None

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        plain = ast.copy_location(ast.Assign([node.target], node.value), node)
        return self.visit_Assign(plain)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        closed = self.visit(node.value)
        if isinstance(closed, ast.Name | ast.Attribute | ast.Constant):
            return None
        node.value = closed
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        body, orelse = self.visit_body(node.body), self.visit_body(node.orelse)
        if not body and not orelse:
            return None
        node.test = self.visit(node.test)
        node.body, node.orelse = body or [ast.Pass()], orelse
        return node

    def visit_For(self, node: ast.For) -> ast.AST | None:
        node.iter = self.visit(node.iter)
        node.target = self.visit(node.target)
        node.body, node.orelse = self.visit_body(node.body), self.visit_body(node.orelse)
        return node if node.body else None

    def visit_With(self, node: ast.With) -> Any:
        body = self.visit_body(node.body)
        if is_transparent(node) or not body:
            return body or None
        node.items = [self.visit(item) for item in node.items]
        node.body = body
        return node

    def visit_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            closed = self.visit(statement)
            if closed is not None:
                found += closed if isinstance(closed, list) else [closed]
        return found


def _same_mapping(node: ast.AST) -> ast.expr | None:
    """``batch`` for ``{k: v for k, v in batch.items()}``, of which only moves were left out."""
    if not isinstance(node, ast.DictComp) or len(node.generators) != 1:
        return None
    over = node.generators[0]
    same = f"({ast.unparse(node.key)}, {ast.unparse(node.value)})" == ast.unparse(over.target)
    if not same or over.ifs or not isinstance(over.iter, ast.Call):
        return None
    func = over.iter.func
    return func.value if isinstance(func, ast.Attribute) and func.attr == "items" else None


def _literal(value: Any) -> ast.expr:
    text = repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        text = f"float({text!r})"
    return ast.parse(text, mode="eval").body


def _as(alias: ast.alias) -> str:
    return f" as {alias.asname}" if alias.asname else ""
