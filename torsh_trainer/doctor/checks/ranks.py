"""Who this process would believe to be: variables of launchers and schedulers, held together."""

from __future__ import annotations

import re
import socket

from torsh_trainer import environments
from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding, skip_check
from torsh_trainer.doctor.machine import Machine, find_addresses, own_addresses
from torsh_trainer.environments.reading import LOOPBACK, is_set
from torsh_trainer.errors import TorshError

_COUNTS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES"),
    *("MASTER_PORT", "GROUP_RANK"),
)
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JOB_COMPLETION_INDEX")
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LAUNCHED = "TORCHELASTIC_RUN_ID"


class RankVariables(Check):
    """RANK, WORLD_SIZE and their like hold numbers that fit together."""

    why = (
        "a variable that was never filled in ($SLURM_NTASKS in a Dockerfile, an empty value) makes "
        "a world in which somebody is missing: the others wait for it until their time-out"
    )

    def look(self, machine: Machine) -> CheckResult:
        numbers: dict[str, int] = {}
        for name in _COUNTS:
            text = machine.env.get(name, "").strip()
            if name in machine.env and not (text.isascii() and text.isdigit()):
                told = f"{name}={machine.env[name]!r}"
                return report_finding(
                    f"{told} is no number{_placeholder(text)}",
                    fix=f"unset {name}, or export {name}=NUMBER where the job is started",
                )
            if text:
                numbers[name] = int(text)
        for rank, total in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if rank in numbers and numbers[rank] >= numbers.get(total, numbers[rank] + 1):
                return report_finding(
                    f"{rank}={numbers[rank]} in {total}={numbers[total]}: ranks are counted from 0",
                    fix=f"export {rank}=0..{numbers[total] - 1}, another for each process",
                )
        if "RANK" in numbers and "WORLD_SIZE" not in numbers and _is_alone(machine):
            return report_finding(
                f"RANK={numbers['RANK']}, and WORLD_SIZE is not set",
                fix="export WORLD_SIZE=NUMBER of all processes, or start with torchrun",
            )
        each, size = numbers.get("LOCAL_WORLD_SIZE"), numbers.get("WORLD_SIZE")
        if each and size and each > size:
            return report_finding(
                f"LOCAL_WORLD_SIZE={each} is above WORLD_SIZE={size}",
                fix=f"export WORLD_SIZE={each}, or more: it counts the processes of all hosts",
            )
        port = numbers.get("MASTER_PORT")
        if port is not None and not 0 < port < 65536:
            return report_finding(f"MASTER_PORT={port} is no port", fix="export MASTER_PORT=29500")
        told = ", ".join(f"{name}={value}" for name, value in numbers.items())
        return pass_check(told or "none is set: a launcher will set them")


class DuplicateRanks(Check):
    """RANK is not fixed by hand where a scheduler numbers the processes."""

    why = (
        "RANK=0 that a script exports goes to every task of srun or mpirun: each believes to be "
        "rank 0, all of them write the same files, and the world is never complete"
    )

    def look(self, machine: Machine) -> CheckResult:
        env = machine.env
        if is_set(env, _LAUNCHED):
            return pass_check("torchrun numbers the processes")
        told = [(name, env[name].strip()) for name in _RANKS if is_set(env, name)]
        rank = env.get("RANK", "").strip()
        if not rank or not told:
            return pass_check("one source numbers the processes, or none does")
        saw = f"RANK={rank} and " + ", ".join(f"{name}={value}" for name, value in told)
        if any(value != rank for _, value in told):
            return report_finding(
                saw, fix=f"unset RANK LOCAL_RANK, or export RANK=${told[0][0]} within each task"
            )
        return pass_check(saw)


class SchedulerTasks(Check):
    """The scheduler's number of tasks is the number of processes that the job counts on."""

    why = (
        "with fewer tasks than WORLD_SIZE the job waits for processes that nobody starts; with "
        "more, two of them take one place ('worker_count=16, world_size=8')"
    )

    def look(self, machine: Machine) -> CheckResult:
        env = machine.env
        if is_set(env, _LAUNCHED) or not is_set(env, "WORLD_SIZE"):
            return pass_check("nothing but the scheduler counts the processes")
        for name in _SIZES:
            if is_set(env, name) and env[name].strip() != env["WORLD_SIZE"].strip():
                saw = f"{name}={env[name].strip()} and WORLD_SIZE={env['WORLD_SIZE'].strip()}"
                return report_finding(
                    saw, fix=f"export WORLD_SIZE=${name}, or ask for as many tasks (--ntasks)"
                )
        return pass_check(f"WORLD_SIZE={env['WORLD_SIZE'].strip()}, and nobody says otherwise")


class MasterPerNode(Check):
    """MASTER_ADDR is the first host's, on every host."""

    why = (
        "MASTER_ADDR=$(hostname -i) is another address on each host: each waits at its own for "
        "the rest, until the time-out"
    )

    def look(self, machine: Machine) -> CheckResult:
        address, rank = machine.env.get("MASTER_ADDR", "").strip(), machine.node_rank
        if not address or not rank or machine.job_nodes < 2:
            return skip_check("this host is the first, or nothing says which it is")
        mine = address == socket.gethostname() or bool(
            find_addresses(address) & own_addresses() - set(LOOPBACK)
        )
        saw = f"this is host {rank} of {machine.job_nodes}, and MASTER_ADDR={address}"
        if mine or address in LOOPBACK:
            first = "FIRST_HOST"
            if is_set(machine.env, "SLURM_JOB_NODELIST"):
                first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            return report_finding(f"{saw} is this host", fix=f"export MASTER_ADDR={first}")
        return pass_check(saw)


class RankEnvironment(Check):
    """The variables of launchers and schedulers do not contradict one another."""

    why = (
        "a run reads its place from them before anything else, and ends there; or it takes the "
        "place that an outer job's variables give it"
    )

    def look(self, machine: Machine) -> CheckResult:
        try:
            world = environments.detect(machine.env)
        except TorshError as error:
            return report_finding(error.sentence, fix=error.fix)
        if world is None:
            return pass_check("no launcher or scheduler: this process stands alone")
        return pass_check(f"rank {world.rank} of {world.size}, by {world.source}")


def _placeholder(text: str) -> str:
    if not text:
        return ": it is empty"
    return ": nothing has filled it in" if re.search(r"[${<]|NUMBER|\bN\b|XXX", text) else ""


def _is_alone(machine: Machine) -> bool:
    return not any(is_set(machine.env, name) for name in (*_RANKS, *_SIZES, "LOCAL_WORLD_SIZE"))
