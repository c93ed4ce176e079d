#!/usr/bin/env bash
# weak_scaling.sh [OPTIONS...] [-- SBATCH_OPTIONS...]   submits the weak scaling study (fixed batch per rank), a job for
# each point that is not done yet, and one that collects
#
#   RANKS="16 32 64" RANKS_PER_NODE=16 ACCOUNT=... slurm/weak_scaling.sh --models gpt2-xl --batches 8
#
# OPTIONS are those of python -m scaling.sweep; scaling/README.md says what the study measures.
set -euo pipefail

CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
RANKS="${RANKS:-16 32 64 128 256 400}" # the smallest is what the others are compared with
study weak "$@"
