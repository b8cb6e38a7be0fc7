#!/bin/bash
# Trains under Slurm, on any number of nodes whose processes can share the global batch:
# RUN=runs/random_tokens sbatch --nodes=2 accelerate_configs/slurm.sh --config configs/random_tokens.yaml
# Slurm signals the launchers some time before the time limit; the run saves, and this script requeues the job. It reads
# the run's status.json, because launchers exit with 1 whatever the processes return, and only if this attempt wrote it:
# an attempt that was refused leaves the status of an earlier one.
#SBATCH --job-name=mini-gpt
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --open-mode=append
#SBATCH --requeue

RUN=${RUN:-runs/stories}               # run directory of these arguments: out_dir/name
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-1} # one process each
RESTARTS=${RESTARTS:-3}                # restarts of all processes within the job, after a crash

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# torch's launcher forwards only these signals. torch 2.11 and later reads the first variable, earlier ones the second.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCHELASTIC_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE
# Seconds that it then waits for the last step and the checkpoint before it kills the processes; by default 30.
export PET_SHUTDOWN_TIMEOUT=150

# srun of Slurm 22.05 and later does not inherit sbatch's --cpus-per-task.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

status_written() { stat -c %y "$RUN/status.json" 2>/dev/null; }
before=$(status_written)

srun bash -c 'exec accelerate launch --config_file accelerate_configs/multi_node.yaml \
    --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * '"$GPUS_PER_NODE"')) --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --max_restarts '"$RESTARTS"' \
    train.py "$@"' bash "$@"

if [ "$(status_written)" = "$before" ]; then
    echo "No process wrote $RUN/status.json. Either train.py refused to start (its message is above)," \
        "or RUN is not out_dir/name of the run; then set RUN and submit the job again" >&2
    exit 1
fi
case $(grep -o '"state": "[a-z]*"' "$RUN/status.json") in
    *finished*) exit 0 ;;
    *preempted*) exec scontrol requeue "$SLURM_JOB_ID" ;;
    *) echo "$RUN did not finish: see $RUN/status.json" >&2; exit 1 ;;
esac
