# lib.sh   what the job scripts share; sourced by them, never run. README.md beside it says what can be set.
# shellcheck shell=bash
#
# Owns: finding Python and the machine's file, submitting, launching ranks, signals, and what follows from an exit code.

EXIT_REQUEUE=75 EXIT_MISCONFIGURED=78

say() { echo "slurm: $*"; }

# fail WHAT LINE: what is wrong, and the line that mends it.
fail() {
    echo "slurm: $1" >&2
    echo "slurm: type: $2" >&2
    exit "$EXIT_MISCONFIGURED"
}

in_job() { [[ -n "${SLURM_JOB_ID:-}" ]]; }
in_batch() { in_job && [[ "$0" == */slurm_script ]]; } # else somebody sits in front of it: salloc

# --- the machine

# need_module NAME...: load modules; for machine files. Old module commands fail without a bad exit code, so look.
need_module() {
    local name file
    set +u # module functions use unset variables
    if ! type module >/dev/null 2>&1; then # a batch shell is no login shell
        for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/bash; do
            # shellcheck disable=SC1090  # the site's
            if [[ -r "$file" ]]; then source "$file" && break; fi
        done
    fi
    for name in "$@"; do
        if ! type module >/dev/null 2>&1; then
            fail "machine file $MACHINE wants the module $name, and this host ($(hostname)) has no module command" \
                "MACHINE='' ${0##*/}   # or write a machine file without modules: slurm/machines/"
        fi
        if ! module load "$name" || [[ ":${LOADEDMODULES:-}:" != *":$name"[/:]* ]]; then
            fail "the module $name, which machine file $MACHINE wants, cannot be loaded" \
                "module avail ${name%%/*}   # then set MODULES='...' or correct slurm/machines/"
        fi
    done
    set -u
}

use_machine() {
    local file="$CHECKOUT/slurm/machines/$MACHINE.sh"
    if [[ -z "$MACHINE" ]]; then return; fi
    if [[ "$MACHINE" == */* ]]; then file="$MACHINE"; fi
    if [[ ! -r "$file" ]]; then
        fail "no machine file $file; there are: $(cd "$CHECKOUT/slurm/machines" && echo *.sh)" \
            "MACHINE=dgx-infiniband ${0##*/}   # or a path to your own, or MACHINE='' for none"
    fi
    # shellcheck disable=SC1090  # chosen by the user
    source "$file"
}

# set_up: settle every variable that was left open. Sets nothing that the user or the machine's file has set.
set_up() {
    local name
    MACHINE="${MACHINE:-}"
    use_machine
    export CHECKOUT MACHINE
    PYTHON="${PYTHON:-$CHECKOUT/.venv/bin/python}"
    if [[ ! -x "$PYTHON" ]] && ! command -v "$PYTHON" >/dev/null; then
        fail "no Python at $PYTHON" "make setup   # or PYTHON=/path/to/python ${0##*/}; compute nodes must see it too"
    fi
    LAUNCHER="${LAUNCHER:-srun}"                      # srun, or mpirun where srun and this MPI do not know each other
    MPI_PLUGIN="${MPI_PLUGIN-pmix}"                   # of srun: srun --mpi=list; empty: the site's default
    CPU_BIND="${CPU_BIND:-cores}"                     # of srun; a mask where a site has reserved cores
    BIND="${BIND-$CHECKOUT/slurm/bind.sh}"            # puts each rank beside its GPU; empty: nothing does
    REQUEUE="${REQUEUE:-1}"                           # 0: never requeue; for chains
    LOGS="${LOGS:-logs}"                              # what the job notes of its surroundings
    if [[ "$LAUNCHER" != srun && "$LAUNCHER" != mpirun ]]; then
        fail "LAUNCHER is '$LAUNCHER', expected srun or mpirun" "LAUNCHER=srun ${0##*/}"
    fi
    for name in NODES RANKS_PER_NODE GPUS_PER_NODE CPUS_PER_RANK; do
        if [[ -n "${!name:-}" && ! "${!name}" =~ ^[0-9]+$ ]]; then
            fail "$name is '${!name}', expected a number" "$name=1 ${0##*/}"
        fi
    done
    export NUMA_OF_RANK="${NUMA_OF_RANK:-}" NIC_OF_RANK="${NIC_OF_RANK:-}" BIND_VERBOSE="${BIND_VERBOSE:-0}" # for bind.sh
    export PYTHONPATH="$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}"
}

# --- before the job

# check_site: what the site wants to be told, and what it knows. Sets site_options, those of sbatch that are no sizes.
check_site() {
    local name known
    for name in ${MACHINE_NEEDS:-}; do
        if [[ -z "${!name:-}" ]]; then
            fail "$name is not set, and machine file $MACHINE says that this kind of site wants one" \
                "$name=... ${0##*/}   # sacctmgr show associations user=\$USER and sinfo -s show yours"
        fi
    done
    site_options=()
    if [[ -n "${GPUS_PER_NODE:-}" ]]; then site_options+=("--gpus-per-node=$GPUS_PER_NODE"); fi
    if [[ -n "${CPUS_PER_RANK:-}" ]]; then site_options+=("--cpus-per-task=$CPUS_PER_RANK"); fi
    if [[ -n "${TIME:-}" ]]; then site_options+=("--time=$TIME"); fi
    if [[ -n "${PARTITION:-}" ]]; then site_options+=("--partition=$PARTITION"); fi
    if [[ -n "${ACCOUNT:-}" ]]; then site_options+=("--account=$ACCOUNT"); fi
    # shellcheck disable=SC2206  # several words on purpose
    site_options+=(${SBATCH_OPTIONS:-})
    if [[ "${DRY_RUN:-0}" == 1 ]]; then return; fi
    if ! command -v sbatch >/dev/null; then
        fail "no sbatch on this host ($(hostname))" "DRY_RUN=1 ${0##*/}   # or do this on a login node of the cluster"
    fi
    if [[ -n "${PARTITION:-}" ]]; then
        known="$(sinfo --noheader --format=%R | sort -u | tr '\n' ' ')"
        if [[ " $known" != *" $PARTITION "* ]]; then
            fail "PARTITION is '$PARTITION', and this cluster has: $known" "PARTITION=${known%% *} ${0##*/}"
        fi
    fi
}

# submit SCRIPT ARGUMENTS...: sbatch with the sizes that variables give; #SBATCH lines cannot read variables.
submit() {
    local script="$CHECKOUT/slurm/$1" options=(--export=ALL)
    shift
    check_site
    if [[ -n "${NODES:-}" ]]; then options+=("--nodes=$NODES"); fi
    if [[ -n "${RANKS_PER_NODE:-}" ]]; then options+=("--ntasks-per-node=$RANKS_PER_NODE"); fi
    if [[ -n "${SIGNAL_S:-}" ]]; then options+=("--signal=B:USR1@$SIGNAL_S"); fi
    options+=("${site_options[@]}")
    say "sbatch ${options[*]} $script $*"
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        say "DRY_RUN=1: nothing is submitted"
        return
    fi
    sbatch "${options[@]}" "$script" "$@" || fail "SLURM refused the job: its reason is in the line above" \
        "sinfo -s; sacctmgr show associations user=\$USER   # then PARTITION=... ACCOUNT=... ${0##*/}"
}

# --- inside the job

# The name that scontrol wants: the bare number of an array's first element would mean all of them.
job_name_for_slurm() {
    if [[ -n "${SLURM_ARRAY_JOB_ID:-}" ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

job_state() {
    scontrol show job -o "$(job_name_for_slurm)" 2>/dev/null | sed -n '1s/.* JobState=\([A-Z_]*\).*/\1/p'
}

# enter_job: what every job does before its first rank starts.
enter_job() {
    local ranks_per_node="${SLURM_NTASKS_PER_NODE:-}"
    trap : USR1 # so early a warning must not end the job; the run itself knows how much time is left
    if [[ -n "${NODES:-}" && "$NODES" != "$SLURM_JOB_NUM_NODES" ]]; then
        fail "NODES is $NODES, but SLURM gave $SLURM_JOB_NUM_NODES node(s): sbatch does not read our variables" \
            "NODES=$NODES slurm/${SLURM_JOB_NAME:-train}.sh   # without sbatch it submits itself; or sbatch --nodes=$NODES"
    fi
    if [[ -n "${RANKS_PER_NODE:-}" && -n "$ranks_per_node" && "$RANKS_PER_NODE" != "$ranks_per_node" ]]; then
        fail "RANKS_PER_NODE is $RANKS_PER_NODE, but SLURM gave $ranks_per_node tasks per node" \
            "sbatch --ntasks-per-node=$RANKS_PER_NODE ...   # or let the script submit itself: no sbatch in front"
    fi
    RANKS_PER_NODE="${ranks_per_node:-${RANKS_PER_NODE:-1}}"
    RANKS=$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))
    if [[ -n "${SLURM_NTASKS:-}" && "$SLURM_NTASKS" != "$RANKS" ]]; then
        fail "$SLURM_JOB_NUM_NODES nodes x $RANKS_PER_NODE ranks are $RANKS, but the job has $SLURM_NTASKS tasks" \
            "sbatch --nodes=N --ntasks-per-node=L ...   # and no --ntasks"
    fi
    export RANKS RANKS_PER_NODE
    # Starts that go on with one another's run: requeues, elements of an array, links of a chain.
    if in_batch; then export HPCZERO_SERIES="${HPCZERO_SERIES:-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"; fi
    export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # from 22.05 on srun does not inherit --cpus-per-task
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    export OMPI_MCA_io="${OMPI_MCA_io:-^ompio}"           # open-mpi/ompi#12718: OMPIO can write wrong data silently
    export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
    say "job $(job_name_for_slurm), start $((${SLURM_RESTART_COUNT:-0} + 1)) of series ${HPCZERO_SERIES:-none}:" \
        "$SLURM_JOB_NUM_NODES node(s) x $RANKS_PER_NODE rank(s) on $SLURM_JOB_NODELIST, by $LAUNCHER, at $(date -Is)"
    mkdir -p "$LOGS"
    "$PYTHON" -m hpczero.doctor.record "$LOGS/env-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.json"
}

# launch COMMAND...: on all ranks of the job; returns its exit code. USR1 and TERM to this shell reach every rank as USR1.
launch() {
    local line rc resender="" interrupted
    case "$LAUNCHER" in
    srun)
        # No --kill-on-bad-exit: with it a rank that ends 0.3 s after the first 75 is killed, and the job's code is 143.
        # Ranks that outlive the first one end by --wait, if not by MPI: also where one has crashed.
        line=(srun ${MPI_PLUGIN:+"--mpi=$MPI_PLUGIN"} "--cpu-bind=$CPU_BIND" --distribution=block:block --wait=30)
        ;;
    mpirun) line=(mpirun -n "$RANKS" --map-by "ppr:$RANKS_PER_NODE:node" --bind-to none) ;;
    esac
    # shellcheck disable=SC2206  # several words on purpose
    line+=(${LAUNCH_OPTIONS:-} ${BIND:+"$BIND"} "$@")
    say "${line[*]}"
    "${line[@]}" &
    local pid=$!
    # shellcheck disable=SC2317  # called by the trap
    forward() {
        interrupted=1
        say "asked to stop at $(date -Is): telling the ranks"
        kill -USR1 "$pid" 2>/dev/null || return 0
        if [[ -z "$resender" ]]; then # a rank that had just started may not have heard it
            (for _ in 1 2 3; do sleep 15 && kill -USR1 "$pid"; done) >/dev/null 2>&1 &
            resender=$!
        fi
    }
    trap forward USR1 TERM
    while :; do
        interrupted=0 rc=0
        wait "$pid" || rc=$?
        kill -0 "$pid" 2>/dev/null || break # else it was a trap that ended wait
    done
    if ((interrupted)); then # it ended while the trap ran: the code is that of the signal
        local last=0
        wait "$pid" || last=$?
        if ((last != 127)); then rc=$last; fi
    fi
    trap : USR1 # one that comes late must not end the job before it is requeued
    trap - TERM
    if [[ -n "$resender" ]]; then kill "$resender" 2>/dev/null || true; fi
    return "$rc"
}

# leave_job CODE: end the job with CODE; 75 puts it into the queue again. Must come last: requeueing ends this shell.
leave_job() {
    local code="$1" state
    say "exit code $code at $(date -Is)"
    if ((code != EXIT_REQUEUE)); then exit "$code"; fi
    if ! in_batch; then
        say "saved, and an interactive job is not requeued; the same command goes on"
        exit "$code"
    fi
    if [[ "$REQUEUE" != 1 ]]; then
        say "REQUEUE=$REQUEUE: saved, and not requeued; the next link of the chain goes on, or the same command"
        exit "$code"
    fi
    state="$(job_state)"
    if [[ "$state" != RUNNING ]]; then # scancel also sends TERM: who cancels a job does not want it back
        say "saved, and not requeued: the job is ${state:-unknown}; the same command goes on from there"
        exit "$code"
    fi
    say "saved: requeueing $(job_name_for_slurm)"
    scontrol requeue "$(job_name_for_slurm)" ||
        say "this site does not requeue; the same command goes on, or a chain: slurm/chain.sh"
    sleep 5 # SLURM ends this shell; should it be slow, the job must not end by itself meanwhile
    exit "$code"
}

# train ARGUMENTS...: the training command as one job.
train() {
    enter_job
    local rc=0
    launch "$PYTHON" -m hpczero.train "$@" || rc=$?
    leave_job "$rc"
}

# --- scaling studies

# study KIND [OPTIONS...] [-- SBATCH_OPTIONS...]: submit python -m scaling.sweep KIND for $RANKS; ends the script.
study() {
    local kind="$1" words=() line
    shift
    RANKS="${RANKS:-16 32 64 128 256 400}" # the smallest is what the others are compared with
    RANKS_PER_NODE="${RANKS_PER_NODE:-16}"
    GPUS_PER_NODE="${GPUS_PER_NODE:-$RANKS_PER_NODE}"
    set_up
    check_site
    while (($#)) && [[ "$1" != -- ]]; do
        words+=("$1")
        shift
    done
    # shellcheck disable=SC2206  # several words on purpose
    line=("$PYTHON" -m scaling.sweep "$kind" --by sbatch --ranks $RANKS --ranks_per_node "$RANKS_PER_NODE" "${words[@]}"
        -- "${site_options[@]}" "${@:2}")
    say "${line[*]}"
    if [[ "${DRY_RUN:-0}" == 1 ]]; then exit; fi
    cd "$CHECKOUT" || exit
    exec env -u NODES -u RANKS -u RANKS_PER_NODE "${line[@]}" # each job has its own
}
