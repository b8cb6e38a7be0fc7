"""Trains a mini-GPT: python train.py [--config FILE]... [--section.field VALUE]..., or the same under a launcher.

A run is a pure function of its config and seed: at step s the learning rate, the global batch and every random draw
are functions of (config, seed, s). Its only state is the weights, the optimizer's moments and the integer s.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from cli.scripts import run_and_exit

    run_and_exit("train")

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from checkpoint.saver import Saver, load_checkpoint
from config.schema import TrainConfig
from data.corpus import TOKENS_AT_ONCE, Batches, Corpus
from data.sampler import StepSampler
from distributed.launch import start_accelerator
from distributed.launch_checks import check_request, check_same_settings
from distributed.signals import Preempted, StopSignal
from distributed.state_hash import state_digests
from distributed.tree_reduce import TreeSum
from export import export_newest
from model.gpt import GPTModel
from model.seeds import derive_seed
from plotting.run_plots import save_block_stats, save_excess_loss, save_loss_curve
from plotting.style import report_plot_errors
from run import trackers
from run.corpus_check import CorpusCheck
from run.directory import RunDirectory, Start
from run.load import Loaded, copy_initial_weights
from run.reporting import Reporter
from run.resolve import resolve
from run.summary import summary
from training.block_stats import LayerStatistics
from training.data_loading import LoaderCheck, start_worker
from training.ema import averaged_weights
from training.evaluation import evaluate, require_finite_loss
from training.generations import sample_texts
from training.gradients import backward, clip, fill_in_gradients, first_backward, loss_scale, trainable_parameters
from training.metrics import StepTotals
from training.optimizer import build_optimizer, set_schedules
from training.prepare_model import prepare_network
from training.profiler import step_profiler
from training.schedule import at_step
from training.throughput import Throughput, peak_flops


def main(config: TrainConfig) -> None:
    """Train until step `config.steps`, going on from the newest checkpoint of the run if there is one.

    Raises:
        ConfigError: the settings do not fit the launch, the data or the run directory, or the data are damaged.
        RunError: the loss is no number any more, the processes' states differ, or a checkpoint cannot be written.
        Preempted: a signal asked to stop, and the checkpoint is saved.
    """
    run = RunDirectory(config.out_dir, config.name)
    with run.outcome_recorded(config):
        check_request(config)
        trackers.check(config)
        config, corpus, initial = resolve(config, run)
        run.check(config)
        accelerator = start_accelerator(config)
        check_same_settings(config, accelerator)
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

    torch.manual_seed(config.seed)
    network = GPTModel(config.model)
    if initial:
        copy_initial_weights(network, initial)
    prepare_network(network, config, device)
    layers = LayerStatistics(network.blocks if config.tracking.block_stats else [], accelerator)
    optimizer = build_optimizer(network, config.optimizer, config.evaluation.ema_decay)
    if config.exact:
        # Accelerate does not wrap a model in DDP that is only to be evaluated. So each process keeps its own gradients,
        # which the tree adds up. The model stays in train mode all the same.
        model = accelerator.prepare_model(network, evaluation_mode=True)
        tree_sum = TreeSum(trainable_parameters(network), rank, num_processes)
    else:
        model, optimizer = accelerator.prepare(network, optimizer)
        optimizer = optimizer.optimizer  # Accelerate's wrapper looks up installed packages in every step, which is slow
    parameters = trainable_parameters(network)
    # DDP averages over the processes what is to be summed.
    averaged_over = 1 if config.exact else num_processes
    if start.checkpoint:
        load_checkpoint(start.checkpoint, model, optimizer)
        state_digests(network, optimizer).require(start.metrics.get("state/digest"), start.checkpoint)

    order = corpus.order(config)
    sampler = StepSampler(order, start.step, config.steps, rank, num_processes)
    loader_check = LoaderCheck(accelerator, config.timeout_seconds, stop_signal)
    batches = load_batches(config, corpus, sampler, device, loader_check)
    # torch.manual_seed seeds CUDA too, and where there is none it keeps a stack trace of each call, which is slow.
    seed_draws = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    flops_per_token = network.flops_per_token(config.seq_len)
    throughput = Throughput(order, config.seq_len, flops_per_token, peak_flops(accelerator))
    totals = StepTotals(order, config.micro_batch_size, config.max_skipped, accelerator, run.path)

    with (
        Reporter(config, run, start.step, accelerator, export_newest) as reporter,
        Saver(run.checkpoints, config, accelerator, reporter.sync) as saver,
        step_profiler(config, start.step, run.path, rank) as profiler,
    ):
        verified = corpus_check.begin()
        reporter.say(summary(config, accelerator, network, run.path, start, verified, corpus.conversations))
        # The loss of a step is the sum over the targets of the global batch, divided by their number on all processes.
        # That number must be known before the forward: here for the first step, and later from the step before.
        share, num_targets = next(batches, ([], 0))
        totals.send(num_targets, stop=not share)
        target_tokens = totals.receive(start.step, torch.zeros((), device=device))
        totals.read(at_once=True)
        if totals.stop:
            loader_check.require_batches(start.step)
            raise Preempted(f"stopped as asked before step {start.step + 1}; the same command begins with it")
        totals.skipped, totals.skipped_in_a_row = start.skipped
        # DDP orders its sums by what it saw in its first backward. Every start does one and discards it, so that a
        # resumed run adds in the same order as one that never stopped.
        _, micro_loss, *sums = model(**share[0], num_items_in_batch=target_tokens)
        first_backward(micro_loss, model, accelerator)
        optimizer.zero_grad()
        totals.agree_on_names(*sums)
        throughput.restart(start.step)

        # What all processes must know of a step travels in one small message, with these four calls in this order:
        # `add` the loss of each micro-batch; `send` all of them beside the last backward, with the number of targets of
        # the next step; `receive` that number; `read` the rest, one step late unless something needs it at once.
        for step in range(start.step, config.steps):
            set_schedules(optimizer, network, config, step)
            scale = loss_scale(accelerator.mixed_precision, step, totals.skipped)
            done, accumulation = step + 1, len(share)
            due = config.due(done)
            layers.noting = due.log
            for index, micro_batch in enumerate(share):
                seed_draws(derive_seed(config.seed, "dropout", step, rank * accumulation + index))
                with nullcontext() if index == accumulation - 1 else accelerator.no_sync(model):
                    _, micro_loss, *sums = model(**micro_batch, num_items_in_batch=target_tokens / averaged_over)
                    totals.add(micro_loss / averaged_over, *sums)
                    if index == accumulation - 1:
                        share, num_targets = next(batches, ([], 0))
                        asked_to_stop = stop_signal.received or done == config.stop_after
                        stop = asked_to_stop or saver.failed or corpus_check.failed or loader_check.failed
                        totals.send(num_targets, stop)
                    backward(scale * micro_loss, model, accelerator)
                if config.exact:
                    tree_sum.add_micro_batch(accumulation)
            fill_in_gradients(parameters, scale)
            grad_norm = clip(parameters, at_step("grad_clip", config.optimizer.grad_clip, config, step) or math.inf)

            target_tokens = totals.receive(done, grad_norm)
            totals.read(at_once=due.log or due.evaluate or due.save)
            with layers.watch():
                if totals.finite:
                    optimizer.step()
            optimizer.zero_grad()

            metrics = {}
            if any(due) or totals.stop:
                digests = state_digests(network, optimizer)
                metrics["state/digest"] = str(digests)
                if due.compare_replicas or (totals.stop and config.check_replicas_every):
                    digests.check_replicas(accelerator, done)
            if due.log:
                metrics |= {f"train/{name}": average for name, average in totals.averages.items()}
                metrics |= {"train/lr": at_step("lr", config.optimizer.lr, config, step)}
                metrics |= {"train/grad_norm": totals.grad_norm}
                metrics |= layers.metrics | throughput.measure(done)
                metrics |= {"train/skipped": totals.skipped} if config.max_skipped else {}
            if due.evaluate or done == config.steps:
                with averaged_weights(optimizer):
                    if due.evaluate:
                        metrics |= evaluate(model, corpus, config.evaluation.micro_batch_size, accelerator)
                    metrics |= sample_texts(model, corpus, config, accelerator, done, reporter.log_texts)
            reporter.log(done, metrics)
            if due.save or totals.stop:
                corpus_check.demand(stopping=totals.stop)
                saver.save(done, model, optimizer, metrics, totals)
                run.record_progress(done)
            if done == config.steps or totals.stop:
                saver.wait(must_succeed=True)
            if totals.stop and done < config.steps:
                loader_check.require_batches(done)
                raise Preempted(f"stopped as asked after step {done}; the same command goes on from there")
            if due.evaluate or due.save:
                throughput.restart(done)
            if profiler:
                profiler.step()

        require_finite_loss(metrics, config.steps)
        draw_loss_curve(run.path, accelerator, reporter.say)
        reporter.say(f"The run lies in {run.path}.")


def load_batches(
    config: TrainConfig, corpus: Corpus, sampler: StepSampler, device: torch.device, loader_check: LoaderCheck
) -> Iterator[tuple]:
    """This process's share of every global batch that the sampler asks for, on the device: micro-batches, targets."""
    # The loader is not prepared: Accelerate would shard what the sampler has already sharded.
    loader = DataLoader(
        Batches(corpus.train),
        batch_size=max(1, TOKENS_AT_ONCE * sampler.num_processes // (config.global_batch_size * config.seq_len)),
        collate_fn=list,
        sampler=sampler,
        num_workers=config.data.num_workers,
        worker_init_fn=start_worker,
        pin_memory=device.type == "cuda",
    )
    # Elsewhere than from pinned memory to a GPU, a copy that nobody waits for may be read too early.
    non_blocking = device.type == "cuda"
    for batches in loader_check.batches(loader):
        batches = [{name: t.to(device, non_blocking=non_blocking) for name, t in batch.items()} for batch in batches]
        # All are cut into micro-batches before the first of them is trained on. One by one, between two steps, it takes
        # longer: a step leaves nothing of this code in the CPU's caches.
        shares = [(list(micro_batches(batch, config.micro_batch_size)), count_targets(batch)) for batch in batches]
        yield from shares


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
        with report_plot_errors("The loss curve", say):
            say(f"Loss curve: {save_loss_curve(run_directory)}")
            if path := save_excess_loss(run_directory):
                say(f"Excess loss by kind of token: {path}")
            if path := save_block_stats(run_directory):
                say(f"Block statistics: {path}")
