"""What train.py costs over a hand-written loop: python -m benchmarks.overhead [--rounds 5]

Tokens per second of train.py, with its data loading, logging, W&B (offline), clipping and checks, as a share of those
of benchmarks/bare_loop.py, by turns: in 1 process, and in 2 with DDP. Two cases: the stories recipe, where steps are
short and a grammar writes the data meanwhile, and a model of 3 million parameters on random tokens.
"""

import argparse
import sys
from functools import partial

from benchmarks import record
from benchmarks.measure import alternate, run, training_tokens_per_second

CASES = {
    "stories, 0.46M parameters": "--config configs/stories.yaml --evaluation.every 0 --steps 400"
    " --tracking.log_every 20",
    "random tokens, 3.4M parameters": "--config configs/random_tokens.yaml --model.vocab_size 512 --model.n_layers 4"
    " --model.d_model 256 --model.d_ff 1024 --seq_len 128 --steps 120 --tracking.log_every 6",
}


def bare(processes: int, *arguments: str) -> float:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    output = run([sys.executable, *launcher, "-m", "benchmarks.bare_loop", *arguments])
    return float(output.partition("tokens/s = ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures = {"rounds": rounds}
    for name, settings in CASES.items():
        for processes in (0, 2):
            arguments = [*settings.split(), "--micro_batch_size", str(16 // max(1, processes))]
            speeds = alternate(
                {
                    "train.py": partial(training_tokens_per_second, *arguments, processes=processes),
                    "bare loop": partial(bare, processes, *arguments),
                },
                rounds,
            )
            figures[f"{name}, {max(1, processes)} process(es)"] = {
                "tokens_per_second": {case: round(speed) for case, speed in speeds.items()},
                "ratio": round(speeds["train.py"] / speeds["bare loop"], 3),
            }
    record.save("overhead", figures)


if __name__ == "__main__":
    main()
