"""Train three steps and print what a whole run needs: python -m tools.plan [settings of train.py].

Under a launcher all its processes train them. Nothing is written but a temporary directory, which is removed.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.plan")

from statistics import median

from accelerate import Accelerator
from accelerate.utils import gather_object

import train
from data.sampler import BatchSizes
from model.gpt import build_on_meta_device
from runtime.config.schema import TrainConfig
from runtime.distributed.collectives import broadcast_from_main
from runtime.distributed.launch import join_launch, num_shards
from runtime.distributed.launch_checks import check_launch
from trainer.checkpoint.manifest import checkpoints_in
from trainer.nested import nested_training, shared_temporary_folder
from trainer.run.metrics_log import read_rows
from trainer.run.resolve import resolve
from trainer.run.summary import format_batch, format_tokens
from trainer.throughput import peak_memory_bytes

STEPS = 3


def main(config: TrainConfig) -> None:
    """Print the size of the run, then what three steps of it took; called by all processes together.

    Raises:
        ConfigError: a setting does not fit the launch or the data, as in train.py.
        RunError: a step fails as in train.py; running out of memory has the message of train.py, too.
        Preempted: a stop signal was received.
    """
    check_launch(config)
    config, _, _ = resolve(config)
    accelerator = Accelerator(**join_launch(config))
    processes = accelerator.num_processes
    network = build_on_meta_device(config.model)
    sizes = {name: sum(weight.numel() for weight in part.parameters()) for name, part in network.named_children()}
    batch_sizes, flops = BatchSizes.from_config(config), network.flops_per_token(config.seq_len)
    step_tokens = batch_sizes.global_batch_size * config.seq_len
    tokens = batch_sizes.tokens_before(config.steps, config.seq_len)
    plan = {"parameters": f"{network.num_parameters():,}"}
    plan |= {f"  {name}": f"{count:,}" for name, count in sizes.items() if count}
    accumulation = format_batch(config, config.micro_batch_size * processes)
    plan |= {
        "processes": f"{processes} on {accelerator.device.type}, {num_shards(accelerator)} per replica; {accumulation} "
        f"micro-batch(es) of {config.micro_batch_size} per step",
        "tokens": format_tokens(config, tokens),
        "FLOPs": f"{flops:,} per token, {flops * step_tokens:.3g} per step, {flops * tokens:.3g} in total",
    }
    accelerator.print("\n".join(f"{name:<24}{text}" for name, text in plan.items()), flush=True)
    speed, memory, checkpoint = measure(config, accelerator)
    plan = {
        "peak memory": f"{memory / 1e6:,.1f} MB, of the largest process",
        "checkpoint": f"{checkpoint / 1e6:,.1f} MB, the newest {config.checkpoint.keep} and the best are kept",
        "time": f"{step_tokens / speed:.3g} s per step, {speed:,.0f} tokens/s, "
        f"{tokens / speed / 3600:,.2f} hours without evaluations",
    }
    accelerator.print("\n".join(f"{name:<24}{text}" for name, text in plan.items()))


def measure(config: TrainConfig, accelerator: Accelerator) -> tuple[float, int, int]:
    """Train STEPS steps of the run and save them, after an evaluation of one batch if the run evaluates.

    Returns:
        The median number of tokens per second, the peak memory of the largest process in bytes (on a GPU its tensors,
        on a CPU all of the process), and the bytes of a checkpoint.
    """
    evaluated = config.evaluation.micro_batch_size * accelerator.num_processes
    with shared_temporary_folder("plan-") as folder:
        changes = {
            "out_dir": str(folder),
            "stop_after": STEPS,
            "branch_from": None,
            "init_from": None,
            "profile": None,
            "schedule.batch_warmup_from": None,
            "schedule.batch_warmup_steps": None,
            "tracking.tracker": "wandb",
            "tracking.wandb": "disabled",
            "tracking.log_every": 1,
            "evaluation.num_samples": min(evaluated, config.evaluation.num_samples or evaluated),
            "evaluation.num_scored_generations": 0,
        }
        with nested_training():
            train.main(config.replace(**changes))
        run, measured = folder / config.run_name, None
        if accelerator.is_main_process:
            speeds = [row.get("perf/tokens_per_second") for row in read_rows(run / "metrics.jsonl")]
            files = checkpoints_in(run / "checkpoints")[0].iterdir()
            measured = median(filter(None, speeds)), sum(file.stat().st_size for file in files)
        speed, checkpoint = broadcast_from_main(measured)
    return speed, max(gather_object([peak_memory_bytes()])), checkpoint
