"""Replays a step of a run, or audits a run: python replay.py RUN STEP, python replay.py RUN --audit 3.

A run is a pure function of its config, its seed and the step, so any step can be retrained from the checkpoint before
it, and every state digest on the way compared with the logged one. docs/debugging.md shows how to find what is wrong
with a step, docs/audit.md what an audit checks.
"""

from audit.settings import ReplayConfig


def name_step_argument(arguments: list[str]) -> list[str]:
    """Turn the positional arguments RUN STEP into RUN --step STEP."""
    is_positional = len(arguments) > 1 and not arguments[0].startswith("-") and arguments[1].isdecimal()
    return [arguments[0], "--step", *arguments[1:]] if is_positional else arguments


def main(config: ReplayConfig) -> None:
    """Replay a step or audit the run, as audit.replay.main."""
    from audit import replay  # imports torch, after the settings were checked

    replay.main(config)


if __name__ == "__main__":
    import sys

    from cli.scripts import run_and_exit

    sys.argv[1:] = name_step_argument(sys.argv[1:])
    run_and_exit("replay", ReplayConfig)
