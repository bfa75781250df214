"""Who am I: the processes of a job find their place from the variables of whatever started them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.by_hand import ByHand
from torsh_trainer.environments.horovod import Horovod
from torsh_trainer.environments.kubernetes import Kubernetes
from torsh_trainer.environments.lsf import Lsf
from torsh_trainer.environments.openmpi import OpenMPI
from torsh_trainer.environments.pbs import Pbs
from torsh_trainer.environments.pmi import Pmi
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.slurm import Slurm
from torsh_trainer.environments.torchrun import Torchrun
from torsh_trainer.errors import ConfigError
from torsh_trainer.world import World

__all__ = ["ENVIRONMENTS", "Environment", "detect", "explain"]

# What starts a process last knows its place best, so launchers of processes stand before the
# schedulers in whose jobs they run (torchrun inside srun, mpirun inside sbatch, whose helper
# processes carry SLURM's variables too). Variables set by hand stand last: they are inherited by
# every process that a launcher starts after them.
ENVIRONMENTS: tuple[Environment, ...] = (
    Torchrun(),
    Horovod(),
    Lsf(),
    Pbs(),
    OpenMPI(),
    Pmi(),
    Slurm(),
    Kubernetes(),
    ByHand(),
)
RULE = "the first that describes more than one process decides, else the first that describes one"


def detect(env: Mapping[str, str]) -> World | None:
    """This process's place by the first environment, in order, that describes several processes.

    A world of one never hides a world of many (``srun -n 1`` around a pod's variables), unless
    more processes may come; it is returned when there is nothing larger. None: no environment knows
    this process.

    Raises:
        ConfigError: an environment's variables contradict one another, or do not suffice.
    """
    verdict = _judge(env)
    if verdict.error is not None:
        raise verdict.error
    return verdict.world


def explain(env: Mapping[str, str]) -> str:
    """What each environment saw, which one decided, and why; several lines, never an error."""
    verdict = _judge(env)
    lines = [_headline(verdict), f"order: {RULE}"]
    for environment in ENVIRONMENTS:
        lines += _paragraph(environment, env, verdict)
    return "\n".join(lines)


@dataclass(frozen=True)
class _Verdict:
    world: World | None
    decided_by: str = ""
    error: ConfigError | None = None


def _judge(env: Mapping[str, str]) -> _Verdict:
    alone = _Verdict(None)
    for environment in ENVIRONMENTS:
        try:
            world = environment.world(env)
        except ConfigError as error:
            return _Verdict(None, environment.name, error)
        if world is None:
            continue
        if world.size > 1 or world.elastic:
            return _Verdict(world, environment.name)
        if alone.world is None:
            alone = _Verdict(world, environment.name)
    return alone


def _headline(verdict: _Verdict) -> str:
    if verdict.error is not None:
        return f"this process has no place, says {verdict.decided_by}: {verdict.error}"
    if verdict.world is None:
        return "no environment knows this process: it stands alone"
    return f"this process is {_place(verdict.world)}; decided by {verdict.decided_by}"


def _place(world: World) -> str:
    text = (
        f"rank {world.rank} of {world.size} "
        f"(local rank {world.local_rank} of {world.local_size}, "
        f"node {world.node_rank} of {world.nodes})"
    )
    if world.told == "node":
        text += f", the first of {world.local_size} to start here"
    if world.size > 1 and world.rendezvous is not None:
        text += f", meeting at {world.rendezvous.address}:{world.rendezvous.port}"
    return text


def _paragraph(environment: Environment, env: Mapping[str, str], verdict: _Verdict) -> list[str]:
    decided = environment.name == verdict.decided_by
    mark = "*" if decided else " "
    try:
        world = environment.world(env)
    except ConfigError as error:
        return [f"{mark} {environment.name:<11} error: {error}", *_seen(environment, env)]
    if world is None:
        lines = [f"{mark} {environment.name:<11} no: {environment.absence(env)}"]
        return lines + _seen(environment, env)
    note = "" if decided else f" (not chosen: {verdict.decided_by} comes before it)"
    if not decided and world.size == 1:
        note = f" (not chosen: a single process, beside {verdict.decided_by})"
    lines = [f"{mark} {environment.name:<11} yes: {_place(world)}{note}"]
    return lines + [f"      {reason}" for reason in world.reasons]


def _seen(environment: Environment, env: Mapping[str, str]) -> list[str]:
    names = [name for name in dict.fromkeys(environment.variables) if is_set(env, name)]
    if set(names) <= {"MASTER_ADDR", "MASTER_PORT"}:  # every environment takes these
        return []
    return ["      saw " + ", ".join(f"{name}={env[name].strip()}" for name in names)]
