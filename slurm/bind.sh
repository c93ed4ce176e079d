#!/usr/bin/env bash
# bind.sh COMMAND...   runs COMMAND, one rank, beside the GPU with the number of its local rank; hides nothing
#
# Every rank sees all GPUs of its node: one that is hidden cannot be reached by CUDA IPC (NVIDIA/nccl#1066). What a
# machine's file may set, one word for each local rank:
#   NUMA_OF_RANK="3 3 1 1"          NUMA node beside the GPU; needs numactl, and CPU_BIND=none
#   NIC_OF_RANK="mlx5_0 mlx5_1"     network interface beside the GPU, for UCX
#   BIND_VERBOSE=1                  each rank of the first node says where it is
set -euo pipefail

trap '' USR1 # until Python listens: unhandled, the signal to save and stop would end the rank instead

# mpirun's own first: in its ranks SLURM_LOCALID is that of mpirun's daemon, 0 for all.
local_rank=""
for name in OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID SLURM_LOCALID; do
    local_rank="${!name:-}"
    if [[ -n "$local_rank" ]]; then break; fi
done
if [[ -z "$local_rank" ]]; then
    echo "bind.sh: no launcher says which rank of its node this is; start it by srun or mpirun" >&2
    exit 78
fi

visible="${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-}}"
if [[ "${SLURM_GPUS_ON_NODE:-0}" != 0 && -n "$visible" ]]; then
    IFS=, read -ra devices <<<"$visible"
    if ((local_rank >= ${#devices[@]})); then
        echo "bind.sh: local rank $local_rank on $(hostname) has no GPU: the node shows ${#devices[@]} ($visible); ask for" \
            "as many --gpus-per-node as --ntasks-per-node, and not for --gpus-per-task" >&2
        exit 78
    fi
fi

# word LIST VARIABLE: the word of this rank
word() {
    local words
    read -ra words <<<"$1"
    if ((local_rank >= ${#words[@]})); then
        echo "bind.sh: $2 has ${#words[@]} words, and this is local rank $local_rank; correct the machine's file" >&2
        exit 78
    fi
    echo "${words[local_rank]}"
}

prefix=()
if [[ -n "${NUMA_OF_RANK:-}" ]]; then
    node="$(word "$NUMA_OF_RANK" NUMA_OF_RANK)"
    if ! command -v numactl >/dev/null; then
        echo "bind.sh: NUMA_OF_RANK is set, and $(hostname) has no numactl; load it, or unset the variable" >&2
        exit 78
    fi
    prefix=(numactl "--cpunodebind=$node" "--preferred=$node")
fi
if [[ -n "${NIC_OF_RANK:-}" ]]; then
    nic="$(word "$NIC_OF_RANK" NIC_OF_RANK)"
    export UCX_NET_DEVICES="$nic:1"
fi
if [[ "${BIND_VERBOSE:-0}" == 1 && "${SLURM_NODEID:-0}" == 0 ]]; then
    echo "bind.sh: local rank $local_rank on $(hostname): GPU $local_rank of '$visible'," \
        "NUMA ${node:-as launched}, NIC ${nic:-any}, cores $(taskset -cp $$ | sed 's/.*: //')"
fi
exec "${prefix[@]}" "$@"
