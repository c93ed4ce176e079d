#!/usr/bin/env bash
#SBATCH --job-name=preflight
#SBATCH --ntasks-per-node=1 --exclusive
#SBATCH --time=00:15:00
#SBATCH --no-requeue --open-mode=append
#SBATCH --output=%x-%j.log
#
# preflight.sh [OPTIONS...]   which nodes of this job are bad? The last line is an option for sbatch: --exclude=n3,n17
#
#   NODES=25 GPUS_PER_NODE=16 slurm/preflight.sh --directory runs
#   sbatch $(cat logs/exclude-4711) slurm/train_60b.sh      with the number of that job
#
# First, without MPI, whether Python starts on every node at all; then the trials of python -m hpczero.preflight.
set -euo pipefail

here="${BASH_SOURCE[0]}"
if [[ "$here" == */slurm_script ]]; then # SLURM runs a copy of this file
    here="$(scontrol show job -o "$SLURM_JOB_ID" | sed -n '1s/.* Command=\([^ ]*\).*/\1/p')"
fi
CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "$here")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
RANKS_PER_NODE=1
set_up

if ! in_job; then
    submit preflight.sh "$@"
    exit
fi
enter_job
BIND=""
exclude="$LOGS/exclude-$SLURM_JOB_ID"
alive="$LOGS/preflight-$SLURM_JOB_ID.alive"
mkdir -p "$alive"
export PYTHON alive
# shellcheck disable=SC2016  # for the shell on each node
srun --mpi=none --ntasks-per-node=1 --wait=0 bash -c \
    '"$PYTHON" -c "import mpi4py, numpy" && touch "$alive/$SLURMD_NODENAME"' || true
bad=""
while read -r node; do
    if [[ ! -e "$alive/$node" ]]; then bad+="${bad:+,}$node"; fi
done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rm -r "$alive"
if [[ -n "$bad" ]]; then
    say "bad: $bad: Python does not start there, or does not see $LOGS"
    echo "--exclude=$bad" | tee "$exclude"
    exit 1
fi
rc=0
launch "$PYTHON" -m hpczero.preflight --json "$LOGS/preflight-$SLURM_JOB_ID.json" "$@" | tee "$exclude" || rc=$?
sed -i -n '/^--exclude=/p' "$exclude"
if ((rc != 0)) && [[ ! -s "$exclude" ]]; then say "no verdict: the trials ended with exit code $rc, see above"; fi
cat "$exclude"
exit "$rc"
