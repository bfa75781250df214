"""Flags of ``torchrun`` and ``python -m torch.distributed.launch``: torch 2.13."""

from __future__ import annotations

from torsh_trainer.translate.launch.flags import (
    StatedFlag,
    fix_row,
    fix_rows,
    judge_row,
    table_of_rows,
)
from torsh_trainer.translate.launch.job import LaunchJob, Link, WorldShape
from torsh_trainer.translate.outcomes import Outcome, approximate, exact

_MEETING = "one machine meets by itself; several keep it in the command below"


def _judge_processes(job: LaunchJob, said: StatedFlag) -> Outcome:
    if job.line.is_kept:
        return exact("kept in the command below")
    if not job.starts_here:
        return exact("processes of each machine: in the command below")
    return exact("processes on this machine", launcher__num_processes=job.count(said))


def _judge_nodes(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.hole is None and ":" in said.text and len(set(said.text.split(":"))) > 1:
        return approximate(
            "torchrun restarts on fewer or more machines: kept in the command, and the run goes on "
            "from its last checkpoint (checkpoint.every_steps)"
        )
    if job.line.is_kept:
        return exact("kept in the command below")
    if job.world.is_one_machine:
        return exact("this machine")
    return exact("machines: the command below is typed on each of them")


def _judge_restarts(job: LaunchJob, said: StatedFlag) -> Outcome:
    if said.hole is None and said.text == "0":
        return exact("none")
    return approximate(
        "launcher=local starts once; torchrun around the recipe restarts it, and the run goes on "
        "from its last checkpoint (checkpoint.every_steps)"
    )


TABLE = table_of_rows(
    judge_row("--nproc_per_node", _judge_processes, rule="torchrun.processes"),
    judge_row("--nnodes", _judge_nodes, rule="torchrun.nodes"),
    judge_row("--max_restarts", _judge_restarts, rule="torchrun.restarts"),
    *fix_rows(
        "--rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --node_rank --master_addr "
        "--master_port --local_addr",
        "exact",
        _MEETING,
        rule="launch.meeting",
    ),
    fix_row("--standalone", "exact", "one machine meets by itself", takes=0, rule="launch.meeting"),
    fix_row("-m --module", "exact", "the script is a module", takes=0, rule="launch.script"),
    fix_row("--no_python", "exact", "a program, not a script", takes=0, rule="launch.script"),
    fix_row("--run_path", "exact", "how torchrun starts the script", takes=0, rule="launch.script"),
    fix_row(
        "--use_env",
        "exact",
        "processes find their place in the environment",
        takes=0,
        rule="launch.script",
    ),
    fix_row("--role", "dead", "a name in torchrun's log", rule="launch.logs"),
    *fix_rows(
        "--log_dir --logs_specs",
        "performance-only",
        "each process writes logs/rank-N.log of the run directory",
        rule="launch.logs",
    ),
    *fix_rows(
        "-r -t --redirects --tee --local_ranks_filter --duplicate_stdout_filters "
        "--duplicate_stderr_filters --event_log_handler",
        "performance-only",
        "which process prints: here rank 0, and each into its log",
        rule="launch.logs",
    ),
    fix_row(
        "--monitor_interval",
        "dead",
        "how often torchrun looks; here a failure is seen at once",
        rule="launch.watch",
    ),
    fix_row(
        "--signals_to_handle",
        "exact",
        "Ctrl-C and SIGTERM save and end the run",
        rule="launch.watch",
    ),
    fix_row(
        "--shutdown_timeout",
        "performance-only",
        "launcher.grace_s: seconds to save and end",
        rule="launch.watch",
    ),
    fix_row("--start_method", "dead", "processes are new ones", rule="launch.watch"),
    fix_row(
        "--numa_binding",
        "performance-only",
        "kept by torchrun around the recipe",
        rule="launch.cores",
    ),
    fix_row(
        "--virtual_local_rank",
        "dead",
        "each process chooses its device by its place",
        takes=0,
        rule="launch.script",
    ),
)
"""Every flag of torchrun, with ``_``; it takes ``-`` as well."""


def shape_world(job: LaunchJob, link: Link) -> WorldShape:
    """How many processes the command starts."""
    said = link.find("nnodes")
    nodes: int | None = 1
    if said is not None:
        least, _, most = said.text.partition(":")
        known = said.hole is None and (most or least).isdigit()
        nodes = int(most or least) if known else None
    each = link.find("nproc_per_node")
    return WorldShape(1 if each is None else job.count_known(each), nodes)
