"""The text of a task of the user's own."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.own_task.own_file import ARGUMENTS, FILL_IN, OwnFile
from torsh_trainer.translate.own_task.splitting import Split

TASK, DATA = "ScriptTask", "ScriptData"
"""The classes of the file."""

_FILLING = f'''

def {FILL_IN}(what):
    """Stops where something has to be filled in."""
    raise NotImplementedError(f"fill this in: {{what}}")
'''


@dataclass
class TaskBodies:
    """The bodies of the written functions."""

    build: list[ast.stmt] = field(default_factory=list)
    start: list[ast.stmt] = field(default_factory=list)
    data: list[ast.stmt] = field(default_factory=list)
    split: Split = field(default_factory=Split)


def write_text_of(file: OwnFile, parts: TaskBodies) -> str:
    """The whole file; imports that nothing of it uses are left out."""
    body = list(_list_classes(file, parts))
    if file.arguments is not None:
        body = [*_list_arguments(file), *body]
    if file.missing:
        body = [*_FILLING.splitlines(), *body]
    imports = [*file.imports, *(["from argparse import Namespace"] if file.arguments else [])]
    said = "\n".join(body)
    used = [line for line in imports if re.search(rf"\b{_name_of(line)}\b", said)]
    head = list(_list_head(file))
    ours = "from torsh_trainer import DataSource, Task"
    blank = [""] if used else []
    return "\n".join([*head, *sorted(used, key=_order), *blank, ours, *body]) + "\n"


def _list_head(file: OwnFile) -> Iterator[str]:
    yield f'"""A task of {file.script}: its model, data and loss, imported from there.'
    yield ""
    yield "Written by `python -m torsh_trainer translate`, and yours from now on."
    if file.missing:
        yield ""
        yield f"What is missing is marked by {FILL_IN}(...), which stops until you replace it:"
        yield ""
        for missing in file.missing:
            text = str(missing).replace("\\", "\\\\").replace('"""', "'''")
            yield from textwrap.wrap(text, 92, initial_indent="- ", subsequent_indent="  ")
    yield '"""'
    yield ""


def _list_classes(file: OwnFile, parts: TaskBodies) -> Iterator[str]:
    name = file.script
    yield from ["", "", f"class {DATA}(DataSource):"]
    yield f'    """The data sets that {name} loads."""'
    yield from _write_function("__init__(self)", parts.data)
    yield from ["", "", f"class {TASK}(Task):"]
    yield f'    """The model that {name} trains, and its loss."""'
    yield ""
    yield "    def __init__(self, data, optimizer):"
    yield "        self.data, self.optimizer = data, optimizer"
    yield from _write_body(parts.start)
    yield from _write_function("build_model(self)", parts.build)
    yield from _write_function("forward(self, model, batch)", parts.split.forward)
    yield from _write_function("loss(self, outputs, batch)", parts.split.loss)


def _list_arguments(file: OwnFile) -> Iterator[str]:
    """The arguments of the script with their values."""
    kind = "Namespace"
    yield from ["", ""]
    if file.unknown:
        kind = "_Arguments"
        yield "class _Arguments(Namespace):"
        yield "    def __getattr__(self, name):"
        yield '        if name.startswith("__"):'
        yield "            raise AttributeError(name)"
        yield f'        return {FILL_IN}(f"args.{{name}} cannot be told; state it here")'
        yield from ["", ""]
    yield f"{ARGUMENTS} = {kind}("
    for name, value in (file.arguments or {}).items():
        yield f"    {name}={_plain(value)!r},"
    yield ")"
    yield '"""What argparse gives the script: defaults, and the words of the launch line."""'


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _write_function(head: str, body: Sequence[ast.stmt]) -> Iterator[str]:
    yield ""
    yield f"    def {head}:"
    yield from _write_body(body or [ast.Pass()])


def _write_body(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        text = ast.unparse(ast.fix_missing_locations(node))
        yield from textwrap.indent(text, " " * 8).splitlines()


def _name_of(line: str) -> str:
    """The name that an import binds."""
    last = line.split()[-1]
    return last.partition(".")[0]


def _order(line: str) -> tuple[bool, str]:
    return (line.startswith("from"), line)
