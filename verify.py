"""Check the guarantees of this repository on your machine, under your launch file and with your changes.

    accelerate launch --config_file accelerate_configs/cpu.yaml verify.py [--config FILE]... [--section.field VALUE]...

takes the arguments of train.py, trains that model for a few steps in several ways, and prints for each guarantee PASS
with the measured figure, FAIL with the cause, or SKIP with the reason why it does not apply. It trains 6 steps, or
`--verify_steps N`: behaviour that starts later, such as an optimizer that does more at every 10th update, needs more.

Exit codes: 0 none failed, 1 one failed, 2 bad settings, 75 or 130 stopped by a signal before all were checked.
"""

from argparse import ArgumentParser

SHORT_RUN = """--check_replicas_every 1 --evaluation.num_samples 8 --evaluation.num_scored_generations 0
    --tracking.log_every 1 --evaluation.num_logged_generations 0 --resume auto --schedule.name constant
    --checkpoint.every 1 --checkpoint.keep 1
    --init_from null --schedule.warmup_steps 0 --schedule.decay_steps null --schedule.batch_warmup_steps 0
    --tracking.tracker wandb --tracking.wandb disabled"""


def short_run_arguments(words: list[str]) -> list[str]:
    """Return the arguments of train.py for a short run, given those of verify.py."""
    parser = ArgumentParser("verify.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6")
    own, words = parser.parse_known_args(words)
    return [*words, *SHORT_RUN.split(), "--steps", own.verify_steps]


if __name__ == "__main__":  # before anything slow is imported
    import sys

    from cli.scripts import run_and_exit

    sys.argv[1:] = short_run_arguments(sys.argv[1:])
    run_and_exit("verify")

from checks.verification import main  # noqa: F401  (run by cli/scripts.py)
