"""Training speed on a CPU, against nanoGPT: python -m benchmarks.throughput [--nanogpt PATH] [--rounds 3]

Two shapes of nanoGPT: its recipe for a CPU (4 layers of 128, 64 tokens, batch 12) and its small model for a GPU (6
layers of 384, 256 tokens, batch 16). Each one's real train.py is launched, by turns, and the median of its steps taken.
On a CPU nanoGPT computes in float32, compiled or not; here it is also put under autocast to bfloat16.
"""

import argparse
from functools import partial

from benchmarks import record
from benchmarks.measure import alternate, training_tokens_per_second
from benchmarks.nanogpt import NanoGPT
from training.compute import available_cores

SHAPES = {  # layers, heads, d_model, context, batch; steps to time, of ours and of nanoGPT
    "4 x 128, context 64, batch 12": (4, 4, 128, 64, 12, 200),
    "6 x 384, context 256, batch 16": (6, 6, 384, 256, 16, 12),
}


def ours(shape: tuple[int, ...], precision: str, compiled: bool) -> float:
    """Tokens per second of train.py on the GPT-2 family, with nanoGPT's sizes."""
    n_layers, n_heads, d_model, seq_len, batch, steps = shape
    model = dict(n_layers=n_layers, n_heads=n_heads, d_model=d_model, d_ff=4 * d_model, vocab_size=65)
    model |= dict(max_position_embeddings=seq_len, dropout=0.0, bias="false", tie_embeddings="true")
    settings = dict(seq_len=seq_len, micro_batch_size=batch, steps=steps, compile=str(compiled).lower())
    settings |= {"tracking.log_every": max(2, steps // 20), "tracking.wandb": "disabled", "data.num_samples": 10_000}
    settings |= {f"model.{name}": value for name, value in model.items()}
    arguments = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return training_tokens_per_second(
        *("--config", "configs/random_tokens.yaml", *arguments), ACCELERATE_MIXED_PRECISION=precision
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures = {"threads": available_cores(), "rounds": arguments.rounds}
    for name, shape in SHAPES.items():
        cases = {}
        for precision, written in (("no", "float32"), ("bf16", "bfloat16")):
            for compiled in (False, True):
                label = f"{written}{', compiled' if compiled else ''}"
                cases[f"ours, {label}"] = partial(ours, shape, precision, compiled)
                if arguments.nanogpt:
                    n_layer, n_head, n_embd, block_size, batch_size, steps = shape
                    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size)
                    sizes |= dict(batch_size=batch_size, max_iters=steps, compile=compiled)
                    peer = NanoGPT(arguments.nanogpt)
                    cases[f"nanoGPT, {label}"] = partial(peer.tokens_per_second, precision == "bf16", **sizes)
        speeds = alternate(cases, arguments.rounds)
        figures[name] = {"tokens_per_second": {case: round(speed) for case, speed in speeds.items()}}
        if arguments.nanogpt:
            best = {}
            for case, speed in speeds.items():
                side_and_precision = case.removesuffix(", compiled")
                best[side_and_precision] = max(speed, best.get(side_and_precision, 0.0))
            pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
            figures[name]["ratio"] = {
                f"{mine} to {theirs}": round(best[f"ours, {mine}"] / best[f"nanoGPT, {theirs}"], 2)
                for mine, theirs in pairs
            }
    record.save("throughput", figures)


if __name__ == "__main__":
    main()
