"""What a screen has on disk: its ideas and its rows, each a run with the ideas that are on in it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from data.json_objects import parse_object
from tools.experiment.change import Idea

FAILED_TOGETHER = 3  # runs after which two ideas are kept apart that fail together, and never alone


@dataclass
class Row:
    """A run of a screen."""

    seed: int
    ideas: list[str]
    """Keys of the ideas that are on."""
    run: str = ""
    """Name of its directory in LAB/runs."""
    code: str | None = None
    """Commit of its code."""
    loss: float | None = None
    """None until the run is finished and scored."""
    failure: str = ""
    """Why the run failed, or its loss is not credible."""

    @property
    def is_done(self) -> bool:
        """Whether the run need not be trained any more."""
        return self.loss is not None or bool(self.failure)


@dataclass
class Record:
    """Content of screen.json."""

    words: list[str]
    """Settings of all runs."""
    ideas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key: the fields of each idea, and as `failure` why it cannot be on."""
    exclusive: list[list[str]] = field(default_factory=list)
    """Pairs of keys that are never on together."""
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read screen.json; raise ConfigError if it is absent or damaged."""
        try:
            content: dict[str, Any] = parse_object(file.read_bytes())
            content["rows"] = [Row(**row) for row in content["rows"]]
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"lab: {file} cannot be read: {error}") from None

    def pairs_apart(self) -> list[tuple[str, str]]:
        """Return all pairs of ideas that are not to be on together in a new row."""
        return [*((a, b) for a, b in self.exclusive), *self.failing_pairs()]

    def failing_pairs(self) -> list[tuple[str, str]]:
        """Return pairs of ideas all of whose runs together have failed, and none with one without the other."""
        done, found = [row for row in self.rows if row.is_done], []
        while True:
            pairs = Counter(pair for row in done if row.failure for pair in combinations(row.ideas, 2))
            for (a, b), number in pairs.most_common():
                only = [row for row in done if {a, b} & {*row.ideas}]
                if number >= FAILED_TOGETHER and all(bool(row.failure) == ({a, b} <= {*row.ideas}) for row in only):
                    found.append((a, b))
                    done = [row for row in done if not {a, b} <= {*row.ideas}]  # its failures are explained
                    break
            else:
                return found

    def add_idea(self, idea: Idea, failure: str) -> None:
        """Add an idea, which never is on if there is a failure."""
        self.ideas[idea.key] = asdict(idea) | {"failure": failure}

    def idea(self, key: str) -> Idea:
        """Return an idea."""
        one = self.ideas[key]
        return Idea(one["text"], tuple(one["settings"]), one["base"], one["diff"])
