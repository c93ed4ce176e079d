#!/usr/bin/env bash
# install/launch.sh N command...   runs the command on N ranks of this machine
#
# The one place that knows how launchers differ. Ranks may outnumber cores, none is bound to a core (two jobs side by
# side would share core 0), and root may launch. HPCZERO_LAUNCH="srun -n" replaces the launcher and all of that.
set -euo pipefail
chosen="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/hpczero-mpirun" # written by install/setup.sh

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ || $# -lt 2 ]]; then
    echo "launch: got '$*', expected a number of ranks and a command; type: install/launch.sh 2 hostname" >&2
    exit 78
fi
ranks="$1"
shift
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / ranks > 0 ? cores / ranks : 1))}"
if [[ -n "${HPCZERO_LAUNCH:-}" ]]; then
    # shellcheck disable=SC2086  # several words on purpose
    exec $HPCZERO_LAUNCH "$ranks" "$@"
fi

# An mpirun beside the interpreter is of the MPI that its mpi4py loads, whatever this checkout has been set up with.
mpirun="$(dirname "$1")/mpirun"
if [[ "$1" != */* || ! -x "$mpirun" ]]; then
    mpirun="$(cat "$chosen" 2>/dev/null || command -v mpirun || true)"
fi
if [[ ! -x "$mpirun" ]]; then
    echo "launch: no mpirun ('$mpirun'); type: make setup" >&2
    echo "launch: where the launcher is srun, type: export HPCZERO_LAUNCH='srun -n'" >&2
    exit 78
fi

flags=()
# A polling rank must give its core to the one that works. Open MPI and MPICH read different names.
if ((ranks >= cores)); then
    export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
    export MPIR_CVAR_POLLS_BEFORE_YIELD="${MPIR_CVAR_POLLS_BEFORE_YIELD:-1}"
fi
version="$("$mpirun" --version 2>&1 || true)"
if [[ "$version" == *"Open MPI"* ]]; then
    flags=(--oversubscribe --bind-to none)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # open-mpi/ompi#12718: MPI-IO of these releases can write wrong data silently; without it ROMIO is used.
    case "$version" in
    *") 4.0."* | *") 4.1."[0-6]* | *") 5.0."[0-5]*) export OMPI_MCA_io="${OMPI_MCA_io:-^ompio}" ;;
    esac
fi
exec "$mpirun" "${flags[@]}" -n "$ranks" "$@"
