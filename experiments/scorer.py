"""Measures a side of an experiment by the same ruler as the other:
python experiments/scorer.py CODE measure RUN, or CODE shape SETTINGS. Prints JSON.

It runs with the modules of the folder CODE, which trains that side, and takes from them the validation set and the
logits alone. The loss is computed here, and the bytes are counted, so that it is the same measure for both, whatever
their code calls a loss.
"""

import json
import sys
from hashlib import sha256

LOGIT_BYTES = 2**28  # in float64, of the rows that are looked at together


def measure(run: str) -> dict[str, object]:
    """Of the newest checkpoint of a run, on the validation set of its settings.

    Returns:
        targets: a hash of all tokens that are predicted, in order; num_targets; num_bytes: of text that these stand
        for, None of a tokenizer that is not byte-level; floor: the lowest possible loss in nats
        a target, None where it is not known; loss: the mean cross-entropy of the targets, by float64; looks_ahead:
        whether a logit depends on tokens after it; parameters; and flops_per_token.
    """
    import torch
    import torch.nn.functional as F

    from config.resolve import replace_settings
    from data.corpus import load_corpus
    from data.loader import load_batch
    from run.load import load_run

    config, model, _ = load_run(run)
    config = replace_settings(config, {"evaluation.every": config.evaluation.every or 1, "exact": False})
    corpus, device = load_corpus(config), "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    num_rows = len(corpus.validation)
    size = min(
        config.evaluation.micro_batch_size, max(1, LOGIT_BYTES // (8 * config.seq_len * config.model.vocab_size))
    )
    lengths = token_lengths(corpus)
    hashed, total, count, num_bytes, looks_ahead = sha256(), 0.0, 0, 0, False
    with torch.no_grad():
        for start in range(0, num_rows, size):
            batch = load_batch(corpus.validation, range(start, min(start + size, num_rows)))
            targets = batch.pop("labels")[:, 1:]
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            logits = model(**batch)[0]
            scores = logits[:, :-1].double().transpose(1, 2)
            total += float(F.cross_entropy(scores, targets.to(device), reduction="sum"))  # but for those of -100
            predicted = targets[targets != -100]
            hashed.update(predicted.numpy().tobytes())
            count += len(predicted)
            num_bytes += sum(map(lengths.__getitem__, predicted.tolist())) if lengths else 0
            if start == 0:
                half = targets.shape[1] // 2
                ids = batch["input_ids"]
                batch["input_ids"] = torch.cat((ids[:, :half], ids[:, half:].flip(1)), dim=1)
                change = (model(**batch)[0] - logits)[:, :half].abs().max()
                looks_ahead = bool(change > 1e-4 * logits[:, :half].abs().max())
    floor = getattr(corpus.validation, "floor_nats", None)
    return {
        "targets": hashed.hexdigest()[:16],
        "num_targets": count,
        "num_bytes": num_bytes if lengths else None,
        "floor": None if floor is None else floor / count,
        "loss": total / count,
        "looks_ahead": looks_ahead,
        "parameters": model.num_parameters(),
        "flops_per_token": model.flops_per_token(config.seq_len),
    }


def token_lengths(corpus) -> dict[int, int] | None:
    """The bytes of each token of a byte-level tokenizer, which writes a letter for each; of the special ones none."""
    if corpus.tokenizer is None:
        return None
    parts = json.loads(corpus.tokenizer.to_str())
    if '"ByteLevel"' not in json.dumps([parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")]):
        return None
    lengths = {index: len(token) for token, index in corpus.tokenizer.get_vocab().items()}
    for index, token in corpus.tokenizer.get_added_tokens_decoder().items():  # written as they are
        lengths[index] = 0 if token.special else len(token.content.encode())
    return lengths | {corpus.end_of_text: 0}


def shape(*settings: str) -> dict[str, int]:
    """parameters and flops_per_token of the network that these settings of train.py make."""
    import torch

    from config.parser import parse_config
    from data.corpus import load_corpus
    from model.gpt import GPTModel

    config = parse_config(list(settings))
    config = load_corpus(config).complete(config)
    with torch.device("meta"):
        network = GPTModel(config.model)
    return {"parameters": network.num_parameters(), "flops_per_token": network.flops_per_token(config.seq_len)}


if __name__ == "__main__":
    sys.path[0], asked = sys.argv[1], {"measure": measure, "shape": shape}[sys.argv[2]]
    print(json.dumps(asked(*sys.argv[3:])))
