"""Test ideas one after another against the head of a branch.

    python -m tools.research start --config configs/lab.yaml
    python -m tools.research try IDEA --note "why"
    python -m tools.research keep N | drop N | combine N M
    python -m tools.research confirm
    python -m tools.research log

IDEA is as in tools.experiment. The ledger is LAB/ledger.tsv; docs/research.md explains it and the statistics. Exit
codes of try: 0 decided, 10 unknown or futile, 11 failed or identical, 2 refused, 1 the baseline is broken, 75 stopped
by a signal.
"""

if __name__ == "__main__":
    from cli.scripts import run_and_exit
    from tools.research.settings import PARSERS, refuse_command

    run_and_exit("tools.research", refuse_command, needs_torch=False, commands=PARSERS)
