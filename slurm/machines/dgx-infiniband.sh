# dgx-infiniband.sh   NVIDIA DGX-2, A100, H100 and their relatives: NVLink inside, one InfiniBand port for a GPU or two
# shellcheck shell=bash disable=SC2034,SC2086  # sourced by ../lib.sh, which uses these
#
# Not tried on such a machine: from the manuals of Open MPI and UCX and reports of their users. `MODULES` is your site's.

# Open MPI with UCX is the MPI of these machines; CUDA-aware, or device buffers go through the host.
need_module ${MODULES:-openmpi}

# Debian's, NVIDIA's and most sites' Open MPI bring PMIx; pmi2 would start as many jobs of one rank as there are ranks.
MPI_PLUGIN="${MPI_PLUGIN-pmix}"

# UCX drives InfiniBand; without this a missing UCX falls back to TCP, and says so to nobody.
export OMPI_MCA_pml="${OMPI_MCA_pml:-ucx}"

# The port and the NUMA node beside each GPU, as `nvidia-smi topo -m` shows them; on a DGX A100 they should be
#   NIC_OF_RANK="mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_6 mlx5_7 mlx5_8 mlx5_9"   CPU_BIND=none NUMA_OF_RANK="3 3 1 1 7 7 5 5"
# On a DGX-2 two GPUs share a port; UCX then chooses by itself.
