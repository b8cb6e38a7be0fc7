"""Train a mini-GPT: python train.py [--config FILE]... [--section.field VALUE]..., or the same under a launcher.

A run is a function of its config, which contains the seed, of its data, of the models and the checkpoint that the
config names (`init_from`, `teacher.path`, `branch_from`), of its launch (device, mixed precision, number of processes,
sharding) and of what computes it: the code, the version of torch, the processor and the number of threads. A GPU is the
exception: without `exact`, some of its kernels add in another order each time. With `exact`, each process uses one CPU
thread, and a run is the same on any number of processes that is a power of two and divides the number of micro-batches
in a global batch. In fp32 and uncompiled, an exact run is also the same on every x86-64 CPU with AVX2.

The state of a run is the weights and buffers of the model, the optimizer's state (with the EMA of the weights, if there
is one), the step s, two counters of skipped updates (in total and in a row), and the number of training tokens. In a
branch, which continues a checkpoint of another run (`branch_from`), the tokens do not follow from s, because the global
batches of that run may have had other sizes. Everything else is computed from the config, s and the counters: the
learning rate, the global batch, the random draws and, in fp16, the loss scale.
"""

# run_and_exit parses the command line before the slow imports below, so that --help and errors are printed at once. It
# then imports this file as the module `train`, calls main(config) and exits.
if __name__ == "__main__":
    from runtime.cli.scripts import run_and_exit

    run_and_exit("train")

import gc
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from data.corpus import Corpus
from data.loader import Batch, BatchLoader
from model.gpt import GPTModel
from model.loss import MetricSums, count_targets
from runtime.config.schema import TrainConfig
from runtime.distributed.launch import start_accelerator
from runtime.distributed.launch_checks import check_launch, check_same_settings
from runtime.distributed.sharding import full_tensor
from runtime.distributed.signals import Preempted, StopSignal
from runtime.distributed.state_hash import state_digest
from runtime.distributed.tree_reduce import AllReduce, TreeSum
from runtime.private_torch import foreach_mul_  # multiplies each tensor of a list in place
from trainer.block_stats import BlockStatistics
from trainer.checkpoint.saver import Saver, load_checkpoint
from trainer.cuda_graph import GraphedMicroBatch
from trainer.ema import ema_weights
from trainer.evaluation import check_finite_val_loss, evaluate
from trainer.generations import sample_texts
from trainer.gradients import backward, fill_missing_gradients, first_backward, loss_scale, trainable_parameters
from trainer.graph_choice import choose_graph
from trainer.optimizer import apply_schedules, build_optimizer, learning_rates
from trainer.prepare_model import add_teacher, prepare_network
from trainer.pretrained.load import copy_initial_weights
from trainer.profiler import step_profiler
from trainer.results import Results
from trainer.run import trackers
from trainer.run.directory import Run
from trainer.run.reporting import Reporter
from trainer.run.resolve import PretrainedModels, resolve
from trainer.run.resume import StartingPoint
from trainer.run.start import check_run, open_run, record_outcome
from trainer.run.summary import summary
from trainer.schedule import is_due, scheduled_value
from trainer.state import TrainState
from trainer.throughput import Throughput, peak_flops


def main(config: TrainConfig) -> None:
    """Train until step `config.steps`.

    Start from the newest valid checkpoint of the run, else from `config.branch_from`, else from step 0.

    Raises:
        ConfigError: the settings do not fit the launch, the data, the run directory or the models that they name, or
            the data or all checkpoints are damaged.
        RunError: the run cannot continue, for example because the loss is NaN, the processes' states differ, or a
            checkpoint cannot be written.
        Preempted: a signal, `stop_after` or the death of the launcher stopped the run, after saving a checkpoint.
    """
    run = Run.from_config(config)
    # On exit, write to status.json how the session ended: finished, preempted or failed. A session writes nothing if it
    # fails before `open_run` has locked the run, or because its settings are not those of the run.
    with record_outcome(run):
        # Before the process group exists, check what needs no communication: the launch, the settings, the tracker, and
        # that the run directory can be written. `resolve` also loads the data and the models of `teacher.path` and
        # `init_from`, and fills in the null settings that depend on them, on the launch or on the existing run. If the
        # run has a checkpoint, the initial model is loaded only if `init_from` was changed, to compare its hash.
        check_launch(config)
        config, corpus, models = resolve(config, run)
        trackers.check(config)
        check_run(run, config)

        # Join the other processes, and install the signal handlers that stop the run after a step.
        accelerator = start_accelerator(config)
        check_same_settings(config, accelerator)
        stop_signal = StopSignal()

        # Lock the run directory, choose the checkpoint to start from, and train.
        start = open_run(run, config, accelerator)
        if start.step < config.steps:
            train(config, corpus, run, start, accelerator, stop_signal, models)
        else:
            # A run whose last validation loss was NaN has failed, and fails again when its command is repeated.
            check_finite_val_loss(start.metrics, start.step)
            accelerator.print(f"{run.path} is complete: all {config.steps} steps are done.")
        accelerator.wait_for_everyone()  # the outcome is "finished" only if every process gets here
    accelerator.print("Training finished.")


def train(
    config: TrainConfig,
    corpus: Corpus,
    run: Run,
    start: StartingPoint,
    accelerator: Accelerator,
    stop_signal: StopSignal,
    models: PretrainedModels,
) -> None:
    """Train from `start.step` to the last step; called by all processes together."""
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device

    # Build the model and the optimizer, and load their state. With `cuda_graph: null`, where a CUDA graph may help, a
    # trial in a child process decides whether the steps use one; a signal ends it early. The summary below prints what
    # it found. Only `state.config` contains the decision: `config`, which checkpoints store, keeps null, and each
    # session decides again. In `state`, `network` is the GPTModel, and `model` is what Accelerate made of it, such as
    # DDP.
    build = partial(build_for_trial, config, start.step)
    use_graph, trial = choose_graph(config, accelerator, start.step, build, stop_signal.requested)
    state = build_state(config.replace(cuda_graph=use_graph), run, accelerator, models)
    if state.graph:
        # With null, training continues without the graph if the memory does not suffice to capture it.
        state.graph.is_optional = config.cuda_graph is None
    if start.checkpoint:
        load_checkpoint(start.checkpoint, state)
    # With `tracking.block_stats`, measure the norms of the weights, clipped gradient and update of each block, and the
    # root mean square of its output. Hooks of the optimizer measure the norms, and hooks of the blocks the outputs.
    block_statistics = BlockStatistics(state.network.blocks if config.tracking.block_stats else [], state.optimizer)

    # Prepare to load the data. Global batch s is a function of (config, s), so there is no position to restore.
    global_batches = corpus.global_batches(config)
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

    # `since` is the step and the number of training tokens of the checkpoint. That number cannot be computed from the
    # step, because the global batches of a branch's parent may have had other sizes.
    throughput = Throughput(
        batch_sizes=global_batches.sizes,
        seq_len=config.seq_len,
        flops_per_token=state.network.flops_per_token(config.seq_len),
        peak_flops=peak_flops(accelerator),
        since=(start.step, start.tokens),
    )

    # Before a checkpoint counts as complete, the saver calls `sync_metrics`, which brings the logged rows to the disk;
    # after that it calls `record_progress`, which writes the step to status.json. If the data have no tokenizer, each
    # checkpoint records that, so that sample.py and other scripts do not look for one.
    with (
        Reporter(config, run, start.step, accelerator, throughput) as reporter,
        Saver(
            run.checkpoints,
            config,
            accelerator,
            sync_metrics=reporter.sync,
            record_progress=run.record_progress,
            has_tokenizer=corpus.tokenizer is not None,
        ) as saver,
        step_profiler(config.profile, start.step, run.path, rank) as profiler,
    ):
        reporter.say(summary(state.config, accelerator, state.network, run.path, start, corpus, trial))

        # One forward and backward without an update fixes the order of DDP's buckets and, with `compile`, compiles.
        warm_up(state, loader.load(start.step)[0])

        # A run that starts at step 0 evaluates its initial model, unless it never evaluates, or only at the end.
        if start.step == 0 and 0 < config.evaluation.every < config.steps:
            digest = state_digest(state.network, state.optimizer)
            initial = evaluate(state.model, corpus, config.evaluation.micro_batch_size, accelerator)
            reporter.log(0, {"state/digest": str(digest)} | initial)
        gc.freeze()  # exempts the objects created so far, which live to the end, from garbage collection
        throughput.restart(start.step)

        metrics: dict[str, Any] = {}  # of the newest step; after the loop, of the final one
        for step, micro_batches in enumerate(loader.batches(start.step, config.steps), start.step):
            # Logs, evaluations, checkpoints and traces are numbered by completed steps; the initial model is 0.
            completed = step + 1
            if profiler:
                profiler.step()  # tells the profiler that step number `completed` begins

            # Decide what to do after this step. An action is due every so many steps and after the last one; with 0 it
            # is never due.
            log_now = is_due(config.tracking.log_every, config, completed)
            eval_now = is_due(config.evaluation.every, config, completed)
            stop_now = completed == config.stop_after and completed < config.steps
            save_now = is_due(config.checkpoint.every, config, completed) or stop_now

            # Record the statistics of the blocks, if they are enabled, in steps that log. A recorded step uses no CUDA
            # graph, because a graph would not run the hooks.
            with block_statistics.record(log_now):
                # After a signal or a failed save, ask all processes to stop. They see the request in the result of this
                # step, which may be read one step later, and stop together. If a save failed, `saver.save` below raises
                # its error. With `checkpoint.on_failure: continue`, `failed` stays False.
                stop = stop_signal.requested() or saver.failed
                train_step(state, step, micro_batches, stop, use_graph=not block_statistics.recording)

            # With `wait`, the host waits for the loss and the gradient norm of this step. Otherwise `read` returns the
            # result of the previous step while the device computes this one; in the first step of a session that is
            # None. If updates may be skipped, train_step has waited already, and `read` returns this step's result.
            result = state.results.read(wait=log_now or eval_now or save_now)

            # Has a process asked to stop? The results of a step contain the flags of all processes, so all of them
            # see a flag in the same step. A stop saves a checkpoint of this step, which must be finite. So if the flag
            # is in the result of the previous step, `read` waits for the result of this step too.
            if result is not None and result.stop:
                save_now = True
                stop_now = completed < config.steps  # the last step ends the run anyway

            # Hash the weights and the optimizer's state; the host waits for the device here. Logs and checkpoints keep
            # the hash, which shows whether two runs are the same. The processes compare their hashes every
            # `check_replicas_every` steps and, unless that is 0, before a checkpoint.
            metrics = {}  # of this step
            check_every = config.check_replicas_every
            check_replicas_now = is_due(check_every, config, completed) or (save_now and check_every > 0)
            if log_now or eval_now or save_now or check_replicas_now:
                digest = state_digest(state.network, state.optimizer)
                if check_replicas_now:
                    digest.check_replicas(completed)
                metrics["state/digest"] = str(digest)

            # The metrics of this step. The digest waited for the update, so the throughput is that of whole steps.
            if log_now:
                assert result is not None, "with `wait`, `read` returns the result of this step"
                metrics |= {f"train/{name}": mean for name, mean in result.means.items()}
                metrics |= learning_rates(state.optimizer) | {"train/grad_norm": result.grad_norm}
                metrics |= block_statistics.metrics | throughput.measure(completed)
                if config.on_nonfinite == "skip":
                    metrics["train/skipped"] = state.results.skipped.total

            # Evaluate and sample texts, from the EMA of the weights if there is one. A run without evaluations has no
            # `val/loss`; it samples texts after its last step nevertheless.
            if eval_now or completed == config.steps:
                with ema_weights(state.optimizer):
                    if eval_now:
                        metrics |= evaluate(state.model, corpus, config.evaluation.micro_batch_size, accelerator)
                    if math.isfinite(metrics.get("val/loss", 0.0)):  # NaN probabilities cannot be sampled from
                        metrics |= sample_texts(state.model, corpus, config, accelerator, completed, reporter.log_texts)

            # Log the metrics, if there are any. Save in the background, unless `checkpoint.asynchronous` is false. The
            # last checkpoint must be complete before the run ends.
            reporter.log(completed, metrics)
            if save_now:
                tokens = global_batches.sizes.tokens(completed, config.seq_len, since=(start.step, start.tokens))
                saver.save(completed, tokens, state, metrics)
            if stop_now or completed == config.steps:
                saver.wait(must_succeed=True)
            if stop_now:
                raise Preempted(
                    f"stopped after step {completed}; run the same command again to resume (without --resume never)"
                )
            if eval_now or save_now:
                throughput.restart(completed)  # excludes the time of the evaluation and of the save

        check_finite_val_loss(metrics, config.steps)
        reporter.say(f"The run is in {run.path}.")


def train_step(
    state: TrainState, step: int, micro_batches: list[Batch], stop: bool = False, use_graph: bool = True
) -> None:
    """Update the weights once with the gradient of the mean loss over the target tokens of the global batch.

    Args:
        state: updated in place.
        step: from 0.
        micro_batches: the local micro-batches of this step, in order.
        stop: whether this process asks all processes to stop; sent with the results of the step.
        use_graph: whether to replay `state.graph`, if there is one; a graph runs no hooks of modules.

    Raises:
        NonFiniteError: with `on_nonfinite: skip`, if more than `max_skipped_in_a_row` consecutive updates had an
            infinite or NaN loss or gradient. With `on_nonfinite: stop`, `state.results.read` raises it, at most a step
            later.
    """
    config, accelerator, model, results = state.config, state.accelerator, state.model, state.results

    # Set the scheduled values of this step: in the optimizer, such as the learning rate, and in the modules of the
    # network, such as dropout.
    apply_schedules(state.optimizer, state.network, config, step)

    # Count the local target tokens, and start the all-reduce that adds up the counts of all processes. It overlaps the
    # first forward, but a CUDA graph waits for it first. `results.num_processes` may be less than in the launch: to
    # check DDP, verify.py also calls train_step on each process alone, with `results.num_processes` 1.
    predicts_next_token = state.network.predicts_next_token
    num_targets = torch.stack([count_targets(batch["labels"], predicts_next_token) for batch in micro_batches]).sum()
    all_reduce = dist.all_reduce(num_targets, async_op=True) if results.num_processes > 1 else None

    # Compute the factor of the gradients. In fp16 `scale` keeps them from underflowing; otherwise it is 1. It is a
    # function of the step and of the number of skipped updates, so there is no state of a GradScaler to save. DDP and
    # FSDP2 average the gradients over the processes, so multiply by their number to get the sum. A reducer computes the
    # sum, without this factor.
    scale = loss_scale(accelerator.mixed_precision, step, results.skipped.total)
    grad_scale = scale * (1 if state.reducer else results.num_processes)

    # Run the forward and backward of each micro-batch. DDP and FSDP2 exchange gradients in the last backward only.
    compute = state.graph if state.graph and use_graph else partial(forward_backward, state)
    outputs = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        # Seed dropout by the micro-batch's index in the global batch (computed from `index` and the rank), so that the
        # dropout masks do not depend on the number of processes.
        state.seed_micro_batch(step, index, len(micro_batches))
        with nullcontext() if is_last else accelerator.no_sync(model):
            outputs.append(compute(batch, num_targets, grad_scale, all_reduce))
        if state.reducer:
            # The reducer counts the micro-batches. Until the last one, it may keep their gradients and clear `.grad`;
            # at the last one, it sets `.grad` to the sum over all micro-batches of all processes.
            state.reducer.add_micro_batch(num_micro_batches=len(micro_batches))

    # Send the losses and metrics to all processes while the gradients are clipped.
    results.start_gather(step + 1, outputs, num_targets, stop=stop)

    # Set the gradients of parameters that no micro-batch used, such as idle experts, to zero, as DDP and the reducers
    # do. The optimizer would skip a parameter without a gradient. Then undo the scale of fp16.
    gradients = fill_missing_gradients(state.parameters)
    if scale != 1:
        foreach_mul_(gradients, 1 / scale)

    # Clip them by their global norm. grad_clip may be scheduled; None and 0 disable clipping.
    max_norm = scheduled_value("grad_clip", config.optimizer.grad_clip, config, step) or math.inf
    # FSDP2's norm is a DTensor.
    grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(state.parameters, max_norm))
    results.add_grad_norm(grad_norm)

    # Update the weights. If updates may be skipped, the host waits here for the result of this step. Otherwise an
    # update that is not finite is applied, and `read` raises before it can be saved.
    result = results.read(wait=True) if config.on_nonfinite == "skip" else None
    if result is None or result.finite:
        state.optimizer.step()
    # This sets `.grad` to None. A CUDA graph is not affected: it keeps its gradients in buffers of its own.
    state.optimizer.zero_grad()


def forward_backward(
    state: TrainState, batch: Batch, num_targets: Tensor, grad_scale: float, all_reduce: dist.Work | None = None
) -> tuple[Tensor, MetricSums]:
    """Add the gradients of a micro-batch, times `grad_scale`, to `.grad`.

    Args:
        state: has the model and the accelerator.
        batch: the micro-batch.
        num_targets: the number of target tokens in the global batch, 0-dim, once `all_reduce` is complete.
        grad_scale: factor of the gradients.
        all_reduce: sums `num_targets` over the processes; None: one process, or the sum is complete.

    Returns:
        The summed loss divided by `num_targets`, and the auxiliary metrics.
    """
    _, loss_sum, metrics = state.model(**batch, num_items_in_batch=1.0)  # divided by 1, so it is a sum
    if all_reduce:
        # After the first micro-batch `wait` returns at once. With NCCL only the CUDA stream waits, not the host.
        all_reduce.wait()
    loss = loss_sum / num_targets
    backward(loss * grad_scale, state.model, state.accelerator)
    return loss.detach(), metrics


def warm_up(state: TrainState, micro_batch: Batch) -> None:
    """Run one forward and backward and discard the gradients; called by all processes together.

    This fixes the order of DDP's buckets (see first_backward), so that a resumed run sums the gradients in the same
    order. With `compile`, it compiles the model. It also registers the names of the metrics that the model reports.
    Buffers that a fork's forward changes, like those of BatchNorm, change once more here, so such a model does not
    resume bit for bit.
    """
    _, loss, metrics = state.model(**micro_batch, num_items_in_batch=1.0)
    first_backward(loss, state.model, state.accelerator)
    state.optimizer.zero_grad()
    state.results.register_names(metrics)  # steps send the values of the metrics without their names


def build_state(config: TrainConfig, run: Run, accelerator: Accelerator, models: PretrainedModels) -> TrainState:
    """Build the model and the optimizer, and prepare them with Accelerate."""
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device

    # Build the network on the CPU; the seed gives the initial weights. Accelerate moves the parameters to the device
    # below, without making new objects, so the optimizer still refers to them. FSDP2 does make new ones, and Accelerate
    # puts them into the optimizer.
    torch.manual_seed(config.seed)
    network = GPTModel(config.model)
    if models.initial:
        copy_initial_weights(network, models.initial)
    prepare_network(network, config, device)  # CPU kernels, tf32, torch.compile, activation checkpointing, chunked loss
    if models.teacher:
        add_teacher(network, models.teacher.model, config, device)
    optimizer = build_optimizer(network, config.optimizer, config.evaluation.ema_decay)

    # Choose what sums the gradients over the processes: a reducer, or DDP or FSDP2.
    reducer = None
    if config.exact or config.cuda_graph:
        # `exact` needs an order of additions that does not depend on the number of processes. One CUDA graph is
        # replayed for every micro-batch, so an all-reduce of DDP in it would run for all of them, not only the last.
        # evaluation_mode=True keeps Accelerate from wrapping the model in DDP; it does not call model.eval().
        model = accelerator.prepare_model(network, evaluation_mode=True)
        if config.exact:
            reducer = TreeSum(trainable_parameters(network), rank, num_processes)
        elif num_processes > 1:
            reducer = AllReduce(trainable_parameters(network))
    else:
        # Step the optimizer without Accelerate's wrapper, which looks up installed packages in every step: 0.23 ms on a
        # Zen 3 (benchmarks/LOG.md, 2026-11-22). train_step scales the loss in fp16 itself: Accelerate's scaler is off
        # (runtime/distributed/launch.py).
        model, wrapped = accelerator.prepare(network, optimizer)
        optimizer = wrapped.optimizer

    # With 0, the first loss or gradient that is not finite raises.
    max_skipped_in_a_row = config.max_skipped_in_a_row if config.on_nonfinite == "skip" else 0
    results = Results(rank, num_processes, device, max_skipped_in_a_row, run.path)  # its error names run.path
    state = TrainState(config, accelerator, network, model, optimizer, results, reducer)
    if config.cuda_graph:
        state.graph = GraphedMicroBatch(partial(forward_backward, state), network)
    return state


def build_for_trial(config: TrainConfig, step: int) -> tuple[TrainState, list[Batch]]:
    """Build a state with a CUDA graph, and load two micro-batches; called in the child process.

    The trial captures a graph of the first micro-batch and checks the gradients that the graph computes for the second.
    If step `step` has only one micro-batch, the second one is from the next step.
    """
    run = Run.from_config(config)
    config, corpus, models = resolve(config.replace(cuda_graph=True), run)
    accelerator = start_accelerator(config)
    state = build_state(config, run, accelerator, models)
    loader = BatchLoader(corpus.train, corpus.global_batches(config), config.micro_batch_size, accelerator.device)
    return state, [*loader.load(step), *loader.load(step + 1)][:2]
