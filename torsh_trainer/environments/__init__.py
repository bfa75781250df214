"""Who am I: the processes of a job find their place from the variables of whatever started them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_trainer.environments.base import Environment
from torsh_trainer.environments.reading import is_set
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.utils import registry

__all__ = ["Environment", "advise_steady", "detect", "explain", "find_environments"]

RULE = "the first that describes more than one process decides, else the first that describes one"


def find_environments() -> list[Environment]:
    """Ours and those of plugins in the order in which they are asked: see ``Environment.priority``.

    Raises:
        ConfigError, ResourceError: a plugin's cannot be had. Without it a process might take
            another place than its own, so a run ends here.
    """
    found = [kind() for kind in registry.ENVIRONMENTS.load_all(strict=True).values()]
    return sorted(found, key=lambda environment: (-environment.priority, environment.name))


def detect(env: Mapping[str, str]) -> World | None:
    """This process's place by the first environment, in order, that describes several processes.

    A world of one never hides a world of many (``srun -n 1`` around a pod's variables), unless
    more processes may come; it is returned when there is nothing larger. None: no environment knows
    this process.

    Raises:
        ConfigError: an environment's variables contradict one another, or do not suffice; or as
            ``find_environments``.
    """
    verdict = _judge(env)
    if verdict.error is not None:
        raise verdict.error
    return verdict.world


def advise_steady(source: str) -> str:
    """What to do for processes that stay to the end; ``source`` is the name of the environment."""
    found = (
        environment.steady for environment in find_environments() if environment.name == source
    )
    return next(filter(None, found), "start as many processes as will train, and no others later")


def explain(env: Mapping[str, str]) -> str:
    """What each environment saw, which one decided, and why: several lines.

    Contradictions are no error here.
    """
    verdict = _judge(env)
    lines = [_headline(verdict), f"order: {RULE}"]
    for environment in find_environments():
        lines += _paragraph(environment, env, verdict)
    return "\n".join(lines)


@dataclass(frozen=True)
class _Verdict:
    world: World | None
    decided_by: str = ""
    error: ConfigError | None = None


def _judge(env: Mapping[str, str]) -> _Verdict:
    alone = _Verdict(None)
    for environment in find_environments():
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
        return [f"{mark} {environment.name:<11} error: {error}", *_describe_seen(environment, env)]
    if world is None:
        lines = [f"{mark} {environment.name:<11} no: {environment.absence(env)}"]
        return lines + _describe_seen(environment, env)
    note = "" if decided else f" (not chosen: {verdict.decided_by} comes before it)"
    if not decided and world.size == 1:
        note = f" (not chosen: a single process, beside {verdict.decided_by})"
    lines = [f"{mark} {environment.name:<11} yes: {_place(world)}{note}"]
    return lines + [f"      {reason}" for reason in world.reasons]


def _describe_seen(environment: Environment, env: Mapping[str, str]) -> list[str]:
    names = [name for name in dict.fromkeys(environment.variables) if is_set(env, name)]
    if set(names) <= {"MASTER_ADDR", "MASTER_PORT"}:  # every environment takes these
        return []
    return ["      saw " + ", ".join(f"{name}={env[name].strip()}" for name in names)]
