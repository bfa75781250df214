"""Objects in which scripts keep values: classes, records with attributes, functions half called."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torsh_trainer.translate.nodes import Place
from torsh_trainer.translate.python.events import Scope, place_of
from torsh_trainer.translate.python.values import (
    Attributes,
    Function,
    ImportedName,
    Kind,
    ScriptDict,
    Thing,
    Unknown,
    copy_record,
)

PARTIAL = "partial"
"""The kind of a ``Thing`` that is a function with some of its arguments given."""

NOT_SET = Unknown("not set", Place())
"""What ``find_attribute`` returns of a name that nothing sets."""

_RECORDS = (
    *(
        "DotMap",
        "EasyDict",
        "edict",
        "Munch",
        "munchify",
        "Box",
        "Bunch",
        "AttrDict",
        "AttributeDict",
    ),
    *("DotDict", "Dotdict", "dotdict", "ConfigDict"),
)
"""Dictionaries of libraries with attributes for keys."""

_SPACES = ("types.SimpleNamespace", "argparse.Namespace")
_FIELDS = ("pydantic.BaseModel", "typing.NamedTuple")
"""Bases of classes whose fields are given by name where an object is made."""

_BASES = (*_FIELDS, "object", "abc.ABC", "torch.nn.Module", "typing.Generic", "typing.Protocol")
"""Bases that set no attribute by themselves."""

_PROPERTIES = ("property", "functools.cached_property", "cached_property")


class ClassScope(dict[str, Any]):
    """Names within the body of a class, which sees those around it."""

    def __init__(self, enclosing: Scope) -> None:
        super().__init__()
        self.enclosing = enclosing


def read_class(walk: Any, kind: Kind, scope: Scope) -> None:
    """Enters what the body of a class sets by name: ``lr = 1e-4``, and classes within it."""
    names = ClassScope(scope)
    for node in kind.node.body:
        match node:
            case ast.Assign():
                value = walk.value(node.value, names)
                names |= {t.id: value for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)) if node.value is not None:
                names[name] = walk.value(node.value, names)
            case ast.ClassDef():
                inner = names[node.name] = Kind(node, kind.module)
                read_class(walk, inner, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.AnnAssign() | ast.Expr():
                pass
            case _:  # what stands under a condition is not known
                for part in ast.walk(node):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        names[part.id] = Unknown(part.id, place_of(part))
    kind.attributes.update(names)


def find_attribute(walk: Any, kind: Kind, name: str) -> Any:
    """What a class or a base of it in the script sets by that name. ``NOT_SET``: nothing does, or a
    base of another library may."""
    classes = list(_list_classes(walk, kind))
    if any(not isinstance(one, Kind) for one in classes):
        return NOT_SET
    return next((one.attributes[name] for one in classes if name in one.attributes), NOT_SET)


def _list_classes(walk: Any, kind: Kind) -> Iterator[Any]:
    """The class and its bases, but for those that set no attribute."""
    yield kind
    for node in (*kind.node.bases, *(word.value for word in kind.node.keywords)):
        base = walk.value(_strip_items(node), kind.module.scope)
        if isinstance(base, Kind):
            yield from _list_classes(walk, base)
        elif not isinstance(base, ImportedName) or base.dotted not in _BASES:
            yield base


def look_up(walk: Any, owner: Any, name: str, node: ast.expr) -> Any:
    """``owner.name`` of a class, of an object of one, or of a record; ``node`` is how it is
    written. ``NOT_SET`` where reading does not tell."""
    if isinstance(owner, Kind):
        return find_attribute(walk, owner, name)
    if isinstance(owner, ScriptDict):
        return owner.read(name) if name in owner and not owner.untold else NOT_SET
    if not isinstance(owner, Thing) or owner.is_untold:
        return NOT_SET
    if name in owner.facts:
        return owner.facts[name]
    kind = owner.facts.get("__class__")
    if not isinstance(kind, Kind):
        return NOT_SET
    method = walk.find_method(kind, name)
    call = ast.copy_location(ast.Call(ast.Name(name), [], []), node)
    if method is not None:
        is_property = is_decorated(walk, method, _PROPERTIES)
        return walk.call_value(method, [owner], {}, call) if is_property else NOT_SET
    found = find_attribute(walk, kind, name)
    fallback = walk.find_method(kind, "__getattr__")
    if found is NOT_SET and fallback is not None and not name.startswith("__"):
        return walk.call_value(fallback, [owner, name], {}, call)
    return found


def is_decorated(walk: Any, function: Function, names: Sequence[str]) -> bool:
    """Whether one of these decorates a function."""
    found = [walk.value(node, function.module.scope) for node in function.node.decorator_list]
    return any(isinstance(one, ImportedName) and one.dotted in names for one in found)


def call_class(
    walk: Any, kind: Kind, name: str, args: list[Any], named: dict[str, Any], node: ast.Call
) -> Any:
    """The value of ``kind.name(...)``: of a method, or of what a name of the class stands for."""
    method = walk.find_method(kind, name)
    if method is None:
        return walk.call_value(find_attribute(walk, kind, name), args, named, node)
    if is_decorated(walk, method, ("classmethod",)):
        args = [kind, *args]
    return walk.call_function(method, args, named, node)


def set_attribute(walk: Any, owner: Any, name: Any, value: Any, node: ast.expr) -> None:
    """``setattr(owner, name, value)``; once it sets a name that cannot be told, nothing that
    ``owner`` has is known."""
    if isinstance(owner, ScriptDict):
        walk.put(owner, name, value, node)
    elif isinstance(owner, Thing) and isinstance(name, str):
        owner.facts[name] = walk.sure(value, node)
    elif isinstance(owner, Thing):
        owner.is_untold = True
    elif isinstance(owner, Kind) and isinstance(name, str):
        owner.attributes[name] = walk.sure(value, node)
    elif isinstance(owner, Kind):
        owner.attributes = {one: walk.unknown(node) for one in owner.attributes}


def make_object(dotted: str, args: list[Any], named: dict[str, Any], place: Place) -> Any:
    """What a call makes: a record, a namespace, a ``partial``, the attributes of an object;
    ``NOT_SET`` where it makes none of them, or of what is not known."""
    if "**" in named:
        return NOT_SET
    if dotted in ("functools.partial", "partial") and args:
        return Thing(PARTIAL, place, {"of": args[0], "args": args[1:], "named": named})
    is_record = dotted.rpartition(".")[2] in _RECORDS or dotted == "addict.Dict"
    if is_record and all(isinstance(arg, ScriptDict) for arg in args) and len(args) < 2:
        made: ScriptDict = copy_record(args[0]) if args else ScriptDict()
        for name, value in named.items():
            made.put(name, value, place, "")
        return made
    if dotted in _SPACES and not args:
        return Thing("object", place, dict(named))
    if dotted == "vars" and len(args) == 1 and isinstance(args[0], Thing):
        return NOT_SET if args[0].is_untold else Attributes(args[0])
    return NOT_SET


def take_fields(walk: Any, made: Thing, kind: Kind, named: Mapping[str, Any]) -> None:
    """Enters fields that are given by name where an object of a class of fields is made."""
    bases = [walk.value(node, kind.module.scope) for node in kind.node.bases]
    if any(isinstance(base, ImportedName) and base.dotted in _FIELDS for base in bases):
        made.facts.update(named)


def _strip_items(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node
