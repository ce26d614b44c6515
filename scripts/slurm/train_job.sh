# shellcheck shell=bash
# The body of a training job: check, train, save before the time limit, go on. Sourced by the pretrain_*.sbatch files
# and by the jobs that `blackmamba launch` writes, which say
#
#   RUN_FOLDER        where the run lives; the same folder continues the same run
#   CONFIG            array: config files, shipped names and a.b=c overrides
#   GPUS_PER_NODE     one process each; 0 trains on CPUs, with SLURM_NTASKS_PER_NODE processes a node
#   GPU               what the plan measures memory against: h100 (the default), h200, a100 or a file
#   CODE, PYTHON      the checkout (or snapshot) to run, and the interpreter with its requirements
#   CONTAINER         optional: an image for srun's --container-image, or a .sif file for apptainer
#   RESTARTS          how often crashed or hung ranks start again inside the job (3); a new checkpoint resets the count
#   PREFLIGHT         all (the default), or nodes: do not check all ranks together
#   PREFLIGHT_SECONDS time limit of each of the two checks (300)
#   DOCTOR_OPTIONS    more options of `blackmamba doctor`, such as --threshold disk=20
#   EVALUATE_JOB      optional: a job script that scores the checkpoint it is given; KEEP_EVERY says which to score
#   WHEN_TIME_IS_UP   requeue: the job goes back into the queue by itself; exit: the next job of a chain continues
#
# A job decides by files in the run folder, since launchers change exit codes: `done` is there when the run is
# complete, `requeue` when training stopped on request after saving, and `checkpoints/latest` tells whether it got on.
# Only after a failure it reads the exit code of the task that failed first, from srun's messages. It leaves `failed` for
# `blackmamba runs` if it ends and only a person can continue.

BLACKMAMBA=("$PYTHON" -m megatron_blackmamba)
RESTART=${SLURM_RESTART_COUNT:-0}
RESTARTS=${RESTARTS:-3}
STUCK_SECONDS=${STUCK_SECONDS:-90} # longer than KillWait of Slurm, which is 30 by default
PREFLIGHT_SECONDS=${PREFLIGHT_SECONDS:-300}
TRY=1
LOGS=$RUN_FOLDER/logs/$SLURM_JOB_ID

say() { echo "$(date '+%F %T') $*"; }

# A YAML string, also where the text looks like a number or holds a #.
string() { local quote="'" && echo "'${1//$quote/$quote$quote}'"; }

newest_checkpoint() { cat "$RUN_FOLDER/checkpoints/latest" 2>/dev/null; }

# Notes a start that brought no new checkpoint; the fifth in a row ends the job.
idle_start() {
    touch "$LOGS/idle_start-$RESTART" # an empty file can be made on a full disk too
    [ "$(find "$LOGS" -maxdepth 1 -name 'idle_start-*' | wc -l)" -lt 5 ] && return
    say "five starts in a row without a new checkpoint: giving up. If there was no time for one: a larger --time, or a"
    say "smaller --warn of blackmamba launch (--signal of sbatch)"
    exit 1
}

refuse() { say "refused: $*" && exit 2; }

# In bash a word counts as 0 and a negative number of restarts never ends.
refuse_odd_settings() {
    local name
    for name in RESTARTS STUCK_SECONDS PREFLIGHT_SECONDS GPUS_PER_NODE KEEP_EVERY; do
        [[ ${!name:-0} =~ ^[0-9]{1,6}$ ]] || refuse "$name=${!name} is not a whole number from 0 on"
    done
    [ "$PREFLIGHT_SECONDS" -ge 10 ] || refuse "PREFLIGHT_SECONDS=$PREFLIGHT_SECONDS is less than 10"
    [[ $WHEN_TIME_IS_UP =~ ^(requeue|exit)$ ]] || refuse "WHEN_TIME_IS_UP=$WHEN_TIME_IS_UP is neither requeue nor exit"
    [[ ${PREFLIGHT:-all} =~ ^(all|nodes)$ ]] || refuse "PREFLIGHT=$PREFLIGHT is neither all nor nodes"
}

# Two jobs in one folder would overwrite each other's checkpoints.
refuse_second_job() {
    local first
    first=$(cat "$RUN_FOLDER/logs/running_job" 2>/dev/null) || true
    if [ "${first:-$SLURM_JOB_ID}" != "$SLURM_JOB_ID" ] &&
        [ -n "$(squeue --noheader --jobs="$first" --states=RUNNING,SUSPENDED 2>/dev/null)" ]; then
        refuse "job $first trains in $RUN_FOLDER. Wait for it (sbatch --dependency=afterany:$first) or set RUN_FOLDER."
    fi
    mkdir -p "$LOGS"
    echo "$SLURM_JOB_ID" >"$RUN_FOLDER/logs/running_job"
}

# Without Slurm's programs nothing can start from this node. If scontrol is here, only part of them is missing: the node
# is broken, and others may not be.
refuse_missing_programs() {
    local program missing=()
    for program in scontrol srun squeue scancel; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    [ ${#missing[@]} -eq 0 ] && return
    say "not found on $(hostname): ${missing[*]}. Nothing was started. PATH is $PATH"
    command -v scontrol >/dev/null || exit 1
    idle_start
    requeue "${SLURMD_NODENAME:-}"
}

# Another port for every step: another job may have the last one, or a rank of the last try.
new_port() { export MASTER_PORT=$((20000 + RANDOM % 10000)); }

prepare() {
    local threads=1
    [ "$GPUS_PER_NODE" != 0 ] || threads=${SLURM_CPUS_PER_TASK:-1} # CPUs compute, instead of feeding GPUs
    NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=$(head -n 1 <<<"$NODES")
    export MASTER_ADDR
    new_port
    export PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
    export SLURM_EXPORT_ENV=ALL # sbatch --export=NONE is of this script; what it sets must reach the ranks
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # since Slurm 22.05 srun does not ask the job
    source "$CODE/scripts/slurm/nccl.env"

    LAUNCHER=()
    SRUN_CONTAINER=()
    case ${CONTAINER:-} in
        "") ;;
        *.sif) LAUNCHER=(apptainer exec --nv --bind "$CODE,$RUN_FOLDER${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" "$CONTAINER") ;;
        *) SRUN_CONTAINER=(--container-image="$CONTAINER" --container-workdir="$PWD"
            --container-mounts="$CODE:$CODE,$RUN_FOLDER:$RUN_FOLDER${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}") ;;
    esac
}

# A run that cannot work is refused before a GPU-hour is spent: batch divisible, memory enough, layout sound. It is the
# plan that refuses only if it says so itself, on two nodes where there are two. Fails if no plan could be made: Python or
# a disk is missing on a node, or srun cannot start anything. The preflight finds out which.
check_plan() {
    local tasks=$((SLURM_NTASKS / SLURM_NNODES)) node answer="" answers=$LOGS/plan
    [ -e "$answers/works" ] && return
    mkdir -p "$answers"
    say "checking the plan on $SLURM_NNODES nodes of $tasks processes"
    for node in $(sed -n '1p;$p' <<<"$NODES" | uniq); do
        rm -f "$answers/$node"
        srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" "${SRUN_CONTAINER[@]}" \
            bash -c '"${@:2}"; echo $? >"$1"' bash "$answers/$node" "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" \
            plan "${CONFIG[@]}" --nodes "$SLURM_NNODES" --gpus-per-node "$tasks" --gpu "${GPU:-h100}" --check
        answer=$(cat "$answers/$node" 2>/dev/null)
        [ "$answer" != 0 ] || { touch "$answers/works"; return; }
        [ "$answer" = 2 ] || break
    done
    [ "$answer" != 2 ] || { say "the plan says this cannot work: nothing was started"; exit 2; }
    say "the plan could not be checked on $node (${answer:+exit code }${answer:-srun started nothing there})"
    return 1
}

# Every node checks itself, then all ranks are checked together (PREFLIGHT=nodes omits that). Sets UNFIT to the nodes
# that fail.
preflight() {
    local reports=$LOGS/preflight-$RESTART node
    mkdir -p "$reports"
    say "preflight of $SLURM_NNODES nodes, reports in $reports"
    srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --output="${reports//%/%%}/%N.txt" "${SRUN_CONTAINER[@]}" \
        bash -c 'timeout "$2" "${@:3}" && touch "$1/$SLURMD_NODENAME.fit"
            [ $? -ne 124 ] || echo "no answer within $2 s; PREFLIGHT_SECONDS sets this limit"' \
        bash "$reports" "$PREFLIGHT_SECONDS" "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" \
        doctor --quick --folder "$RUN_FOLDER" --gpus "$GPUS_PER_NODE" ${DOCTOR_OPTIONS:-}
    UNFIT=()
    for node in $NODES; do [ -e "$reports/$node.fit" ] || UNFIT+=("$node"); done
    if [ ${#UNFIT[@]} -ne 0 ]; then
        for node in "${UNFIT[@]}"; do say "unfit: $node" && tail -n 20 "$reports/$node.txt"; done
        return 1
    fi
    [ "${PREFLIGHT:-all}" = nodes ] || preflight_together "$reports"
}

# All ranks of the job, as in training. The file `unfit` appears with the verdict. Without one, the head node is at fault
# if other ranks got as far as saying so.
preflight_together() {
    local reports=$1
    say "preflight of $SLURM_NTASKS ranks together"
    rm -f "$reports/unfit"
    srun --kill-on-bad-exit=0 --output="${reports//%/%%}/rank-%t.txt" "${SRUN_CONTAINER[@]}" \
        bash -c 'exec timeout --kill-after=10 "$@"' bash "$PREFLIGHT_SECONDS" "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" \
        doctor "${CONFIG[@]}" --all-ranks --limit $((PREFLIGHT_SECONDS * 4 / 5)) \
        --folder "$RUN_FOLDER" --unfit "$reports/unfit" ${DOCTOR_OPTIONS:-}
    cat "$reports/rank-0.txt"
    if [ -e "$reports/unfit" ]; then
        mapfile -t UNFIT <"$reports/unfit"
        [ ${#UNFIT[@]} -eq 0 ] || return 1
        grep -q '^problem: ' "$reports/rank-0.txt" || return 0
        say "the ranks cannot train together, and no single node is the cause. Nothing is excluded."
        [ "$RESTART" -gt 0 ] || [ "$TRY" -gt 1 ] || exit 1 # a wrong setting stays wrong; later it may be what passes
        idle_start
        requeue
    fi
    say "no verdict within $PREFLIGHT_SECONDS s; PREFLIGHT_SECONDS sets this limit. What the ranks said:"
    tail -n 3 "$reports"/rank-*.txt
    UNFIT=()
    if grep -q '^rank [0-9]* on ' "$reports"/rank-*.txt; then
        UNFIT=("$MASTER_ADDR")
    else
        say "no rank got as far as the check: does Python start that slowly here?"
    fi
    return 1
}

# Back into the queue. Slurm ends this script for it; TERM is ignored so that the sentence can be finished, and the job
# cannot start again before this process is gone.
requeue() {
    local exclude=${1:-} already
    trap '' TERM
    say "requeueing job $SLURM_JOB_ID${exclude:+ without $exclude}"
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    if [ -n "$exclude" ]; then
        already=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
        [ "$already" = "(null)" ] && already=""
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$exclude${already:+,$already}"
    fi
    exit 0
}

leave_out_unfit() {
    if [ ${#UNFIT[@]} -eq "$SLURM_NNODES" ] && [ "$SLURM_NNODES" -gt 1 ]; then
        mapfile -t UNFIT < <(unreachable_nodes) # one dead node keeps srun from starting the preflight on the others
    fi
    if [ ${#UNFIT[@]} -eq 0 ] && [ "$RESTART" -eq 0 ] && [ "$TRY" -eq 1 ]; then
        say "every node failed: it is not the nodes. Nothing is excluded."
        exit 1
    fi
    idle_start
    requeue "$(IFS=, && echo "${UNFIT[*]}")"
}

# Nodes of the job on which srun can start nothing. If those are all of several, this node too, it is not the nodes.
unreachable_nodes() {
    local node found
    found=$(
        for node in $NODES; do
            timeout --signal=KILL 60 srun --overlap --mem=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" \
                true >/dev/null 2>&1 || echo "$node" &
        done
        wait
    )
    [ -z "$found" ] || { [ "$SLURM_NNODES" -gt 1 ] && [ "$(wc -l <<<"$found")" -eq "$SLURM_NNODES" ]; } || echo "$found"
}

# Task and message of the rank that failed first, as "1 Exited with exit code 2" or "0 Killed". The exit code of srun
# itself is another one: it comes from the ranks that srun ended.
first_failure() { sed -n -E 's/^srun: error: [^:]+: tasks? ([0-9]+)[^:]*: (.*)$/\1 \2/p' "$SRUN_LOG" | head -n 1; }

# srun waits for ever for tasks of a node whose slurmd or slurmstepd is gone: once a task has failed, srun has
# STUCK_SECONDS to end.
end_when_stuck() {
    local waited=0
    while sleep 5; do
        [ -z "$(first_failure)" ] || waited=$((waited + 5))
        [ "$waited" -lt "$STUCK_SECONDS" ] || { kill -KILL "$1"; return; }
    done
}

# Fails where Slurm does not answer: what runs is unknown then.
running_steps() {
    local lines
    lines=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i) || return
    grep -E "^ *$SLURM_JOB_ID\.[0-9]+$" <<<"$lines" || true
}

# Ends what a failed try left running: two tries must not write into one folder. Fails, with UNFIT set to the nodes that
# do not answer, where that cannot be done.
end_steps() {
    local end=$((SECONDS + STUCK_SECONDS)) steps
    while ! steps=$(running_steps) || [ -n "$steps" ]; do
        # shellcheck disable=SC2086 # one word a step
        [ -z "$steps" ] || scancel --signal=KILL $steps 2>/dev/null
        if [ "$SECONDS" -ge "$end" ]; then
            mapfile -t UNFIT < <(unreachable_nodes)
            return 1
        fi
        sleep 1
    done
}

# One process a GPU. TIME_IS_UP turns 1 when Slurm warns (--signal=B:USR1@...); the warning is passed on again and
# again until the step ends, since a process that is still importing ignores it. srun's messages are shown only if
# training fails: on a normal stop it calls exit code 75 an error.
train() {
    new_port
    SRUN_LOG=$LOGS/srun-$RESTART-$TRY.txt
    touch "$LOGS/try"
    say "training on $SLURM_NNODES nodes, $SLURM_NTASKS processes, head $MASTER_ADDR:$MASTER_PORT, try $TRY"
    say "follow it with: tail -f $LOGS/rank-0.log"
    (
        trap '' USR1
        exec srun --kill-on-bad-exit=1 --open-mode=append --output="${LOGS//%/%%}/rank-%t.log" "${SRUN_CONTAINER[@]}" \
            bash -c 'trap "" USR1; echo "$1"; exec "${@:2}"' bash "== job $SLURM_JOB_ID, start $((RESTART + 1)), try $TRY" \
            "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" train "${CONFIG[@]}" \
            folder="$(string "$(dirname "$RUN_FOLDER")")" name="$(string "$(basename "$RUN_FOLDER")")"
    ) 2>"$SRUN_LOG" &
    local step=$! watcher
    end_when_stuck "$step" &
    watcher=$!
    [ "$TIME_IS_UP" -eq 1 ] || wait "$step" # a signal before the wait would not end it
    STATUS=$?
    if [ "$TIME_IS_UP" -eq 1 ]; then # the signal ended the wait, not the step
        sleep 1 # a step that just begins does not ignore it yet, and would be killed
        while kill -USR1 "$step" 2>/dev/null; do
            for _ in 1 2 3 4 5; do
                sleep 1
                kill -0 "$step" 2>/dev/null || break
            done
        done
        wait "$step"
        STATUS=$?
    fi
    kill "$watcher" 2>/dev/null
}

# Shows why training failed: srun's messages and the end of the log of the rank that failed first. Sets STATUS to that
# rank's exit code where srun told it.
report_failure() {
    local rank words
    NO_MEMORY=0
    read -r rank words < <(first_failure)
    if [ -z "$rank" ]; then
        say "training failed: srun ended with code $STATUS and named no rank. Its messages, and the end of rank 0's log:"
        rank=0
    else
        say "training failed: rank $rank was the first ($words). srun's messages, and the end of that rank's log:"
        case $words in
            "Exited with exit code "*) STATUS=${words##* } ;;
            "Out Of Memory"*) NO_MEMORY=1 ;;
        esac
    fi
    tail -n 20 "$SRUN_LOG"
    tail -n 20 "$LOGS/rank-$rank.log"
    say "the logs of all ranks are in $LOGS"
}

# Another try would end the same way: refused (2), or gave up on bad steps (65).
final() { case $STATUS in 0 | 2 | 65 | 130) true ;; *) false ;; esac; }

# The run has saved on request in this try. The marker of an earlier job stays if this one is refused.
stopped_on_request() { [ -e "$RUN_FOLDER/requeue" ] && [ ! "$RUN_FOLDER/requeue" -ot "$LOGS/try" ]; }

saved_since() { [ "$(newest_checkpoint)" != "$1" ]; }

# Trains until the run is complete, stops on request, or cannot start again on these nodes.
train_with_restarts() {
    local left=$RESTARTS before
    UNFIT=()
    while [ "$TIME_IS_UP" -eq 0 ]; do
        before=$(newest_checkpoint)
        train
        if [ -e "$RUN_FOLDER/done" ] || stopped_on_request || [ "$STATUS" -eq 0 ]; then return; fi
        report_failure
        final && return
        if saved_since "$before"; then
            left=$RESTARTS
            rm -f "$LOGS"/idle_start-*
        elif [ "$NO_MEMORY" -eq 1 ]; then
            say "a node has too little memory, and another try needs as much: use fewer processes on it, a smaller"
            say "training.micro_batch or training.recompute=layers"
            STATUS=2
            return
        fi
        end_steps || { say "steps do not end, or squeue does not answer; unreachable nodes: ${UNFIT[*]:-none}"; return; }
        [ "$TIME_IS_UP" -eq 0 ] || break
        if [ "$left" -eq 0 ]; then
            say "$((RESTARTS + 1)) tries without a new checkpoint"
            return
        fi
        left=$((left - 1))
        TRY=$((TRY + 1))
        if ! saved_since "$before"; then # the first failure after a checkpoint is answered at once, others with a check
            rm -f "$LOGS/preflight-$RESTART/"*.fit
            new_port
            preflight || leave_out_unfit
        fi
        say "starting again from $(newest_checkpoint || echo the beginning); restarts left without a new checkpoint: $left"
    done
    touch "$RUN_FOLDER/requeue" # the time is up between two tries; the newest checkpoint is what there is
}

# Submits a scoring job for each complete checkpoint that the run keeps for ever, and for the last one of a finished run.
submit_evaluations() {
    local folder name step last
    last=$([ -e "$RUN_FOLDER/done" ] && newest_checkpoint)
    for folder in "$RUN_FOLDER"/checkpoints/step_*; do
        name=${folder##*/}
        [[ $name =~ ^step_([0-9]+)$ ]] || continue # step_N.damaged is no checkpoint
        step=$((10#${BASH_REMATCH[1]}))
        [ -e "$folder/manifest.json" ] || continue
        [ "$name" = "$last" ] || { [ "$KEEP_EVERY" -gt 0 ] && [ $((step % KEEP_EVERY)) -eq 0 ]; } || continue
        [ -e "$RUN_FOLDER/evaluations/$name.job" ] && continue
        mkdir -p "$RUN_FOLDER/evaluations"
        # a job of its own, not of this job's size; a failure is tried again with the next look
        if (
            for inherited in "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"; do
                [ "$inherited" = SLURM_CONF ] || unset "$inherited"
            done
            sbatch --parsable "$EVALUATE_JOB" "$folder"
        ) >"$RUN_FOLDER/evaluations/.$name.job"; then
            mv "$RUN_FOLDER/evaluations/.$name.job" "$RUN_FOLDER/evaluations/$name.job"
            say "job $(cat "$RUN_FOLDER/evaluations/$name.job") scores $name"
        fi
    done
}

# Looks for new checkpoints beside training, which never waits for it: this shell has no such child to wait for.
watch_checkpoints() {
    [ -n "${EVALUATE_JOB:-}" ] || return 0
    WATCHER=$( (trap '' USR1; while sleep "${WATCH_SECONDS:-60}"; do submit_evaluations; done) >&2 & echo $!)
}

# Ends the watcher, and leaves `failed` unless the run says itself how it ended: complete, requeued or stopped (0), gave
# up (65), saved on request (75), cancelled (143).
at_exit() {
    local code=$?
    [ -z "${WATCHER:-}" ] || kill "$WATCHER" 2>/dev/null
    case $code in 0 | 65 | 75 | 143) return ;; esac
    echo "job $SLURM_JOB_ID ended with exit code $code" >"$RUN_FOLDER/failed"
}

# The next job of a chain: one of this name that waits in the queue.
follower() {
    squeue --noheader --user="$(id -un)" --states=PENDING --name="$SLURM_JOB_NAME" --format=%A | head -n 1
}

TIME_IS_UP=0
trap 'TIME_IS_UP=1; say "the time limit is near: asking the run to save and stop"' USR1

say "job $SLURM_JOB_ID, start $((RESTART + 1)), on $SLURM_JOB_NODELIST; run $RUN_FOLDER"
if [ -e "$RUN_FOLDER/done" ]; then
    say "the run is complete already"
    exit 0
fi
refuse_odd_settings
refuse_second_job
rm -f "$RUN_FOLDER/failed"
trap at_exit EXIT
refuse_missing_programs
prepare
check_plan
preflight || leave_out_unfit
check_plan || { say "every node passed its preflight, but the plan cannot be checked: nothing was started"; exit 1; }
SAVED_BEFORE=$(newest_checkpoint)
watch_checkpoints
train_with_restarts
if [ -n "${EVALUATE_JOB:-}" ]; then
    kill "$WATCHER" && WATCHER=""
    submit_evaluations
fi

if [ -e "$RUN_FOLDER/done" ]; then
    say "the run is complete"
    exit 0
fi
if [ "${STATUS:-1}" -eq 0 ] && ! stopped_on_request; then
    say "training ended before its last step, as training.stop_after_steps says"
    exit 0
fi
if saved_since "$SAVED_BEFORE"; then
    STOPPED="stopped with a new checkpoint, $(newest_checkpoint)"
    rm -f "$LOGS"/idle_start-*
else
    STOPPED="stopped without a new checkpoint"
fi
if ! stopped_on_request; then
    final && exit "$STATUS"
    STOPPED="failed; $STOPPED"
fi
saved_since "$SAVED_BEFORE" || idle_start
if [ "$WHEN_TIME_IS_UP" = requeue ]; then
    say "$STOPPED"
    requeue "$(IFS=, && echo "${UNFIT[*]}")"
fi
stopped_on_request || exit "$STATUS"
NEXT=$(follower)
if [ -n "$NEXT" ]; then
    say "$STOPPED; job $NEXT continues the run"
    exit 0
fi
say "$STOPPED; no further job of this run is queued: launch it again to continue"
exit 75
