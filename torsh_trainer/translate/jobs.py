"""One of several jobs, by the name that the user gives: ``--job run.sh:12``, or ``--job 12``."""

from __future__ import annotations

from collections.abc import Sequence

from torsh_trainer.errors import ConfigError

OPTION = "--job"
_MOST = 8


def choose_job(names: Sequence[str], asked: str | None, *, source: str) -> int:
    """Which of the jobs of ``source`` is meant; of a single one none has to be named.

    Raises:
        ConfigError: several are there and none is named, or the name fits none, or several.
    """
    if asked is None:
        if len(names) == 1:
            return 0
        raise ConfigError(
            f"{source} starts {len(names)} jobs: {_list_names(names)}",
            fix=f"choose one of them: {OPTION} {quote_name(names[0])}",
        )
    exact = [at for at, name in enumerate(names) if name == asked]
    found = exact or [
        at for at, name in enumerate(names) if name.endswith((f":{asked}", f"/{asked}"))
    ]
    if len(found) == 1:
        return found[0]
    what = "no job of" if not found else "more than one job of"
    raise ConfigError(
        f"{OPTION} {asked} is {what} {source}: they are {_list_names(names)}",
        fix="name it as it stands there",
    )


def quote_name(name: str) -> str:
    """The name of a job as a shell wants it."""
    return f"'{name}'" if " " in name else name


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"
