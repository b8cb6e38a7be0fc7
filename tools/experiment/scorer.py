"""Judges finished runs of a candidate with the code of the baseline. Prints a JSON object for each run.

    python -m tools.experiment.scorer BASELINE_CODE < requests

A request is a line of JSON with `run`, the path of a run, and `code`, the folder of its code; `settings`, flat settings
of train.py that this code knows; and `rows`, the files that candidate.py wrote while it trained the run. Those of one
code are consecutive. Three rules make a score hard to fake:

1. The loss is computed here, from logits that the candidate's process computes from tokens alone.
2. At sampled positions, the logits of the prefix alone equal those of the whole row. The candidate answers for all
   prefixes in one process, and for the rows in another, so a model that reads the future cannot have seen it.
3. Rows that entered the model in training are those of this code's batches, not more often, and none of the validation
   set.
"""

import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
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

from tools.experiment.candidate import hash_rows

LOGIT_BYTES = 2**28  # maximum size of the logits of a batch
ROWS_AT_ONCE = 256  # of a batch for which no logits are computed
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


def batches(dataset: Any, batch_size: int = ROWS_AT_ONCE) -> Iterator[dict[str, Tensor]]:
    """Yield all rows of a map-style dataset in order, as batches of at most `batch_size` rows."""
    from data.loader import load_batch

    for start in range(0, len(dataset), batch_size):
        yield load_batch(dataset, range(start, min(start + batch_size, len(dataset))))


def sample_prefixes(dataset: Any) -> dict[int, int]:
    """Choose NUM_PREFIXES rows and in each a position that predicts a token; return the position after it by row."""
    from data.loader import load_batch

    random, ends = np.random.default_rng(0), {}
    for index in random.permutation(len(dataset))[:NUM_PREFIXES].tolist():
        positions = (load_batch(dataset, [index])["labels"][0, 1:] != -100).nonzero()[:, 0]
        if len(positions):
            ends[index] = int(random.choice(positions.numpy())) + 1
    return ends


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without its labels, the tokens that the model is to predict."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def token_lengths(corpus: Any) -> dict[int, int] | None:
    """Return the bytes that each token of a byte-level tokenizer encodes, 0 for special tokens; None for others.

    Such a tokenizer writes a token as one character per byte.
    """
    if corpus.tokenizer is None:
        return None
    parts = json.loads(corpus.tokenizer.to_str())
    if '"ByteLevel"' not in json.dumps([parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")]):
        return None
    lengths = {index: len(token) for token, index in corpus.tokenizer.get_vocab().items()}
    for index, token in corpus.tokenizer.get_added_tokens_decoder().items():  # written as plain text
        lengths[index] = 0 if token.special else len(token.content.encode())
    return lengths | {corpus.end_of_text: 0}


class Data:
    """The validation and the training rows of one data configuration, loaded by the code of the baseline."""

    def __init__(self, config: Any):
        from data.corpus import load_corpus

        self.corpus = load_corpus(config)
        self.config = self.corpus.fill_in(config)
        self.ends = sample_prefixes(self.corpus.validation)
        self.hash_by_index: dict[int, int] = {}

    def hash_training_rows(self, indices: list[int]) -> list[int]:
        """Return the hashes of training rows; each is loaded once."""
        from data.loader import load_batch

        missing = [index for index in dict.fromkeys(indices) if index not in self.hash_by_index]
        for start in range(0, len(missing), ROWS_AT_ONCE):
            part = missing[start : start + ROWS_AT_ONCE]
            hashes = hash_rows(load_batch(self.corpus.train, part)["input_ids"]).tolist()
            self.hash_by_index |= dict(zip(part, hashes, strict=True))
        return [self.hash_by_index[index] for index in indices]

    @functools.cached_property
    def validation_hashes(self) -> set[int]:
        """Hashes of the validation rows."""
        return {row for batch in batches(self.corpus.validation) for row in hash_rows(batch["input_ids"]).tolist()}

    @functools.cached_property
    def targets(self) -> dict[str, Any]:
        """Hash and number of the predicted tokens, the bytes of text that they encode, and their entropy in nats."""
        digest, count, num_bytes = sha256(), 0, 0
        lengths = token_lengths(self.corpus)
        for batch in batches(self.corpus.validation):
            labels = batch["labels"][:, 1:]
            predicted = labels[labels != -100]
            digest.update(predicted.numpy().tobytes())
            count += len(predicted)
            num_bytes += sum(map(lengths.__getitem__, predicted.tolist())) if lengths else 0
        entropy = getattr(self.corpus.validation, "entropy_nats", None)
        return {
            "targets": digest.hexdigest()[:16],
            "num_targets": count,
            "num_bytes": num_bytes if lengths else None,
            "entropy": None if entropy is None else entropy / count,
        }

    def surplus_rows(self, config: Any, sessions: list[tuple[int, int]], recorded: np.ndarray) -> str:
        """Describe the rows that entered the model but are not in the batches of a run; "" if there are none.

        Args:
            config: the settings of the run.
            sessions: first step and number of processes of each session. Before its first step, every process runs its
                first micro-batch once without an update.
            recorded: int64 [n], from candidate.py.
        """
        order = self.corpus.global_batches(config)
        indices = [index for step in range(config.steps) for index in order.indices(step)]
        for step, processes in sessions:
            for rank in range(processes if step < config.steps else 0):
                indices += order.indices(step, rank, processes)[: config.micro_batch_size]
        surplus = Counter(recorded.tolist()) - Counter(self.hash_training_rows(indices))
        if not surplus:
            return ""
        held_out = sum(count for row, count in surplus.items() if row in self.validation_hashes)
        text = (
            f"{surplus.total():,} of the {len(recorded):,} rows on which its model was trained are not in its batches"
        )
        return text + (f"; {held_out:,} of them are in the validation set" if held_out else "")

    def score(self, candidate: Candidate, prefixes: dict[int, Tensor]) -> dict[str, Any]:
        """Compute the loss of the model that a candidate has loaded, and compare its logits with those of prefixes."""
        total, count, problem = 0.0, 0, ""
        row_bytes = 4 * self.config.seq_len * (self.config.model.vocab_size or 1)
        batch_size = min(self.config.evaluation.micro_batch_size, max(1, LOGIT_BYTES // row_bytes))
        for number, batch in enumerate(batches(self.corpus.validation, batch_size)):
            logits, labels = candidate.logits(inputs_of(batch)), batch["labels"][:, 1:]
            is_target = labels != -100
            losses = F.cross_entropy(logits[:, :-1][is_target], labels[is_target], reduction="none")
            total += float(losses.sum(dtype=torch.float64))
            count += len(losses)
            for index in self.ends.keys() & range(number * batch_size, number * batch_size + len(labels)):
                alone, row = prefixes[index], logits[index - number * batch_size, self.ends[index] - 1]
                if not (alone - row).abs().max() <= TOLERANCE * alone.abs().max():
                    problem = (
                        f"its logits depend on later tokens: in validation row {index}, those at position "
                        f"{self.ends[index] - 1} change by {(alone - row).abs().max():.3g} if the rest is left out"
                    )
        return {"loss": total / count, "problem": problem}

    def prefix_logits(self, candidate: Candidate) -> dict[int, Tensor]:
        """Return the last logits of each sampled prefix, [V], by row."""
        from data.loader import load_batch

        rows = {index: inputs_of(load_batch(self.corpus.validation, [index])) for index in self.ends}
        return {
            index: candidate.logits({name: tensor[:, : self.ends[index]] for name, tensor in row.items()})[0, -1]
            for index, row in rows.items()
        }


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
                score = data.targets | data.score(candidate, prefixes)
                if not score["problem"]:
                    recorded = np.concatenate([np.fromfile(file, np.int64) for file in request["rows"]])
                    score["problem"] = data.surplus_rows(config, request["sessions"], recorded)
                print(json.dumps(score), flush=True)


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    torch.set_num_threads(1)
    try:
        main()
    except (EOFError, BrokenPipeError):
        sys.exit(1)  # the candidate's process has printed its own traceback
