"""How a job is started: processes, hosts, elasticity, and Horovod's own machinery."""

from __future__ import annotations

import math
from pathlib import PurePath

from torsh_trainer.translate.horovod.job import LOCAL_HOSTS, HorovodJob, Leaf
from torsh_trainer.translate.horovod.rules import constant_rule, fixed_rule, rule, switch_rule
from torsh_trainer.translate.outcomes import Outcome, approximate, dead, exact, faster, refuse

_RUN = "-m torsh_trainer +recipe=RECIPE.yaml"
_MEETING = "--rdzv-backend=c10d --rdzv-endpoint={first}:29500"
_EACH_BYTE = 1 / 2**20

fixed_rule("unknown", "dead", "nothing that Horovod knows: it passes over it in silence")


@rule("overridden", "The option counts before the file, and the file before the environment.")
def _judge_overridden(job: HorovodJob, leaf: Leaf) -> Outcome:
    return dead(f"{leaf.over} counts before it")


fixed_rule("block.empty", "exact", "empty: every default")
fixed_rule(
    "older",
    "dead",
    "a key of an older release: Horovod 0.28.1 passes over it in silence",
    engine_takes=False,
)
fixed_rule("env.place", "dead", "the launcher tells each process its place")
fixed_rule("env.elsewhere", "dead", "is read while Horovod is built, or by other frameworks alone")
fixed_rule("env.others", "dead", "no variable of Horovod; processes inherit it here, too")
fixed_rule("launch.checks", "dead", "there is no cache of checks to pass over")
fixed_rule("launch.no-run", "dead", "prints what Horovod is, and starts nothing")
fixed_rule("launch.config-file", "exact", "read together with this file")
fixed_rule("launch.hostfile", "exact", "read together with this line")


@rule("launch.processes", "As many processes, started here where they are all on this machine.")
def _processes(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.elastic:
        return refuse("not in this release: the first number of a job that grows and shrinks")
    if job.several_hosts:
        return exact("torchrun starts as many: see the hosts")
    return exact("processes on this machine", launcher__num_processes=leaf.value)


@rule("launch.hosts", "Processes on other machines are started there, by torchrun.")
def _hosts(job: HorovodJob, leaf: Leaf) -> Outcome:
    names = [host.name for host in job.hosts]
    if all(name in LOCAL_HOSTS for name in names):
        return exact("this machine")
    if len(names) == 1:
        return approximate(f"start the recipe on {names[0]}: nothing is started over ssh")
    each = {host.slots for host in job.hosts}
    count = str(each.pop()) if len(each) == 1 else "THE_SLOTS_OF_THIS_HOST"
    line = _torchrun(str(len(names)), count, names[0])
    return refuse(f"not in this release: processes on other hosts; on each of them run {line}")


def _torchrun(nodes: str, each: str, first: str) -> str:
    meeting = _MEETING.format(first=first)
    return f"torchrun --nnodes={nodes} --nproc-per-node={each} {meeting} {_RUN}"


@rule("launch.ssh", "Nothing is started over ssh.")
def _ssh(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.several_hosts:
        return refuse("not in this release: starting over ssh; torchrun is started on each host")
    return dead("all processes are on one machine")


@rule("launch.command", "What is started: the script, whose model and data stay its author's.")
def _command(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.script:
        return exact("its script is read as well")
    return approximate(
        "the script is not read here: translate SCRIPT.py --command 'horovodrun ...' reads both"
    )


@rule("launch.start-timeout", "How long processes are waited for.")
def _start_timeout(job: HorovodJob, leaf: Leaf) -> Outcome:
    value = float(leaf.value)
    if not value:
        return dead("0 is Horovod's default of 30 s")
    return exact(
        "seconds until all processes are there",
        launcher__startup_timeout_s=value,
        comm__startup_timeout_s=value,
    )


@rule("launch.interface", "The network interface of NCCL and gloo.")
def _interface(job: HorovodJob, leaf: Leaf) -> Outcome:
    return faster("NCCL and gloo are bound to it", comm__network_interface=leaf.value)


@rule("launch.output", "What each process prints goes to a file of its own.")
def _output(job: HorovodJob, leaf: Leaf) -> Outcome:
    folder = PurePath(leaf.value).name
    return faster(f"logs/rank-N.log of the run directory, instead of {folder}/rank.N/stdout")


constant_rule(
    "launch.verbose",
    "Who decided about the processes.",
    faster("prints what decided", launcher__explain=True),
)


@rule(
    "launch.controller", "How Horovod's processes agree on what to reduce: nothing here needs it."
)
def _controller(job: HorovodJob, leaf: Leaf) -> Outcome:
    said = str(leaf.value).lower() if leaf.name == "controller" else leaf.name
    if said == "jsrun":
        return approximate("start the recipe by jsrun: it finds its place there")
    if said == "mpi":
        return faster(
            "processes agree on nothing while training; comm=mpi launcher=mpi of the plugin "
            "torsh-trainer-mpi communicates by MPI"
        )
    return faster("processes agree on nothing while training: comm=auto chooses nccl or gloo")


@rule("launch.mpi", "Arguments of mpirun.")
def _mpi(job: HorovodJob, leaf: Leaf) -> Outcome:
    return refuse(
        f"not in this release: arguments of mpirun; mpirun {leaf.value} -n "
        f"{job.get('num_proc', 'N')} python {_RUN} takes them"
    )


constant_rule(
    "launch.tcp",
    "TCP instead of InfiniBand.",
    faster("set NCCL_IB_DISABLE=1 around the command: processes inherit it"),
)


# -- elasticity ----------------------------------------------------------------------------------

_ELASTIC = "not in this release: a job that grows and shrinks"


@rule("elastic.range", "Horovod counts processes, torchrun nodes.")
def _range(job: HorovodJob, leaf: Leaf) -> Outcome:
    return refuse(f"{_ELASTIC}; {_elastic_line(job)}")


def _elastic_line(job: HorovodJob) -> str:
    """The torchrun line that restarts a script with another number of nodes."""
    slots = job.get("slots")
    least, most = job.get("min_num_proc", job.get("num_proc")), job.get("max_num_proc")
    if not slots or not least:
        return (
            "torchrun --nnodes=MIN:MAX restarts a script, and counts nodes where Horovod counts "
            "processes: divide by the processes of a node"
        )
    nodes = f"{math.ceil(least / slots)}:{max(1, (most or least) // slots)}"
    restarts = job.get("reset_limit")
    more = "" if restarts is None else f" --max-restarts={restarts}"
    return (
        f"torchrun --nnodes={nodes} --nproc-per-node={slots}{more} restarts a script on nodes of "
        f"{slots} processes, where Horovod counts processes"
    )


@rule("elastic.knob", "Details of a job that grows and shrinks.")
def _elastic_knob(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.elastic or job.get("HOROVOD_ELASTIC"):
        return refuse(f"{_ELASTIC}; {_elastic_line(job)}")
    return dead("is read by elastic jobs alone, and nothing makes this one")


switch_rule(
    "elastic.switch",
    "Horovod's own word to its processes that the job is elastic.",
    on=refuse(_ELASTIC),
)
constant_rule(
    "elastic.script",
    "A script that keeps its state in memory and goes on after a change.",
    refuse(
        f"{_ELASTIC}; checkpoint.every_steps and checkpoint.resume=auto go on after a restart, on "
        "another number of processes, too"
    ),
)


# -- Horovod's machinery -------------------------------------------------------------------------


@rule("fusion", "So many MiB of gradients travel together.")
def _fusion(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value == 0:
        return faster("each gradient alone", strategy__bucket_cap_mb=_EACH_BYTE)
    return faster(
        "size of a bucket; beyond two processes sums may round in another order",
        strategy__bucket_cap_mb=float(leaf.value),
    )


fixed_rule(
    "cycle", "performance-only", "a bucket travels as soon as it is full: there are no cycles"
)
fixed_rule(
    "cache", "performance-only", "every process reduces in the same order: nothing to remember"
)
fixed_rule("hierarchical", "performance-only", "NCCL chooses how it reduces (NCCL_ALGO)")
fixed_rule("library.tuning", "performance-only", "a setting of Horovod's own threads and streams")
fixed_rule("autotune.knob", "performance-only", "a setting of Horovod's search")
switch_rule(
    "autotune",
    "Horovod's search for its settings becomes a sweep.",
    on=faster("the one that is left is a sweep: -m strategy.bucket_cap_mb=8,25,64,128"),
    off=faster("off"),
)
switch_rule(
    "timeline",
    "A trace of what happens when.",
    on=approximate(
        "a trace of torch.profiler for Chrome, with other names of events, of some steps",
        callbacks__profiler__enabled=True,
    ),
)
fixed_rule("timeline.cycles", "performance-only", "there are no cycles to mark")
fixed_rule(
    "timeline.script",
    "approximate",
    "the script traces from here to there: callbacks.profiler.first_step and steps do so",
)
switch_rule(
    "stall",
    "Processes that do not come.",
    on=approximate("nobody warns; a collective that waits ends after comm.timeout_s"),
    off=approximate("nobody warns here either; a collective ends after comm.timeout_s"),
)
constant_rule(
    "stall.warning",
    "Seconds until Horovod warns of processes that do not come.",
    approximate("nobody warns; a collective that waits ends after comm.timeout_s"),
)


@rule("stall.shutdown", "Seconds until a job ends whose processes do not come.")
def _stall_shutdown(job: HorovodJob, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return approximate("0 is never; here a collective ends after comm.timeout_s, 30 minutes")
    if leaf.value <= job.get("stall_warning_s", 60):
        return dead("Horovod heeds it only where it is more than the warning's seconds")
    return approximate(
        "a collective that takes longer fails; nothing proves that Horovod over gloo ends, too",
        comm__timeout_s=float(leaf.value),
    )


@rule("gloo-timeout", "Seconds until an operation of gloo fails.")
def _gloo_timeout(job: HorovodJob, leaf: Leaf) -> Outcome:
    shutdown = job.get("stall_shutdown_s", 0)
    if shutdown > job.get("stall_warning_s", 60):
        return approximate("the stall check's seconds to the end are comm.timeout_s")
    if not leaf.value:
        return approximate("0: operations of gloo fail at once in Horovod; here after 30 minutes")
    return exact("a collective that takes longer fails", comm__timeout_s=float(leaf.value))


@rule("log.level", "How much is logged.")
def _level(job: HorovodJob, leaf: Leaf) -> Outcome:
    level = {"trace": "debug", "fatal": "error"}.get(leaf.value, leaf.value)
    return faster("the same level", log_level=level)


fixed_rule("log.time", "performance-only", "lines of a log have the time")
