set -u
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 MLM_JOIN_SECONDS={{ join_seconds }}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Where NCCL writes the last collectives of each rank when one does not end; the name depends on torch's version.
export TORCH_FR_DUMP_TEMP_FILE={{ flight- }} TORCH_NCCL_DEBUG_INFO_TEMP_FILE={{ flight- }}
cd {{ here }} || exit 2
failed={{ failed }}  # exit code and cause of a rank for which trying again is no use
last={{ last-failure }}  # those of the last rank that may be tried again
idle={{ idle }}-${NODE_RANK:-0}  # the last iteration of each attempt in a row that made no checkpoint
stopped=0

checkpoints() {
    ls -d {{ run }}-????????/checkpoints/iter_*/COMPLETE {{ run }}-????????/COMPLETE 2>/dev/null
}

# The newest iteration in the run's metrics.
reached() {
    tail -q -n 2 {{ run }}-????????/metrics.jsonl 2>/dev/null | grep -o '"iteration": *[0-9]*' | tail -n 1
}

# The exit code of process $1, however many signals come while it is waited for.
ended() {
    wait "$1"
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}

# Leaves with the attempt's exit code $1 unless another attempt is of use: one that ends where the others did is not.
leave_if_over() {
    if [ "$1" -eq 0 ]; then rm -f "$idle"; exit 0; fi
    if [ -s "$failed" ]; then
        echo "error: not tried again: $(sed -n 2p "$failed")" >&2
        exit "$(head -n 1 "$failed")"
    fi
    if [ "$stopped" -eq 1 ] || [ "$(checkpoints)" != "$before" ]; then rm -f "$idle"; return; fi
    echo "at $(reached)" >>"$idle"
    same=$(grep -cxF "$(tail -n 1 "$idle")" "$idle") count=$(grep -c . "$idle")
    if [ "$same" -ge {{ most }} ] || [ "$count" -ge {{ bound }} ]; then
        cause=$(sed -n 2p "$last" 2>/dev/null)
        unknown="exit code $1, and no rank said why: it was killed, such as for its memory, or its node was lost"
        echo "error: $count attempts in a row made no checkpoint; the last failure: ${cause:-$unknown}" >&2
        rm -f "$idle"
        exit 7
    fi
    rm -f "$last"
}

rm -f "$failed" "$last"
before=$(checkpoints)
