"""Which processes measure which backends; the parent of them does without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.distributed.bench import BenchPlan
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError
from torsh_trainer.launchers import hardware
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.local import Local
from torsh_trainer.utils import registry

_KNOWN = ("nccl", "gloo", "mpi")


@dataclass
class Answer:
    """What came of it: records, and why a backend has none."""

    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def measure(
    plan: BenchPlan,
    *,
    backends: Sequence[str],
    processes: int | None,
    timeout_s: float,
    context: LaunchContext,
) -> Answer | None:
    """Measures ``backends`` (empty: all that are available); None on all processes but the first.

    A backend that a plugin brings has processes of its own, so that nothing of it stands beside
    the others, and they are told when it fails. All others share the processes of one ``Local``.
    Where processes exist already, these measure everything.

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
    for launcher, names in _launches(backends, count, started=started):
        _announce(names, plan, context)
        try:
            found = launcher.launch(
                on_rank, plan, names, bool(backends), timeout_s, context=context
            )
        except TorshError as error:
            if backends or names[0] not in registry.BACKENDS:
                raise
            answer.left_out[names[0]] = str(error)  # nobody named it: the others are still told
            continue
        if found is None:
            return None
        answer.records += found["records"]
        answer.left_out |= found["left_out"]
    return answer


def on_rank(
    world: World, plan: BenchPlan, backends: Sequence[str], named: bool, timeout_s: float
) -> dict[str, Any] | None:
    """What every process runs; the first one's answer counts."""
    # Imported in the processes that measure: the parent has no use for torch.
    from torsh_trainer.bench.rank import measure_backends

    return measure_backends(world, plan, backends, named=named, timeout_s=timeout_s)


def _launches(
    backends: Sequence[str], count: int, *, started: bool
) -> list[tuple[Launcher, tuple[str, ...]]]:
    """Launchers, and the backends that each of them serves."""
    brought = registry.BACKENDS.names()
    names = tuple(backends) or tuple(dict.fromkeys([*_KNOWN, *brought]))
    if started:
        return [(Local(), names)]
    together = tuple(name for name in names if name not in brought)
    alone = [(name,) for name in names if name in brought]
    return [(Local(num_processes=count), each) for each in [together, *alone] if each]


def _announce(names: Sequence[str], plan: BenchPlan, context: LaunchContext) -> None:
    if context.found is None or context.found.is_rank_zero:
        print(
            f"measuring {', '.join(names)}: {len(plan.collectives)} collectives, "
            f"{len(plan.sizes)} sizes",
            file=sys.stderr,
        )


def by_backend(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The backends of ``records``, in the order in which they were measured."""
    return list(dict.fromkeys(str(record["backend"]) for record in records))
