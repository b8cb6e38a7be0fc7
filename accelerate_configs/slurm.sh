#!/bin/bash
# Trains under Slurm, on any number of nodes whose processes can share the global batch:
# sbatch --nodes=2 accelerate_configs/slurm.sh --config configs/random_tokens.yaml
# In an array, %a in an argument stands for the task: sbatch --array=0-3 ... --name seed_%a --seed %a
# Slurm signals the launchers some time before the time limit; the run saves, and this script requeues the job. It reads
# the run's status.json, because launchers exit with 1 whatever the processes return, and only if this attempt wrote it:
# an attempt that was refused leaves the status of an earlier one. After a crash it starts the processes again.
#SBATCH --job-name=mini-gpt
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --open-mode=append
#SBATCH --requeue

RESTARTS=${RESTARTS:-3} # restarts within the job, after a crash
GPUS=${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)}
export PROCESSES=$((GPUS > 0 ? GPUS : 1)) # on each node

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# This script runs on the first node, whose port another program may use.
while (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
# torch's launcher forwards only these signals. torch 2.11 and later reads the first variable, earlier ones the second.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCHELASTIC_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE
# Seconds that it then waits for the last step and the checkpoint before it kills the processes; by default 30.
export PET_SHUTDOWN_TIMEOUT=150

# srun of Slurm 22.05 and later does not inherit sbatch's --cpus-per-task.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# All attempts of a job run the code of the first one, whatever the working tree holds by then. The copy has the commit,
# so that a run records what it trained with, and the uncommitted changes and new files.
export CODE=$PWD/runs/.code/$SLURM_JOB_ID
if [ ! -d "$CODE" ]; then
    rm -rf "$CODE.new"
    if git clone --quiet --depth 1 --no-checkout "file://$PWD" "$CODE.new" && git -C "$CODE.new" reset --quiet &&
        git ls-files -z --cached --others --exclude-standard |
        tar --create --null --files-from=- --ignore-failed-read --warning=no-failed-read | tar --extract --directory "$CODE.new"
    then
        mv "$CODE.new" "$CODE"
    else
        echo "warning: $PWD is not a git checkout: if this job is requeued, it continues with the code of that time" >&2
        CODE=$PWD
    fi
fi
remove_copy() { [ "$CODE" = "$PWD" ] || { rm -rf "$CODE"; rmdir --ignore-fail-on-non-empty "${CODE%/*}"; }; }
refuse() { remove_copy; [ -z "$1" ] || echo "$1" >&2; exit 2; }

# Set `arguments` to those of a task of an array, with config files of the copy.
set_arguments() {
    local task=$1 argument file previous=
    arguments=()
    shift
    for argument in "${@//%a/$task}"; do
        file=${argument#--config=}
        if [ "$previous" = --config ] || [ "$file" != "$argument" ]; then
            [ ! -f "$CODE/$file" ] || argument=${argument%"$file"}$CODE/$file
        fi
        arguments+=("$argument")
        previous=$argument
    done
}

# Print the directory of the run that `arguments` train. A wrong setting is printed here, before any node starts.
run_directory() {
    PYTHONSAFEPATH=1 PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} python -c 'import sys
from runtime.config.parser import ConfigError, parse_config
from trainer.run.directory import Run
try:
    print(Run.from_config(parse_config(sys.argv[2:], int(sys.argv[1]))).path)
except ConfigError as error:
    sys.exit(f"train.py: error: {error}")' $((SLURM_NNODES * PROCESSES)) "${arguments[@]}"
}
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    set_arguments $((SLURM_ARRAY_TASK_ID + 1)) "$@"
    NEXT=$(run_directory) || refuse
fi
set_arguments "${SLURM_ARRAY_TASK_ID:-%a}" "$@"
RUN=$(run_directory) || refuse
[ "$RUN" != "$NEXT" ] || refuse "All tasks of this array would train $RUN; add for example --name seed_%a --seed %a"
if [ -e "$RUN/.lock" ] && { flock --nonblock --conflict-exit-code 75 "$RUN/.lock" true; [ $? = 75 ]; }; then
    refuse "$RUN is in use: another training is running in it; choose another --name"
fi
echo "Training $RUN with the code in $CODE"

status_written() { stat -c %y "$RUN/status.json" 2>/dev/null; }
for _ in $(seq 0 "$RESTARTS"); do
    before=$(status_written)
    srun bash -c 'exec accelerate launch --config_file "$CODE/accelerate_configs/multi_node.yaml" \
        --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * PROCESSES)) --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$CODE/train.py" "$@"' bash "${arguments[@]}"
    if [ "$(status_written)" = "$before" ]; then
        echo "train.py refused to start; its message is above" >&2
        exit 1
    fi
    case $(<"$RUN/status.json") in
        *'"state": "finished"'*) remove_copy; exit 0 ;;
        *'"state": "preempted"'*) exec scontrol requeue "$SLURM_JOB_ID" ;;
        *'"kind": "config"'* | *'"kind": "non_finite"'*) break ;; # would fail again
    esac
done
echo "$RUN did not finish: see $RUN/status.json" >&2
exit 1
