#!/usr/bin/env bash
# Prepares .venv/peers: DeepSpeed, for `python -m scaling.peers`, beside the torch of .venv.
#
# Nothing of it is needed to use hpczero. DeepSpeed's packages stay out of .venv, torch is not installed twice, and
# its operators are compiled here (2 minutes), not in the middle of a measurement. Does nothing when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
main="$PWD/.venv/bin/python"
peers="$PWD/.venv/peers"
python="$peers/bin/python"
stamp="$peers/hpczero-setup"
log="$peers/setup.log"
deepspeed="deepspeed==0.19.8" # figures of different versions do not compare

say() { echo "peers: $*"; }
fail() {
    echo "peers: $1" >&2
    echo "peers: type: $2" >&2
    exit 78
}
step() {
    local what="$1"
    shift
    echo "+ $*" >>"$log"
    "$@" >>"$log" 2>&1 && return
    tail -n 25 "$log" >&2
    fail "$what failed; the whole log is $log" "install/peers.sh   # once the cause above is gone"
}

[[ -x "$main" ]] || fail "there is no .venv to stand on" "make setup"
command -v c++ >/dev/null || fail "DeepSpeed compiles operators and there is no C++ compiler" "apt-get install g++"
key="$deepspeed $("$main" -c 'import sys, torch; print(sys.version, torch.__version__)') $(sha256sum <"${BASH_SOURCE[0]}")"
if [[ -x "$python" && "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then
    say "ready"
    exit
fi

rm -rf "$peers"
mkdir -p "$peers"
: >"$log"
say "installing $deepspeed beside the torch of .venv"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
step "creating .venv/peers" "$main" -m venv --without-pip "$peers"
"$main" -c "$site" >"$("$python" -c "$site")/main.pth"
# CPU, and nothing compiled yet: its set-up would otherwise look for CUDA.
export DS_ACCELERATOR=cpu DS_BUILD_OPS=0
step "installing $deepspeed" "$python" -m pip --disable-pip-version-check --no-input install \
    --no-build-isolation --no-cache-dir "$deepspeed"

say "compiling its operators for this CPU (2 minutes)"
export TORCH_EXTENSIONS_DIR="$peers/extensions" PATH="$peers/bin:$PATH"
step "compiling DeepSpeed's operators" "$python" - <<'PYTHON'
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

CPUAdamBuilder().load()
ShareMemCommBuilder().load()
PYTHON
# For the contender that keeps everything on a disk; without its header that one cannot run, and the others can.
if [[ -e /usr/include/libaio.h ]]; then
    step "compiling DeepSpeed's disk engine" "$python" - <<'PYTHON'
from deepspeed.accelerator import get_accelerator

get_accelerator().create_op_builder("AsyncIOBuilder").load()
PYTHON
else
    say "without deepspeed-disk; type: apt-get install libaio-dev, then this again"
fi
echo "$key" >"$stamp"
say "done in $SECONDS s"
