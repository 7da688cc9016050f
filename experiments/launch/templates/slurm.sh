trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
attempts=0

bad_nodes() {
    for file in {{ bad-node- }}*; do [ ! -e "$file" ] || echo "${file##*/bad-node-}"; done
}

# The first nodes of the job that are up and not bad, as many as an attempt needs, a comma between them.
good_nodes() {
    down=$(sinfo --noheader --Node --states=down,drain,fail --format=%N 2>/dev/null)
    scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$(bad_nodes; echo "$down"; echo)" |
        head -n {{ nodes }} | paste -sd ,
}

# One step on every rank; waits for it.
step() {
    if [ "$stopped" -eq 1 ]; then return 7; fi
    {{ launcher }} "$@" &
    ended "$!"
}

while :; do
    nodes=$(good_nodes)
    MASTER_ADDR=${nodes%%,*}
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + attempts) % 10000))
    export MASTER_ADDR MASTER_PORT
    step {{ train }}
    code=$?
    leave_if_over "$code"
    attempts=$((attempts + 1))
    before=$(checkpoints)
    if [ "$stopped" -eq 1 ] || [ "$(good_nodes | tr , '\n' | grep -c .)" -lt {{ nodes }} ]; then break; fi
done
# Slurm ends this script while it queues the job again, so what follows ignores its signal.
trap '' TERM
bad=$(bad_nodes | paste -sd ,)
scontrol requeue "$SLURM_JOB_ID"
[ -z "$bad" ] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad"
exit "$code"
