"""Runs the code of a variant: resolves its settings, trains it, computes its logits.

    python tools/experiment/variant_program.py CODE resolve BASELINE < settings
    python tools/experiment/variant_program.py CODE train FILE [settings of train.py]
    python tools/experiment/variant_program.py CODE logits FILE_DESCRIPTOR

CODE may be changed by somebody who profits from a good score. So this process decides nothing: it answers questions,
and evaluator.py computes the loss in another process, with the code of the baseline.
"""

import functools
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
from safetensors import torch as safetensors
from torch import Tensor

EXIT_STOPPED = 75  # of train.py, after it has saved
MAX_COUNTED_POSITIONS = 128  # of the sequence whose FLOPs are counted


# Settings and costs


def answer_stream() -> TextIO:
    """Return stdout for answers alone: what the code or a library prints from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # in order with the errors, whose last line is reported
    return answers


def resolve(baseline: str) -> int:
    """Answer each line of stdin, a number and an object of settings by `section.name`, by the number and an object.

    The object has `settings`, all of them; `parameters`, `flops_per_token`, and `warnings`, such as checks of verify.py
    that the model fails. Or it has `refused`, the message of wrong settings, or `crash`, another error with its place.
    """
    # The checks are those of the baseline; what they import is of the variant.
    checks = ModuleType("trainer.checks")
    checks.__path__ = [str(Path(baseline, "trainer", "checks"))]
    sys.modules["trainer.checks"] = checks

    from runtime.config.errors import ConfigError

    answers = answer_stream()
    for line in sys.stdin:
        number, _, settings = line.partition(" ")
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
                config.write(settings)  # JSON is YAML
                config.flush()
                answer = describe(config.name)
                if sys.path[0] != baseline:
                    answer["warnings"] += check_model(config.name)
        except ConfigError as error:
            answer = {"refused": str(error).replace(f"{config.name}: ", "")}
        except Exception as error:  # whatever the code of the variant raises
            frames = traceback.extract_tb(error.__traceback__)
            root = os.path.join(sys.path[0], "")
            places = [
                f"{frame.filename.removeprefix(root)}:{frame.lineno}"
                for frame in frames
                if frame.filename.startswith(root)
            ]
            answer = {"crash": f"{type(error).__name__}: {error}" + (f" ({places[-1]})" if places else "")}
        print(number, json.dumps(answer), file=answers, flush=True)
    return 0


def describe(file: str) -> dict[str, Any]:
    """Resolve the settings of a config file, and count what a run with them costs."""
    from data.corpus import load_corpus
    from model.gpt import GPTModel, build_on_meta_device
    from runtime.config.errors import ConfigError
    from runtime.config.parser import parse_config

    if not getattr(GPTModel, "predicts_next_token", True):  # an older commit does not have it
        problem = "the model does not predict the next token, whose loss tools.experiment computes for all variants"
        raise ConfigError(f"predicts_next_token: {problem}; train seeds of both with tools.sweep, then tools.compare")
    config = parse_config(["--config", file])
    if not getattr(config, "has_steps", True):  # an older commit does not have it
        raise ConfigError("epochs or tokens: tools.experiment needs the length of its runs as --steps")
    with_initial = config
    if config.init_from:  # it decides what the network is
        from trainer.run.resolve import resolve_initial_model

        with_initial, _ = resolve_initial_model(config)
    whole = {"evaluation.num_samples": None} if config.data.source == "text" else {}
    corpus = load_corpus(with_initial.replace(**whole))
    with_vocabulary = corpus.fill_in(with_initial)
    flops, warnings = flops_per_token(with_vocabulary)
    return {
        "settings": config.flat() | {"name": None},
        "parameters": sum(weight.numel() for weight in build_on_meta_device(with_vocabulary.model).parameters()),
        "flops_per_token": flops,
        "validation_rows": len(corpus.validation) if config.data.source == "text" and corpus.validation else None,
        "warnings": warnings,
    }


def flops_per_token(config: Any) -> tuple[float, list[str]]:
    """Count the FLOPs per token of the matrix products in a forward and backward, as verify.py does; return warnings.

    If the model fails on the short sequence, take its own estimate and return the error as a warning.
    """
    from model.gpt import GPTModel
    from trainer.checks.model import count_flops

    length = min(config.seq_len, config.model.max_position_embeddings, MAX_COUNTED_POSITIONS)
    model = GPTModel(config.model.replace(dropout=0.0)).train()
    try:
        return count_flops(model, length), []
    except Exception as error:
        estimate = "so its flops_per_token is taken instead"
        return model.flops_per_token(length), [
            f"FLOPs cannot be counted on {length} positions, {estimate}: {type(error).__name__}: {error}"
        ]


def check_model(file: str) -> list[str]:
    """Run the checks of verify.py that train nothing; return those that fail or do not apply.

    A changed network may differ from every family, so `logits = transformers'` is not required to hold.
    """
    import train
    from trainer.checks.short_run import parse_short_run
    from trainer.checks.verification import Verification

    warnings = []
    with tempfile.TemporaryDirectory() as folder:  # verify.py makes runs of its own
        config = parse_short_run(["--config", file, "--out_dir", folder, "--exact", "false"])
        verification = Verification(config, train)
        for name, check in verification.model_checks().items():
            result, figure = verification.run(check)
            if result != "PASS" and not name.startswith("logits = transformers'"):
                kind = "fails" if result == "FAIL" else "skips"
                warnings.append(f"{kind} a check of verify.py: {name}: {figure}")
    return warnings


# Training


def hash_sequences(input_ids: Tensor) -> Tensor:
    """Hash every sequence of tokens on its device, int64 [B, T] -> int64 [B].

    A sequence is multiplied by T random odd numbers modulo 2^64 and summed, then its bits are mixed twice.
    """
    generator = torch.Generator().manual_seed(input_ids.shape[1])
    factors = torch.randint(-(2**63), 2**63 - 1, (input_ids.shape[1],), generator=generator) | 1
    hashes = ((input_ids + 1) * factors.to(input_ids.device)).sum(1)
    for factor in (-7046029254386353131, -4658895280553007687):  # odd constants of SplitMix64 (Steele et al. 2014)
        hashes = (hashes ^ (hashes >> 31)) * factor
    return hashes


def train(file: str, *words: str) -> int:
    """Run train.py and record what was read of its data sets, for whatever purpose; return the exit code.

    FILE.RANK has the hashes of all sequences, int64, and counts.RANK beside it a line of JSON for each session, from
    `count_work`. A session that fails or is killed records nothing.
    """
    import data.corpus
    from runtime.cli.scripts import run_script
    from runtime.distributed.world import process_rank

    # Only the baseline's `data/` may define the classes of data sets, so what they return is recorded there.
    reads, load_corpus = RecordedReads(), data.corpus.load_corpus

    @functools.wraps(load_corpus)
    def load_recorded(*words: Any, **named: Any) -> Any:
        corpus = load_corpus(*words, **named)
        for dataset in filter(None, (corpus.train, corpus.validation)):
            reads.record(dataset)
        return corpus

    data.corpus.load_corpus = load_recorded
    count = count_work()
    sys.argv = ["train.py", *words]
    exit_code = run_script("train")
    if exit_code in (0, EXIT_STOPPED):
        recorded = Path(f"{file}.{process_rank()}")
        recorded.parent.mkdir(parents=True, exist_ok=True)
        with open(recorded, "ab") as opened:
            opened.write(torch.cat(reads.hashes).numpy().tobytes())
        with open(recorded.with_name(f"counts.{process_rank()}"), "a") as opened:
            print(json.dumps(count()), file=opened)
    return exit_code


def count_work() -> Callable[[], dict[str, int]]:
    """Count, from now on, the tokens of forwards of the model that keep a graph, and the updates of its weights.

    Returns:
        A function that returns `tokens` and `updates`. Of several optimizers, the one with the most updates counts.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from model.gpt import GPTModel

    tokens, updates, forward = 0, Counter[int](), GPTModel.forward

    @functools.wraps(forward)
    def counted(*words: Any, **named: Any) -> Any:
        nonlocal tokens
        tokens += (named["input_ids"] if "input_ids" in named else words[1]).numel() * torch.is_grad_enabled()
        return forward(*words, **named)

    GPTModel.forward = counted
    register_optimizer_step_post_hook(lambda optimizer, *_: updates.update([id(optimizer)]))
    return lambda: {"tokens": tokens, "updates": max(updates.values(), default=0)}


class RecordedReads:
    """The hash of each sequence that data sets return, once for each that was asked for.

    `__getitem__` may call `arrays`, and that of a mixture calls those of its corpora: only the outermost call counts.
    """

    def __init__(self) -> None:
        self.hashes = [torch.empty(0, dtype=torch.int64)]
        self._depth = 0
        self._kinds: set[type] = set()

    def record(self, dataset: Any) -> None:
        """Record from now on what all data sets of this class return, and of the classes of its members."""
        for kind in {type(dataset), *map(type, getattr(dataset, "datasets", ()))} - self._kinds:
            self._kinds.add(kind)
            for name in ("__getitem__", "arrays"):
                if method := getattr(kind, name, None):
                    setattr(kind, name, self._recorded(method))

    def _recorded(self, method: Any) -> Any:
        @functools.wraps(method)
        def read(*words: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                samples = method(*words, **named)
            finally:
                self._depth -= 1
            if self._depth == 0:
                input_ids = torch.as_tensor(samples["input_ids"])
                self.hashes.append(hash_sequences(input_ids.view(-1, input_ids.shape[-1])))
            return samples

        return read


# Evaluation


def logits(file_descriptor: str) -> int:
    """Answer messages on a connection: the path of a run loads its model, a batch is answered by its logits.

    A batch is a safetensors file of the arguments of the model's forward without labels, each [B, T]; the answer has
    `logits`, float32 [B, T, V].
    """
    from trainer.pretrained.load import load_run

    connection = Connection(int(file_descriptor))
    model = None
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return 0
        if message.startswith(b"/"):
            model = load_run(message.decode())[1].to("cuda" if torch.cuda.is_available() else "cpu")
            continue
        assert model is not None, "the first message is a path"
        device = next(model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in safetensors.load(message).items()}
        with torch.no_grad():
            answer = model(**batch)[0].float().cpu().contiguous()
        connection.send_bytes(safetensors.save({"logits": answer}))


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    exit_code = {"resolve": resolve, "train": train, "logits": logits}[sys.argv[2]](*sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # without teardown, which can hang in gloo's threads
