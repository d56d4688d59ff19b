#!/usr/bin/env bash
# One run as a heterogeneous SLURM job. Component 0 is the generators, one per task; component 1 replay and the learner
# with its ranks. Submit from the folder with .venv and the model, on a file system that all nodes share:
#   sbatch launch/slurm/job.sh CONFIG... [key=value...]
# Resources of the components, separated by a colon:
#   sbatch --nodes=4 --ntasks=16 : --cpus-per-task=8 --gres=gpu:4 launch/slurm/job.sh CONFIG... [key=value...]
# scancel stops it in order. A requeued job goes on in its run folder. docs/fleets.md says the rest.
#SBATCH --job-name=asyncrl
#SBATCH --output=asyncrl-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# The generators come first: SLURM keeps a job on its remaining nodes only when its first component has several.
#SBATCH --no-kill
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks=1
set -euo pipefail
: "${SLURM_JOB_ID:?submit this script with sbatch}"
python=${PYTHON:-.venv/bin/python}
again=()
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && again=(--resume)
# In place of this shell, so that SLURM's SIGTERM reaches the launcher.
exec "$python" -m asyncrl.remote --slurm --logs "logs/slurm-$SLURM_JOB_ID" "${again[@]}" "$@"
