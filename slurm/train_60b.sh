#!/usr/bin/env bash
#SBATCH --job-name=train_60b
#SBATCH --nodes=25 --ntasks-per-node=16 --gpus-per-node=16
#SBATCH --cpus-per-task=3 --mem=0 --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue --open-mode=append
#SBATCH --output=%x-%j.log
#
# The 60 B run of the ZeRO paper (arXiv 1910.02054v3, appendix, figure 2) on its machine: 25 DGX-2 of 16 V100 32 GB.
#
#   sbatch slurm/train_60b.sh                            as it stands
#   NODES=50 RANKS_PER_NODE=8 slurm/train_60b.sh         without sbatch it submits itself, with what variables say
#   MODEL_PARALLEL=16 slurm/train_60b.sh                 as the paper ran it: 16 ranks share each copy of the model, at stage 2
#   DRY_RUN=1 slurm/train_60b.sh                         shows the plan of bytes and the sbatch line, submits nothing
#   slurm/train_60b.sh --train.clip 0.5                  further options of hpczero.train
#
# #SBATCH lines cannot read variables, so inside a job the sizes are what SLURM gave, and others are refused.
set -euo pipefail
trap : USR1 # a warning that comes early must not end the job; the run itself knows how much time is left

NODES="${NODES:-${SLURM_JOB_NUM_NODES:-25}}"
RANKS_PER_NODE="${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-16}}"
GPUS_PER_NODE="${GPUS_PER_NODE:-16}"       # 0: a CPU partition
CPUS_PER_RANK="${CPUS_PER_RANK:-3}"        # DGX-2: 48 cores for 16 ranks
TIME="${TIME:-24:00:00}"
SIGNAL_S="${SIGNAL_S:-600}"                # seconds before TIME at which the run is told to save and stop
MEMORY="${MEMORY:-30GB}"                   # of one GPU of 32 GB, less what CUDA and MPI take
MODEL="${MODEL:-gpt-60b}"                  # 132 layers, hidden 6144, 32 heads
MODEL_PARALLEL="${MODEL_PARALLEL:-1}"      # ranks of one copy of the model: tensor parallel in the node, stages beyond it
STEPS="${STEPS:-20000}"
LEARNING_RATE="${LEARNING_RATE:-1e-4}"
WARMUP="${WARMUP:-500}"
PRECISION="${PRECISION:-fp16}"             # V100 has no bf16; A100 and later: bf16
CHECKPOINT_EVERY="${CHECKPOINT_EVERY:-30}" # at about a minute per step, half an hour of lost work at most
KEEP="${KEEP:-3}"                          # checkpoints of 0.7 TB
SEED="${SEED:-0}"
RUN_NAME="${RUN_NAME:-$MODEL}"             # a run goes on where the last job with its name stopped
RUN_FOLDER="${RUN_FOLDER:-runs}"           # on the parallel file system
DATA="${DATA:-}"                           # token file of python -m hpczero.data prepare; empty: a small text, to try

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
if is_elastic; then
    fail "ELASTIC_NODES is $ELASTIC_NODES, and here the number of ranks says how many sequences a step has" \
        "NODES=25 ELASTIC_NODES=0 $CALLED   # or train.sh with --run.exact require"
fi

# As far as the node goes, ranks share every layer; what is left of MODEL_PARALLEL are stages of a pipeline.
if ((MODEL_PARALLEL < 1)); then fail "MODEL_PARALLEL is $MODEL_PARALLEL, expected at least 1" "MODEL_PARALLEL=16 $CALLED"; fi
tensor=$MODEL_PARALLEL rest=$RANKS_PER_NODE
while ((rest > 0)); do
    both=$((tensor % rest)) tensor=$rest
    rest=$both
done
pipeline=$((MODEL_PARALLEL / tensor))
# 4 sequences for each rank: x 400 = 1600 per step, as in the paper. A pipeline has them in several micro-batches.
ACCUMULATION="${ACCUMULATION:-$((pipeline > 1 ? 4 * pipeline : 1))}"
MICRO_BATCH="${MICRO_BATCH:-$((pipeline > 1 ? tensor : 4 * tensor))}"
STAGE="${STAGE:-$((MODEL_PARALLEL > 1 ? 2 : 3))}" # the paper: 2
parallel=()
if ((MODEL_PARALLEL > 1)); then
    # Sequence parallelism keeps a part of each block's input on each rank, as the paper's P_a does.
    parallel+=(--parallel.tensor "$tensor" --parallel.pipeline "$pipeline")
    if ((tensor > 1)); then parallel+=(--parallel.sequence true); fi
fi

# As the run will choose, or more than it needs: a node's GPUs read each other's memory, and the next block comes early.
transport=hierarchical
if ((GPUS_PER_NODE > 0 && RANKS_PER_NODE > 1)); then transport=ipc; fi
"$PYTHON" -m hpczero.plan --model "$MODEL" --ranks $((NODES * RANKS_PER_NODE)) --ranks-per-node "$RANKS_PER_NODE" \
    --memory "$MEMORY" --precision "$PRECISION" --micro-batch "$MICRO_BATCH" --stage "$STAGE" \
    --transport "$transport" ${parallel:+--accumulation "$ACCUMULATION" "${parallel[@]}"}
options=(--run.name "$RUN_NAME" --run.folder "$RUN_FOLDER" --run.seed "$SEED" ${DATA:+--data.path "$DATA"}
    --model.preset "$MODEL" --model.checkpoint_activations true
    --parallel.stage "$STAGE" --parallel.precision "$PRECISION" ${parallel:+"${parallel[@]}"}
    --train.micro_batch "$MICRO_BATCH" --train.accumulation "$ACCUMULATION" --train.steps "$STEPS"
    --train.learning_rate "$LEARNING_RATE" --train.warmup "$WARMUP"
    --checkpoint.every "$CHECKPOINT_EVERY" --checkpoint.keep "$KEEP" "$@")
if ! in_job || [[ "${DRY_RUN:-0}" == 1 ]]; then
    check_options "${options[@]}"
    submit train_60b.sh "$@"
    exit
fi
train "${options[@]}"
