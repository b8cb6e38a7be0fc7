"""What a race has on disk, besides the results of its runs: its ideas and its rounds."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runtime.config.errors import ConfigError
from runtime.files import write_atomically
from runtime.json_objects import parse_object
from tools.experiment.change import Idea
from tools.experiment.variant import Variant

RECORD_VERSION = 1


@dataclass
class Round:
    """A round of a race."""

    stack: list[str]
    """Keys of the ideas in the baseline, in the order in which they joined it."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """`describe` of the baseline with the stack."""
    ideas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`describe` of the variant of each idea that races, by its key."""
    unchecked: list[str] = field(default_factory=list)
    """Keys of ideas that race as soon as their code and settings are checked on top of the stack."""
    out: dict[str, str] = field(default_factory=dict)
    """Why an idea does not race, by its key."""
    crashed: list[str] = field(default_factory=list)
    """Keys of those of `out` whose code crashes; the others are refused."""
    withdrawn: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`describe` of ideas that raced until their patch or line was removed or changed. They still count among the
    comparisons, so that the removal of ideas that look bad makes no other look better."""
    winner: str | None = None
    """Key of the idea that joined the baseline after this round."""
    reach: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Where the winner was measured again, by the name of the change, such as "at twice the steps": the folder of the
    experiment, the digests of `baseline` and `variant`, and the margin."""


@dataclass
class Record:
    """Content of the file of a race."""

    baseline: str
    """The commit and the command line of all runs."""
    margin: float = 0.0
    """As a log ratio."""
    metric: str | None = None
    equal: str = "steps"
    ideas: dict[str, Idea] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    """Keys of ideas that train the same as an earlier one, which stands for them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a patch or a line cannot be parsed, by its text."""
    ended: str = ""
    """Why the last command ended; "" while it runs, and after it was killed."""
    version: int = RECORD_VERSION

    @property
    def stack(self) -> list[str]:
        """Keys of the ideas that the rounds have found, in the order in which they joined the baseline."""
        last = self.rounds[-1]
        return [*last.stack, *([last.winner] if last.winner else [])]

    @property
    def digests(self) -> set[str]:
        """Digests of all variants of the race."""
        return {
            one["digest"]
            for entry in self.rounds
            for one in (entry.baseline, *entry.ideas.values(), *entry.withdrawn.values())
        }

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read the file of a race; raise ConfigError if it is damaged."""
        try:
            content: dict[str, Any] = parse_object(file.read_bytes())
            content["ideas"] = {key: Idea(**idea) for key, idea in content["ideas"].items()}
            content["rounds"] = [Round(**one) for one in content["rounds"]]
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"folder: {file} cannot be read: {error}") from None

    def write(self, file: Path) -> None:
        """Write the file of a race."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")


def describe(variant: Variant) -> dict[str, Any]:
    """Return what a report must know of a variant."""
    costs = {name: getattr(variant, name) for name in ("parameters", "flops", "steps", "tokens")}
    return {"digest": variant.digest, **costs, "warnings": list(variant.warnings)}
