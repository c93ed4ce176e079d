# lib.sh   what the job scripts share; sourced by them, never run. README.md beside it says what can be set.
# shellcheck shell=bash
#
# Owns: finding Python and the machine's file, submitting, launching ranks, signals, and what follows from an exit code.
# The environment on nodes' own disks is in local_env.sh beside it.

EXIT_REQUEUE=75 EXIT_MISCONFIGURED=78
ASK_S=60 # how long a slurmctld that does not answer is asked again
ANSWER_S=30 # how long a node may take to answer after a start has failed
PLACES=()   # options of srun once a node is lost; before, the step has all nodes of the job

# What to type to start the script again: inside of a job $0 is SLURM's copy of it.
CALLED="${here:-$0}"

# shellcheck source-path=SCRIPTDIR source=local_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/local_env.sh"

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
                "MACHINE='' $CALLED   # or write a machine file without modules: slurm/machines/"
        fi
        if ! module load "$name" || [[ ":${LOADEDMODULES:-}:" != *":$name"[/:]* ]]; then
            fail "the module $name, which machine file $MACHINE wants, cannot be loaded" \
                "module avail ${name%%/*}   # then set MODULES='...' or correct slurm/machines/"
        fi
    done
    set -u
}

is_elastic() { ((${ELASTIC_NODES:-0} > 0)); }

use_machine() {
    local file="$CHECKOUT/slurm/machines/$MACHINE.sh"
    if [[ -z "$MACHINE" ]]; then return; fi
    if [[ "$MACHINE" == */* ]]; then file="$MACHINE"; fi
    if [[ ! -r "$file" ]]; then
        fail "no machine file $file; there are: $(cd "$CHECKOUT/slurm/machines" && echo *.sh)" \
            "MACHINE=dgx-infiniband $CALLED   # or a path to your own, or MACHINE='' for none"
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
        fail "no Python at $PYTHON" "make setup   # or PYTHON=/path/to/python $CALLED; compute nodes must see it too"
    fi
    LAUNCHER="${LAUNCHER:-srun}"                      # srun, or mpirun where srun and this MPI do not know each other
    MPI_PLUGIN="${MPI_PLUGIN-pmix}"                   # of srun: srun --mpi=list; empty: the site's default
    CPU_BIND="${CPU_BIND:-cores}"                     # of srun; a mask where a site has reserved cores
    BIND="${BIND-$CHECKOUT/slurm/bind.sh}"            # puts each rank beside its GPU; empty: nothing does
    REQUEUE="${REQUEUE:-1}"                           # 0: never requeue; for chains
    LOGS="${LOGS:-logs}"                              # what the job notes of its surroundings
    if [[ "$LAUNCHER" != srun && "$LAUNCHER" != mpirun ]]; then
        fail "LAUNCHER is '$LAUNCHER', expected srun or mpirun" "LAUNCHER=srun $CALLED"
    fi
    if [[ "${NODES:-}" =~ ^([1-9][0-9]*)-([1-9][0-9]*)$ ]]; then # the smallest that SLURM may give is enough to go on with
        export ELASTIC_NODES="${ELASTIC_NODES:-${BASH_REMATCH[1]}}"
        local given="${SLURM_JOB_NUM_NODES:-0}"
        if ((given >= BASH_REMATCH[1] && given <= BASH_REMATCH[2])); then NODES="$given"; fi
    elif [[ -n "${NODES:-}" && ! "$NODES" =~ ^[0-9]+$ ]]; then
        fail "NODES is '$NODES', expected a number, or two as in 4-8" "NODES=1 $CALLED"
    fi
    for name in ELASTIC_NODES RANKS_PER_NODE GPUS_PER_NODE CPUS_PER_RANK SIGNAL_S MODEL_PARALLEL; do
        if [[ -n "${!name:-}" && ! "${!name}" =~ ^[0-9]+$ ]]; then
            fail "$name is '${!name}', expected a number" "$name=1 $CALLED"
        fi
    done
    if is_elastic && [[ "$LAUNCHER" != srun ]]; then
        fail "ELASTIC_NODES is $ELASTIC_NODES, and LAUNCHER is $LAUNCHER: only srun can leave a lost node out" "ELASTIC_NODES=0 $CALLED"
    fi
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
                "$name=... $CALLED   # sacctmgr show associations user=\$USER and sinfo -s show yours"
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
        fail "no sbatch on this host ($(hostname))" "DRY_RUN=1 $CALLED   # or do this on a login node of the cluster"
    fi
    if [[ -n "${PARTITION:-}" ]]; then
        known="$(sinfo --all --noheader --format=%R | sort -u | tr '\n' ' ')" || known="" # busy: sbatch will say it
        for name in ${PARTITION//,/ }; do # sbatch takes several
            if [[ -n "$known" && " $known" != *" $name "* ]]; then
                fail "PARTITION is '$PARTITION', and this cluster has: $known" "PARTITION=${known%% *} $CALLED"
            fi
        done
    fi
}

# of_script SCRIPT PATTERN: what its #SBATCH lines say, the part of the pattern in parentheses.
of_script() { sed -n "s/^#SBATCH .*$2.*/\1/p" "$1" | tail -n 1; }

# seconds_of TIME: of sbatch's forms m, m:s, h:m:s, d-h, d-h:m, d-h:m:s; 0 for no limit and for anything else.
seconds_of() {
    local days=0 rest="$1" parts
    if [[ ! "$1" =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$ ]]; then
        echo 0
        return
    fi
    if [[ "$1" == *-* ]]; then
        days="${1%%-*}" rest="${1#*-}"
    elif [[ "$1" != *:*:* ]]; then
        rest="0:$1"
    fi
    IFS=: read -ra parts <<<"$rest"
    echo $((10#$days * 86400 + 10#${parts[0]} * 3600 + 10#${parts[1]:-0} * 60 + 10#${parts[2]:-0}))
}

# check_warning SCRIPT: a job that is told to stop as soon as it starts would do a step at a time.
check_warning() {
    local limit limit_s warning
    case " ${SBATCH_OPTIONS:-}" in *" --time"* | *" -t"* | *" --signal"*) return ;; esac # those win, and are the user's
    limit="${TIME:-$(of_script "$1" '--time=\([^ ]*\)')}"
    warning="${SIGNAL_S:-$(of_script "$1" '--signal=B:USR1@\([0-9]*\)')}"
    limit_s="$(seconds_of "$limit")"
    if ((limit_s > 0 && limit_s <= 10#${warning:-0})); then
        fail "TIME is $limit, and the run is told to stop SIGNAL_S=$warning seconds before its end: before it starts" \
            "TIME=$limit SIGNAL_S=$((limit_s / 4)) $CALLED   # more than a step and a save take"
    fi
}

# check_options ARGUMENTS...: those of the training command, before the job waits in the queue.
check_options() {
    "$PYTHON" -c 'from hpczero import errors, train; errors.run(lambda: train.options() and 0)' "$@" || exit "$EXIT_MISCONFIGURED"
}

# submit SCRIPT ARGUMENTS...: sbatch with the sizes that variables give; #SBATCH lines cannot read variables.
submit() {
    local script="$CHECKOUT/slurm/$1" options=(--export=ALL)
    shift
    check_site
    check_warning "$script"
    if [[ -n "${NODES:-}" ]]; then options+=("--nodes=$NODES"); fi
    if [[ -n "${RANKS_PER_NODE:-}" ]]; then options+=("--ntasks-per-node=$RANKS_PER_NODE"); fi
    if [[ -n "${SIGNAL_S:-}" ]]; then options+=("--signal=B:USR1@$SIGNAL_S"); fi
    if is_elastic && [[ "$script" == */train.sh ]]; then options+=(--no-kill); fi # else SLURM ends the job of a lost node
    options+=("${site_options[@]}")
    say "sbatch ${options[*]} $script $*"
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        say "DRY_RUN=1: nothing is submitted"
        return
    fi
    sbatch "${options[@]}" "$script" "$@" || fail "SLURM refused the job: its reason is in the line above" \
        "sinfo -s; sacctmgr show associations user=\$USER   # then PARTITION=... ACCOUNT=... $CALLED"
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

# of_job FIELD: what scontrol show job says now.
of_job() { scontrol show job -o "$(job_name_for_slurm)" 2>/dev/null | sed -n "1s/.* $1=\([^ ]*\).*/\1/p" | grep .; }

# insist COMMAND...: until it succeeds, for about a minute: one call that a busy slurmctld leaves out must not cost a restart.
insist() {
    local end=$((SECONDS + ASK_S))
    until "$@"; do
        if ((SECONDS >= end)); then return 1; fi
        sleep 5
    done
}

# hold NAME GIVEN OPTION: what the user said by a variable against what SLURM gave. What scripts and machine files set
# by themselves is not exported, and gives way.
hold() {
    local name="$1" given="$2" option="$3"
    if [[ -z "${!name:-}" || "${!name}" == "$given" ]]; then return; fi
    if [[ "$(declare -p "$name")" =~ ^declare\ -[a-zA-Z]*x ]]; then
        fail "$name is ${!name}, but SLURM gave $given: sbatch does not read our variables" \
            "sbatch $option=${!name} ... $CALLED   # or without sbatch: the script submits itself, with its variables"
    fi
}

# enter_job: what every job does before its first rank starts.
enter_job() {
    local ranks_per_node="${SLURM_NTASKS_PER_NODE:-}" gpus="${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}"
    hold NODES "$SLURM_JOB_NUM_NODES" --nodes
    hold RANKS_PER_NODE "${ranks_per_node:-${RANKS_PER_NODE:-}}" --ntasks-per-node
    hold CPUS_PER_RANK "${SLURM_CPUS_PER_TASK:-1}" --cpus-per-task
    if [[ "$gpus" != *,* ]]; then hold GPUS_PER_NODE "${gpus##*:}" --gpus-per-node; fi # a100:4, or of several kinds
    RANKS_PER_NODE="${ranks_per_node:-${RANKS_PER_NODE:-1}}"
    RANKS=$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))
    if [[ -n "${SLURM_NTASKS:-}" && "$SLURM_NTASKS" != "$RANKS" ]]; then
        fail "$SLURM_JOB_NUM_NODES nodes x $RANKS_PER_NODE ranks are $RANKS, but the job has $SLURM_NTASKS tasks" \
            "sbatch --nodes=N --ntasks-per-node=L ...   # and no --ntasks"
    fi
    export RANKS RANKS_PER_NODE
    # Starts that go on with one another's run: requeues, elements of an array, links of a chain.
    if in_batch; then export HPCZERO_SERIES="${HPCZERO_SERIES:-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"; fi
    if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then # else a rank has what SLURM and the binding leave it
        export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # from 22.05 on srun does not inherit --cpus-per-task
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
    fi
    export OMPI_MCA_io="${OMPI_MCA_io:-^ompio}"           # open-mpi/ompi#12718: OMPIO can write wrong data silently
    export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
    say "job $(job_name_for_slurm), start $((${SLURM_RESTART_COUNT:-0} + 1)) of series ${HPCZERO_SERIES:-none}:" \
        "$SLURM_JOB_NUM_NODES node(s) x $RANKS_PER_NODE rank(s) on $SLURM_JOB_NODELIST, by $LAUNCHER, at $(date -Is)"
    mkdir -p "$LOGS"
    "$PYTHON" -m hpczero.doctor.record "$LOGS/env-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.json"
    make_local_env
}

# launch COMMAND...: on all ranks of the job; returns its exit code. USR1 and TERM to this shell reach every rank as USR1.
launch() {
    local line rc resender="" interrupted
    case "$LAUNCHER" in
    srun)
        # No --kill-on-bad-exit: with it a rank that ends 0.3 s after the first 75 is killed, and the job's code is 143.
        # Ranks that outlive the first one end by --wait, if not by MPI: also where one has crashed.
        if [[ -n "$MPI_PLUGIN" ]]; then export SLURM_MPI_TYPE="$MPI_PLUGIN"; fi # also of an srun that a rank starts
        line=(srun ${MPI_PLUGIN:+"--mpi=$MPI_PLUGIN"} "--cpu-bind=$CPU_BIND" --distribution=block:block --wait=30 "${PLACES[@]}")
        ;;
    # Without the variable: mpirun starts its daemons by an srun of its own, one task per node, for which it is not meant.
    mpirun) line=(env -u SRUN_CPUS_PER_TASK mpirun -n "$RANKS" --map-by "ppr:$RANKS_PER_NODE:node" --bind-to none) ;;
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
    clear_local_env # now: requeueing ends this shell at once
    if ((code != EXIT_REQUEUE)); then exit "$code"; fi
    if ! in_batch; then
        say "saved, and an interactive job is not requeued; the same command goes on"
        exit "$code"
    fi
    if [[ "$REQUEUE" != 1 ]]; then
        say "REQUEUE=$REQUEUE: saved, and not requeued; the next link of the chain goes on, or the same command"
        exit "$code"
    fi
    state="$(insist of_job JobState)" || true
    if [[ "$state" != RUNNING ]]; then # scancel also sends TERM: who cancels a job does not want it back
        say "saved, and not requeued: the job is ${state:-unknown}; the same command goes on from there"
        exit "$code"
    fi
    say "requeueing $(job_name_for_slurm)"
    insist scontrol requeue "$(job_name_for_slurm)" ||
        say "not requeued within $ASK_S s, perhaps never on this site; the same command goes on, or a chain: slurm/chain.sh"
    sleep 5 # SLURM ends this shell; should it be slow, the job must not end by itself meanwhile
    exit "$code"
}

# --- nodes that are lost in a job of --no-kill

# answering: names of the job's nodes that start a process.
answering() {
    local nodes number
    nodes="$(of_job NodeList)" # without those that SLURM has taken from the job
    number="$(scontrol show hostnames "$nodes" | wc -l)"
    # shellcheck disable=SC2016  # for the shell on each node
    { timeout --kill-after=10 "$ANSWER_S" srun --overlap --mem=0 --mpi=none --nodes="$number" --ntasks="$number" \
        --ntasks-per-node=1 --nodelist="$nodes" --wait=0 bash -c 'echo "$SLURMD_NODENAME"' </dev/null 2>/dev/null || true; } |
        sort | grep .
}

# guard: where the first node is lost, the script is gone, and SLURM would keep the job until its time is over. The last
# node sees to that.
guard() {
    local name="$1" end="$2" first nodes
    trap '' USR1
    while sleep 30; do
        read -r first nodes < <(squeue --noheader --format='%B %N' --jobs="$name") || continue
        if ! scontrol show hostnames "$nodes" | grep -qx "$first"; then scontrol "$end" "$name" || scancel "$name"; fi
    done
}

start_guard() {
    local last end=requeue
    if ((SLURM_JOB_NUM_NODES < 2)); then return; fi
    last="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)"
    if [[ "$REQUEUE" != 1 ]]; then end=none; fi # no word of scontrol: scancel
    srun --overlap --mem=0 --mpi=none --nodes=1 --ntasks=1 --nodelist="$last" \
        bash -c "$(declare -f guard); guard $(job_name_for_slurm) $end" </dev/null >/dev/null 2>&1 &
    GUARD=$!
}

# saved_step ARGUMENTS...: step of the run's newest checkpoint.
saved_step() {
    "$PYTHON" -c 'from hpczero import train
from hpczero.run.results.folder import RunFolder
print(RunFolder.of(train.options()[0].run).newest_step())' "$@" 2>/dev/null # what is wrong the command says itself
}

# without_lost CODE STEP: whether a start that ended with CODE has lost a node, and the run can go on without it. Says so;
# sets PLACES, RANKS and what SLURM has told of the job. A program that fails on nodes that all answer is not started again.
without_lost() {
    local code="$1" state left lost number
    case "$code" in 0 | 65 | "$EXIT_REQUEUE" | "$EXIT_MISCONFIGURED") return 1 ;; esac
    state="$(insist of_job JobState)" || true
    if [[ "$state" != RUNNING ]]; then return 1; fi
    if ! left="$(insist answering)"; then
        say "exit code $code, and no node answers"
        return 1
    fi
    lost="$(comm -23 <(scontrol show hostnames "$SLURM_JOB_NODELIST" | sort) <(echo "$left") | paste -sd,)"
    number="$(wc -l <<<"$left")"
    if [[ -z "$lost" ]]; then return 1; fi
    SLURM_JOB_NUM_NODES="$number" SLURM_JOB_NODELIST="$(scontrol show hostlist "$(paste -sd, <<<"$left")")"
    RANKS=$((number * RANKS_PER_NODE))
    # --overlap: SLURM may hold the cores of the step before until it has found out by itself.
    PLACES=(--overlap "--nodes=$number" "--ntasks=$RANKS" "--nodelist=$SLURM_JOB_NODELIST")
    say "exit code $code: lost $lost; $number node(s) are left, $SLURM_JOB_NODELIST, for $RANKS rank(s) from step $2"
}

# train ARGUMENTS...: the training command as one job.
train() {
    enter_job
    local rc=0 step=0 before="" fruitless=0
    if ! is_elastic || ! in_batch; then # else the same command again may not be meant to go on
        launch "$PYTHON" -m hpczero.train "$@" || rc=$?
        leave_job "$rc"
    fi
    step="$(saved_step "$@")" || true
    while :; do
        GUARD="" rc=0 before="$step"
        start_guard
        launch "$PYTHON" -m hpczero.train "$@" || rc=$?
        if [[ -n "$GUARD" ]]; then kill "$GUARD" 2>/dev/null || true; fi
        step="$(saved_step "$@")" || step="$before"
        without_lost "$rc" "$step" || leave_job "$rc"
        if ((step == before)); then ((++fruitless)); else fruitless=0; fi
        if ((fruitless >= 2)); then
            say "two starts in a row have saved nothing after step $step"
            leave_job "$rc"
        fi
        if ((SLURM_JOB_NUM_NODES < ELASTIC_NODES)); then
            say "too few: ELASTIC_NODES is $ELASTIC_NODES"
            leave_job "$EXIT_REQUEUE" # as SLURM does itself where a job is not elastic
        fi
    done
}

# --- scaling studies

# common_multiple NUMBERS...: the smallest number that all of them divide: a global batch for all numbers of ranks.
common_multiple() {
    local multiple=1 number a b rest
    for number in "$@"; do
        a="$multiple" b="$number" # a becomes what divides both
        while ((b > 0)); do
            rest=$((a % b)) a="$b"
            b="$rest"
        done
        multiple=$((multiple * (number / a)))
    done
    echo "$multiple"
}

# study KIND [OPTIONS...] [-- SBATCH_OPTIONS...]: submit python -m scaling.sweep KIND for $RANKS; ends the script.
study() {
    local kind="$1" words=() line size
    shift
    for size in $RANKS; do
        if [[ ! "$size" =~ ^[1-9][0-9]*$ ]]; then
            fail "RANKS is '$RANKS', expected numbers of ranks" "RANKS='16 32 64' $CALLED"
        fi
    done
    if [[ "$kind" == strong && " $*" != *" --batches"* ]]; then
        # shellcheck disable=SC2086  # several words on purpose
        set -- --batches "$(common_multiple $RANKS)" "$@"
    fi
    RANKS_PER_NODE="${RANKS_PER_NODE:-16}"
    GPUS_PER_NODE="${GPUS_PER_NODE:-$RANKS_PER_NODE}"
    set_up
    if [[ ! -d "$CHECKOUT/scaling" ]]; then # installed: a wheel has the scripts and not the measurements
        fail "$CHECKOUT has no folder scaling, and python -m scaling.sweep is in it" \
            "CHECKOUT=/path/to/checkout PYTHON=$PYTHON $CALLED ...   # the same release of hpczero, as source"
    fi
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
