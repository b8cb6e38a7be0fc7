"""The command `drop`: reject an idea."""

from chain.code import undo_idea
from chain.report import print_result, with_json_errors
from chain.settings import DropConfig
from chain.state import locked_chain
from config.errors import ConfigError


@with_json_errors
def main(config: DropConfig) -> None:
    """Note in the ledger that an idea is rejected, and remove it from the working tree.

    Raises:
        ConfigError: there is no such idea, or it was accepted.
    """
    with locked_chain(config.lab) as (ledger, chain):
        row = chain.idea(config.id)
        if row["decision"].startswith("kept"):
            raise ConfigError(f"id: {config.id} was {row['decision']}; git revert undoes it as a new idea")
        if not row["decision"]:
            row = ledger.append(**row | {"kind": "drop", "time": None, "decision": "dropped"})
        undone = (
            bool(row["commit"]) and row["parent"] == chain.head and undo_idea(chain.branch, chain.head, row["commit"])
        )
        kept_in = f"; its diff is {row['diff']}" if row["diff"] else ""
        tree = "removed from the working tree" if undone else "the working tree is unchanged"
        print_result(config, row, [f"#{row['id']} dropped, {tree}{kept_in}"])
