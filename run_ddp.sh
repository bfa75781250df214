#!/bin/bash
# Trains a recipe with DDP on several processes: on this machine, or as tasks of the Slurm job in
# which it is called.
#   run_ddp.sh -n PROCESSES -c RECIPE [-l LEVEL] [OVERRIDE...]
# RECIPE is a recipe's file or name; LEVEL is debug, info, warning or error, in any case.
set -euo pipefail

usage() {
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

processes="" recipe="" level=info
while getopts ":n:c:l:h" option; do
    case $option in
        n) processes=$OPTARG ;;
        c) recipe=$OPTARG ;;
        l) level=${OPTARG,,} ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ -n "$recipe" ] || usage
[[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "run_ddp.sh: -n '$processes' is no number of processes; write -n 2" >&2; exit 2; }

run=("${PYTHON:-python}" -m torsh_trainer "+recipe=$recipe" strategy=ddp "log_level=$level")
if [ -z "${SLURM_JOB_ID:-}" ]; then
    exec "${run[@]}" "launcher.num_processes=$processes" "$@"
elif ((${SLURM_STEP_ID:-4294967295} >= 4294967280)); then # an allocation's shell or script
    exec srun --ntasks="$processes" "${run[@]}" "$@"
fi
exec "${run[@]}" "$@" # one of the tasks of srun
