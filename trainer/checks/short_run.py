"""The command line of verify.py: the arguments of train.py, overridden by the settings of a short run."""

import re
from argparse import ArgumentParser

from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig
from runtime.distributed.world import num_processes

SHORT = """--check_replicas_every 1 --evaluation.num_scored_generations 0 --tracking.log_every 1
    --evaluation.num_logged_generations 0 --resume auto --schedule.name constant --checkpoint.every 1
    --checkpoint.keep 1 --branch_from null --schedule.warmup_steps 0 --schedule.decay_steps null
    --schedule.batch_warmup_steps 0 --epochs null --tokens null --tracking.tracker wandb --tracking.wandb disabled"""


def parse_short_run(args: list[str]) -> TrainConfig:
    """Parse train.py's command line, plus `--verify_steps N`; settings of a short run override the given ones.

    micro_batch_size is lowered if the processes cannot split the global batch otherwise: the recipe is for fewer.
    """
    parser = ArgumentParser("verify.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6")
    options, args = parser.parse_known_args(args)
    args = [*args, *SHORT.split(), "--steps", options.verify_steps]
    purpose = "Checks the guarantees of train.py on a few steps of this model, 6 or --verify_steps N."
    try:
        config = parse_config(args, program="verify.py", purpose=purpose)
    except ConfigError as error:
        raise ConfigError(re.sub("^steps:", "verify_steps:", str(error), flags=re.MULTILINE)) from None
    micro_batch_size = config.micro_batch_size_for(num_processes())
    if micro_batch_size is not None:
        args += ["--micro_batch_size", str(micro_batch_size)]
    return parse_config(args, num_processes())
