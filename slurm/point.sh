#!/usr/bin/env bash
#SBATCH --job-name=point
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@60
#SBATCH --no-requeue --open-mode=append
#SBATCH --output=%x-%j.log
#
# point.sh COMMAND...   runs COMMAND on every rank of the job, launched like a training run: one point of a sweep
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/point.sh python -m hpczero.doctor
#
# A word `python` in front becomes $PYTHON. Ends with the command's exit code; never requeued. Ranks that still run 30 s
# after the first one has ended are ended by srun: LAUNCH_OPTIONS=--wait=0 lets them.
set -euo pipefail
trap : USR1 # a warning that comes early must not end the job; the run itself knows how much time is left

here="${BASH_SOURCE[0]}"
if [[ "$here" == */slurm_script ]]; then # SLURM runs a copy of this file
    tries=0 # slurmctld may be busy
    until here="$(scontrol show job -o "$SLURM_JOB_ID" | sed -n '1s/.* Command=\([^ ]*\).*/\1/p')" || ((tries++ >= 12)); do
        sleep 5
    done
fi
CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "$here")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
set_up

if (($# == 0)); then
    fail "point.sh: no command" "sbatch --nodes=2 --ntasks-per-node=2 slurm/point.sh python -m hpczero.doctor"
fi
if ! in_job; then
    submit point.sh "$@"
    exit
fi
unset HPCZERO_SERIES # a point that is measured twice is measured twice
enter_job
unset HPCZERO_SERIES
if [[ "$1" == python ]]; then set -- "$PYTHON" "${@:2}"; fi
rc=0
launch "$@" || rc=$?
say "exit code $rc"
exit "$rc"
