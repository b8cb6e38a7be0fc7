"""Test and measure everything that needs a GPU, in parts, and print one page: make test-gpu.

A call runs the parts that are not done, in order, while the time limit of the next one fits into --budget_seconds; the
first always runs. Then it prints the results of all parts. Run the same command again to continue: a part that failed
is tried again after the others, and groups of figures that a part has measured are kept. A page of another GPU, torch
or code is begun anew. --out has what each part printed.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint.provenance import provenance
from tools.benchmark import tables

ROOT = Path(__file__).parents[2]
RUN_AGAIN = 75  # exit code of a part, and of this command, that has more to do


class Part(NamedTuple):
    """A command with its time limit, the question that it answers, and a file or folder that it needs."""

    question: str
    limit_seconds: float
    command: list[str]
    needs: Path | None = None
    shown: str = ""
    """Regular expression: which lines of its output are shown."""

    @property
    def is_possible(self) -> bool:
        """Whether what it needs is there."""
        return self.needs is None or self.needs.exists()


def build_parts(options: argparse.Namespace) -> dict[str, Part]:
    """Return all parts in their order, the questions on which others depend first."""

    def case(name: str, question: str, limit: float, budget: float, corpus: str = "", rounds: int = 3) -> Part:
        command = [sys.executable, "-m", "tools.benchmark", name, "--resume"]
        own = ["--budget_seconds", str(budget), "--rounds", str(rounds)]
        command += ["--quick"] if options.quick else own
        command += ["--nanogpt", str(options.nanogpt)] if options.nanogpt else []
        needs = options.corpora / corpus if corpus and not options.quick else None
        command += ["--corpus", str(needs)] if needs else []
        return Part(question, limit, command, needs)

    marked = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in file.read_text())
    workers = ["--numprocesses", "8"] if importlib.util.find_spec("xdist") else []  # these share the GPU
    pytest = [sys.executable, "-m", "pytest", "-m", "cuda", "-rfE", *workers, *marked]
    return {
        "bits": case("bits", "does cuda_graph capture, and train the same bits?", 590, budget=400, rounds=1),
        "small_models": case("small_models", "does it speed up a step of small models?", 590, budget=300),
        "small_batches": case("small_batches", "and of 124M with small batches?", 590, budget=300),
        "small_programs": case(
            "small_programs", "and the whole train.py, beside nanoGPT's?", 590, budget=300, rounds=2
        ),
        "small_to_loss": case("small_to_loss", "which recipe has 1.47 nats first?", 590, 300, "shakespeare", rounds=2),
        "tests": Part(
            "do the guarantees hold?", 590, pytest, shown=r"^(FAILED|ERROR)|(passed|failed|skipped|error).* in "
        ),
        "gpu": case("gpu", "how fast and large is a step of 124M and 1.3B?", 590, budget=420),
        # A program of the curve is a group, and one fits into a call.
        "curve": case("curve", "when does 124M reach a loss, and nanoGPT?", 590, 1, "linux", rounds=1),
    }


def run_part(part: Part, out: Path) -> int:
    """Run a part, with its output in out.txt and out.log; return its exit code, 124 if its time was over."""
    with open(out.with_suffix(".txt"), "w") as stdout, open(out.with_suffix(".log"), "w") as stderr:
        process = subprocess.Popen(part.command, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            return process.wait(part.limit_seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:  # its programs must not stay on the GPU
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(20)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def run_parts(parts: dict[str, Part], folder: Path, budget_seconds: float, run: Callable = run_part) -> dict[str, dict]:
    """Run parts that are not done while there is time; return {name: {"exit_code": int, "seconds": float}} of all.

    The results are kept in state.json in the folder, and used if GPU, torch, code and commands are the same.
    """
    file, started = folder / "state.json", time.monotonic()
    page = {"gpu": tables.machine().get("gpu")} | {name: provenance()[name] for name in ("torch", "code")}
    page |= {"commands": {name: part.command for name, part in parts.items()}}
    state = json.loads(file.read_text()) if file.exists() else {}
    results = state["results"] if state.get("page") == page else {}

    def exit_code(name: str) -> int:
        return results.get(name, {"exit_code": RUN_AGAIN})["exit_code"]

    ready = [name for name, part in parts.items() if exit_code(name) and part.is_possible]
    for number, name in enumerate(sorted(ready, key=lambda name: exit_code(name) != RUN_AGAIN)):
        begun = time.monotonic()
        if number and begun - started + parts[name].limit_seconds > budget_seconds:
            break
        print(f"{name}: {parts[name].question}", file=sys.stderr, flush=True)
        code = run(parts[name], folder / name)
        results[name] = {"exit_code": code, "seconds": round(time.monotonic() - begun, 1)}
        file.write_text(json.dumps({"page": page, "results": results}, indent=1))
    return results


def describe(part: Part, result: dict | None) -> str:
    """Return the state of a part in words."""
    if result is None:
        return "not run" if part.is_possible else f"needs {part.needs}"
    state = {0: "done", 124: "failed: time limit", RUN_AGAIN: "unfinished"}
    return state.get(result["exit_code"], "failed") + f", {result['seconds']:.0f} s"


def render(parts: dict[str, Part], results: dict[str, dict], folder: Path) -> str:
    """Return the page: the machine, the state of each part, and what the parts printed."""
    machine, versions = tables.machine(), provenance()
    title = f"# {machine.get('gpu', machine['cpu'])}, torch {versions['torch']}, code {versions['code']}"
    lines = [title, "", "| part | question | state |", "|---|---|---|"]
    lines += [f"| {name} | {part.question} | {describe(part, results.get(name))} |" for name, part in parts.items()]
    for name in (name for name in parts if name in results):
        printed = (folder / f"{name}.txt").read_text().splitlines()
        lines += ["", f"## {name}", "", *(line for line in printed if re.search(parts[name].shown, line))]
        if results[name]["exit_code"] not in (0, RUN_AGAIN):
            lines += [f"Its log ends: {folder / name}.log", *(folder / f"{name}.log").read_text().splitlines()[-5:]]
    return "\n".join(lines)


def main() -> int:
    """Run what is missing and print the page; return 0 if all is done, 1 if a part failed, 75 to be run again."""
    parser = argparse.ArgumentParser("tools.benchmark.session", description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--corpora", type=Path, default=Path("corpora"), help="has the corpora shakespeare and linux")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the folder of results and logs")
    parser.add_argument("--budget_seconds", type=float, default=590, help="start no part that may end later than this")
    parser.add_argument("--quick", action="store_true", help="run everything in miniature, as a test")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        sys.exit("no GPU was found; --quick tests the parts on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running part, too
    options.out.mkdir(parents=True, exist_ok=True)
    parts = build_parts(options)
    results = run_parts(parts, options.out, options.budget_seconds)
    print(render(parts, results, options.out))
    if any(result["exit_code"] not in (0, RUN_AGAIN) for result in results.values()):
        return 1
    possible = [name for name, part in parts.items() if part.is_possible]
    return 0 if all(name in results and results[name]["exit_code"] == 0 for name in possible) else RUN_AGAIN


if __name__ == "__main__":
    sys.exit(main())
