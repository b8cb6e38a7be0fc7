"""Train a mini-GPT: python train.py [--config FILE]... [--section.field VALUE]..., or the same under a launcher.

A run is a function of its config, which contains the seed, and of its launch (device, mixed precision, processes): the
learning rate, the global batch and every random draw of step s are functions of (config, s). Its only state is the
weights and buffers, the optimizer's state, the integer s and two counts of skipped updates (in total and in a row).
"""

# run_and_exit parses the command line before the slow imports below, so that --help and errors are printed at once. It
# then imports this file as the module `train` (with --plan: checks/plan.py), calls main(config) and exits.
if __name__ == "__main__":
    from cli.scripts import run_and_exit

    run_and_exit("train")

import gc
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator

from checkpoint.saver import Saver, load_checkpoint
from config.schema import TrainConfig
from data.corpus import Corpus
from data.loader import BatchLoader
from data.sampler import GlobalBatches
from distributed.launch import start_accelerator
from distributed.launch_checks import check_launch, check_same_settings
from distributed.signals import Preempted, StopSignal
from distributed.state_hash import state_digest
from distributed.tree_reduce import TreeSum
from model.gpt import GPTModel
from plotting.run_plots import save_block_stats, save_excess_loss, save_loss_curve
from plotting.style import report_plot_errors
from run import trackers
from run.corpus_check import CorpusCheck
from run.directory import RunDirectory
from run.load import LoadedModel, copy_initial_weights
from run.reporting import Reporter
from run.resolve import resolve
from run.resume import StartingPoint
from run.summary import summary
from training.block_stats import BlockStatistics
from training.ema import ema_weights
from training.evaluation import evaluate, require_finite_val_loss
from training.generations import sample_texts
from training.gradients import trainable_parameters
from training.metrics import MetricsQueue
from training.optimizer import build_optimizer, learning_rates
from training.prepare_model import prepare_network
from training.profiler import step_profiler
from training.schedule import should_compare_replicas, should_evaluate, should_log, should_save
from training.step import TrainState, train_step, warm_up
from training.throughput import Throughput, peak_flops


def main(config: TrainConfig) -> None:
    """Train until step `config.steps`, from the newest valid checkpoint of the run, or from `config.branch_from`.

    Raises:
        ConfigError: the settings do not fit the launch, the data or the run directory, or the data are damaged.
        RunError: the run cannot go on, for example because the loss is NaN, the processes' states differ, or a
            checkpoint cannot be written.
        Preempted: a signal or `stop_after` stopped the run, after saving a checkpoint.
    """
    run = RunDirectory(config.out_dir, config.run_name)
    with run.record_outcome(config):
        check_launch(config)
        trackers.check(config)
        config, corpus, initial_model = resolve(config, run)  # loads the data, fills in settings that are null
        run.check(config)
        accelerator = start_accelerator(config)
        check_same_settings(config, accelerator)
        stop_signal = StopSignal()  # installs the handlers
        start = run.open(config, accelerator)
        if start.step < config.steps:
            train(config, corpus, run, start, accelerator, stop_signal, initial_model)
        else:
            require_finite_val_loss(start.metrics, start.step)  # raises again if the run ended with a NaN loss
            accelerator.print(f"{run.path} is complete: all {config.steps} steps are done.")
            plot_run(config, run.path, accelerator)
        accelerator.wait_for_everyone()
    accelerator.print("Training finished.")


def train(
    config: TrainConfig,
    corpus: Corpus,
    run: RunDirectory,
    start: StartingPoint,
    accelerator: Accelerator,
    stop_signal: StopSignal,
    initial_model: LoadedModel | None,
) -> None:
    """Train from `start.step` to the last step; called by all processes together."""
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    # Compares the hashes of the corpus files with the recorded ones, in a thread; synthetic data has no files.
    corpus_check = CorpusCheck(corpus.verification, accelerator, config.timeout_seconds)
    global_batches = corpus.global_batches(config)
    state = build_train_state(config, global_batches, run.path, accelerator, initial_model)
    if start.checkpoint:
        load_checkpoint(start.checkpoint, state.model, state.optimizer)
        # The restored weights and moments must have the digest that the checkpoint records.
        state_digest(state.network, state.optimizer).require_equal(start.metrics.get("state/digest"), start.checkpoint)
    state.metrics_queue.num_skipped, state.metrics_queue.num_skipped_in_a_row = start.skipped

    loader = BatchLoader(
        corpus.train,
        global_batches,
        config.micro_batch_size,
        device,
        rank,
        num_processes,
        num_workers=config.data.num_workers,
        timeout_seconds=config.timeout_seconds / 2,  # fail before the collectives of the other processes time out
    )
    last_step = config.steps
    if config.stop_after is not None and start.step < config.stop_after < config.steps:
        last_step = config.stop_after
    batches = loader.batches(start.step, last_step)
    flops_per_token = state.network.flops_per_token(config.seq_len)
    throughput = Throughput(global_batches, config.seq_len, flops_per_token, peak_flops(accelerator))
    with (
        Reporter(config, run, start.step, accelerator) as reporter,
        Saver(run.checkpoints, config, accelerator, reporter.sync) as saver,  # sync: flushes metrics before each save
        step_profiler(config, start.step, run.path, rank) as profiler,
    ):

        def stop_requested() -> bool:
            # Summed over processes with each step's metrics. All processes read the sum at the same point of the loop,
            # at most one step later, so they stop after the same step. If the reason is a damaged corpus or a failed
            # save, require_verified or saver.save then raises the error.
            return stop_signal.received or corpus_check.failed or saver.failed

        corpus_status = corpus_check.wait_briefly()  # at most 3 s, so that the summary can say that it is verified
        reporter.say(summary(config, accelerator, state.network, run.path, start, corpus_status, corpus.conversations))

        first_micro_batches = next(batches)
        warm_up(state, first_micro_batches[0])  # without an update: compiles, fixes DDP's bucket order
        # Evaluate the initial weights, unless only the last step is evaluated.
        if start.step == 0 and 0 < config.evaluation.every < config.steps:
            digest = state_digest(state.network, state.optimizer)
            initial_metrics = evaluate(state.model, corpus, config.evaluation.micro_batch_size, accelerator)
            reporter.log(0, {"state/digest": str(digest)} | initial_metrics)
        gc.freeze()  # exempts the objects created so far, which live to the end, from garbage collection
        throughput.restart(start.step)

        for step, micro_batches in enumerate(chain([first_micro_batches], batches), start.step):
            completed = step + 1
            log_now, eval_now = should_log(config, completed), should_evaluate(config, completed)
            save_now = should_save(config, completed)
            state.block_statistics.recording = log_now

            train_step(state, step, micro_batches, stop_requested)  # forward, backward, clip, update

            # Without `wait` this is the previous step's result, because reading this step's would synchronise with the
            # device. (With on_nonfinite: skip, train_step has already read this step's.)
            result = state.metrics_queue.read(wait=log_now or eval_now or save_now)
            stop_now = result is not None and result.stop
            save_now = save_now or stop_now
            compare_now = should_compare_replicas(config, completed, save_now)
            metrics = {}
            if log_now or eval_now or save_now or compare_now:
                digest = state_digest(state.network, state.optimizer)
                metrics["state/digest"] = str(digest)
                if compare_now:
                    digest.check_replicas(completed)
            if log_now:
                assert result is not None, "read with wait"
                metrics |= {f"train/{name}": mean for name, mean in result.means.items()}
                metrics |= learning_rates(state.optimizer) | {"train/grad_norm": result.grad_norm}
                metrics |= state.block_statistics.metrics | throughput.measure(completed)
                if config.max_skipped:
                    metrics["train/skipped"] = state.metrics_queue.num_skipped
            if eval_now or completed == config.steps:  # texts are generated at each evaluation and at the end
                with ema_weights(state.optimizer):
                    if eval_now:
                        metrics |= evaluate(state.model, corpus, config.evaluation.micro_batch_size, accelerator)
                    if math.isfinite(metrics.get("val/loss", 0.0)):  # NaN probabilities cannot be sampled from
                        metrics |= sample_texts(state.model, corpus, config, accelerator, completed, reporter.log_texts)
            reporter.log(completed, metrics)
            if save_now:
                corpus_check.require_verified(stopping=stop_now)  # waits; when stopping, at most timeout_seconds / 2
                skipped = state.metrics_queue.num_skipped, state.metrics_queue.num_skipped_in_a_row
                saver.save(completed, state.model, state.optimizer, metrics, skipped)
                run.record_progress(completed)
            if stop_now or completed == last_step:
                saver.wait(must_succeed=True)  # the checkpoint must be complete before the run ends or raises
            if stop_now and completed < config.steps:  # a damaged corpus or a failed save has raised above
                raise Preempted(f"stopped after step {completed}; run the same command again to resume")
            if eval_now or save_now:
                throughput.restart(completed)  # excludes the time of the evaluation and of the save
            if profiler:
                profiler.step()

        if last_step < config.steps:
            raise Preempted(f"stopped after step {last_step} (stop_after); run the same command again to resume")
        require_finite_val_loss(metrics, config.steps)
        plot_run(config, run.path, accelerator, reporter.say)
        reporter.say(f"The run is in {run.path}.")


def build_train_state(
    config: TrainConfig,
    global_batches: GlobalBatches,
    run_directory: Path,
    accelerator: Accelerator,
    initial_model: LoadedModel | None,
) -> TrainState:
    """Build the model and the optimizer, and prepare them with Accelerate."""
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    torch.manual_seed(config.seed)
    network = GPTModel(config.model)
    if initial_model:
        copy_initial_weights(network, initial_model)
    prepare_network(network, config, device)  # tf32, torch.compile, activation checkpointing, chunked loss
    optimizer = build_optimizer(network, config.optimizer, config.evaluation.ema_decay)
    reducer = None
    if config.exact:
        # TreeSum sums the gradients instead of DDP. evaluation_mode=True only prevents wrapping in DDP; it does not
        # call model.eval().
        model = accelerator.prepare_model(network, evaluation_mode=True)
        reducer = TreeSum(trainable_parameters(network), rank, num_processes)
    else:
        model, wrapped = accelerator.prepare(network, optimizer)
        optimizer = wrapped.optimizer  # Accelerate's wrapper looks up installed packages in every step, which is slow
    metrics_queue = MetricsQueue(
        global_batches,
        config.micro_batch_size,
        device,
        rank=rank,
        num_processes=num_processes,
        max_skipped=config.max_skipped,
        run_directory=run_directory,
    )
    block_statistics = BlockStatistics(network.blocks if config.tracking.block_stats else [])
    return TrainState(
        config=config,
        accelerator=accelerator,
        network=network,
        model=model,
        optimizer=optimizer,
        metrics_queue=metrics_queue,
        block_statistics=block_statistics,
        reducer=reducer,
    )


def plot_run(
    config: TrainConfig, run_directory: Path, accelerator: Accelerator, say: Callable[[str], None] = print
) -> None:
    """Write the figures of the run; an error, such as a full disk, is reported and does not fail the run."""
    if config.tracking.plots and accelerator.is_main_process:
        with report_plot_errors("A figure of the run", say):
            say(f"Loss curve: {save_loss_curve(run_directory)}")
            if path := save_excess_loss(run_directory):
                say(f"Excess loss by kind of token: {path}")
            if path := save_block_stats(run_directory):
                say(f"Block statistics: {path}")
