"""The command `log`: the ideas in order of time, and the chain as a figure."""

from collections.abc import Iterator

from chain.report import format_effect, print_result, with_json_errors
from chain.settings import LogConfig
from chain.staircase import draw
from chain.state import Chain, locked_chain
from cli.output import aligned


@with_json_errors
def main(config: LogConfig) -> None:
    """Print the chain as a table, and draw it in LAB/chain.png."""
    with locked_chain(config.lab) as (_, chain):
        pass
    draw(chain, chain.lab / "chain.png")
    print_result(config, chain.summary() | {"rows": [*chain.rows]}, [*lines(chain)])


def lines(chain: Chain) -> Iterator[str]:
    """Yield the table and the state of the chain."""
    numbers = {chain.start["commit"]: "start"} | {row["commit"]: f"#{row['id']}" for row in chain.kept}
    table = [["time", "#", "on", "status", "decision", "difference", "seeds", "p", "CPU s", "idea"]]
    for row in [*chain.ideas.values(), *(row for row in chain.rows if row["kind"] == "confirm")]:
        number = row["id"] if row["kind"] != "confirm" else "confirm"
        cpu = f"{float(row['cpu_seconds']):.0f}" if row["cpu_seconds"] else ""
        cells = [row["time"], number, numbers.get(row["parent"], row["parent"][:8]), row["status"], row["decision"]]
        table.append([*cells, format_effect(row), row["seeds_candidate"], row["p"], cpu, row["idea"]])
    yield from aligned(table)
    yield ""
    counts = f"{len(chain.ideas)} ideas, {len(chain.discoveries)} better, {len(chain.kept)} accepted"
    yield f"{chain.branch} at {chain.head[:12]}: {counts}; wealth {chain.wealth:.3g}, next level {chain.next_level:.3g}"
    yield f"figure: {chain.lab / 'chain.png'}; ledger: {chain.lab / 'ledger.tsv'}"
