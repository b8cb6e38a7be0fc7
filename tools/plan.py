"""Estimate what a training run needs before it starts: python -m tools.plan [settings of train.py].

Under a launcher the estimate is for that launch. Nothing is written but a temporary directory, which is removed.

Memory is not estimated by a formula: a training step runs on fake tensors (FakeTensorMode), which have a shape, a
device and a lifetime but no storage, and the live ones are counted. So a change of the model needs no change here.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from cli.scripts import run_and_exit

    run_and_exit("tools.plan")

import contextlib
import importlib
import math
import os
import tempfile
import weakref
from collections import Counter
from dataclasses import replace
from shutil import disk_usage

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import checkpoint.storage  # noqa: F401  (a run imports it, and imports take memory)
import train
from config.errors import RunError
from config.resolve import replace_settings
from config.schema import TrainConfig
from data.sampler import BatchSizes
from distributed.collectives import broadcast_from_main
from distributed.launch import num_shards, start_accelerator
from distributed.launch_checks import check_launch
from distributed.nested import nested_training, shared_temporary_folder
from distributed.world import num_processes
from model.gpt import GPTModel, build_on_meta_device
from run.metrics_log import read_rows
from run.resolve import resolve
from run.summary import format_batch, format_tokens
from training.gradients import trainable_parameters
from training.optimizer import build_optimizer
from training.prepare_model import missing_compiler, prepare_network

TRIAL_STEPS = 6  # the second half is measured
MAX_TRIAL_FLOPS_ON_CPU = 3e12  # about a minute on a slow CPU
KEPT_BYTES = 2**25  # larger blocks are returned to the system when freed (distributed/cpu.py)
STATE = ("weights", "gradients", "moments")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors by label, now (`live`) and at their peak (`at_peak`)."""

    def __init__(self, limit: float = math.inf):
        """Count only tensors of at most `limit` bytes."""
        super().__init__()
        self.limit, self.label, self.live, self.at_peak = limit, "weights", Counter(), Counter()
        self.labels: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.labels and storage.nbytes() <= self.limit:
            self.labels[key] = self.label, storage.nbytes()
            self.live[self.label] += storage.nbytes()
            weakref.finalize(storage, self._forget, key)
            if self.live.total() > self.at_peak.total():
                self.at_peak = self.live.copy()

    def _forget(self, key: int) -> None:
        label, size = self.labels.pop(key)
        self.live[label] -= size

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Count a tensor under another label, as when the result of a backward becomes a gradient."""
        key = tensor.untyped_storage()._cdata
        before, size = self.labels[key]
        self.labels[key] = label, size
        self.live[before] -= size
        self.live[label] += size


def tensor_bytes(config: TrainConfig, accelerator: Accelerator, scores: bool = False) -> tuple[dict[str, int], int]:
    """Count the bytes of tensors at the peak of a step on one device that holds the whole model.

    With `scores`, the corpus scores the logits of an evaluation, which are then kept. Text generation is not counted,
    nor are the masks of sliding-window attention and of data.packing: isolated.

    Returns:
        The bytes of each part at the peak, and the bytes of the optimizer's moments.
    """
    device = accelerator.device
    config = replace(config, model=replace(config.model, window=None))
    with FakeTensorMode(), LiveBytes() as live, torch.device(device):
        network = GPTModel(config.model)
        # Not compiled: an upper bound, since compiled blocks keep fewer activations. Compiled runs chunk the loss.
        compiled = config.compile and not missing_compiler(device)
        chunked = True if compiled and config.chunked_loss is None else config.chunked_loss
        prepare_network(network, replace(config, compile=False, chunked_loss=chunked), device)
        optimizer = build_optimizer(network, config.optimizer, config.evaluation.ema_decay)
        live.label = "gradients"
        for parameter in trainable_parameters(network):
            parameter.grad = torch.zeros_like(parameter)
        live.label = "moments"
        optimizer.step()
        moments = live.live["moments"]
        # DDP's buckets stay allocated between steps, and so do gradients that are accumulated.
        accumulates = config.global_batch_size > config.micro_batch_size * accelerator.num_processes
        with_ddp = accelerator.num_processes > 1 and num_shards(accelerator) == 1 and not config.exact
        optimizer.zero_grad(set_to_none=config.exact or not (with_ddp or accumulates))
        for parameter in trainable_parameters(network):
            parameter.register_post_accumulate_grad_hook(lambda p: live.relabel(p.grad, "gradients"))

        def label_head(module, inputs, output: Tensor) -> None:
            live.label = "logits and loss"
            if output.requires_grad:
                output.register_hook(lambda gradient: setattr(live, "label", "activations"))

        network.final_norm.register_forward_hook(label_head)
        live.label = "activations"
        tokens = torch.zeros((config.micro_batch_size, config.seq_len), dtype=torch.int64)
        with accelerator.autocast():
            loss = network(tokens, labels=tokens, num_items_in_batch=1.0)[1]
        loss.backward()
        del loss
        live.label = "activations"
        with LiveBytes(KEPT_BYTES) as update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not with_ddp)
        step_peak = dict(live.at_peak)
        evaluation = LiveBytes(KEPT_BYTES)
        if config.evaluation.every:
            num_rows = config.evaluation.micro_batch_size
            num_rows = min(num_rows, config.evaluation.num_samples or num_rows)
            tokens = torch.zeros((num_rows, config.seq_len), dtype=torch.int64)
            with accelerator.autocast(), torch.no_grad(), evaluation:
                logits_to_keep = 0 if scores else None  # 0 is all of them
                network.eval()(tokens, labels=tokens, num_items_in_batch=1.0, logits_to_keep=logits_to_keep)
    peak = dict(live.at_peak)
    if device.type == "cpu":
        # The heap keeps freed memory, and little of it fits tensors of other sizes, so these peaks add up.
        summed = step_peak | {"update": update.at_peak.total(), "evaluation": evaluation.at_peak.total()}
        peak = max(peak, summed, key=lambda parts: sum(parts.values()))
    return peak, moments


def gathered_by_fsdp(network: GPTModel) -> int:
    """Count the parameters that FSDP2 has gathered at once: two blocks, and the parameters outside the blocks."""
    block = sum(weight.numel() for weight in network.blocks[0].parameters())
    return 2 * block + network.num_parameters() - len(network.blocks) * block


def memory(
    config: TrainConfig, accelerator: Accelerator, network: GPTModel, scores: bool = False
) -> tuple[dict[str, float], int]:
    """Estimate the bytes of a process's tensors at their peak, by part, and the bytes of a checkpoint.

    Raises:
        RunError: the shapes of the model's activations depend on the data.
    """
    try:
        parts, moments = tensor_bytes(config, accelerator, scores)
    except DynamicOutputShapeException as error:
        raise RunError(f"shapes in this model depend on its data ({error}), so its memory cannot be planned") from None
    shards, processes = num_shards(accelerator), accelerator.num_processes
    weights = sum(weight.nbytes for weight in network.parameters())
    parts = {name: size / (shards if name in STATE else 1) for name, size in parts.items()}
    if shards > 1:
        parts["gathered by FSDP2"] = gathered_by_fsdp(network) * (4 if accelerator.mixed_precision == "no" else 2)
    if config.exact:
        sizes = BatchSizes.from_config(config)
        micro_batches = [sizes.size(step) // config.micro_batch_size for step in (0, *sizes.increase_steps)]
        leaves = max(count & -count for count in micro_batches) // processes  # see distributed/tree_reduce.py
        parts["sums of exact"] = weights * (leaves.bit_length() - 1 + (processes > 1))
    if accelerator.device.type == "cpu" and config.checkpoint.asynchronous:
        parts["copy for a checkpoint"] = (weights + moments) / shards
    return parts, weights + moments


def run_trial(config: TrainConfig, accelerator: Accelerator, steps: int = TRIAL_STEPS) -> dict[str, float]:
    """Train a few steps in a temporary directory and return the last logged row; called by all processes together."""
    with shared_temporary_folder("plan-") as folder:
        changes = {
            "out_dir": str(folder),
            "stop_after": steps,
            "branch_from": None,
            "init_from": None,
            "profile": None,
            "schedule.warmup_steps": 0,
            "schedule.decay_steps": None,
            "schedule.batch_warmup_from": None,
            "schedule.batch_warmup_steps": None,
            "tracking.tracker": "wandb",
            "tracking.wandb": "disabled",
            "tracking.log_every": max(1, steps // 2),
            "checkpoint.every": config.steps,
            "checkpoint.keep_every": 0,
            "check_replicas_every": 0,
            "evaluation.every": config.evaluation.every * config.steps,  # only after the last step
        }
        short = replace_settings(config, changes)
        with nested_training():
            train.main(short)
        log = folder / config.run_name / "metrics.jsonl"
        return broadcast_from_main(list(read_rows(log))[-1] if accelerator.is_main_process else None)


def baseline_process_bytes(config: TrainConfig, accelerator: Accelerator) -> int:
    """Return the resident bytes of a CPU process after training a tiny model: Python, torch and the libraries."""
    small = replace(
        config,
        micro_batch_size=1,
        global_batch_size=accelerator.num_processes,
        steps=1,
        model=replace(config.model, n_layers=1, d_model=16, n_heads=1, n_kv_heads=None, head_dim=None, d_ff=16),
        evaluation=replace(
            config.evaluation, num_samples=2, micro_batch_size=1, num_scored_generations=1, num_logged_generations=0
        ),
    )
    if not several_machines():
        run_trial(small, accelerator, 1)
    if config.tracking.wandb != "disabled":
        with contextlib.suppress(ImportError):
            importlib.import_module("wandb")
    return psutil.Process().memory_info().rss


def several_machines() -> bool:
    """Return whether the processes run on several machines, which have no temporary directory in common."""
    return num_processes() > int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def reason_against_trial(accelerator: Accelerator, flops: float, peak: float, disk: int) -> str:
    """Return why no trial steps can run here, or ""."""
    if several_machines():
        return "the machines have no temporary directory in common"
    on_gpu = accelerator.device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available / num_processes()
    if peak > free:
        return f"{megabytes(peak)} of memory are needed and {megabytes(free)} are free"
    if disk > disk_usage(tempfile.gettempdir()).free:
        return f"a checkpoint of {megabytes(disk)} does not fit in {tempfile.gettempdir()}"
    if accelerator.device.type == "cpu" and flops > MAX_TRIAL_FLOPS_ON_CPU:
        return f"{flops / 1e12:,.0f} TFLOPs take too long on a CPU"
    return ""


def megabytes(size: float) -> str:
    """Format a number of bytes in MB."""
    return f"{size / 1e6:,.1f} MB"


def main(config: TrainConfig) -> None:
    """Print the plan.

    Raises:
        ConfigError: a setting does not fit the launch or the data, as in train.py.
        RunError: a step cannot run on fake tensors.
        Preempted: a stop signal was received.
    """
    check_launch(config)
    config, corpus, _ = resolve(config)
    accelerator = start_accelerator(config)
    base = {"Python and torch": baseline_process_bytes(config, accelerator)} if accelerator.device.type == "cpu" else {}
    network = build_on_meta_device(config.model)
    parts, checkpoint = memory(config, accelerator, network, scores=corpus.score_logits is not None)
    peak = sum((parts := base | parts).values())
    sequences_at_once = config.micro_batch_size * accelerator.num_processes
    tokens = BatchSizes.from_config(config).sequences_before(config.steps) * config.seq_len
    flops = network.flops_per_token(config.seq_len)
    sizes = {name: sum(weight.numel() for weight in part.parameters()) for name, part in network.named_children()}
    plan = {"parameters": f"{network.num_parameters():,}"}
    plan |= {f"  {name}": f"{count:,}" for name, count in sizes.items() if count}
    plan |= {
        "processes": f"{accelerator.num_processes} on {accelerator.device.type}, {num_shards(accelerator)} per "
        f"replica; {format_batch(config, sequences_at_once)} micro-batch(es) of {config.micro_batch_size} per step",
        "tokens": format_tokens(config),
        "FLOPs": f"{flops:,} per token, {flops * (config.global_batch_size or 0) * config.seq_len:.3g} per step, "
        f"{flops * tokens:.3g} in total",
        "memory": f"{megabytes(peak)}: the peak of a process",
        **{f"  {name}": megabytes(size) for name, size in parts.items()},
        "checkpoint": f"{megabytes(checkpoint)}, the newest {config.checkpoint.keep} and the best are kept",
    }
    trial_flops = (TRIAL_STEPS + 1) * flops * config.micro_batch_size * config.seq_len
    if why := reason_against_trial(accelerator, trial_flops, peak, checkpoint):
        plan["time"] = f"not measured: {why}"
    else:
        row = run_trial(replace(config, global_batch_size=sequences_at_once), accelerator)
        speed = row["perf/tokens_per_second"]
        plan["time"] = f"{tokens / speed / 3600:,.2f} hours at {speed:,.0f} tokens/s, measured over a few steps"
        plan["  peak memory"] = megabytes(row["perf/peak_memory_bytes"])
    accelerator.print("\n".join(f"{name:<24}{text}" for name, text in plan.items()))
