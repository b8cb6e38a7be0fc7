"""Peak memory and time of a training step with a vocabulary of 50,257: python -m benchmarks.memory [--nanogpt PATH]

4 layers of 256, context 256, 8 rows (2,048 tokens), tied embeddings, float32, AdamW; each case in a process of its own,
by turns. The peak is that of the process's resident memory over that after its imports. Cases: the logits at once, the
loss in chunks, that with activation checkpointing too, and nanoGPT at the same shape, with its optimizer.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks import record
from benchmarks.measure import alternate, run
from benchmarks.nanogpt import load_model_file
from config import OptimizerConfig, TrainConfig
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import prepare_cpu, prepare_network
from training.optimizer import build_optimizer

VOCAB_SIZE, CONTEXT, ROWS, STEPS = 50_257, 256, 8, 4
SIZES = dict(n_layers=4, n_heads=4, d_model=256, d_ff=1024)
CASES = {  # chunked_loss, activation_checkpointing
    "logits at once": (False, False),
    "loss in chunks": (True, False),
    "loss in chunks, activation checkpointing": (True, True),
}


def ours(chunked_loss: bool, activation_checkpointing: bool) -> tuple[Callable, torch.optim.Optimizer]:
    prepare_cpu()
    model = GPTConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, dropout=0.0, bias=False, tie_embeddings=True, **SIZES
    )
    network = GPTModel(model)
    config = TrainConfig(chunked_loss=chunked_loss, activation_checkpointing=activation_checkpointing, model=model)
    prepare_network(network, config, torch.device("cpu"))
    return lambda tokens: network(tokens, labels=tokens)[1], build_optimizer(network, OptimizerConfig())


def nanogpt(path: str) -> tuple[Callable, torch.optim.Optimizer]:
    theirs = load_model_file(path)
    config = theirs.GPTConfig(
        block_size=CONTEXT, vocab_size=VOCAB_SIZE, n_layer=4, n_head=4, n_embd=256, dropout=0.0, bias=False
    )
    network = theirs.GPT(config)
    return lambda tokens: network(tokens, tokens)[1], network.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")


def measure(case: str, path: str | None) -> dict[str, float]:
    """In this process: train a few steps; the peak in MiB over what the imports took, and the median seconds a step."""
    before = psutil.Process().memory_info().rss
    loss_of, optimizer = nanogpt(path) if case == "nanoGPT" else ours(*CASES[case])
    tokens, seconds = torch.randint(VOCAB_SIZE, (ROWS, CONTEXT)), []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss_of(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"peak_mib": int(peak.split()[1]) / 1024 - before / 2**20, "seconds": statistics.median(seconds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", help="measure only this one, here, and print it")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments.nanogpt)))
        return
    peer = ["--nanogpt", arguments.nanogpt] if arguments.nanogpt else []
    peaks: dict[str, list[float]] = {}

    def seconds(case: str) -> float:
        output = run([sys.executable, "-m", "benchmarks.memory", "--case", case, *peer])
        measured = json.loads(output.splitlines()[-1])
        peaks.setdefault(case, []).append(measured["peak_mib"])
        return measured["seconds"]

    names = [*CASES, *(["nanoGPT"] if peer else [])]
    times = alternate({case: partial(seconds, case) for case in names}, arguments.rounds)
    figures: dict = {
        case: {"peak_mib": round(statistics.median(peaks[case])), "seconds_a_step": round(times[case], 3)}
        for case in names
    }
    if peer:
        for case in CASES:
            figures[case]["share_of_nanogpts_peak"] = round(
                figures[case]["peak_mib"] / figures["nanoGPT"]["peak_mib"], 2
            )
            figures[case]["share_of_nanogpts_time"] = round(times[case] / times["nanoGPT"], 2)
    record.save("memory", figures)


if __name__ == "__main__":
    main()
