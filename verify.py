"""Check the guarantees of this repository on your machine, under your launch file and with your changes.

    accelerate launch --config_file accelerate_configs/cpu.yaml verify.py [--config FILE]... [--section.field VALUE]...

takes the arguments of train.py, trains that model for a few steps in several ways, and prints for each guarantee PASS
with the measured figure, FAIL with the cause, or SKIP with the reason why it does not apply. It trains 6 steps, or
`--verify_steps N`: behaviour that starts later, such as an optimizer that does more at every 10th update, needs more.
It lowers micro_batch_size if these processes cannot split the global batch otherwise.

Exit codes: 0 none failed, 1 one failed, 2 bad settings, 75 or 130 stopped by a signal before all were checked.
"""

if __name__ == "__main__":  # before anything slow is imported
    import sys

    sys.path.insert(0, __file__.rpartition("/")[0])  # where PYTHONSAFEPATH is set, Python leaves it out
    from runtime.cli.scripts import run_and_exit
    from trainer.checks.short_run import parse_short_run

    run_and_exit("verify", parse_short_run)

import train
from runtime.config.schema import TrainConfig
from trainer.checks.verification import verify


def main(config: TrainConfig) -> None:
    """Check all guarantees of train.py and print the result of each; see trainer/checks/verification.py."""
    verify(config, train)
