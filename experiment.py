"""Tests whether a change is better than the baseline.

    python experiment.py IDEA [settings of both arms]
    python experiment.py report

IDEA is settings in one argument ("--model.mlp relu2"), or code: a git branch or commit, a patch file, or . for the
changes of the working tree, against the commit on which it is based. Runs, diffs and the log are in lab/; rerun the
same command to resume. docs/experiments_on_ideas.md explains the method.
"""

import sys

from experiments.settings import ExperimentConfig, ReportConfig

if __name__ == "__main__":
    from cli.scripts import run_and_exit
    from config.parser import own_arguments_first

    if sys.argv[1:2] == ["report"]:
        del sys.argv[1]
        run_and_exit("experiment", ReportConfig, needs_torch=False, module="experiments.report")
    sys.argv[1:] = own_arguments_first(sys.argv[1:], ExperimentConfig)
    run_and_exit("experiment", ExperimentConfig, needs_torch=False, module="experiments.experiment")
