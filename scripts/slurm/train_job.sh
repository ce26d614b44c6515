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
#   WHEN_TIME_IS_UP   requeue: the job goes back into the queue by itself; exit: the next job of a chain continues
#
# A job decides by files in the run folder, since launchers change exit codes: `done` is there when the run is
# complete, `requeue` when training stopped on request after saving, and `checkpoints/latest` tells whether it got on.

BLACKMAMBA=("$PYTHON" -m megatron_blackmamba)
RESTART=${SLURM_RESTART_COUNT:-0}
LOGS=$RUN_FOLDER/logs/$SLURM_JOB_ID
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")

say() { echo "$(date '+%F %T') $*"; }

# A YAML string, also where the text looks like a number or holds a #.
string() { local quote="'" && echo "'${1//$quote/$quote$quote}'"; }

newest_checkpoint() { cat "$RUN_FOLDER/checkpoints/latest" 2>/dev/null; }

# Notes a start that brought no new checkpoint; the fifth in a row ends the job.
idle_start() {
    echo "start $((RESTART + 1)) on $SLURM_JOB_NODELIST" >>"$LOGS/idle_starts"
    [ "$(wc -l <"$LOGS/idle_starts")" -lt 5 ] && return
    say "five starts in a row without a new checkpoint: giving up. If there was no time for one: a larger --time, or a"
    say "smaller --warn of blackmamba launch (--signal of sbatch)"
    exit 1
}

prepare() {
    mkdir -p "$LOGS"
    rm -f "$RUN_FOLDER/requeue"
    MASTER_ADDR=$(head -n 1 <<<"$NODES")
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
    export MASTER_ADDR MASTER_PORT
    export PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
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

# A run that cannot work is refused before a GPU-hour is spent: batch divisible, memory enough, layout sound.
check_plan() {
    local tasks=$((SLURM_NTASKS / SLURM_NNODES))
    say "checking the plan on $SLURM_NNODES nodes of $tasks processes"
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 "${SRUN_CONTAINER[@]}" "${LAUNCHER[@]}" \
        "${BLACKMAMBA[@]}" plan "${CONFIG[@]}" --nodes "$SLURM_NNODES" --gpus-per-node "$tasks" --gpu "${GPU:-h100}" --check
}

# Every node checks itself, then all ranks are checked together (PREFLIGHT=nodes omits that). Sets UNFIT to the nodes
# that fail. DOCTOR_OPTIONS holds more options of `blackmamba doctor`, such as --threshold disk=20.
preflight() {
    local reports=$LOGS/preflight-$RESTART node
    mkdir -p "$reports"
    say "preflight of $SLURM_NNODES nodes, reports in $reports"
    srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --output="${reports//%/%%}/%N.txt" "${SRUN_CONTAINER[@]}" \
        bash -c 'timeout 300 "${@:2}" && touch "$1/$SLURMD_NODENAME.fit"' bash "$reports" "${LAUNCHER[@]}" \
        "${BLACKMAMBA[@]}" doctor --quick --folder "$RUN_FOLDER" --gpus "$GPUS_PER_NODE" ${DOCTOR_OPTIONS:-}
    UNFIT=()
    for node in $NODES; do [ -e "$reports/$node.fit" ] || UNFIT+=("$node"); done
    if [ ${#UNFIT[@]} -ne 0 ]; then
        for node in "${UNFIT[@]}"; do say "unfit: $node" && tail -n 20 "$reports/$node.txt"; done
        return 1
    fi
    [ "${PREFLIGHT:-all}" = nodes ] || preflight_together "$reports"
}

# All ranks of the job, as in training. The file `unfit` appears with the verdict; without one, the head node is at fault.
preflight_together() {
    local reports=$1
    say "preflight of $SLURM_NTASKS ranks together"
    rm -f "$reports/unfit"
    srun --kill-on-bad-exit=0 --output="${reports//%/%%}/rank-%t.txt" "${SRUN_CONTAINER[@]}" \
        bash -c 'exec timeout --kill-after=10 300 "$@"' bash "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" doctor "${CONFIG[@]}" \
        --all-ranks --folder "$RUN_FOLDER" --unfit "$reports/unfit" ${DOCTOR_OPTIONS:-}
    cat "$reports/rank-0.txt"
    if [ -e "$reports/unfit" ]; then
        mapfile -t UNFIT <"$reports/unfit"
        [ ${#UNFIT[@]} -eq 0 ] || return 1
        grep -q '^problem: ' "$reports/rank-0.txt" || return 0
        say "the ranks cannot train together, and no single node is the cause. Nothing is excluded."
        exit 1
    fi
    say "no verdict within 300 s. What the other ranks said:"
    tail -n 3 "$reports"/rank-*.txt
    UNFIT=("$MASTER_ADDR")
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
        say "every node failed: it is not the nodes. Nothing is excluded."
        exit 1
    fi
    idle_start
    requeue "$(IFS=, && echo "${UNFIT[*]}")"
}

# One process a GPU. TIME_IS_UP turns 1 when Slurm warns (--signal=B:USR1@...); the warning is passed on again and
# again until the step ends, since a process that is still importing ignores it.
train() {
    say "training on $SLURM_NNODES nodes, $SLURM_NTASKS processes, head $MASTER_ADDR:$MASTER_PORT"
    say "follow it with: tail -f $LOGS/rank-0.log"
    (
        trap '' USR1
        exec srun --kill-on-bad-exit=1 --open-mode=append --output="${LOGS//%/%%}/rank-%t.log" "${SRUN_CONTAINER[@]}" \
            bash -c 'trap "" USR1; exec "$@"' bash "${LAUNCHER[@]}" "${BLACKMAMBA[@]}" train "${CONFIG[@]}" \
            folder="$(string "$(dirname "$RUN_FOLDER")")" name="$(string "$(basename "$RUN_FOLDER")")"
    ) &
    local step=$!
    wait "$step"
    STATUS=$?
    if [ "$TIME_IS_UP" -eq 1 ]; then # the signal ended the wait, not the step
        while kill -0 "$step" 2>/dev/null; do
            kill -USR1 "$step"
            sleep 5
        done
        wait "$step"
        STATUS=$?
    fi
}

TIME_IS_UP=0
trap 'TIME_IS_UP=1; say "the time limit is near: asking the run to save and stop"' USR1

say "job $SLURM_JOB_ID, start $((RESTART + 1)), on $SLURM_JOB_NODELIST; run $RUN_FOLDER"
if [ -e "$RUN_FOLDER/done" ]; then
    say "the run is complete already"
    exit 0
fi
prepare
if [ "$RESTART" -eq 0 ]; then
    check_plan || { say "the plan says this cannot work: nothing was started"; exit 2; }
fi
preflight || leave_out_unfit
SAVED_BEFORE=$(newest_checkpoint)
if [ "$TIME_IS_UP" -eq 1 ]; then # before anything began
    touch "$RUN_FOLDER/requeue"
else
    train
fi

if [ -e "$RUN_FOLDER/done" ]; then
    say "the run is complete"
    exit 0
fi
if [ "${STATUS:-1}" -eq 0 ] && [ ! -e "$RUN_FOLDER/requeue" ]; then
    say "training ended before its last step, as training.stop_after_steps says"
    exit 0
fi
if [ "$(newest_checkpoint)" = "$SAVED_BEFORE" ]; then SAVED=0; else SAVED=1; fi
[ "$SAVED" -eq 1 ] && rm -f "$LOGS/idle_starts"
if [ -e "$RUN_FOLDER/requeue" ]; then
    [ "$SAVED" -eq 1 ] || idle_start
    [ "$WHEN_TIME_IS_UP" = requeue ] && requeue
    say "saved; the next job of the chain continues"
    exit 75
fi
say "training failed with exit code $STATUS; the last words of each rank are in $LOGS. Of rank 0:"
tail -n 20 "$LOGS/rank-0.log"
if [ "$SAVED" -eq 1 ] && [ "$WHEN_TIME_IS_UP" = requeue ]; then
    say "it had saved since it started: once more from there, after a new preflight"
    requeue
fi
exit "$STATUS"
