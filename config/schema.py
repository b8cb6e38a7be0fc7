"""All settings of a run: typed, documented once (the docstring of a field is its `--help`), and checked."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from config.errors import ConfigError, unhandled_choice
from config.paths import expand_user_path
from model.config import GPTConfig
from model.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    TimeoutSeconds,
    UpTo256,
    UpTo1000,
    UpTo100000,
    invalid_values,
)


@dataclass(frozen=True)
class DataConfig:
    """Training and validation data."""

    source: Literal["random", "stories", "text"] = "stories"
    """random: uniform random tokens; stories: short English stories of a grammar (data/synthetic/stories.py); text:
    your own, prepared by data.prepare."""

    path: str | None = None
    """source text: the prepared corpus, the folder that data.prepare was given as --out."""

    mix: dict[str, PositiveFloat] | None = None
    """source text: several prepared corpora instead of one path, as {PATH: WEIGHT}. Of every
    1,000 training sequences, and of evaluation.num_samples, each corpus provides a whole number in proportion to its
    weight; with num_samples null, all validation sequences are evaluated."""

    packing: Literal["concat", "isolated", "padded"] = "concat"
    """source text: how documents become sequences. concat: windows of the concatenated documents; isolated: the same,
    but attention does not cross document boundaries and positions restart there; padded: one document, truncated or
    padded to seq_len. For conversations: as many whole ones as fit, isolated (concat too), or with padded one."""

    hash: str | None = None
    """source text: hash of the tokens and the tokenizer. Default null: filled in at the start, so that a run is never
    resumed with another corpus."""

    seed: NonNegativeInt | None = None
    """sources random and stories: seed of the training and the validation set. null: the seed of the run or checkpoint
    that is resumed, else 0, so that runs with different `seed` have the same data."""

    num_samples: PositiveInt = 1000
    """sources random and stories: sequences in the training set. An epoch visits each once."""

    facts: NonNegativeInt = 0
    """source stories: number of facts about a synthetic world that the stories mention, at most 65,536. 0: the stories
    have a plot and mention no facts."""

    zipf: NonNegativeFloat = 1.3
    """source stories with facts: the fact of rank i occurs with probability proportional to i ** -zipf."""

    num_workers: UpTo256 = 0
    """DataLoader workers of each training process, at most 256. 0: load in the training process."""

    @property
    def corpora(self) -> list[str]:
        """The folders that source text reads."""
        return [*(self.mix or filter(None, [self.path]))]

    def problems(self) -> list[str]:
        """List the settings that do not fit the source."""
        if nameless := [path for path in self.mix or {} if not isinstance(path, str)]:
            return [f"data.mix: {nameless[0]} is no path"]
        if self.source == "text":
            lacks = (self.path is None) == (not self.mix)
            needs = "data.source: text needs either data.path, a corpus made by data.prepare, or data.mix of several"
            return ([needs] if lacks else []) + self._problems_of_facts()
        if self.source not in ("random", "stories"):  # a fork's own, which may read files
            return []
        of_text = {"path": self.path, "mix": self.mix, "hash": self.hash}
        given = {name: value for name, value in of_text.items() if value is not None}
        given |= {"packing": self.packing} if self.packing != "concat" else {}
        return [
            f"data.{name}: {value} is for data.source: text, but data.source is {self.source}; change one of the two"
            for name, value in given.items()
        ] + self._problems_of_facts()

    def _problems_of_facts(self) -> list[str]:
        if self.facts > 65536:
            return [f"data.facts: {self.facts} is more than there are words for; use at most 65536"]
        if self.facts and self.source != "stories":
            return [f"data.facts: {self.facts} is for data.source: stories, but data.source is {self.source}; use 0"]
        return []


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW (Loshchilov and Hutter, 2019), fused; muon: Muon (Jordan et al., 2024) on the matrices inside the
    blocks' linear layers, with NorMuon's second moment of each row (Li et al., 2025), and AdamW on the rest, at the
    same learning rate."""

    lr: NonNegativeFloat = 3e-4
    """Peak learning rate; `schedule` scales it."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only: not on biases, norm gains or anything else with one dimension."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running averages of the gradient and of its square; in muon of the gradient and of the square
    of the step."""

    grad_clip: PositiveFloat | None = 1.0
    """Largest global L2 norm of the gradient; larger gradients are scaled down to it. null: no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate and the global batch as functions of the step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up. wsd (warm-up, stable, decay): constant, then linear over the last decay_steps."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""

    decay_steps: PositiveInt | None = None
    """Length in steps of the decay that ends with the run. null: linear and cosine decay from the end of the warm-up,
    wsd over the last fifth of the run."""

    min_lr_ratio: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""

    batch_warmup_from: PositiveInt | None = None
    """Sequences in the first global batch, a multiple of micro_batch_size * processes that divides global_batch_size.
    The batch grows by as many at a time. null: every batch has global_batch_size."""

    batch_warmup_steps: NonNegativeInt | None = None
    """Steps over which the batch grows, at equal distances: the first step after them is the first with
    global_batch_size."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how much to keep."""

    every: PositiveInt = 1000
    """Steps between checkpoints. The last step is always saved."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. The one with the best validation loss is kept too."""

    keep_every: NonNegativeInt = 0
    """Steps between checkpoints that are never deleted; a multiple of `every`. 0: none."""

    asynchronous: bool = True
    """Write checkpoints in the background, from a copy in CPU memory, while training continues."""

    on_failure: Literal["stop", "continue"] = "stop"
    """Action when a checkpoint cannot be written, as on a full disk. continue: keep training and try again at the
    next one; the last one of a run must succeed."""

    @property
    def stops_on_failure(self) -> bool:
        """Whether a failed save stops the run."""
        match self.on_failure:
            case "stop":
                return True
            case "continue":
                return False
            case other:
                raise unhandled_choice("checkpoint.on_failure", other)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of the validation loss."""

    every: NonNegativeInt = 0
    """Steps between evaluations; the last step is evaluated too. 0: never evaluate."""

    num_samples: PositiveInt | None = 500
    """Sequences in the validation set; every evaluation reads all of them. source text: at most the size of the
    validation split; null: all of it."""

    micro_batch_size: PositiveInt = 50
    """Sequences in a forward pass of an evaluation."""

    ema_decay: OpenUnitInterval | None = None
    """Decay of an exponential moving average (EMA) of the weights, such as 0.999 (lower in the first steps). The EMA is
    evaluated, exported and sampled from. null: no EMA; the trained weights are used."""

    num_scored_generations: UpTo100000 = 200
    """Stories sampled at the end of a stories run to report the fraction that the grammar accepts; at most 100,000. 0:
    none."""

    num_logged_generations: UpTo1000 = 2
    """Texts of up to 128 tokens sampled at every evaluation and logged; at most 1,000. 0: none."""

    temperature: NonNegativeFloat = 0.8
    """Temperature of those samples."""


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers of metrics, in addition to metrics.jsonl."""

    tracker: Literal["wandb", "tensorboard", "trackio"] = "wandb"
    """wandb: Weights & Biases, with metrics, samples and code; tensorboard: metrics, in the run directory; trackio:
    metrics. The last two by Accelerate, after `pip install tensorboard` or `trackio`."""

    wandb: Literal["disabled", "offline", "online"] = "offline"
    """Weights & Biases: offline writes below the run directory for a later `wandb sync` and needs no account."""

    project: str = "mini-gpt"
    """The project of W&B or Trackio that the run is filed under."""

    group: str | None = None
    """The W&B group of the run. null: none, or in sweep.py the name that the runs of the sweep have in common."""

    tags: list[str] | None = None
    """Tags of the run in W&B, as [baseline, wide]."""

    log_model: bool = False
    """At the end export the model (export.py) below the run directory and log it as a W&B artifact of type model."""

    log_every: PositiveInt = 10
    """Steps between log lines."""

    block_stats: bool = False
    """Log for every block the norms of its weights, gradients and activations, and the ratio of the
    update's norm to the weights' norm, as layers/NAME/BLOCK; layers.png shows them over steps and depth."""

    def problems(self) -> list[str]:
        """List the settings that the tracker does not have."""
        of_wandb = {"group": self.group, "tags": self.tags, "log_model": self.log_model}
        of_wandb |= {"wandb": self.wandb == "online" and "online"}
        return [
            f"tracking.{name}: {value} is for tracking.tracker: wandb, but tracking.tracker is {self.tracker}; change "
            "one of the two"
            for name, value in of_wandb.items()
            if value and self.tracker != "wandb"
        ]


@dataclass(frozen=True)
class TrainConfig:
    """One training run. A run is a pure function of these settings."""

    name: str | None = None
    """Name of the run, which lives in <out_dir>/<name>/. null: the last config file's name without its ending."""

    out_dir: str = "runs"
    """Directory that holds the runs."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights, the data order, dropout and sampling. The data have data.seed."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""

    global_batch_size: PositiveInt | None = None
    """Sequences in an optimizer step, over all processes. Gradient accumulation is derived from it:
    global_batch_size / (micro_batch_size * processes). null: micro_batch_size * processes of the first start."""

    micro_batch_size: PositiveInt = 8
    """Sequences that a process runs forward and backward at once."""

    seq_len: PositiveInt = 128
    """Tokens in a sequence."""

    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest valid checkpoint of this run, if there is one; never: start afresh; an existing run
    directory is moved aside."""

    branch_from: str | None = None
    """Path of a checkpoint from whose weights, moments and step a new run starts. null: none."""

    init_from: str | None = None
    """Initialise the weights from another model, at step 0 and with a fresh optimizer: a run, a folder in
    transformers' format (GPT-2 or Qwen3), or a name on the Hub. Its settings replace `model`; only dropout may
    differ. null: random weights."""

    init_hash: str | None = None
    """Hash of the weights of init_from. null: filled in at the start, so that a restart uses the same weights."""

    exact: bool = False
    """Train to the same bits on any power-of-two number of processes: gradients are summed in a fixed tree instead of
    by DDP, with deterministic algorithms only, and on the CPU with one thread a process."""

    compile: bool = False
    """Compile each transformer block with torch.compile, and the work on the logits of the chunked loss. A run
    on a machine without a compiler prints a warning and trains uncompiled."""

    activation_checkpointing: bool = False
    """Store only the input of each transformer block and recompute its activations in the backward: less memory for
    a third more FLOPs."""

    chunked_loss: bool | None = None
    """Compute the output projection and the loss in chunks of positions (chunked cross-entropy), so that all logits are
    never in memory at once. null: with `compile`, and if the logits take more than one chunk (32 MiB on a CPU, 1 GiB on
    a GPU). On a CPU it is also faster."""

    stop_after: PositiveInt | None = None
    """Save and stop after this step, as a signal would stop the run; the same command resumes it up to `steps`."""

    profile: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step of which every process writes a Chrome trace into the run directory, as [20, 22]."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action when the loss or the gradient is infinite or NaN. skip: skip the update, on all processes together; the
    host then waits for the device in every step."""

    max_skipped_in_a_row: PositiveInt = 10
    """Number of updates in a row that may be skipped before the run stops."""

    check_replicas_every: NonNegativeInt = 100
    """Steps between comparisons of the state of all processes, by its digest; before a save too. 0: never."""

    timeout_seconds: TimeoutSeconds = 600
    """Seconds that a process waits for the others in a collective operation, or for a checkpoint to be written, before
    the run ends with an error. For a batch and for a tracker it waits less."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_name(self) -> str:
        """The name of the run, which the parser filled in."""
        assert self.name is not None
        return self.name

    @property
    def max_skipped(self) -> int:
        """Number of updates that may be skipped in a row."""
        match self.on_nonfinite:
            case "stop":
                return 0
            case "skip":
                return self.max_skipped_in_a_row
            case other:
                raise unhandled_choice("on_nonfinite", other)

    def problems(self, num_processes: int) -> list[str]:
        """List the values that are out of range, or else the relations between settings that do not hold."""
        if problems := invalid_values(self):
            return problems
        if self.init_from is not None and self.init_hash is None:  # its model settings are not loaded yet
            return self._problems_of_names()
        problems = self.model.problems() + self.data.problems() + self.tracking.problems()
        sizes = self._problems_of_sizes(num_processes) if not problems else []
        problems += self._problems_of_names() + sizes + self._problems_of_sequences()
        return problems + self._problems_of_processes(num_processes) + self._problems_of_steps()

    def _problems_of_sequences(self) -> list[str]:
        problems = []
        longest = self.model.max_position_embeddings
        if self.seq_len < 2:
            problems.append(f"seq_len: {self.seq_len} leaves nothing to predict; use 2 or more")
        if self.seq_len > longest:
            remedy = f"{self.init_from} knows no more" if self.init_from else "lower the one or raise the other"
            problems.append(
                f"seq_len: {self.seq_len} is longer than model.max_position_embeddings: {longest}; {remedy}"
            )
        if self.data.source == "random" and self.model.vocab_size is None:
            problems.append(
                "model.vocab_size: null means the tokenizer's, but data.source: random has none; set a number"
            )
        if self.data.source != "text" and self.evaluation.num_samples is None:
            problems.append(f"evaluation.num_samples: null means all, but data.source: {self.data.source} has no end")
        return problems

    def _problems_of_processes(self, num_processes: int) -> list[str]:
        problems = []
        sizes = {"global_batch_size": self.global_batch_size}
        sizes |= {"schedule.batch_warmup_from": self.schedule.batch_warmup_from}
        for name, size in sizes.items():
            if size is not None and size % (self.micro_batch_size * num_processes):
                problems.append(self._remedy_for_batch(name, size, num_processes))
        if self.exact and num_processes & (num_processes - 1):
            problems.append(
                f"exact: true needs 1, 2, 4, 8, ... processes, but {num_processes} were started; set it to false"
            )
        return problems

    def _remedy_for_batch(self, name: str, size: int, num_processes: int) -> str:
        """Return the message for a batch that the processes cannot split, with the nearest batches that work."""
        sequences_at_once = self.micro_batch_size * num_processes
        message = (
            f"{name}: {size} is not a multiple of micro_batch_size * processes = {self.micro_batch_size} * "
            f"{num_processes} = {sequences_at_once}; the nearest that work: {_nearest(size, sequences_at_once)}"
        )
        micro_batches, rest = divmod(size, self.micro_batch_size)
        if rest:
            return message
        counts = [str(count) for count in range(1, min(micro_batches, 1024) + 1) if micro_batches % count == 0]
        return f"{message}; numbers of processes that can split it: {', '.join(counts)}"

    def _problems_of_steps(self) -> list[str]:
        """List the problems of the schedule, the optimizer, checkpoints and the profile."""
        problems = []
        schedule, optimizer, checkpoint = self.schedule, self.optimizer, self.checkpoint
        if schedule.min_lr_ratio > 1:
            problems.append(
                f"schedule.min_lr_ratio: {schedule.min_lr_ratio} must be a fraction of the peak, so at most 1"
            )
        if schedule.warmup_steps + (schedule.decay_steps or 0) > self.steps:
            decay = f" and schedule.decay_steps: {schedule.decay_steps}" if schedule.decay_steps else ""
            problems.append(f"schedule.warmup_steps: {schedule.warmup_steps}{decay}: more than steps: {self.steps}")
        problems += self._problems_of_batch_warmup()
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            problems.append(f"optimizer.betas: {list(optimizer.betas)} must both be at least 0 and below 1")
        if checkpoint.keep_every % checkpoint.every:
            problems.append(
                f"checkpoint.keep_every: {checkpoint.keep_every} is not a multiple of checkpoint.every: "
                f"{checkpoint.every}"
            )
        if self.profile and self.profile[0] > self.profile[1]:
            problems.append(f"profile: {list(self.profile)} must be the first and the last step, in this order")
        return problems

    def _problems_of_batch_warmup(self) -> list[str]:
        first, steps = self.schedule.batch_warmup_from, self.schedule.batch_warmup_steps
        if first is None:
            needs = (
                f"schedule.batch_warmup_steps: {steps} needs schedule.batch_warmup_from, sequences in the first batch"
            )
            return [needs] if steps else []
        if steps is None:
            return [
                f"schedule.batch_warmup_from: {first} needs schedule.batch_warmup_steps, over which the batch grows"
            ]
        problems, whole = [], self.global_batch_size
        if steps > self.steps:
            problems.append(f"schedule.batch_warmup_steps: {steps}: more than steps: {self.steps}")
        if whole is not None and whole < first:
            problems.append(f"schedule.batch_warmup_from: {first} is more than global_batch_size: {whole}")
        elif whole is not None and whole % first:
            problems.append(
                f"global_batch_size: {whole} is not a multiple of schedule.batch_warmup_from: {first}, by which the "
                f"batch grows; the nearest that work: {_nearest(whole, first)}"
            )
        return problems

    def _problems_of_sizes(self, num_processes: int) -> list[str]:
        """List the sizes for which this machine has too little memory, before anything is allocated."""
        memory = psutil.virtual_memory().total + psutil.swap_memory().total
        model = self.model
        sizes = {name: getattr(model, name) for name in ("vocab_size", "d_model", "d_ff", "n_layers")}
        local_batch_size = (self.global_batch_size or self.micro_batch_size * num_processes) / num_processes
        batches = (self.evaluation.num_samples or 0) / self.evaluation.micro_batch_size
        needs = [
            (f"model: its {model.num_weights:,} weights with {sizes}", 4 * model.num_weights),
            # input_ids and labels, which a process reads for a whole step
            (
                f"global_batch_size: {self.global_batch_size}, seq_len: {self.seq_len}",
                16 * local_batch_size * self.seq_len,
            ),
            # a loss and a number of targets for each batch
            (f"evaluation.num_samples: {self.evaluation.num_samples}", 8 * batches),
        ]
        return [
            f"{what}: needs {num_bytes / 1e9:,.0f} GB in each process, and this machine has {memory / 1e9:,.0f} GB"
            for what, num_bytes in needs
            if num_bytes > memory
        ]

    def _problems_of_names(self) -> list[str]:
        problems = []
        name = self.name
        is_plain = name is None or (Path(name).name == name and name != ".." and not name.startswith("~"))
        if not is_plain or name == "":
            problems.append(f"name: {name!r} is not a plain directory name; use out_dir for the directory above it")
        for setting, value in (
            ("name", name),
            ("out_dir", self.out_dir),
            ("branch_from", self.branch_from),
            ("init_from", self.init_from),
        ):
            if value is not None and not value.isprintable():
                problems.append(f"{setting}: {value!r} has characters that cannot be printed; use others")
        if self.init_from is not None and self.branch_from is not None:
            problems.append(f"init_from: {self.init_from} and branch_from: {self.branch_from}: a run begins once")
        try:
            expand_user_path("out_dir", self.out_dir)
        except ConfigError as error:
            problems.append(str(error))
        return problems


def _nearest(size: int, unit: int) -> str:
    """Return the multiples of `unit` below and above a size, in words."""
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as `section.name: value`; tuples become lists, as in JSON and YAML."""
    flat = {}
    sections = {name for name, default in asdict(TrainConfig()).items() if isinstance(default, dict)}
    for key, value in json.loads(json.dumps(settings)).items():
        inside = isinstance(value, dict) and key in sections
        flat |= {f"{key}.{name}": item for name, item in value.items()} if inside else {key: value}
    return flat
