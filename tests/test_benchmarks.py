"""Tables and pictures are those of the records, rounds are kept and shown, and every benchmark runs in miniature."""

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack
from statistics import median
from types import SimpleNamespace

import psutil
import pytest
from matplotlib.figure import Figure

from benchmarks import __main__ as command_line
from benchmarks import measure, page, programs
from benchmarks.measure import Group, Program, awake, by_turns, run, watched
from distributed.cores import available_cores
from tests.conftest import ROOT, environment


def test_the_page_is_that_of_the_results():
    assert page.page() == page.PAGE.read_text(), "run python -m benchmarks.page"
    assert set(re.findall(r"<!-- (\w+) -->\n", page.PAGE.read_text())) - {"end"} == page.TABLES.keys()


def test_a_changed_result_changes_the_page(monkeypatch, tmp_path):
    changed = page.read("memory")
    (cases,) = changed["figures"].values()
    cases["loss in chunks"]["peak_mib"] = [123_456.0, 123_455.0, 123_457.0]
    for case in cases.values():
        case["others_cores"] = []
    cases["loss in chunks"]["others_cores"], cases["logits at once"]["others_cores"] = [0.25, 0.125], [0.0]
    (tmp_path / "memory.json").write_text(json.dumps(changed))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "|  | loss in chunks | 123,456 (123,455 to 123,457) |" in page.page()
    assert "other work kept busy meanwhile: 0.12 in the median and 0.25 at most." in page.page()


def test_a_result_of_which_every_case_failed_is_shown(monkeypatch, tmp_path):
    failed = page.read("memory") | {"figures": {"a group": {"ours": {"error": "OSError: no", "against": ["theirs"]}}}}
    (tmp_path / "memory.json").write_text(json.dumps(failed))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "| a group | ours: OSError: no |" in page.section("memory")


@pytest.mark.parametrize("path", sorted(page.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from_and_of_how_many_rounds_a_figure_is(path):
    recorded = json.loads(path.read_text())
    assert recorded["command"].startswith("python ") and recorded["figures"]
    assert {"cpu", "cores", "memory_gib"} <= recorded["machine"].keys()
    assert {"python", "torch", "accelerate", "git_commit"} <= recorded["versions"].keys()
    for cases in recorded["figures"].values():
        for case in cases.values():
            assert any(isinstance(value, list) and value for name, value in case.items() if name != "against")
    assert page.dump(recorded) == path.read_text()


@pytest.mark.parametrize(
    "recorded, shown",
    [
        ([1.5, 1.25, 2.0], "1.5 (1.25 to 2)"),
        ([27801.0], "27,801 (one round)"),
        ([14.5, 15.0], "14.8 (14.5 to 15, 2 rounds)"),
        ([float(n) for n in range(1, 9)], "4.5 (2.25 to 6.75)"),
        (7, "7"),
    ],
)
def test_a_figure_says_how_far_its_rounds_lay_apart_or_that_they_were_few(recorded, shown):
    assert page.cell(recorded) == shown


def test_a_ratio_is_taken_round_by_round_and_names_what_it_is_over():
    cases = {
        "ours": {"seconds": [1.0, 20.0, 3.0], "against": ["theirs", "not measured"]},
        "theirs": {"seconds": [2.0, 80.0, 6.0]},
        "before": {"seconds": [4.0, 40.0], "against": ["theirs"], "error": "RuntimeError: in the third round"},
        "broken": {"error": "RuntimeError: it broke"},
    }
    header, ours, theirs, before, broken = page.table({"a group": cases}, {"seconds": "seconds"})
    assert header == ["", "", "seconds", "over"]
    assert ours == ["a group", "ours", "3 (1 to 20)", "0.5x theirs (0.25 to 0.5)"]
    assert theirs == ["", "theirs", "6 (2 to 80)", ""]
    assert before[3] == "1.25x theirs (0.5 to 2, 2 rounds)", "rounds that both had"
    assert broken == ["", "broken: RuntimeError: it broke", "", ""]


def test_cases_take_turns_and_one_that_fails_ends_alone():
    called = []

    def case(name, *results):
        results = iter(results)

        def call():
            called.append(name)
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return {"seconds": result, "tokens": 7}

        return call

    broken = ValueError("out of luck\nand more")
    group = Group("a group", {"a": case("a", 1.0, 2.0, 3.0), "b": case("b", 4.0, broken)}, against={"b": "a"})
    figures = by_turns(group, 3)
    assert called == ["a", "b", "a", "b", "a"]
    a, b = figures["a"], figures["b"]
    assert a["seconds"] == [1.0, 2.0, 3.0] and a["tokens"] == 7 and "against" not in a
    assert len(a["others_cores"]) == len(a["processor_seconds"]) == 3
    assert b["seconds"] == [4.0] and b["error"] == "ValueError: out of luck ... and more" and b["against"] == ["a"]


def test_a_case_that_fails_holds_no_memory_when_the_next_one_begins():
    def out_of_memory():
        raise MemoryError

    dropped = weakref.ref(out_of_memory)
    group = Group("a group", {"fails": out_of_memory, "goes on": lambda: {"dropped": dropped() is None}})
    del out_of_memory
    assert by_turns(group, 1)["goes on"]["dropped"]


def test_the_framework_and_the_bare_loop_have_the_same_settings_and_together_a_thread_for_each_core(monkeypatch):
    def start(command, cwd, **env):
        script = next(index for index, word in enumerate(command) if word in ("train.py", "benchmarks.bare_loop"))
        started.append((command[script + 1 :], int(env["OMP_NUM_THREADS"])))
        raise RuntimeError("it is enough to know what would be started")

    monkeypatch.setattr(measure, "Program", start)
    for group in programs.overhead(argparse.Namespace(quick=False, rounds=1)):
        started = []
        assert all("enough" in case["error"] for case in by_turns(group, 1).values())
        pairs = zip(started[::2], started[1::2], strict=True)
        for processes, ((ours, threads), (bare, threads_of_bare)) in enumerate(pairs, start=1):
            assert ours == bare and "--tracking.log_every" in ours
            assert threads == threads_of_bare == max(1, available_cores() // processes)
        assert processes == 2


def test_figures_are_written_after_each_group_until_the_time_is_over(monkeypatch, tmp_path):
    def groups(options):
        for name in ("first", "second", "third"):
            yield Group(name, {"case": lambda: {"seconds": 1.0}})
            written.append(page.read("soak"))
            if name == "second":
                monkeypatch.setattr(command_line, "STARTED", float("-inf"))

    written = []
    monkeypatch.setattr(importlib.import_module("benchmarks.bits"), "soak", groups)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(command_line, "STARTED", time.monotonic())  # this process has run for minutes
    options = argparse.Namespace(rounds=2, quick=False, budget_seconds=1000.0)
    figures = command_line.measure("soak", options)
    assert [list(each["figures"]) for each in written] == [["first"], ["first", "second"], ["first", "second"]]
    assert figures["second"]["case"]["seconds"] == [1.0, 1.0] and written[-1]["left_out"] == ["third"]
    monkeypatch.setattr(command_line, "STARTED", time.monotonic())
    options.quick = True
    assert list(command_line.measure("soak", options)) == ["first", "second"]
    assert page.read("soak") == written[2], "a trial writes nothing"


def test_pictures_are_drawn_from_the_records_beside_what_theory_says(monkeypatch, tmp_path):
    figures, record = {}, page.read("growth")
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.update({path.name: figure}))
    for axis in record["figures"]:
        page.draw(axis, record, tmp_path / f"{axis}.png")
    assert figures.keys() == {file.name for file in (ROOT / "docs" / "growth").iterdir()}

    def drawn(axis):
        """The medians, and what theory says of them."""
        (axes,) = figures[f"{axis}.png"].axes
        measured = [list(container.lines[0].get_ydata()) for container in axes.containers]
        return measured, [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"]

    cases = list(record["figures"]["width"].values())
    (medians,), (by_flops, attention) = drawn("width")
    assert medians == [1e6 / median(case["tokens_per_second"]) for case in cases]
    assert by_flops[-1] == medians[-1] and max(attention) < max(by_flops), "it takes over the largest model's speed"
    assert by_flops[0] == pytest.approx(medians[-1] * cases[0]["flops_per_token"] / cases[-1]["flops_per_token"])
    (clock, processors), (shared, constant) = drawn("processes")
    assert shared == [clock[0], *[clock[0] / 2] * 3] and constant == [processors[0]] * 4


def test_a_program_is_watched_and_what_it_took_is_counted(monkeypatch):
    work = "sum(i * i for i in range(3_000_000)); print('done')"
    took = watched(lambda: {"printed": run([sys.executable, "-c", work])})
    assert took["printed"] == ["done"] and 0 < took["processor_seconds"] < took["seconds"] + 0.1
    with pytest.raises(RuntimeError, match="exit code 3\nwhy"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    busy = "print('ready'); sum(range(5_000_000)); print('go on'); import time; time.sleep(60)"
    with Program([sys.executable, "-c", busy]) as program:
        took = program.turn("go")
        assert 0 < took["processor_seconds"] and 0 < took["seconds"] < 60
    with pytest.raises(RuntimeError, match="ready"), Program([sys.executable, "-c", "print('ready')"]) as program:
        program.turn("never")
    monkeypatch.setattr(Program, "lines", lambda program: iter([(5.0, "go 1"), (5.5, "warming"), (6.5, "go 2")]))
    with Program([sys.executable, "-c", "import time; time.sleep(60)"]) as program:
        assert program.turn("go", lines=2)["seconds"] == 1.5, "the first line warms up"
        assert program.turn("go", lines=1)["seconds"] < 5.0, "since it was woken"
    # 21 of 10 x cores processor seconds were busy, 6 of them with this.
    busy_share = iter([0.0, 210 / psutil.cpu_count()])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: next(busy_share))
    monkeypatch.setattr(measure, "processor_seconds", iter([10.0, 16.0]).__next__)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=iter([100.0, 110.0]).__next__))
    assert watched(lambda: None) == {"seconds": 10.0, "processor_seconds": 6.0, "others_cores": pytest.approx(1.5)}


def test_programs_take_turns_in_which_the_others_sleep(monkeypatch):
    def start(*arguments, **env):
        programs.append(Program(*arguments, **env))
        return programs[-1]

    programs = []
    monkeypatch.setattr(measure, "Program", start)
    monkeypatch.setattr(measure, "TURNS", 3)
    counting = [sys.executable, "-c", "for i in range(10**9): print('[step', i, flush=True) or sum(range(10_000))"]
    with ExitStack() as stack:
        cases = [awake(stack, 6, counting, lines=lines) for lines in (1, 5)]
        for case in cases * 4:
            took = case()
            assert took["tokens_per_second"] == 6 / took["seconds"] and took["processor_seconds"] >= 0
            deadline = time.monotonic() + 60  # a process that is on a core may have a moment more
            alive = [program.process for program in programs if program.process.is_running()]
            while {process.status() for process in alive} != {psutil.STATUS_STOPPED}:
                assert time.monotonic() < deadline
        assert [program.process.is_running() for program in programs] == [False, False, True, True]
        said = [sum(line.startswith("[step") for line in program.printed) for program in programs]
        assert said == [4 + 3, 4 + 3 * 5, 4 + 1, 4 + 5], "four lines of warming up, and three turns; then one anew"
    assert not any(program.process.is_running() for program in programs)


def test_a_child_that_has_ended_keeps_no_other_awake_or_alive():
    ending = subprocess.Popen([sys.executable, "-c", ""])
    ended = psutil.Process(ending.pid)
    ending.wait()
    counting = "import time\nfor i in range(100): print('[step', i, flush=True) or time.sleep(0.1)"
    with Program([sys.executable, "-c", counting]) as program:
        program.turn()
        program.asleep.insert(0, ended)
        program.turn()
        program.asleep.insert(0, ended)
    assert not program.process.is_running()


NANOCHAT = os.environ.get("NANOCHAT")  # a checkout of nanochat, with its environment in .venv
PUBLISHED = [ROOT / "benchmarks" / "results", ROOT / "docs"]


def published():
    files = [file for folder in PUBLISHED for file in folder.rglob("*")]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


@pytest.mark.slow  # each starts a handful of programs
@pytest.mark.parametrize("name", [name for name in command_line.CASES if name != "gpu"])
def test_a_quick_run_measures_every_case_and_publishes_nothing(name):
    before = published()
    command = [sys.executable, "-m", "benchmarks", name, "--quick"]
    command += ["--nanochat", NANOCHAT] if NANOCHAT else []
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert published() == before
    figures = json.loads(done.stdout)
    quantities = page.TABLES.get(name, {})
    for cases in figures.values():
        for case in cases.values():
            measured = [key for key, value in case.items() if isinstance(value, list) and key != "against"]
            assert measured and set(quantities) & {*measured} or not quantities
            assert all(other in cases or "nano" in other for other in case.get("against", []))
    if name == "growth":
        first, last = (figures["corpus"][size]["order_peak_kib"][0] for size in ("1000000", "10000000"))
        assert last < 1.5 * first, "the order takes no memory by size"
    if name == "peers":  # hardly trained, so each of a few hundred tokens is as likely as another
        [cases] = figures.values()
        assert len(cases) == (2 if NANOCHAT else 1)
        assert all(5 < case["val/bits_per_byte"][0] < 8 for case in cases.values())
    if name == "exactness":
        assert figures["bits"]["exact, 1 against 2 processes"]["tensors_that_differ"] == 0
    if name == "scaling":
        assert all(case["share_hidden"][0] < 0.1 for way, case in figures["1 x 16"].items() if "by hand" in way)
