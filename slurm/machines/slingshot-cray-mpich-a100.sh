# slingshot-cray-mpich-a100.sh   HPE Cray EX with 4 A100 and 4 Slingshot ports a node (such as Perlmutter), Cray MPICH
# shellcheck shell=bash disable=SC2034,SC2086  # sourced by ../lib.sh, which uses these
#
# Not tried on such a machine: from HPE's manual pages (intro_mpi) and the sites' documentation. `MODULES` is your site's.

MACHINE_NEEDS="ACCOUNT" # these sites refuse a job without one; GPU nodes often want SBATCH_OPTIONS="--constraint=gpu" too

# The accelerator module makes the compiler wrappers link the transport layer for device buffers (libmpi_gtl_cuda).
need_module ${MODULES:-PrgEnv-gnu cray-mpich craype-accel-nvidia80}

# Cray's launcher plugin; with any other each rank is alone.
MPI_PLUGIN="${MPI_PLUGIN-cray_shasta}"

# Device buffers in MPI calls; mpi4py must have been built with the wrapper `cc` and the module above (docs/install.md).
export MPICH_GPU_SUPPORT_ENABLED="${MPICH_GPU_SUPPORT_ENABLED:-1}"

# Each rank sends by the port beside its GPU; the default binds by NUMA node of the cores.
export MPICH_OFI_NIC_POLICY="${MPICH_OFI_NIC_POLICY:-GPU}"

# Parallel HDF5 locks files by default, which Lustre often refuses.
export HDF5_USE_FILE_LOCKING="${HDF5_USE_FILE_LOCKING:-FALSE}"

# 64 cores of two threads for 4 ranks. GPUs are numbered against the NUMA nodes (`nvidia-smi topo -m` shows it), so
#   CPU_BIND=none NUMA_OF_RANK="3 2 1 0"
# puts each rank beside its own.
CPUS_PER_RANK="${CPUS_PER_RANK:-32}"
