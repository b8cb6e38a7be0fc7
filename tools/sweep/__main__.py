"""Train many runs: python -m tools.sweep --optimizer.lr 1e-3,3e-4 --seed 0,1,2 [settings of train.py].

Every setting with several values, separated by commas, is swept: each combination is a run, whose name ends in the
swept values. Rerun the same command to resume. The table of tools.compare is printed at the end.
"""

from cli.scripts import run_and_exit
from tools.sweep.settings import SweepConfig

if __name__ == "__main__":
    run_and_exit("tools.sweep", SweepConfig, needs_torch=False, module="tools.sweep.command")
