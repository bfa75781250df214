"""Flags of the command ``deepspeed``: ``deepspeed.launcher.runner.parse_args`` of 0.19.8."""

from __future__ import annotations

import re

from torsh_trainer.translate.launch.flags import StatedFlag, fix_row, judge_row, table_of_rows
from torsh_trainer.translate.launch.job import AUTO, LaunchJob, Link, WorldShape
from torsh_trainer.translate.outcomes import Outcome, approximate, dead, exact, refuse

_ELSEWHERE = "the recipe is started on each machine, or by srun or mpirun: no ssh is used"
_LOCAL = ("localhost", "127.0.0.1")


def _judge_gpus(job: LaunchJob, said: StatedFlag) -> Outcome:
    if not job.starts_here:
        return exact("processes of each machine: in the command below")
    return exact("one process for each GPU", launcher__num_processes=job.count(said))


def _judge_nodes(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.whole(said, least=1) == 1:
        return exact("this machine")
    return exact("machines: in the command below")


def _judge_include(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.is_empty:
        return dead("empty: nothing is chosen")
    hosts = parse_resources(job.text(said))
    if len(hosts) > 1:
        return refuse(f"not in this release: several hosts by name; {_ELSEWHERE}")
    ((host, slots),) = hosts.items()
    if host not in _LOCAL and not slots:
        return approximate(f"type the command below on {host}: {_ELSEWHERE}")
    where = "" if host in _LOCAL else f"on {host}, "
    if not slots:
        return exact("all GPUs of this machine", launcher__num_processes=AUTO)
    return Outcome(
        "exact" if not where else "approximate",
        f"{where}set CUDA_VISIBLE_DEVICES={','.join(slots)} around the command, as it stands below",
        values={"launcher.num_processes": len(slots)},
    )


def _judge_exclude(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.is_empty:
        return dead("empty: nothing is left out")
    return approximate(
        "set CUDA_VISIBLE_DEVICES to the GPUs that are left, around the command",
        launcher__num_processes=AUTO,
    )


def _judge_hostfile(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.hole is None and said.text in ("/dev/null", "''", ""):
        return dead("empty: this machine")
    if job.world.is_one_machine and job.option("num_nodes", "include") is not None:
        return dead("one machine is asked for")
    return approximate(f"its hosts are yours to start on: {_ELSEWHERE}")


def _judge_launcher(job: LaunchJob, said: StatedFlag) -> Outcome:
    return dead(f"{said.text} starts processes on other machines; {_ELSEWHERE}")


def _judge_autotuning(job: LaunchJob, said: StatedFlag) -> Outcome:
    return refuse(
        "not in this release: a search for batch sizes and stages; trainer.stages takes "
        "find_batch_size, and sweeps search the rest"
    )


def parse_resources(text: str) -> dict[str, list[str]]:
    """``worker-0:0,2@worker-1`` as host -> slots, none for all of them."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"@", text.strip().strip("\"'")):
        host, _, slots = part.partition(":")
        found[host] = [slot for slot in slots.split(",") if slot]
    return found


TABLE = table_of_rows(
    judge_row("--num_accelerators --num_gpus", _judge_gpus, rule="deepspeed.gpus"),
    judge_row("--num_nodes", _judge_nodes, rule="deepspeed.nodes"),
    judge_row("-H --hostfile", _judge_hostfile, rule="deepspeed.hosts"),
    judge_row("-i --include", _judge_include, rule="deepspeed.include"),
    judge_row("-e --exclude", _judge_exclude, rule="deepspeed.exclude"),
    fix_row(
        "--master_port",
        "exact",
        "launcher=local takes a free port by itself; several machines keep it in the command",
        rule="launch.meeting",
    ),
    fix_row(
        "--master_addr",
        "exact",
        "one machine needs none; several keep it in the command",
        rule="launch.meeting",
    ),
    fix_row(
        "--node_rank", "exact", "kept in the command, on several machines", rule="launch.meeting"
    ),
    judge_row("--launcher", _judge_launcher, rule="deepspeed.backend"),
    fix_row(
        "--launcher_args",
        "dead",
        "arguments of what DeepSpeed starts on other machines; here srun or mpirun are typed",
        rule="deepspeed.backend",
    ),
    fix_row("--module", "exact", "the script is a module", takes=0, rule="launch.script"),
    fix_row("--no_python", "exact", "a program, not a script", takes=0, rule="launch.script"),
    fix_row(
        "--no_local_rank",
        "exact",
        "nothing here passes a rank to a script",
        takes=0,
        rule="launch.script",
    ),
    fix_row("--no_ssh", "exact", "nothing is started by ssh", takes=0, rule="deepspeed.backend"),
    fix_row(
        "--no_ssh_check", "exact", "nothing is started by ssh", takes=0, rule="deepspeed.backend"
    ),
    fix_row("--ssh_port", "dead", "nothing is started by ssh", rule="deepspeed.backend"),
    fix_row(
        "--force_multi",
        "dead",
        "one machine is started like several",
        takes=0,
        rule="deepspeed.backend",
    ),
    fix_row("--save_pid", "dead", "the run directory says who runs", takes=0, rule="launch.logs"),
    fix_row(
        "--enable_each_rank_log",
        "performance-only",
        "each process writes logs/rank-N.log of the run directory",
        rule="launch.logs",
    ),
    judge_row("--autotuning", _judge_autotuning, rule="deepspeed.autotuning"),
    fix_row(
        "--bind_cores_to_rank",
        "performance-only",
        "processes share the cores: launcher.threads_per_process",
        takes=0,
        rule="launch.cores",
    ),
    fix_row(
        "--bind_core_list",
        "performance-only",
        "type taskset or numactl before the command",
        rule="launch.cores",
    ),
    fix_row("--venv_script", "dead", "activate it before the command", rule="launch.script"),
    fix_row("--log_level", "performance-only", "log_level says what is logged", rule="launch.logs"),
    fix_row(
        "-q --quiet", "performance-only", "log_level=error says less", takes=0, rule="launch.logs"
    ),
)
"""Every flag of the command ``deepspeed``."""


def shape_world(job: LaunchJob, link: Link) -> WorldShape:
    """How many processes the command starts."""
    nodes: int | None = 1
    said = link.find("num_nodes")
    hosts = link.find("hostfile", "H")
    include = link.find("include", "i")
    include = None if include is not None and include.is_empty else include
    if said is not None:
        nodes = None if said.hole is not None else job.whole(said, least=1)
    elif include is not None:
        nodes = len(parse_resources(include.text))
    elif hosts is not None and hosts.text not in ("/dev/null", ""):
        nodes = None
    gpus = link.find("num_gpus", "num_accelerators")
    if gpus is not None:
        return WorldShape(job.count_known(gpus), nodes)
    if include is not None and include.hole is None and nodes == 1:
        ((_, slots),) = parse_resources(include.text).items()
        return WorldShape(len(slots) or AUTO, nodes)
    return WorldShape(AUTO, nodes)
