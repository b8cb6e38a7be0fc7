"""Copy the trainer without tools, benchmarks and examples into a new folder: make core OUT=DIR.

The copy has the tracked files of the working tree, with uncommitted changes. It trains, resumes and passes its tests.
This module needs no package, so that the command works before `make env`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
LEFT_OUT = """
tools benchmarks examples configs/scaling_law.yaml
docs/debugging.md docs/experiments.md docs/experiments_reference.md docs/experiment_statistics.md docs/scaling_law.md
docs/track.md docs/track.yaml
docs/law_answers.png docs/learning_rates.png docs/race.png docs/world_excess.png
tests/tools tests/test_examples.py tests/support/reference_examples.py
tests/repo/test_core_alone.py tests/repo/test_make.py tests/repo/test_pages.py tests/repo/test_patches.py
tests/repo/test_rules.py
"""

# A link to a file of the repository, or the name of a test in tests/GUARANTEES.md.
REFERENCE = re.compile(r"!?\[(?P<text>[^\]]+)\]\((?!https?:)(?P<link>[^)#]+)[^)]*\)|`(?P<test>tests/[\w/]+\.py)`")
NOTE = """
> This is the trainer alone, which `make core` copied from commit {commit}. The full repository also has `tools/`,
> `benchmarks/`, `examples/`, and the pages, make targets and tests that concern only these.
"""
CHINESE_NOTE = """
> 这里只有训练器，由 `make core` 从提交 {commit} 复制而来。完整的仓库还有 `tools/`、
> `benchmarks/`、`examples/`，以及只与它们有关的页面、make 目标和测试。
"""


def refuse(message: str) -> NoReturn:
    """Print why nothing is copied, and end with exit code 2."""
    print(f"make core: error: {message}", file=sys.stderr)
    sys.exit(2)


def git(*arguments: str) -> str:
    """Return what git prints in the repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        refuse(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def adapt_page(page: Path, out: Path, commit: str) -> None:
    """Make a page of the copy in `out` say what is left out.

    Links to missing files become plain text, and a row of a table is dropped if its last cell has no other content. If
    the page has changed or names a folder that is left out, a note below its title says where the rest is.
    """

    def replace_missing(text: str, use_text: bool) -> str:
        def replacement(match: re.Match[str]) -> str:
            file = page.parent / match["link"] if match["link"] else out / match["test"]
            if file.exists():
                return match[0]
            return (match["text"] or match[0]) if use_text else ""

        return REFERENCE.sub(replacement, text)

    def is_left_out(line: str) -> bool:
        cell = line.split("|")[-2] if line.startswith("| ") else ""
        return bool(re.search(r"\w", cell)) and not re.search(r"\w", replace_missing(cell, use_text=False))

    before = page.read_text(encoding="utf-8")
    after = "".join(line for line in before.splitlines(keepends=True) if not is_left_out(line))
    after = replace_missing(after, use_text=True)
    if after != before or re.search(r"\b(tools|benchmarks|examples)[./]", after):
        title, newline, rest = after.partition("\n")
        note = CHINESE_NOTE if page.name == "README.zh-CN.md" else NOTE
        after = title + newline + note.format(commit=commit) + rest
        page.write_text(after, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Copy the files into the folder that the only argument names, and adapt the pages."""
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        refuse(f"OUT: {' '.join(arguments)!r} is not a folder; name a new one: make core OUT=DIR")
    out = Path(arguments[0]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse(f"OUT: {out} already exists and is not an empty folder; name a new one")
    names = git("ls-files", "-z", "--", ".", *(f":!{name}" for name in LEFT_OUT.split())).split("\0")
    commit = git("describe", "--always", "--dirty").strip()

    lines = 0
    for name in filter(None, names):
        if not (ROOT / name).is_file():  # deleted in the working tree
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, out / name)
        if name.endswith(".py") and not name.startswith("tests/"):
            lines += (out / name).read_bytes().count(b"\n")
    for page in out.rglob("*.md"):
        adapt_page(page, out, commit)
    print(f"{out} has the trainer: {lines:,} lines of Python outside tests/. Its tests: cd {out} && make test")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
