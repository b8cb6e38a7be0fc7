"""Test whether a change is better than the baseline.

    python -m tools.experiment IDEA [settings of both arms]
    python -m tools.experiment report

IDEA is settings in one argument ("--model.mlp relu2"), or code: a git branch or commit, a patch file, or . for the
changes of the working tree, against the commit on which it is based. Runs, diffs and the log are in lab/; rerun the
same command to resume. docs/experiments.md explains the method.
"""

if __name__ == "__main__":
    from cli.scripts import run_and_exit
    from tools.experiment.settings import ReportConfig, parse_experiment

    run_and_exit(
        "tools.experiment",
        parse_experiment,
        needs_torch=False,
        module="tools.experiment.experiment",
        commands={"report": (ReportConfig, "tools.experiment.log")},
    )
