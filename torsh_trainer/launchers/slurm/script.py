"""The batch script: it starts the tasks, and decides whether the job waits again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from torsh_trainer.launchers.batch.script import begin_script
from torsh_trainer.launchers.job_folder import CANCELLED, FOLDER, PREEMPTED
from torsh_trainer.launchers.plan import JobRequest

_DECIDE = """\
# 138: Slurm's warning (SIGUSR1) ahead of the time limit. 143: SIGTERM, of which Slurm says whether
# it was a preemption; srun sends it too, to the tasks that are left when another has failed.
job=$(scontrol show job "$SLURM_JOB_ID" --oneliner) || job=
if [[ $job == *" JobState=RUNNING "* && ! -e $run/{folder}/{cancelled} ]] &&
    [[ $code == 138 || ( $code == 143 && $job == *" PreemptTime="[0-9]* ) ]]; then
    touch "$run/{folder}/{preempted}"
{requeue}fi
exit $code
"""
_REQUEUE = """\
    scontrol requeue "$SLURM_JOB_ID" && sleep 300
"""


def write_script(request: JobRequest, *, srun: Sequence[str], python: str, requeue: bool) -> str:
    """The script of ``request`` for bash; every value in it is quoted as one word.

    ``srun`` are its options.
    """
    lines = [
        *begin_script(request),
        "if [[ ${SLURM_CPUS_PER_TASK:-} ]]; then",
        '    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"',
        "fi",
        f"srun {shlex.join(srun)} \\",
        f'    {shlex.join([python, *request.arguments])} "${{again[@]}}"',
        "code=$?",
    ]
    return (
        "\n".join(lines)
        + "\n"
        + _DECIDE.format(
            folder=FOLDER,
            cancelled=CANCELLED,
            preempted=PREEMPTED,
            requeue=_REQUEUE if requeue else "",
        )
    )
