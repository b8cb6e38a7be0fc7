"""Trains a mini-GPT: python train.py [--config FILE]... [--section.field VALUE]..., or the same under a launcher.

A run is a pure function of its config and seed: at step s the learning rate, the global batch and every random draw
are functions of (config, seed, s). Its only state is the weights, the optimizer's moments and the integer s.
"""

if __name__ == "__main__":  # before anything slow is imported; `run` comes back to `main` below, and never returns here
    from cli import run

    run("train")

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import launcher
import trackers
from config import TrainConfig
from data.corpus import TOKENS_AT_ONCE, Batches, Corpus, load_corpus
from data.order import StepSampler, derive_seed
from load import Loaded, begin_with, check_tokenizer, take_over
from model.gpt import GPTModel
from plot import save_layers, save_loss_curve
from training import checkpoint, launch
from training.compute import prepare_network, step_profiler
from training.corpus_check import CorpusCheck
from training.evaluation import evaluate, require_finite_loss
from training.fingerprint import state_digests
from training.gradients import backward, clip, fill_in, first_backward, loss_scale, trained
from training.layers import LayerStatistics
from training.optimizer import build_optimizer, set_lr
from training.run_directory import RunDirectory, Start
from training.sampling import sample_texts
from training.schedule import lr_scale
from training.signals import Preempted, StopSignal, ignore_stop_signals
from training.step_totals import StepTotals
from training.summary import summary
from training.throughput import Throughput, peak_flops
from training.tracking import Tracker
from training.tree_sum import TreeSum


def main(config: TrainConfig) -> None:
    """Train until step `config.steps`, going on from the newest checkpoint of the run if there is one.

    Raises:
        ConfigError: the settings do not fit the launch, the data or the run directory, or the data are damaged.
        RunError: the loss is no number any more, the processes' states differ, or a checkpoint cannot be written.
        Preempted: a signal asked to stop, and the checkpoint is saved.
    """
    run = RunDirectory(config.out_dir, config.name)
    with run.outcome_recorded(config):
        launcher.check(config)
        if config.data.seed is None:
            config.data.seed = run.data_seed(config)
        initial = take_over(config)
        trackers.check(config)
        corpus = load_corpus(config)
        if initial:
            check_tokenizer(config.init_from, initial, corpus)
        config.model.vocab_size = corpus.vocab_size
        run.check(config)
        accelerator = launch.start(config)
        launcher.check_alike(config, accelerator)
        stop_signal = StopSignal()
        start = run.open(config, accelerator)
        if start.step < config.steps:
            train(config, corpus, run, start, accelerator, stop_signal, initial)
        else:
            require_finite_loss(start.metrics, start.step)
            accelerator.print(f"{run.path} is complete: all {config.steps} steps are done.")
            draw_loss_curve(run.path, accelerator)
        accelerator.wait_for_everyone()
    accelerator.print("Training finished.")


def train(
    config: TrainConfig,
    corpus: Corpus,
    run: RunDirectory,
    start: Start,
    accelerator: Accelerator,
    stop_signal: StopSignal,
    initial: Loaded | None,
) -> None:
    """Do the steps from `start` to `config.steps`; called by all processes together."""
    corpus_check = CorpusCheck(corpus.verification, accelerator, config.timeout_seconds)
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    accumulation = config.global_batch_size // (config.micro_batch_size * num_processes)

    torch.manual_seed(config.seed)
    network = GPTModel(config.model)
    if initial:
        begin_with(network, initial)
    prepare_network(network, config, device)
    layers = LayerStatistics(network.blocks if config.tracking.layers else [], accelerator)
    optimizer = build_optimizer(network, config.optimizer)
    if config.exact:
        # So every process keeps its own gradients: Accelerate leaves DDP out of what is only to be evaluated. In train
        # mode the model stays all the same.
        model = accelerator.prepare_model(network, evaluation_mode=True)
        tree_sum = TreeSum(network, accumulation * num_processes, rank, num_processes)
    else:
        model, optimizer = accelerator.prepare(network, optimizer)
        optimizer = optimizer.optimizer  # the wrapper around it looks in every step which packages are installed
    parameters = trained(network)
    # DDP averages over the processes what is to be summed.
    averaged_over = 1 if config.exact else num_processes
    if start.checkpoint:
        checkpoint.load(start.checkpoint, model, optimizer)
        state_digests(network, optimizer).require(start.metrics.get("state/digest"), start.checkpoint)

    order = corpus.order(config.global_batch_size, config.seed)
    batches = load_batches(config, corpus, StepSampler(order, start.step, config.steps, rank, num_processes), device)
    # torch.manual_seed also notes a seed, with a stack trace, for a GPU that a machine without one does not have.
    seed_draws = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    tokens_per_step = config.global_batch_size * config.seq_len
    throughput = Throughput(tokens_per_step, network.flops_per_token(config.seq_len), peak_flops(accelerator))
    totals = StepTotals(order, config.micro_batch_size, config.max_skipped, accelerator, run.path)

    with (
        Tracker(config, run, start.step, accelerator, trackers.start_tracker) as tracker,
        checkpoint.Saver(run.checkpoints, config, accelerator, tracker.sync) as saver,
        step_profiler(config, start.step, run.path, rank) as profiler,
    ):
        verified = corpus_check.begin()
        tracker.say(summary(config, accelerator, network, run.path, start, verified, corpus.conversations))
        # The loss of a step is the sum over the targets of the global batch, divided by their number on all processes.
        # So that number comes first: here for the first step, and later with the totals of the step before.
        share, num_targets = next(batches)
        totals.send(num_targets, stop=False)
        target_tokens = totals.receive(start.step, torch.zeros((), device=device))
        totals.read(at_once=True)
        totals.skipped, totals.skipped_in_a_row = start.skipped
        # DDP orders its sums by what it saw in its first backward. Every start does one and discards it, so that a
        # resumed run adds in the same order as one that never stopped.
        _, micro_loss, *sums = model(**share[0], num_items_in_batch=target_tokens)
        first_backward(micro_loss, model, accelerator)
        optimizer.zero_grad()
        totals.agree_on_names(*sums)
        throughput.restart(start.step)

        for step in range(start.step, config.steps):
            lr_share = lr_scale(config.schedule, step, config.steps)
            set_lr(optimizer, lr_share)
            scale = loss_scale(accelerator.mixed_precision, step, totals.skipped)
            done = step + 1
            log_now, evaluate_now, save_now, compare_now = config.due(done)
            layers.noting = log_now
            for index, micro_batch in enumerate(share):
                seed_draws(derive_seed(config.seed, "dropout", step, rank * accumulation + index))
                with nullcontext() if index == accumulation - 1 else accelerator.no_sync(model):
                    _, micro_loss, *sums = model(**micro_batch, num_items_in_batch=target_tokens / averaged_over)
                    totals.add(micro_loss / averaged_over, *sums)
                    if index == accumulation - 1:
                        share, num_targets = next(batches, ([], 0))
                        stop = stop_signal.received or saver.failed or corpus_check.failed or done == config.stop_after
                        totals.send(num_targets, stop)
                    backward(scale * micro_loss, model, accelerator)
                if config.exact:
                    tree_sum.add_micro_batch()
            fill_in(parameters, scale)
            grad_norm = clip(parameters, config.optimizer.grad_clip or math.inf)

            target_tokens = totals.receive(done, grad_norm)
            totals.read(at_once=log_now or evaluate_now or save_now)
            with layers.watch():
                if totals.finite:
                    optimizer.step()
            optimizer.zero_grad()

            metrics = {}
            if log_now or evaluate_now or save_now or compare_now or totals.stop:
                digests = state_digests(network, optimizer)
                metrics["state/digest"] = str(digests)
                if compare_now or (totals.stop and config.check_replicas_every):
                    digests.check_replicas(accelerator, done)
            if log_now:
                metrics |= {f"train/{name}": average for name, average in totals.averages.items()}
                metrics |= {"train/lr": config.optimizer.lr * lr_share, "train/grad_norm": totals.grad_norm}
                metrics |= layers.metrics | throughput.measure(done)
                metrics |= {"train/skipped": totals.skipped} if config.max_skipped else {}
            if evaluate_now:
                metrics |= evaluate(model, corpus, config.evaluation.micro_batch_size, accelerator)
            if evaluate_now or done == config.steps:
                metrics |= sample_texts(model, corpus, config, accelerator, tracker, done)
            tracker.log(done, metrics)
            if save_now or totals.stop:
                corpus_check.demand()
                saver.save(done, model, optimizer, metrics, totals)
                run.record_progress(done)
            if done == config.steps or totals.stop:
                saver.wait(must_succeed=True)
            if totals.stop and done < config.steps:
                raise Preempted(f"stopped as asked after step {done}; the same command goes on from there")
            if evaluate_now or save_now:
                throughput.restart(done)
            if profiler:
                profiler.step()

        require_finite_loss(metrics, config.steps)
        draw_loss_curve(run.path, accelerator, tracker.say)
        tracker.say(f"The run lies in {run.path}.")


def load_batches(config: TrainConfig, corpus: Corpus, sampler: StepSampler, device) -> Iterator[tuple]:
    """This process's share of every global batch that the sampler asks for, on the device: micro-batches, targets."""
    # The loader is not prepared: Accelerate would shard what the sampler has already sharded.
    loader = DataLoader(
        Batches(corpus.train),
        batch_size=max(1, TOKENS_AT_ONCE * sampler.num_processes // (config.global_batch_size * config.seq_len)),
        collate_fn=list,
        sampler=sampler,
        num_workers=config.data.num_workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=device.type == "cuda",
    )
    # Elsewhere than from pinned memory to a GPU, a copy that nobody waits for may be read too early.
    non_blocking = device.type == "cuda"
    for batches in loader:
        batches = [{name: t.to(device, non_blocking=non_blocking) for name, t in batch.items()} for batch in batches]
        # All of them before the next step, like the batches themselves: afterwards a CPU's caches have forgotten how.
        yield from [(list(micro_batches(batch, config.micro_batch_size)), count_targets(batch)) for batch in batches]


def micro_batches(batch: dict[str, Tensor], micro_batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Cut a process's share of a global batch into micro-batches of [micro_batch_size, T]."""
    for parts in zip(*(tensor.split(micro_batch_size) for tensor in batch.values()), strict=True):
        yield dict(zip(batch, parts, strict=True))


def count_targets(batch: dict[str, Tensor]) -> Tensor:
    """The number of target tokens in a batch: labels that are predicted by the position before them, [] int64."""
    return (batch["labels"][:, 1:] != -100).sum()


def draw_loss_curve(run_directory: Path, accelerator: Accelerator, say: Callable[[str], None] = print) -> None:
    """Draw the pictures anew; where that fails, as on a full disk, the run is no less finished."""
    if accelerator.is_main_process:
        try:
            say(f"Loss curve: {save_loss_curve(run_directory)}")
            if path := save_layers(run_directory):
                say(f"Layers: {path}")
        except (OSError, ImportError) as error:
            say(f"The loss curve cannot be drawn: {error}")
