#!/usr/bin/env bash
# on_node.sh VERB FOLDER ...   not a job: what one node does for local_env.sh; srun starts it once on each node of a job
#
#   prepare FOLDER BYTES ALIVE     make FOLDER, if there is room for an archive of BYTES and what is in it. ALIVE: the
#                                  user's jobs, 12,13; folders of other jobs go. Empty: nobody knows, and none goes
#   unpack FOLDER SHA256 PYTHON    check FOLDER/archive, unpack it, have PYTHON (python3.11) start from there
#   clear FOLDER                   remove FOLDER
#
# Works with nothing but coreutils, tar and the node's own disk.
set -euo pipefail

SETTLE_MIN=60 # a folder so young may be of a job that began after the list of jobs was made
node="${SLURMD_NODENAME:-$(hostname)}"
verb="$1" folder="$2"

refuse() {
    echo "slurm: node $node: $1" >&2
    exit 78
}

# remove_old ALIVE: what jobs that are gone have left here. Only folders of this user, and no links.
remove_old() {
    local old job
    if [[ -z "$1" ]]; then return; fi
    for old in "${folder%/*}"/hpczero-env-*; do
        job="${old##*/hpczero-env-}" job="${job%%-*}"
        if [[ -L "$old" || ! -d "$old" || ! -O "$old" || ! "$job" =~ ^[0-9]+$ || ",$1," == *",$job,"* ]]; then continue; fi
        if [[ -n "$(find "$old" -maxdepth 0 -mmin "-$SETTLE_MIN")" ]]; then continue; fi
        echo "slurm: node $node: removing $old, left by a job that is gone"
        rm -rf -- "$old" || true # another job may be at it
    done
}

prepare() {
    local wanted=$((2 * $1 + 2 ** 20)) free
    if [[ ! -d "${folder%/*}" ]]; then refuse "NODE_LOCAL is ${folder%/*}: no such folder here"; fi
    remove_old "$2"
    # Not with -p: what is there already is not ours, and may be a link of somebody else's.
    mkdir -m 700 -- "$folder" || refuse "$folder cannot be made: is NODE_LOCAL writable, and a disk of each node's own?"
    free="$(df --output=avail -B1 -- "$folder" | tail -n 1)"
    if ((free < wanted)); then
        rmdir -- "$folder"
        refuse "${folder%/*} has $((free / 10 ** 6)) MB free, expected $((wanted / 10 ** 6)) for the archive and what is in it"
    fi
}

unpack() {
    local sum name="$2" found
    sum="$(sha256sum <"$folder/archive")" || refuse "$folder/archive cannot be read"
    if [[ "${sum%% *}" != "$1" ]]; then refuse "the archive arrived with another checksum than it was sent with"; fi
    tar -C "$folder" -xf "$folder/archive" || refuse "the archive cannot be unpacked in $folder"
    rm -- "$folder/archive"
    if [[ -d "$folder/base" ]]; then # a virtual environment names its interpreter by its path
        sed -i "s|^home *=.*|home = $folder/base/bin|" "$folder/env/pyvenv.cfg"
        for found in "$folder"/env/bin/python*; do
            if [[ -L "$found" && "$(readlink -- "$found")" == */* ]]; then ln -sfn "$folder/base/bin/$name" "$found"; fi
        done
    fi
    found="$("$folder/env/bin/python" -c 'import os, sys; print(sys.prefix)')" || refuse "$folder/env/bin/python does not start"
    if [[ "$found" != "$folder/env" ]]; then refuse "$folder/env/bin/python runs from $found, expected $folder/env"; fi
}

case "$verb" in
prepare) prepare "$3" "$4" ;;
unpack) unpack "$3" "$4" ;;
clear) rm -rf -- "$folder" ;;
*) refuse "on_node.sh: got $verb, expected prepare, unpack or clear" ;;
esac
