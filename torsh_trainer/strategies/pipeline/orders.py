"""In which order a process of a pipeline computes and sends.

The order of interleaved 1F1B is that of torch.distributed.pipelining, and so is where sends and
receives stand in every order. GPipe, looped BFS and 1F1B are written out: as a list of actions
torch 2.13 has them for pictures alone, and its 1F1B begins the last stage with micro-batch 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torsh_trainer.errors import ConfigError, Unsupported, nearest

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward",
               "receive_backward"]  # fmt: skip

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs")
"""Those of several stages on each process."""
NOT_YET = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


class Action(NamedTuple):
    """What a process does next, for a stage of its own and a micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


def check_schedule(name: str, stages_per_rank: int) -> None:
    """Makes sure that there is such a schedule, for so many stages on each process.

    Raises:
        ConfigError: there is none.
        Unsupported: torch has it, and nothing here runs it.
    """
    if name in NOT_YET:
        raise Unsupported(
            f"strategy.schedule={name} is not there yet",
            fix=f"use {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}",
        )
    if name not in SCHEDULES:
        raise ConfigError(f"strategy.schedule={name} is unknown", fix=nearest(name, SCHEDULES))
    if stages_per_rank < 1:
        raise ConfigError(
            f"strategy.stages_per_rank={stages_per_rank} is below 1", fix="give 1 or more"
        )
    if (stages_per_rank > 1) is not (name in SEVERAL_STAGES):
        raise ConfigError(
            f"strategy.schedule={name} with strategy.stages_per_rank={stages_per_rank}: "
            + ("it takes 2 or more" if stages_per_rank == 1 else "it takes 1"),
            fix="set strategy.schedule=interleaved_1f1b strategy.stages_per_rank=2, or "
            "strategy.schedule=1f1b strategy.stages_per_rank=1",
        )


def check_micro_batches(name: str, *, ranks: int, micro_batches: int) -> None:
    """Makes sure that the schedule takes so many micro-batches.

    Raises:
        ConfigError: interleaving does not, with the nearest numbers that it takes.
    """
    if name != "interleaved_1f1b" or _takes(ranks, micro_batches):
        return
    below = next(n for n in range(micro_batches, 0, -1) if _takes(ranks, n))
    above = next(n for n in range(micro_batches, 2 * micro_batches + ranks) if _takes(ranks, n))
    raise ConfigError(
        f"strategy.schedule=interleaved_1f1b on mesh.pp={ranks} does not divide a step of "
        f"{micro_batches} micro-batches into rounds",
        fix=f"set trainer.accumulate={below} or {above}, or strategy.schedule=1f1b "
        "strategy.stages_per_rank=1",
    )


def _takes(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


def bubble(*, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """The share of a step in which a process waits, where stages take equally long.

    (p - 1) / (v m + p - 1), with v stages on each of p processes (Narayanan et al. 2021, 2.2).
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


@functools.cache
def order_of(
    name: str, *, ranks: int, stages_per_rank: int, micro_batches: int, rank: int
) -> Sequence[Action]:
    """The actions of ``rank``; stage s is on process s % ranks."""
    # Imported here: it costs the start of every run that has no pipeline.
    from torch.distributed.pipelining import schedules as torchs

    count = ranks * stages_per_rank
    if name == "interleaved_1f1b":
        rounds = max(1, micro_batches // ranks)
        known = SimpleNamespace(
            n_local_stages=stages_per_rank,
            pp_group_size=ranks,
            microbatches_per_round=micro_batches // rounds,
            _n_microbatches=micro_batches,
        )
        made = torchs.ScheduleInterleaved1F1B._calculate_single_rank_operations
        computed = {one: made(known, one) for one in range(ranks)}  # type: ignore[arg-type]
    elif name == "looped_bfs":
        # All micro-batches through a stage before the next one of the process begins.
        computed = {
            one: [
                torchs._Action(stage, kind, i)
                for kind, loops in (
                    (torchs.F, range(stages_per_rank)),
                    (torchs.FULL_BACKWARD, reversed(range(stages_per_rank))),
                )
                for stage in (one + loop * ranks for loop in loops)
                for i in range(micro_batches)
            ]
            for one in range(ranks)
        }
    else:
        computed = {}
        for stage in range(ranks):
            forwards, backwards = (
                [torchs._Action(stage, kind, i) for i in range(micro_batches)]
                for kind in (torchs.F, torchs.FULL_BACKWARD)
            )
            # As many forwards ahead of backwards as there are stages behind this one.
            ahead = micro_batches if name == "gpipe" else min(micro_batches, ranks - 1 - stage)
            paired = zip(forwards[ahead:], backwards, strict=False)
            computed[stage] = [
                *forwards[:ahead],
                *(action for pair in paired for action in pair),
                *backwards[micro_batches - ahead :],
            ]
    kinds: dict[Any, Kind] = {
        torchs.F: "forward",
        torchs.FULL_BACKWARD: "backward",
        torchs.SEND_F: "send_forward",
        torchs.RECV_F: "receive_forward",
        torchs.SEND_B: "send_backward",
        torchs.RECV_B: "receive_backward",
    }
    wanted: Any = {
        one: [a for a in actions if a is not None and a.computation_type in kinds]
        for one, actions in computed.items()
    }
    # Every receive stands where its send has been begun on the other side: sends that wait for
    # their receives would not lock up either.
    whole = torchs._add_send_recv(wanted, lambda stage: stage % ranks, count)
    return tuple(
        Action(kinds[a.computation_type], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
        for a in whole[rank]
    )
