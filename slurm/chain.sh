#!/usr/bin/env bash
# chain.sh N SCRIPT [ARGUMENTS...]   submits N jobs, each to start when the one before has ended: where nothing is requeued
#
#   NODES=4 RANKS_PER_NODE=8 slurm/chain.sh 5 slurm/train.sh run.toml
#
# Each link goes on where the one before stopped, and ends at once when the run is done. With sbatch's own means:
# sbatch --array=1-5%1 slurm/train.sh run.toml
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ || ! -x "${2:-}" ]]; then
    echo "chain.sh: got '$*', expected a number of jobs and a script; type: slurm/chain.sh 5 slurm/train.sh run.toml" >&2
    exit 78
fi
links="$1" script="$2"
shift 2
# One name for all links, so that each knows what the ones before have done.
HPCZERO_SERIES="chain-$(date +%Y%m%d-%H%M%S)-$$"
export HPCZERO_SERIES REQUEUE=0
more="${SBATCH_OPTIONS:-}"
before=""
for ((link = 1; link <= links; link++)); do
    export SBATCH_OPTIONS="--parsable ${before:+--dependency=afterany:$before} $more"
    said="$("$script" "$@")"
    echo "$said"
    before="$(tail -n 1 <<<"$said")"
    before="${before%%;*}" # with several clusters: id;cluster
    if [[ ! "$before" =~ ^[0-9]+$ ]]; then
        if [[ "${DRY_RUN:-0}" == 1 ]]; then exit; fi
        echo "chain.sh: link $link was not submitted" >&2
        exit 78
    fi
done
