"""Find out which ideas lower the loss: python -m tools.experiment IDEA... [options] [settings of all runs].

    python -m tools.experiment "--model.qk_norm true"                                # one idea against the baseline
    python -m tools.experiment "--model.mlp relu2" "--model.qk_norm true" patches    # a race of many
    python -m tools.experiment confirm                                               # what the race found
    python -m tools.experiment report

An idea is settings in one argument, or code: a git branch or commit, a patch file, or . for the changes of the working
tree. A folder stands for the patches in it, a text file for an idea in each line. Runs and results are in experiments/;
run the same command again to resume. docs/experiments.md explains the method.
"""

if __name__ == "__main__":
    from runtime.cli.scripts import run_and_exit
    from tools.experiment.settings import AgreementConfig, ConfirmConfig, ExperimentConfig, ReportConfig

    run_and_exit(
        "tools.experiment",
        ExperimentConfig,
        needs_torch=False,
        module="tools.experiment.race",
        commands={
            "report": (ReportConfig, "tools.experiment.report"),
            "agreement": (AgreementConfig, "tools.experiment.agreement"),
            "confirm": (ConfirmConfig, "tools.experiment.confirm"),
        },
    )
