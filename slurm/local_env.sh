# local_env.sh   the environment of a job on each node's own disk: sourced by lib.sh, never run
# shellcheck shell=bash
#
# Owns: from an archive of pack.sh to a PYTHON, PYTHONPATH and BIND on the nodes, and that nothing of it stays. What each
# node does is in on_node.sh. Off unless ENV_ARCHIVE names an archive.
#
# A rank opens and looks for thousands of files before its first step, and a shared file system serves them to all ranks
# at once. sbcast sends one file to all nodes as a tree.

LOCAL_ENV=""      # folder on each node, once it is made
CLEAR_S=60        # how long nodes may take to remove it

# find_parts: what an archive is made of. Sets ENV_PREFIX, ENV_BASE (empty: of the node's system), ENV_NAME, ENV_CODE.
find_parts() {
    local part
    {
        read -r ENV_PREFIX
        read -r ENV_BASE
        read -r ENV_NAME
    } < <("$PYTHON" -c 'import sys, os
print(sys.prefix, sys.base_prefix, "python%d.%d" % sys.version_info[:2], sep=os.linesep)') ||
        fail "$PYTHON does not start" "make setup   # or PYTHON=/path/to/python $CALLED"
    if [[ "$ENV_PREFIX" == /usr || "$ENV_PREFIX" == /usr/local ]]; then
        fail "PYTHON is $PYTHON, of the node's own system, which is no environment to pack" "PYTHON=.venv/bin/python $CALLED"
    fi
    if [[ "$ENV_BASE" == "$ENV_PREFIX" || "$ENV_BASE" == /usr || "$ENV_BASE" == /usr/local ]]; then ENV_BASE=""; fi
    ENV_CODE=()
    for part in hpczero scaling slurm install; do # of a wheel there is only slurm: the rest is in the environment
        if [[ -d "$CHECKOUT/$part" ]]; then ENV_CODE+=("$part"); fi
    done
}

# fingerprint: of names, sizes and times of all files that find_parts found; not of what running them leaves.
fingerprint() {
    local digest
    digest="$(find -H "$ENV_PREFIX" ${ENV_BASE:+"$ENV_BASE/lib/$ENV_NAME"} "${ENV_CODE[@]/#/$CHECKOUT/}" \
        \( -name __pycache__ -o -path "$CHECKOUT/scaling/results" \) -prune -o -type f -printf '%p %s %T@\n' |
        LC_ALL=C sort | sha256sum)"
    echo "${digest%% *}"
}

# on_each_node LIMIT_S VERB ARGUMENTS...: on_node.sh on every node of the job, once. A disk that hangs ends it.
on_each_node() {
    timeout --kill-after=10 "$1" \
        srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        "${PLACES[@]}" --ntasks="$SLURM_JOB_NUM_NODES" --wait=0 bash "$CHECKOUT/slurm/on_node.sh" "${@:2}" </dev/null
}

# of_info NAME: a word of ARCHIVE.info.
of_info() { sed -n "s/^$1 \([0-9a-f]*\)\$/\1/p" "$ENV_ARCHIVE.info"; }

# check_archive: refuse one that is not there, not whole, or not made of what is there now.
check_archive() {
    local pack="$CHECKOUT/slurm/pack.sh $ENV_ARCHIVE" name
    if [[ ! -r "$ENV_ARCHIVE" ]]; then
        fail "ENV_ARCHIVE is $ENV_ARCHIVE: no such file on $(hostname), or it cannot be read" \
            "$pack   # or ENV_ARCHIVE='' $CALLED"
    fi
    for name in sha256 bytes made_of; do
        if [[ ! -r "$ENV_ARCHIVE.info" || -z "$(of_info "$name")" ]]; then
            fail "$ENV_ARCHIVE.info does not say its $name: not made by pack.sh, or being made" "$pack"
        fi
    done
    if [[ "$(stat -L -c %s "$ENV_ARCHIVE")" != "$(of_info bytes)" ]]; then
        fail "$ENV_ARCHIVE has $(stat -L -c %s "$ENV_ARCHIVE") bytes, expected $(of_info bytes): not whole, or another one" "$pack"
    fi
    find_parts
    if [[ "$(fingerprint)" != "$(of_info made_of)" ]]; then
        fail "$ENV_ARCHIVE is stale: files of $ENV_PREFIX or $CHECKOUT are others than when it was packed" \
            "$pack   # or ENV_ARCHIVE='' $CALLED runs what is there now"
    fi
}

# make_local_env: put the environment on every node and use it from here on; nothing without ENV_ARCHIVE.
make_local_env() {
    local begin=$SECONDS limit="${LOCAL_ENV_S:-900}" alive folder
    if [[ -z "${ENV_ARCHIVE:-}" ]]; then return; fi
    NODE_LOCAL="${NODE_LOCAL:-/tmp}"
    check_archive
    # By job and start: jobs that share a node have one each.
    folder="$NODE_LOCAL/hpczero-env-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    alive="$(squeue --noheader --user="$(id -u)" --format=%A | tr '\n' ,)" || alive="" # unknown: nothing old is removed
    trap clear_local_env EXIT
    LOCAL_ENV="$folder"
    if ! on_each_node "$limit" prepare "$folder" "$(of_info bytes)" "$alive"; then
        no_local_env "the disks are not ready"
    elif ! timeout --kill-after=10 "$limit" sbcast --force "$ENV_ARCHIVE" "$folder/archive"; then
        no_local_env "sbcast could not copy $ENV_ARCHIVE"
    elif ! on_each_node "$limit" unpack "$folder" "$(of_info sha256)" "$ENV_NAME"; then
        no_local_env "it could not be unpacked"
    fi
    PYTHON="$folder/env/bin/python"
    PYTHONPATH="$folder/checkout${PYTHONPATH#"$CHECKOUT"}"
    if [[ "$BIND" == "$CHECKOUT/slurm/bind.sh" ]]; then BIND="$folder/checkout/slurm/bind.sh"; fi
    say "environment: $(($(of_info bytes) / 1000000)) MB on each node, in $folder, after $((SECONDS - begin)) s"
}

no_local_env() {
    fail "no environment on the nodes' own disks: $1, see above" \
        "NODE_LOCAL=/another/disk $CALLED   # or ENV_ARCHIVE='' $CALLED runs from the shared file system"
}

# clear_local_env: remove it from every node. What a lost node or a cancelled job leaves, later jobs there remove.
clear_local_env() {
    local folder="$LOCAL_ENV"
    LOCAL_ENV=""
    if [[ -z "$folder" ]]; then return; fi
    on_each_node "$CLEAR_S" clear "$folder" ||
        say "$folder may still lie on some nodes; the next job there with ENV_ARCHIVE removes it"
}
