"""Flags of ``srun`` and ``mpirun`` (Open MPI, MPICH) around a script: they keep their words."""

from __future__ import annotations

from torsh_trainer.translate.launch.flags import StatedFlag, fix_rows, judge_row, table_of_rows
from torsh_trainer.translate.launch.job import LaunchJob, Link, WorldShape
from torsh_trainer.translate.outcomes import Outcome, exact

_KEPT = "kept in the command below: {} starts the processes there as well"


def _judge_count(job: LaunchJob, said: StatedFlag) -> Outcome:
    return exact("kept in the command below: the run finds its place among them")


SRUN = table_of_rows(
    judge_row("-n --ntasks", _judge_count, rule="srun.tasks"),
    judge_row("-N --nodes", _judge_count, rule="srun.tasks"),
    judge_row("--ntasks-per-node --tasks-per-node", _judge_count, rule="srun.tasks"),
    *fix_rows(
        "-J --job-name -p --partition -A --account -t --time -c --cpus-per-task -w "
        "--nodelist -x --exclude --gres -G --gpus --gpus-per-node --gpus-per-task --mem "
        "--mem-per-cpu --mem-per-gpu -o --output -e --error -i --input --jobid "
        "--quotatype --qos --constraint -C --mpi --cpu-bind --cpu_bind --gpu-bind --mem-"
        "bind --distribution -m --export --chdir -D --container-image --container-mounts "
        "--container-workdir --container-name --wait --kill-on-bad-exit -K --comment "
        "--reservation --signal --begin --dependency --ntasks-per-gpu --ntasks-per-core "
        "--ntasks-per-socket --cpus-per-gpu --network --open-mode --threads-per-core "
        "--task-prolog --mail-type --mail-user --environment --gpus-per-socket --bcast "
        "--epilog --hint",
        "exact",
        _KEPT.format("srun"),
        rule="srun.kept",
    ),
    *fix_rows(
        "-l --label -u --unbuffered -v --verbose --exclusive --overlap -O --overcommit --pty "
        "--no-container-mount-home --container-mount-home --container-writable -Q --quiet -s "
        "--oversubscribe --no-kill -k --async --preserve-env -E --multi-prog --spread-job",
        "exact",
        _KEPT.format("srun"),
        takes=0,
        rule="srun.kept",
    ),
)
"""Flags of srun that people write; others are kept as well where they hold their value by ``=``."""

MPIRUN = table_of_rows(
    judge_row("-n -np -c --np --n", _judge_count, rule="mpirun.processes"),
    judge_row("-N -npernode --npernode -ppn -perhost", _judge_count, rule="mpirun.processes"),
    *fix_rows(
        "-H -host --host --hosts -hosts -hostfile --hostfile -machinefile --machinefile -f -x "
        "-bind-to --bind-to -map-by --map-by -rank-by --rank-by -output-filename "
        "--output-filename -wdir --wdir -wd -genv -env -genvlist -iface -launcher -rmk -prefix "
        "--prefix -rf --rankfile -stdin --stdin -timeout --timeout -pernode-cpus --ppr -l",
        "exact",
        _KEPT.format("mpirun"),
        rule="mpirun.kept",
    ),
    *(
        judge_row(
            name, lambda job, said: exact(_KEPT.format("mpirun")), takes=2, rule="mpirun.kept"
        )
        for name in ("-mca", "--mca", "-gmca", "--gmca")
    ),
    *fix_rows(
        "--allow-run-as-root -allow-run-as-root --oversubscribe -oversubscribe --tag-"
        "output -tag-output -q --quiet -v --verbose --report-bindings -report-bindings "
        "-pernode --pernode --display-map -display-map --nooversubscribe -genvall -envall "
        "--bynode --bind-to-none -print-rank-map",
        "exact",
        _KEPT.format("mpirun"),
        takes=0,
        rule="mpirun.kept",
    ),
)
"""Flags of mpirun that people write."""


def shape_srun(job: LaunchJob, link: Link) -> WorldShape:
    """How many processes srun starts by itself, as far as the line tells."""
    tasks, nodes = link.find("ntasks", "n"), link.find("nodes", "N")
    total = _whole_number(tasks)
    count = _whole_number(nodes)
    each = _whole_number(link.find("ntasks_per_node", "tasks_per_node"))
    if total is None and each is not None and count is not None:
        total = each * count
    return WorldShape(each, count, total)


def shape_mpirun(job: LaunchJob, link: Link) -> WorldShape:
    """How many processes mpirun starts."""
    return WorldShape(None, None, _whole_number(link.find("np", "n", "c")))


def _whole_number(said: StatedFlag | None) -> int | None:
    if said is None or said.hole is not None or not said.text.isdigit():
        return None
    return int(said.text) or None
