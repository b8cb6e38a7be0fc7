"""One side of an experiment: code plus settings, its runs, and what they are measured by."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from checkpoint.identity import code_hash
from checkpoint.manifest import step_directory
from config.errors import ConfigError, RunError
from data.files import write_atomically
from data.json_objects import parse_object
from jobs.runner import Training
from scaling.recipe import LR_POWER

QUIETLY = {"capture_output": True, "text": True, "start_new_session": True}  # Ctrl-C is for experiment.py to answer
RULER = Path(__file__).with_name("scorer.py")
# Where a run lies and how it is told of, and the seed: with these changed it is a run of the same side.
NOT_OF_A_SIDE = {"name", "out_dir", "resume", "seed", "stop_after"}
NOT_OF_A_SIDE_SECTIONS = {"tracking", "checkpoint"}


BITS = "val/bits_per_byte"
BYTES_WITHIN = 0.01  # a row of tokens that is not full ends the text a little earlier
FLOAT32_WITHIN, HALF_WITHIN = 1e-4, 1e-2  # relative, of the loss by the logits in float32
WIDTH_STEP = 8
LOGS_OF_SHORT = 8


class Refused(Exception):
    """Settings or code that cannot even begin to train, with their message."""


@dataclass(frozen=True)
class Side:
    """A recipe: what trains, with which settings."""

    code: Path
    """The folder with its train.py."""
    code_hash: str
    launch: tuple[str, ...]
    precision: str | None
    words: tuple[str, ...]
    """Of the command line, without name, seed and place."""
    settings: dict[str, Any]
    """What these words mean to its code, as `section.name`."""
    runs: Path
    first_seed: int = 0
    trunk: "Side | None" = None
    """Whose last checkpoint, of the same seed, its runs begin with."""

    @classmethod
    def of(cls, code: Path, launch: list[str], precision: str | None, words: list[str], runs: Path) -> "Side":
        """Ask its own code what the words mean.

        Raises:
            Refused: it refuses them.
        """
        asked = [sys.executable, str(code / "train.py"), *words, "--print_config"]
        done = subprocess.run(asked, **QUIETLY)
        if done.returncode:
            raise Refused(done.stderr.strip().removeprefix("train.py: error: ") or f"exit code {done.returncode}")
        flat = {}
        for name, value in yaml.safe_load(done.stdout).items():
            flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        if "name" not in flat:
            raise Refused(f"{shlex.join(words)} has words that are no settings; an idea of several words is in quotes")
        if flat["name"] is None:  # as train.py takes it from the last file
            last = max(index for index, word in enumerate(words) if word.startswith("--config"))
            flat["name"] = Path(words[last].partition("=")[2] or words[last + 1]).stem
        return cls(code, code_hash(code), tuple(launch), precision, tuple(words), flat, runs)

    def changed(self, settings: dict[str, Any]) -> "Side":
        """With other values of settings."""
        written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
        words = tuple(f"--{name}={value}" for name, value in written.items())
        return replace(self, words=self.words + words, settings=self.settings | settings)

    @property
    def corpora(self) -> list[Path]:
        """The folders of text that it reads."""
        paths = self.settings.get("data.mix") or filter(None, [self.settings.get("data.path")])
        return [Path(path).expanduser() for path in paths]

    @property
    def digest(self) -> str:
        """Of what makes its runs other runs than those of another side."""
        written = [corpus / "metadata.json" for corpus in self.corpora]
        made = [sha256(file.read_bytes()).hexdigest() for file in written if file.is_file()]
        own = {
            name: value
            for name, value in self.settings.items()
            if name not in NOT_OF_A_SIDE and name.split(".")[0] not in NOT_OF_A_SIDE_SECTIONS
        }
        facts = [own, self.code_hash, self.precision, made, *([self.trunk.digest] if self.trunk else [])]
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """What the names of its runs begin with."""
        return f"{self.settings['name']}-{self.digest}"

    @property
    def tokens(self) -> int:
        """That its first run has trained on."""
        return self.run(0).last()["train/tokens"]

    def run(self, seed: int) -> Training:
        """Its run number `seed`."""
        seed += self.first_seed
        name = f"{self.name}-{seed}"
        own = ["--name", name, "--seed", str(seed), "--out_dir", str(self.runs)]
        if self.trunk:
            begun = self.trunk.run(seed - self.first_seed)
            own += ["--branch_from", str(step_directory(begun.directory / "checkpoints", begun.steps))]
        command = (*self.launch, str(self.code / "train.py"), *self.words, *own)
        return Training(self.runs / name, self.settings["steps"], command)

    def losses(self, n: int, metric: str = "val/loss") -> list[float]:
        """The last validation loss of its first runs, which are finished, above the floor where that is known; or
        another metric.

        Raises:
            RunError: one has none.
        """
        rows = [(self.run(seed), self.run(seed).last()) for seed in range(n)]
        for training, row in rows:
            if row["step"] != training.steps or not isinstance(row.get(metric), float):
                raise RunError(f"{training.directory} has no {metric} of its last step")
        return [row[metric] - (row.get("val/entropy", 0.0) if metric == "val/loss" else 0.0) for _, row in rows]

    def validation_text(self) -> str | None:
        """The hash of the text that it is evaluated on, whatever tokenizer cuts it; None where that is not known."""
        if self.settings["data.source"] != "text":
            return None
        from data.integrity import validation_text  # needs pyarrow, which takes a while to import

        return validation_text(self.corpora)

    def short(self, seconds: float, runs: Path) -> "Side":
        """A few steps of it, for some seconds by the speed of its first run, and hardly an evaluation."""
        speed = self.run(0).tokens_per_second()
        steps = round(seconds * speed * self.settings["steps"] / self.tokens) if math.isfinite(speed) else 0
        steps = min(self.settings["steps"], max(LOGS_OF_SHORT, steps))
        warmup = min(self.settings["schedule.warmup_steps"], steps)
        changes = {"steps": steps, "evaluation.every": steps, "schedule.warmup_steps": warmup}
        changes["evaluation.num_samples"] = max(2, len(self.corpora))
        changes |= {
            "evaluation.num_scored_generations": 0,
            "evaluation.num_logged_generations": 0,
            "schedule.decay_steps": None,
        }
        if "schedule.batch_warmup_from" in self.settings:
            changes |= {"schedule.batch_warmup_from": None, "schedule.batch_warmup_steps": None}
        changes |= {"tracking.log_every": max(1, steps // LOGS_OF_SHORT), "tracking.wandb": "disabled"}
        return replace(self.changed(changes), runs=runs)

    def peak_memory_bytes(self) -> float:
        """Of its first run."""
        return self.run(0).last().get("perf/peak_memory_bytes", math.nan)

    def measured(self) -> dict[str, Any]:
        """What experiments/scorer.py says of its first run; kept beside that.

        Raises:
            RunError: it cannot be measured.
        """
        directory = self.run(0).directory
        kept = directory / "ruler.json"
        found = parse_object(kept.read_bytes()) if kept.exists() else {}
        if "num_bytes" not in found:  # as older versions left it
            reported = {metric: self.run(0).last().get(metric) for metric in ("val/loss", BITS)}
            found = self._ask("measure", str(directory)) | reported
            write_atomically(kept, json.dumps(found), by_several=True)
        return found

    def shape(self) -> dict[str, Any]:
        """Parameters and FLOPs a token, before anything is trained."""
        return self._ask("shape", *self.words)

    def _ask(self, *words: str) -> dict[str, Any]:
        done = subprocess.run([sys.executable, str(RULER), str(self.code), *words], **QUIETLY)
        if done.returncode:
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
            raise RunError(f"{self.code}: its code cannot be asked ({words[0]}): {last}")
        return parse_object(done.stdout.splitlines()[-1])


def check_ruler(baseline: Side, candidate: Side) -> str:
    """The metric by which they compare: the loss where they predict the same tokens, and bits per byte where only the
    tokenizer differs that cuts the same text into them.

    Raises:
        ConfigError: they are not measured by the same validation set in the same way; says what differs.
        Refused: the candidate sees the tokens that it is to predict.
    """
    sides = {"baseline": baseline.measured(), "idea": candidate.measured()}
    ours, theirs = sides.values()
    if theirs["looks_ahead"]:
        raise Refused("its logits depend on later tokens, which are what it is to predict")
    metric = "val/loss" if ours["targets"] == theirs["targets"] else BITS
    if metric == BITS and (reason := why_not_by_bytes(baseline, candidate)):
        raise ConfigError(
            "idea: the sides are not measured by the same validation set: the baseline predicts "
            f"{ours['num_targets']:,} tokens (hash {ours['targets']}), the idea {theirs['num_targets']:,} "
            f"({theirs['targets']}); {reason}"
        )
    if ours["floor"] != theirs["floor"]:
        floors = f"{ours['floor']} for the baseline and {theirs['floor']} for it"
        raise ConfigError(f"idea: the lowest possible loss is {floors}, so the losses above it do not compare")
    within = FLOAT32_WITHIN if baseline.precision == candidate.precision == "no" else HALF_WITHIN
    for name, found in sides.items():
        if not math.isclose(found["loss"], found["val/loss"], rel_tol=within):
            raise ConfigError(
                f"idea: the val/loss of the {name} is {found['val/loss']:.6f}, but the cross-entropy of its logits is "
                f"{found['loss']:.6f}: its code measures something else"
            )
        if metric == BITS:
            bits = found["loss"] * found["num_targets"] / found["num_bytes"] / math.log(2)
            if not math.isclose(bits, found[BITS], rel_tol=within):
                raise ConfigError(
                    f"idea: the {BITS} of the {name} is {found[BITS]:.6f}, but its targets cost {bits:.6f} bits for "
                    "each of their bytes: its code measures something else"
                )
    return metric


def why_not_by_bytes(baseline: Side, candidate: Side) -> str:
    """What hinders a comparison by bits per byte; "" if nothing does."""
    sides = {"baseline": baseline, "idea": candidate}
    texts = {name: side.validation_text() for name, side in sides.items()}
    if any(side.settings["data.source"] != "text" for side in sides.values()):
        return "settings of data or evaluation differ, so their losses do not compare"
    if unknown := [name for name, text in texts.items() if text is None or sides[name].measured()["num_bytes"] is None]:
        return (
            "two tokenizers of one text would compare by bits per byte, but the bytes of the text are not known of the "
            f"{' and the '.join(unknown)}: its tokenizer is not byte-level, or an older version prepared it"
        )
    if texts["baseline"] != texts["idea"]:
        return f"nor is it the same text in other tokens (hashes {texts['baseline'][:8]} and {texts['idea'][:8]})"
    if any(side.settings["evaluation.num_samples"] is not None for side in sides.values()):
        return "the text is the same, but only the whole of it compares: set evaluation.num_samples to null for both"
    ours, theirs = (side.measured()["num_bytes"] for side in sides.values())
    if not math.isclose(ours, theirs, rel_tol=BYTES_WITHIN):
        return f"the text is the same, but the targets are {ours:,} bytes of it here and {theirs:,} there"
    return ""


def scaled_steps(side: Side, share: float) -> Side:
    """Trained for a share of the steps, by a schedule of the same shape, and samples an epoch in proportion."""
    changes = {}
    for name in ("steps", "schedule.warmup_steps", "schedule.decay_steps", "schedule.batch_warmup_steps"):
        if value := side.settings.get(name):
            changes[name] = max(1, round(share * value))
    if "schedule.decay_steps" in changes:  # which are rounded each by itself
        longest = changes["steps"] - changes.get("schedule.warmup_steps", 0)
        changes["schedule.decay_steps"] = max(1, min(changes["schedule.decay_steps"], longest))
    if side.settings["data.source"] != "text":
        changes["data.num_samples"] = max(1, round(share * side.settings["data.num_samples"]))
    return side.changed(changes) if share != 1 else side


def budgets(side: Side, shares: Sequence[float]) -> tuple[dict[float, Side], list[list[Side]]]:
    """The side trained for shares of its steps, each with its own decay; and what to train for that: what stands in a
    list begins with what the lists before it trained.

    Where all of them are the same until they decay, that is trained once: a trunk, from whose checkpoints they branch.
    """
    settings, decay = side.settings, decayed_share(side)
    steps = {share: max(1, round(share * settings["steps"])) for share in sorted(shares)}
    begins = {share: steps[share] - math.ceil((decay or 0) * steps[share]) for share in steps}
    grown = max(settings.get(f"schedule.{name}") or 0 for name in ("warmup_steps", "batch_warmup_steps"))
    if decay is None or min(begins.values()) < max(1, grown):
        found = {share: scaled_steps(side, share) for share in steps}
        return found, [[*found.values()]]
    if settings["data.source"] != "text":
        side = side.changed({"data.num_samples": round(max(shares) * settings["data.num_samples"])})
    found, stages, trunk = {}, [[]], None
    for share, begin in begins.items():
        constant = {"steps": begin, "schedule.name": "constant", "schedule.decay_steps": None}
        trunk = replace(side.changed(constant), trunk=trunk)
        branch = side.changed({"steps": steps[share], "schedule.decay_steps": steps[share] - begin})
        found[share] = replace(branch, trunk=trunk) if decay else trunk
        stages[-1].append(trunk)
        stages.append([found[share]])
    return found, stages


def decayed_share(side: Side) -> float | None:
    """The share of the steps in which the learning rate decays, if until then a run is the same whatever its length."""
    settings = side.settings
    begun = settings.get("init_from") or settings.get("branch_from")  # a run begins once
    read = settings["steps"] * (settings["global_batch_size"] or math.inf)  # null: as many as there are processes
    if begun or (settings["data.source"] != "text" and settings["data.num_samples"] < read):  # epochs are in proportion
        return None
    of_wsd = (settings.get("schedule.decay_steps") or 0.2 * settings["steps"]) / settings["steps"]
    return {"constant": 0.0, "wsd": of_wsd}.get(settings.get("schedule.name"))


def scaled(side: Side, size: float) -> Side:
    """With `size` times the parameters in its blocks, and tokens in proportion.

    Width, feed-forward and number of heads grow with the square root, so that heads keep their size; depth stays, and
    the learning rate falls with the width as in scale.py (scaling/recipe.py).
    """
    if size == 1:
        return side
    settings, times = side.settings, math.sqrt(size)
    queries = settings["model.n_heads"] // (settings["model.n_kv_heads"] or settings["model.n_heads"])
    heads = queries * max(1, round(times * settings["model.n_heads"] / queries))
    changes = {
        "model.n_heads": heads,
        "model.d_model": settings["model.d_model"] // settings["model.n_heads"] * heads,
        "model.d_ff": 8 * round(times * settings["model.d_ff"] / 8),
        "optimizer.lr": settings["optimizer.lr"] * times**LR_POWER,
    }
    if settings["model.n_kv_heads"]:
        changes["model.n_kv_heads"] = heads // queries
    return scaled_steps(side.changed(changes), size)


def matched(side: Side, other: Side, what: str) -> Side:
    """With the feed-forward whose `what`, parameters or flops_per_token, is nearest to that of the other side.

    Raises:
        Refused: there is none.
    """
    width, wanted = side.settings["model.d_ff"], other.shape()[what]
    have = side.shape()[what]
    of_one = (side.changed({"model.d_ff": width + WIDTH_STEP}).shape()[what] - have) / WIDTH_STEP  # both grow linearly
    matching = WIDTH_STEP * round((width + (wanted - have) / of_one) / WIDTH_STEP) if of_one else 0
    if matching < WIDTH_STEP:
        raise Refused(f"match: no model.d_ff gives it the {wanted:,} {what} of the baseline")
    return side.changed({"model.d_ff": matching})
