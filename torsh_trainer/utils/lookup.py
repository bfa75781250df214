"""What a user typed, a pattern or an import path, turned into what it means or a clear error."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torsh_trainer.errors import ConfigError, ResourceError, nearest
from torsh_trainer.utils.importing import collector_at_rest

SHOWN = 6
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "torsh_trainer.optimizers": "torsh_trainer.optim.optimizers",
        "torsh_trainer.precision": "torsh_trainer.optim.precision",
        "torsh_trainer.schedule": "torsh_trainer.optim.schedule",
        "torsh_trainer.task": "torsh_trainer.tasks.base",
    }
)
"""Old module -> new one, for classes that a ``_target_`` could name; gone in release 0.2.0."""

_noted: set[str] = set()


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match ``pattern`` (fnmatch, case-sensitive; ``*`` crosses dots), in order."""
    return [name for name in names if fnmatchcase(name, pattern)]


def no_match(pattern: str, names: Collection[str], *, option: str) -> ConfigError:
    """The error for a pattern of parameter names that matches none of ``names``."""
    stem = pattern.strip("!*?.")
    modules = {name.rsplit(".", depth)[0] for name in names for depth in range(1, 4)} - set(names)
    offer = nearest(stem, modules | set(names))
    if not offer.startswith("did you mean"):
        offer = "the parameters are " + list_first(names)
    return ConfigError(
        f"{option}: the pattern {pattern!r} matches no parameter", fix=offer, pattern=pattern
    )


def list_first(names: Collection[str]) -> str:
    """The first few of ``names`` and how many more there are."""
    first = ", ".join(list(names)[:SHOWN])
    return first + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def with_keywords(
    options: Mapping[str, Any], keywords: Mapping[str, Any], *, owner: str
) -> dict[str, Any]:
    """``options`` and, beside them, those that came as keyword arguments of ``owner``.

    Raises:
        ConfigError: one is among both.
    """
    for name in keywords:
        if name in options:
            raise ConfigError(
                f"{owner}: {name} is given twice, as a keyword and in options", fix="give it once"
            )
    return {**options, **keywords}


def import_object(path: str, *, option: str) -> Any:
    """The object at ``package.module.Name`` or ``package.module:Name``.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
        ResourceError: the module is there, and something that it imports is not installed.
    """
    module_name, _, name = _find_moved(path.replace(":", ".")).rpartition(".")
    try:
        with collector_at_rest():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"{option}={path}: there is no module {error.name!r} here",
                fix=_where(error.name.partition(".")[0]),
                path=path,
            ) from error
        raise ResourceError(
            f"{option}={path}: importing it needs {error.name!r}, which is not installed",
            fix=f"pip install {error.name}",
            path=path,
        ) from error
    if not hasattr(module, name):
        public = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(
            f"{option}={path}: {module_name} has no {name!r}", fix=nearest(name, public), path=path
        )
    return getattr(module, name)


def _find_moved(path: str) -> str:
    """Where ``path`` is today; says so in one line, once a process, when that is another place."""
    for old, new in MOVED.items():
        if path.startswith(f"{old}."):
            today = new + path.removeprefix(old)
            if path not in _noted:
                _noted.add(path)
                print(
                    f"note: {path} is now {today}; the old name goes in release 0.2.0",
                    file=sys.stderr,
                )
            return today
    return path


def _where(package: str) -> str:
    """What to do about a package that is not found."""
    if Path("src", package).exists() or Path("src", f"{package}.py").exists():
        return "it lies in src/, which counts beside a pyproject.toml; or pip install -e ."
    return "install it, or correct the path"
