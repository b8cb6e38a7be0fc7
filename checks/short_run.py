"""The command line of verify.py: the arguments of train.py, overridden by the settings of a short run."""

from argparse import ArgumentParser

from config.parser import parse_config
from config.schema import TrainConfig
from distributed.world import num_processes

SHORT = """--check_replicas_every 1 --evaluation.num_samples 8 --evaluation.num_scored_generations 0
    --tracking.log_every 1 --evaluation.num_logged_generations 0 --resume auto --schedule.name constant
    --checkpoint.every 1 --checkpoint.keep 1 --branch_from null
    --init_from null --schedule.warmup_steps 0 --schedule.decay_steps null --schedule.batch_warmup_steps 0
    --tracking.tracker wandb --tracking.wandb disabled"""


def parse_short_run(args: list[str]) -> TrainConfig:
    """Parse train.py's command line, plus `--verify_steps N`; settings of a short run override the given ones."""
    parser = ArgumentParser("verify.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6")
    own, args = parser.parse_known_args(args)
    return parse_config([*args, *SHORT.split(), "--steps", own.verify_steps], num_processes())
