"""Which processes measure which backends; the parent of them does without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer import registry
from torsh_trainer.comm.bench import Plan
from torsh_trainer.errors import ConfigError, ResourceError, TorshError
from torsh_trainer.launchers import hardware
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.local import Local
from torsh_trainer.world import World

_BUILT_IN = ("nccl", "gloo", "mpi")
_PLUGIN = "no launcher for it is installed (pip install torsh-trainer-mpi)"


@dataclass
class Answer:
    """What came of it: records, and why a backend has none."""

    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def measure(
    plan: Plan,
    *,
    backends: Sequence[str],
    processes: int | None,
    timeout_s: float,
    context: LaunchContext,
) -> Answer | None:
    """Measures ``backends`` (empty: all that are available); None on all processes but the first.

    A backend whose processes must be started in a way of their own (MPI) has a launcher of its
    name; all others share the processes of one ``Local``, or those that exist already.

    Raises:
        ConfigError: processes exist already, and they are not ``processes``.
        ResourceError: a backend that was named is not available.
        TrainingError: a collective failed.
    """
    started = context.found is not None and context.found.size > 1
    if started and processes not in (None, context.found.size if context.found else 1):
        raise ConfigError(
            f"--processes {processes}, but {context.found.size if context.found else 1} processes "
            "were started already",
            fix="leave --processes out here",
        )
    count = processes or max(2, hardware.accelerators(context.env))
    answer = Answer()
    for launcher, names in _launches(backends, count, answer, started=started):
        _announce(names, plan, context)
        try:
            found = launcher.launch(
                on_rank, plan, names, bool(backends), timeout_s, context=context
            )
        except TorshError as error:
            if backends or len(names) > 1 or names[0] in ("gloo", "nccl"):
                raise
            answer.left_out[names[0]] = str(error)  # nobody named it: the others are still told
            continue
        if found is None:
            return None
        answer.records += found["records"]
        answer.left_out |= found["left_out"]
    return answer


def on_rank(
    world: World, plan: Plan, backends: Sequence[str], named: bool, timeout_s: float
) -> dict[str, Any] | None:
    """What every process runs; the first one's answer counts."""
    # Imported in the processes that measure: the parent has no use for torch.
    from torsh_trainer.bench.rank import measured

    return measured(world, plan, backends, named=named, timeout_s=timeout_s)


def _launches(
    backends: Sequence[str], count: int, answer: Answer, *, started: bool
) -> list[tuple[Launcher, tuple[str, ...]]]:
    """Launchers, and the backends that each of them serves."""
    names = tuple(backends) or tuple(dict.fromkeys([*_BUILT_IN, *registry.backends()]))
    if started:
        return [(Local(), names)]
    own = registry.launchers()
    together = tuple(name for name in names if name not in own and name != "mpi")
    launches: list[tuple[Launcher, tuple[str, ...]]] = []
    if together:
        launches.append((Local(num_processes=count), together))
    for name in names:
        if name in own:
            launches.append((registry.load(own[name])(num_processes=count), (name,)))
        elif name == "mpi":
            if backends:
                raise ResourceError(
                    f"mpi cannot be measured: {_PLUGIN}",
                    fix="install it, or start this command with mpirun",
                )
            answer.left_out[name] = _PLUGIN
    return launches


def _announce(names: Sequence[str], plan: Plan, context: LaunchContext) -> None:
    if context.found is None or context.found.is_main:
        print(
            f"measuring {', '.join(names)}: {len(plan.collectives)} collectives, "
            f"{len(plan.sizes)} sizes",
            file=sys.stderr,
        )


def by_backend(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The backends of ``records``, in the order in which they were measured."""
    return list(dict.fromkeys(str(record["backend"]) for record in records))
