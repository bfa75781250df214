"""A training script read by its syntax tree, never executed: what of it touches Horovod.

The tree is walked in the order in which a run would go, into functions that are called, with the
values that can be told: constants, defaults of argparse, arithmetic. A branch whose condition can
be told is taken or not; of another both are walked, and what differs between them is not known.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.horovod.values import (
    FUNCTIONS,
    Function,
    ImportedName,
    Kind,
    Thing,
    Unknown,
    combine,
    compare,
    compute,
    is_number,
    is_plain,
    times,
)
from torsh_trainer.translate.nodes import Place

_DEEPEST_CALLS = 12
_MOST_STEPS = 40_000
"""Beyond these a script is not followed further."""

HOROVOD = "horovod.torch"
_OTHERS = ("horovod.tensorflow", "horovod.keras", "horovod.mxnet", "horovod._keras")


@dataclass(frozen=True)
class Event:
    """A call that matters. ``loops`` are the loops around it, outermost first, ``under`` the
    condition around it that cannot be told; ``every``: it is done in every so many-th round."""

    what: str
    place: Place
    node: ast.AST
    facts: Mapping[str, Any]
    loops: tuple[int, ...] = ()
    under: str = ""
    every: int = 1


@dataclass(frozen=True)
class ScriptReading:
    """What a script does, in the order of a run; ``used`` are the settings that were asked for."""

    events: tuple[Event, ...]
    used: frozenset[str]

    def all(self, what: str) -> list[Event]:
        """The events of one sort."""
        return [event for event in self.events if event.what == what]


def parse(text: str, *, name: str) -> ast.Module:
    """The syntax tree.

    Raises:
        ConfigError: it is not Python, or not Horovod for torch.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        column = getattr(error, "offset", None) or 1
        words = getattr(error, "msg", None) or str(error)
        raise ConfigError(
            f"{name}:{line}:{column}: this Python cannot parse it: {words}",
            fix="correct it there; a script of Python 2 has to be converted first",
            line=line,
            column=column,
        ) from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{name} is nested too deep", fix="simplify it") from error
    imported = set(_find_imports(tree))
    if not any(module.startswith(HOROVOD) for module in imported):
        other = next((m for m in sorted(imported) if m.startswith(_OTHERS)), None)
        what = f"imports {other}" if other else f"does not import {HOROVOD}"
        raise ConfigError(
            f"{name} {what}", fix="only scripts with horovod.torch are translated: they train torch"
        )
    return tree


def _find_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read(
    tree: ast.Module,
    *,
    size: int,
    arguments: Mapping[str, Any],
    known: Mapping[str, Any],
    name: str,
) -> ScriptReading:
    """What the script does on ``size`` processes.

    ``arguments`` are those of its command line, by destination or option; ``known`` are values of
    expressions, by their text.

    Raises:
        ConfigError: it is nested too deep.
    """
    walk = _Walk(size, arguments, known)
    try:
        walk.module(tree)
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deep", fix="simplify it") from error
    return ScriptReading(tuple(walk.events), frozenset(walk.used))


Scope = dict[str, Any]


@dataclass
class _Around:
    """Where the walk is: the loops and conditions around it."""

    loops: tuple[int, ...] = ()
    under: str = ""
    every: int = 1
    calls: tuple[str, ...] = ()


@dataclass
class _Returned:
    values: list[Any] = field(default_factory=list)


class _Walk:
    def __init__(self, size: int, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        self.size, self.arguments, self.known = size, arguments, known
        self.events: list[Event] = []
        self.used: set[str] = set()
        self.globals: Scope = {}
        self.around = _Around()
        self.steps = 0
        self.visited: set[str] = set()
        self.seen: set[tuple[str, int, int]] = set()
        self.kinds: list[Kind] = []

    # -- statements ------------------------------------------------------------------------------

    def module(self, tree: ast.Module) -> None:
        self.globals["__name__"] = "__main__"
        self.block(tree.body, self.globals)
        for node in tree.body:  # what another file calls, or horovod.run starts
            if isinstance(node, ast.FunctionDef) and node.name not in self.visited:
                self.call_function(Function(node), [], {}, node)
        for kind in self.kinds:
            if not kind.made:
                self.make(kind, [], {}, kind.node)
            for method in kind.methods.values():
                if f"{kind.node.name}.{method.name}" not in self.visited:
                    self.call_function(Function(method, kind), [kind.made[-1]], {}, method)

    def block(
        self, body: Sequence[ast.stmt], scope: Scope, returned: _Returned | None = None
    ) -> bool:
        """Walks statements; whether one of them surely leaves the block."""
        for statement in body:
            self.steps += 1
            if self.steps > _MOST_STEPS:
                return True
            if self.statement(statement, scope, returned or _Returned()):
                return True
        return False

    def statement(self, node: ast.stmt, scope: Scope, returned: _Returned) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                self.imports(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope[node.name] = Function(node)
                self.walk_decorators(node, scope)
            case ast.ClassDef():
                kind = Kind(node)
                scope[node.name] = kind
                self.kinds.append(kind)
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
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loop(node, scope, returned)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, value, scope)
                return self.block(node.body, scope, returned)
            case ast.Try():
                ended = self.block(node.body, scope, returned)
                for handler in node.handlers:
                    self.block(handler.body, dict(scope), returned)
                self.block(node.orelse, scope, returned)
                return self.block(node.finalbody, scope, returned) or ended
            case ast.Return():
                value = None if node.value is None else self.value(node.value, scope)
                returned.values.append(value)
                return True
            case ast.Raise() | ast.Break() | ast.Continue():
                return True
            case _:
                pass
        return False

    def imports(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                first = alias.name.partition(".")[0]
                full = alias.name if alias.asname else first
                scope[alias.asname or first] = ImportedName(full)
            elif node.module:
                scope[alias.asname or alias.name] = ImportedName(f"{node.module}.{alias.name}")

    def walk_decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            value = self.value(target, scope)
            if isinstance(value, ImportedName) and value.dotted.startswith(HOROVOD):
                self.event(value.dotted.removeprefix(HOROVOD + "."), decorator, {})

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope[target.id] = value
            case ast.Tuple() | ast.List():
                parts = list(value) if isinstance(value, list | tuple) else []
                for i, part in enumerate(target.elts):
                    fits = len(parts) == len(target.elts) and not isinstance(part, ast.Starred)
                    inner = part.value if isinstance(part, ast.Starred) else part
                    self.assign(inner, parts[i] if fits else self.unknown(target), scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Thing):
                    owner.facts[target.attr] = value
            case ast.Subscript():
                key = self.value(target.slice, scope)
                owner = self.value(target.value, scope)
                if key == "lr" and not isinstance(owner, dict):
                    self.event("param_group.lr", target, {"value": value})
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = value
            case _:
                pass

    def walk_augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        more = self.value(node.value, scope)
        old = self.value(node.target, scope)
        place = _place(node)
        text = ast.unparse(node.target)
        operation = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
        self.assign(node.target, combine(operation, old, more, Unknown(text, place)), scope)

    def branch(self, node: ast.If, scope: Scope, returned: _Returned) -> bool:
        test = self.value(node.test, scope)
        truth = _truth(test)
        if truth is not None:
            return self.block(node.body if truth else node.orelse, scope, returned)
        kept = self.around
        every = self.rounds(node.test, scope)
        if every is None:
            self.around = replace(kept, under=kept.under or ast.unparse(node.test))
        else:
            self.around = replace(kept, every=every)
        one, other = copy.copy(scope), copy.copy(scope)
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
            both[name] = left if same else Unknown(name, _place(node), _division(left, right))
        return both

    def loop(
        self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope, returned: _Returned
    ) -> None:
        kept = self.around
        self.around = replace(kept, loops=(*kept.loops, id(node)))
        if isinstance(node, ast.While):
            self.value(node.test, scope)
        else:
            over = self.value(node.iter, scope)
            self.assign(node.target, self.unknown(node.target), scope)
            self.walk_loop(over, node)
        self.block(node.body, scope, returned)
        self.around = kept
        self.block(node.orelse, scope, returned)

    def walk_loop(self, over: Any, node: ast.For | ast.AsyncFor) -> None:
        if isinstance(over, Thing) and over.kind == "loader":
            self.event("loop.loader", node, {"loader": over})
        if isinstance(over, Thing) and over.kind == "range" and len(over.facts["of"]) == 3:
            self.event("loop.slices", node, {"step": over.facts["of"][2]})

    # -- expressions -----------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: Scope) -> Any:
        text = ast.unparse(node) if self.known else ""
        if text in self.known:
            self.used.add(text)
            return self.known[text]
        match node:
            case ast.Constant():
                return (
                    node.value
                    if isinstance(node.value, bool | int | float | str)
                    else (None if node.value is None else self.unknown(node))
                )
            case ast.Name():
                if node.id in scope:
                    return scope[node.id]
                return self.globals.get(node.id, ImportedName(node.id))
            case ast.Attribute():
                return self.attribute(node, scope)
            case ast.Call():
                return self.call(node, scope)
            case ast.BinOp():
                left, right = self.value(node.left, scope), self.value(node.right, scope)
                return combine(node, left, right, self.unknown(node))
            case ast.UnaryOp():
                return self.unary(node, scope)
            case ast.BoolOp():
                return self.boolean(node, scope)
            case ast.Compare():
                values = [self.value(part, scope) for part in (node.left, *node.comparators)]
                return compare(node, values, self.unknown(node))
            case ast.IfExp():
                truth = _truth(self.value(node.test, scope))
                if truth is None:
                    self.value(node.body, scope)
                    self.value(node.orelse, scope)
                    return self.unknown(node)
                return self.value(node.body if truth else node.orelse, scope)
            case ast.List():
                return [self.value(item, scope) for item in node.elts]
            case ast.Tuple():
                return tuple(self.value(item, scope) for item in node.elts)
            case ast.Dict():
                return self.dictionary(node, scope)
            case ast.Subscript():
                return self.item(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self.assign(node.target, value, scope)
                return value
            case _:
                return self.unknown(node)

    def unknown(self, node: ast.expr) -> Unknown:
        return Unknown(ast.unparse(node), _place(node))

    def unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = _truth(value)
            return self.unknown(node) if truth is None else not truth
        if is_number(value) and isinstance(node.op, ast.USub):
            return -value
        return self.unknown(node)

    def boolean(self, node: ast.BoolOp, scope: Scope) -> Any:
        ends = isinstance(node.op, ast.Or)
        sure = True
        value: Any = None
        for part in node.values:
            value = self.value(part, scope)
            truth = _truth(value)
            if truth is ends:
                return value if sure else truth
            sure = sure and truth is not None
        return value if sure else self.unknown(node)

    def dictionary(self, node: ast.Dict, scope: Scope) -> Any:
        found: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            name = None if key is None else self.value(key, scope)
            if not isinstance(name, str):
                return self.unknown(node)
            found[name] = value
        return found

    def item(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(owner, dict) and isinstance(key, str) and key in owner:
            return owner[key]
        whole = isinstance(key, int) and not isinstance(key, bool)
        if isinstance(owner, list | tuple) and whole and -len(owner) <= key < len(owner):
            return owner[key]
        return self.unknown(node)

    def attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        if isinstance(owner, ImportedName):
            return ImportedName(f"{owner.dotted}.{node.attr}")
        if isinstance(owner, Thing):
            if node.attr in owner.facts:
                return owner.facts[node.attr]
            if owner.kind == "arguments":
                return self.argument(owner, node)
        return self.unknown(node)

    def argument(self, owner: Thing, node: ast.Attribute) -> Any:
        if node.attr in self.arguments:
            self.used.add(node.attr)
            return self.arguments[node.attr]
        return self.unknown(node)

    # -- calls -----------------------------------------------------------------------------------

    def call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if not isinstance(owner, ImportedName):
                return self.method(owner, node.func.attr, node, scope)
            target: Any = ImportedName(f"{owner.dotted}.{node.func.attr}")
        else:
            target = self.value(node.func, scope)
        args, named = self.read_arguments(node, scope)
        if isinstance(target, Function):
            return self.call_function(target, args, named, node)
        if isinstance(target, Kind):
            return self.make(target, args, named, node)
        if isinstance(target, ImportedName):
            return self.call_name(target.dotted, args, named, node)
        return self.unknown(node)

    def read_arguments(self, node: ast.Call, scope: Scope) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                value = self.value(arg.value, scope)
                args += list(value) if isinstance(value, list | tuple) else [self.unknown(arg)]
            else:
                args.append(self.value(arg, scope))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
            else:
                named["**"] = self.unknown(keyword.value)
        return args, named

    def call_function(
        self, function: Function, args: list[Any], named: dict[str, Any], node: ast.AST
    ) -> Any:
        definition, name = function.node, function.name
        self.visited.add(name)
        nothing = Unknown(f"{name}(...)", _place(node))
        if name in self.around.calls or len(self.around.calls) > _DEEPEST_CALLS:
            return nothing
        scope = dict(_bind_arguments(definition, args, named, self))
        kept = self.around
        self.around = replace(kept, calls=(*kept.calls, name))
        returned = _Returned()
        self.block(definition.body, _Local(scope, self.globals, definition), returned)
        self.around = kept
        return returned.values[0] if len(returned.values) == 1 else nothing

    def make(self, kind: Kind, args: list[Any], named: dict[str, Any], node: ast.AST) -> Thing:
        """An object of a class of the script."""
        made = Thing("object", _place(node), {"__class__": kind})
        kind.made.append(made)
        if "__init__" in kind.methods:
            start = Function(kind.methods["__init__"], kind)
            self.call_function(start, [made, *args], named, node)
        return made

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        otherwise = self.unknown(node)
        if dotted in FUNCTIONS and not named and args and all(map(is_plain, args)):
            return compute(FUNCTIONS[dotted], *args, otherwise=otherwise)
        if dotted in _RUN:
            facts = _by_name(("function", "args", "kwargs", "np"), args, named)
            self.event("horovod.run", node, facts)
            return otherwise
        if dotted.startswith(HOROVOD + "."):
            return self.horovod(dotted.removeprefix(HOROVOD + "."), args, named, node)
        last = dotted.rpartition(".")[2]
        if dotted in ("range", "enumerate", "tqdm") or last in ("tqdm", "trange"):
            if dotted == "range":
                return Thing("range", _place(node), {"of": args})
            return args[0] if args else otherwise
        if last == "ArgumentParser":
            return Thing("parser", _place(node), {"defaults": {}})
        if last in ("DataLoader", "StatefulDataLoader"):
            facts = _by_name(("dataset", "batch_size", "shuffle", "sampler"), args, named)
            return Thing("loader", _place(node), facts)
        if last == "DistributedSampler":
            facts = _by_name(
                ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last"), args, named
            )
            self.event("sampler", node, facts)
            return Thing("sampler", _place(node), facts)
        if last in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"):
            name = "clip_value" if "value" in last else "max_norm"
            facts = _by_name(("parameters", name, "norm_type"), args, named)
            facts = {"max_norm" if k == "clip_value" else k: v for k, v in facts.items()}
            self.event(last.rstrip("_"), node, facts)
            return otherwise
        if last in ("autocast", "GradScaler"):
            self.event(last, node, {"dotted": dotted, "args": args, **named})
            return Thing("scaler", _place(node)) if last == "GradScaler" else otherwise
        if dotted.startswith("torch.optim.lr_scheduler."):
            facts = {"class": last, "args": args, "named": named}
            self.event("scheduler", node, facts)
            return Thing("scheduler", _place(node), facts)
        if dotted.startswith("torch.optim."):
            return self.optimizer(last, args, named, node)
        return otherwise

    def optimizer(self, kind: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Thing:
        facts = {"class": kind, "args": args, "named": named}
        self.event("optimizer", node, facts)
        return Thing("optimizer", _place(node), facts)

    def horovod(self, name: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        if name == "size":
            return self.size
        if name in ("rank", "local_rank", "local_size", "cross_rank", "cross_size"):
            return self.unknown(node)
        if name in _QUESTIONS or name.endswith(("_built", "_enabled")):
            return self.unknown(node)
        if name == "DistributedOptimizer":
            order = (
                "optimizer",
                "named_parameters",
                "compression",
                "backward_passes_per_step",
                "op",
                "gradient_predivide_factor",
                "num_groups",
                "groups",
                "sparse_as_dense",
                "process_set",
            )
            facts = _by_name(order, args, named)
            self.event(name, node, facts)
            return Thing("optimizer", _place(node), {"wrapped": True})
        self.event(name, node, {"args": args, **named})
        return self.unknown(node)

    def method(self, owner: Any, name: str, node: ast.Call, scope: Scope) -> Any:
        args, named = self.read_arguments(node, scope)
        otherwise = self.unknown(node)
        if name == "backward" and not isinstance(owner, Thing):
            self.event("backward", node, {"divided": _division_of(owner)})
        if name in ("div", "div_") and isinstance(owner, Unknown) and args:
            result = replace(otherwise, divided=times(owner.divided, args[0]))
            if name == "div_" and isinstance(node.func, ast.Attribute):
                self.assign(node.func.value, result, scope)
            return result
        if isinstance(owner, Thing):
            return self.of_thing(owner, name, args, named, node)
        if isinstance(owner, dict) and name == "get" and args and args[0] in owner:
            return owner[args[0]]
        return otherwise

    def of_thing(
        self, owner: Thing, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        otherwise = self.unknown(node)
        if owner.kind == "object" and name in owner.facts["__class__"].methods:
            kind: Kind = owner.facts["__class__"]
            method = Function(kind.methods[name], kind)
            return self.call_function(method, [owner, *args], named, node)
        if owner.kind == "parser":
            return self.of_parser(owner, name, args, named, node)
        if owner.kind == "scaler" and name == "scale" and args:
            return replace(otherwise, divided=_division_of(args[0]))
        if owner.kind == "scheduler" and name == "step":
            self.event("scheduler.step", node, {"scheduler": owner, "args": args})
        steps = owner.kind == "scaler" and name == "step"
        if steps or (owner.kind == "optimizer" and name in _OF_OPTIMIZER):
            self.event(f"optimizer.{name}", node, {"args": args})
        return otherwise

    def of_parser(
        self, owner: Thing, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        if name == "add_argument":
            _declare(owner.facts["defaults"], args, named, self)
            return self.unknown(node)
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return owner
        if name == "set_defaults":
            owner.facts["defaults"] |= named
        if name in ("parse_args", "parse_known_args"):
            found = dict(owner.facts["defaults"])
            for key in found:
                if key in self.arguments:
                    self.used.add(key)
                    found[key] = self.arguments[key]
            space = Thing("arguments", _place(node), found)
            return space if name == "parse_args" else (space, [])
        return self.unknown(node)

    def event(self, what: str, node: ast.AST, facts: Mapping[str, Any]) -> None:
        place = _place(node)
        around = self.around
        event = Event(what, place, node, facts, around.loops, around.under, around.every)
        spot = (what, place.line, place.column)
        if spot not in self.seen:  # a function may be called twice
            self.seen.add(spot)
            self.events.append(event)


class _Local(dict[str, Any]):
    """Names within a function; those that it declares global are the module's."""

    def __init__(
        self,
        scope: Scope,
        module: Scope,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
    ) -> None:
        super().__init__(scope)
        self.node, self.module = node, module
        self.outer = {
            name for part in node.body if isinstance(part, ast.Global) for name in part.names
        }

    def __copy__(self) -> _Local:
        return _Local(self, self.module, self.node)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.outer:
            self.module[name] = value
        else:
            super().__setitem__(name, value)


_OF_OPTIMIZER = ("step", "synchronize", "set_backward_passes_per_step", "load_state_dict")
_RUN = ("horovod.run", "horovod.runner.run")
_QUESTIONS = ("is_initialized", "mpi_threads_supported", "is_homogeneous")


def _place(node: ast.AST) -> Place:
    return Place(getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)


def _truth(value: Any) -> bool | None:
    """Whether a condition holds; None where that cannot be told."""
    if isinstance(value, Unknown | ImportedName):
        return None
    if isinstance(value, Thing | Function | Kind):
        return True
    return bool(value)


def _division_of(value: Any) -> Any:
    return value.divided if isinstance(value, Unknown) else 1


def _division(left: Any, right: Any) -> Any:
    """By what a number was divided that two branches leave differently."""
    one, other = _division_of(left), _division_of(right)
    return one if one == other else Unknown("the loss", Place())


def _by_name(order: Sequence[str], args: list[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(order, args, strict=False)), **named}


def _bind_arguments(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    args: list[Any],
    named: Mapping[str, Any],
    walk: _Walk,
) -> Iterator[tuple[str, Any]]:
    """The parameters of a function with what they are given, or their defaults."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = node.args.defaults
    missing = len(positional) - len(defaults)
    for i, parameter in enumerate(positional):
        if i < len(args):
            yield parameter.arg, args[i]
        elif parameter.arg in named:
            yield parameter.arg, named[parameter.arg]
        elif i >= missing:
            yield parameter.arg, walk.value(defaults[i - missing], walk.globals)
        else:
            yield parameter.arg, Unknown(parameter.arg, _place(parameter))
    for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if parameter.arg in named:
            yield parameter.arg, named[parameter.arg]
        elif default is not None:
            yield parameter.arg, walk.value(default, walk.globals)


def _declare(
    defaults: dict[str, Any], args: list[Any], named: Mapping[str, Any], walk: _Walk
) -> None:
    """Enters an argument of argparse with what it is where nobody says otherwise."""
    flags = [arg for arg in args if isinstance(arg, str)]
    long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
    name = named.get("dest", long.lstrip("-").replace("-", "_"))
    if not isinstance(name, str):
        return
    action = named.get("action")
    switched = {"store_true": False, "store_false": True}.get(str(action))
    default = named.get("default", switched)
    kind = named.get("type")
    if (
        isinstance(default, str)
        and isinstance(kind, ImportedName)
        and kind.dotted in ("int", "float")
    ):
        default = compute(FUNCTIONS[kind.dotted], default, otherwise=Unknown(name, Place()))
    given = next((flag for flag in flags if flag in walk.arguments), None)
    if given is not None:
        walk.used.add(given)
        default = _read_word(walk.arguments[given], kind, switched, named.get("const"))
    required = default is None and "default" not in named
    if required and (named.get("required") or not long.startswith("-")):
        default = Unknown(f"args.{name}", Place())
    defaults[name] = default


def _read_word(raw: Any, kind: Any, switched: bool | None, const: Any) -> Any:
    """What a word of the command line is for the script."""
    if switched is not None:
        return not switched
    if raw is True and const is not None:
        return const
    types: Mapping[str, Callable[..., Any]] = {"int": int, "float": float, "str": str}
    if isinstance(kind, ImportedName) and kind.dotted in types:
        return compute(types[kind.dotted], raw, otherwise=Unknown(str(raw), Place()))
    return raw
