"""``translate ... --task FILE``: the file, the recipe that names it, and what is said of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.own_task.text import DATA, TASK
from torsh_trainer.translate.own_task.writing import WrittenTask, write_task
from torsh_trainer.translate.plan import RECIPE, Plan

_TAKEN = frozenset(["torch", "numpy", "torsh_trainer", "deepspeed", "horovod", "transformers"])
_LENGTHS = ("trainer.max_steps", "trainer.max_epochs")
_ADDED = ("data.micro_batch_size", "data.shuffle", "data.drop_last", "trainer.max_epochs")
_YOURS = "model, data and loss are yours"


@dataclass(frozen=True)
class TaskFile:
    """A task to be written to ``path``, and the plan whose recipe names it."""

    path: Path
    plan: Plan
    own: WrittenTask


def check_task(path: Path, *, output: Path | None, force: bool) -> None:
    """Makes sure of the place of a task.

    Raises:
        ConfigError: it can be no module, it is there already, or no recipe would name it.
    """
    if output is None:
        raise ConfigError(
            f"--task {path} is named by a recipe, and none is written",
            fix="add --output recipe.yaml",
        )
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(
            f"--task {path} is no name of a Python module",
            fix="give letters, digits and _ with the ending .py: --task my_task.py",
        )
    if path.stem in sys.stdlib_module_names or path.stem in _TAKEN:
        raise ConfigError(
            f"--task {path}: there is a module {path.stem} already, which would be hidden",
            fix="choose another name: --task my_task.py",
        )
    if path.is_dir():
        raise ConfigError(f"--task {path} is a folder", fix="name a file in it: my_task.py")
    if path.exists() and not force:
        raise ConfigError(
            f"--task {path} is there already, and may hold your own changes",
            fix="name another file, or add --force to replace it",
        )


def make_task(plan: Plan, path: Path) -> TaskFile:
    """The task for a plan, and the plan with what its recipe says of it.

    Raises:
        ConfigError: the plan is of no script, or ``path`` has the name of a module of its own.
    """
    script = plan.script
    if script is None:
        raise ConfigError(
            f"--task wants a script that trains, and {plan.source} leads to none that was read",
            fix="name the script, or its launch line with --command",
        )
    beside = script.path.absolute().parent.glob("*.py")
    if any(one.stem == path.stem and one.resolve() != path.resolve() for one in beside) or (
        path.resolve() == script.path.resolve()
    ):
        raise ConfigError(
            f"--task {path} has the name of a module beside {script.path.name}",
            fix="choose another name: --task my_task.py",
        )
    low = plan.choices.get("precision", "fp32").startswith(("bf16", "fp16"))
    own = write_task(script, low=low)
    values = dict(plan.values)
    for key in _ADDED:
        sized = key == "data.micro_batch_size" and "data.batch_size" in values
        long = key in _LENGTHS and any(length in values for length in _LENGTHS)
        if key in own.values and not sized and not long:
            values.setdefault(key, own.values[key])
    values = {
        "task._target_": f"{path.stem}.{TASK}",
        "data._target_": f"{path.stem}.{DATA}",
    } | values
    start = plan.command or f"python -m torsh_trainer +recipe={RECIPE} task=TASK data=DATA"
    start = start.replace(" task=TASK data=DATA", "")
    if not any(length in values for length in _LENGTHS):
        start += " trainer.max_epochs=N"
    paths = _list_paths(path, own.roots)
    if paths:
        start = f"PYTHONPATH={':'.join(map(quote, paths))} {start}"
    kept = [note for note in plan.notes if not note.startswith(_YOURS)]
    notes = (f"model, data and loss: {path}", *kept, *own.notes)
    return TaskFile(path, replace(plan, values=values, command=start, notes=notes), own)


def _list_paths(path: Path, roots: Sequence[Path]) -> list[str]:
    """Folders that Python has to be told of; the current one it knows."""
    here = Path.cwd()
    found = dict.fromkeys([path.absolute().parent, *roots])
    return [_shorten(folder, here) for folder in found if folder.resolve() != here.resolve()]


def _shorten(folder: Path, here: Path) -> str:
    try:
        return str(folder.resolve().relative_to(here.resolve()))
    except ValueError:
        return str(folder.resolve())


def list_missing(task: TaskFile) -> Iterator[str]:
    """Lines for the terminal: what was written, and what is to be filled in."""
    missing = task.own.missing
    if not missing:
        yield f"{task.path}: {TASK} and {DATA}; nothing is missing"
        return
    count = "1 place" if len(missing) == 1 else f"{len(missing)} places"
    yield f"{task.path}: {TASK} and {DATA}; {count} to fill in, each marked by fill_in:"
    for one in missing:
        yield f"  {one}"
