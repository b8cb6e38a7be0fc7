"""Judges finished runs of a candidate with the code of the baseline. Prints a JSON object for each run.

    python -m tools.experiment.scorer BASELINE_CODE < requests

A request is a line of JSON with `run`, the path of a run, and `code`, the folder of its code; `words` and `settings`,
settings of train.py that this code knows; `sessions`, the first step and the number of processes of each; and `hashes`,
the files that candidate.py wrote while it trained the run. Those of one code are consecutive. Three rules make a score
hard to fake:

1. The loss is computed here, from logits that the candidate's process computes from tokens alone.
2. At sampled positions, the logits of the prefix alone equal those of the whole sequence. The candidate answers for all
   prefixes in one process, and for the sequences in another, so a model that reads the future cannot have seen it.
3. The sequences that entered the model in training are those of this code's batches, not more often, in any order.
"""

import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from multiprocessing import Pipe
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import torch as safetensors
from torch import Tensor

from tools.experiment.candidate import hash_sequences

LOGIT_BYTES = 2**28  # maximum size of the logits of a batch
BATCH_SIZE = 256  # of a batch for which no logits are computed
NUM_PREFIXES = 64
TOLERANCE = 1e-3  # of a logit computed from a prefix, relative to the largest logit of its position
CANDIDATE = Path(__file__).with_name("candidate.py")


class Candidate:
    """A process of the candidate's code that computes logits."""

    def __init__(self, code: str):
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(CANDIDATE), code, "logits", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=sys.stderr,
        )
        theirs.close()

    def load(self, run: str) -> None:
        """Load the model of a run."""
        self.connection.send_bytes(str(Path(run).resolve()).encode())

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of a batch, float32 [B, T, V]; raise EOFError if the candidate's code crashes."""
        self.connection.send_bytes(safetensors.save({name: tensor.contiguous() for name, tensor in batch.items()}))
        return safetensors.load(self.connection.recv_bytes())["logits"]

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait()


def batches(dataset: Any, indices: Sequence[int], batch_size: int = BATCH_SIZE) -> Iterator[dict[str, Tensor]]:
    """Yield samples of a map-style dataset as batches of at most `batch_size` sequences."""
    from data.loader import load_batch

    for start in range(0, len(indices), batch_size):
        yield load_batch(dataset, indices[start : start + batch_size])


def sample_prefixes(dataset: Any) -> dict[int, int]:
    """Return the lengths of prefixes before a token that is predicted, one in each of NUM_PREFIXES samples by index."""
    random, lengths = np.random.default_rng(0), {}
    indices = random.permutation(len(dataset))[:NUM_PREFIXES].tolist()
    for index, batch in zip(indices, batches(dataset, indices, batch_size=1), strict=True):
        positions = (batch["labels"][0, 1:] != -100).nonzero()[:, 0]
        if len(positions):
            lengths[index] = int(random.choice(positions.numpy())) + 1
    return lengths


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without its labels, the tokens that the model is to predict."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


class Data:
    """The validation and the training set of one data configuration, loaded by the code of the baseline."""

    def __init__(self, config: Any):
        from data.corpus import load_corpus

        self.corpus = load_corpus(config)
        self.config = self.corpus.fill_in(config)
        self.validation: Any = self.corpus.validation
        self.prefix_lengths = sample_prefixes(self.validation)
        self.hash_by_index: dict[int, int] = {}

    def hash_training_sequences(self, indices: list[int]) -> list[int]:
        """Return the hashes of training sequences; each is loaded once."""
        missing = [index for index in dict.fromkeys(indices) if index not in self.hash_by_index]
        self.hash_by_index |= zip(missing, hash_samples(self.corpus.train, missing), strict=True)
        return [self.hash_by_index[index] for index in indices]

    @functools.cached_property
    def validation_hashes(self) -> set[int]:
        """Hashes of the validation sequences."""
        return {*hash_samples(self.validation, range(len(self.validation)))}

    def surplus_sequences(self, config: Any, sessions: list[tuple[int, int]], recorded: np.ndarray) -> str:
        """Describe the sequences that entered the model but are not in the batches of a run; "" if there are none.

        Args:
            config: the settings of the run.
            sessions: first step and number of processes of each session. Before its first step, every process runs a
                micro-batch once without an update.
            recorded: int64 [n], from candidate.py.
        """
        order = self.corpus.global_batches(config)
        indices = [index for step in range(config.steps) for index in order.indices(step)]
        expected = Counter(self.hash_training_sequences(indices))
        surplus = Counter(recorded.tolist()) - expected
        num_repeated = config.micro_batch_size * sum(processes for step, processes in sessions if step < config.steps)
        if surplus.keys() <= expected.keys() and surplus.total() <= num_repeated:
            return ""
        held_out = sum(count for one, count in surplus.items() if one in self.validation_hashes)
        text = (
            f"{surplus.total():,} of the {len(recorded):,} sequences on which its model was trained are not in its "
            "batches"
        )
        return text + (f"; {held_out:,} of them are in the validation set" if held_out else "")

    def score(self, candidate: Candidate, prefixes: dict[int, Tensor]) -> dict[str, Any]:
        """Compute the loss of the model that a candidate has loaded, and compare its logits with those of prefixes."""
        total, count, problem = 0.0, 0, ""
        sequence_bytes = 4 * self.config.seq_len * (self.config.model.vocab_size or 1)
        batch_size = min(self.config.evaluation.micro_batch_size, max(1, LOGIT_BYTES // sequence_bytes))
        for number, batch in enumerate(batches(self.validation, range(len(self.validation)), batch_size)):
            logits, labels = candidate.logits(inputs_of(batch)), batch["labels"][:, 1:]
            is_target = labels != -100
            losses = F.cross_entropy(logits[:, :-1][is_target], labels[is_target], reduction="none")
            total += float(losses.sum(dtype=torch.float64))
            count += len(losses)
            first = number * batch_size
            for index in prefixes.keys() & range(first, first + len(labels)):
                alone, position = prefixes[index], self.prefix_lengths[index] - 1
                change = (alone - logits[index - first, position]).abs().max()
                if not change <= TOLERANCE * alone.abs().max():
                    problem = (
                        f"its logits depend on later tokens: in validation sequence {index}, those at position "
                        f"{position} change by {change:.3g} if the rest is left out"
                    )
        return {"loss": (total - (getattr(self.validation, "entropy_nats", None) or 0.0)) / count, "problem": problem}

    def prefix_logits(self, candidate: Candidate) -> dict[int, Tensor]:
        """Return the last logits of each sampled prefix, [V], by the index of its sample."""
        logits = {}
        for (index, length), batch in zip(
            self.prefix_lengths.items(),
            batches(self.validation, [*self.prefix_lengths], batch_size=1),
            strict=True,
        ):
            prefix = {name: tensor[:, :length] for name, tensor in inputs_of(batch).items()}
            logits[index] = candidate.logits(prefix)[0, -1]
        return logits


def hash_samples(dataset: Any, indices: Sequence[int]) -> list[int]:
    """Return the hashes of samples."""
    return [one for batch in batches(dataset, indices) for one in hash_sequences(batch["input_ids"]).tolist()]


def load_data(config: Any, loaded: dict[str, Data]) -> Data:
    """Return the data of a config, loaded once for all configs that differ in nothing that matters to it."""
    key = repr((config.data, config.seq_len, config.evaluation.num_samples, config.model.vocab_size))
    if key not in loaded:
        loaded[key] = Data(config)
    return loaded[key]


def main() -> None:
    """Score the runs that stdin requests, in their order."""
    from config.parser import parse_config

    loaded: dict[str, Data] = {}
    for code, requests in groupby(map(json.loads, sys.stdin), key=itemgetter("code")):
        runs = []
        with closing(Candidate(code)) as candidate:
            for request in requests:
                config = parse_config(request["words"]).replace(**request["settings"])
                data = load_data(config, loaded)
                candidate.load(request["run"])
                runs.append((request, config, data, data.prefix_logits(candidate)))
        with closing(Candidate(code)) as candidate:
            for request, config, data, prefixes in runs:
                candidate.load(request["run"])
                score = data.score(candidate, prefixes)
                if not score["problem"]:
                    recorded = np.concatenate([np.fromfile(file, np.int64) for file in request["hashes"]])
                    score["problem"] = data.surplus_sequences(config, request["sessions"], recorded)
                print(json.dumps(score), flush=True)


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    torch.set_num_threads(1)
    try:
        main()
    except (EOFError, BrokenPipeError):
        sys.exit(1)  # the candidate's process has printed its own traceback
