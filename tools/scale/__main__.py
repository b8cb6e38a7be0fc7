"""Choose the size, tokens and learning rate of a run; fit a scaling law.

python -m tools.scale --depth N prints a whole recipe for a depth. --law trains a ladder of sizes and budgets, fits how
the loss falls, predicts a run with four times the FLOPs of the largest and then trains it. --widths searches the
learning rates of several widths. Run the same command again to resume. docs/scaling_law.md has the rules and the law.
"""

from runtime.cli.scripts import run_and_exit
from tools.scale.settings import ScaleConfig

if __name__ == "__main__":
    run_and_exit("tools.scale", ScaleConfig, needs_torch=False, module="tools.scale.command")
