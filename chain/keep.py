"""The command `keep`: accept an idea."""

from chain.baseline import describe_baseline, measure_baseline
from chain.code import edited_files, move_branch, write_commit
from chain.report import print_result, training, with_json_errors
from chain.settings import KeepConfig
from chain.state import Chain, locked_chain
from config.errors import ConfigError

NEVER_ACCEPTED = ("running", "refused", "failed", "identical")


@with_json_errors
def main(config: KeepConfig) -> None:
    """Commit an idea to the branch and train the new baseline; again after a stop, resume.

    The ledger is written first. A process that is killed before it has moved the branch leaves that to the next one.

    Raises:
        ConfigError: the idea is not better, was tried on another head, or files that it changes have other edits.
        RunError: the baseline does not train.
        SystemExit: with code 75 after a signal.
    """
    with locked_chain(config.lab) as (ledger, chain):
        row = chain.idea(config.id)
        if not row["decision"].startswith("kept"):
            check_acceptable(config, chain)
            message = [f"research: {row['idea']}"[:72], "", row["note"], f"idea {config.id}, {row['status']}"]
            if row["difference"]:
                message[-1] += f": {row['difference']}% ({row['low']} to {row['high']}) at selection"
            commit = write_commit(row["commit"], chain.head, "\n".join(message))
            decision = "kept" if row["status"] == "better" else "kept unproven"
            row = ledger.append(**row | {"kind": "keep", "time": None, "commit": commit, "decision": decision})
            move_branch(chain.branch, row["parent"], commit)
        chain = Chain(chain.lab, [*ledger.rows])
    baseline = None
    if row["commit"] == chain.head:
        with training(config, chain.lab):
            baseline = measure_baseline(config, chain)
    lines = [f"#{row['id']} {row['decision']}: {chain.branch} is at {chain.head[:12]}"]
    lines += describe_baseline(baseline) if baseline else []
    print_result(config, chain.summary() | {"baseline": baseline}, lines)


def check_acceptable(config: KeepConfig, chain: Chain) -> None:
    """Check that an idea may become the head.

    Raises:
        ConfigError: it may not.
    """
    row = chain.idea(config.id)
    if row["decision"]:
        raise ConfigError(f"id: {config.id} was {row['decision']}; try it again")
    can_be_accepted = config.unproven and row["status"] not in NEVER_ACCEPTED
    if row["status"] != "better" and not can_be_accepted:
        hint = "" if row["status"] in NEVER_ACCEPTED else "; --unproven accepts it, and says so"
        raise ConfigError(f"id: {config.id} is {row['status']}, not better{hint}")
    if row["parent"] != chain.head:
        raise ConfigError(
            f"id: {config.id} was compared with {row['parent'][:12]}, and the head is {chain.head[:12]}; try it again"
        )
    if edited := edited_files(chain.branch, chain.head, row["commit"], row["commit"]):
        raise ConfigError(f"the working tree has other changes in {', '.join(edited[:3])}; commit or stash them first")
