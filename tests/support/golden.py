"""Short exact runs of each kind, and the digests that they end with on every x86-64 processor with AVX2.

`python -m tests.support.golden FOLDER` trains them all in this process and prints the content of
tests/repo/golden.yaml. A change that alters these digests alters those of docs/track.md too: measure both records.
"""

import contextlib
import sys
from pathlib import Path

import yaml

from runtime.cli import scripts
from tests.conftest import ROOT, metrics

TINY = ["--config", str(ROOT / "tests" / "support" / "tiny_stories.yaml"), "--exact", "true"]
TINY += "--steps 4 --checkpoint.every 4 --evaluation.every 4".split()
QWEN = """--model.position rope --model.norm rmsnorm --model.mlp swiglu --model.n_kv_heads 1 --model.qk_norm true
    --model.bias false""".split()
# 64 wide: libraries have special code for smaller products.
WIDE = "--model.d_model 64 --model.d_ff 160 --seq_len 96 --data.source random --model.vocab_size 512".split()
KINDS = {
    "stories": ["--evaluation.num_scored_generations", "8"],
    "gpt2, random tokens": WIDE,
    "qwen3, muon, chunked loss": [*QWEN, "--optimizer.name", "muon", "--chunked_loss", "true"],
    "qwen3, recomputed": [*WIDE, *QWEN, "--activation_checkpointing", "true", "--model.dropout", "0"],
    "text, isolated documents": "--data.source text --data.packing isolated --seq_len 64 --data.path".split(),
}
OF_ANY_PROCESSOR = (
    "state/digest",
    "train/loss",
    "train/grad_norm",
    "val/loss",
    "generation/logprob",
    "generation/valid",
)


def corpus(folder: Path) -> Path:
    """Corpus of bytes that is the same on every machine."""
    from data.prepare.prepare import PrepareConfig, prepare

    text = folder / "text.jsonl"
    lines = ['{"text": "' + " ".join(f"{i * j % 97} gold" for j in range(2 + i % 19)) + '"}\n' for i in range(200)]
    text.write_text("".join(lines))
    prepare(
        PrepareConfig(
            source=str(text), tokenizer="byte", out=str(folder / "corpus"), validation="hash:0.2", num_workers=1
        )
    )
    return folder / "corpus"


def train_all(folder: Path) -> dict[str, dict[str, str | float]]:
    """Train a run of each kind and return its last logged metrics."""
    digests = {}
    for number, (kind, settings) in enumerate(KINDS.items()):
        path = [str(corpus(folder))] if settings[-1] == "--data.path" else []
        sys.argv = ["train.py", *TINY, *settings, *path, "--out_dir", str(folder), "--name", str(number)]
        with contextlib.redirect_stdout(sys.stderr):
            assert scripts.run_script("train") == 0, kind
        last = metrics(folder / str(number))[-1]
        digests[kind] = {name: last[name] for name in OF_ANY_PROCESSOR if name in last}
    return digests


if __name__ == "__main__":
    print(yaml.safe_dump(train_all(Path(sys.argv[1])), sort_keys=False))
    scripts.exit_without_teardown(0)
