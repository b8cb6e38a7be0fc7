"""Runs a checkout's own code: trains it, computes its logits, runs the checks of its verify.py.

    python tools/experiment/candidate.py CODE train HASHES [settings of train.py]
    python tools/experiment/candidate.py CODE logits FILE_DESCRIPTOR
    python tools/experiment/candidate.py CODE checks [settings of train.py]

CODE may be changed by whoever profits from a good score. So this process decides nothing: it trains, records which
sequences enter the model, and computes logits from tokens without knowing what they are compared with.
tools/experiment/scorer.py judges both in another process, with the code of the baseline.
"""

import functools
import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor

EXIT_STOPPED = 75  # of train.py, after it has saved


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
    """Run train.py and append the hashes of all sequences that its model is trained on to a file, as int64.

    A process that fails or is killed appends nothing, as its steps are trained again. Returns the exit code.
    """
    from cli.scripts import run_script
    from distributed.world import process_rank
    from model.gpt import GPTModel

    hashes: list[Tensor] = []
    forward = GPTModel.forward

    @functools.wraps(forward)
    def record_sequences(self: GPTModel, input_ids: Tensor, *others: Any, **inputs: Any) -> Any:
        if torch.is_grad_enabled():
            hashes.append(hash_sequences(input_ids.detach()))
        return forward(self, input_ids, *others, **inputs)

    GPTModel.forward = record_sequences
    sys.argv = ["train.py", *words]
    exit_code = run_script("train")
    if exit_code in (0, EXIT_STOPPED):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with open(f"{file}.{process_rank()}", "ab") as recorded:
            recorded.write(torch.cat(hashes).cpu().numpy().tobytes() if hashes else b"")
    return exit_code


def logits(file_descriptor: str) -> int:
    """Answer messages on a connection: the path of a run loads its model, a batch is answered by its logits.

    A batch is a safetensors file of the arguments of the model's forward without labels, each [B, T]; the answer has
    `logits`, float32 [B, T, V].
    """
    from pretrained.load import load_run

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


def checks(*words: str) -> int:
    """Print as JSON the failed checks of verify.py that train nothing, by name, except those of transformers' formats.

    A changed network may differ from GPT-2 and Qwen3, so `logits = transformers'` is not required to hold.
    """
    from checks.short_run import parse_short_run
    from checks.verification import Verification

    verification, broken = Verification(parse_short_run(list(words))), {}
    for name, check in verification.model_checks().items():
        result, figure = verification.run(check)
        if result == "FAIL" and not name.startswith("logits = transformers'"):
            broken[name] = figure
    print(json.dumps(broken), flush=True)
    return 0


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    exit_code = {"train": train, "logits": logits, "checks": checks}[sys.argv[2]](*sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # without teardown, which can hang in gloo's threads
