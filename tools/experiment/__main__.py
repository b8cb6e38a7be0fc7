"""Find out which ideas lower the loss: python -m tools.experiment IDEA... [settings of all runs].

    python -m tools.experiment "--model.mlp relu2" "--model.qk_norm true" patches/   # a screen of many ideas
    python -m tools.experiment my-branch                                             # one idea against the baseline
    python -m tools.experiment confirm
    python -m tools.experiment report

An idea is settings in one argument, or code: a git branch or commit, a patch file, or . for the changes of the working
tree. A folder stands for the patches in it, a text file for an idea in each line. Runs and results are in lab/; run the
same command again to resume. docs/experiments.md explains the method.
"""

if __name__ == "__main__":
    from cli.scripts import run_and_exit
    from tools.experiment.settings import ConfirmConfig, ExperimentConfig, ReportConfig

    run_and_exit(
        "tools.experiment",
        ExperimentConfig,
        needs_torch=False,
        module="tools.experiment.experiment",
        commands={
            "report": (ReportConfig, "tools.experiment.report"),
            "confirm": (ConfirmConfig, "tools.experiment.confirm"),
        },
    )
