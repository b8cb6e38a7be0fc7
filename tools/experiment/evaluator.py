"""Evaluates finished runs with the code of the baseline. Prints a number and a JSON object for each run.

    python -m tools.experiment.evaluator BASELINE_CODE < requests

A request is a number and an object of JSON on a line: see `request` in tools/experiment/runs.py. All runs, those of the
baseline too, are evaluated here in the same way, in float32 (on a GPU in its own arithmetic). Five principles make a
loss hard to fake:

1. The test data did not exist when the model was trained. Generated data are drawn with a seed that no run was given;
   of a text corpus, they are sequences on which no run evaluates. So nothing that a model keeps can be the answers.
2. Tokens go in and labels stay here. The loss and the test of causality use log-probabilities: in half of the
   sequences everything behind a random position is replaced, and nothing before it may change.
3. Scoring changes nothing and does not depend on order: all sequences are scored twice, in two processes, in different
   orders and batches. These processes are those of one run, if its code is not that of the baseline.
4. A run reads the sequences of its batches, and the validation set as often as it evaluates: the baseline's `data/` is
   in every variant, and what its data sets return is recorded there, for whatever purpose it is read.
5. The checkpoint is the one whose hash was noted when the run ended.

A check can be evaded by code that knows it: the report lists the lines to read first (`lines_to_read` in change.py).
"""

import copy
import functools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import torch as safetensors
from torch import Tensor
from torch.utils.data import Subset

from tools.experiment import sandbox
from tools.experiment.variant_program import answer_stream, hash_sequences
from tools.jobs.program import read_end

LOGIT_BYTES = 2**28  # maximum size of the logits of a batch
HASHED_AT_ONCE = 256  # sequences
# Differences between the two evaluations of a log-probability, in nats: rounding in another batch is below these.
MAX_DIFFERENCE, MEAN_DIFFERENCE = 1e-2, 1e-4
PROGRAM = Path(__file__).with_name("variant_program.py")


class Crash(Exception):
    """The code of a variant ended."""


class Model:
    """A process of a variant's code that computes logits."""

    def __init__(self, code: str, hidden: Sequence[str] = (), runs: Sequence[str] = ()):
        """Start the process; with hidden folders, in a sandbox in which it sees its code and these runs alone."""
        self.connection, theirs = Pipe()
        command = [sys.executable, str(PROGRAM), code, "logits", str(theirs.fileno())]
        if hidden:
            command = sandbox.command(command, map(Path, hidden), map(Path, [code, *runs]), network=False)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - until a crash nobody reads, so a pipe could fill up
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=sys.stderr, stderr=self.errors)
        theirs.close()

    def load(self, run: str) -> None:
        """Load the model of a run."""
        self._send(str(Path(run).resolve()).encode())

    def log_probs(self, batch: dict[str, Tensor], next_tokens: Tensor) -> Tensor:
        """Return the log-probability of each next token, float32 [B, T - 1].

        Args:
            batch: arguments of the forward without labels, each [B, T].
            next_tokens: int64 [B, T - 1].
        """
        self._send(safetensors.save({name: tensor.contiguous() for name, tensor in batch.items()}))
        try:
            logits = safetensors.load(self.connection.recv_bytes())["logits"]
        except (EOFError, ConnectionError):
            raise self._crash() from None
        log_probs = logits[:, :-1].log_softmax(-1)
        return log_probs.gather(-1, next_tokens[..., None])[..., 0]

    def _send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._crash() from None

    def _crash(self) -> Crash:
        exit_code = self.process.wait()
        return Crash(next(iter(read_end(self.errors).strip().splitlines()[-1:]), f"exit code {exit_code}"))

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and of those that it has started."""
        process = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system + one.children_user + one.children_system for one in times)

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait()


# Data


def held_out(validation: Any, test_seed: int) -> Any:
    """Return data of the kind of a validation set that no run has seen, as a dataset.

    Generated data are drawn with another seed, so `validation` must not be read before. Of text these are sequences on
    which the runs do not evaluate, at most as many as they do. A source that a fork added, without a seed, has no other
    data: it is returned as it is.
    """
    if hasattr(validation, "seed"):
        fresh = copy.copy(validation)
        fresh.seed = test_seed
        return fresh
    if hasattr(validation, "datasets"):  # a mixture
        return torch.utils.data.ConcatDataset([held_out(part, test_seed) for part in validation.datasets])
    if not hasattr(validation, "num_rows"):
        return validation
    num_rows, num_seen = validation.num_rows, validation.num_samples
    everything = copy.copy(validation)
    everything.num_samples = num_rows
    seen = {index * num_rows // num_seen for index in range(num_seen)}  # as TextDataset spreads them
    unseen = [row for row in range(num_rows) if row not in seen]
    count = min(num_seen, len(unseen))
    return Subset(everything, [unseen[index * len(unseen) // count] for index in range(count)])


def load_batches(dataset: Any, indices: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], dict[str, Tensor]]]:
    """Yield samples of a dataset as batches of at most `size` sequences, each with its indices."""
    from data.loader import load_batch

    for start in range(0, len(indices), size):
        chosen = indices[start : start + size]
        yield chosen, load_batch(dataset, chosen)


class Data:
    """The test data and the training set of one data configuration, loaded by the code of the baseline."""

    def __init__(self, config: Any, test_seed: int):
        from data.corpus import load_corpus

        self.corpus = load_corpus(config)
        self.config = self.corpus.fill_in(config)
        self.test: Any = held_out(self.corpus.validation, test_seed)
        random = np.random.default_rng(test_seed)
        self.order = random.permutation(len(self.test)).tolist()  # of the second evaluation
        # Where each sequence is cut in the second evaluation; half of them are left whole.
        self.cuts = random.integers(1, self.config.seq_len, len(self.test))
        self.is_cut = random.random(len(self.test)) < 0.5
        self.hash_by_index: dict[int, int] = {}

    @functools.cached_property
    def batch_size(self) -> int:
        """Sequences that are evaluated at once."""
        sequence_bytes = 4 * self.config.seq_len * (self.config.model.vocab_size or 1)
        return min(self.config.evaluation.micro_batch_size, max(1, LOGIT_BYTES // sequence_bytes))

    def hash_training_sequences(self, indices: list[int]) -> list[int]:
        """Return the hashes of training sequences; each is loaded once."""
        missing = [index for index in dict.fromkeys(indices) if index not in self.hash_by_index]
        for chosen, batch in load_batches(self.corpus.train, missing, HASHED_AT_ONCE):
            self.hash_by_index |= zip(chosen, hash_sequences(batch["input_ids"]).tolist(), strict=True)
        return [self.hash_by_index[index] for index in indices]

    def surplus_sequences(self, config: Any, num_sessions: int, num_processes: int, delivered: np.ndarray) -> str:
        """Describe what a run read besides the sequences of its batches and its validation set; "" if nothing.

        The sequences of its batches may be read more often, for example for statistics before the first step; what is
        computed from them is in the seconds of the run. The validation set may be read once for each evaluation, and
        once to count its bytes.

        Args:
            config: the settings of the run.
            num_sessions: how often its training was started; each may begin with an evaluation.
            num_processes: of the run.
            delivered: hashes, int64 [n], from variant_program.py.
        """
        if not len(delivered):
            return "none of its training data were read from its data sets, so they cannot be compared"
        from trainer.schedule import is_due

        order = self.corpus.global_batches(config)
        indices = [index for step in range(config.steps) for index in order.indices(step)]
        read, expected = Counter(delivered.tolist()), set(self.hash_training_sequences(indices))
        others = Counter({sequence: count for sequence, count in read.items() if sequence not in expected})
        unknown = sum(count for sequence, count in others.items() if sequence not in self.validation_hashes)
        if unknown:
            return f"{unknown:,} of the {len(delivered):,} sequences that it read are not in its batches"
        if not others:
            return ""
        num_readings = sum(is_due(config.evaluation.every, config, step) for step in range(config.steps + 1))
        num_readings += num_sessions - 1 + (config.data.source == "text") * num_sessions * num_processes
        padding = (num_processes - 1) * config.evaluation.micro_batch_size  # of processes without a batch
        size = len(self.corpus.validation or ()) + padding
        if others.total() <= num_readings * size:
            return ""
        return f"{others.total():,} sequences of the validation set were read, more than its evaluations need"

    @functools.cached_property
    def validation_hashes(self) -> set[int]:
        """Hashes of the sequences on which the runs evaluate."""
        validation: Any = self.corpus.validation
        batches = load_batches(validation, range(len(validation or ())), HASHED_AT_ONCE)
        return {found for _, batch in batches for found in hash_sequences(batch["input_ids"]).tolist()}

    # Evaluation

    def first_evaluation(self, model: Model) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of all next tokens [sequences, T - 1], and which of them are targets."""
        log_probs, is_target = [], []
        for _, batch in load_batches(self.test, range(len(self.test)), self.batch_size):
            log_probs.append(model.log_probs(without_labels(batch), batch["input_ids"][:, 1:]))
            is_target.append(batch["labels"][:, 1:] != -100)
        return torch.cat(log_probs).numpy(), torch.cat(is_target).numpy()

    def second_evaluation(self, model: Model) -> np.ndarray:
        """Return the log-probabilities again, in another order and in batches of another size.

        Behind its cut a sequence has the tokens of its neighbour in the batch, and the result is NaN.
        """
        log_probs = np.full((len(self.test), self.config.seq_len - 1), np.nan, np.float32)
        for chosen, batch in load_batches(self.test, self.order, max(1, self.batch_size - 1)):
            tokens = batch["input_ids"]
            cuts = torch.from_numpy(np.where(self.is_cut[chosen], self.cuts[chosen], tokens.shape[1]))
            is_replaced = torch.arange(tokens.shape[1]) >= cuts[:, None]  # [B, T]
            # Of a batch of one sequence, the tokens in reverse.
            others = tokens.roll(1, 0) if len(tokens) > 1 else tokens.flip(1)
            mixed = without_labels(batch) | {"input_ids": torch.where(is_replaced, others, tokens)}
            found = model.log_probs(mixed, tokens[:, 1:])
            # The prediction at position t depends on the tokens 0 to t.
            log_probs[chosen] = torch.where(is_replaced[:, :-1], torch.nan, found).numpy()
        return log_probs

    def evaluate(self, first: tuple[np.ndarray, np.ndarray], second: np.ndarray) -> dict[str, Any]:
        """Return the loss in nats per target token, the excess loss where the entropy is known, and what is wrong."""
        log_probs, is_target = first
        total, count = -float(log_probs[is_target].sum(dtype=np.float64)), int(is_target.sum())
        entropy = getattr(self.test, "entropy_nats", None)
        losses = {"loss": total / count, "excess_loss": None if entropy is None else (total - entropy) / count}
        return losses | {"problem": self.compare_evaluations(log_probs, second, is_target)}

    def compare_evaluations(self, first: np.ndarray, second: np.ndarray, is_target: np.ndarray) -> str:
        """Describe how the log-probabilities of two evaluations differ; "" if they are equal up to rounding."""
        differences = np.where(np.isnan(second) & self.is_behind_cut(), 0.0, np.abs(first - second))
        differences = np.where(is_target, differences, 0.0)
        # NaN in a log-probability is a difference.
        is_wrong = ~(differences <= MAX_DIFFERENCE)
        if not is_wrong.any() and differences.sum() <= MEAN_DIFFERENCE * is_target.sum():
            return ""
        whole = differences[~self.is_cut]
        worst = np.nanmax(differences, initial=0.0)
        if not (whole <= MAX_DIFFERENCE).all() or whole.sum() > MEAN_DIFFERENCE * is_target[~self.is_cut].sum():
            return f"its log-probabilities depend on the order or batch of evaluation, by up to {worst:.3g} nats"
        return f"its log-probabilities depend on later tokens, by up to {worst:.3g} nats"

    def is_behind_cut(self) -> np.ndarray:
        """Return which predictions of the second evaluation are not comparable, bool [sequences, T - 1]."""
        positions = np.arange(self.config.seq_len - 1)
        return self.is_cut[:, None] & (positions >= self.cuts[:, None])


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without its labels."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


# Requests


def evaluate_code(code: str, requests: list[dict[str, Any]], loaded: dict[str, Data]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each request of one code; a process for each of the evaluations computes all of them."""
    from runtime.config.parser import parse_config

    models: list[Model | None] = [None, None]
    for request in requests:
        of_baseline = parse_config(["--config", request["config"]])
        try:
            # The settings of the variant may name what this code does not have, and need not fit together here.
            config = of_baseline.replace(**request["settings"])
            key = repr((config.data, config.seq_len, config.evaluation.num_samples, request["test_seed"]))
            if key not in loaded:
                loaded[key] = Data(config, request["test_seed"])
            data = loaded[key]
            check_manifests(request["manifests"])
            runs = [one["run"] for one in requests]
            models = [model or Model(code, request.get("hidden", []), runs) for model in models]
            results: list[Any] = []
            seconds_before = sum(model.cpu_seconds() for model in models if model)
            for model, evaluation in zip(models, (data.first_evaluation, data.second_evaluation), strict=True):
                assert model is not None, "started above"
                model.load(request["run"])
                results.append(evaluation(model))
            answer = data.evaluate(*results)
            answer["seconds"] = sum(model.cpu_seconds() for model in models if model) - seconds_before
            if request["delivered"] and not answer["problem"]:
                delivered = np.concatenate([np.fromfile(file, np.int64) for file in request["delivered"]])
                sessions = request["sessions"], request["processes"]
                answer["problem"] = data.surplus_sequences(config, *sessions, delivered)
        except Exception as error:  # whatever the code of a variant answers: it must not end what others need
            for model in filter(None, models):
                model.process.kill()
            models = [None, None]
            message = str(error) if isinstance(error, Crash) else f"{type(error).__name__}: {error}"
            answer = {"loss": None, "excess_loss": None, "problem": f"it cannot be evaluated: {message}"}
        yield answer
    for model in filter(None, models):
        model.close()


def check_manifests(hashes: dict[str, str]) -> None:
    """Raise Crash if a checkpoint is not the one that was there when the run ended."""
    from runtime.files import sha256

    for file, expected in hashes.items():
        if not Path(file).is_file() or sha256(Path(file)) != expected:
            raise Crash("its checkpoint has changed since the run ended")


def main() -> None:
    """Evaluate the runs that stdin requests, in their order."""
    loaded: dict[str, Data] = {}
    answers = answer_stream()
    lines = [line.partition(" ") for line in sys.stdin]
    numbers = iter([number for number, _, _ in lines])

    def processes(request: dict[str, Any]) -> tuple[str, str]:
        # Code that nobody has read could keep the weights of one run for the next, and average them.
        return request["code"], "" if request["code"] == sys.argv[1] else request["run"]

    for (code, _), requests in groupby([json.loads(request) for _, _, request in lines], key=processes):
        for answer in evaluate_code(code, list(requests), loaded):
            print(next(numbers), json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    torch.set_num_threads(1)
    main()
