"""The tables of docs/performance.md from benchmarks/results/*.json: python -m benchmarks.tables

Each replaces what stands between `<!-- NAME -->` and `<!-- end -->`.
"""

import json
import re
import statistics
from dataclasses import dataclass

from benchmarks.measure import ROOT
from benchmarks.record import RESULTS, Figures

PAGE = ROOT / "docs" / "performance.md"
SPEED, STEP = {"tokens_per_second": "tokens/s"}, {"seconds_a_step": "seconds a step"}
TABLES = {  # which quantities of a result, and what heads them
    "throughput": SPEED,
    "time_to_loss": {"seconds": "seconds", "val/loss": "validation loss, nats a character", "tokens": "tokens"},
    "overhead": SPEED,
    "scaling": SPEED | STEP | {"share_hidden": "share hidden"},
    "memory": {"peak_mib": "peak, MiB"} | STEP,
    "sharding": {"peak_mib": "peak, MiB", "predicted_mib": "predicted for a GPU"} | STEP,
    "startup": {"seconds": "seconds", "processor_seconds": "processor seconds"},
    "generation": SPEED | {"processor_seconds": "processor seconds"},
    "gpu": SPEED | {"flops_per_second": "FLOP/s", "mfu": "MFU of the data sheet", "peak_gib": "peak, GiB"},
}
FACTS = {"against", "error", "kernels", "timeline_ms"}
NO_RATIO = {"val/loss", "tokens", "share_hidden", "mfu"}


@dataclass(frozen=True)
class Measured:
    """A figure of some rounds: the values, or only their median where no more was kept."""

    values: list[float]
    rounds: int

    @classmethod
    def of(cls, recorded: object) -> "Measured | None":
        if isinstance(recorded, list):
            return cls(recorded, len(recorded))
        return cls([recorded["median"]], recorded["rounds"]) if isinstance(recorded, dict) else None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __truediv__(self, other: "Measured") -> "Measured":
        """Round by round, because cases take turns; of the medians where there is no more."""
        pairs = zip(self.values, other.values, strict=False)
        if len(self.values) != len(other.values):
            pairs = [(self.median, other.median)]
        return Measured([one / two for one, two in pairs], min(self.rounds, other.rounds))

    def __format__(self, unit: str) -> str:
        """The median and `unit`, and how far the rounds lay apart; or how many there were, if few or not kept."""
        lowest, highest, many = min(self.values), max(self.values), len(self.values) > 5
        if many:
            lowest, _, highest = statistics.quantiles(self.values, n=4)
        notes = [f"{number(lowest)} to {number(highest)}"] if len(self.values) > 1 else []
        if many:
            notes.append(f"half of {len(self.values)} turns")
        elif self.rounds < 3 or not notes:
            notes.append("one round" if self.rounds == 1 else f"{self.rounds} rounds")
        return f"{number(self.median)}{unit} ({', '.join(notes)})"


def number(value: float) -> str:
    """Thousands apart, and three digits of a fraction."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 or isinstance(value, int) else f"{value:.3g}"


def cell(value: object) -> str:
    if measured := Measured.of(value):
        return f"{measured}"
    return number(value) if isinstance(value, int | float) else str(value)


def ratios(case: dict, cases: dict[str, dict], quantity: str) -> str:
    """A case's figure over that of each one that it is set against."""
    own, references = Measured.of(case.get(quantity)), case.get("against", [])
    references = [references] if isinstance(references, str) else references
    others = {name: Measured.of(cases.get(name, {}).get(quantity)) for name in references}
    return "; ".join(f"{own / other:x {name}}" for name, other in others.items() if own and other)


def table(groups: Figures, quantities: dict[str, str]) -> list[list[str]]:
    """A header, and a row for each case; columns in which nothing stands are left out."""
    rows = [["", "", *(word for title in quantities.values() for word in (title, "over"))]]
    for group, cases in groups.items():
        for name, case in cases.items():
            row = [group if name == next(iter(cases)) else "", f"{name}: {case['error']}" if "error" in case else name]
            for quantity in quantities:
                row += [cell(case.get(quantity, "")), "" if quantity in NO_RATIO else ratios(case, cases, quantity)]
            rows.append(row)
    used = [index for index, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    return [[row[index] for index in used] for row in rows]


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def section(name: str) -> str:
    """The table of one result, what it was measured on, and what else was running."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    machine, versions = record["machine"], record["versions"]
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    where = f"`{record['command']}`: {hardware}, torch {versions['torch']}, {record['date']}."
    cases = [case for cases in record["figures"].values() for case in cases.values()]
    if others := [cores for case in cases for cores in case.get("others_cores", [])]:
        most = f"{statistics.median(others):.2f} in the median and {max(others):.2f} at most"
        where += f" Cores that other work kept busy meanwhile: {most}."
    measured = {quantity: quantity for case in cases for quantity in case if quantity not in FACTS}
    return f"{markdown(table(record['figures'], TABLES.get(name, measured)))}\n\n{where}"


def renewed(page: str, name: str, content: str) -> str:
    """`page` with what stands between `<!-- NAME -->` and the next `<!-- end -->` replaced."""
    between = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda found: f"{found[1]}{content}\n{found[2]}", page)


def page() -> str:
    """The page with every table made anew."""
    text = PAGE.read_text()
    for name in TABLES:
        if (RESULTS / f"{name}.json").exists():
            text = renewed(text, name, section(name))
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
