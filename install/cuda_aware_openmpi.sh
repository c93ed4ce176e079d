#!/usr/bin/env bash
# Builds an Open MPI that takes device memory, for a machine with NVIDIA GPUs whose own MPI does not.
#
#   install/cuda_aware_openmpi.sh PREFIX
#   export PATH=PREFIX/bin:$PATH LD_LIBRARY_PATH=PREFIX/lib OPAL_PREFIX=PREFIX
#   make setup
#
# Open MPI 4.1 as Debian packs it, without what one machine does not need (Fortran, fabrics), with CUDA and with CUDA IPC
# between the ranks of a node (smcuda). It loads libcuda.so.1 when it runs, so it can be built where there is no GPU, and
# moved elsewhere: OPAL_PREFIX names the new place. On a cluster take the site's MPI, which knows its network.
# What can be set:
#   HPCZERO_OPENMPI_SOURCE=openmpi-4.1.x.tar.*   a source archive that is already there
#   CUDA_HOME=/usr/local/cuda                    where include/cuda.h lies; without one NVIDIA's wheel of headers is fetched
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${HPCZERO_PYTHON:-python3}"

say() { echo "openmpi: $*"; }
fail() {
    echo "openmpi: $1" >&2
    echo "openmpi: type: $2" >&2
    exit 78
}

[[ $# == 1 ]] || fail "the folder to install into is missing" "${BASH_SOURCE[0]} /path/to/prefix"
prefix="$(mkdir -p "$1" && cd "$1" && pwd)"
[[ -z "$(ls -A "$prefix")" ]] || fail "$prefix is not empty" "rm -r $prefix"
for tool in gcc make perl tar; do
    command -v "$tool" >/dev/null || fail "$tool is missing" "apt-get install build-essential perl"
done
[[ -e /usr/include/hwloc.h ]] || # Debian's source package comes without its copy
    fail "hwloc's header is missing" "apt-get install libhwloc-dev"
work="$(mktemp -d)"
log="$prefix.log"
: >"$log"
trap 'rm -rf "$work"' EXIT

step() {
    local what="$1"
    shift
    say "$what"
    echo "+ $*" >>"$log"
    "$@" >>"$log" 2>&1 && return
    tail -n 25 "$log" >&2
    fail "$what failed; the whole log is $log" "${BASH_SOURCE[0]} $prefix   # once the cause above is gone"
}

# Sources of the same archive that the machine's packages come from, in lists of our own: apt's stay as they are.
download() {
    local list="$work/apt/sources"
    mkdir -p "$list" "$work/apt/lists/partial" "$work/source"
    sed 's/^Types:.*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$list/source.sources" 2>/dev/null ||
        sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$list/source.list"
    local options=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$list" -o "Dir::State::lists=$work/apt/lists")
    apt-get "${options[@]}" update
    (cd "$work/source" && apt-get "${options[@]}" source --download-only openmpi)
}
source="${HPCZERO_OPENMPI_SOURCE:-}"
if [[ -z "$source" ]]; then
    command -v apt-get >/dev/null ||
        fail "this is not Debian, so there is no source package to fetch" \
            "HPCZERO_OPENMPI_SOURCE=openmpi-4.1.8.tar.bz2 ${BASH_SOURCE[0]} $prefix   # from www.open-mpi.org"
    step "fetching the source package" download
    source="$(ls "$work"/source/openmpi_*.orig.tar.*[!c])" # not the .asc
fi
mkdir "$work/build"
step "unpacking $(basename "$source")" tar -xf "$source" -C "$work/build" --strip-components=1

cuda="${CUDA_HOME:-/usr/local/cuda}"
if [[ ! -e "$cuda/include/cuda.h" ]]; then
    cuda="$work/cuda"
    mkdir -p "$cuda"
    step "fetching CUDA's headers" "$python" -m pip download --no-deps -d "$work" nvidia-cuda-runtime-cu12
    step "unpacking CUDA's headers" "$python" -m zipfile -e "$work"/nvidia_cuda_runtime_cu12-*.whl "$work/wheel"
    cp -r "$work/wheel/nvidia/cuda_runtime/include" "$cuda/include"
    mkdir "$cuda/lib64" # configure asks for the folder, and links nothing from it
fi

build() {
    cd "$work/build"
    ./configure --prefix="$prefix" --with-cuda="$cuda" --disable-mpi-fortran --disable-oshmem --disable-dependency-tracking \
        --without-verbs --without-ucx --without-ofi --without-psm2 \
        --with-libevent=internal --with-pmix=internal --enable-mca-no-build=btl-uct
    make -j "$(nproc)"
    make install
}
step "configuring and compiling (8 minutes on two cores)" build
rm -rf "$prefix/share/man" "$prefix"/lib/*.la "$prefix"/lib/openmpi/*.la
# Of what it needs beside itself only hwloc is not everywhere: it goes along.
cp -L "$(ldd "$prefix/lib/libopen-pal.so" | awk '/libhwloc/ { print $3 }')" "$prefix/lib/"
"$prefix/bin/ompi_info" --parsable --all | grep -q "mpi_built_with_cuda_support:value:true" ||
    fail "what was built does not take device memory; see $log" "rm -r $prefix"
say "ready, $(du -sm "$prefix" | cut -f1) MB. Use it:"
say "  export PATH=$prefix/bin:\$PATH LD_LIBRARY_PATH=$prefix/lib OPAL_PREFIX=$prefix"
