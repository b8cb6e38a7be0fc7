"""The runs of scale.py: small models of one family at several widths and budgets, and what became of them."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data.synthetic.stories import get_story_generator
from jobs.runner import Training
from model.config import GPTConfig
from scaling.recipe import flops_per_token, learning_rate, multiplied

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "scaling_law.yaml"
N_LAYERS, HEAD_DIM, BATCH, SEQ_LEN, FACTS, ZIPF = 2, 16, 16, 96, 65536, 1.3  # as in that file
FACTS_A_STORY = 8
WARMUP_SHARE = 0.1
TIMES = 4  # as many FLOPs as the largest run has the one that is predicted


class Point(NamedTuple):
    """A finished run."""

    parameters: int
    """That are multiplied."""
    tokens: float
    flops: float
    loss: float
    """Of the validation set, in nats a token."""
    floor: float
    seed: int
    of_answers: float
    """How much of the loss above the floor is of the answers of facts, whose own floor is 0."""

    def excess(self, kind: str) -> float:
        """Of the loss over the exact floor, of `all` tokens or of the `answers`, in nats a token of any kind."""
        return self.loss - self.floor if kind == "all" else self.of_answers


@dataclass(frozen=True)
class Rung:
    """A run of the ladder."""

    width: int
    steps: int
    lr: float
    seed: int = 0

    @property
    def model(self) -> GPTConfig:
        """Its network."""
        heads, d_ff = self.width // HEAD_DIM, 8 * math.ceil(self.width / 3)
        sizes = {"n_layers": N_LAYERS, "n_heads": heads, "d_model": self.width, "d_ff": d_ff}
        kind = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False}
        return GPTConfig(
            vocab_size=len(get_story_generator(FACTS, ZIPF, 0).vocabulary), max_position_embeddings=96, **sizes, **kind
        )

    @property
    def parameters(self) -> int:
        """That are multiplied."""
        return multiplied(self.model)

    @property
    def tokens(self) -> int:
        """That it reads, with padding."""
        return self.steps * BATCH * SEQ_LEN

    @property
    def flops(self) -> float:
        """Of the whole run."""
        return flops_per_token(self.model, SEQ_LEN) * self.tokens

    def training(
        self, out_dir: Path, settings: tuple[str, ...], launch: tuple[str, ...] = (sys.executable,)
    ) -> Training:
        """How it is trained."""
        name = f"width_{self.width}-steps_{self.steps}-lr_{self.lr:g}-seed_{self.seed}"
        model = self.model
        own = {"name": name, "out_dir": out_dir, "steps": self.steps, "seed": self.seed, "optimizer.lr": self.lr}
        own |= {"schedule.warmup_steps": math.ceil(WARMUP_SHARE * self.steps), "model.d_model": model.d_model}
        own |= {"model.n_heads": model.n_heads, "model.d_ff": model.d_ff}
        words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
        command = (*launch, str(ROOT / "train.py"), "--config", str(CONFIG), *settings, *words)
        return Training(out_dir / name, self.steps, command)

    def point(self, training: Training) -> Point:
        """What it came to."""
        last = training.last_row()
        answers = math.fsum(value for name, value in last.items() if name.startswith("val/excess_loss/facts_"))
        tokens = last["train/tokens"]
        flops = flops_per_token(self.model, SEQ_LEN) * tokens
        return Point(self.parameters, tokens, flops, last["val/loss"], last["val/entropy"], self.seed, answers)


def ladder(sizes: list[int], budgets: list[int], seeds: range) -> list[Rung]:
    """Every size for every budget, a seed after the other, the longest run first: so none is left alone at the end."""
    rungs = [Rung(size, steps, learning_rate(size), seed) for seed in seeds for size in sizes for steps in budgets]
    return sorted(rungs, key=lambda rung: (rung.seed, -rung.flops))


def target(rungs: list[Rung]) -> Rung:
    """A run of twice the width of the largest, and of so many steps that it costs four times as much."""
    largest = max(rungs, key=lambda rung: rung.flops)
    wider = Rung(2 * largest.width, largest.steps, learning_rate(2 * largest.width), largest.seed)
    return replace(wider, steps=round(largest.steps * TIMES * largest.flops / wider.flops))
