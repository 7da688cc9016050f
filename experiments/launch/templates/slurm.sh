MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# One step on every rank; waits for it, and leaves if it failed for good.
step() {
    if [ "$stopped" -eq 1 ]; then code=7; else
        {{ launcher }} "$@" &
        ended "$!"
        code=$?
    fi
    if [ "$code" -eq 0 ]; then return; fi
    leave_if_over "$code"
    # Slurm ends this script while it queues the job again, so what follows ignores its signal.
    trap '' TERM
    bad=$(for file in {{ bad-node- }}*; do [ ! -e "$file" ] || echo "${file##*/bad-node-}"; done | paste -sd ,)
    scontrol requeue "$SLURM_JOB_ID"
    [ -z "$bad" ] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad"
    exit "$code"
}

step {{ preflight }}
step {{ train }}
rm -f "$idle"
