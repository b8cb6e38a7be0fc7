"""Evaluates an arm of an experiment independently of what its code logs. Prints JSON.

    python tools/experiment/scorer.py CODE measure RUN
    python tools/experiment/scorer.py CODE targets SETTINGS...
    python tools/experiment/scorer.py CODE shape SETTINGS...
    python tools/experiment/scorer.py CODE preview CHECKS SETTINGS...

It imports the modules of the folder CODE, which trains the arm. `measure` takes the validation set, its entropy, the
logits and the size of the network from them, and computes loss and bytes itself, in the same way for both arms.
"""

import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LOGIT_BYTES = 2**28  # maximum size of the logits of a batch in float64
ROWS_AT_ONCE = 256  # of a batch for which no logits are computed
PREVIEW_SAMPLES = 64  # validation samples that a preview evaluates


def measure(run: str) -> dict[str, object]:
    """Evaluate the newest checkpoint of a run on the validation set of its settings.

    Returns:
        targets: hash of all predicted tokens, in order.
        num_targets: number of predicted tokens.
        num_bytes: bytes of text that they encode; None if the tokenizer is not byte-level.
        entropy: entropy of the data, nats/token; None if unknown.
        loss: mean cross-entropy of the targets, nats/token, computed in float64.
        is_causal: whether no logit depends on later tokens.
        parameters, flops_per_token: size of the network and its training FLOPs.
    """
    import torch
    import torch.nn.functional as F

    from data.corpus import load_corpus
    from run.load import load_run

    config, model, _ = load_run(run)
    assert config is not None, run
    config = config.replace(**{"evaluation.every": config.evaluation.every or 1, "exact": False})
    corpus, device = load_corpus(config), "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    assert config.model.vocab_size is not None  # of a trained model
    row_bytes = 8 * config.seq_len * config.model.vocab_size
    batch_size = min(config.evaluation.micro_batch_size, max(1, LOGIT_BYTES // row_bytes))
    lengths = token_lengths(corpus)
    digest, total, count, num_bytes, is_causal = sha256(), 0.0, 0, 0, True
    with torch.no_grad():
        for number, batch in enumerate(batches(corpus.validation, batch_size)):
            targets = batch.pop("labels")[:, 1:]
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            logits = model(**batch)[0]
            scores = logits[:, :-1].double().transpose(1, 2)
            total += float(F.cross_entropy(scores, targets.to(device), reduction="sum"))  # ignores targets of -100
            predicted = targets[targets != -100]
            digest.update(predicted.numpy().tobytes())
            count += len(predicted)
            num_bytes += sum(map(lengths.__getitem__, predicted.tolist())) if lengths else 0
            if number == 0:
                half = targets.shape[1] // 2
                ids = batch["input_ids"]
                batch["input_ids"] = torch.cat((ids[:, :half], ids[:, half:].flip(1)), dim=1)
                change = (model(**batch)[0] - logits)[:, :half].abs().max()
                is_causal = bool(change <= 1e-4 * logits[:, :half].abs().max())
    entropy = getattr(corpus.validation, "entropy_nats", None)
    return {
        "targets": digest.hexdigest()[:16],
        "num_targets": count,
        "num_bytes": num_bytes if lengths else None,
        "entropy": None if entropy is None else entropy / count,
        "loss": total / count,
        "is_causal": is_causal,
        "parameters": model.num_parameters(),
        "flops_per_token": model.flops_per_token(config.seq_len),
    }


def batches(dataset: Any, batch_size: int = ROWS_AT_ONCE) -> Iterator[dict[str, Any]]:
    """Yield all rows of a map-style dataset in order, as batches of at most `batch_size` rows."""
    from data.loader import load_batch

    for start in range(0, len(dataset), batch_size):
        yield load_batch(dataset, range(start, min(start + batch_size, len(dataset))))


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


def targets(*settings: str) -> dict[str, object]:
    """Return `targets` and `num_targets` of `measure` for settings of train.py, before any training."""
    from config.parser import parse_config
    from data.corpus import load_corpus

    digest, count = sha256(), 0
    for batch in batches(load_corpus(parse_config(list(settings))).validation):
        labels = batch["labels"][:, 1:]
        predicted = labels[labels != -100]
        digest.update(predicted.numpy().tobytes())
        count += len(predicted)
    return {"targets": digest.hexdigest()[:16], "num_targets": count}


def shape(*settings: str) -> dict[str, int]:
    """Return parameters and flops_per_token of the network that settings of train.py describe."""
    from checkpoint.provenance import network_size
    from config.parser import parse_config
    from data.corpus import load_corpus

    config = parse_config(list(settings))
    return network_size(load_corpus(config).fill_in(config))


def preview(checks: str, *settings: str) -> dict[str, object]:
    """Train a short run with settings of train.py, in a temporary folder.

    One thread trains, so that equal code and settings give equal bits.

    Args:
        checks: "verify" to run the checks of verify.py that train nothing; "" for none.
        settings: settings of train.py for a few steps.

    Returns:
        digest, loss: fingerprint of weights and moments, and val/loss, after the last step; None if the loss is NaN.
        rows: number of different rows that the model was trained on.
        validation_rows: number of these rows that are in the validation set.
        broken: names and figures of the checks that failed.
    """
    import torch
    from torch.utils.data import Subset

    import train
    from checks.short_run import parse_short_run
    from config.parser import parse_config
    from data.corpus import load_corpus
    from model.gpt import GPTModel
    from run.metrics_log import read_rows
    from training.results import NonFiniteError

    torch.set_num_threads(1)
    rows: set[bytes] = set()
    forward = GPTModel.forward

    @functools.wraps(forward)
    def record_rows(self: GPTModel, input_ids: torch.Tensor, *others: Any, **inputs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            rows.update(row.numpy().tobytes() for row in input_ids.cpu())
        return forward(self, input_ids, *others, **inputs)

    broken, last = [], {}
    with TemporaryDirectory() as folder:
        words = [*settings, "--name", "preview", "--out_dir", folder]
        if checks:
            from checks.verification import Verification

            verification = Verification(parse_short_run(words))
            for name, check in verification.model_checks().items():
                result, figure = verification.run(check)
                broken += [f"{name}: {figure}"] if result == "FAIL" else []
        config = parse_config(words)
        corpus = load_corpus(config)
        assert corpus.validation is not None, "the settings have evaluations"
        indices = range(min(len(corpus.validation), PREVIEW_SAMPLES))
        few = Subset(corpus.validation, indices)  # pyright: ignore[reportArgumentType] - it is map-style
        evaluate = train.evaluate
        train.evaluate = lambda model, corpus, *others: evaluate(model, replace(corpus, validation=few), *others)
        GPTModel.forward = record_rows
        try:
            train.main(config)
            last = [*read_rows(Path(folder, "preview", "metrics.jsonl"))][-1]
        except NonFiniteError:
            pass
    held_out = (row.numpy().tobytes() for batch in batches(corpus.validation) for row in batch["input_ids"])
    return {
        "digest": last.get("state/digest"),
        "loss": last.get("val/loss"),
        "rows": len(rows),
        "validation_rows": len(rows.intersection(held_out)),
        "broken": broken,
    }


if __name__ == "__main__":
    commands = {"measure": measure, "targets": targets, "shape": shape, "preview": preview}
    sys.path[0], command = sys.argv[1], commands[sys.argv[2]]
    print(json.dumps(command(*sys.argv[3:])), flush=True)
    os._exit(0)  # so that nothing that the arm's code prints at exit follows the result
