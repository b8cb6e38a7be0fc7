"""Proves what this repository promises, on your machine, under your launch file and with your changes:

    accelerate launch --config_file accelerate_configs/cpu.yaml verify.py [--config FILE]... [--section.field VALUE]...

takes the arguments of train.py, trains that model for a few steps in several ways and prints for each promise PASS with
the figure behind it, FAIL with the cause, or SKIP with why it is none here. It trains 6 steps, or `--verify_steps N`:
what begins later, as an optimizer that does something more at every 10th update, is not seen before.

Exit code 0: none failed. 1: one did. 2: bad settings. 75 or 130: a signal stopped it, and what it had not reached is
not known.
"""

from argparse import ArgumentParser

SHORT = """--check_replicas_every 1 --evaluation.num_samples 8 --evaluation.num_scored_generations 0
    --tracking.log_every 1 --evaluation.num_logged_generations 0 --resume auto --schedule.name constant
    --checkpoint.every 1 --checkpoint.keep 1
    --init_from null --schedule.warmup_steps 0 --schedule.decay_steps null --schedule.batch_warmup_steps 0
    --tracking.tracker wandb --tracking.wandb disabled""".split()


def settings_of_a_short_run(words: list[str]) -> list[str]:
    """From the words of a command line of verify.py to those of train.py."""
    parser = ArgumentParser("verify.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6")
    own, words = parser.parse_known_args(words)
    return [*words, *SHORT, "--steps", own.verify_steps]


if __name__ == "__main__":  # before anything slow is imported
    import sys

    from cli.scripts import run_and_exit

    sys.argv[1:] = settings_of_a_short_run(sys.argv[1:])
    run_and_exit("verify")

import contextlib
import json
import math
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import default_collate

import train
from checkpoint import saver, storage
from checks.gradients import gradient_errors
from checks.model import (
    check_cached_logits,
    check_constant_init,
    check_flops,
    check_isolated_documents,
    check_masks,
    check_transformers_logits,
    find_unsaved_state,
)
from config.errors import ConfigError, RunError
from config.resolve import replace_settings
from config.schema import TrainConfig
from data.loader import split_micro_batches
from data.sampler import GlobalBatches
from distributed.cpu import use_portable_arithmetic
from distributed.launch import num_shards, start_accelerator
from distributed.launch_checks import check_launch
from distributed.nested import broadcast_from_main, nested_training
from distributed.sharding import full_tensor
from distributed.signals import Preempted
from distributed.tree_reduce import TreeSum
from model.config import FAMILIES
from model.gpt import GPTModel
from run.resolve import resolve
from training.block_stats import BlockStatistics, total_norm
from training.gradients import trainable_parameters, zero_missing_gradients
from training.metrics import StepMetrics
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network
from training.step import GradientReducer, TrainState, train_step


@dataclass
class Trained:
    """What a training gave."""

    rows: list[dict]
    """Of metrics.jsonl."""
    gradient: list[Tensor]
    """Of the parameters at the first update, in the order of the optimizer's groups."""
    state: dict[str, Tensor]
    """Weights and moments after the last step, as a checkpoint names them."""


def gradient_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """That of all that it updates, in the order of its groups."""
    return [full_tensor(weight.grad).clone() for group in optimizer.param_groups for weight in group["params"]]


@contextlib.contextmanager
def gradient_of_first_update() -> Iterator[list[Tensor]]:
    """A list that the first update of any optimizer fills."""
    gradient: list[Tensor] = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: None if gradient else gradient.extend(gradient_of(optimizer))
    )
    try:
        yield gradient
    finally:
        hook.remove()


class Autocast(nn.Module):
    """A model in the precision of the launch, without any other preparation by Accelerate."""

    def __init__(self, network: GPTModel, accelerator: Accelerator):
        super().__init__()
        self.network, self.accelerator = network, accelerator

    def forward(self, **inputs: Tensor) -> tuple:
        """Return the outputs of the network."""
        with self.accelerator.autocast():
            return self.network(**inputs)


class AllReduce:
    """The hand-written all-reduce of the tutorials: one sum over the processes for each gradient, after the last
    micro-batch."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.num_added = parameters, 0

    def add_micro_batch(self, accumulation: int) -> None:
        """Count a micro-batch, whose gradients backward has added up; after the last sum them over the processes."""
        self.num_added += 1
        if self.num_added % accumulation == 0:
            zero_missing_gradients(self.parameters)
            for parameter in self.parameters if dist.is_initialized() else ():
                dist.all_reduce(parameter.grad)


class Verification:
    """The checks; each returns whether the promise holds (None: it is none here), and the figure or the reason."""

    def __init__(self, config: TrainConfig):
        self.accelerator = start_accelerator(config)
        self.rank, self.num_processes = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device
        first = config.schedule.batch_warmup_from
        batch = config.global_batch_size or 2 * (first or config.micro_batch_size * self.num_processes)
        short = {
            "out_dir": self.own_directory(Path(config.out_dir).expanduser()),
            "global_batch_size": batch,
            "schedule.batch_warmup_steps": config.steps - 1 if first else None,
            # 0: there may be nothing to evaluate on
            "evaluation.every": config.evaluation.every and config.steps // 2,
        }
        self.config, self.corpus, _ = resolve(replace_settings(config, short))
        # float32 sums of another order differ in the 6th digit; bfloat16 products, in the 3rd.
        self.tolerance = 1e-4 if self.accelerator.mixed_precision == "no" else 3e-2
        self.shards = num_shards(self.accelerator)
        self.can_be_exact = self.shards == 1 and self.num_processes & (self.num_processes - 1) == 0

    def own_directory(self, out_dir: Path) -> str:
        """A new directory below `out_dir`, the same on all processes: what lies there is nobody else's."""
        made = None
        if self.rank == 0:
            with contextlib.suppress(OSError):
                out_dir.mkdir(parents=True, exist_ok=True)
                made = tempfile.mkdtemp(prefix="verify-", dir=out_dir)
        if (directory := broadcast_from_main(made)) is None:
            raise ConfigError(f"out_dir: {str(out_dir)!r}: cannot write there")
        return directory

    def checks(self) -> dict[str, Callable[[], tuple[bool | None, str]]]:
        """Promises, and how to find out whether they hold; each check is called by all processes together."""
        model = self.config.model
        return {
            "order is a permutation in every epoch": self.order_is_a_permutation,
            **{
                f"logits = transformers' {family}": partial(check_transformers_logits, family, model)
                for family in FAMILIES
            },
            "writing, with a cache = the whole at once": partial(check_cached_logits, model, self.config.seq_len),
            "isolated documents = each document alone": partial(check_isolated_documents, model, self.config.seq_len),
            "masks of both kernels = their definition": partial(check_masks, model, self.config.seq_len),
            "FLOPs a token = products that torch counts": partial(check_flops, model, self.config.seq_len),
            "constant initial weights stay constant": partial(check_constant_init, model),
            "gradient = autograd of plain operations": self.equals_autograd,
            "replicas are equal after every step": self.replicas_are_equal,
            "gradient = hand-written all-reduce": partial(self.equals_loop_by_hand, all_reduce=True),
            "N processes = 1 process x N accumulation": partial(self.equals_loop_by_hand, all_reduce=False),
            "resuming is bitwise": self.resuming_is_bitwise,
            "exact = bits of 1 process": self.exact_is_bitwise,
        }

    def run(self, check: Callable[[], tuple[bool | None, str]]) -> tuple[str, str]:
        """PASS, FAIL or SKIP, the same on all processes, and why; an error is a failure of this check alone."""
        try:
            holds, figure = check()
            if holds is None:
                return "SKIP", figure
        except Preempted:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            holds, figure = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        holds = bool(self.accelerator.gather(torch.tensor([holds], device=self.device)).all())
        return "PASS" if holds else "FAIL", figure

    def train(self, name: str, exact: bool = False, stop_after: int | None = None) -> Trained:
        """What train.py does."""
        run = replace(self.config, name=name, exact=exact, stop_after=stop_after)
        with nested_training(), gradient_of_first_update() as gradient:
            train.main(run)
        path = Path(run.out_dir, run.name)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        network, optimizer = self.build()
        saver.load_checkpoint(saver.step_directory(path / "checkpoints", stop_after or run.steps), network, optimizer)
        return Trained(rows, gradient, storage.state_tensors(network, optimizer))

    def build(self) -> tuple[GPTModel, torch.optim.Optimizer]:
        network = GPTModel(self.config.model).to(self.device)
        return network, build_optimizer(network, self.config.optimizer, self.config.evaluation.ema_decay)

    def train_without_ddp(
        self,
        make_reducer: Callable[[list[nn.Parameter]], GradientReducer] | None = None,
        rank: int = 0,
        num_processes: int = 1,
    ) -> Trained:
        """Take the same steps as train.py on the bare model, with another reducer than DDP; by default as one process.

        The step is train.py's own, so a change of it is in both. Independent are the sums of gradients over processes
        and micro-batches, the batches of each process, and the preparation by Accelerate.
        """
        torch.manual_seed(self.config.seed)
        network, optimizer = self.build()
        prepare_network(network, self.config, self.device)  # compilation and chunks change the bits
        model = Autocast(network, self.accelerator)
        order = self.corpus.order(self.config)
        size = self.config.micro_batch_size
        metrics = StepMetrics(order, size, self.device, rank, num_processes)
        reducer = make_reducer and make_reducer(trainable_parameters(network))
        statistics = BlockStatistics([], self.accelerator)
        state = TrainState(
            self.config, self.accelerator, network, model, optimizer, order, metrics, statistics, reducer
        )
        rows, tokens = [], 0
        with gradient_of_first_update() as gradient:
            for step in range(self.config.steps):
                samples = [self.corpus.train[i] for i in order.indices(step, rank, num_processes)]
                batch = {name: tensor.to(self.device) for name, tensor in default_collate(samples).items()}
                train_step(state, step, split_micro_batches(batch, size))
                result = metrics.read(now=True)
                row = {f"train/{name}": value for name, value in result.means.items()}
                count = torch.tensor(batch["input_ids"].numel(), device=self.device)
                tokens += (self.accelerator.reduce(count) if num_processes > 1 else count).item()
                rows.append(row | {"train/grad_norm": result.grad_norm, "train/tokens": tokens})
        return Trained(rows, gradient, storage.state_tensors(network, optimizer))

    @cached_property
    def straight(self) -> Trained:
        return self.train("straight")

    def replicas_are_equal(self) -> tuple[bool | None, str]:
        if self.num_processes == self.shards:
            return None, "there is one replica"
        # It compares them after every step, and stops where they differ.
        return bool(self.straight), f"{self.config.steps} steps, {self.num_processes} processes"

    def equals_autograd(self) -> tuple[bool | None, str]:
        errors = gradient_errors(self.config, self.corpus.train, self.accelerator)
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        # In bfloat16 the router of a mixture of experts sends one of a hundred tokens elsewhere.
        tolerance = 1e-3 if self.accelerator.mixed_precision == "no" else 0.2
        return errors[worst] < tolerance, f"within {errors[worst]:.1e}: {worst}"

    def equals_loop_by_hand(self, all_reduce: bool) -> tuple[bool | None, str]:
        """Compare the gradient of the first update, and all logged numbers."""
        arguments = (AllReduce, self.rank, self.num_processes) if all_reduce else ()
        ours, by_hand = self.straight, self.train_without_ddp(*arguments)
        difference = [one - other for one, other in zip(ours.gradient, by_hand.gradient, strict=True)]
        gradient = total_norm(difference) / max(total_norm(by_hand.gradient), 1e-12)
        pairs = zip(ours.rows, by_hand.rows, strict=True)
        logged, worst = max((abs(row[name] / hand[name] - 1), name) for row, hand in pairs for name in hand)
        return max(gradient, logged) < self.tolerance, f"gradient within {gradient:.1e}, {worst} within {logged:.1e}"

    def resuming_is_bitwise(self) -> tuple[bool | None, str]:
        exact = self.device.type == "cuda" and self.can_be_exact  # on it, only deterministic algorithms repeat bits
        self.train("resumed", exact, self.config.steps // 2)
        unbroken = self.train("unbroken", True) if exact else self.straight
        resumed = self.train("resumed", exact)
        holds, figure = self.same_bits(unbroken, resumed)
        if (lost := find_unsaved_state(*self.build())) and not holds:
            figure += f"; the optimizer keeps {len(lost)} values that are no tensors, so not saved, such as {lost[0]}"
        different = set()
        for one, other in zip(unbroken.rows, resumed.rows, strict=True):
            different |= {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
        different = sorted(name for name in different if not name.startswith("perf/"))
        if holds and different:
            return False, f"{figure}, but other numbers were logged, of {', '.join(different)}"
        return holds, figure

    def exact_is_bitwise(self) -> tuple[bool | None, str]:
        if not self.can_be_exact:
            return None, "it needs whole replicas on 1, 2, 4, 8, ... processes"
        exact = self.train("exact", exact=True)  # first: it leaves one thread, and how many there are changes bits
        return self.same_bits(self.train_without_ddp(lambda parameters: TreeSum(parameters, 0, 1)), exact)

    def same_bits(self, one: Trained, other: Trained) -> tuple[bool | None, str]:
        different = sum(not torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())
        steps = self.config.steps
        return not different, f"{different} of {len(one.state)} weights and moments differ after {steps} steps"

    def order_is_a_permutation(self) -> tuple[bool | None, str]:
        num_samples = self.config.global_batch_size * 40 // 3 + 1  # so that epochs end within a batch
        warmup = self.config.schedule.batch_warmup_from, self.config.schedule.batch_warmup_steps
        order, ranks = GlobalBatches(num_samples, self.config.global_batch_size, 0, *warmup), range(self.num_processes)
        read = [i for step in range(40) for rank in ranks for i in order.indices(step, rank, self.num_processes)]
        epochs = np.sort(np.reshape(read[: 2 * num_samples], (2, num_samples)))
        return np.array_equal(epochs, [range(num_samples)] * 2), f"2 epochs of {num_samples} samples, each read once"


def main(config: TrainConfig) -> None:
    """Check all promises, and print for each whether it holds.

    Raises:
        ConfigError: the settings do not fit the launch or the data.
        RunError: a promise does not hold.
        Preempted: a signal asked to stop.
    """
    if config.steps < 2:
        raise ConfigError(f"verify_steps: {config.steps} leaves none to do after a resume; use 2 or more")
    check_launch(config)
    with contextlib.suppress(ConfigError):  # where it cannot be, the check of exact says so
        use_portable_arithmetic()
    verification, all_hold = Verification(config), True
    say = verification.accelerator.print
    try:
        precision = verification.accelerator.mixed_precision.replace("no", "fp32")
        say(f"{verification.num_processes} x {verification.device.type}, {precision}")
        for promise, check in verification.checks().items():
            result, figure = verification.run(check)
            all_hold = all_hold and result != "FAIL"
            say(f"{result}  {promise:<42} {figure}", flush=True)
    finally:
        if verification.rank == 0:
            shutil.rmtree(verification.config.out_dir)
    if not all_hold:
        raise RunError("Something does not hold.")
    say("Everything holds.")
    verification.accelerator.wait_for_everyone()
