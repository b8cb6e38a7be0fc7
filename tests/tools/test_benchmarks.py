"""The runner, the tables of docs/performance.md, and every benchmark case in miniature."""

import argparse
import hashlib
import importlib
import json
import re
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import psutil
import pytest

from distributed.cores import available_cores
from tests.conftest import ROOT, environment
from tools.benchmark import __main__ as command_line
from tools.benchmark import cpu, curve, gpu_programs, tables
from tools.benchmark.__main__ import measure, run_interleaved
from tools.benchmark.cpu import measure_speed, run_command

# Tables


def test_page_is_up_to_date():
    assert tables.render_page() == tables.PAGE.read_text(), "run python -m tools.benchmark.tables"
    assert set(re.findall(r"<!-- (\w+) -->\n", tables.PAGE.read_text())) - {"end"} <= tables.TABLES.keys()


def test_changed_result_changes_page(monkeypatch, tmp_path):
    changed = tables.read_result("memory")
    (cases,) = changed["figures"].values()
    cases["loss in chunks"]["peak_mib"] = [123_456.0, 123_455.0, 123_457.0]
    for case in cases.values():
        case["others_cores"] = []
    cases["loss in chunks"]["others_cores"], cases["logits at once"]["others_cores"] = [0.25, 0.125], [0.0]
    (tmp_path / "memory.json").write_text(json.dumps(changed))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "|  | loss in chunks | 123,456 (123,455 to 123,457) |" in tables.render_page()
    assert "cores busy with other work: median 0.12, at most 0.25." in tables.render_page()


def test_table_shows_failed_case(monkeypatch, tmp_path):
    groups = {"a group": {"ours": {"error": "OSError: no", "against": ["theirs"]}}}
    (tmp_path / "memory.json").write_text(json.dumps(tables.read_result("memory") | {"figures": groups}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| a group | ours: OSError: no |" in tables.section("memory")


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_names_machine_and_versions(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith("python ") and record["figures"]
    assert {"cpu", "cores", "memory_gib"} <= record["machine"].keys()
    assert {"python", "torch", "accelerate", "git_commit"} <= record["versions"].keys()
    for cases in record["figures"].values():
        for case in cases.values():
            assert any(isinstance(value, list) and value for name, value in case.items() if name != "against")
    assert tables.to_json(record) == path.read_text()


@pytest.mark.parametrize(
    "value, cell",
    [
        ([1.5, 1.25, 2.0], "1.5 (1.25 to 2)"),
        ([27801.0], "27,801 (one round)"),
        ([14.5, 15.0], "14.8 (14.5 to 15, 2 rounds)"),
        ([float(n) for n in range(1, 9)], "4.5 (2.25 to 6.75)"),
        (7, "7"),
    ],
)
def test_cell_shows_spread_of_rounds(value, cell):
    assert tables.format_value(value) == cell


def test_ratios_are_taken_round_by_round():
    cases = {
        "ours": {"seconds": [1.0, 20.0, 3.0], "against": ["theirs", "not measured"]},
        "theirs": {"seconds": [2.0, 80.0, 6.0]},
        "before": {"seconds": [4.0, 40.0], "against": ["theirs"], "error": "RuntimeError: in the third round"},
        "broken": {"error": "RuntimeError: it broke"},
    }
    header, ours, theirs, before, broken = tables.table_rows({"a group": cases}, {"seconds": "seconds"})
    assert header == ["", "", "seconds", "ratio"]
    assert ours == ["a group", "ours", "3 (1 to 20)", "0.5x theirs (0.25 to 0.5)"]
    assert theirs == ["", "theirs", "6 (2 to 80)", ""]
    assert before[3] == "1.25x theirs (0.5 to 2, 2 rounds)", "of the rounds that both have"
    assert broken == ["", "broken: RuntimeError: it broke", "", ""]


# Runner


def test_cases_are_interleaved_and_fail_alone():
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
    cases = {"a": case("a", 1.0, 2.0, 3.0), "b": case("b", 4.0, broken)}
    figures = run_interleaved(cases, {"a": ["a", "absent"], "b": ["a"]}, 3)
    assert called == ["a", "b", "a", "b", "a"]
    a, b = figures["a"], figures["b"]
    assert a["seconds"] == [1.0, 2.0, 3.0] and a["tokens"] == 7 and "against" not in a
    assert len(a["others_cores"]) == 3
    assert b["seconds"] == [4.0] and b["error"] == "ValueError: out of luck ... and more" and b["against"] == ["a"]


def test_failed_case_releases_memory():
    def out_of_memory():
        raise MemoryError

    dropped = weakref.ref(out_of_memory)
    cases = {"fails": out_of_memory, "continues": lambda: {"dropped": dropped() is None}}
    del out_of_memory
    assert run_interleaved(cases, {}, 1)["continues"]["dropped"]


def test_run_command_returns_lines_or_reports_exit_code():
    [(seconds, line)] = run_command([sys.executable, "-c", "print('done')"])
    assert line == "done" and seconds > 0
    with pytest.raises(RuntimeError, match="exit code 3\nwhy"):
        run_command([sys.executable, "-c", "print('why'); raise SystemExit(3)"])


def test_run_command_ends_program_at_line():
    endless = "import os, time\nprint('pid', os.getpid())\nwhile True: print('[step 1', flush=True); time.sleep(0.01)"
    (_, first), (_, last) = run_command([sys.executable, "-c", endless], until="[step")
    assert last == "[step 1" and not psutil.pid_exists(int(first.split()[1]))
    with pytest.raises(RuntimeError, match="exit code 0\nready"):
        run_command([sys.executable, "-c", "print('ready')"], until="never")


def test_measure_speed_is_median_without_warm_up(monkeypatch):
    seconds = [0.0, 9.0, 30.0, 32.0, 34.0, 94.0]
    lines = [(each, f"[step {step} / 6]") for step, each in enumerate(seconds)]
    monkeypatch.setattr(cpu, "run_command", lambda *_: [(0.0, "processes: 1"), *lines])
    assert measure_speed([], tokens=8) == {"tokens_per_second": 4.0, "start_seconds": 0.0}


def test_measure_counts_cores_of_other_work(monkeypatch):
    """Of 10 x cores CPU seconds, 21 were busy, 6 of them with the case."""
    busy_percent = iter([0.0, 210 / psutil.cpu_count()])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: next(busy_percent))
    monkeypatch.setattr(tables, "cpu_seconds", iter([10.0, 16.0]).__next__)
    monkeypatch.setattr(command_line, "time", SimpleNamespace(perf_counter=iter([100.0, 110.0]).__next__))
    assert measure(lambda: None) == {"seconds": 10.0, "others_cores": pytest.approx(1.5)}


# Cases


def test_overhead_compares_same_settings(monkeypatch):
    def run(command, cwd, env):
        script = next(index for index, word in enumerate(command) if word in ("train.py", "tools.benchmark.bare_loop"))
        started.append((command[script + 1 :], int(env["OMP_NUM_THREADS"])))
        raise RuntimeError("it is enough to know what would be started")

    monkeypatch.setattr(cpu, "run_command", run)
    for _, cases, baselines in cpu.overhead(argparse.Namespace(quick=False, rounds=1)):
        started = []
        assert all("enough" in case["error"] for case in run_interleaved(cases, baselines, 1).values())
        pairs = list(zip(started[::2], started[1::2], strict=True))
        assert len(pairs) == 2
        for processes, ((ours, threads), (bare, threads_of_bare)) in enumerate(pairs, start=1):
            assert ours == bare and "--tracking.log_every" in ours
            assert threads == threads_of_bare == max(1, available_cores() // processes)


def test_results_are_written_until_budget_ends(monkeypatch, tmp_path):
    def groups(options):
        for name in ("first", "second", "third"):
            yield name, {"case": lambda: {"seconds": 1.0}}, {}
            written.append(tables.read_result("memory"))
            if name == "second":
                monkeypatch.setattr(command_line, "STARTED", float("-inf"))

    written = []
    monkeypatch.setattr(importlib.import_module("tools.benchmark.cpu"), "memory", groups)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(command_line, "STARTED", time.monotonic())  # this process has run for minutes
    options = argparse.Namespace(rounds=2, quick=False, resume=False, budget_seconds=1000.0)
    figures, left_out = command_line.run_case("memory", options)
    assert [list(each["figures"]) for each in written] == [["first"], ["first", "second"], ["first", "second"]]
    assert figures["second"]["case"]["seconds"] == [1.0, 1.0] and written[-1]["left_out"] == left_out == ["third"]
    monkeypatch.setattr(command_line, "STARTED", time.monotonic())
    options.quick = True
    assert list(command_line.run_case("memory", options)[0]) == ["first", "second"]
    assert tables.read_result("memory") == written[2], "--quick writes nothing"


def test_resume_measures_missing_and_failed_groups(monkeypatch, tmp_path):
    def groups(options):
        for name in ("kept", "failed", "missing"):
            yield name, {"case": lambda name=name: called.append(name) or {"seconds": 1.0}}, {}

    monkeypatch.setattr(importlib.import_module("tools.benchmark.cpu"), "memory", groups)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(command_line, "STARTED", time.monotonic())
    options = argparse.Namespace(rounds=1, quick=False, resume=True, budget_seconds=1000.0)
    called = []
    tables.write_result("memory", {"kept": {"case": {"seconds": [9.0]}}, "failed": {"case": {"error": "no"}}}, [])
    figures, _ = command_line.run_case("memory", options)
    assert called == ["failed", "missing"] and figures["kept"]["case"]["seconds"] == [9.0]
    assert tables.read_result("memory")["figures"] == figures
    monkeypatch.setattr(tables, "machine", lambda: {"gpu": "another", "cpu": "", "cores": 1})
    command_line.run_case("memory", options)
    assert called[2:] == ["kept", "failed", "missing"], "figures of another machine are not kept"


def test_curve_reads_logs_of_both_programs(monkeypatch):
    """The third interval contains an evaluation, so its seconds are not those of a step."""
    ours = [(9.0, "[step 0 / 40] val/loss = 9.0 val/perplexity = 1"), (20.0, "[step 10 / 40] loss = 8.0 lr = 1")]
    ours += [(22.0, "[step 20 / 40] loss = 7.0"), (29.0, "[step 20 / 40] val/loss = 7.5 (of the data)")]
    ours += [(31.0, "[step 30 / 40] loss = 6.0"), (33.0, "[step 40 / 40] loss = 6.0")]
    ours += [(34.0, "[step 40 / 40] val/loss = 5.5 val/perplexity = 1")]
    theirs = [(9.0, "step 0: train loss 9.1, val loss 9.0000"), (20.0, "iter 10: loss 8.0, time 1ms, mfu 1%")]
    theirs += [(22.0, "iter 20: loss 7"), (29.0, "step 20: train loss 1.0, val loss 7.5000"), (31.0, "iter 30: loss 1")]
    theirs += [(33.0, "iter 40: loss 6"), (34.0, "step 40: train loss 1.0, val loss 5.5000")]
    for lines in (ours, theirs):
        monkeypatch.setattr(curve, "run_command", lambda *_, lines=lines: lines)
        figures = curve.train_and_watch([], step_tokens=100)
        assert figures["curve"] == [[0, 9.0, 9.0], [20, 29.0, 7.5], [40, 34.0, 5.5]]
        assert figures["seconds_a_step"] == 0.2 and figures["tokens_per_second"] == 500
        assert figures["seconds"] == 34.0 and figures["val/loss"] == 5.5


def test_bits_fail_if_digests_differ(monkeypatch):
    digests = iter(["a", "a", "b", "a"])
    commands = []
    monkeypatch.setattr(gpu_programs, "run_command", lambda command, env: commands.append(command))
    monkeypatch.setattr(
        gpu_programs, "read_rows", lambda file: [{"state/digest": "first"}, {"state/digest": next(digests)}]
    )
    options = argparse.Namespace(quick=True)
    monkeypatch.setattr(gpu_programs.torch.cuda, "is_available", lambda: True)
    _, cases, _ = next(gpu_programs.bits(options))
    figures = run_interleaved(cases, {}, 1)
    assert list(figures) == ["no graph", "graph", "graph, then none", "none, then graph"]
    assert figures["graph"]["digest"] == "a" and "digest b, expected a" in figures["graph, then none"]["error"]
    graphs = [command[command.index("--cuda_graph") + 1] for command in commands]
    assert graphs == ["False", "False", "True", "True", "True", "False", "False", "True"]
    steps = [command[command.index("--steps") + 1] for command in commands]
    assert steps == ["4", "8"] * 4


def test_report_says_when_nanogpts_loss_is_reached(monkeypatch, tmp_path):
    monkeypatch.setattr(curve, "PICTURE", tmp_path / "curve.png")

    def measured(step_seconds, *losses):
        rows = [[40 * index, 99.0, loss] for index, loss in enumerate(losses)]
        return {"12 x 768": {"seconds_a_step": [step_seconds], "curve": rows}}

    figures = {
        "nanoGPT": measured(1.0, 9.0, 5.0, 4.0),
        "ours": measured(0.5, 9.0, 4.5, 3.5),
        "worse": measured(1.0, 9.0, 6.0),
    }
    lines = curve.report(figures).splitlines()
    assert lines[0].endswith("after 80 s (1.00x)") and lines[1].endswith("after 30 s (0.38x)")
    assert lines[2].endswith("not reached") and (tmp_path / "curve.png").stat().st_size


def hashes_of_published_files():
    files = [file for folder in (tables.RESULTS, ROOT / "docs") for file in folder.rglob("*") if file.is_file()]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow  # each starts a handful of programs
@pytest.mark.parametrize("name", [name for name in command_line.CASES if name != "gpu"])
def test_quick_run_measures_and_writes_nothing(name):
    before = hashes_of_published_files()
    command = [sys.executable, "-m", "tools.benchmark", name, "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hashes_of_published_files() == before
    quantities = tables.TABLES.get(name, {})
    for cases in json.loads(done.stdout).values():
        for case in cases.values():
            measured = [key for key, value in case.items() if isinstance(value, list) and key != "against"]
            assert measured and (set(quantities) & {*measured} or not quantities)
            assert all(other in cases or "nano" in other for other in case.get("against", []))
