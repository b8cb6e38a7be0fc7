"""Test ideas one after another against the head of a branch, accept or reject each, and confirm the result.

    python research.py start --config configs/lab.yaml
    python research.py try IDEA --note "why"
    python research.py keep N | drop N | combine N M
    python research.py confirm
    python research.py log

IDEA is as in experiment.py. The ledger is LAB/ledger.tsv; docs/research.md explains it and the statistics. Exit codes
of try: 0 decided, 10 unknown or futile, 11 failed or identical, 2 refused, 1 the baseline is broken, 75 stopped by a
signal.
"""

if __name__ == "__main__":
    from chain.settings import PARSERS, refuse_command
    from cli.scripts import run_and_exit

    run_and_exit("research", refuse_command, needs_torch=False, commands=PARSERS)
