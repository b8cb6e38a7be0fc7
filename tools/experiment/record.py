"""What a screen has on disk: its ideas and its runs."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from storage.json_objects import parse_object
from tools.experiment.change import Idea

FAILED_TOGETHER = 3  # runs after which two ideas are kept apart that fail together, and never alone


@dataclass
class ScreenRun:
    """A run of a screen."""

    seed: int
    ideas: list[str]
    """Keys of the ideas that are on."""
    name: str = ""
    """Name of its directory in LAB/runs."""
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

    ideas: dict[str, Idea] = field(default_factory=dict)
    """By key."""
    exclusive: list[list[str]] = field(default_factory=list)
    """Pairs of keys that are never on together."""
    runs: list[ScreenRun] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read screen.json; raise ConfigError if it is absent or damaged."""
        try:
            content: dict[str, Any] = parse_object(file.read_bytes())
            ideas = {key: Idea(**idea) for key, idea in content["ideas"].items()}
            return cls(ideas, content["exclusive"], [ScreenRun(**run) for run in content["runs"]])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"lab: {file} cannot be read: {error}") from None

    def pairs_apart(self) -> list[tuple[str, str]]:
        """Return all pairs of ideas that are not to be on together in a new run."""
        return [*((a, b) for a, b in self.exclusive), *self.failing_pairs()]

    def failing_pairs(self) -> list[tuple[str, str]]:
        """Return pairs of ideas all of whose runs together have failed, and none with one without the other."""
        unexplained, found = [run for run in self.runs if run.is_done], []
        while True:
            pairs = Counter(pair for run in unexplained if run.failure for pair in combinations(run.ideas, 2))
            explaining = [
                pair
                for pair, number in pairs.most_common()
                if number >= FAILED_TOGETHER
                and all(bool(run.failure) == ({*pair} <= {*run.ideas}) for run in unexplained if {*pair} & {*run.ideas})
            ]
            if not explaining:
                return found
            found.append(explaining[0])
            unexplained = [run for run in unexplained if not {*explaining[0]} <= {*run.ideas}]

    def runs_of_failing_pairs(self) -> list[ScreenRun]:
        """Return the runs that have two ideas on that fail together, which says nothing about either."""
        pairs = self.failing_pairs()
        return [run for run in self.runs if any({*pair} <= {*run.ideas} for pair in pairs)]
