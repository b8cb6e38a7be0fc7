"""A race, from outside: what it finds, how it resumes and grows, what it costs, and what it refuses."""

import dataclasses
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from unittest.mock import ANY

import psutil
import pytest

from runtime.config.errors import ConfigError, RunError
from runtime.files import lock
from tests.conftest import ROOT, environment, metrics, thinned
from tests.tools.experiment.conftest import FAKE, fake_evaluator
from tools.experiment import confirm, race, report, runs, verdicts
from tools.experiment.change import head_commit, parse_idea
from tools.experiment.record import Round
from tools.experiment.runs import Result
from tools.experiment.verdicts import Group
from tools.jobs import runner

A, B, C, WORSE = "--model.effect_a 0.7", "--model.effect_b 0.8", "--model.effect_c 0.9", "--model.effect_c 1.4"
NOTHING, SHAM = "--model.effect_c 1.0001", "--model.sham 1"


def by_idea(result, name="verdict"):
    return {idea["idea"]: idea[name] for idea in result["ideas"]}


def stop_at(seed, number="SIGTERM"):
    """A hook that sends a signal to the command as soon as a run with this seed trains."""
    code = f"import signal, time\nif settings['seed'] >= {seed}:\n    os.kill(os.getppid(), signal.{number})\n"
    return code + "    time.sleep(60)\n"


def harms(result, idea):
    """It is `worse` if it got a second run, which depends on how soon the first results were known."""
    return by_idea(result)[idea] in ("no gain", "worse") and by_idea(result, "effect")[idea] > 0.1


# What a race finds


def test_better_ideas_join_the_baseline_one_after_another(experiments):
    ideas = (B, NOTHING, A, WORSE)
    result = experiments.race(*ideas)
    assert result["version"] == 1 and result["stack"] == [A, B], "the best first"
    assert [entry["stack"] for entry in result["rounds"]] == [[], [A], [A, B]]
    assert [sorted(idea["idea"] for idea in entry["ideas"]) for entry in result["rounds"]] == [
        sorted(ideas),
        sorted([B, NOTHING]),  # an idea that clearly harms does not race again, even after one run
        [NOTHING],
    ]
    assert by_idea(result) == {A: "better", B: "better", NOTHING: "no gain", WORSE: ANY} and harms(result, WORSE)
    for entry, effects in zip(result["rounds"], ({A: -0.3, B: -0.2, WORSE: 0.4}, {B: -0.2}, {NOTHING: 0}), strict=True):
        found = {idea["idea"]: idea for idea in entry["ideas"]}
        for idea, effect in effects.items():
            assert found[idea]["effect"] == pytest.approx(effect, abs=0.01)
            assert found[idea]["low"] < effect < found[idea]["high"]
    first = result["ideas"][0]
    assert {"p", "q", "runs", "failed", "steps", "tokens", "flops", "seconds", "parameters"} < first.keys()
    assert first["q"] < 0.05 and first["failed"] == 0 and first["steps"] == first["flops"] == 1
    names = experiments.started()
    assert result["runs"] == len(names) == len(set(names)) and result["failed"] == 0
    # The runs of the idea that joins are those of the next baseline.
    for before, after in zip(result["rounds"], result["rounds"][1:], strict=False):
        [winner] = [idea for idea in before["ideas"] if idea["joined"]]
        assert after["baseline_runs"] >= winner["runs"] and after["baseline_loss"] == pytest.approx(
            winner["loss"], 0.01
        )
    trained = experiments.trained()
    assert {run["seed"] for run in trained} <= {*range(5000)}

    assert experiments.race(*ideas) == result and not experiments.started()
    assert experiments.race(*ideas, runs=1) == result and not experiments.started()


def test_ideas_that_hurt_together_do_not_join_both(experiments):
    together = "settings['model.effect_a'] == 0.7 and settings['model.effect_b'] == 0.8"
    experiments.hook(f"if {together}:\n    settings['model.effect_c'] = 1.3")
    result = experiments.race(A, B)
    assert result["stack"] == [A]
    assert [idea["verdict"] for entry in result["rounds"] for idea in entry["ideas"]] == [
        "better",
        "unknown",
        "no gain",
    ]


def test_one_idea_is_a_race_of_one(experiments):
    result = experiments.race(A)
    assert by_idea(result) == {A: "better"} and result["stack"] == [A] and len(result["rounds"]) == 1
    assert result["runs"] < 24
    before = {*experiments.started()}
    assert harms(experiments.race(WORSE), WORSE)
    assert not before & {*experiments.started()}, "the baseline's runs are those of the first race"


def test_idea_that_gains_nothing_gets_no_more_runs(experiments):
    result = experiments.race(NOTHING, runs=40)
    assert by_idea(result) == {NOTHING: "no gain"} and by_idea(result, "runs")[NOTHING] <= 6


def test_unknown_idea_gains_at_most(experiments):
    result = experiments.race(NOTHING, runs=9, margin=0.002)
    [idea] = result["ideas"]
    assert idea["verdict"] == "unknown" and result["runs"] == 9 and -0.02 < idea["low"] < -0.002
    text = experiments.race(NOTHING, runs=9, margin=0.002, json=False)
    assert f"unknown, gains at most {-100 * idea['low']:.1f}%" in text and not experiments.started()


def test_ideas_that_train_the_same_are_one(experiments):
    """Settings in another order or spelling, also if one is added later."""
    file = experiments.lab / "ideas.txt"
    file.write_text("--model.effect_a 7e-1\n--model.sham 1 --model.effect_b 0.8\n")
    both = f"{B} --model.sham 1"
    experiments.hook(f"if settings['seed'] == 3:\n    open({str(file)!r}, 'a').write('--model.effect_a 0.70\\n')")
    result = experiments.race(A, both, str(file))
    assert by_idea(result, "joined") == {A: True, both: True} and result["stack"] == [A, both]
    assert result["runs"] == len({*experiments.started()}) == len(experiments.started())
    for idea, other in (("--model.effect_a 7e-1", A), ("--model.effect_a 0.70", A)):
        assert experiments.errors.count(f"idea: {idea}: trains the same as {other}\n") == 1
    assert f"idea: --model.sham 1 --model.effect_b 0.8: trains the same as {both}\n" in experiments.errors
    assert experiments.race(A, both, str(file)) == result and not experiments.started()


def test_identical_and_failed_ideas(experiments):
    fails, default = "--model.fails true", "--model.sham 0"
    result = experiments.race(SHAM, fails, default)
    assert by_idea(result) == {SHAM: "identical", fails: "failed", default: "identical"} and not result["stack"]
    runs = [(run["model.sham"], run["model.fails"]) for run in experiments.trained()]
    assert runs.count((1, False)) <= 2 and runs.count((0, True)) <= 2
    assert by_idea(result, "message")[fails] == "the loss is nan" and by_idea(result, "failed")[fails] >= 1
    assert by_idea(result, "effect")[fails] is None and len(result["rounds"]) == 1
    result = experiments.race(SHAM, fails, A)
    assert result["stack"] == [A] and len(result["rounds"]) == 1, "neither races on top of A"


def test_other_loss_of_equal_weights_is_not_identical(experiments):
    readout = "--model.readout 0.8"
    result = experiments.race(readout)
    assert by_idea(result) == {readout: "better"}


@pytest.mark.parametrize(("every", "verdict"), [(5, "better"), (2, "unknown")])
def test_nothing_is_better_that_fails_more_often(every, verdict, experiments):
    """Each fifth run of the baseline fails, and each fifth or second with the idea."""
    experiments.hook(
        f"every = {every} if settings['model.effect_a'] == 0.7 else 5\n"
        "settings['model.fails'] = settings['seed'] % every == 0"
    )
    result = experiments.race(A, runs=14, jobs=1)
    [idea] = result["ideas"]
    assert idea["verdict"] == verdict and result["stack"] == [A] * (verdict == "better")
    assert idea["effect"] == pytest.approx(-0.3, abs=0.01) and idea["failed"] >= 1


def test_failure_of_one_run_is_failed(experiments):
    """If the baseline's never fail."""
    experiments.hook(
        "if settings['model.effect_a'] == 0.7 and settings['seed'] == 1:\n    settings['model.fails'] = True"
    )
    result = experiments.race(A, NOTHING)
    assert by_idea(result)[A] == "failed" and not result["stack"]


def test_baseline_that_does_not_train_is_an_error(experiments):
    message = experiments.race(A, "--model.fails", "true", error=RunError)
    assert message == "the baseline does not train: the loss is nan" and len(experiments.started()) <= 3
    assert json.loads(experiments.output) == {"version": 1, "exit_code": 1, "message": message}
    assert "does not start: ValueError" in experiments.race(A, "--model.crashes", "true", error=RunError)


def test_baseline_may_fail_at_times(experiments):
    """Even at the first seed."""
    experiments.hook("settings['model.fails'] = settings['seed'] == 0")
    result = experiments.race(A, jobs=1)
    assert result["ideas"][0]["effect"] == pytest.approx(-0.3, abs=0.01) and result["ideas"][0]["failed"] == 1


def test_idea_that_crashes_at_the_start_is_out(experiments):
    crashes = "--model.crashes true"
    result = experiments.race(crashes, A)
    assert by_idea(result) == {crashes: "failed", A: "better"}
    assert by_idea(result, "message")[crashes] == "does not start: ValueError: x (train.py:1)"
    assert by_idea(result, "runs")[crashes] == 0


# Budgets, stops and growth


def test_runs_of_earlier_commands_count(experiments):
    options = {"margin": 0.002, "jobs": 1}
    assert experiments.race(NOTHING, runs=7, **options)["runs"] == 7
    first = experiments.started()
    assert experiments.race(NOTHING, runs=10, **options)["runs"] == 10
    assert len(experiments.started()) == 3 and not {*experiments.started()} & {*first}


def test_best_idea_joins_when_the_budget_is_spent(experiments):
    """Although another may be as good."""
    close = "--model.effect_b 0.699"
    result = experiments.race(A, close, runs=12, jobs=1, margin=0.0001)
    assert result["runs"] == 12 and by_idea(result) == {A: "better", close: "better"}
    assert len(result["stack"]) == len(result["rounds"]) == 1


def test_rounds_are_limited_and_continued(experiments):
    result = experiments.race(A, B, rounds=1)
    assert result["stack"] == [A] and len(result["rounds"]) == 1
    assert experiments.race(A, B, rounds=1) == result and not experiments.started()
    result = experiments.race(A, B)
    assert result["stack"] == [A, B] and len(result["rounds"]) == 2
    assert experiments.race(A, B, rounds=1) == result and not experiments.started()


def test_minutes_start_no_run_that_would_end_late(experiments, monkeypatch):
    """By a clock on which each run takes a minute."""
    clock = SimpleNamespace(monotonic=lambda: 60 * len(experiments.started()), sleep=time.sleep)
    for module in (runner, runs):
        monkeypatch.setattr(module, "time", clock)
    options = {"minutes": 7, "jobs": 1, "margin": 0.002}
    result = experiments.race(NOTHING, **options)
    assert 5 <= result["runs"] <= 7
    assert 5 <= experiments.race(NOTHING, **options)["runs"] - result["runs"] <= 7
    assert "minutes:" not in experiments.errors
    experiments.race(A, "--steps", "90", minutes=3, jobs=1)
    assert "minutes: 3 were enough for 3 runs, which took 60 s each; `better` needs at least" in experiments.errors
    experiments.race(A, "--steps", "80", runs=4)
    assert "runs: 4 are too few for an estimate; `better` needs at least 6." in experiments.errors


def test_run_that_does_not_stop_after_a_signal_is_killed(experiments, monkeypatch):
    monkeypatch.setattr(race, "STOP_SECONDS", 0.1)
    experiments.hook(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n"
    )
    experiments.race(A, jobs=1, error=SystemExit)
    assert "killed, because it did not stop" in experiments.errors


@pytest.mark.parametrize("number", thinned(["SIGINT", "SIGTERM"], 2))
def test_stopped_race_resumes(number, experiments):
    experiments.hook(stop_at(3, number))
    experiments.race(A, B, jobs=1, error=SystemExit)
    assert json.loads(experiments.output)["exit_code"] == 75
    before = [name for name in experiments.started() if int(name.rpartition("-")[2]) < 3]
    experiments.hook("")
    result = experiments.race(A, B)
    assert len(before) == 3 and not {*before} & {*experiments.started()}
    assert result["stack"] == [A, B] and result["failed"] == 0


def test_checking_ideas_is_stopped_and_names_each(experiments, patches):
    """Also while an idea hangs; nothing is left of its process."""
    first = patches.write("first.patch", "# 1\n", "# 1\nimport os, signal, sys, time\nif sys.argv[2] == 'resolve':\n"
        f"    open('{experiments.lab}/process', 'w').write(str(os.getpid()))\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(600)\n")  # fmt: skip
    experiments.race(first, A, error=SystemExit)
    assert json.loads(experiments.output)["exit_code"] == 75 and "stopped by a signal" in experiments.errors
    assert not psutil.pid_exists(int((experiments.lab / "process").read_text())) and not experiments.started()
    Path(first).unlink()
    experiments.race(A, B, runs=4)
    assert "checked 1 / 2: " in experiments.errors and "checked 2 / 2: " in experiments.errors


def test_idea_that_ends_its_process_is_out_alone(experiments):
    """Others of the same code are checked by another process."""
    experiments.root.joinpath("train.py").write_text(
        FAKE.replace('    if found["model.crashes"]:', '    if found["model.crashes"]:\n        os._exit(3)')
    )
    crashes = "--model.crashes true"
    result = experiments.race(crashes, A)
    assert by_idea(result) == {crashes: "failed", A: "better"}
    assert by_idea(result, "message")[crashes] == "does not start: exit code 3"


def test_race_stopped_in_a_later_round_resumes_there(experiments):
    together = "settings['model.effect_a'] == 0.7 and settings['model.effect_b'] == 0.8"
    experiments.hook(
        f"import signal, time\nif {together}:\n    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(60)"
    )
    experiments.race(A, B, error=SystemExit)
    before = {*experiments.started()}
    experiments.hook("")
    result = experiments.race(A, B)
    assert result["stack"] == [A, B] and len(result["rounds"]) == 2
    both = {settings["name"] for settings in experiments.trained() if settings["model.effect_a"] == 0.7}
    assert both >= {*experiments.started()} & before, "only what was stopped is trained again"


def test_ideas_join_a_running_race(experiments):
    file = experiments.lab / "ideas.txt"
    file.write_text(f"{NOTHING}\n# a comment\n")
    more = f"{A}\n--model.nope 1\n{B}\n"
    experiments.hook(f"if settings['name'].endswith('-3'):\n    open({str(file)!r}, 'a').write({more!r})")
    result = experiments.race(str(file))
    assert result["stack"] == [A, B] and by_idea(result)[NOTHING] == "no gain"
    out = {idea["idea"]: idea["message"] for idea in result["ideas"]}
    assert out["--model.nope 1"] == "--model.nope is not a setting; --help lists all"
    assert by_idea(result)["--model.nope 1"] == "refused", "a typo is no failure of an idea"
    with file.open("a") as opened:
        opened.write("--model.effect_c 0.9\n'\n")
    result = experiments.race(str(file))
    assert result["stack"] == [A, B, "--model.effect_c 0.9"], "it races on top of what was found"
    assert experiments.errors.count("refused: ': idea: \"'\" cannot be parsed") == 1


def test_file_of_ideas_that_cannot_be_read_changes_nothing(experiments, monkeypatch):
    """Each run of a race edits the file; what can be read again counts, and a wrong line is refused alone."""

    def check_and_wait(self):
        check_ideas(self)
        wait(self.checks)  # the check of the new idea may take longer than the other runs
        check_ideas(self)

    check_ideas = race.Race.check_ideas
    monkeypatch.setattr(race.Race, "check_ideas", check_and_wait)
    file = experiments.lab / "ideas.txt"
    file.write_text(f"{NOTHING}\n")
    edits = [
        "open(file, 'a').write('~nobody_here/x.patch\\n')",
        "open(file, 'ab').write(b'# id\\xe9e\\n')",
        "os.remove(file)",
        "os.symlink('/proc/self/mem', file)",
        f"os.remove(file) or open(file, 'w').write({f'{NOTHING}{chr(10)}{A}{chr(10)}~nobody_here/x.patch'!r})",
    ]
    experiments.hook(
        f"file, edits = {str(file)!r}, {edits!r}\n"
        "number = len(open(lab + '/started').readlines()) - 1\n"
        "eval(edits[number]) if number < len(edits) else None"
    )
    result = experiments.race(str(file), jobs=1, runs=9)
    assert min(by_idea(result, "runs")[idea] for idea in (A, NOTHING)) >= 1
    assert [one["idea"] for one in result["refused"]] == ["~nobody_here/x.patch"]
    for problem in ("is not a text in UTF-8", "is not there any more", "cannot be read: Input/output error"):
        assert experiments.errors.count(problem) == 1, problem
    assert report.WITHDRAWN not in experiments.errors


@pytest.mark.parametrize("command", ["race of a file", "race", "confirm"])
def test_stop_signal_is_seen_between_ideas(command, experiments, monkeypatch):
    parsed, file = [], experiments.lab / "ideas.txt"
    file.write_text("\n".join(texts := [A, B, NOTHING, WORSE]))

    def parse_and_stop(text):
        parsed.append(text)
        if len(parsed) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return parse_idea(text)

    for module in (race, confirm):
        monkeypatch.setattr(module, "parse_idea", parse_and_stop)
    run = experiments.confirm if command == "confirm" else experiments.race
    run(*([str(file)] if command == "race of a file" else texts), error=SystemExit)
    assert parsed == texts[:2] and "stopped by a signal" in experiments.errors and not experiments.started()


def test_idea_is_withdrawn_by_removing_its_line(experiments):
    """In the middle of a race, and in a command that resumes; it comes back with its line and keeps its runs."""
    file = experiments.lab / "ideas.txt"
    both, without = f"{WORSE}\n{A}\n{B}\n", f"{WORSE}\n{B}\n"
    file.write_text(both)
    remove = f"if settings['model.effect_a'] == 0.7:\n    open({str(file)!r}, 'w').write({without!r})"
    experiments.hook(remove)
    result = experiments.race(str(file), jobs=1)
    assert result["stack"] == [B] and by_idea(result)[A] == "withdrawn" and by_idea(result, "runs")[A] >= 1
    assert result["runs"] == len(experiments.started()), "also those of the idea that is withdrawn"
    assert not [run for run in experiments.trained() if run["model.effect_a"] == 0.7 and run["model.effect_b"] == 0.8]
    assert f"idea: {A}: {report.WITHDRAWN} or changed" in experiments.errors
    assert f"out: {A}: {report.WITHDRAWN}" in experiments.race(str(file), jobs=1, json=False)
    experiments.hook("")
    file.write_text(both)
    assert experiments.race(str(file), jobs=1)["stack"] == [B, A]
    assert experiments.report()["results"][0]["stack"] == [B, A]


def test_withdrawn_ideas_count_among_the_comparisons():
    """Otherwise the removal of what looks bad would make the rest look better."""
    groups = [Group([0.0, 0.01, -0.01, 0.02]), Group([-0.02, -0.03, -0.01, -0.02])]
    alone, with_others = (verdicts.assess(groups[0], groups[1:], 0.01, count)[0] for count in (0, 3))
    assert with_others.q == pytest.approx(min(1.0, 4 * alone.q)) and with_others.p == alone.p < 1
    values = {"a": groups[0].values, "b": groups[1].values}
    results = {f"{one}-{n}": Result(f"{one}-{n}", math.exp(x)) for one in values for n, x in enumerate(values[one])}
    entry = Round([], {"digest": "a"}, {"idea": {"digest": "b"}}, withdrawn=dict.fromkeys("xyz", {"digest": "c"}))
    assert report.find(entry, results, 0.01)[0].q == pytest.approx(with_others.q)


def test_changed_file_replaces_its_idea(experiments, patches):
    """A first version that crashes, in a folder; the second one races."""
    path = patches.write("one.patch", "# 1\n", "# 1\n1 / 0\n")
    assert by_idea(experiments.race(str(patches.folder), B, jobs=1))[path] == "failed"
    patches.effect("one", 1, 0.7)
    result = experiments.race(str(patches.folder), B, jobs=1)
    assert by_idea(result) == {path: "better", B: "better"} and {*result["stack"]} == {path, B}


def test_result_says_whether_the_race_runs_and_what_was_refused(experiments):
    file = experiments.lab / "ideas.txt"
    file.write_text(f"{A}\n'\n--model.nope 1\n")
    command = [sys.executable, "-c", "import sys; from tools.experiment import report; "
        "from tools.experiment.settings import ReportConfig; report.draw = lambda *_: None; "
        f"report.main(ReportConfig(folder={str(experiments.lab)!r}, json=True))"]  # fmt: skip
    experiments.hook(
        "import subprocess\nif settings['model.effect_a'] == 0.7 and not os.path.exists(lab + '/report'):\n"
        f"    subprocess.run({command!r}, cwd={str(ROOT)!r}, stdout=open(lab + '/report', 'w'))"
    )
    ended = experiments.race(str(file), jobs=1)
    running = json.loads((experiments.lab / "report").read_text())["results"][0]
    assert (running["state"], running["reason"]) == ("running", None)
    assert ended["state"] == "ended" and ended["reason"].startswith("nothing is left to train")
    assert [one["idea"] for one in ended["refused"]] == ["'", "--model.nope 1"] and ended["kind"] == "race"
    assert experiments.race(A, "--steps", "90", runs=2)["reason"] == "--runs 2 are trained, 2 of them of the baseline"
    experiments.hook(stop_at(0))
    experiments.race(B, error=SystemExit)
    reasons = [one["reason"] for one in experiments.report()["results"]]
    assert reasons[-1] == "stopped by a signal"


@pytest.mark.parametrize(("number", "is_enough"), [(5, False), (6, True)])
def test_too_few_runs_for_a_verdict_are_named(number, is_enough, experiments):
    experiments.race(A, runs=number)
    message = f"runs: {number} are too few for a verdict; one idea needs 6, 4 of the baseline and 2 of its own"
    assert (message not in experiments.errors) == is_enough == ("too few" not in experiments.errors)


def later(action):
    """Do something while the command waits."""
    Timer(0.3, action).start()


def test_race_waits_for_new_ideas_until_the_minutes_are_over(experiments, monkeypatch):
    """What is added while it waits joins the race; by a clock of the test."""
    file, now, waits, wait = experiments.lab / "ideas.txt", [0.0], [], race.Race.wait_for_ideas
    file.write_text(f"{NOTHING}\n")
    for module in (runner, runs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def add(line):
        with file.open("a") as opened:
            opened.write(f"{line}\n")

    def refused():
        return json.loads(experiments.race_file().read_text())["refused"]

    def end():
        """Add what is refused, and end the minutes as soon as the record says so."""
        add("'")
        for _ in range(600):
            if refused():
                waits.append("the record has it")
                break
            time.sleep(0.05)
        now[0] = 3601.0

    actions = [lambda: add(A), end]

    def wait_and_count(self):
        waits.append(len(self.record.rounds))
        later(actions[len(waits) - 1])
        return wait(self)

    monkeypatch.setattr(race.Race, "wait_for_ideas", wait_and_count)
    result = experiments.race(str(file), minutes=60, reach=False)
    assert (
        result["stack"] == [A] and waits == [1, 2, "the record has it"] and result["reason"] == "--minutes 60 are over"
    )
    assert [one["idea"] for one in result["refused"]] == ["'"]
    assert experiments.errors.count("waiting for new ideas until the minutes are over") == 2


def test_race_whose_rounds_are_over_waits_for_nothing(experiments):
    file = experiments.lab / "ideas.txt"
    file.write_text(f"{A}\n{B}\n")
    result = experiments.race(str(file), minutes=60, rounds=1, reach=False)
    assert result["reason"] == "--rounds 1 are over" and "waiting" not in experiments.errors


def test_signal_ends_the_wait_for_new_ideas(experiments, monkeypatch):
    file, wait = experiments.lab / "ideas.txt", race.Race.wait_for_ideas
    file.write_text(f"{NOTHING}\n")

    def wait_and_stop(self):
        later(lambda: os.kill(os.getpid(), signal.SIGTERM))
        return wait(self)

    monkeypatch.setattr(race.Race, "wait_for_ideas", wait_and_stop)
    experiments.race(str(file), minutes=60, error=SystemExit)
    assert experiments.report()["results"][0]["reason"] == "stopped by a signal"


def test_race_without_a_folder_waits_for_nothing(experiments):
    result = experiments.race(NOTHING, minutes=60)
    assert result["reason"].startswith("nothing is left to train") and "waiting" not in experiments.errors


def test_runs_start_while_other_ideas_are_checked(experiments, patches):
    """The check of a patch ends when the first run has started, or fails after a while."""
    slow = patches.write("slow.patch", "EFFECT = 40", "import time\nEFFECT = 28\nif sys.argv[2] == 'resolve':\n"
        f"    for attempt in range(600):\n        if os.path.exists({str(experiments.lab / 'started')!r}):\n"
        "            break\n        time.sleep(0.05)\n    else:\n        raise TimeoutError('no run')\n")  # fmt: skip
    result = experiments.race(str(patches.folder))
    assert by_idea(result) == {slow: "better"}, by_idea(result, "message")


def three_patches(patches, check):
    """Write three patches with gains; the check of the third one on top of the first one executes some code."""
    one, two = patches.effect("one", 1, 0.7), patches.effect("two", 2, 0.8)
    code = "# 3\nimport os, signal, sys, time\nsettings['model.effect_three'] = 1.0\n"
    code += f"if sys.argv[2] == 'resolve' and 'model.effect_one' in settings:\n{check}"
    return one, two, patches.write("z.patch", "# 3\n", code, "Settings: --model.effect_three 0.9\n\n")


def test_runs_of_a_later_round_start_while_other_ideas_are_checked(experiments, patches):
    """The check of the third patch ends when the second one trains on top of the first one, or fails after a while."""
    ideas = three_patches(
        patches,
        f"    for attempt in range(600):\n        if os.path.exists({str(experiments.lab / 'second')!r}):\n"
        "            break\n        time.sleep(0.05)\n    else:\n        raise TimeoutError('no run')\n",
    )
    both = "settings.get('model.effect_one') == 0.7 and settings.get('model.effect_two') == 0.8"
    experiments.hook(f"if {both}:\n    open(lab + '/second', 'w').close()")
    result = experiments.race(str(patches.folder))
    assert result["stack"] == [*ideas], result["rounds"][1]


def test_idea_that_was_not_checked_in_a_later_round_races_there_after_a_resume(experiments, patches):
    """A signal ends the race while the third patch is checked, and the first command to resume, too."""
    ideas = three_patches(
        patches,
        f"    names = [{str(experiments.lab)!r} + '/' + name for name in ('first', 'second')]\n"
        "    for name in [name for name in names if not os.path.exists(name)][:1]:\n"
        "        open(name, 'w').close()\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n        time.sleep(60)\n",
    )
    for _ in range(2):
        experiments.race(str(patches.folder), error=SystemExit)
    result = experiments.race(str(patches.folder))
    assert result["stack"] == [*ideas] and result["failed"] == 0


def test_best_idea_joins_after_a_resume_without_budget(experiments, monkeypatch):
    """The command was killed between the last run and the end of the round; the idea is in a file."""
    file, accept = experiments.lab / "ideas.txt", race.Race.accept
    file.write_text(f"{A}\n")

    def fail(self, winner):
        raise RunError("killed")

    monkeypatch.setattr(race.Race, "accept", fail)
    experiments.race(str(file), jobs=1, runs=6, error=RunError)
    monkeypatch.setattr(race.Race, "accept", accept)
    assert experiments.race(str(file), jobs=1, runs=6)["stack"] == [A] and not experiments.started()


def test_idea_returns_that_trains_the_same_as_its_replacement(experiments):
    """It is checked once."""
    file, same = experiments.lab / "ideas.txt", f"{NOTHING}0"
    for text in (f"{NOTHING}\n", f"{same}\n", f"{same}\n{NOTHING}\n"):
        file.write_text(text)
        result = experiments.race(str(file))
    assert by_idea(result) == {same: "no gain"} and not experiments.started()
    assert experiments.errors.count(f"idea: {NOTHING}: trains the same as {same}\n") == 1


def test_idea_that_returns_above_a_limit_is_out(experiments):
    """It raced in the same round before the limit, and is checked once, though others need more runs."""
    file, big = experiments.lab / "ideas.txt", f"{NOTHING} --model.big true"
    for lines, limit in ((f"{big}\n{SHAM}\n", None), (f"{SHAM}\n", None), (f"{big}\n{SHAM}\n{C}\n", 1.2)):
        file.write_text(lines)
        result = experiments.race(str(file), max_parameters=limit, jobs=1)
    assert by_idea(result)[big] == "refused" and experiments.errors.count("--max_parameters is 1.2\n") == 1


def test_progress_names_the_steps_of_each_run(experiments, monkeypatch):
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)
    experiments.hook("import time\ntime.sleep(0.2)")
    experiments.race(A, runs=2, jobs=2)
    assert "runs: baseline, seed 0: step 0 / 100; baseline, seed 1: step 0 / 100" in experiments.errors


def test_second_command_in_a_folder_is_refused(experiments):
    experiments.race(A, runs=4)
    before = experiments.race_file().read_text()
    with open(experiments.folder() / ".lock", "w") as other:
        assert lock(other)
        assert "another process runs" in experiments.race(A, error=ConfigError)
    assert not experiments.started() and experiments.race_file().read_text() == before


@pytest.mark.parametrize("name", [".lock", "results.jsonl"])
def test_experiment_writes_through_no_link(name, experiments, tmp_path):
    """Somebody else may have made the folder."""
    (precious := tmp_path / "precious").write_text("{}\n")
    experiments.race(A, runs=4)
    (file := experiments.folder() / name).unlink()
    file.symlink_to(precious)
    experiments.race(B, runs=8, error=OSError)
    assert precious.read_text() == "{}\n"


def test_first_runs_are_of_all_variants(experiments):
    """Runs in training count as if they had ended."""
    experiments.race(A, B, jobs=8, runs=6)
    kinds = [(run["model.effect_a"], run["model.effect_b"]) for run in experiments.trained()]
    assert kinds.count((1, 1)) == 4 and kinds.count((0.7, 1)) == kinds.count((1, 0.8)) == 1


# Code


def test_patches_are_merged_and_the_stack_is_written(experiments, patches, tmp_path):
    """As one config and one patch, with which train.py trains the runs of the stack."""
    one, three = patches.effect("one", 1, 0.7), patches.effect("three", 3, 0.9)
    result = experiments.race(str(patches.folder), B)
    assert result["stack"] == [one, B, three]
    settings = "--model.effect_one 0.7 --model.effect_b 0.8 --model.effect_three 0.9"
    assert "] one.patch --model.effect_one 0.7, seed 1: loss" in experiments.errors
    assert f"] one.patch + three.patch {settings}, seed 1: loss" in experiments.errors
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", experiments.root, clone], check=True)
    subprocess.run(["git", "apply", result["stack_patch"]], cwd=clone, check=True)
    (tmp_path / "out").mkdir()
    code = "import train; train.main('out/delivered/x', ['--config', CONFIG, '--out_dir', 'lab/e/runs', '--name', 'x'])"
    code = code.replace("CONFIG", repr(result["stack_config"]))
    (tmp_path / "lab" / "e" / "runs").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(clone)}, check=True)
    own = json.loads((tmp_path / "lab" / "e" / "runs" / "x" / "settings.json").read_text())
    effects = {"model.effect_one": 0.7, "model.effect_b": 0.8, "model.effect_three": 0.9}
    trained = next(run for run in experiments.trained() if effects.items() <= run.items())
    assert {name for name in own if own[name] != trained[name]} <= {"name", "out_dir", "seed"}


def test_printed_commands_adopt_the_stack(experiments, patches, tmp_path):
    """From a folder with a space in its name, with a new file, and after another commit changed a line nearby."""
    patch = Path(patches.write("one.patch", "EFFECT = 40", "from own import EFFECT"))
    new = (
        "diff --git a/own.py b/own.py\nnew file mode 100644\n--- /dev/null\n+++ b/own.py\n@@ -0,0 +1 @@\n+EFFECT = 28\n"
    )
    patch.write_text(patch.read_text() + new)
    text = experiments.race(str(patch), json=False, folder=str(tmp_path / "my lab"))
    assert "Its settings: --config '/" in text
    before = patches.source.read_text().replace('"micro_batch_size": 1', '"micro_batch_size": 2')
    patches.source.write_text(before)
    patches.git("commit", "--quiet", "--all", "--message", "other")
    command = text.partition("Its code: ")[2].splitlines()[0]
    subprocess.run(command, shell=True, cwd=experiments.root, check=True)
    assert patches.source.read_text() == before.replace("EFFECT = 40", "from own import EFFECT")
    assert patches.git("diff", "--name-status", "--cached").split() == ["A", "own.py", "M", "train.py"]
    settings_alone = experiments.race(A, json=False)
    assert "Its settings: " in settings_alone and "Its code: " not in settings_alone


def test_patch_that_conflicts_with_the_stack_is_out(experiments, patches):
    one = patches.write("one.patch", "EFFECT = 40", "EFFECT = 28")
    two = patches.write("two.patch", "EFFECT = 40", "EFFECT = 32")
    result = experiments.race(str(patches.folder), A.replace("0.7", "0.9"))
    assert result["stack"] == [one, "--model.effect_a 0.9"]
    found = {idea["idea"]: idea for idea in result["ideas"]}
    assert found[two]["round"] == 1 and found[two]["effect"] == pytest.approx(-0.2, abs=0.01)
    assert "git apply fails" in found[two]["message"] and "train.py" in found[two]["message"]
    assert f"{two}: git apply fails" in experiments.race(str(patches.folder), A.replace("0.7", "0.9"), json=False)


def test_idea_that_sets_a_setting_of_the_stack_is_out(experiments):
    other = "--model.effect_a 0.8"
    result = experiments.race(A, other)
    assert result["stack"] == [A] and by_idea(result, "round")[other] == 1
    assert by_idea(result, "message")[other] == f"sets model.effect_a, as {A!r} in the baseline does"
    assert not [run for run in experiments.trained() if run["model.effect_a"] == 0.56]


def test_branch_and_working_tree_are_compared_with_their_base(experiments, patches):
    git, source = patches.git, patches.source
    git("checkout", "--quiet", "-b", "mine")
    source.write_text(source.read_text().replace("EFFECT = 40", "EFFECT = 30"))
    before = git("status", "--porcelain")
    result = experiments.race(".")
    assert by_idea(result) == {".": "better"} and result["ideas"][0]["effect"] == pytest.approx(-0.25, abs=0.01)
    assert git("status", "--porcelain") == before
    git("commit", "--quiet", "--all", "--message", "an idea")
    again = experiments.race("mine --optimizer.lr 1.0")
    assert again["ideas"][0]["effect"] == result["ideas"][0]["effect"] and not experiments.started()
    [confirmed] = experiments.confirm("mine --optimizer.lr 1.0", seeds=4)["differences"]
    assert confirmed["effect"] == pytest.approx(-0.25, abs=0.01), "with the base too, though HEAD is the branch"


@pytest.mark.slow
def test_another_edit_is_another_race(experiments, patches):
    """Also if the first edit has joined the baseline. The runs of the baseline are shared."""
    code = patches.source.read_text()
    for effect, gain in ((30, -0.25), (20, -0.5), (30, -0.25)):
        patches.source.write_text(code.replace("EFFECT = 40", f"EFFECT = {effect}"))
        result = experiments.race(".", runs=10)
        assert len(result["ideas"]) == 1 and by_idea(result, "joined")["."]
        assert result["ideas"][0]["effect"] == pytest.approx(gain, abs=0.01)
    assert not experiments.started(), "the first edit again"
    assert len(list(experiments.folder().glob("races/*.json"))) == 2


def test_edits_during_a_race_reach_no_run(experiments, patches, tmp_path):
    source, config = experiments.root / "train.py", experiments.root / "configs" / "lab.yaml"
    config.write_text("optimizer.lr: 2.0\n")
    patches.git("commit", "--quiet", "--all", "--message", "a config")
    other = tmp_path / "other.yaml"
    other.write_text("evaluation: {every: 7}\n")
    experiments.hook(
        f"open({str(source)!r}, 'w').write('1 / 0')\nopen({str(config)!r}, 'w').write('optimizer.lr: 3.0')\n"
        f"open({str(other)!r}, 'w').write('evaluation: {{every: 8}}')"
    )
    result = experiments.race(A, B, "--config", str(config), "--config", str(other))
    assert result["stack"] == [A, B] and result["failed"] == 0 and source.read_text() == "1 / 0"
    assert {(run["optimizer.lr"], run["evaluation.every"]) for run in experiments.trained()} == {(2.0, 7)}
    assert "uncommitted" not in experiments.errors
    patches.git("checkout", "--quiet", "train.py")
    experiments.race(A, B, "--config", str(config), "--config", str(other), runs=1)
    assert experiments.errors.count(f"{config}: its uncommitted changes are in no run, except in") == 1


def test_patch_of_a_config_file(experiments, patches):
    config = experiments.root / "configs" / "lab.yaml"
    config.write_text("optimizer.lr: 1.0\n")
    patches.git("commit", "--quiet", "--all", "--message", "a config")
    config.write_text("optimizer.lr: 3.0\n")
    patch = patches.folder / "lr.patch"
    patch.write_text(patches.git("diff"))
    patches.git("checkout", "--quiet", ".")
    assert harms(experiments.race(str(patch)), str(patch))


def test_unreadable_patch_in_a_folder_is_ignored(experiments, patches):
    good = str(Path(patches.effect("new", 1, 0.7)).rename(patches.folder / "a good one.patch"))
    (patches.folder / "quote.patch").write_text("Settings: --model.sham 1  # Adam's\n" + Path(good).read_text())
    (patches.folder / "stale.patch").write_text(Path(good).read_text().replace(" # 1\n", " # x\n"))
    for _ in range(2):
        assert by_idea(experiments.race(str(patches.folder))) == {shlex.quote(good): "better"}
    assert experiments.errors.count("refused: ") == 2
    assert f"refused: {patches.folder / 'stale.patch'}: git apply fails" in experiments.errors
    Path(good).unlink()
    shutil.rmtree(experiments.folder())
    assert experiments.race(str(patches.folder), error=ConfigError).startswith(f"idea: none in {patches.folder}; write")
    assert not list(experiments.lab.glob("lab-*"))


def test_wrong_patches_in_a_folder_are_out(experiments, patches):
    crash = patches.write("crash.patch", "# 1\n", "# 1\n1 / 0\n")
    page = experiments.root / "README.md"
    page.write_text("before")
    patches.git("add", ".")
    patches.git("commit", "--quiet", "--message", "a page")
    page.write_text("after")
    text = patches.folder / "text.patch"
    text.write_text(patches.git("diff"))
    patches.git("checkout", "--quiet", ".")
    good = patches.effect("good", 1, 0.7)
    result = experiments.race(str(patches.folder))
    assert by_idea(result) == {good: "better", crash: "failed", str(text): "refused"}
    assert by_idea(result, "message")[str(text)] == "changes neither code that trains nor a setting"
    assert by_idea(result, "message")[crash].startswith(
        "does not start: ZeroDivisionError: division by zero (train.py:"
    )


def test_failed_checks_are_warnings(experiments, patches):
    patch = patches.write("x.patch", "WARNINGS = []", "WARNINGS = ['fails cache: 3.7e-02']")
    result = experiments.race(patch, A, runs=10)
    assert by_idea(result, "warnings") == {patch: ["fails cache: 3.7e-02"], A: []}
    text = experiments.race(patch, A, runs=10, json=False)
    assert f"warning: {patch}: fails cache: 3.7e-02" in text


# Costs


def test_costs_are_relative_to_the_baseline(experiments):
    longer, big = "--steps 200", "--model.big true"
    result = experiments.race(longer, big)
    found = {idea["idea"]: idea for idea in result["rounds"][0]["ideas"]}
    assert [found[longer][name] for name in ("steps", "tokens", "flops", "parameters")] == [2, 2, 2, 1]
    assert [found[big][name] for name in ("steps", "tokens", "flops", "parameters")] == [1, 1, 1.5, 1.5]
    assert found[longer]["verdict"] == "better" and found[big]["verdict"] == "identical"
    assert found[big]["seconds"] > 0


def test_code_of_a_variant_cannot_make_it_look_cheaper(experiments, patches):
    """It writes a count of tokens, in its metrics and beside the record of its training data."""
    forged = "    open(delivered + '.0.tokens', 'w').write('8')\n    row |= {'train/tokens': 8}\n"
    patch = patches.write(
        "forged.patch", '    write_json(run + "/metrics.jsonl"', f'{forged}    write_json(run + "/metrics.jsonl"'
    )
    [idea] = experiments.race(patch, runs=6)["ideas"]
    assert idea["runs"] > 0 and [idea[name] for name in ("steps", "tokens", "flops")] == [1, 1, 1]


def test_equal_flops_scales_steps_and_schedule(experiments):
    big = "--model.big true --model.effect_a 0.5"
    result = experiments.race(big, B, equal="flops")
    found = {idea["idea"]: idea for idea in result["rounds"][0]["ideas"]}
    assert found[big]["flops"] == pytest.approx(1, abs=0.01) and found[big]["steps"] == pytest.approx(2 / 3, abs=0.01)
    assert found[big]["effect"] == pytest.approx(1.5 * 0.5 - 1, abs=0.02), "fewer steps"
    assert found[B]["steps"] == 1 and result["equal"] == "flops"
    runs = {run["model.big"]: run for run in experiments.trained() if run["model.effect_b"] == 1}
    names = "steps", "schedule.warmup_steps", "data.num_samples", "schedule.decay_steps"
    assert [runs[True][name] for name in names] == [67, 7, 67, None]
    assert [runs[False][name] for name in names] == [100, 10, 100, None]
    # On top of the larger model, all runs cost what those of the first baseline do.
    assert result["stack"] == [big, B] or result["stack"] == [B, big]
    assert {run["steps"] for run in experiments.trained()} == {100, 67}
    assert {run["steps"] for run in experiments.trained() if run["model.big"]} == {67}
    assert "steps: 67" in Path(result["stack_config"]).read_text()


def test_equal_seconds_scales_steps_and_resumes(experiments, monkeypatch):
    """An idea of twice the seconds a step; the schedule of the second command is that of the first."""
    wait4 = os.wait4

    def usage_by_steps(process, options):
        process, status, usage = wait4(process, options)
        return process, status, SimpleNamespace(ru_utime=seconds(process), ru_stime=0.0) if process else usage

    def seconds(process):
        return float((experiments.lab / f"seconds-{process}").read_text())

    monkeypatch.setattr(runner, "visible_gpus", lambda: [])
    monkeypatch.setattr(runner.os, "wait4", usage_by_steps)
    file = experiments.lab / "ideas.txt"
    file.write_text("--model.x true\n")
    more = f"--model.x true\n{B}\n"
    experiments.hook(
        "with open(f'{lab}/seconds-{os.getpid()}', 'w') as file:\n"
        "    print(3 + 0.004 * settings['steps'] * (1 + settings['model.x']), file=file)\n"
        f"if settings['seed'] == 3:\n    open({str(file)!r}, 'w').write({more!r})"
    )
    result = experiments.race(str(file), equal="seconds")
    first = by_idea(result, "steps")
    assert first == {"--model.x true": pytest.approx(0.5), B: pytest.approx(1)}
    assert result["failed"] == 0 and result["stack"] == [B]
    assert experiments.race(str(file), equal="seconds") == result and not experiments.started()


def test_ideas_above_a_limit_are_out_before_anything_runs(experiments):
    big = "--model.big true --model.effect_b 0.5"
    result = experiments.race(A, big, max_parameters=1.2)
    assert by_idea(result) == {A: "better", big: "refused"} and result["stack"] == [A]
    reason = "has 1.500 times the parameters of the baseline; --max_parameters is 1.2"
    assert by_idea(result, "message")[big] == reason and f"idea: {big}: {reason}\n" in experiments.errors
    assert not [run for run in experiments.trained() if run["model.big"]]
    assert "--max_flops is 1.2" in by_idea(experiments.race(big, max_flops=1.2), "message")[big]
    assert not experiments.started()
    assert by_idea(experiments.race(big, max_flops=1.6)) == {big: "better"}, "it is checked again"


# Costs as they are counted, whatever the code of a variant says of itself

HEADER = """
def save(weights, others=0):
    ends = weights, weights + others
    header = '{"model.w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},' % (weights, weights)
    header += '"optimizer.w":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}}' % (others, *ends)
    header = header.encode()
    folder = settings["out_dir"] + "/" + settings["name"] + "/checkpoints/step-1"
    with open(folder + "/shard.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(weights + others))
"""


def test_parameters_are_counted_in_the_checkpoint(experiments):
    """The idea says that it has as many as the baseline."""
    experiments.hook(HEADER + "save(1500 if settings['model.effect_a'] != 1 else 1000, others=7000)")
    result = experiments.race(A, max_parameters=1.2)
    reason = "has 1.500 times the parameters of the baseline; --max_parameters is 1.2"
    assert by_idea(result) == {A: "refused"} and by_idea(result, "message") == {A: reason} and not result["stack"]
    [idea] = experiments.race(A, max_parameters=1.6)["ideas"]
    assert idea["parameters"] == 1.5 and idea["verdict"] == "better", "it is checked again"


def test_updates_and_forwards_are_counted(experiments, patches):
    """Five updates on each batch, of which the settings say nothing."""
    patch = patches.write("five.patch", "EFFECT = 40\nWORK = 1", "EFFECT = 39\nWORK = 5")
    result = experiments.race(patch, A, runs=12)
    found = {idea["idea"]: idea for idea in result["ideas"]}
    assert [found[patch][name] for name in ("steps", "tokens", "forwards", "updates", "flops")] == [1, 1, 5, 5, 5]
    assert [found[A][name] for name in ("forwards", "updates", "flops")] == [1, 1, 1]
    text = experiments.race(patch, A, runs=12, json=False)
    assert f"computes more: {patch}: 5.00 times the forwards and 5.00 times the updates of the baseline" in text
    assert text.split("Round 2")[0].count("computes more") == 1
    assert by_idea(experiments.race(patch, max_flops=2.0), "message")[patch].startswith("has 5.000 times the flops")


def timed(monkeypatch, seconds, first=1.0):
    """Let runs take these CPU seconds, by the value of model.sham; a quarter more for each of data.num_workers.

    `first` is a factor for the first run of each idea with a sham.
    """
    spent = runs.Runs._spent

    def fake(self, job, **others):
        settings = self.pending[job.run.path.name][0].settings
        taken = seconds[settings["model.sham"]] * (1 + settings["data.num_workers"] / 4)
        taken *= first if settings["model.sham"] and job.run.path.name.endswith("-0") else 1
        return dataclasses.replace(spent(self, job, **others), seconds=taken)

    monkeypatch.setattr(runs.Runs, "_spent", fake)


def test_verdict_says_if_seconds_exceed_what_flops_say(experiments, monkeypatch):
    timed(monkeypatch, {0: 20.0, 1: 26.4, 2: 25.6})
    slow, fast, big = f"{A} --model.sham 1", f"{B} --model.sham 2", "--model.sham 1 --model.big true"
    result = experiments.race(slow, fast, big, rounds=1)
    ratios = by_idea(result, "seconds_per_flop")
    assert ratios == pytest.approx({slow: 1.32, fast: 1.28, big: 0.88}), "more FLOPs may take longer"
    text = experiments.race(slow, fast, big, rounds=1, json=False)
    assert f"Better, takes 1.3 times the seconds of its FLOPs: {slow}: loss" in text
    assert text.count("times the seconds of its FLOPs") == 2, "once more in the table"


def test_verdict_says_if_the_model_computes_while_it_is_evaluated(experiments, monkeypatch):
    def evaluate(code, requests, *_):
        answers = fake_evaluator(code, requests)
        for answer in answers:  # the excess losses are 0.4, 0.32 and 0.28
            answer["seconds"] = 4.0 if answer["excess_loss"] > 0.36 else 17.0 if answer["excess_loss"] > 0.3 else 19.0
        return answers

    monkeypatch.setattr(runs, "run_evaluator", evaluate)
    slow, fast = A, B
    result = experiments.race(slow, fast, rounds=1)
    assert by_idea(result, "evaluation") == {slow: pytest.approx(4.75), fast: None}
    text = experiments.race(slow, fast, rounds=1, json=False)
    assert f"Better, is evaluated in 4.8 times the seconds of the baseline: {slow}: loss" in text


def test_seconds_of_short_runs_say_nothing_of_flops(experiments, monkeypatch):
    timed(monkeypatch, {0: 3.0, 1: 9.0})
    assert by_idea(experiments.race(f"{A} --model.sham 1"), "seconds_per_flop") == {f"{A} --model.sham 1": None}


def test_idea_above_max_seconds_leaves_the_race(experiments, monkeypatch):
    timed(monkeypatch, {0: 2.0, 1: 5.0, 2: 2.6})
    slow, other = f"{A} --model.sham 1", f"{B} --model.sham 2"
    result = experiments.race(slow, other, max_seconds=1.5)
    assert by_idea(result) == {slow: "refused", other: "better"} and result["stack"] == [other]
    assert by_idea(result, "message")[slow] == "has 2.500 times the seconds of the baseline; --max_seconds is 1.5"
    assert not [run for run in experiments.trained() if run["model.sham"] == 1 and run["model.effect_b"] == 0.8]


def test_first_run_alone_may_take_more_than_max_seconds(experiments, monkeypatch):
    """The mean of two runs is below the limit."""
    timed(monkeypatch, {0: 2.0, 1: 1.9}, first=2.0)
    assert experiments.race(f"{A} --model.sham 1", max_seconds=1.5)["stack"]


def test_idea_above_max_seconds_does_not_join_with_the_last_run(experiments, monkeypatch):
    timed(monkeypatch, {0: 2.0, 1: 5.0})
    slow = f"{A} --model.sham 1"
    result = experiments.race(slow, max_seconds=1.5, runs=6, jobs=1)
    assert by_idea(result) == {slow: "refused"} and not result["stack"]


def test_limits_are_relative_to_the_first_baseline(experiments, monkeypatch):
    """Each idea takes less than 1.4 times its seconds, and both together 1.5 times."""
    timed(monkeypatch, {0: 2.0, 1: 2.4})
    first, second = f"{A} --model.sham 1", f"{B} --data.num_workers 1"
    result = experiments.race(first, second, max_seconds=1.4, jobs=1)
    assert result["stack"] == [first] and len(result["rounds"]) == 2
    assert by_idea(result, "message")[second] == "has 1.500 times the seconds of the baseline; --max_seconds is 1.4"


def test_compute_multiplier_of_what_was_found(experiments):
    result = experiments.race(A, B, compute_multiplier=True)
    ratio, low, high = result["compute_multiplier"]
    assert low < 1 / (0.7 * 0.8) < high and ratio == pytest.approx(1 / (0.7 * 0.8), rel=0.02)
    assert experiments.race(A, B, compute_multiplier=True) == result and not experiments.started()
    assert experiments.race(WORSE, compute_multiplier=True)["compute_multiplier"] is None


def test_code_that_is_an_argument_is_parsed_once(experiments, patches, monkeypatch):
    parsed = []
    for module in (race, confirm):
        monkeypatch.setattr(module, "parse_idea", lambda text: parsed.append(text) or parse_idea(text))
    patch = patches.effect("one", 1, 0.7)
    assert experiments.race(patch)["stack"] == [patch] and parsed == [patch]
    assert experiments.confirm(patch)["ideas"] == [patch] and parsed == [patch] * 2


# Refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([A, "--model.nope 1"], "--model.nope is not a setting"),
        ([A, "--data.path x"], "changes which tokens are predicted"),
        ([A, "--seq_len 16"], "changes which tokens are predicted"),
        (["--evaluation.num_samples 6"], "changes which tokens are predicted"),
        ([A, "--seed 3"], "is set for each run"),
        ([A, "--model.effect_a 2 --resume=never"], "is set for each run"),
        ([A, "--model.effect_a 2 --print_config"], "or prints something"),
        ([A, "nowhere.patch"], "is not the root of a git repository"),
        ([A, ""], "is empty"),
        ([A, "--model.nope", "1"], "--model.nope is not a setting"),
        ([A, "--seed", "1"], "seed: is set for each run"),
        ([A, "--out_dir=x"], "out_dir: is set for each run"),
        ([A, "--config", "absent.yaml"], "config: absent.yaml: No such file or directory"),
        ([A, "--steps"], "steps: has no value"),
        ([A, "--data.source", "text", "--evaluation.every", "0"], "evaluation.every: 0, but an experiment evaluates"),
        ([A, "--evaluation.every", "0"], "evaluation.every: 0, but an experiment evaluates its runs; set it"),
        ([], "name at least one"),
        (["--model.effect_a", "0.7"], "quote settings"),
    ],
)
def test_refused_before_anything_is_written(words, message, experiments):
    assert message in experiments.race(*words, error=ConfigError)
    printed = json.loads(experiments.output)
    assert printed["exit_code"] == 2 and message in printed["message"] and printed["version"] == 1
    assert not list(experiments.lab.iterdir())


def test_command_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tools.experiment",
        "--seed 1",
        "--json",
        "true",
        "--folder",
        str(tmp_path / "lab"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "is set for each run" in json.loads(done.stdout)["message"]
    assert done.stderr.startswith("tools.experiment: error: idea: ") and not (tmp_path / "lab").exists()


@pytest.mark.parametrize(("error", "exit_code"), [(RunError("x"), 1), (OSError("x"), 1), (KeyboardInterrupt(), 130)])
def test_json_has_one_object_for_errors(error, exit_code, experiments, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(race.Race, "run", fail)
    experiments.race(A, error=type(error))
    message = str(error) or "KeyboardInterrupt"
    assert json.loads(experiments.output) == {"version": 1, "exit_code": exit_code, "message": message}


@pytest.mark.parametrize(("launch", "at_once"), [(None, 2), ("bash", 1)])
def test_runs_at_once_and_their_threads(launch, at_once, experiments, monkeypatch):
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = []

    def run(self):
        found.extend([self.jobs.max_running, self.jobs.threads])
        raise RunError("x")

    monkeypatch.setattr(race.Race, "run", run)
    experiments.race(A, jobs=None, launch=launch, error=RunError)
    assert found == [at_once, None if launch else 1]


# With the real train.py

RECIPE = """
steps: 40
global_batch_size: 8
micro_batch_size: 8
seq_len: 128
exact: true
model: {n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, dropout: 0.0}
data: {source: stories, num_samples: 400, num_workers: 0}
optimizer: {lr: 0.004}
schedule: {warmup_steps: 4}
checkpoint: {every: 1000}
evaluation: {every: 1000, num_samples: 40, micro_batch_size: 40, num_scored_generations: 0, num_logged_generations: 0}
tracking: {wandb: disabled, log_every: 10}
"""


@pytest.mark.slow
def test_real_training(tmp_path):
    """A patch with a better learning rate is found and confirmed; the files of the stack train the same bits."""
    if not head_commit():
        pytest.skip("this is no git repository")
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    patch = f"{ROOT / 'docs' / 'patches' / 'loss_z.patch'} --model.z_loss 1e-4 --optimizer.lr 0.02"
    same, long = "--model.dropout 0.0 --tracking.log_every 7", "--steps 60"
    words = ["--folder", str(tmp_path / "lab"), "--json", "true", "--config", str(tmp_path / "tiny.yaml")]
    command = [sys.executable, "-m", "tools.experiment"]

    def run(*words):
        done = subprocess.run([*command, *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    result = run(same, patch, long, "--rounds", "1", "--runs", "8", "--max_flops", "1.2", *words)
    assert result["stack"] == [patch] and result["failed"] == 0
    assert by_idea(result) == {patch: "better", same: "identical", long: "refused"}
    assert "--max_flops is 1.2" in by_idea(result, "message")[long]
    [folder] = (tmp_path / "lab").iterdir()
    assert not list(folder.glob("runs/*/checkpoints/*")) and Path(result["picture"]).stat().st_size > 10_000
    [difference] = run("confirm", "--seeds", "2", *words)["differences"]
    assert difference["effect"] == pytest.approx(by_idea(result, "effect")[patch], abs=0.1)

    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    subprocess.run(["git", "apply", result["stack_patch"]], cwd=clone, check=True)
    words = ["--config", result["stack_config"], "--seed", "0", "--out_dir", str(tmp_path / "out"), "--name", "x"]
    subprocess.run([sys.executable, "train.py", *words], cwd=clone, env=environment(), check=True)
    digests = {one["digest"] for one in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    assert metrics(tmp_path / "out" / "x")[-1]["state/digest"] in digests


# Tuning

# Each idea has a learning rate of its own: with --model.sham, half of the baseline's is the best.
OWN_RATE = """
import math
best = 0.5 if settings["model.sham"] else 1.0
settings["model.effect_c"] *= math.exp(abs(math.log(settings["optimizer.lr"] / best)) / 4)
settings["optimizer.lr"] = 1.0
"""
RATE = ("--optimizer.lr", "1")


def test_idea_is_compared_at_its_own_best_rate(experiments):
    """At the baseline's rate it is no better; equally tuned it is."""
    experiments.hook(OWN_RATE)
    idea = "--model.sham 1 --model.effect_a 0.9"
    assert by_idea(experiments.race(idea, *RATE)) == {idea: "no gain"}
    result = experiments.race(idea, *RATE, tune="optimizer.lr=0.5,1,2", rounds=2)
    best = f"{idea} [optimizer.lr x0.5]"
    assert result["stack"] == [best]
    tuning, ideas = result["rounds"]
    assert {arm["idea"] for arm in tuning["ideas"]} == {"[optimizer.lr x0.5]", "[optimizer.lr x2]"}
    assert {arm["arm_of"] for arm in tuning["ideas"]} == {"baseline"} and not any(
        arm["joined"] for arm in tuning["ideas"]
    )
    assert [arm["factors"]["optimizer.lr"] for arm in ideas["ideas"]] == [0.5, 1, 2], "the best arm first"
    assert ideas["ideas"][0]["effect"] == pytest.approx(-0.1, abs=0.02)
    assert ideas["ideas"][0]["edge"] == "optimizer.lr x0.5 is the lowest of its grid"
    assert all(arm["edge"] is None for arm in ideas["ideas"][1:])
    assert "\nat the edge: optimizer.lr x0.5 is the lowest of its grid; a wider --tune may" in experiments.report(
        json=False
    )
    assert experiments.race(idea, *RATE, tune="optimizer.lr=0.5,1,2", rounds=2) == result and not experiments.started()
    # On new seeds, best against best.
    confirmed = experiments.confirm(*RATE)
    assert confirmed["ideas"] == [best]
    assert confirmed["differences"][0]["effect"] == pytest.approx(-0.1, abs=0.02)


def test_baseline_is_tuned_first(experiments):
    """A rate that is better joins the baseline, so an idea that only needs that rate gains nothing."""
    experiments.hook("import math\nsettings['model.effect_c'] *= math.exp(abs(math.log(settings['optimizer.lr'] / 2)))")
    result = experiments.race(A, NOTHING, *RATE, tune="optimizer.lr=0.5,1,2", rounds=2)
    assert result["rounds"][0]["ideas"][0]["joined"] and result["stack"] == ["[optimizer.lr x2]", A]
    rates = {arm["idea"]: arm["verdict"] for arm in result["rounds"][1]["ideas"]}
    assert rates[A] == "better" and rates[f"{A} [optimizer.lr x2]"] in ("worse", "no gain"), (
        "factors are those of the tuned rate"
    )
    experiments.race(A, NOTHING, *RATE, tune="optimizer.lr=0.5,1,2", rounds=2, json=False)
    assert "    [lr x2]" in experiments.output and "Round 1, on the baseline" in experiments.output


@pytest.mark.parametrize("tune", ["optimizer.lr", "optimizer.lr=2", "optimizer.lr=0,1", "optimizer.lr=a,b", "=1,2"])
def test_wrong_tune_is_refused(experiments, tune):
    message = experiments.race(A, *RATE, tune=tune, error=ConfigError)
    assert (
        message == f"tune: {tune!r} must be a setting and at least two positive factors, such as optimizer.lr=0.5,1,2"
    )


def test_tuned_setting_needs_a_number(experiments):
    assert "tune: model.nothing: None is no number" in experiments.race(A, tune="model.nothing=1,2", error=ConfigError)
