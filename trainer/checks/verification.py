"""The checks of verify.py, which trains a few steps in several ways and compares the results."""

import contextlib
import itertools
import math
import shutil
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from data.loader import BatchLoader
from data.sampler import MIX_BLOCK
from model.config import FAMILIES
from model.gpt import GPTModel, Output
from runtime.config.errors import ConfigError, RunError
from runtime.config.schema import TrainConfig
from runtime.distributed.collectives import broadcast_from_main
from runtime.distributed.launch import join_launch, num_shards
from runtime.distributed.launch_checks import check_launch
from runtime.distributed.sharding import full_tensor
from runtime.distributed.signals import Preempted
from runtime.distributed.tree_reduce import AllReduce, TreeSum
from runtime.machine.cpu import use_portable_arithmetic
from trainer.block_stats import total_norm
from trainer.checkpoint import tensor_files
from trainer.checkpoint.manifest import step_directory
from trainer.checks.gradients import NoFloat64, gradient_errors
from trainer.checks.model import (
    Result,
    check_cached_logits,
    check_constant_init,
    check_flops,
    check_isolated_documents,
    check_masks,
    check_transformers_logits,
)
from trainer.gradients import trainable_parameters
from trainer.nested import nested_training
from trainer.optimizer import build_optimizer
from trainer.prepare_model import add_teacher, prepare_network
from trainer.pretrained.load import copy_initial_weights
from trainer.results import Results
from trainer.run.metrics_log import read_rows
from trainer.run.resolve import resolve
from trainer.state import GradientReducer, TrainState

MAX_READ = 50_000  # samples of the training order that are checked


@dataclass
class Trained:
    rows: list[dict]
    """Rows of metrics.jsonl from step 1 on."""
    gradient: list[Tensor]
    """Gradients at the first update, in the order of the optimizer's groups."""
    state: dict[str, Tensor]
    """Weights and moments after the last step, by their names in a checkpoint."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Values that no checkpoint contains, after the last step; see `unsaved_attributes`."""


@contextlib.contextmanager
def record_first_gradients() -> Iterator[list[Tensor]]:
    """Yield a list that receives the gradients of the first update of any optimizer, in the order of its groups."""
    gradient: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, *_) -> None:
        if not gradient:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            gradient.extend(full_tensor(weight.grad).clone() for weight in weights)

    hook = register_optimizer_step_pre_hook(record)
    try:
        yield gradient
    finally:
        hook.remove()


@contextlib.contextmanager
def record_attributes(script: ModuleType) -> Iterator[dict[str, str]]:
    """Yield a dict that receives, after the training inside, the `unsaved_attributes` of its model and optimizer."""
    attributes, built, build = {}, [], script.build_optimizer

    def build_and_record(network: nn.Module, *arguments: Any) -> torch.optim.Optimizer:
        built.append((network, build(network, *arguments)))
        return built[-1][1]

    with patch.object(script, "build_optimizer", build_and_record):
        yield attributes
    attributes |= unsaved_attributes(*built[-1])


def unsaved_attributes(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return attributes that are numbers, strings, tensors or collections, and non-persistent buffers, as text."""
    owners = {"optimizer": vars(optimizer)}
    owners |= {f"optimizer.param_groups[{i}]": group for i, group in enumerate(optimizer.param_groups)}
    for name, module in network.named_modules():
        unsaved = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        owners[f"model.{name}".removesuffix(".")] = vars(module) | unsaved
    saved = ("state", "params", "param_groups", "_parameters", "_buffers", "_modules")
    return {
        f"{owner}.{key}": repr(value)
        for owner, values in owners.items()
        for key, value in values.items()
        if key not in saved and isinstance(value, int | float | str | list | tuple | dict | deque | Tensor)
    }


class Autocast(nn.Module):
    """A model in the precision of the launch, without any other preparation by Accelerate."""

    def __init__(self, network: GPTModel, accelerator: Accelerator):
        super().__init__()
        self.network, self.accelerator = network, accelerator

    def forward(self, **inputs: Tensor) -> Output:
        with self.accelerator.autocast():
            return self.network(**inputs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Do nothing: `Accelerator.no_sync` calls this in an FSDP launch, but no weight here is sharded."""


class Verification:
    """Checks of the guarantees; each returns whether it holds (None: it does not apply), and a figure or a reason.

    `script` is the module train.py, whose loop, step and first backward are checked.
    """

    def __init__(self, config: TrainConfig, script: ModuleType):
        self.script, self.accelerator = script, Accelerator(**join_launch(config))
        self.rank, self.num_processes = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device
        first = config.schedule.batch_warmup_from
        batch = config.global_batch_size or 2 * (first or config.micro_batch_size * self.num_processes)
        short = {
            "global_batch_size": batch,
            "schedule.batch_warmup_steps": config.steps - 1 if first else None,
            # 0 stays 0: there may be no validation data
            "evaluation.every": config.evaluation.every and config.steps // 2,
            "evaluation.num_samples": 8,
        }
        resolved, self.corpus, self.models = resolve(config.replace(**short))  # may refuse a setting
        self.config = resolved.replace(out_dir=self.own_directory(Path(config.out_dir).expanduser()))
        # float32 sums of another order differ in the 6th digit; bfloat16 products, in the 3rd.
        self.tolerance = 1e-4 if self.accelerator.mixed_precision == "no" else 3e-2
        self.shards = num_shards(self.accelerator)
        self.errors: set[str] = set()
        self.can_be_exact = self.shards == 1 and self.num_processes & (self.num_processes - 1) == 0

    def own_directory(self, out_dir: Path) -> str:
        """Create a new directory below `out_dir`, the same on all processes."""
        made = None
        if self.rank == 0:
            with contextlib.suppress(OSError):
                out_dir.mkdir(parents=True, exist_ok=True)
                made = tempfile.mkdtemp(prefix="verify-", dir=out_dir)
        if (directory := broadcast_from_main(made)) is None:
            raise ConfigError(f"out_dir: {str(out_dir)!r}: cannot write there")
        return directory

    def model_checks(self) -> dict[str, Callable[[], Result]]:
        """Return the checks of the model alone, which train nothing and take seconds."""
        model, seq_len, initial = self.config.model, self.config.seq_len, self.models.initial
        is_needed = "position_ids" in self.corpus.train[0]
        return {
            **{
                f"logits = transformers' {family}": partial(check_transformers_logits, family, model)
                for family in FAMILIES
            },
            "generation with a cache = without": partial(check_cached_logits, model, seq_len, initial),
            "isolated documents = each document alone": partial(
                check_isolated_documents, model, seq_len, initial, is_needed
            ),
            "masks of both kernels = their definition": partial(check_masks, model, seq_len),
            "FLOPs per token = products that torch counts": partial(check_flops, model, seq_len),
            "constant initial weights stay constant": partial(check_constant_init, model),
        }

    def checks(self) -> dict[str, Callable[[], Result]]:
        """Return the check of each guarantee; all processes call them together, in this order."""
        return {
            "order is a permutation in every epoch": self.order_is_a_permutation,
            **self.model_checks(),
            "gradient = autograd of plain operations": self.equals_autograd,
            "replicas are equal after every step": self.replicas_are_equal,
            "gradient = hand-written all-reduce": partial(self.equals_training_without_ddp, all_reduce=True),
            "N processes = 1 process x N accumulation": partial(self.equals_training_without_ddp, all_reduce=False),
            "resuming is bitwise": self.resuming_is_bitwise,
            "exact = bits of 1 process": self.exact_is_bitwise,
        }

    def run(self, check: Callable[[], Result]) -> tuple[str, str]:
        """Return PASS, FAIL or SKIP, the same on all processes, and why; an exception fails this check alone."""
        try:
            holds, figure = check()
            if holds is None:
                return "SKIP", figure
        except Preempted:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            holds, figure = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            if figure in self.errors:
                figure = "the same error as above"
            self.errors.add(figure)
        holds = all(gather_object([holds]))
        return "PASS" if holds else "FAIL", figure

    def train(self, name: str, exact: bool = False, stop_after: int | None = None) -> Trained:
        """Train with train.py's main."""
        run = self.config.replace(name=name, exact=exact, stop_after=stop_after)
        with nested_training(), record_first_gradients() as gradient, record_attributes(self.script) as attributes:
            self.script.main(run)
        path = Path(run.out_dir, run.run_name)
        rows = [row for row in read_rows(path / "metrics.jsonl") if row["step"] > 0]
        network, optimizer = self.build()
        tensor_files.read(step_directory(path / "checkpoints", stop_after or run.steps), network, optimizer)
        return Trained(rows, gradient, tensor_files.state_tensors(network, optimizer), attributes)

    def build(self) -> tuple[GPTModel, torch.optim.Optimizer]:
        """Build the model and its optimizer on the device, as train.py does before Accelerate prepares them."""
        network = GPTModel(self.config.model)
        if self.models.initial:
            copy_initial_weights(network, self.models.initial)
        network.to(self.device)
        return network, build_optimizer(network, self.config.optimizer, self.config.evaluation.ema_decay)

    def train_without_ddp(
        self,
        make_reducer: Callable[[list[nn.Parameter]], GradientReducer] | None = None,
        rank: int = 0,
        num_processes: int = 1,
    ) -> Trained:
        """Take the same steps as train.py on the bare model, with another reducer than DDP; by default as one process.

        The step is train.py's `train_step`, so a change to it affects both. Only the sums of gradients over
        processes and micro-batches, the slice of each process and the lack of Accelerate's wrappers are independent.
        """
        torch.manual_seed(self.config.seed)
        network, optimizer = self.build()
        prepare_network(network, self.config, self.device)  # compilation and chunks change the bits
        if self.models.teacher:
            add_teacher(network, self.models.teacher.model, self.config, self.device)
        model = Autocast(network, self.accelerator)
        order = self.corpus.global_batches(self.config)
        size = self.config.micro_batch_size
        loader = BatchLoader(self.corpus.train, order, size, self.device, rank, num_processes)
        reducer = make_reducer and make_reducer(trainable_parameters(network))
        results = Results(rank, num_processes, self.device)
        state = TrainState(self.config, self.accelerator, network, model, optimizer, results, reducer=reducer)
        rows, tokens = [], 0
        with record_first_gradients() as gradient:
            for step in range(self.config.steps):
                micro_batches = loader.load(step)
                if step == 0:
                    self.script.warm_up(state, micro_batches[0])
                self.script.train_step(state, step, micro_batches)
                result = results.current()
                row = {f"train/{name}": value for name, value in result.means.items()}
                count = sum(batch["input_ids"].numel() for batch in micro_batches)
                tokens += sum(gather_object([count])) if num_processes > 1 else count
                rows.append(row | {"train/grad_norm": result.grad_norm, "train/tokens": tokens})
        return Trained(rows, gradient, tensor_files.state_tensors(network, optimizer))

    @cached_property
    def uninterrupted(self) -> Trained:
        """A run of all steps without a stop, trained once."""
        return self.train("uninterrupted")

    def replicas_are_equal(self) -> Result:
        """Compare the replicas after every step; train.py raises an error if they differ."""
        if self.num_processes == self.shards:
            return None, "there is one replica"
        return bool(self.uninterrupted), f"{self.config.steps} steps, {self.num_processes} processes"

    def equals_autograd(self) -> Result:
        """Compare the gradient with autograd of plain operations in float64."""
        teacher_config = self.models.teacher.model.config if self.models.teacher else None
        initial = self.models.initial.model if self.models.initial else None
        try:
            errors = gradient_errors(self.config, self.corpus.train, self.accelerator, teacher_config, initial)
        except NoFloat64 as error:
            return None, f"the model does not run in float64, in which autograd would be exact enough: {error}"
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        # In bfloat16 the router of a mixture of experts routes about one token of a hundred to another expert.
        tolerance = 1e-3 if self.accelerator.mixed_precision == "no" else 0.2
        return errors[worst] < tolerance, f"within {errors[worst]:.1e}: {worst}"

    def equals_training_without_ddp(self, all_reduce: bool) -> Result:
        """Compare the gradient of the first update, the means and the norms with those of a training without DDP."""
        ours = self.uninterrupted
        if all_reduce:
            reducer = AllReduce if self.num_processes > 1 else None
            by_hand = self.train_without_ddp(reducer, self.rank, self.num_processes)
        else:
            by_hand = self.train_without_ddp()
        difference = [tensor - expected for tensor, expected in zip(ours.gradient, by_hand.gradient, strict=True)]
        if (norm := total_norm(by_hand.gradient)) == 0:
            return False, "the gradient of the first update is 0 or was not seen, so nothing was compared"
        gradient = total_norm(difference) / norm
        pairs = zip(ours.rows, by_hand.rows, strict=True)
        logged, worst = max((relative_error(row[name], hand[name]), name) for row, hand in pairs for name in hand)
        return max(gradient, logged) < self.tolerance, f"gradient within {gradient:.1e}, {worst} within {logged:.1e}"

    def resuming_is_bitwise(self) -> Result:
        """Compare a run that was stopped and resumed with one that was not, and name state that the resume lost."""
        exact = self.device.type == "cuda" and self.can_be_exact  # on CUDA only deterministic algorithms repeat bits
        self.train("resumed", exact, self.config.steps // 2)
        uninterrupted = self.train("uninterrupted-exact", True) if exact else self.uninterrupted
        resumed = self.train("resumed", exact)
        holds, figure = self.same_bits(uninterrupted, resumed)
        if not holds:
            values = uninterrupted.attributes
            lost = [name for name, value in resumed.attributes.items() if values.get(name) != value]
            figure += (
                "; checkpoints contain only parameters, buffers and the tensors in optimizer.state, so a resumed run "
                "loses any other state, such as a Python number, an iterator or a random generator of the model, the "
                f"optimizer or the data; attributes with another value after the resume: {', '.join(lost) or 'none'}"
            )
        different = set()
        for row, again in zip(uninterrupted.rows, resumed.rows, strict=True):
            different |= {name for name in row.keys() | again.keys() if row.get(name) != again.get(name)}
        different = sorted(name for name in different if not name.startswith("perf/"))
        if holds and different:
            return False, f"{figure}, but logged metrics differ: {', '.join(different)}"
        return holds, figure

    def exact_is_bitwise(self) -> Result:
        """Compare exact training on these processes with one process."""
        if not self.can_be_exact:
            return None, "it needs whole replicas on 1, 2, 4, 8, ... processes"
        exact = self.train("exact", exact=True)  # first: it sets the number of threads, which changes bits
        return self.same_bits(self.train_without_ddp(lambda parameters: TreeSum(parameters, 0, 1)), exact)

    def same_bits(self, expected: Trained, other: Trained) -> Result:
        """Compare all weights and moments; one that only one of the runs has is different."""
        ours, theirs = expected.state, other.state
        names, shared = ours | theirs, ours.keys() & theirs.keys()
        different = [name for name in names if name not in shared or not torch.equal(ours[name], theirs[name])]
        figure = f"{len(different)} of {len(names)} weights and moments differ after {self.config.steps} steps"
        return not different, f"{figure}; the first one is {different[0]}" if different else figure

    def order_is_a_permutation(self) -> Result:
        """Check that the order of the run has each sample once in an epoch, over all processes.

        Two epochs are read, or the first MAX_READ samples. In a mixture, each corpus has epochs of its own. A block of
        a mixture is in random order, so they are only compared after whole blocks.
        """
        order, sizes = self.corpus.global_batches(self.config), [len(self.corpus.train)]
        num_read = min(2 * sum(sizes), MAX_READ)
        ends = [*range(sizes[0], num_read, sizes[0]), num_read]
        if self.corpus.quotas is not None:
            sizes = [len(dataset) for dataset in cast(Any, self.corpus.train).datasets]
            ends = [*range(MIX_BLOCK, num_read + MIX_BLOCK, MIX_BLOCK)]
            num_read = ends[-1]
        num_steps = next(step for step in itertools.count(1) if order.sizes.sequences_before(step) >= num_read)
        local = [  # a process at a time, because an order caches the steps that it computes
            [order.indices(step, rank, self.num_processes) for step in range(num_steps)]
            for rank in range(self.num_processes)
        ]
        read = np.concatenate([indices for step in zip(*local, strict=True) for indices in step])[:num_read]
        if len(outside := read[(read < 0) | (read >= sum(sizes) * order.num_offsets)]):
            return False, f"sample {outside[0]} is read, but there are {sum(sizes):,} samples"
        read %= sum(sizes)  # a window that is moved is the same sample

        for end in ends:
            samples, counts = np.unique(read[:end], return_counts=True)
            corpora = np.searchsorted(np.cumsum(sizes), samples, side="right")
            for c in np.unique(corpora):
                times = counts[corpora == c]
                least = times.min() if len(times) == sizes[c] else 0
                if times.max() > least + 1:
                    most_read = samples[corpora == c][times.argmax()]
                    figure = f"sample {most_read} is read {times.max()} times, and another {least} times"
                    return False, f"{figure}, among the first {end:,} samples of the run's order"
        return True, f"the first {num_read:,} samples of the run's order, in epochs of {', '.join(map(str, sizes))}"


def relative_error(value: float | None, expected: float) -> float:
    """Return |value - expected| / |expected|; 0 if both are undefined (NaN, in a log null)."""
    if value is None or not math.isfinite(expected):
        return math.inf if math.isfinite(expected) or value is not None else 0.0
    return abs(value - expected) / max(abs(expected), 1e-12)


def verify(config: TrainConfig, script: ModuleType) -> None:
    """Check all guarantees of the module train.py, `script`, and print the result of each.

    Raises:
        ConfigError: the settings do not fit the launch or the data.
        RunError: a guarantee does not hold.
        Preempted: a stop signal was received.
    """
    if config.steps < 2:
        raise ConfigError(f"verify_steps: {config.steps} leaves no step after a resume; use 2 or more")
    check_launch(config)
    with contextlib.suppress(ConfigError):  # where it is not possible, the check of exact reports it
        use_portable_arithmetic()
    verification = Verification(config, script)
    checks, failed, print_once = verification.checks(), [], verification.accelerator.print
    try:
        precision = verification.accelerator.mixed_precision.replace("no", "fp32")
        print_once(f"{verification.num_processes} x {verification.device.type}, {precision}")
        for guarantee, check in checks.items():
            result, figure = verification.run(check)
            if result == "FAIL":
                failed.append(guarantee)
            print_once(f"{result}  {guarantee:<44} {figure}", flush=True)
    finally:
        if verification.rank == 0:
            shutil.rmtree(verification.config.out_dir)
    if failed:
        raise RunError(f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}")
    print_once("Everything holds.")
    verification.accelerator.wait_for_everyone()
