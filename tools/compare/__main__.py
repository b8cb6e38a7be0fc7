"""Compare runs: python -m tools.compare RUN RUN..., for a sweep python -m tools.compare runs/*.

Print which settings differ, at which step runs diverge, losses, throughput and cost, and which configurations differ
significantly over their seeds. Plot the curves in one figure. Runs that predict different data are compared
separately. docs/comparing.md explains the output.
"""

from cli.scripts import run_and_exit
from tools.compare.settings import CompareConfig

if __name__ == "__main__":
    run_and_exit("tools.compare", CompareConfig, needs_torch=False, module="tools.compare.command")
