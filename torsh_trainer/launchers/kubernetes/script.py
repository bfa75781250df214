"""What each pod runs: it starts the processes, and hands signals on to them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from torsh_trainer.launchers.batch.script import begin_script
from torsh_trainer.launchers.job_folder import BEGUN, OUTPUT
from torsh_trainer.launchers.plan import JobRequest

POD_OUTPUT = "logs/pod-{}.out"
"""What every pod but the first prints."""

_RUN = """\
# Only this shell gets the signals of a pod. Output goes to the run's folder, and to kubectl logs.
child= asked=
trap 'asked=TERM; [[ $child ]] && kill -TERM "$child"' TERM
trap 'asked=USR1; [[ $child ]] && kill -USR1 "$child"' USR1
exec > >(trap "" TERM USR1; exec tee -a "$out") 2>&1
writer=$!
{words} "${{again[@]}}" &
child=$!
[[ $asked ]] && kill "-$asked" "$child"
while wait "$child"; code=$?; kill -0 "$child" 2> /dev/null; do :; done
exec >&- 2>&-  # the end, for tee
wait "$writer"
exit $code
"""


def write_pod_script(request: JobRequest, *, python: str, env: Mapping[str, str]) -> str:
    """The script for bash; every value in it is quoted as one word."""
    index = "$JOB_COMPLETION_INDEX"
    lines = [
        *begin_script(request, begun=f"{BEGUN}-{index}"),
        f'out="$run/{OUTPUT}"',
        f'if [[ {index} != 0 ]]; then out="$run/{POD_OUTPUT.format(index)}"; fi',
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
    ]
    words = shlex.join([python, *request.arguments])
    return "\n".join(lines) + "\n" + _RUN.format(words=words)
