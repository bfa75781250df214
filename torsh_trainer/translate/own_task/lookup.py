"""What a name of a script means at a place in its run, and which statements made it so."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from torsh_trainer.translate.own_task.importing import Importer
from torsh_trainer.translate.own_task.loud import list_loud
from torsh_trainer.translate.own_task.meanings import (
    Arguments,
    Builtin,
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
from torsh_trainer.translate.python.frames import Frame, WalkedStep, list_bound
from torsh_trainer.translate.python.training import ENGINE, TrainingScript, WrittenExpression
from torsh_trainer.translate.python.values import (
    Function,
    ImportedName,
    Kind,
    Module,
    Thing,
    Unknown,
    is_plain,
)

WRAPPERS = ("DistributedDataParallel", "DataParallel", "compile", "DDP")
"""Last words of calls around a model that leave it the same model."""

MOVES = ("cuda", "to", "cpu", "train", "eval", "half", "bfloat16", "float")


class Lookup:
    """Finds names of one script. ``models`` are the variables that hold the model, the first that
    the script trains."""

    def __init__(self, script: TrainingScript, importer: Importer) -> None:
        self.script, self.importer = script, importer
        self.loud = list_loud(script)
        self.models: set[Variable] = set()
        self.values: list[Any] = []
        for written in script.models[:1]:
            found = self.find_root(written)
            if found is not None:
                self.models.add(found)
                self.values += self.list_values(found)

    def list_values(self, variable: Variable) -> list[Any]:
        """What the walk has for a variable: the same object is the same model, whatever its name,
        as one that a function of the script returns."""
        if variable.frame is None:
            return []
        found = [step.values.get(variable.name) for step in variable.frame.steps]
        return [value for value in found if isinstance(value, Thing | Unknown)]

    def is_value_of_model(self, value: Any) -> bool:
        """Whether a value is the model that trains, or the engine around it."""
        if isinstance(value, Thing) and value.kind == ENGINE:
            return True
        return bool(self.models) and any(value is known for known in self.values)

    # -- places ----------------------------------------------------------------------------------

    def place_in(self, target: Frame, frame: Frame, at: int) -> int:
        """Up to which step of ``target`` counts what is seen from step ``at`` of ``frame``."""
        if target is frame:
            return at
        return next((i for f, i in frame.chain() if f is target), len(target.steps))

    def list_bindings(self, name: str, frame: Frame, at: int) -> list[int]:
        """The steps before ``at`` that bind a name."""
        return [i for i, step in enumerate(frame.steps[:at]) if name in list_bound(step.node)]

    def find_step(self, local: LocalVariable) -> WalkedStep | None:
        """The last step that binds a variable."""
        if local.variable.frame is None:
            return local.frame.steps[local.at]
        bound = self.list_bindings(local.variable.name, local.frame, local.at)
        return local.frame.steps[bound[-1]] if bound else None

    # -- meanings --------------------------------------------------------------------------------

    def find(self, name: str, frame: Frame, at: int) -> Meaning:
        """What ``name`` means in ``frame``, before its step number ``at``."""
        bound = self.list_bindings(name, frame, at)
        if bound:
            return self.find_bound(name, frame, at, frame.steps[bound[-1]])
        if frame.node is not None and name in _parameters(frame):
            return self.find_given(name, frame)
        if frame.node is None:
            if hasattr(builtins, name):
                return Builtin()
            return Lost(f"{name} is made where reading does not get to", "write it")
        outer = frame.closure or frame.top
        if outer is None:
            return Lost(f"{name} is made where reading does not get to", "write it")
        return self.find(name, outer, self.place_in(outer, frame, at))

    def find_bound(self, name: str, frame: Frame, at: int, step: WalkedStep) -> Meaning:
        variable = Variable(id(frame), name, frame)
        value = step.values.get(name)
        if self.is_value_of_model(value):
            return Model()
        if variable in self.models or self.is_model(step, frame):
            return Model()
        if isinstance(step.node, ast.Import | ast.ImportFrom) and isinstance(value, ImportedName):
            bound = self.list_bindings(name, frame, at)
            steps = tuple(frame.steps[i] for i in bound)
            return ImportBinding(tuple(s for s in steps if isinstance(s.node, _IMPORTS)), name)
        if isinstance(value, Function | Kind | Module):
            return self.find_own(name, value)
        if isinstance(value, Thing) and value.kind == "arguments":
            return Arguments(value)
        if isinstance(value, Unknown) and isinstance(step.node, ast.Import | ast.ImportFrom):
            return Lost(f"what {name} is cannot be told: its module was not read", "import it")
        heads = isinstance(step.node, ast.For | ast.AsyncFor)
        if not heads and not step.within and name in step.values and is_value(value):
            return ConstantValue(value)
        if frame.node is None and self.importer.keeps(frame.module.file, step.node):
            spelled = frame.module.scope.get("__name__", "")
            self.importer.spelled.setdefault(frame.module.file, spelled)
            return ProjectName(frame.module.file, name)
        return LocalVariable(variable, frame, at)

    def find_own(self, name: str, value: Function | Kind | Module) -> Meaning:
        """A function, class or module of the user's project."""
        module = value if isinstance(value, Module) else value.module
        self.importer.spelled.setdefault(module.file, module.scope.get("__name__", ""))
        if isinstance(value, Module):
            return ProjectName(value.file, "")
        node, file = value.node, module.file
        if not self.importer.has(file, node):
            fix = f"move {node.name} to the top level of its module, and import it"
            return Lost(f"{node.name} (line {node.lineno}) is defined within a function", fix)
        return ProjectName(file, node.name)

    def find_given(self, name: str, frame: Frame) -> Meaning:
        """A parameter by what the call gave."""
        assert frame.node is not None
        value = frame.arguments.get(name)
        if self.is_value_of_model(value):
            return Model()
        if isinstance(value, Thing) and value.kind == "arguments":
            return Arguments(value)
        if is_value(value) and name in frame.arguments:
            return ConstantValue(value)
        node = frame.given.get(name)
        if node is not None and frame.caller is not None:
            if isinstance(node, ast.Name):
                return self.find(node.id, frame.caller, frame.called_at)
            written = WrittenExpression(node, frame.caller, frame.called_at)
            root = self.find_root(written)
            if root is not None and root in self.models:
                return Model()
            return GivenParameter(Variable(id(frame), name, frame), written)
        fix = f"call {frame.node.name} in the script, or write the value"
        return Lost(f"nothing in the script says what {name} of {frame.node.name} is given", fix)

    def find_attribute(self, node: ast.Attribute, frame: Frame, at: int) -> Meaning | None:
        """``self.x`` of an object of the script, ``args.x``, ``engine.module``; None for others."""
        if not isinstance(node.value, ast.Name):
            return None
        owner = self.find_value(node.value.id, frame, at)
        if not isinstance(owner, Thing):
            return None
        if owner.kind == "arguments":
            if node.attr not in owner.facts and node.attr in self.script.values:
                return ConstantValue(self.script.values[node.attr])
            value = owner.facts.get(node.attr)
            if node.attr in owner.facts and is_plain(value):
                return ConstantValue(value)
            made = self.find_argument(owner, node.attr)
            if made is not None:
                return GivenParameter(Variable(id(owner), node.attr), made)
            why = f"what {ast.unparse(node)} is cannot be told"
            return Lost(why, "state it, as your launch line does")
        if not is_self(node.value.id, owner, frame):
            return None
        value = owner.facts.get(node.attr)
        if self.is_value_of_model(value):
            return Model()
        if Variable(id(owner), node.attr) in self.models:
            return Model()
        if isinstance(value, Thing) and value.kind == "arguments":
            return Arguments(value)
        if is_value(value) and node.attr in owner.facts:
            return ConstantValue(value)
        origins = owner.origins.get(node.attr, [])
        if not origins:
            return None
        made, step = origins[-1]
        return LocalVariable(Variable(id(owner), node.attr), made, step)

    def find_argument(self, arguments: Thing, name: str) -> WrittenExpression | None:
        """The expression of an argument that is no constant: what the script assigns to it, or its
        default; None where it has to be given."""
        origins = arguments.origins.get(name, [])
        if origins:
            frame, at = origins[-1]
            node = frame.steps[at].node
            plain = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Tuple)
            return WrittenExpression(node.value, frame, at) if plain else None
        value = arguments.facts.get(name)
        top = self.script.reading.frames[0] if self.script.reading.frames else None
        if not isinstance(value, Unknown) or not isinstance(value.of, ast.expr) or top is None:
            return None
        steps = [i for i, step in enumerate(top.steps) if not step.within]
        return WrittenExpression(value.of, top, steps[-1]) if steps else None

    def find_value(self, name: str, frame: Frame, at: int) -> Any:
        """The value that the walk has for a name; None where it has none."""
        bound = self.list_bindings(name, frame, at)
        if bound:
            return frame.steps[bound[-1]].values.get(name)
        if name in frame.arguments:
            return frame.arguments[name]
        outer = frame.closure or frame.top
        if frame.node is None or outer is None:
            return None
        return self.find_value(name, outer, self.place_in(outer, frame, at))

    def names_of(self, variable: Variable, frame: Frame) -> tuple[frozenset[str], str]:
        """What the object of an attribute is called in a frame, and the attribute."""
        here = {name for name, value in frame.arguments.items() if id(value) == variable.owner}
        for step in frame.steps:
            here |= {name for name, value in step.values.items() if id(value) == variable.owner}
        return frozenset(here), variable.name

    # -- the model -------------------------------------------------------------------------------

    def find_root(self, written: WrittenExpression) -> Variable | None:
        """The variable that an expression is: through moves, wrappers and parameters."""
        node = strip_moves(written.node)
        frame, at = written.frame, written.at
        if isinstance(node, ast.Name):
            if self.list_bindings(node.id, frame, at):
                return Variable(id(frame), node.id, frame)
            if frame.node is not None and node.id in _parameters(frame):
                given = frame.given.get(node.id)
                if given is None or frame.caller is None:
                    return None
                return self.find_root(WrittenExpression(given, frame.caller, frame.called_at))
            outer = frame.closure or frame.top
            if frame.node is None or outer is None:
                return None
            return self.find_root(WrittenExpression(node, outer, self.place_in(outer, frame, at)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.find_value(node.value.id, frame, at)
            if is_self(node.value.id, owner, frame):
                return Variable(id(owner), node.attr)
        return None

    def is_model(self, step: WalkedStep, frame: Frame) -> bool:
        """A step that gives another name to the model."""
        if not self.models or not isinstance(step.node, ast.Assign):
            return False
        node = strip_moves(step.node.value)
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        try:
            at = frame.steps.index(step)
        except ValueError:
            return False
        root = self.find_root(WrittenExpression(node, frame, at))
        return root is not None and root in self.models


_IMPORTS = (ast.Import, ast.ImportFrom)


def is_value(value: Any) -> bool:
    """A constant that nothing can have changed since: no list, no dictionary."""
    return is_plain(value) and not isinstance(value, list | dict) and value is not None


def is_self(name: str, owner: Any, frame: Frame) -> bool:
    """Whether a name is the first parameter of a method of the script, and its object known."""
    if not isinstance(owner, Thing) or owner.kind != "object" or frame.node is None:
        return False
    return list(_parameters(frame))[:1] == [name]


def strip_moves(node: ast.expr) -> ast.expr:
    """An expression without what leaves a model the same: devices, modes, wrappers."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr == "module":
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if last in WRAPPERS and node.args:
                node = node.args[0]
            elif last in MOVES and isinstance(node.func, ast.Attribute):
                node = node.func.value
            else:
                return node
        else:
            return node


def _parameters(frame: Frame) -> Sequence[str]:
    assert frame.node is not None
    args = frame.node.args
    return [part.arg for part in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def list_references(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Names and ``name.attribute`` that an expression or statement reads, each once for each place;
    the names of comprehensions and lambdas are their own."""
    own = {name for part in ast.walk(node) for name in _list_own(part)}
    parts = list(_walk_unmoved(node))
    inner = {
        id(part.value)
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    }
    for part in parts:
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            if part.value.id not in own:
                yield part
        elif (
            isinstance(part, ast.Name)
            and isinstance(part.ctx, ast.Load)
            and id(part) not in inner
            and part.id not in own
        ):
            yield part


def _walk_unmoved(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in it but devices that something is moved to."""
    yield node
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Attribute) and func.attr in ("to", "cuda"):
        yield from _walk_unmoved(func)
        return
    for part in ast.iter_child_nodes(node):
        if not (isinstance(part, ast.keyword) and part.arg == "device"):
            yield from _walk_unmoved(part)


def _list_own(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.comprehension):
        yield from (p.id for p in ast.walk(node.target) if isinstance(p, ast.Name))
    elif isinstance(node, ast.Lambda):
        args = node.args
        yield from (p.arg for p in (*args.posonlyargs, *args.args, *args.kwonlyargs))
        yield from (p.arg for p in (args.vararg, args.kwarg) if p is not None)
