"""The runs of tools.scale: models of several widths trained for several budgets, and their measured losses."""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data.sampler import BatchSizes
from data.synthetic.stories import get_story_generator
from model.config import GPTConfig
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig
from tools.jobs.runner import Job
from tools.scale.recipe import learning_rate, measure_network
from trainer.run.directory import Run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "scaling_law.yaml"
FACTS_PER_STORY = 8
WARMUP_FRACTION = 0.1
EXTRAPOLATION = 4  # FLOPs of the predicted run, relative to the largest run of the ladder


@functools.cache
def base_config() -> TrainConfig:
    """Return the settings that all runs share, from configs/scaling_law.yaml."""
    return parse_config(["--config", str(CONFIG)])


@functools.cache
def model_of_width(width: int) -> GPTConfig:
    """Return the network of the config file with the number of heads and the MLP scaled to a width."""
    base = base_config()
    vocab_size = len(get_story_generator(base.data.facts, base.data.zipf, 0).vocabulary)
    n_heads, d_ff = width // base.model.resolved_head_dim, 8 * math.ceil(width / 3)
    return base.model.replace(vocab_size=vocab_size, n_heads=n_heads, d_model=width, d_ff=d_ff)


def facts_read(tokens: float) -> float:
    """Return the number of facts (with repetitions) in `tokens` training tokens."""
    return tokens / base_config().seq_len * FACTS_PER_STORY


class Measurement(NamedTuple):
    """Size, cost and losses of a finished run."""

    parameters: int
    """Non-embedding parameters."""
    tokens: float
    """Training tokens, with padding."""
    flops: float
    """Training FLOPs."""
    loss: float
    """Validation loss, in nats/token."""
    entropy: float
    """Entropy of the validation data, in nats/token."""
    seed: int
    answer_excess: float
    """Part of the excess loss that comes from answers of facts, whose own entropy is 0."""

    def excess_loss(self, scope: str) -> float:
        """Return the part of the excess loss that comes from `all` tokens or `answers`, averaged over all tokens."""
        return self.loss - self.entropy if scope == "all" else self.answer_excess


@dataclass(frozen=True)
class LadderRun:
    width: int
    steps: int
    lr: float
    seed: int = 0

    @property
    def parameters(self) -> int:
        """Non-embedding parameters."""
        return measure_network(model_of_width(self.width), base_config().seq_len).parameters  # pyright: ignore

    @property
    def tokens(self) -> int:
        """Training tokens, with padding."""
        base = base_config()
        return BatchSizes(base.global_batch_size or base.micro_batch_size).tokens_before(self.steps, base.seq_len)

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token."""
        return measure_network(model_of_width(self.width), base_config().seq_len).flops_per_token  # pyright: ignore

    @property
    def flops(self) -> float:
        """Training FLOPs of the whole run."""
        return self.flops_per_token * self.tokens

    def job(self, out_dir: Path, settings: tuple[str, ...], launcher: tuple[str, ...]) -> Job:
        """Return the job that trains this run in `out_dir`, with `settings` of train.py that all runs share."""
        name = f"width_{self.width}-steps_{self.steps}-lr_{self.lr:g}-seed_{self.seed}"
        model = model_of_width(self.width)
        values = {"name": name, "out_dir": out_dir, "steps": self.steps, "seed": self.seed, "optimizer.lr": self.lr}
        values |= {"schedule.warmup_steps": math.ceil(WARMUP_FRACTION * self.steps), "model.d_model": model.d_model}
        values |= {"model.n_heads": model.n_heads, "model.d_ff": model.d_ff}
        words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
        command = (*launcher, str(ROOT / "train.py"), "--config", str(CONFIG), *settings, *words)
        return Job(Run(out_dir / name), self.steps, command)

    def measurement(self, run: Run) -> Measurement:
        last = run.newest_metrics()
        of_facts = [value for name, value in last.items() if name.startswith("val/excess_loss/facts_")]
        answers = math.nan if None in of_facts else math.fsum(of_facts)
        entropy = last.get("val/entropy", math.nan)  # both are unknown if a fork has other targets
        tokens = last["train/tokens"]
        flops = self.flops_per_token * tokens
        return Measurement(self.parameters, tokens, flops, last["val/loss"], entropy, self.seed, answers)


def build_ladder(widths: list[int], budgets: list[int], seeds: range) -> list[LadderRun]:
    """Return a run for each seed, width and budget; of each seed the most expensive first, because it takes longest."""
    runs = [
        LadderRun(width, steps, learning_rate(width), seed) for seed in seeds for width in widths for steps in budgets
    ]
    return sorted(runs, key=lambda run: (run.seed, -run.flops))


def extrapolate(runs: list[LadderRun]) -> LadderRun:
    """Return a run of twice the largest width that costs EXTRAPOLATION times the FLOPs of the most expensive run."""
    largest = max(runs, key=lambda run: run.flops)
    wider = LadderRun(2 * largest.width, largest.steps, learning_rate(2 * largest.width), largest.seed)
    return replace(wider, steps=round(largest.steps * EXTRAPOLATION * largest.flops / wider.flops))
