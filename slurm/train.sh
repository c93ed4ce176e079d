#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue --open-mode=append
#SBATCH --output=%x-%j.log
#
# train.sh [run.toml] [--section.key value ...]   any training run as a job; sizes come from sbatch or from variables
#
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 slurm/train.sh run.toml
#   NODES=4 RANKS_PER_NODE=8 GPUS_PER_NODE=8 CPUS_PER_RANK=12 TIME=12:00:00 slurm/train.sh run.toml
#   NODES=4-8 RANKS_PER_NODE=8 GPUS_PER_NODE=8 slurm/train.sh run.toml --run.exact require   as many as there are; may lose some
#
# Give the run a --run.name: a run goes on where the last job with its name stopped.
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

if ! in_job || [[ "${DRY_RUN:-0}" == 1 ]]; then
    check_options "$@"
    submit train.sh "$@"
    exit
fi
train "$@"
