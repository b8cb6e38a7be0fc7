"""Train a mini-GPT: python train.py [--config FILE]... [--section.field VALUE]..., or the same under a launcher.

`main` checks the settings and joins the other processes, `build_state` lets Accelerate prepare the model and the
optimizer, `train` is the loop, and `train_step` is one update of the weights. The model is in model/gpt.py, and the
data are in data/corpus.py.

A run is a function of

- its config, with the seed, and the data, models and checkpoint that the config names;
- its launch: device, mixed precision, number of processes, sharding;
- the code, the version of torch, the processor and the number of threads.

On a GPU this holds with `exact`: without it, some kernels add in another order each time. With `exact`, a run is also
the same on any number of processes that is a power of two and divides the number of micro-batches in a global batch;
each process uses one CPU thread. In fp32 and uncompiled, an exact run is the same on every x86-64 CPU with AVX2.

A checkpoint contains the weights and persistent buffers of the model, the optimizer's state, and three numbers: of
completed steps, skipped updates and training tokens. Everything else, such as the learning rate, the global batch and
the dropout masks of step s, is computed from the config and s.
"""

# run_and_exit parses the command line before the slow imports below, so that --help and errors are printed at once. It
# then imports this file as the module `train`, calls main(config) and exits.
if __name__ == "__main__":
    import sys

    sys.path.insert(0, __file__.rpartition("/")[0])  # where PYTHONSAFEPATH is set, Python leaves it out
    from runtime.cli.scripts import run_and_exit

    run_and_exit("train")

import gc
import math
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from data.corpus import Corpus
from data.loader import Batch, BatchLoader
from data.sampler import TokenCount
from model.gpt import GPTModel
from model.loss import MetricSums, count_targets
from runtime.config.schema import TrainConfig
from runtime.distributed.collectives import StopVote
from runtime.distributed.launch import join_launch
from runtime.distributed.launch_checks import check_launch, check_same_settings
from runtime.distributed.signals import Interrupted, Preempted, StopSignal
from runtime.distributed.state_hash import state_digest
from runtime.distributed.tree_reduce import AllReduce, TreeSum
from runtime.private_torch import foreach_mul_  # multiplies each tensor of a list in place
from trainer.block_stats import BlockStatistics
from trainer.checkpoint.provenance import provenance
from trainer.checkpoint.saver import Saver, load_checkpoint
from trainer.cuda_graph import GraphedMicroBatch
from trainer.ema import ema_weights
from trainer.evaluation import check_finite_val_loss, evaluate
from trainer.generations import LogTexts, sample_texts
from trainer.gradients import connect_parameters, fill_missing_gradients, first_backward, loss_scale
from trainer.graph_choice import choose_graph
from trainer.optimizer import apply_schedules, build_optimizer, learning_rates
from trainer.prepare_model import add_teacher, prepare_network
from trainer.pretrained.load import copy_initial_weights
from trainer.profiler import step_profiler
from trainer.results import Result, Results
from trainer.run import trackers
from trainer.run.directory import Run
from trainer.run.reporting import Reporter
from trainer.run.resolve import PretrainedModels, resolve
from trainer.run.resume import StartingPoint
from trainer.run.start import check_run, open_run, record_outcome
from trainer.run.summary import summary
from trainer.schedule import Due, due_after, is_due, scheduled_value
from trainer.state import TrainState
from trainer.throughput import Throughput, peak_flops


def main(config: TrainConfig) -> None:
    """Train until step `config.steps`, from the newest valid checkpoint of the run if there is one.

    Raises:
        ConfigError: a setting does not fit the launch, the data or the run, or an input is damaged.
        RunError: the run cannot continue, for example because the loss is NaN or a checkpoint cannot be written.
        Preempted: a signal, `stop_after` or the death of the launcher stopped the run, with a checkpoint of the last
            step that was completed.
    """
    run = Run.from_config(config)
    with record_outcome(run):  # writes to status.json how this session ends: finished, preempted or failed
        # Check everything that needs no other process, and load the data and the pretrained models.
        check_launch(config)
        config, corpus, pretrained = resolve(config, run)
        trackers.check(config)
        check_run(run, config)

        # Accelerate takes the device, mixed precision, and DDP or FSDP2, from `accelerate launch`. join_launch returns
        # `cpu`, `fsdp_plugin` and `kwargs_handlers`.
        accelerator = Accelerator(log_with=trackers.build_tracker(config, run), **join_launch(config))
        check_same_settings(config, accelerator, str(provenance()["code"]))
        stop_signal = StopSignal()  # from here on, a signal ends the run after a step, or within a long wait

        # Lock the run, find the checkpoint to resume from, and train.
        start = open_run(run, config, accelerator, stop_signal.requested)
        if start.step < config.steps or not start.evaluated:
            train(config, corpus, run, start, accelerator, stop_signal, pretrained)
        else:
            check_finite_val_loss(start.metrics, start.step)  # a run that failed this way fails again
            accelerator.print(f"{run.path} is complete: all {config.steps} steps are done.")
        accelerator.wait_for_everyone()  # the outcome is "finished" only if every process gets here
    accelerator.print("Training finished.")


def build_state(
    config: TrainConfig, run: Run, accelerator: Accelerator, pretrained: PretrainedModels, use_graph: bool = False
) -> TrainState:
    """Build the model and the optimizer, and let Accelerate prepare them.

    Accelerate moves the parameters to the device without making new objects, so the optimizer still refers to them.
    FSDP2 does make new ones, and Accelerate puts them into the optimizer.
    """
    # The seed gives the initial weights, unless `init_from` names a model.
    torch.manual_seed(config.seed)
    network = GPTModel(config.model)
    if pretrained.initial:
        copy_initial_weights(network, pretrained.initial)
    prepare_network(network, config, accelerator.device)  # compile, activation checkpointing, loss, CPU kernels, TF32
    if pretrained.teacher:
        add_teacher(network, pretrained.teacher.model, config, accelerator.device)
    optimizer = build_optimizer(network, config.optimizer, config.evaluation.ema_decay)
    block_statistics = BlockStatistics(network.blocks if config.tracking.block_stats else [], optimizer)

    if config.exact or use_graph:
        # The gradients are summed by a reducer of ours. evaluation_mode=True asks Accelerate for mixed precision
        # without DDP; it does not call model.eval().
        model = accelerator.prepare_model(network, evaluation_mode=True)
        optimizer = accelerator.prepare_optimizer(optimizer)
    else:
        # Neither a loader nor a scheduler: the batch and the learning rate are functions of the step.
        model, optimizer = accelerator.prepare(network, optimizer)

    results = Results.from_config(config, accelerator, run.path)
    state = TrainState(config, accelerator, network, model, optimizer, results, block_statistics)
    if config.exact:
        # An order of additions that does not depend on the number of processes.
        state.reducer = TreeSum(state.parameters, accelerator.process_index, accelerator.num_processes)
    elif use_graph and accelerator.num_processes > 1:
        # DDP's all-reduce would be part of the graph, which is replayed for every micro-batch, not only the last.
        state.reducer = AllReduce(state.parameters)
    if use_graph:
        is_optional = config.cuda_graph is None  # then the run trains without a graph if the memory does not suffice
        state.graph = GraphedMicroBatch(partial(forward_backward, state), network, is_optional)
    return state


def forward_backward(
    state: TrainState, batch: Batch, num_targets: Tensor, grad_scale: float, all_reduce: dist.Work | None = None
) -> tuple[Tensor, MetricSums]:
    """Add the gradients of a micro-batch, times `grad_scale`, to `.grad`.

    Args:
        state: provides the model and the accelerator.
        batch: the micro-batch.
        num_targets: the number of target tokens, 0-dim: local until `all_reduce` completes, then of the global batch.
        grad_scale: factor of the gradients.
        all_reduce: sums `num_targets` over the processes; None: one process, or the sum is complete.

    Returns:
        The summed loss divided by `num_targets`, and the auxiliary metrics.
    """
    _, loss_sum, metrics = state.model(**batch, num_items_in_batch=1.0)  # divisor 1, so the loss is a sum
    if all_reduce:
        all_reduce.wait()  # with NCCL only the CUDA stream waits, not the host
    loss = loss_sum / num_targets
    # In DDP, parameters that this micro-batch did not use get gradients of zero.
    state.accelerator.backward(connect_parameters(loss * grad_scale, state.model))
    return loss.detach(), metrics


def train_step(state: TrainState, step: int, micro_batches: list[Batch], stop: bool = False) -> None:
    """Update the weights once with the gradient of the mean loss over the target tokens of the global batch.

    An update whose loss or gradient is infinite or NaN is skipped with `on_nonfinite: skip`. With `stop` it is applied
    all the same, but `state.results` raises NonFiniteError before the weights can be saved.

    Args:
        state: updated in place.
        step: from 0.
        micro_batches: the local micro-batches of this step, in order.
        stop: whether this process asks all processes to stop; sent with the results of the step.

    Raises:
        NonFiniteError: `max_skipped_in_a_row` consecutive updates were skipped, and this one would be, too.
    """
    config, accelerator, results = state.config, state.accelerator, state.results

    # Set the learning rate and the other scheduled values of this step.
    apply_schedules(state.optimizer, state.network, config, step)

    # Count the target tokens of the global batch. The all-reduce overlaps the first forward, except with a CUDA graph.
    predicts_next_token = state.network.predicts_next_token
    num_targets = torch.stack([count_targets(batch["labels"], predicts_next_token) for batch in micro_batches]).sum()
    all_reduce = dist.all_reduce(num_targets, async_op=True) if results.num_processes > 1 else None

    # DDP and FSDP2 average gradients over the processes; multiply by their number to get the sum. A reducer already
    # sums. In fp16, `scale` also keeps gradients from underflowing.
    scale = loss_scale(accelerator.mixed_precision, step, results.skipped.total)
    grad_scale = scale * (1 if state.reducer else results.num_processes)

    # Run the forward and backward of each micro-batch. The processes exchange gradients in the last backward only. This
    # is what `accelerator.accumulate` does, but the divisor is the number of target tokens.
    compute = state.graph or partial(forward_backward, state)
    outputs = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        state.seed_micro_batch(step, index, len(micro_batches))  # seeds dropout
        with nullcontext() if is_last else accelerator.no_sync(state.model):
            outputs.append(compute(batch, num_targets, grad_scale, all_reduce))
        if state.reducer:
            state.reducer.add_micro_batch(num_micro_batches=len(micro_batches))

    # Send the losses to all processes while the gradients are clipped.
    results.start_gather(step + 1, outputs, num_targets, stop=stop)

    # Fill in gradients of parameters that no micro-batch used, and undo the scale of fp16.
    gradients = fill_missing_gradients(state.parameters)
    if scale != 1:
        foreach_mul_(gradients, 1 / scale)

    # Clip the gradients by their global norm, unless grad_clip is null.
    max_norm = scheduled_value("grad_clip", config.optimizer.grad_clip, config, step) or math.inf
    results.add_grad_norm(accelerator.clip_grad_norm_(state.parameters, max_norm))

    # Update the weights. With `skip` the host waits here for the result of this step.
    if config.on_nonfinite != "skip" or results.current().finite:
        state.optimizer.step()
    state.optimizer.zero_grad()


def train(
    config: TrainConfig,
    corpus: Corpus,
    run: Run,
    start: StartingPoint,
    accelerator: Accelerator,
    stop_signal: StopSignal,
    pretrained: PretrainedModels,
) -> None:
    """Train from `start.step` to the last step; called by all processes together."""
    # Build the model and the optimizer, and load the checkpoint. To choose, a child process may build a state, too.
    graph = choose_graph(config, accelerator, start.step, build_state, stop_signal.requested)
    state = build_state(config, run, accelerator, pretrained, graph.use)
    if start.checkpoint:
        load_checkpoint(start.checkpoint, state)

    # Load batches from `start.step` on: the global batch of a step is a function of the config and the step.
    global_batches = corpus.global_batches(config)
    loader = BatchLoader(
        corpus.train,
        global_batches,
        config.micro_batch_size,
        accelerator.device,
        accelerator.process_index,
        accelerator.num_processes,
        num_workers=config.data.num_workers,
        timeout_seconds=config.timeout_seconds / 2,  # fail before the collectives of the other processes time out
    )
    count_tokens = TokenCount(global_batches.sizes, config.seq_len, start.step, start.tokens)
    throughput = Throughput(count_tokens, state.network.flops_per_token(config.seq_len), peak_flops(accelerator))

    accelerator.init_trackers(config.run_name)  # W&B or TensorBoard; the reporter finishes them at its exit
    with (
        Reporter(config, run, start.step, accelerator, throughput) as reporter,
        Saver(
            run.checkpoints,
            config,
            accelerator,
            count_tokens,
            sync_metrics=reporter.sync,
            record_progress=run.record_progress,
            has_tokenizer=corpus.tokenizer is not None,
            has_conversations=corpus.has_conversations,
            saved_step=start.step if start.checkpoint and not start.is_branch else None,
        ) as saver,
        closing(loader.batches(start.step, config.steps)) as batches,
        step_profiler(config.profile, start.step, run.path, accelerator.process_index) as profiler,
    ):
        total_tokens = count_tokens(config.steps)
        reporter.say(summary(config, accelerator, state.network, run.path, start, corpus, total_tokens, graph))
        warm_up(state, loader.load(start.step)[0])  # compiles, and fixes the order of DDP's buckets
        vote = StopVote(stop_signal.requested, config.timeout_seconds)
        evaluate_and_sample = partial(evaluate_state, state, corpus, log_texts=reporter.log_texts, should_stop=vote)

        # Evaluate the initial model, or a checkpoint that was saved before its evaluation.
        metrics: dict[str, Any] = dict(start.metrics)
        if not start.evaluated:
            metrics = metrics or {"state/digest": str(state_digest(state.network, state.optimizer))}  # at step 0
            try:
                metrics |= evaluate_and_sample(start.step)
            except Interrupted:
                raise Preempted(stop_message(start.step)) from None
            finally:
                reporter.log(start.step, metrics)
                accelerator.log(metrics, step=start.step)
            saver.add_evaluation(start.step, metrics)

        gc.freeze()  # exempts the objects created so far, which live to the end, from garbage collection
        throughput.restart(start.step)
        for step in range(start.step, config.steps):
            completed_steps = step + 1
            due = due_after(completed_steps, config)
            if profiler:
                profiler.step()

            # Update the weights. Block statistics come from hooks, which a CUDA graph would not run.
            with state.block_statistics.record(due.log, state.graph):
                train_step(state, step, next(batches), stop=stop_signal.requested() or saver.failed)

            # Wait for this step's result only if an action needs it; otherwise take the previous step's.
            result = state.results.current() if due.anything else state.results.latest()
            is_asked_to_stop = result is not None and result.stop  # in the same step on all processes
            if is_asked_to_stop:
                result, due = state.results.current(), due.and_stop()
            metrics = step_metrics(state, result, due, completed_steps, throughput)

            # Save before an evaluation: a kill in the evaluation then does not lose a checkpoint that is due.
            is_evaluated = not due.evaluate
            if due.save:
                saver.save(completed_steps, state, metrics, is_evaluated)
            if due.evaluate and not is_asked_to_stop:
                try:
                    metrics |= evaluate_and_sample(completed_steps)
                    is_evaluated = True
                except Interrupted:
                    due = due.and_stop()

            # Log to metrics.jsonl and the screen, and to the tracker. Add the evaluation to the checkpoint.
            reporter.log(completed_steps, metrics)
            accelerator.log(metrics, step=completed_steps)
            if due.evaluate and is_evaluated:
                saver.add_evaluation(completed_steps, metrics)

            # Stop. If an evaluation was interrupted in a step that saves nothing, the checkpoint is written here.
            if due.stop and not (is_evaluated and completed_steps == config.steps):
                saver.save(completed_steps, state, metrics, is_evaluated)
                saver.wait(must_succeed=True)
                raise Preempted(stop_message(completed_steps))
            if due.evaluate or due.save:
                throughput.restart(completed_steps)  # excludes the time of the evaluation and of the save

        saver.wait(must_succeed=True)
        check_finite_val_loss(metrics, config.steps)
        reporter.say(f"The run is in {run.path}.")


def step_metrics(
    state: TrainState, result: Result | None, due: Due, completed_steps: int, throughput: Throughput
) -> dict[str, Any]:
    """Return the metrics of a step: {} if nothing is due, else the state's digest, and all if the step is logged.

    The digest of the weights and the optimizer's state shows whether two runs are the same. The processes compare
    theirs, unless `check_replicas_every` is 0. Computing it waits for the update, so the throughput measured afterwards
    covers whole steps.
    """
    if not due.anything:
        return {}
    digest = state_digest(state.network, state.optimizer)
    if state.config.check_replicas_every:
        digest.check_replicas(completed_steps)
    metrics: dict[str, Any] = {"state/digest": str(digest)}
    if due.log:
        assert result is not None, "`current` returned it"
        metrics |= {f"train/{name}": mean for name, mean in result.means.items()}
        metrics |= learning_rates(state.optimizer) | {"train/grad_norm": result.grad_norm}
        metrics |= state.block_statistics.metrics | throughput.measure(completed_steps)
        if state.config.on_nonfinite == "skip":
            metrics["train/skipped"] = state.results.skipped.total
    return metrics


def evaluate_state(
    state: TrainState, corpus: Corpus, completed_steps: int, log_texts: LogTexts, should_stop: StopVote
) -> dict[str, float]:
    """Evaluate, if it is due, and sample texts; use the EMA of the weights if there is one. Return the metrics.

    Raises:
        Interrupted: on all processes, if one of them was asked to stop before the last two batches.
    """
    config, model, accelerator, metrics = state.config, state.model, state.accelerator, {}
    with ema_weights(state.optimizer):
        if is_due(config.evaluation.every, config, completed_steps):
            batch_size = config.evaluation.micro_batch_size
            metrics |= evaluate(model, corpus, batch_size, accelerator, should_stop=should_stop)
        # Step 0 samples no texts. NaN probabilities cannot be sampled from; 0.0 stands for no evaluation.
        if completed_steps > 0 and math.isfinite(metrics.get("val/loss", 0.0)):
            metrics |= sample_texts(model, corpus, config, accelerator, completed_steps, log_texts, should_stop)
    return metrics


def stop_message(completed_steps: int) -> str:
    """Say why the session ended early."""
    return f"stopped after step {completed_steps}; run the same command again to resume (without --resume never)"


def warm_up(state: TrainState, micro_batch: Batch) -> None:
    """Run one forward and backward and discard the gradients; called by all processes together.

    This fixes the order of DDP's buckets (see first_backward), so that a resumed run sums the gradients in the same
    order. With `compile`, it compiles the blocks and the loss. It also registers the names of the metrics that the
    model reports. Buffers that a fork's forward changes, like those of BatchNorm, change once more here, so such a
    model does not resume bit for bit.
    """
    _, loss, metrics = state.model(**micro_batch, num_items_in_batch=1.0)
    first_backward(loss, state.model, state.accelerator)
    state.optimizer.zero_grad()
    state.results.register_names(metrics)  # steps send the values of the metrics without their names
