"""What statements do to a variable, as far as their words tell."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Container

_QUIET_METHODS = frozenset(
    [
        "cuda",
        "to",
        "cpu",
        "parameters",
        "named_parameters",
        "state_dict",
        "share_memory",
        "keys",
        "values",
        "items",
        "zero_grad",
        "step",
        "children",
        "named_children",
        "modules",
        "named_modules",
        "buffers",
        "set_epoch",
        "__len__",
        "size",
        "numel",
    ]
)
"""Methods that change nothing of what they are called on, or only its place."""

_MODES = ("train", "eval")
"""The trainer sets the mode of the model; that of others stays theirs."""

_QUIET_CALLS = re.compile(
    r"(^|\.)(print|print_\w+|log|log_\w+|info|debug|warning|warn|summary|watch|add_graph|write|"
    r"barrier|broadcast_\w+|save|save_\w+|dump|len|format|count_\w+|synchronize|set_device|"
    r"init_distributed|initialize|add_config_arguments|seed_everything|collect|perf_counter|"
    r"evaluate\w*|validate\w*|test\w*|predict\w*|generate|sample|plot\w*|checkpoint\w*)$"
)
"""Functions that are told something, and change nothing of it."""

_JUDGED = re.compile(r"(^|\.)clip_grad_(norm|value)_?$")
"""Functions that the rules of every engine have a verdict on."""

_ENGINES = re.compile(r"^(hvd|horovod|deepspeed|dist|torch\.distributed|wandb|mlflow|logging)\.")
_CHANGING = re.compile(
    r"_$|^(load|set|add|register|resize|freeze|unfreeze|init|enable|disable|gradient_check|tie|"
    r"apply|append|extend|insert|update|pop|remove|sort|shuffle|reset|replace|fit|from)"
)
"""Beginnings of methods that change what they are called on, though their value is used."""

_DRIVES = frozenset(
    [
        "backward",
        "step",
        "save_checkpoint",
        "load_checkpoint",
        "save_16bit_model",
        "save_fp16_model",
        "allreduce_gradients",
        "set_gradient_accumulation_boundary",
        "empty_partition_cache",
        "destroy",
    ]
)

_TRANSPARENT = re.compile(
    r"autocast|nullcontext|record_function|profile|Init$|FileLock|no_sync|suppress|tqdm|Timer|"
    r"set_detect_anomaly|on_device|OnDevice|join$"
)


def is_transparent(node: ast.stmt) -> bool:
    """A ``with`` that changes no number of a step, or one that the trainer has itself."""
    if not isinstance(node, ast.With | ast.AsyncWith):
        return False
    return all(_TRANSPARENT.search(name_of(item.context_expr)) for item in node.items)


def name_of(node: ast.expr) -> str:
    """The name of what is called, with its dots."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def changes(
    node: ast.stmt, name: str, *, of_model: bool = False, loud: Container[str] = ()
) -> bool:
    """Whether a statement changes what the variable ``name`` holds, without binding it anew.

    ``of_model``: the variable is a model, which other objects may change that it is given to.
    ``loud`` are functions of the project that change something, whatever their names say.
    """
    match node:
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Delete():
            targets = getattr(node, "targets", None) or [node.target]  # type: ignore[union-attr]
            if any(root_of(t) == name and not isinstance(t, ast.Name) for t in _flat(targets)):
                return True
            value = getattr(node, "value", None)
            return isinstance(value, ast.Call) and (
                _is_changing_call(value, name) or _is_loud_call(value, name, loud)
            )
        case ast.Expr(value=ast.Call() as call):
            return _is_call_for_effect(call, name, of_model, loud)
        case ast.For() | ast.AsyncFor():
            if root_of(node.iter) != name and not _mentions(node.iter, name):
                return any(changes(part, name, of_model=of_model, loud=loud) for part in node.body)
            element = root_of(node.target) or "_"
            names = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
            return any(
                changes(part, one, loud=loud)
                for part in _flat_body(node.body)
                for one in {element, *names}
            )
        case ast.If() | ast.With() | ast.AsyncWith() | ast.While():
            return any(
                changes(part, name, of_model=of_model, loud=loud) for part in _flat_body([node])
            )
        case _:
            return False


MARK = "self_attribute"
"""Stands for ``self.x`` where a name is asked for."""


def mark_attribute(node: ast.stmt, words: tuple[frozenset[str], str]) -> ast.stmt | None:
    """A copy of a statement with a name for ``self.x``, whose names for the object are ``words[0]``
    and whose attribute is ``words[1]``; None where it does not mention it."""
    owners, attribute = words
    marking = _Marking(owners, attribute)
    if not owners or not any(marking.is_meant(part) for part in ast.walk(node)):
        return None
    marked: ast.stmt = marking.visit(copy.deepcopy(node))
    return marked


class _Marking(ast.NodeTransformer):
    def __init__(self, owners: frozenset[str], attribute: str) -> None:
        self.owners, self.attribute = owners, attribute

    def is_meant(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == self.attribute
            and isinstance(node.value, ast.Name)
            and node.value.id in self.owners
        )

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self.is_meant(node):
            return ast.copy_location(ast.Name(MARK, node.ctx), node)
        return self.generic_visit(node)


def is_quiet(call: ast.Call, loud: Container[str] = ()) -> bool:
    """A call that is told something, and changes nothing of it, by its name; ``loud`` are functions
    of the project that do."""
    text = name_of(call)
    if text.rpartition(".")[2] in loud:
        return False
    quiet = _QUIET_CALLS.search(text) or _JUDGED.search(text) or _ENGINES.search(text + ".")
    return quiet is not None


def _is_call_for_effect(call: ast.Call, name: str, of_model: bool, loud: Container[str]) -> bool:
    func = call.func
    if is_quiet(call, loud):
        return False
    if root_of(func) == name and isinstance(func, ast.Attribute):
        chained = isinstance(func.value, ast.Call) and _is_changing_call(func.value, name)
        if of_model and func.attr in _MODES and isinstance(func.value, ast.Name):
            return chained
        if func.attr == "to":
            return chained or has_dtype(call)
        return chained or func.attr not in _QUIET_METHODS
    handed = any(root_of(arg) == name for arg in [*call.args, *(k.value for k in call.keywords)])
    if not handed:
        return False
    method = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)
    return not method or of_model or _CHANGING.search(ast.unparse(func).rpartition(".")[2]) is None


def _is_loud_call(call: ast.Call, name: str, loud: Container[str]) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_loud = name_of(call).rpartition(".")[2] in loud
    return is_loud and any(root_of(arg) == name for arg in given)


def _is_changing_call(call: ast.Call, name: str) -> bool:
    func = call.func
    if not isinstance(func, ast.Attribute) or root_of(func) != name:
        return False
    return _CHANGING.search(func.attr) is not None and func.attr not in _QUIET_METHODS


def is_of_engine(call: ast.Call) -> bool:
    """A method by which an engine of DeepSpeed's is driven: its translator judges it."""
    func = call.func
    parts = ast.unparse(func).split(".")
    direct = len(parts) == 2 and parts[1] in _DRIVES
    return direct or any(part in ("tput_timer", "monitor", "timers") for part in parts[1:])


def has_dtype(call: ast.Call) -> bool:
    """Whether ``x.to(...)`` changes the dtype."""
    named = any(keyword.arg == "dtype" for keyword in call.keywords)
    return named or any(is_dtype(arg) for arg in call.args)


def is_dtype(node: ast.expr) -> bool:
    """Whether an expression names a dtype: ``torch.float16``, ``args.dtype``."""
    text = ast.unparse(node)
    return "dtype" in text or (
        text.startswith("torch.") and not text.startswith(("torch.device", "torch.cuda"))
    )


def root_of(node: ast.expr) -> str:
    """The name at the beginning of ``a.b[c].d()``; empty for what has none."""
    while True:
        match node:
            case ast.Name():
                return node.id
            case ast.Attribute() | ast.Subscript() | ast.Starred():
                node = node.value
            case ast.Call():
                node = node.func
            case _:
                return ""


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _flat(targets: list[ast.expr]) -> list[ast.expr]:
    found: list[ast.expr] = []
    for target in targets:
        found += _flat(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]
    return found


def _flat_body(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements in it that hold no others, and loops."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If):
            found += _flat_body([*node.body, *node.orelse])
        elif isinstance(node, ast.With | ast.AsyncWith | ast.While):
            found += _flat_body(node.body)
        else:
            found.append(node)
    return found
