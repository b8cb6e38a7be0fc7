"""What makes a run another run besides its settings: the precision of the launch, and the code that trains.

Whoever goes on with a run, trains it again or counts it among others asks here. A start writes these facts into
sessions.jsonl, and into every checkpoint.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# With another value of these, a run is another one.
FACTS = ("mixed_precision", "code")
# These change the order of sums, and so bits by rounding: the run is the same.
ARRANGEMENT = ("processes", "shards", "threads")
# What train.py imports, and what no weight depends on.
NOT_TRAINING = {"export", "plot", "plotting"}


def code_hash(root: Path = ROOT) -> str:
    """Of the sources that train: every module and package of this repository that train.py imports, or what it imports.

    By the files' content, so also outside git. Pages, tests, benchmarks and the other scripts are not among them.
    """
    digest = sha256()
    for file in training_sources(root):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def training_sources(root: Path = ROOT) -> list[Path]:
    """The files whose content is what trains, sorted. Of a package all: the name of a package is what is looked for."""
    names, files = ["train"], set()
    seen = {*names, *NOT_TRAINING}
    while names:
        name = names.pop()
        for file in (root / f"{name}.py", *(root / name).rglob("*.py")):
            if file.is_file() and file.stem not in NOT_TRAINING:
                files.add(file)
                imported = re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(errors="replace"), re.MULTILINE)
                names += {*imported} - seen
                seen |= {*imported}
    return sorted(files)


def code_name(facts: Mapping[str, Any]) -> str:
    """The code of a start or a checkpoint as people know it: its hash, and the commit that it was made from."""
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    return str(facts["code"]) + (f" (commit {commit[:8]}{dirty and '-dirty'})" if commit else "")


def other_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which of FACTS make these starts or checkpoints two runs."""
    return [name for name in FACTS if _differs(name, then, now)]


def other_arrangement(then: Mapping[str, Any], now: Mapping[str, Any], exact: bool) -> list[str]:
    """Which of ARRANGEMENT make the bits of these starts or checkpoints differ by rounding; with `exact` none does."""
    return [] if exact else [name for name in ARRANGEMENT if _differs(name, then, now)]


def lasting_starts(starts: list[dict[str, Any]], until: int) -> list[dict[str, Any]]:
    """The rows of sessions.jsonl whose steps are still there in a run that has come to step `until`.

    The steps after that of a later start were trained again, and a start of a complete run has trained none.
    """
    lasting: list[dict[str, Any]] = []
    for start in starts:
        lasting = [before for before in lasting if before["step"] < start["step"]] + [start]
    return [start for start in lasting if start["step"] < until] or lasting[-1:]


def _differs(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    both = then.get(name), now.get(name)
    return None not in both and both[0] != both[1]
