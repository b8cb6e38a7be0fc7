"""Facts that make runs with equal settings different: the mixed precision of the launch and the code that trains.

Every session writes them into sessions.jsonl and its checkpoints. Resuming, replaying and comparing runs read them.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOT_TRAINING = {"tests", "tools", "docs", "examples"}
FACTS = ("mixed_precision", "code")
# Facts that change the order of additions, and so the bits of a run without `exact`.
SUMMATION_ORDER = ("processes", "shards", "threads")


def code_hash(root: Path = ROOT) -> str:
    """Return a hash of the Python code under `root` that a run may import, in 12 hexadecimal digits.

    These are the files at the root, and all files in folders with Python files, except NOT_TRAINING; git is not needed.
    """
    folders = {file.parent for file in root.glob("[!.]*/[!.]*.py") if file.parent.name not in NOT_TRAINING}
    files = {*root.glob("[!.]*.py"), *(file for folder in folders for file in folder.rglob("[!.]*.py"))}
    digest = sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def describe_code(facts: Mapping[str, Any]) -> str:
    """Describe the code of a session or checkpoint: its hash and the commit."""
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    return str(facts["code"]) + (f" (commit {commit[:8]}{dirty and '-dirty'})" if commit else "")


def compare_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names in FACTS whose values differ between two sessions or checkpoints; a missing value is ignored."""
    return [name for name in FACTS if _differs(name, then, now)]


def compare_summation_order(then: Mapping[str, Any], now: Mapping[str, Any], exact: bool) -> list[str]:
    """Return `device` and the names in SUMMATION_ORDER that make the bits of two sessions differ: none with `exact`."""
    return [] if exact else [name for name in ("device", *SUMMATION_ORDER) if _differs(name, then, now)]


def _differs(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    both = then.get(name), now.get(name)
    return None not in both and both[0] != both[1]
