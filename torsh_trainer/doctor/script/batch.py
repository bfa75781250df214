"""Mistakes in scripts of Slurm and PBS: what they ask for, and who starts the processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torsh_trainer.doctor.script.base import PieceRule, ScriptMistake, ScriptPiece
from torsh_trainer.doctor.script.shell_reading import (
    StartedCommand,
    assignments_of,
    commands_of,
    directives_of,
    find_directive,
    flag_number,
    late_directives_of,
    number_of,
)

_MPIRUN = ("mpirun", "mpiexec", "orterun")
_HOSTS = ("-machinefile", "--machinefile", "-hostfile", "--hostfile", "-H", "-host", "--host")


def find_ignored_directives(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Lines for the scheduler where it no longer reads them."""
    late = late_directives_of(piece)
    if late and piece.is_whole:
        first = late[0]
        yield piece.mistake(
            "directive_is_ignored",
            first.line,
            why=f"{first.scheduler} stops reading at the first command: this line is a comment, "
            "and the job gets the site's default",
            fix="move it above the first command",
        )


def find_missing_shebang(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A batch script whose first line names no shell."""
    slurm = [one for one in directives_of(piece) if one.scheduler == "SBATCH"]
    if piece.is_whole and slurm and not piece.text.startswith("#!"):
        yield piece.mistake(
            "no_interpreter",
            1,
            why="sbatch refuses it: 'This does not look like a batch script'",
            fix="#!/bin/bash, as the first line",
        )


def find_one_node_launch(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """torchrun without srun: it runs on the first node."""
    nodes = _count_nodes(piece)
    if nodes < 2:
        return
    for started in commands_of(piece):
        link = started.inner
        if link is None or started.remote or started.link("srun", "mpirun"):
            continue
        if {"ssh", "pdsh"} & set(started.words):
            continue
        if link.launcher == "deepspeed" and link.find("hostfile") is not None:
            continue  # it reaches the others itself
        each = flag_number(link, "nproc_per_node")
        yield piece.mistake(
            "launcher_runs_on_the_first_node",
            started.line,
            why=f"the job has {nodes} nodes, and a batch script runs on the first: the other "
            "nodes start nothing, and this one waits for them",
            fix=f"srun --ntasks-per-node=1 {link.word.text} --nnodes {nodes} "
            f"--nproc-per-node {each or 'GPUS'} --rdzv-backend c10d --rdzv-endpoint "
            "$MASTER_ADDR:$MASTER_PORT ..., with --rdzv-id $SLURM_JOB_ID",
        )


def find_launchers_in_tasks(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """torchrun in each of several tasks of a node."""
    asked = find_directive(piece, "ntasks-per-node")
    for started in commands_of(piece):
        srun, link = started.link("srun"), started.inner
        if srun is None or link is None:
            continue
        tasks = flag_number(srun, "ntasks_per_node", "tasks_per_node")
        if tasks is None and srun.find("ntasks", "n") is None and asked is not None:
            tasks = number_of(asked.value)
        each = flag_number(link, "nproc_per_node")
        if tasks is not None and tasks > 1 and each != 1:
            yield piece.mistake(
                "launcher_in_every_task",
                started.line,
                why=f"srun starts {tasks} tasks on a node, and each a {link.launcher} with "
                f"{each or 'several'} processes: they compete for the GPUs and one port",
                fix=f"srun --ntasks-per-node=1 {link.launcher} ..., or srun python ... without it",
            )


def find_fewer_gpus(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """More processes on a node than the job asks GPUs for."""
    gpus = _count_gpus(piece)
    if gpus is None:
        return
    for started in commands_of(piece):
        each = flag_number(started.inner, "nproc_per_node")
        if each is not None and each > gpus:
            yield piece.mistake(
                "fewer_gpus_than_processes",
                started.line,
                why=f"{each} processes on a node, for which the job asks {gpus} GPU(s)",
                fix=f"#SBATCH --gpus-per-node={each}, or --nproc_per_node={gpus}",
            )
    tasks = find_directive(piece, "ntasks-per-node")
    count = number_of(tasks.value) if tasks is not None else None
    has_inner = any(started.inner is not None for started in commands_of(piece))
    if tasks is not None and count is not None and count > gpus and not has_inner:
        yield piece.mistake(
            "fewer_gpus_than_processes",
            tasks.line,
            why=f"{count} tasks on a node, for which the job asks {gpus} GPU(s)",
            fix=f"#SBATCH --ntasks-per-node={gpus}, or --gpus-per-node={count}",
        )


def find_missing_log_folder(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Output into a folder that is not there when Slurm opens it."""
    if not piece.is_whole:
        return
    for one in directives_of(piece):
        if one.scheduler != "SBATCH" or one.name not in ("output", "error"):
            continue
        folder = Path(one.value).parent
        if "%" in str(folder) or str(folder) == "." or _exists(piece, folder):
            continue
        yield piece.mistake(
            "log_folder_is_missing",
            one.line,
            why=f"Slurm opens {one.value} before the script runs (mkdir in it comes too late): "
            "without the folder the job ends at once, with FAILED 0:53 and no output",
            fix=f"mkdir -p {folder}, before sbatch",
        )


def find_torque_resources(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Torque's way to ask for GPUs, which PBS Pro and OpenPBS do not have."""
    for one in directives_of(piece):
        if one.scheduler == "PBS" and re.search(r"\bnodes=.*:gpus=", piece.line(one.line)):
            parts = dict(re.findall(r"(nodes|ppn|gpus)=(\d+)", piece.line(one.line)))
            cores = parts.get("ppn", "CORES")
            yield piece.mistake(
                "resources_of_torque",
                one.line,
                why="nodes=N:ppn=P:gpus=G is Torque's: PBS Pro and OpenPBS refuse it, or give "
                "nodes without GPUs",
                fix=f"#PBS -l select={parts.get('nodes', 'N')}:ncpus={cores}:mpiprocs={cores}"
                f":ngpus={parts.get('gpus', 'G')}, where qstat --version says PBS Pro or OpenPBS",
            )


def find_kept_variables(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """Exported variables that mpirun does not take to other hosts."""
    exported = {n for n, _, _ in assignments_of(piece)} & {"MASTER_ADDR", "MASTER_PORT"}
    for started in commands_of(piece):
        words = started.words
        if not exported or words[0] not in _MPIRUN or not _is_remote(started):
            continue
        if not {"-x", "-genv", "-genvall", "-envall", "-env", "--mca"} & set(words):
            names = " ".join(f"-x {name}" for name in sorted(exported))
            yield piece.mistake(
                "variables_stay_on_the_first_host",
                started.line,
                why=f"Open MPI takes {', '.join(sorted(exported))} to other hosts only where -x "
                "names them: processes there do not know where to meet",
                fix=f"{words[0]} {names} ...",
            )


def find_odd_format(piece: ScriptPiece) -> Iterator[ScriptMistake]:
    """A field of sacct that is not what it seems."""
    for number, line in piece.lines():
        if re.search(r"\bsacct\b.*--format=(\S*,)?Time(,|\s|$)", line):
            yield piece.mistake(
                "sacct_time_is_the_limit",
                number,
                why="Time is taken for Timelimit: the column says what was asked, not what was "
                "used",
                fix="--format=...,Elapsed,...",
            )


def _count_nodes(piece: ScriptPiece) -> int:
    said = find_directive(piece, "nodes")
    if said is not None:
        return number_of(said.value.split("-")[0]) or 1
    for one in directives_of(piece):
        if one.scheduler == "PBS" and (found := re.search(r"(?:nodes|select)=(\d+)", one.value)):
            return int(found[1])
        if one.scheduler == "PBS" and (
            found := re.search(r"(?:nodes|select)=(\d+)", piece.line(one.line))
        ):
            return int(found[1])
    return 1


def _count_gpus(piece: ScriptPiece) -> int | None:
    """GPUs of a node, where the script says it."""
    for name in ("gpus-per-node", "gres"):
        said = find_directive(piece, name)
        if said is not None and (found := re.search(r"(?:^|:)(\d+)$", said.value)):
            return int(found[1])
    return None


def _exists(piece: ScriptPiece, folder: Path) -> bool:
    return (Path(piece.file).parent / folder).is_dir()


def _is_remote(started: StartedCommand) -> bool:
    return bool(set(_HOSTS) & {word.partition("=")[0] for word in started.words})


RULES: tuple[PieceRule, ...] = (
    find_ignored_directives,
    find_missing_shebang,
    find_one_node_launch,
    find_launchers_in_tasks,
    find_fewer_gpus,
    find_missing_log_folder,
    find_torque_resources,
    find_kept_variables,
    find_odd_format,
)
