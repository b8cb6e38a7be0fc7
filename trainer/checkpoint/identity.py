"""Facts that make runs with equal settings different: the mixed precision of the launch and the code that trains.

Every session writes them into sessions.jsonl and its checkpoints. Resuming, replaying and comparing runs read them.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOT_TRAINING = {"tests", "tools", "docs", "examples", "wandb"}  # W&B's client writes into a folder of its name
NOT_CODE = (".md", ".pyc", "~")  # ends of the names of pages, byte code and backups of editors, which lie beside code
# A config file counts by the settings that it gives. The others are written by programs, so they differ by machine.
NOT_READ_BY_CODE = NOT_TRAINING | {"configs", "accelerate_configs", "benchmarks", "runs", "corpora", "exports"}
# `from a.b import c` (a) or `import a.b, c` (a.b, c).
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^\n#]+))", re.MULTILINE)
# 'kernels/fused.cu'
QUOTED_FILE = re.compile(r"""["']([\w./-]*\.\w+)["']""")
FACTS = ("mixed_precision", "code")
# Facts that change the order of additions, and so the bits of a run without `exact`.
SUMMATION_ORDER = ("processor", "processes", "shards", "threads")
VERSIONS = ("python", "torch", "accelerate")  # another one may change the bits, with `exact`, too


def code_hash(root: Path = ROOT) -> str:
    """Return a hash of the code under `root` that a run may use, in 12 hexadecimal digits."""
    digest = sha256()
    for file, content in sorted(training_code(root).items()):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(sha256(content).digest())
    return digest.hexdigest()[:12]


def training_code(root: Path) -> dict[Path, bytes]:
    """Read the files under `root` that a run may import or read. Other files, such as new scripts, do not count.

    Imports lead from train.py, and from the script at the root that runs, to files and folders at the root, except
    NOT_TRAINING. A Python file in such a folder counts if its name is a word of the code: it may be imported by that
    name later. Other files in such a folder, such as tables and kernels, count all: code may find them by a pattern.
    Elsewhere a file counts if the code has its name in quotes (`_named_files`). git is not needed.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    names = {"train", script.stem} if script.parent == root.resolve() else {"train"}
    imported: set[str] = set()
    words: set[str] = set()
    quoted: set[str] = set()
    found: set[Path] = set()  # files and the files in folders that are imported
    code: dict[Path, bytes] = {}
    while True:
        for name in names - imported - NOT_TRAINING:
            found.update(file for file in (root / f"{name}.py", *_files_below(root / name)) if file.is_file())
        imported |= names
        reached = {file for file in found if file.parent == root or file.stem in words or file.suffix != ".py"}
        new = reached - code.keys()
        if not new:
            return code | {file: file.read_bytes() for file in _named_files(root, words, quoted) - code.keys()}
        for file in new:
            code[file] = file.read_bytes()
            if file.suffix == ".py":
                its_words, its_names, its_quoted = words_and_imports(code[file])
                words |= its_words
                names = names | its_names
                quoted |= its_quoted


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, except hidden ones and NOT_CODE."""
    return (file for file in folder.rglob("[!.]*") if not file.name.endswith(NOT_CODE))


def _named_files(root: Path, words: set[str], quoted: set[str]) -> set[Path]:
    """Return the files that the code names in quotes, except Python and NOT_CODE.

    The path is from `root`, or from a folder of it whose name is a word of the code: root / "kernels" / "fused.cu".
    """
    folders = [folder for folder in root.iterdir() if folder.name in words - NOT_READ_BY_CODE and folder.is_dir()]
    names = [name for name in quoted if not name.startswith(("/", ".")) and not name.endswith((*NOT_CODE, ".py"))]
    names = [name for name in names if Path(name).parts[0] not in NOT_READ_BY_CODE]
    # Unlike Path.is_file of Python 3.11, isfile raises nothing for a text that is too long for a path.
    return {file for folder in (root, *folders) for name in names if os.path.isfile(file := folder / name)}


@cache  # a sweep hashes the same code before every run
def words_and_imports(code: bytes) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return all words of a Python file, the first names of what it imports, and names of files in quotes."""
    text = code.decode(errors="replace")
    imports = [module or modules for module, modules in IMPORT.findall(text)]
    first_names = frozenset(name for names in imports for name in re.findall(r"(?:^|,)\s*(\w+)", names))
    return frozenset(re.findall(r"\w+", text)), first_names, frozenset(QUOTED_FILE.findall(text))


def describe_code(facts: Mapping[str, Any]) -> str:
    """Describe the code of a session or checkpoint: its hash and the commit."""
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    return str(facts["code"]) + (f" (commit {commit[:8]}{dirty and '-dirty'})" if commit else "")


def compare_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names in FACTS whose values differ between two sessions or checkpoints; a missing value is ignored."""
    return [name for name in FACTS if _differs(name, then, now)]


def compare_summation_order(then: Mapping[str, Any], now: Mapping[str, Any], exact: bool) -> list[str]:
    """Return `device` and the names in SUMMATION_ORDER that make the bits of two sessions differ.

    With `exact` that is only another kind of GPU: on x86-64 processors the bits are the same.
    """
    names = ("device", *SUMMATION_ORDER) if not exact else ("processor",) if now.get("device") == "cuda" else ()
    return [name for name in names if _differs(name, then, now)]


def compare_versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names in VERSIONS whose values differ between two sessions or checkpoints."""
    return [name for name in VERSIONS if _differs(name, then, now)]


def _differs(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    both = then.get(name), now.get(name)
    return None not in both and both[0] != both[1]
