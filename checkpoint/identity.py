"""Facts that make runs with equal settings different: the mixed precision of the launch and the code that trains.

Every session writes them into sessions.jsonl and its checkpoints. Resuming, auditing and comparing runs read them.
"""

import ast
import functools
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FACTS = ("mixed_precision", "code")
# Facts that change the order of additions, and so the bits of a run without `exact`.
SUMMATION_ORDER = ("processes", "shards", "threads")


def code_hash(root: Path = ROOT) -> str:
    """Return a hash of the content of `training_sources`, in 12 hexadecimal digits; git is not needed."""
    digest = sha256()
    for file in training_sources(root):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def training_sources(root: Path = ROOT) -> list[Path]:
    """Return the files under `root` that train.py imports, directly or through others, sorted.

    A package counts as a whole, whichever of its modules is imported.
    """
    names, seen, files = ["train"], {"train"}, set()
    while names:
        name = names.pop()
        for file in (root / f"{name}.py", *(root / name).rglob("*.py")):
            if file.is_file():
                files.add(file)
                new = _imported_names(file.read_bytes()) - seen
                names += new
                seen |= new
    return sorted(files)


@functools.lru_cache(maxsize=1024)
def _imported_names(source: bytes) -> set[str]:
    """Return the first component of every absolute import; an empty set if the source is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {module.split(".")[0] for module in modules}


def describe_code(facts: Mapping[str, Any]) -> str:
    """Describe the code of a session or checkpoint: its hash and the commit."""
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    return str(facts["code"]) + (f" (commit {commit[:8]}{dirty and '-dirty'})" if commit else "")


def compare_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names in FACTS whose values differ between two sessions or checkpoints; a missing value is ignored."""
    return [name for name in FACTS if _differs(name, then, now)]


def compare_summation_order(then: Mapping[str, Any], now: Mapping[str, Any], exact: bool) -> list[str]:
    """Return the names in SUMMATION_ORDER whose values make the bits of two sessions differ: none with `exact`."""
    return [] if exact else [name for name in SUMMATION_ORDER if _differs(name, then, now)]


def _differs(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    both = then.get(name), now.get(name)
    return None not in both and both[0] != both[1]
