#!/usr/bin/env bash
# weak_scaling.sh [OPTIONS...] [-- SBATCH_OPTIONS...]   submits the weak scaling study (fixed batch per rank), a job for
# each point that is not done yet, and one that collects
#
#   RANKS="16 32 64" RANKS_PER_NODE=16 ACCOUNT=... slurm/weak_scaling.sh --models gpt2-xl --batches 8
#
# OPTIONS are those of python -m scaling.sweep; scaling/README.md says what the study measures.
set -euo pipefail

RANKS="${RANKS:-16 32 64 128 256 400}" # the smallest is what the others are compared with
RANKS_PER_NODE="${RANKS_PER_NODE:-16}"
GPUS_PER_NODE="${GPUS_PER_NODE:-$RANKS_PER_NODE}"

CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
set_up
check_site

words=()
while (($#)) && [[ "$1" != -- ]]; do
    words+=("$1")
    shift
done
# shellcheck disable=SC2206  # several words on purpose
line=("$PYTHON" -m scaling.sweep weak --by sbatch --ranks $RANKS --ranks_per_node "$RANKS_PER_NODE" "${words[@]}"
    -- "${site_options[@]}" "${@:2}")
say "${line[*]}"
if [[ "${DRY_RUN:-0}" == 1 ]]; then exit; fi
cd "$CHECKOUT"
exec env -u NODES -u RANKS -u RANKS_PER_NODE "${line[@]}" # each job has its own
