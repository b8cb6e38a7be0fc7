"""Every benchmark runs, prints what its page reads, and in its quick mode publishes nothing."""

import hashlib
import json
import subprocess
import sys

import pytest

from benchmarks.growth import AXES
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.slow  # each starts a handful of programs
PUBLISHED = [ROOT / "benchmarks" / "results", ROOT / "docs"]


def published():
    files = [file for folder in PUBLISHED for file in folder.rglob("*")]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def quick(name):
    """The figures that a benchmark prints, after which all that is published must be as before."""
    before = published()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert published() == before
    return json.loads(done.stdout)


def assert_lines(figures, *names):
    """Each is a line with a positive value at every point."""
    for name in names:
        assert len(figures[name]) == len(figures["points"]) and min(figures[name]) > 0, name


def test_growth():
    figures = quick("growth")
    assert figures.keys() == {"threads", *AXES, "corpus", "processes"}
    for axis in AXES:
        line = ("microseconds_per_token", "predicted", "predicted_for_attention", "gigaflops_per_second", "peak_mib")
        assert_lines(figures[axis], *line)
        start = figures[axis]["points"].index(figures[axis]["predicted_from"])
        assert figures[axis]["predicted"][start] == figures[axis]["microseconds_per_token"][start]
    assert figures["width"]["peak_mib"][0] < figures["width"]["peak_mib"][1]
    corpus = figures["corpus"]
    for what in ("order", "windows"):
        assert_lines(corpus, f"{what}_nanoseconds_per_token", f"{what}_predicted")
    assert_lines(corpus, "order_peak_kib", "open_corpus_peak_kib")
    assert corpus["order_peak_kib"][1] < 1.5 * corpus["order_peak_kib"][0], "the order takes no memory by size"
    lines = ("microseconds_per_token", "predicted", "cpu_microseconds_per_token", "cpu_predicted")
    assert_lines(figures["processes"], *lines)


def test_startup():
    figures = quick("startup")
    assert len(figures) == 9 and all(name.endswith("_seconds") for name in figures)
    assert all(0.1 < seconds < 120 for seconds in figures.values())


def test_scaling():
    figures = quick("scaling")
    assert len(figures["ddp"]) == 2 and len(figures["processes"]) == 1
    for ways in figures["ddp"].values():
        by_hand, _, default = ways.values()
        assert default["over_default_buckets"] == 1 and by_hand["seconds_a_step"] > 0
        assert by_hand["share_hidden"] < 0.1, "after backward there is nothing to hide behind"
    for speeds in figures["processes"].values():
        assert all(value > 0 for value in speeds.values())
