#!/usr/bin/env bash
# weak_scaling.sh [OPTIONS...]   submits the weak scaling sweep, a job for each point that is not done yet
#
#   ACCOUNT=... slurm/weak_scaling.sh --help      the options of python -m scaling.sweep
set -euo pipefail

CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
set_up
cd "$CHECKOUT"
unset NODES RANKS_PER_NODE GPUS_PER_NODE # each point has its own; GPUs: -- --gpus-per-node=N
exec "$PYTHON" -m scaling.sweep weak --by sbatch "$@"
