"""Replay a step of a run, or audit a run: python -m tools.replay RUN STEP, python -m tools.replay RUN --audit 3.

A run is a pure function of its config, its seed and the step, so any step can be retrained from the checkpoint before
it, and every state digest on the way compared with the logged one. docs/debugging.md shows how to find what is wrong
with a step, docs/audit.md what an audit checks.
"""

if __name__ == "__main__":  # before anything slow is imported
    from cli.scripts import run_and_exit
    from tools.replay.settings import ReplayConfig

    run_and_exit("tools.replay", ReplayConfig, module="tools.replay.replay")
