"""Evaluate a trained model on a corpus: python evaluate.py RUN --data CORPUS, also under accelerate launch.

Without --num_samples every window of the validation split of a text corpus is evaluated. The metrics are the same on
any number of processes.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    import sys

    sys.path.insert(0, __file__.rpartition("/")[0])  # where PYTHONSAFEPATH is set, Python leaves it out
    from runtime.cli.scripts import run_and_exit
    from trainer.pretrained.settings import EvaluateConfig

    run_and_exit("evaluate", EvaluateConfig)


import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from data.corpus import Corpus, load_corpus
from model.loss import MetricSums
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.config.schema import DataConfig, EvaluationConfig, TrainConfig
from runtime.config.stored_settings import USE_ITS_CODE, unknown_settings
from runtime.distributed.launch import join_launch
from runtime.files import write_atomically
from runtime.json_objects import finite_or_null
from trainer.cpu_kernels import use_cpu_kernels
from trainer.evaluation import evaluate
from trainer.pretrained.load import LoadedModel, load_with_source
from trainer.pretrained.settings import EvaluateConfig
from trainer.pretrained.tokenizer import check_tokenizer

PROGRESS_SECONDS = 10
LOGIT_BYTES = 2**28  # bound on the float32 logits of a batch, unless micro_batch_size is given


def main(config: EvaluateConfig) -> None:
    """Evaluate, print the metrics, and save them with the loss at each position.

    Raise ConfigError if the model or the corpus does not exist, they do not match, or the metrics cannot be saved.
    """
    # The model, and the corpus on which to evaluate it.
    loaded, source = load_with_source(config.run, config.checkpoint, weights=config.weights)
    if source and config.data is None:
        directory, manifest = source
        unknown = [line for key, line in unknown_settings(manifest.config).items() if key.startswith("data.")]
        if unknown:  # without them, the data might be others than in training
            raise ConfigError(f"{directory}: {'; '.join(unknown)}; {USE_ITS_CODE}, or name a corpus with --data")
    settings = evaluation_settings(config, loaded)
    corpus = load_corpus(settings)
    settings = corpus.fill_in(settings)
    check_tokenizer(config.run, loaded.tokenizer, loaded.model.config.vocab_size, corpus)

    # Its metrics.
    accelerator = Accelerator(**join_launch(settings))
    model = loaded.model.to(accelerator.device)
    if accelerator.device.type == "cpu":
        use_cpu_kernels(model)
    assert model.config.vocab_size is not None, "it is set before a model is built"
    rows = max(1, LOGIT_BYTES // (4 * settings.seq_len * model.config.vocab_size))
    with accelerator.autocast():
        batch_size, report = config.micro_batch_size or rows, print_progress(corpus, settings.seq_len, accelerator)
        metrics = evaluate(model, with_positions(corpus), batch_size, accelerator, report=report)
    losses_by_position = [metrics.pop(name) for name in list(metrics) if name.startswith("val/position/")]

    # Print them, and save them with the loss at each position.
    if accelerator.is_main_process:
        assert corpus.validation is not None, "it has been evaluated"
        metrics: dict[str, Any] = metrics | {"run": config.run} | ({"step": source[1].step} if source else {})
        metrics |= {"data": identify_data(settings.data), "windows": len(corpus.validation)}
        metrics |= {"seq_len": settings.seq_len} | ({"targets": "answers"} if corpus.has_conversations else {})
        print(json.dumps(finite_or_null(metrics), indent=1))
        result = metrics | {"loss_by_position": [loss if math.isfinite(loss) else None for loss in losses_by_position]}
        directory = output_directory(config)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / "evaluation.json", json.dumps(finite_or_null(result), indent=1))
        except OSError as error:
            raise ConfigError(f"out: {str(directory)!r} cannot be written: {error}; name another one") from None
    accelerator.wait_for_everyone()


def print_progress(corpus: Corpus, seq_len: int, accelerator: Accelerator) -> Callable[[int], None]:
    """Print to stderr what is evaluated; return a function that prints every PROGRESS_SECONDS how far it is."""
    assert corpus.validation is not None, "it will be evaluated"
    total, begin, printed = len(corpus.validation), time.monotonic(), time.monotonic()

    def report(done: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if accelerator.is_main_process and now >= printed + PROGRESS_SECONDS and done < total:
            left, printed = (now - begin) / done * (total - done), now
            print(f"evaluate.py: {done:,} of {total:,} windows, {left:,.0f} s left", file=sys.stderr, flush=True)

    if accelerator.is_main_process:
        print(f"evaluate.py: {total:,} windows of {seq_len:,} tokens ...", file=sys.stderr, flush=True)
    return report


def evaluation_settings(config: EvaluateConfig, loaded: LoadedModel) -> TrainConfig:
    """Return the training settings with which to load the corpus for this model."""
    settings, limit = loaded.config, loaded.model.config.max_position_embeddings
    if settings is None or config.data is not None:
        if config.data is None:
            raise ConfigError(f"data: null, but {config.run!r} is not a run; name a corpus made by data.prepare")
        if limit < 2:
            raise ConfigError(f"run: {config.run!r} has a context of {limit} token; a loss needs at least 2")
        settings = settings or TrainConfig(seq_len=min(limit, 1024))
        packing = settings.data.packing  # packed as in training, so that attention covers the same tokens
        settings = settings.replace(data=DataConfig(source="text", path=config.data, packing=packing))
    seq_len = config.seq_len or settings.seq_len
    if not 2 <= seq_len <= limit:
        raise ConfigError(f"seq_len: {seq_len} must be from 2 to {limit}, the max_position_embeddings of the model")
    is_text = settings.data.source == "text"
    changes = {
        "seq_len": seq_len,
        "evaluation.every": 1,  # 0 would load no validation set
        "exact": False,  # `evaluate` is the same on any number of processes without it
        "model": loaded.model.config,
    }
    if config.num_samples or is_text:
        changes["evaluation.num_samples"] = config.num_samples
    elif settings.evaluation.num_samples is None:  # of a run that never evaluated
        changes["evaluation.num_samples"] = EvaluationConfig().num_samples
    if is_text:  # check_tokenizer compares the whole vocabulary
        changes["model.vocab_size"] = None
    return settings.replace(**changes)


def identify_data(data: DataConfig) -> dict[str, Any]:
    """Return the settings that identify the data of a loaded corpus, all of them for a source that a fork added."""
    if data.source == "text":
        names = ("source", "path", "mix", "hash", "packing")
    elif data.source in ("random", "stories"):
        names = ("source", "seed", *(("facts", "zipf") if data.facts else ()))
    else:
        names = [name for name in type(data).model_fields if name != "num_workers"]
    return {name: getattr(data, name) for name in names if getattr(data, name) is not None}


def with_positions(corpus: Corpus) -> Corpus:
    """Return the corpus with a score that adds the loss at each position."""

    def score(logits_BTV: Tensor, batch: dict[str, Tensor]) -> MetricSums:
        targets = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits_BTV[:, :-1].float().transpose(1, 2), targets, reduction="none")  # 0 for -100
        pairs = zip(losses.cpu().double().sum(0).tolist(), (targets != -100).sum(0).tolist(), strict=True)
        scores = corpus.score_logits(logits_BTV, batch) if corpus.score_logits else {}
        return scores | {f"position/{position}": pair for position, pair in enumerate(pairs)}

    return replace(corpus, score_logits=score)


def output_directory(config: EvaluateConfig) -> Path:
    """Return `out`, or its default."""
    path = Path(config.run).expanduser()
    if config.out is not None:
        return expand_user_path("out", config.out)
    if (path / "checkpoints").exists():
        return path
    if not path.exists():
        return Path(config.run.replace("/", "--") + ".evaluation")
    folder = path.resolve()
    if (folder / "manifest.json").exists() and folder.parent.name == "checkpoints":
        return folder.parent.parent
    return folder.with_name(f"{folder.name}.evaluation")  # not inside: the folder may be published
