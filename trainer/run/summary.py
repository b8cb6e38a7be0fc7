"""The summary that a run prints at its start: device, precision, batch, model, data and checkpoint."""

from pathlib import Path

import torch
from accelerate import Accelerator

from data.corpus import Corpus
from data.sampler import BatchSizes
from model.attention import HAS_TRITON
from model.gpt import GPTModel
from runtime.config.schema import TrainConfig
from runtime.distributed.launch import num_shards
from runtime.machine.cores import describe_load
from trainer.cuda_graph import GraphChoice
from trainer.gradients import trainable_parameters
from trainer.prepare_model import missing_compiler
from trainer.run.resume import StartingPoint


def format_batch(config: TrainConfig, unit: int = 1) -> str:
    """Format the global batch size in units of `unit` sequences: "16", or "4 to 16" if it grows."""
    sizes = BatchSizes.from_config(config)
    return " to ".join(dict.fromkeys(str(size // unit) for size in (sizes.size(0), sizes.global_batch_size)))


def format_tokens(config: TrainConfig, total: int) -> str:
    """Format the tokens of a step, and `total`, those of the whole run."""
    sizes = BatchSizes.from_config(config)
    first, last = (size * config.seq_len for size in (sizes.size(0), sizes.global_batch_size))
    if first == last:
        return f"{last:,} a step, {total:,} in {config.steps:,} steps"
    last_increase = sizes.increase_steps[-1] + 1
    return f"{first:,} in step 1, {last:,} from step {last_increase:,} on, {total:,} in {config.steps:,} steps"


def describe_threads() -> str:
    """Describe the threads of each process on a CPU, with a remedy if the machine is busy.

    The threads of an operation spin while they wait for each other, so where other programs have the cores, several
    threads are slower than one.
    """
    threads, load = torch.get_num_threads(), describe_load()
    hint = f" ({load}: OMP_NUM_THREADS=1 may be several times faster)" if threads > 1 and load else ""
    return f"{threads} thread(s) each{hint}"


def summary(
    config: TrainConfig,
    accelerator: Accelerator,
    model: GPTModel,
    directory: Path,
    start: StartingPoint,
    corpus: Corpus,
    total_tokens: int,
    graph: GraphChoice,
) -> str:
    """Describe a run, which trains `total_tokens` tokens, in lines of the form `name: fact`."""
    device = accelerator.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = f", {describe_threads()}" if device.type == "cpu" else ""
    backend = f", {torch.distributed.get_backend()}" if accelerator.num_processes > 1 else ""
    shards = num_shards(accelerator)
    replicas = f", {accelerator.num_processes // shards} replica(s) x {shards} shards" if shards > 1 else ""
    precision = accelerator.mixed_precision
    if precision == "no":
        arithmetic = ["fp32"]
    elif shards == 1:  # autocast casts a weight when it is multiplied, FSDP before it is gathered
        arithmetic = [f"{precision}, weights and sums of gradients in fp32"]
    else:
        arithmetic = [f"{precision}, weights gathered in {precision}, stored weights and sums of gradients in fp32"]
    in_force = {
        "CUDA graph": graph.use,
        "TF32": device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,
        "activation checkpointing": config.activation_checkpointing,
        "deterministic": config.exact,
    }
    arithmetic += [name for name, is_set in in_force.items() if is_set]
    lack = missing_compiler(device) if config.compile else ""
    compiled = "each block and the loss" if config.compile else "off"
    num_rows = config.micro_batch_size * config.seq_len
    chunk_rows = model.next_token_loss.chunk_rows(num_rows, len(model.output_weight), device.type)
    logits = f"logits of {num_rows:,} positions at once"
    accumulation = format_batch(config, config.micro_batch_size * accelerator.num_processes)
    num_epochs = total_tokens / config.seq_len / len(corpus.train)
    parameters = f"{model.num_parameters():,} parameters"
    if frozen := model.num_parameters() - sum(parameter.numel() for parameter in trainable_parameters(model)):
        parameters += f", {frozen:,} of them frozen"
    facts = {
        "run": f"{directory}" + (f", resumed at step {start.step} from {start.checkpoint}" if start.checkpoint else ""),
        "processes": f"{accelerator.num_processes} x {device_name}{threads}{backend}{replicas}",
        "precision": ", ".join(arithmetic),
        "compile": f"off, {lack}" if lack else compiled,
        "loss": f"chunked, logits of {chunk_rows:,} positions at a time" if chunk_rows else logits,
        "model": parameters,
        "teacher": model.teacher and f"{config.teacher.path}, {model.teacher.model.num_parameters():,} parameters",
        "global batch": f"{format_batch(config)} sequences = {config.micro_batch_size} micro-batch"
        f" x {accelerator.num_processes} processes x {accumulation} accumulation",
        "tokens": format_tokens(config, total_tokens),
        "epochs": f"{num_epochs:.3g} of {len(corpus.train):,} training sequences",
    }
    if graph.report:
        facts["CUDA graph"] = f"{'on' if graph.use else 'off'}, {graph.report}"
    if device.type == "cuda" and config.data.packing == "isolated" and not HAS_TRITON:
        facts["documents"] = "isolated by a mask of all pairs of positions, because Triton is not installed"
    if sizes := corpus.file_sizes:
        facts["corpus"] = f"{len(sizes)} files, {sum(sizes):,} bytes"
    return "\n".join(f"{name:>13}: {fact}" for name, fact in (facts | corpus.notes).items() if fact)
