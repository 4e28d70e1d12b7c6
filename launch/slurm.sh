#!/usr/bin/env bash
# A training job under Slurm; the arguments are those of `dynapipe launch`, with a --run-dir that all nodes see:
#     sbatch --nodes 4 --gpus-per-node 8 --time 24:00:00 launch/slurm.sh --config mine.toml --run-dir runs/mine
# The launcher runs on the first node and starts the others by srun. Before the time limit all save, and the job is
# queued again; it goes on from there, as it does after a node was lost.
#SBATCH --job-name=dynapipe
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

[ -n "${SLURM_JOB_NODELIST:-}" ] || { echo "slurm.sh: this is no job of Slurm: start it by sbatch" >&2; exit 2; }
[ -n "$(command -v scontrol)" ] || { echo "slurm.sh: scontrol is not in PATH, which names the nodes: add Slurm's bin folder to PATH" >&2; exit 2; }

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$hosts"

dynapipe launch --hosts "$hosts" --ssh "srun --overlap --cpu-bind=none --nodes 1 --ntasks 1 --nodelist" "$@" &
launcher=$!
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -TERM "$launcher"' TERM
status=0
while kill -0 "$launcher" 2> /dev/null; do # a signal ends the wait, not the launcher
    wait "$launcher" && status=0 || status=$?
done
[ "$status" -ne 138 ] || scontrol requeue "$SLURM_JOB_ID" # 128 + SIGUSR1: saved
exit "$status"
