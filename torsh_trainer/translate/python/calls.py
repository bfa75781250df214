"""Calls in a script: its own functions and classes are followed, others mean what they mean."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.arguments import call_parser, define_flag, read_parameters
from torsh_trainer.translate.python.click_options import read_options
from torsh_trainer.translate.python.dataclass_arguments import (
    METHODS,
    PARSER,
    call_dataclass_parser,
    fill_dataclass,
    is_dataclass,
    make_parser,
)
from torsh_trainer.translate.python.environment import GET
from torsh_trainer.translate.python.events import (
    Around,
    Event,
    FunctionScope,
    Returned,
    Scope,
    place_of,
)
from torsh_trainer.translate.python.expressions import Expressions
from torsh_trainer.translate.python.frames import Frame, match_arguments
from torsh_trainer.translate.python.hydra_configs import read_hydra
from torsh_trainer.translate.python.objects import (
    NOT_SET,
    PARTIAL,
    call_class,
    is_decorated,
    look_up,
    make_object,
    set_attribute,
    take_fields,
)
from torsh_trainer.translate.python.values import (
    FUNCTIONS,
    Function,
    ImportedName,
    Kind,
    Module,
    ScriptDict,
    Thing,
    Unknown,
    callable_is_known,
    compute,
    copy_record,
    function_of_lambda,
    is_plain,
    times,
    write_expression,
)

_DEEPEST_CALLS = 12


class ScriptCalls(Expressions):
    """What a call comes to; an engine says in ``call_name`` and ``call_method`` what its own is."""

    def __init__(self, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        super().__init__(arguments, known)
        self.events: list[Event] = []
        self.around = Around()
        self.visited: set[tuple[str, str]] = set()
        self.seen: dict[tuple[str, str, int, int], tuple[int, ...]] = {}
        self.events_at: set[tuple[str, str, int, int]] = set()
        self.again: set[tuple[str, Place]] = set()
        self.by_itself = False
        self.uncalled: set[tuple[str, Place]] = set()
        self.frame = Frame(self.module)
        self.tops: dict[str, Frame] = {"": self.frame}
        self.frames: list[Frame] = [self.frame]
        self.within: tuple[ast.stmt, ...] = ()

    def block(
        self, body: Sequence[ast.stmt], scope: Scope, returned: Returned | None = None
    ) -> bool:
        """Walks statements; whether one of them surely leaves the block."""
        raise NotImplementedError

    def call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if not isinstance(owner, ImportedName):
                return self.method(owner, node.func.attr, node, scope)
            target: Any = ImportedName(f"{owner.dotted}.{node.func.attr}")
        else:
            target = self.value(node.func, scope)
        args, named = self.read_arguments(node, scope)
        value = self.call_value(target, args, named, node)
        if isinstance(value, Unknown):
            self.hand_over(node, [*args, *named.values()])
        return value

    def hand_over(self, node: ast.Call, given: list[Any]) -> None:
        """Objects are handed to a call that is not followed."""

    def call_value(
        self, target: Any, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        """The value of a call of whatever stands for the function."""
        if isinstance(target, Function):
            return self.call_function(target, args, named, node)
        if isinstance(target, Kind):
            return self.make(target, args, named, node)
        if isinstance(target, ImportedName):
            return self.call_name(target.dotted, args, named, node)
        if isinstance(target, Thing) and target.kind == PARTIAL:
            given = target.facts
            args, named = [*given["args"], *args], {**given["named"], **named}
            return self.call_value(given["of"], args, named, node)
        if isinstance(target, Unknown) and isinstance(target.of, ast.Lambda):
            return self.call_function(function_of_lambda(target.of, self.module), args, named, node)
        return self.unknown(node)

    def look_up(self, owner: Any, name: str, node: ast.expr) -> Any:
        return look_up(self, owner, name, node)

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
        self.visited.add((function.module.file, name))
        nothing = Unknown(f"{name}(...)", place_of(node))
        label = f"{function.module.file}:{name}"
        if label in self.around.calls or len(self.around.calls) > _DEEPEST_CALLS:
            return nothing
        caller, self.module = self.module, function.module
        if function.kind is None and not args:
            named = read_options(self, function) | read_hydra(self, function) | named
        arguments = dict(_bind_arguments(definition, args, named, self))
        frame, within = self.frame, self.within
        self.frame, self.within = self.enter(function, arguments, node), ()
        kept = self.around
        handed = any(isinstance(arg, Unknown) and ".grad" in arg.text for arg in args)
        self.around = replace(
            kept, calls=(*kept.calls, label), of_gradients=kept.of_gradients or handed
        )
        returned = Returned()
        names = FunctionScope(arguments, self.module.scope, definition, function.enclosing)
        self.block(definition.body, names, returned)
        self.around, self.module = kept, caller
        self.frame, self.within = frame, within
        return returned.values[0] if len(returned.values) == 1 else nothing

    def enter(self, function: Function, arguments: Mapping[str, Any], node: ast.AST) -> Frame:
        """The frame of a call."""
        called = isinstance(node, ast.Call)
        given = match_arguments(function.node, node, bound=function.kind is not None)
        if function.kind is not None and function.node.name == "__init__":
            names = [part.arg for part in function.node.args.args]
            given = {name: value for name, value in given.items() if name not in names[:1]}
        frame = Frame(
            function.module,
            function.node,
            caller=self.frame if called else None,
            called_at=self.frame.now,
            given=given,
            arguments=arguments,
            closure=function.frame,
            top=self.tops.get(function.module.file),
        )
        self.frames.append(frame)
        return frame

    def make(self, kind: Kind, args: list[Any], named: dict[str, Any], node: ast.AST) -> Thing:
        """An object of a class of the script."""
        made = Thing("object", place_of(node), {"__class__": kind})
        kind.made.append(made)
        start = self.find_method(kind, "__init__")
        if start is not None:
            self.call_function(start, [made, *args], named, node)
        elif is_dataclass(self, kind):
            fill_dataclass(self, made, args, named)
        else:
            take_fields(self, made, kind, named)
        return made

    def call_name(self, dotted: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        """The value of a call of something imported, or built in, by its full name."""
        otherwise = self.unknown(node)
        if dotted in FUNCTIONS and not named and args and all(map(is_plain, args)):
            return compute(FUNCTIONS[dotted], *args, otherwise=otherwise)
        if dotted in GET and args:
            return self.read_variable(dotted, args, named, node)
        if dotted == "setattr" and len(args) == 3:
            return set_attribute(self, args[0], args[1], args[2], node)
        if dotted == "getattr" and len(args) > 1 and isinstance(args[1], str):
            return self.read_attribute(args, node)
        made_here = make_object(dotted, args, named, place_of(node))
        if made_here is not NOT_SET:
            return made_here
        if dotted in ("range", "enumerate", "tqdm") or dotted.endswith((".tqdm", ".trange")):
            if dotted == "range" or dotted.endswith("trange"):
                return Thing("range", place_of(node), {"of": args})
            return args[0] if args else otherwise
        if dotted == "dict" and all(isinstance(arg, ScriptDict) for arg in args[:1]):
            made = ScriptDict(args[0]) if args else ScriptDict()
            for name, value in named.items():
                made.put(name, value, place_of(node), self.module.file)
            return made
        if dotted in ("copy.copy", "copy.deepcopy") and args:
            deep = dotted == "copy.deepcopy" or not isinstance(args[0], ScriptDict)
            return copy_record(args[0]) if deep else args[0].copy()
        if dotted == "os.path.join" and args and all(isinstance(arg, str) for arg in args):
            return str(PurePosixPath(*args))
        last = dotted.rpartition(".")[2]
        if last == PARSER:
            return make_parser(self, args, named, node)
        if last == "ArgumentParser":
            return Thing("parser", place_of(node), {"defaults": {}})
        if last == "Fire" and args and isinstance(args[0], Function):
            named = read_parameters(self, args[0])
            return self.call_function(args[0], [], named, node)
        if dotted == "exec":
            self.event("exec", node, {"written": write_expression(node)[:80]})
        if last.startswith("DEFINE_"):
            define_flag(self, args, named)
        return otherwise

    def read_variable(
        self, dotted: str, args: list[Any], named: Mapping[str, Any], node: ast.Call
    ) -> Any:
        """``os.environ.get(name, default)`` and its like."""
        name, environment = args[0], self.environment
        default = args[1] if len(args) > 1 else named.get("default")
        value: Any = self.unknown(node)
        if environment.knows(name):
            value = environment.read(name)
        elif default is not None and environment.is_free(name):
            value = default
        if dotted.endswith("setdefault") and isinstance(name, str):
            environment.here[name] = value
        return value

    def read_attribute(self, args: list[Any], node: ast.Call) -> Any:
        """``getattr(owner, name, default)``; the default counts of an argument that is none."""
        owner, name = args[:2]
        if isinstance(owner, ImportedName):
            return ImportedName(f"{owner.dotted}.{name}")
        if isinstance(owner, Module):
            return owner.scope.get(name, self.unknown(node))
        found = self.look_up(owner, name, node)
        if found is not NOT_SET:
            return found
        is_space = isinstance(owner, Thing) and owner.kind == "arguments"
        known = is_space and not owner.is_untold and name not in self.arguments
        return args[2] if known and len(args) > 2 else self.unknown(node)

    def method(self, owner: Any, name: str, node: ast.Call, scope: Scope) -> Any:
        """The value of ``owner.name(...)``."""
        args, named = self.read_arguments(node, scope)
        otherwise = self.unknown(node)
        if name in ("div", "div_") and isinstance(owner, Unknown) and args:
            result = replace(otherwise, divided=times(owner.divided, args[0]))
            if name == "div_" and isinstance(node.func, ast.Attribute):
                self.assign(node.func.value, result, scope)
            return result
        if isinstance(owner, ScriptDict):
            return self.call_record(owner, name, args, named, node)
        if isinstance(owner, Module):
            return self.call_value(owner.scope.get(name, otherwise), args, named, node)
        if isinstance(owner, Kind):
            return call_class(self, owner, name, args, named, node)
        if isinstance(owner, Thing):
            made_of = owner.facts.get("__class__")
            method = self.find_method(made_of, name) if isinstance(made_of, Kind) else None
            if method is not None:
                bound = [] if is_decorated(self, method, ("staticmethod",)) else [owner]
                return self.call_function(method, [*bound, *args], named, node)
            if callable_is_known(owner.facts.get(name)) and not owner.is_untold:
                return self.call_value(owner.facts[name], args, named, node)
            if owner.kind == "parser" and "dataclasses" in owner.facts and name in METHODS:
                return call_dataclass_parser(self, owner, name, args, named, node)
            if owner.kind == "parser":
                return call_parser(self, owner, name, args, named, node)
        return self.call_method(owner, name, args, named, node)

    def sure(self, value: Any, node: ast.expr) -> Any:
        """What is put into a dictionary that others hold: known only where it surely happens."""
        if not self.around.under:
            return value
        under = self.around.under if isinstance(value, dict) else ""  # nobody states a block
        return replace(self.unknown(node), under=under)

    def call_record(
        self, owner: ScriptDict, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        """A method of a dictionary."""
        key = args[0] if args else None
        if name == "copy":
            return owner.copy()
        if name == "update":
            for other in (*args, ScriptDict(named)):
                if not isinstance(other, ScriptDict):
                    owner.mark_untold(write_expression(node), place_of(node), self.module.file)
                    continue
                for change in other.untold:
                    owner.mark_untold(*change)
                for one, value in other.items():
                    place, file = other.places.get(one, (place_of(node), self.module.file))
                    owner.put(one, self.sure(value, node), place, file)
            return None
        if name in ("get", "pop", "setdefault") and isinstance(key, str):
            otherwise = args[1] if len(args) > 1 else None
            if name == "setdefault" and key not in owner:
                owner.put(key, otherwise, place_of(node), self.module.file)
            owner.asked.add(key)
            return owner.pop(key, otherwise) if name == "pop" else owner.get(key, otherwise)
        if name in ("items", "keys", "values") and not args and not owner.untold:
            return list(getattr(owner, name)())
        return self.unknown(node)

    def call_method(
        self, owner: Any, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
    ) -> Any:
        """The value of a method of something that is no object of the script's own classes."""
        return self.unknown(node)

    def event(self, what: str, node: ast.AST, facts: Mapping[str, Any]) -> None:
        """Enters that something has happened here, once for each place."""
        place, around = place_of(node), self.around
        spot = (what, self.module.file, place.line, place.column)
        if self.seen.setdefault(spot, around.loops) != around.loops:
            self.again.add((self.module.file, place))
        elif spot not in self.events_at:  # a function may be called twice
            self.events_at.add(spot)
            if self.by_itself:
                self.uncalled.add((self.module.file, place))
            self.events.append(
                Event(
                    what,
                    place,
                    node,
                    facts,
                    around.loops,
                    around.under,
                    around.every,
                    self.module.file,
                    self.frame,
                    self.frame.now,
                )
            )


def by_name(order: Sequence[str], args: list[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments by the names that they have in this order, and the others."""
    return {**dict(zip(order, args, strict=False)), **named}


def _bind_arguments(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    args: list[Any],
    named: Mapping[str, Any],
    walk: ScriptCalls,
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
            yield parameter.arg, walk.value(defaults[i - missing], walk.module.scope)
        else:
            yield parameter.arg, Unknown(parameter.arg, place_of(parameter))
    for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if parameter.arg in named:
            yield parameter.arg, named[parameter.arg]
        elif default is not None:
            yield parameter.arg, walk.value(default, walk.module.scope)
