"""A script read by its syntax tree, never executed: statements, in the order of a run.

The tree is walked in the order in which a run would go, into functions that are called, with the
values that can be told: constants, defaults of argparse, arithmetic. A branch whose condition can
be told is taken or not; of another both are walked, and what differs between them is not known.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.calls import ScriptCalls
from torsh_trainer.translate.python.events import (
    Around,
    FunctionScope,
    Returned,
    Scope,
    ScriptReading,
    Skipped,
    place_of,
)
from torsh_trainer.translate.python.expressions import truth_of
from torsh_trainer.translate.python.frames import Frame, WalkedStep, list_bound, list_carried
from torsh_trainer.translate.python.matching import chain_of_match
from torsh_trainer.translate.python.objects import read_class, set_attribute
from torsh_trainer.translate.python.values import (
    Function,
    ImportedName,
    Kind,
    Module,
    ScriptDict,
    Thing,
    Unknown,
    combine,
    division_of,
    is_plain,
    write_expression,
)

_MOST_STEPS = 20_000
"""Beyond these a script is not followed further."""

_MOST_ROUNDS = 16
"""A longer list is walked over once, with an item that is not known."""

_OPTIONS = ("weight_decay", "momentum", "betas", "eps", "dampening")
"""Options of an optimizer that a script may change while it trains."""

FindFile = Callable[[str], "Path | None"]
"""The name of a file that the script opens -> where it is."""

FindModule = Callable[[str, str], "tuple[str, ast.Module] | None"]
"""(dotted name, file that imports it) -> the name of its file and its tree; None: not the
project's."""


class Walk(ScriptCalls):
    """Statements: what they assign, branches, loops, and modules that are imported."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        known: Mapping[str, Any],
        find_module: FindModule | None = None,
        find_file: FindFile | None = None,
    ) -> None:
        super().__init__(arguments, known)
        self.find_module, self.find_file = find_module, find_file
        self.modules: dict[str, Module] = {"": self.module}
        self.script: Path | None = None
        self.steps = 0
        self.skipped: list[Skipped] = []
        self.kinds: list[Kind] = []
        self.nested: list[Function] = []

    def read(self, tree: ast.Module, *, name: str, script: Path | None = None) -> ScriptReading:
        """What a script does; ``script`` is where it lies, which it may ask for.

        Raises:
            ConfigError: it is nested too deep.
        """
        self.script = script
        try:
            self.walk_script(tree)
        except RecursionError as error:
            raise ConfigError(f"{name} is nested too deep", fix="simplify it") from error
        is_whole = self.steps <= _MOST_STEPS
        return ScriptReading(
            tuple(self.events),
            frozenset(self.used | self.environment.used),
            is_whole,
            tuple(self.skipped),
            tuple(self.frames),
            tuple(self.environment.assumed),
            frozenset(self.again),
            frozenset(self.uncalled),
        )

    def decorate(self, dotted: str, node: ast.expr) -> None:
        """A function of the script is decorated by something imported."""

    def walk_script(self, tree: ast.Module) -> None:
        self.module.scope |= {"__name__": "__main__", **self.name_file("")}
        self.block(tree.body, self.module.scope)
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {"main"}
        for node in tree.body:  # what another file calls, or horovod.run starts
            if isinstance(node, ast.FunctionDef) and ("", node.name) not in self.visited:
                self.by_itself = node.name not in named and not node.decorator_list
                self.call_function(Function(node, self.module), [], {}, node)
        self.by_itself = True
        for kind in self.kinds:
            if not kind.made:
                self.make(kind, [], {}, kind.node)
            for method in kind.methods.values():
                if (kind.module.file, f"{kind.node.name}.{method.name}") not in self.visited:
                    self.call_function(
                        Function(method, kind.module, kind), [kind.made[-1]], {}, method
                    )

        self.by_itself = False
        for function in self.nested:  # what is handed to a function that is not read, to be called
            if (function.module.file, function.name) not in self.visited:
                self.call_function(function, [], {}, function.node)

    def block(
        self, body: Sequence[ast.stmt], scope: Scope, returned: Returned | None = None
    ) -> bool:
        """Walks statements; whether one of them surely leaves the block."""
        for statement in body:
            self.steps += 1
            if self.steps > _MOST_STEPS:
                return True
            if self.statement(statement, scope, returned or Returned()):
                return True
        return False

    def statement(self, node: ast.stmt, scope: Scope, returned: Returned) -> bool:
        """Walks a statement, and keeps it; whether it surely leaves the block."""
        if isinstance(node, ast.If | ast.Match | ast.Try | ast.While):
            return self.follow(node, scope, returned)
        step = WalkedStep(node, self.steps, self.within)
        self.frame.steps.append(step)
        ended = self.follow(node, scope, returned)
        step.values = {name: scope[name] for name in list_bound(node) if name in scope}
        return ended

    def follow(self, node: ast.stmt, scope: Scope, returned: Returned) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                self.imports(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                around = (scope, self.frame) if isinstance(scope, FunctionScope) else (None, None)
                made = scope[node.name] = Function(node, self.module, None, *around)
                if around[0] is not None or not self.module.file:
                    self.nested.append(made)
                self.walk_decorators(node, scope)
            case ast.ClassDef():
                kind = Kind(node, self.module)
                scope[node.name] = kind
                self.kinds.append(kind)
                read_class(self, kind, scope)
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                self.walk_augmented(node, scope)
            case ast.Expr():
                self.value(node.value, scope)
            case ast.If():
                return self.branch(node, scope, returned)
            case ast.Match():
                return self.statement(chain_of_match(node), scope, returned)
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loop(node, scope, returned)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, value, scope)
                with self.inside(node):
                    return self.block(node.body, scope, returned)
            case ast.Try():
                ended = self.block(node.body, scope, returned)
                with self.inside(node):
                    for handler in node.handlers:
                        self.block(handler.body, dict(scope), returned)
                self.block(node.orelse, scope, returned)
                return self.block(node.finalbody, scope, returned) or ended
            case ast.Delete():
                for target in node.targets:
                    self.delete(target, scope)
            case ast.Return():
                value = None if node.value is None else self.value(node.value, scope)
                returned.values.append(value)
                return True
            case ast.Break():
                if self.around.loops and (self.around.under or self.around.every != 1):
                    self.event("loop.break", node, {})
                return True
            case ast.Raise() | ast.Continue():
                return True
            case _:
                pass
        return False

    @contextlib.contextmanager
    def inside(self, node: ast.stmt) -> Iterator[None]:
        """Steps that are walked meanwhile stand within ``node``."""
        kept, self.within = self.within, (*self.within, node)
        try:
            yield
        finally:
            self.within = kept

    def imports(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        """What names stand for: modules of the project and what is in them, else full names."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = self.import_module(alias.name)
                first = alias.name.partition(".")[0]
                if module is not None and (alias.asname or "." not in alias.name):
                    scope[alias.asname or first] = module
                else:
                    scope[alias.asname or first] = ImportedName(
                        alias.name if alias.asname else first
                    )
            return
        base = "." * node.level + (node.module or "")
        module = self.import_module(base)
        for alias in node.names:
            dotted = f"{base}.{alias.name}" if node.module else f"{base}{alias.name}"
            inner = None
            if module is None or alias.name not in module.scope:
                inner = self.import_module(dotted)
            if alias.name == "*" and module is not None:
                scope.update(module.scope)
            elif inner is not None:
                scope[alias.asname or alias.name] = inner
            elif module is not None:
                missing = Unknown(alias.name, place_of(node))
                scope[alias.asname or alias.name] = module.scope.get(alias.name, missing)
            elif alias.name != "*":
                scope[alias.asname or alias.name] = ImportedName(dotted.lstrip("."))

    def import_module(self, dotted: str) -> Module | None:
        """A module of the script's own project, read once; None where it is another's."""
        found = None if self.find_module is None else self.find_module(dotted, self.module.file)
        if found is None:
            return None
        file, tree = found
        if file not in self.modules:
            importer, around = self.module, self.around
            names = {"__name__": dotted.lstrip("."), **self.name_file(file)}
            self.module = self.modules[file] = Module(file, names)
            self.around = Around(calls=around.calls)
            frame, within = self.frame, self.within
            self.frame, self.within = Frame(self.module), ()
            self.tops[file] = self.frame
            self.frames.append(self.frame)
            self.block(tree.body, self.module.scope)
            self.module, self.around = importer, around
            self.frame, self.within = frame, within
        return self.modules[file]

    def name_script(self) -> str:
        return "train.py" if self.script is None else str(self.script)

    def name_file(self, file: str) -> dict[str, Any]:
        """``__file__`` of a module, which is named as seen from the script's folder."""
        if self.script is None:
            return {}
        path = self.script.parent / file if file else self.script
        return {"__file__": str(path.absolute())}

    def walk_decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            value = self.value(target, scope)
            if isinstance(value, ImportedName):
                self.decorate(value.dotted, decorator)

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope[target.id] = value
            case ast.Tuple() | ast.List():
                for part, one in self.spread(target.elts, value, target):
                    self.assign(part, one, scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Thing):
                    before = owner.facts.get(target.attr)
                    settled = is_plain(before) and before is not None
                    owner.facts[target.attr] = self.sure(value, target) if settled else value
                    origins = owner.origins.setdefault(target.attr, [])
                    origins.append((self.frame, self.frame.now))
                elif isinstance(owner, Kind | ScriptDict):
                    set_attribute(self, owner, target.attr, value, target)
            case ast.Subscript():
                key = self.value(target.slice, scope)
                owner = self.value(target.value, scope)
                if key == "lr" and not isinstance(owner, dict):
                    self.event("param_group.lr", target, {"value": value})
                elif key in _OPTIONS and not isinstance(owner, dict) and self.around.loops:
                    self.event("param_group.option", target, {"name": key, "value": value})
                if isinstance(owner, ScriptDict):
                    self.put(owner, key, value, target)
                elif owner == ImportedName("os.environ") and isinstance(key, str):
                    self.environment.here[key] = self.sure(value, target)
            case _:
                pass

    def put(self, owner: ScriptDict, key: Any, value: Any, target: ast.expr) -> None:
        """``owner[key] = value``."""
        place, file = place_of(target), self.module.file
        if isinstance(key, str):
            owner.put(key, self.sure(value, target), place, file)
        else:
            owner.mark_untold(write_expression(target), place, file)

    def delete(self, target: ast.expr, scope: Scope) -> None:
        """``del target``, of a dictionary or of an object."""
        if isinstance(target, ast.Attribute):
            thing = self.value(target.value, scope)
            if isinstance(thing, Thing) and target.attr in thing.facts:
                thing.facts[target.attr] = self.sure(None, target)
        if not isinstance(target, ast.Subscript):
            return
        owner, key = self.value(target.value, scope), self.value(target.slice, scope)
        if not isinstance(owner, ScriptDict):
            return
        if isinstance(key, str) and not self.around.under:
            owner.pop(key, None)
        else:
            place, file = place_of(target), self.module.file
            owner.untold.append((f"del {write_expression(target)}", place, file))

    def spread(
        self, parts: Sequence[ast.expr], value: Any, target: ast.expr
    ) -> Iterator[tuple[ast.expr, Any]]:
        """The parts of ``a, *b, c = value`` with what each is given."""
        values = list(value) if isinstance(value, list | tuple) else None
        star = next((i for i, part in enumerate(parts) if isinstance(part, ast.Starred)), None)
        if values is not None and star is not None and len(values) >= len(parts) - 1:
            after = len(parts) - star - 1
            end = len(values) - after
            values = [*values[:star], values[star:end], *values[end:]]
        fits = values is not None and len(values) == len(parts)
        for i, part in enumerate(parts):
            inner = part.value if isinstance(part, ast.Starred) else part
            yield inner, values[i] if fits and values is not None else self.unknown(target)

    def walk_augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        more = self.value(node.value, scope)
        old = self.value(node.target, scope)
        place = place_of(node)
        text = ast.unparse(node.target)
        operation = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
        self.assign(node.target, combine(operation, old, more, Unknown(text, place)), scope)

    def branch(self, node: ast.If, scope: Scope, returned: Returned) -> bool:
        test = self.value(node.test, scope)
        truth = truth_of(test)
        if truth is not None:
            rest = tuple(node.orelse if truth else node.body)
            if rest and not isinstance(node.test, ast.Constant):
                said = (write_expression(node.test), truth, place_of(node))
                self.skipped.append(Skipped(*said, rest, self.module.file))
            return self.block(node.body if truth else node.orelse, scope, returned)
        kept = self.around
        every = self.rounds(node.test, scope)
        if every is None:
            self.around = replace(kept, under=kept.under or ast.unparse(node.test))
        else:
            self.around = replace(kept, every=every)
        one, other = copy.copy(scope), copy.copy(scope)
        with self.inside(node):
            ended = self.block(node.body, one, returned)
            ended_else = self.block(node.orelse, other, returned)
        self.around = kept
        if ended and ended_else and node.orelse:
            return True
        if ended or ended_else:
            merged = other if ended else one
        else:
            merged = self.merge(one, other, node)
        merged = dict(merged)
        scope.clear()
        scope.update(merged)
        return False

    def rounds(self, test: ast.expr, scope: Scope) -> int | None:
        """The number in ``(step + 1) % number == 0`` within a loop; None for other conditions."""
        match test:
            case ast.Compare(
                left=ast.BinOp(op=ast.Mod(), right=divisor),
                ops=[ast.Eq()],
                comparators=[ast.Constant()],
            ) if self.around.loops:
                number = self.value(divisor, scope)
                whole = isinstance(number, int) and not isinstance(number, bool)
                return number if whole and number > 0 else None
        return None

    def merge(self, one: Scope, other: Scope, node: ast.If) -> Scope:
        both: Scope = {}
        for name in {**one, **other}:
            left = one.get(name, other.get(name))
            right = other.get(name, left)
            same = left is right or (is_plain(left) and is_plain(right) and left == right)
            same = same or (isinstance(left, ImportedName | Unknown) and left == right)
            if not same:
                block = isinstance(left, ScriptDict) or isinstance(right, ScriptDict)
                under = write_expression(node.test) if block else ""
                divided = _common_division(left, right)
                left = Unknown(name, place_of(node), divided, under)
            both[name] = left
        return both

    def loop(
        self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope, returned: Returned
    ) -> None:
        kept = self.around
        self.around = replace(kept, loops=(*kept.loops, id(node)))
        if isinstance(node, ast.While):
            self.value(node.test, scope)
            self.event("loop.while", node, {"written": write_expression(node.test)})
            self.forget_carried(node, scope)
            with self.inside(node):
                self.block(node.body, scope, returned)
        else:
            over = self.value(node.iter, scope)
            self.walk_loop(over, node)
            known = _rounds_of(over, node)
            if known is None:
                self.forget_carried(node, scope)
            for item in [self.unknown(node.target)] if known is None else known:
                self.assign(node.target, item, scope)
                with self.inside(node):
                    self.block(node.body, scope, returned)
        self.around = kept
        self.block(node.orelse, scope, returned)

    def forget_carried(self, node: ast.stmt, scope: Scope) -> None:
        """What each round of a loop makes of what the last one left (``step += 1``) is not known: a
        loop is walked once."""
        for target in list_carried(node):
            old = self.value(target, scope)
            if is_plain(old):
                self.assign(target, self.unknown(target), scope)

    def walk_loop(self, over: Any, node: ast.For | ast.AsyncFor) -> None:
        written = write_expression(node.iter)
        if isinstance(over, Thing) and over.kind == "loader":
            self.event("loop.loader", node, {"loader": over, "written": written})
        elif isinstance(over, list | tuple):
            self.event("loop.items", node, {"count": len(over), "written": written})
        elif not isinstance(over, Thing) or over.kind != "range":
            self.event("loop.other", node, {"written": written})
        else:
            bounds = over.facts["of"]
            if len(bounds) == 3:
                self.event("loop.slices", node, {"step": bounds[2]})
                self.event("loop.other", node, {"written": written})
            elif bounds and all(isinstance(bound, int) for bound in bounds):
                count = bounds[-1] - (bounds[0] if len(bounds) == 2 else 0)
                self.event("loop.range", node, {"count": count, "written": written})
            elif bounds:
                self.event("loop.untold", node, {"written": written})


def _rounds_of(over: Any, node: ast.For | ast.AsyncFor) -> list[Any] | None:
    """What a loop runs over, where all of it is known, and it is short and surely runs through."""
    ends = any(isinstance(part, ast.Break | ast.Return) for part in ast.walk(node))
    if not isinstance(over, list | tuple) or len(over) > _MOST_ROUNDS or ends:
        return None
    return list(over)


def _common_division(left: Any, right: Any) -> Any:
    """By what a number was divided that two branches leave differently."""
    one, other = division_of(left), division_of(right)
    return one if one == other else Unknown("the loss", Place())
