"""Plot runs from their metrics.jsonl: python -m tools.plot RUN... [--x tokens].

It writes loss.png into each run, excess.png if the run logged `val/excess_loss/KIND`, layers.png if it logged
`layers/NAME/BLOCK` (tracking.block_stats), and evaluation.png if evaluate.py evaluated it. tools.compare plots several
runs in one figure.
"""

from cli.scripts import run_and_exit
from tools.plot.settings import PlotConfig

if __name__ == "__main__":
    run_and_exit("tools.plot", PlotConfig, needs_torch=False, module="tools.plot.command")
