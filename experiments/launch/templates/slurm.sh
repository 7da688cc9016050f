#!/bin/bash
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.ranks_per_node }}
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.ranks_per_node }}
{% endif %}
#SBATCH --time={{ job.time_limit }}
#SBATCH --signal=B:TERM@{{ job.signal_seconds }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ output }}
{% if job.partition %}
#SBATCH --partition={{ job.partition }}
{% endif %}
{% if job.account %}
#SBATCH --account={{ job.account }}
{% endif %}
{% if job.exclude %}
#SBATCH --exclude={{ job.exclude | join(",") }}
{% endif %}
{% include "attempts.sh" %}
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
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
}

step {{ preflight }}
step {{ train }}
rm -f "$idle"
