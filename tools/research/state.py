"""The state of a chain, derived from the rows of its ledger: its head, its ideas and its wealth."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.paths import expand_user_path
from tools.experiment import change
from tools.research import online_fdr
from tools.research.code import Idea, apply_ideas, move_branch, refuse_edits, tip
from tools.research.ledger import Ledger, Row, locked_ledger

SEEDS_PER_HEAD = 10_000  # ideas are compared with each head on its own seeds, which no earlier selection has used
RESERVED_SEEDS = 1_000_000_000  # first seed of confirm
TEST_KINDS = ("try", "combine")
HEAD_AGAINST_START = "head against start"  # the comparison of confirm that every chain has
# Statuses of ideas that count as tests and spend wealth; others, such as a crash, spend none.
TEST_STATUSES = ("running", "better", "worse", "no difference", "unknown", "futile")


@dataclass(frozen=True)
class Chain:
    """A chain in a lab, from the rows of its ledger."""

    lab: Path
    rows: Sequence[Row]
    """Rows of the ledger, shared with it: appending a row to the ledger changes the chain."""

    @property
    def start(self) -> Row:
        """Row of the start: `idea` is the branch, `settings` the recipe, `seeds_baseline` the number of runs."""
        return self.rows[0]

    @property
    def branch(self) -> str:
        """Name of the branch."""
        return self.start["idea"]

    @property
    def recipe(self) -> str:
        """Path of the config file in the repository."""
        return self.start["settings"]

    @property
    def strict(self) -> bool:
        """True if the probability of any false acceptance is controlled."""
        return self.start["status"] == "strict"

    @property
    def ideas(self) -> dict[str, Row]:
        """Newest row of each idea, by number."""
        return {row["id"]: row for row in self.rows if row["kind"] in (*TEST_KINDS, "keep", "drop")}

    @property
    def kept(self) -> list[Row]:
        """Rows of accepted ideas, oldest first."""
        return [row for row in self.rows if row["kind"] == "keep"]

    @property
    def head(self) -> str:
        """Commit of the newest accepted idea; the start's if there is none."""
        return self.kept[-1]["commit"] if self.kept else self.start["commit"]

    @property
    def baseline(self) -> Row | None:
        """Newest measurement of the head; None if there is none yet."""
        rows = [row for row in self.rows if row["kind"] == "baseline" and row["commit"] == self.head]
        return rows[-1] if rows else None

    @property
    def first_seed(self) -> int:
        """First seed on which ideas are compared with the head."""
        return SEEDS_PER_HEAD * len(self.kept)

    @property
    def discoveries(self) -> list[int]:
        """Number of tests that had begun when each discovery was made."""
        tested = {number for number, row in self.ideas.items() if row["status"] in TEST_STATUSES}
        begun, counts = set(), {}
        for row in self.rows:
            if row["kind"] in TEST_KINDS and (number := row["id"]) in tested:
                begun.add(number)
                if row["status"] == "better":
                    counts.setdefault(number, len(begun))
        return [*counts.values()]

    @property
    def levels(self) -> list[float]:
        """Levels of the tests so far."""
        return [float(row["level"]) for row in self.ideas.values() if row["status"] in TEST_STATUSES and row["level"]]

    @property
    def next_level(self) -> float:
        """One-sided level of the next test."""
        return online_fdr.next_level(len(self.levels), self.discoveries, self.strict)

    @property
    def wealth(self) -> float:
        """Wealth that is left."""
        return online_fdr.wealth(self.levels, self.discoveries, self.strict)

    def idea(self, number: str) -> Row:
        """Return the newest row of an idea, its commit made again if git deleted it; raise ConfigError without one."""
        if number not in self.ideas:
            raise ConfigError(f"id: {number!r} is not an idea of this chain; `tools.research log` lists them")
        row = self.ideas[number]
        # git deletes commits that no branch contains after some weeks.
        if row["commit"] and row["parent"] == self.head and not change.find_commit(row["commit"]):
            changed, _ = apply_ideas([self.load(row)], self.head, self.recipe)
            row = row | {"commit": changed.commit or ""}
        return row

    def find(self, candidate: str) -> Row | None:
        """Return the newest row of a test of a candidate, given by its digest, against the head; None without one."""
        same = [row for row in self.ideas.values() if (row["parent"], row["candidate"]) == (self.head, candidate)]
        return same[-1] if same else None

    def load(self, row: Row) -> Idea:
        """Return the idea of a row; raise ConfigError if its diff is missing."""
        file = self.lab / "diffs" / Path(row["diff"]).name  # the lab may have been moved
        try:
            diff = file.read_bytes().decode(errors="surrogateescape") if row["diff"] else ""
        except OSError as error:
            raise ConfigError(f"{file}: the diff of idea {row['id']} cannot be read: {error.strerror}") from None
        return Idea(row["idea"], diff, row["settings"])

    def arguments(self, name: str, *settings: str) -> list[str]:
        """Return the arguments of an experiment: its name, the recipe, and settings of both arms."""
        return [name, "--config", str(change.ROOT / self.recipe), *settings]

    def summary(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        running = [
            int(number) for number, row in self.ideas.items() if row["status"] == "running" and not row["decision"]
        ]
        return {
            "branch": self.branch,
            "recipe": self.recipe,
            "head": self.head,
            "ideas": len(self.ideas),
            "kept": [int(row["id"]) for row in self.kept],
            "running": running,
            "next_level": self.next_level,
            "wealth": self.wealth,
        }


@contextmanager
def locked_chain(lab: str | Path) -> Iterator[tuple[Ledger, Chain]]:
    """Lock a chain, and finish an acceptance that was killed after it wrote the ledger and before it moved the branch.

    Raises:
        ConfigError: there is no chain, its branch is not at the ledger's head, or files to be updated have other edits.
    """
    folder = expand_user_path("lab", lab)
    missing = ConfigError(f"lab: {lab} has no chain; tools.research start begins one")
    if not (folder / "ledger.tsv").exists():
        raise missing
    with locked_ledger(folder) as ledger:
        if not ledger.rows:
            raise missing
        chain = Chain(folder, ledger.rows)
        commit = tip(chain.branch)
        if chain.kept and commit == chain.kept[-1]["parent"]:
            refuse_edits(chain.branch, commit, chain.head)
            move_branch(chain.branch, commit, chain.head)
        elif commit != chain.head:
            raise ConfigError(
                f"branch: {chain.branch} is at {commit[:12] or 'no commit'}, and the ledger's head is "
                f"{chain.head[:12]}; restore it with `git update-ref refs/heads/{chain.branch} {chain.head[:12]}`, "
                "which keeps all files, or start another chain"
            )
        yield ledger, chain
