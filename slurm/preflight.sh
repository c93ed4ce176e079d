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
# First, without MPI, whether Python starts on every node at all, within START_S seconds; then the trials of python -m hpczero.preflight.
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
RANKS_PER_NODE=1
set_up

if ! in_job; then
    submit preflight.sh "$@"
    exit
fi
enter_job
BIND=""
START_S="${START_S:-180}" # a shared file system serves Python to a thousand nodes slowly
exclude="$LOGS/exclude-$SLURM_JOB_ID"
alive="$LOGS/preflight-$SLURM_JOB_ID.alive"
mkdir -p "$alive"
export PYTHON alive
# A node whose file system hangs never answers, and what waits there cannot be killed: so srun has a limit, and no input.
rc=0
# shellcheck disable=SC2016  # for the shell on each node
timeout --kill-after=10 "$START_S" srun --mpi=none --ntasks-per-node=1 --wait=0 bash -c \
    '"$PYTHON" -c "import mpi4py, numpy" && touch "$alive/$SLURMD_NODENAME"' </dev/null || rc=$?
bad=""
while read -r node; do
    if [[ ! -e "$alive/$node" ]]; then bad+="${bad:+,}$node"; fi
done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rm -rf "$alive" || true # a late answer may still come
if [[ -n "$bad" ]]; then
    why="Python does not start there, or does not see $LOGS"
    if ((rc == 124 || rc == 137)); then why="no answer within $START_S s, as from a file system that hangs; or $why"; fi
    say "bad: $bad: $why"
    echo "--exclude=$bad" | tee "$exclude"
    exit 1
fi
rc=0
launch "$PYTHON" -m hpczero.preflight --json "$LOGS/preflight-$SLURM_JOB_ID.json" "$@" | tee "$exclude" || rc=$?
sed -i -n '/^--exclude=/p' "$exclude"
if ((rc != 0)) && [[ ! -s "$exclude" ]]; then say "no verdict: the trials ended with exit code $rc, see above"; fi
cat "$exclude"
exit "$rc"
