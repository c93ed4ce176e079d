#!/usr/bin/env bash
# strong_scaling.sh [OPTIONS...] [-- SBATCH_OPTIONS...]   submits the strong scaling study (fixed model and global batch), a job for
# each point that is not done yet, and one that collects
#
#   RANKS="16 32 64" RANKS_PER_NODE=16 ACCOUNT=... slurm/strong_scaling.sh --models gpt2-xl --batches 64 --micro_batch 1
#
# A global batch that is not given is the smallest that all numbers of ranks divide: 256 for the default ones.
# OPTIONS are those of python -m scaling.sweep; scaling/README.md says what the study measures.
set -euo pipefail

CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
RANKS="${RANKS:-16 32 64 128 256}" # the smallest is what the others are compared with
study strong "$@"
