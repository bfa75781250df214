"""What the scripts of all batch systems begin with."""

from __future__ import annotations

import shlex

from torsh_trainer.launchers.job_folder import BEGUN, FOLDER, PREEMPTED
from torsh_trainer.launchers.plan import JobRequest

_UNSHARED = (
    "error: $(hostname) does not see $run and the folder of the command as they were when the job "
    "was submitted; put both on a disk that the nodes share"
)


def begin_script(request: JobRequest, *, begun: str = BEGUN) -> list[str]:
    """The lines up to the start of the processes, for bash; every value is quoted as one word.

    ``begun`` is the mark that this script has run before, and may hold variables.

    Afterwards ``run`` is the run's folder, and ``again`` the words that tell a run that its job has
    been begun before. Signals wait until the processes have ended.
    """
    return [
        "#!/bin/bash",
        "# Written by torsh_trainer; `python -m torsh_trainer jobs status` in this run's folder.",
        "trap : TERM USR1  # the processes save; what comes of it is decided below",
        f"run={shlex.quote(str(request.run_dir))}",
        f"if ! cd -- {shlex.quote(str(request.folder))} || ! [[ -r $run/{FOLDER}/run.yaml ]]; then",
        f'    echo "{_UNSHARED}" >&2',
        "    exit 1",
        "fi",
        f'rm -f "$run/{FOLDER}/{PREEMPTED}"',
        # Places are the scheduler's: what the shell of whoever submitted held would lead elsewhere.
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR",
        "again=()",
        f"if [[ -e $run/{FOLDER}/{begun} ]]; then again=(--again); fi",
        f'touch "$run/{FOLDER}/{begun}"',
    ]
