"""The runs of an experiment: killed, stopped, lost and damaged ones, and what their losses are."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.config.errors import ConfigError, RunError
from runtime.files import lock
from tests.conftest import thinned
from tests.tools.experiment.conftest import fake_evaluator
from tools.experiment import runs
from tools.experiment.runs import EVALUATED_AT_ONCE, MAX_KILLED, Result, count_work, problem_of
from tools.experiment.variant import Variant, delivered_file
from tools.jobs import runner
from tools.jobs.launch import Launch
from tools.jobs.runner import Job, JobRunner
from trainer.run.directory import Run, Status

A, B, NOTHING = "--model.effect_a 0.7", "--model.effect_b 0.8", "--model.effect_c 1.0001"


def results(experiments):
    return [json.loads(line) for line in (experiments.folder() / "results.jsonl").read_text().splitlines()]


# Runs that end otherwise


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 9)", "sys.exit(75)"])
def test_killed_run_is_trained_again(code, experiments):
    """Twice it is killed, or stopped from elsewhere."""
    experiments.hook(
        "if settings['model.effect_a'] == 0.7 and settings['seed'] == 0:\n"
        "    log = open(lab + '/killed', 'a+')\n    log.write('x')\n    log.flush()\n    log.seek(0)\n"
        f"    if len(log.read()) < {MAX_KILLED}:\n        {code}\n"
    )
    result = experiments.race(A, runs=8, jobs=1)
    assert result["failed"] == 0 and [idea["verdict"] for idea in result["ideas"]] == ["better"]
    [name] = {name for name in experiments.started() if experiments.started().count(name) > 1}
    assert experiments.started().count(name) == MAX_KILLED and name.endswith("-0")
    assert next(one for one in results(experiments) if one["run"] == name)["sessions"] == MAX_KILLED


def test_run_that_is_killed_after_its_end_counts(experiments):
    experiments.hook("import atexit\natexit.register(os.kill, os.getpid(), 9)")
    result = experiments.race(A, runs=8, jobs=1)
    assert result["failed"] == 0 and [idea["verdict"] for idea in result["ideas"]] == ["better"]
    assert len(set(experiments.started())) == len(experiments.started()) == 8


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL; out of memory?"),
        ("sys.exit(75)", "stopped by a signal from elsewhere"),
    ],
)
def test_run_that_is_always_killed_fails(code, message, experiments):
    experiments.hook(f"if settings['model.effect_a'] == 0.7:\n    {code}")
    result = experiments.race(A, jobs=1)
    assert result["ideas"][0]["verdict"] == "failed" and result["ideas"][0]["message"] == message
    names = [name for name in experiments.started() if name.endswith("-0")]
    assert names.count(names[-1]) == MAX_KILLED and len(experiments.started()) == 4 + MAX_KILLED
    assert experiments.race(A, jobs=1) == result and not experiments.started()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(0)", "ended with exit code 0 before its last step (it printed nothing)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("settings['model.fails'] = True", "the loss is nan"),
    ],
)
def test_failed_run_is_trained_once(code, message, experiments):
    experiments.hook(f"if settings['model.effect_a'] == 0.7:\n    {code}")
    result = experiments.race(A, jobs=1)
    assert result["ideas"][0]["message"] == message and len(experiments.started()) == 5


def test_stopped_run_counts_its_seconds_and_sessions(experiments):
    experiments.hook(
        "import time\nif settings['seed'] == 1:\n    end = time.process_time() + 0.1\n"
        "    while time.process_time() < end:\n        pass\n    os.kill(os.getppid(), 15)\n    time.sleep(60)"
    )
    experiments.race(A, jobs=1, error=SystemExit)
    [stopped] = [one for one in results(experiments) if one["is_stopped"]]
    assert stopped["sessions"] == 1 and stopped["seconds"] > 0.1 and "seed 1: stopped" in experiments.errors
    experiments.hook("")
    experiments.race(A, jobs=1)
    last = [one for one in results(experiments) if one["run"] == stopped["run"]][-1]
    assert last["sessions"] == 2 and last["seconds"] > stopped["seconds"] and last["loss"] and not last["is_stopped"]


# One idea must not end the others


def test_run_that_takes_ten_times_as_long_fails(experiments, monkeypatch):
    """It hangs, on a clock that is a thousand times as fast."""
    overdue = runs.Runs._overdue

    def faster(self, job, seconds):
        is_slow = self.pending[job.run.path.name][0].settings["model.effect_b"] == 0.8
        return overdue(self, job, 1000 * seconds if is_slow else seconds)

    monkeypatch.setattr(runs.Runs, "_overdue", faster)
    experiments.hook("import time\nif settings['model.effect_b'] == 0.8:\n    time.sleep(600)")
    result = experiments.race(B, A, jobs=1)
    found = {idea["idea"]: idea for idea in result["ideas"]}
    assert found[B]["verdict"] == "failed" and result["stack"] == [A] and found[B]["runs"] == 1
    assert re.fullmatch(
        r"took \d+ seconds and had not ended, where the baseline takes \d+ \(the limit is 10 times those\)",
        found[B]["message"],
    )
    assert experiments.race(B, A, jobs=1) == result and not experiments.started()


def runs_after(elapsed, folder, monkeypatch):
    """Return the runs of an experiment whose baseline took these seconds."""
    monkeypatch.setattr(runs, "read_results", lambda folder: {"a-0": Result("a-0", 1.0, elapsed=elapsed)})
    return runs.Runs(folder, SimpleNamespace(digest="a", flops=2, given={}), SimpleNamespace(waiting={}), 0)


@pytest.mark.parametrize(
    ("flops", "elapsed", "seconds", "fails"),
    [(2, 10, 99, False), (2, 10, 101, True), (6, 10, 299, False), (1, 10, 99, False), (2, 1, 59, False)],
)
def test_limit_of_a_run(flops, elapsed, seconds, fails, tmp_path, monkeypatch):
    """A run with more FLOPs may take longer, and any run a minute."""
    found = runs_after(elapsed, tmp_path, monkeypatch)
    job = Job(Run(tmp_path / "b-0"), 1, ())
    found.pending["b-0"] = SimpleNamespace(flops=flops), 0
    assert bool(found._overdue(job, seconds)) == fails


@pytest.mark.parametrize(("elapsed", "limit"), [(10, 600), (100, 1000), (None, math.inf)])
def test_limit_of_an_evaluation(elapsed, limit, tmp_path, monkeypatch):
    """Ten minutes, or ten times the seconds in which the baseline is trained."""
    found, limits = runs_after(elapsed, tmp_path, monkeypatch), []
    monkeypatch.setattr(runs, "ask", lambda *_, max_silence, **others: limits.append(max_silence()) or [])
    monkeypatch.setattr(runs, "check_checkout", lambda code: None)
    found.baseline.code, found.jobs.signal, found.jobs.seconds, found.jobs.starts = tmp_path, 0, {}, {}
    found._evaluate([runs.EndedRun(Job(Run(tmp_path / "b-0"), 1, ()), {"code": str(tmp_path)}, {}, {})])
    assert limits == [limit]


def test_progress_is_a_line_every_half_minute(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = runs_after(10, tmp_path, monkeypatch)
    for seed, state in enumerate(("running", "finished")):
        job = Job(Run(tmp_path / f"b-{seed}"), 9, ())
        job.run.path.mkdir()
        (job.run.path / "metrics.jsonl").write_text('{"step": 3}\n')
        (job.run.path / "status.json").write_text(json.dumps({"state": state, "step": 9, "reason": ""}))
        found._started[job] = 0.0
        found.pending[job.run.path.name] = SimpleNamespace(given={}, changes_code=False), seed
    for now[0] in (1.0, 29.0, 30.0, 31.0, 59.0, 60.0):
        found._print_progress()
    assert capsys.readouterr().err == 2 * "runs: baseline, seed 0: step 3 / 9; 1 to evaluate\n"
    found.jobs.waiting[next(iter(found._started))] = 0.0
    now[0] = 90.0
    found._print_progress()
    lock = tmp_path / "b-0" / ".lock"
    assert f"step 3 / 9, another process holds {lock}; 1" in capsys.readouterr().err


def test_run_whose_lock_is_never_released_fails_alone(experiments, monkeypatch):
    """A killed command has left a run that hangs."""
    experiments.confirm(A, seeds=2)
    folder, locked = experiments.folder(), experiments.started()[0]
    rows = [json.dumps(row) + "\n" for row in results(experiments) if row["run"] != locked]
    (folder / "results.jsonl").write_text("".join(rows))
    (folder / "runs" / locked / "status.json").unlink()
    monkeypatch.setattr(runs.Runs, "_overdue", lambda self, job, seconds: "took too long" * job.run.is_locked())
    with open(folder / "runs" / locked / ".lock", "a") as held:
        assert lock(held)
        found = experiments.confirm(A, seeds=2)
    assert found["failures"] == [f"took too long; another process holds {folder / 'runs' / locked / '.lock'}"]
    assert not experiments.started(), "the other runs had ended"


def test_run_that_is_locked_when_the_time_is_spent_has_no_result(tmp_path, monkeypatch):
    found, job = runs_after(10, tmp_path, monkeypatch), Job(Run(tmp_path / "b-0"), 1, ())
    found.pending["b-0"], found.jobs.outcomes = (found.baseline, 0), {job: "locked"}
    assert not found._has_ended(job) and not found.pending and not found.is_known("b-0")


def test_what_a_run_leaves_in_its_folder_is_its_failure(experiments):
    """A file that cannot be read."""
    folder = "settings['out_dir'] + '/' + settings['name'] + '/checkpoints/step-2/manifest.json'"
    experiments.hook(f"if settings['model.effect_b'] == 0.8:\n    os.makedirs({folder})")
    result = experiments.race(B, A)
    found = {idea["idea"]: idea for idea in result["ideas"]}
    assert found[B]["verdict"] == "failed" and result["stack"] == [A]
    assert found[B]["message"].startswith("its files cannot be read: IsADirectoryError")


LEFT_IN_FOLDER = {
    "a folder in place of the metrics": "os.remove(folder + 'metrics.jsonl'), os.mkdir(folder + 'metrics.jsonl')",
    "a pipe in place of the metrics": "os.remove(folder + 'metrics.jsonl'), os.mkfifo(folder + 'metrics.jsonl')",
    "a pipe in place of the status": "os.remove(folder + 'status.json'), os.mkfifo(folder + 'status.json')",
    "a pipe among the counts": "os.mkfifo(folder + 'counts.5')",
    "a link in the checkpoint": "os.symlink('/', folder + 'checkpoints/step-2')",
    "a folder in place of the lock": "os.mkdir(folder + '.lock'), os._exit(1)",
    "a link in place of the lock": "os.symlink('/', folder + '.lock'), os._exit(1)",
}


@pytest.mark.parametrize("left", thinned([*LEFT_IN_FOLDER], 3))
def test_other_things_than_files_in_the_folder_of_a_run_are_its_failure(left, experiments, monkeypatch):
    """Also when the race resumes; to read a pipe would block without end."""
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)
    experiments.hook(f"""
import atexit
folder = settings['out_dir'] + '/' + settings['name'] + '/'
if settings['model.effect_b'] == 0.8:
    os.makedirs(folder + 'checkpoints', exist_ok=True)
    atexit.register(lambda: ({LEFT_IN_FOLDER[left]}))""")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it blocks"))
    signal.alarm(60)
    for _ in range(2):
        result = experiments.race(B, A, jobs=1)
        found = {idea["idea"]: idea["verdict"] for idea in result["ideas"]}
        assert result["stack"] == [A] and found[B] == "failed", result["ideas"]
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_progress_of_a_run_whose_metrics_cannot_be_read(tmp_path):
    run = Run(tmp_path)
    assert runs.newest_step(run) == 0
    (tmp_path / "metrics.jsonl").mkdir()
    assert runs.newest_step(run) == "?"


def test_baseline_that_cannot_be_evaluated_is_an_error_that_is_not_kept(experiments, monkeypatch):
    """So that the same command resumes when the cause is gone, such as a full memory."""
    nothing = {"loss": None, "excess_loss": None, "problem": f"{runs.NOT_EVALUATED}: MemoryError: "}
    monkeypatch.setattr(runs, "run_evaluator", lambda code, requests, *_: [nothing for _ in requests])
    message = experiments.race(A, error=RunError)
    assert message == "the baseline cannot be evaluated: MemoryError: "
    monkeypatch.setattr(runs, "run_evaluator", fake_evaluator)
    assert experiments.race(A)["failed"] == 0


def test_stopped_evaluation_is_repeated_without_training(experiments, monkeypatch):
    def stop(code, requests, is_stopped, max_silence):
        os.kill(os.getpid(), signal.SIGTERM)
        while not is_stopped():
            time.sleep(0.01)
        return []

    monkeypatch.setattr(runs, "run_evaluator", stop)
    experiments.race(A, jobs=1, runs=6, error=SystemExit)
    finished = [one["run"] for one in results(experiments) if one["is_stopped"] and one["elapsed"]]
    assert finished and not [one for one in results(experiments) if not one["is_stopped"]]
    monkeypatch.setattr(runs, "run_evaluator", fake_evaluator)
    assert experiments.race(A, jobs=1, runs=6)["failed"] == 0
    assert not {*finished} & {*experiments.started()}
    again = [one for one in results(experiments) if one["run"] == finished[0]]
    assert [one["sessions"] for one in again] == [1, 1] and again[1]["seconds"] == again[0]["seconds"] > 0


# Times


def timing(tmp_path, monkeypatch, hook=""):
    """Return the runs of an experiment whose runs take no time, and its baseline.

    Its CPU seconds are 1, and 0.5 more for each step that its last session trains.
    """
    program = f"""
import json, os, sys, time
run, steps = sys.argv[1], int(sys.argv[2])
os.makedirs(run, exist_ok=True)
first = json.load(open(run + "/status.json"))["step"] if os.path.exists(run + "/status.json") else 0
{hook}
json.dump({{"state": "finished", "step": steps}}, open(run + "/status.json", "w"))
open(run + "/../seconds-" + str(os.getpid()), "w").write(str(1 + 0.5 * (steps - first)))
"""

    def job(self, folder, seed):
        run = Run(folder / "runs" / f"{self.digest}-{seed}")
        return Job(run, self.steps, (sys.executable, "-IS", "-c", program, str(run.path), str(self.steps)))

    wait4 = os.wait4

    def usage_by_steps(process, options):
        process, status, usage = wait4(process, options)
        file = tmp_path / "runs" / f"seconds-{process}"
        seconds = float(file.read_text()) if file.exists() else 0.0
        return process, status, SimpleNamespace(ru_utime=seconds, ru_stime=0.0) if process else usage

    monkeypatch.setattr(Variant, "job", job)
    monkeypatch.setattr(runner.os, "wait4", usage_by_steps)
    monkeypatch.setattr(runner, "visible_gpus", lambda: [])
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "signals_to_catch", lambda: [])
    launch = Launch()
    settings = {"steps": 400, "seq_len": 8, "global_batch_size": 4, "micro_batch_size": 4, "data.source": "text"}
    settings |= {"schedule.batch_warmup_from": None, "schedule.batch_warmup_steps": None, "optimizer.lr": 1.0}
    baseline = Variant(tmp_path, "a", False, launch, {}, settings, 1000, 6000.0)
    return runs.Runs(tmp_path, baseline, JobRunner(1), 0), baseline


def test_interrupted_timing_run_is_timed_from_its_start(tmp_path, monkeypatch):
    """Sixty of its 84 steps were trained before a signal, and the other run had ended but was not recorded."""
    found, baseline = timing(tmp_path, monkeypatch)
    for variant, step, state in zip(runs.timing_variants(baseline), (4, 60), ("finished", "preempted"), strict=True):
        run = variant.job(tmp_path, runs.TIMING_SEED).run
        run.path.mkdir(parents=True)
        run.write_status(Status(state, step))
    assert found._seconds_a_step(baseline) == pytest.approx(0.5)
    assert [one.seconds for one in found.results.values()] == [1 + 0.5 * 4, 1 + 0.5 * 84]


def test_timing_run_that_hangs_fails(tmp_path, monkeypatch):
    """Its limit is that of a run: ten times the seconds of the baseline's."""
    found, baseline = timing(tmp_path, monkeypatch, "if os.path.exists(run + '/../hang'): time.sleep(60)")
    found._seconds_a_step(baseline)
    (tmp_path / "runs" / "hang").touch()
    idea = baseline.changed({"optimizer.lr": 2.0})
    monkeypatch.setattr(runs, "MIN_LIMIT", 0.0)
    monkeypatch.setattr(runs, "MAX_SLOWDOWN", 1e-9)
    with pytest.raises(RunError, match=r"took \d+ seconds and had not ended, where the baseline takes \d+"):
        found.equalize(idea, "seconds")


def test_time_of_a_resumed_run_is_no_limit_for_others(tmp_path, monkeypatch):
    """The last steps of a run took a second, after a signal or after its command was killed."""
    found, baseline = timing(tmp_path, monkeypatch)
    monkeypatch.setattr(runs, "check_checkout", lambda code: None)
    (begun := Run(tmp_path / "runs" / f"{baseline.digest}-0")).path.mkdir(parents=True)
    begun.write_status(Status("preempted", 390))
    monkeypatch.setattr(found, "request", lambda job: {})
    monkeypatch.setattr(found, "_evaluate", lambda ended: [found._spent(run.job, loss=1.0) for run in ended])
    found.train_in_order([(baseline, 0), (baseline, 1)])
    resumed, whole = found.results.values()
    assert resumed.elapsed is None and resumed.seconds is None, "the first session is unknown"
    assert whole.elapsed and whole.seconds == 1 + 0.5 * 400
    assert found._typical_seconds() == whole.elapsed


# Files


def test_run_whose_result_is_lost_is_trained_again(experiments):
    """A line is damaged, and the last one has no end, as after a full disk."""
    options = {"margin": 0.002, "runs": 6}  # four of the baseline and two of the idea
    before = experiments.race(NOTHING, **options)
    file = experiments.folder() / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lost = [json.loads(line)["run"] for line in (lines[1], lines[-1])]
    file.write_text("".join([lines[0], "{" + lines[1], *lines[2:-1], lines[-1][:20]]))
    again = experiments.race(NOTHING, **options)
    assert sorted(experiments.started()) == sorted(lost) and again["failed"] == 0
    assert [idea["effect"] for idea in again["ideas"]] == pytest.approx([idea["effect"] for idea in before["ideas"]])
    assert "results.jsonl, line 2 is skipped" in experiments.errors
    assert experiments.race(NOTHING, **options) == again and not experiments.started()


def test_rows_that_the_runner_did_not_write_count_nowhere(experiments):
    """Copied under another name, edited, or signed with another key, as a run or its patch might write them."""
    before = experiments.race(NOTHING, runs=6)
    rows, file = results(experiments), experiments.folder() / "results.jsonl"
    digests = {row["run"].rpartition("-")[0] for row in rows}
    forged = [rows[0] | {"run": f"{digest}-{seed}", "excess_loss": 1e-3} for digest in digests for seed in range(8)]
    forged += [rows[0] | {"loss": 1e-3}, forged[0] | {"signature": runs.signature(forged[0], "mine")}]
    with file.open("a") as opened:
        opened.write("".join(json.dumps(row) + "\n" for row in forged))
    assert experiments.race(NOTHING, runs=6) == before and not experiments.started()
    assert experiments.errors.count("is skipped: tools.experiment did not write it") >= len(forged)


def test_code_of_the_baseline_that_a_run_changed_trains_no_other_run(experiments, patches):
    """One run of a patch changed the code of the baseline for all later ones."""
    patch = patches.effect("a", 1, 0.5)
    experiments.hook(
        "if settings['model.effect_a'] == 0.5:\n"
        "    import glob\n"
        "    for file in glob.glob(os.path.dirname(os.path.dirname(__import__('train').__file__)) + '/*/train.py'):\n"
        "        os.chmod(file, 0o644)\n"
        "        open(file, 'a').write('EFFECT = 80\\n')\n"
    )
    message = experiments.race(patch, jobs=1, error=RunError)
    assert "train.py: the code has changed since it was checked out, perhaps by the code of an idea" in message
    names = experiments.started()
    assert len(names) < 8 and all(row["loss"] is None or row["loss"] < 1.5 for row in results(experiments))


def test_runs_that_ended_before_their_evaluation_are_evaluated(experiments, monkeypatch):
    """The evaluation fails, as by a full memory, and the same command resumes."""

    def fail(*_):
        raise RunError("the evaluation fails")

    monkeypatch.setattr(runs, "run_evaluator", fail)
    experiments.race(A, error=RunError)
    # Without those that were stopped before their record was written, after their status.
    folder = experiments.folder() / "runs"
    before = {run for run in experiments.started() if Path(f"{delivered_file(Run(folder / run))}.0").exists()}
    monkeypatch.setattr(runs, "run_evaluator", fake_evaluator)
    assert experiments.race(A)["failed"] == 0 and before and not before & {*experiments.started()}


def test_training_does_not_run_ahead_of_the_evaluation(experiments, monkeypatch):
    """The choice of the next run needs results."""
    counts = []

    def slow(code, requests, *_):
        time.sleep(0 if counts else 2)
        counts.append(len(requests))
        return fake_evaluator(code, requests)

    monkeypatch.setattr(runs, "run_evaluator", slow)
    experiments.race(*(f"--model.sham {number}" for number in range(1, 9)), runs=20, jobs=2)
    assert max(counts) <= EVALUATED_AT_ONCE + 2, counts


@pytest.mark.parametrize(("start_seconds", "at_once"), [(1e-9, 1), (1e9, 4)], ids=["long runs", "short runs"])
def test_long_runs_are_evaluated_one_by_one(start_seconds, at_once, experiments, monkeypatch):
    """A run waits for others only if starting an evaluation takes much of its own time."""
    counts = []

    def evaluate(code, requests, *_):
        counts.append(len(requests))
        return fake_evaluator(code, requests)

    monkeypatch.setattr(runs, "run_evaluator", evaluate)
    monkeypatch.setattr(runs, "EVALUATION_START_SECONDS", start_seconds)
    experiments.race(A, runs=8, jobs=1)
    assert counts[0] == at_once


def test_missing_run_folders_and_checkpoints_are_not_needed(experiments):
    before = experiments.race(A)
    assert not list(experiments.folder().glob("runs/*/checkpoints"))
    shutil.rmtree(experiments.folder() / "runs")
    assert experiments.race(A) == before and not experiments.started()


def test_work_is_counted_over_processes_and_shards(tmp_path):
    """The parameters are those of the newest checkpoint; a run of two sessions counts no tokens, as one may be lost."""

    def write(step, name, **tensors):
        (folder := run.checkpoints / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        save_file({key: np.zeros(size) for key, size in tensors.items()}, folder / f"{name}.safetensors")

    run = Run(tmp_path / "run")
    write(1, "shard-0", **{"model.a": 7})
    write(2, "shard-0", **{"model.a": (2, 3), "optimizer.a": 6})
    write(2, "shard-1", **{"model.b": 4})
    for rank, (tokens, updates) in enumerate([(100, 5), (80, 5)]):
        (run.path / f"counts.{rank}").write_text(json.dumps({"tokens": tokens, "updates": updates}) + "\n")
    assert count_work(run) == {"parameters": 10, "forward_tokens": 180, "updates": 5}
    for file in run.path.glob("counts.*"):
        file.write_text(file.read_text() * 2)
    assert count_work(run) == {"parameters": 10}


# Losses


def test_loss_is_the_evaluators(experiments, patches, monkeypatch):
    """The patch logs half of the excess loss."""

    def evaluate(code, requests, *_):
        answers = fake_evaluator(code, requests)
        return [answer | {"excess_loss": answer["excess_loss"] * 2, "loss": 0.9} for answer in answers]

    patch = patches.write("x.patch", "EFFECT = 40", "EFFECT = 20")
    monkeypatch.setattr(runs, "run_evaluator", evaluate)
    [idea] = experiments.race(patch)["ideas"]
    assert idea["loss"] == 0.9 and idea["excess_loss"] == pytest.approx(0.4, rel=0.01)


def test_problem_found_by_the_evaluator_is_a_failure(experiments, monkeypatch):
    def evaluate(code, requests, *_):
        answers = fake_evaluator(code, requests)
        cheats = [request["settings"]["data.num_workers"] == 3 for request in requests]
        problem = {"loss": None, "excess_loss": None, "problem": "it depends on later tokens"}
        return [problem if cheat else answer for cheat, answer in zip(cheats, answers, strict=True)]

    monkeypatch.setattr(runs, "run_evaluator", evaluate)
    cheat = "--data.num_workers 3 --model.effect_a 0.5"
    result = experiments.race(cheat, B)
    found = {idea["idea"]: idea for idea in result["ideas"]}
    assert found[cheat]["verdict"] == "failed" and found[cheat]["message"] == "it depends on later tokens"
    assert result["stack"] == [B]


def test_loss_below_the_entropy_is_a_failure(experiments):
    [idea] = experiments.race("--model.effect_a -0.1")["ideas"]
    assert idea["verdict"] == "failed" and "its loss is below the entropy of the data, by 0.04" in idea["message"]


@pytest.mark.parametrize(
    ("loss", "excess", "metric", "problem"),
    [
        (0.9, 0.1, None, ""),
        (0.9, None, None, ""),
        (None, None, "val/x", "val/x is not logged"),
        (float("nan"), None, None, "its loss is nan"),
        (float("inf"), None, "val/x", "val/x is inf"),
        (0.0, None, "val/x", "val/x is 0, and only positive values are compared"),
        (0.9, 0.0, None, "its loss is below the entropy of the data, by -0 nats/token"),
    ],
)
def test_problems_of_losses(loss, excess, metric, problem):
    assert problem_of(loss, excess, metric) == problem


def test_metric_of_the_variants_own_code_is_compared(experiments):
    """It grows by model.effect_b in its own way."""
    result = experiments.race(B, metric="val/other")
    [idea] = result["ideas"]
    assert result["compared"] == "val/other" and result["margin"] == pytest.approx(0.015)
    assert idea["effect"] == pytest.approx((1 + 0.8 * 0.32) / 1.4 - 1, abs=0.005) and idea["excess_loss"] is None
    message = experiments.race(B, metric="val/x", error=RunError)
    assert message == "the baseline does not train: val/x is not logged"


def test_what_the_evaluator_is_told(experiments, monkeypatch):
    """Nothing of it was written by the code of the run; runs of one code follow each other."""
    requests = []
    evaluate = runs.run_evaluator
    monkeypatch.setattr(runs, "run_evaluator", lambda code, some, *_: requests.extend(some) or evaluate(code, some))
    experiments.race("--global_batch_size 2", "--optimizer.lr", "1.0")
    wide = next(one for one in requests if one["settings"]["global_batch_size"] == 2)
    assert wide["settings"] == {
        "steps": 100, "seq_len": 8, "global_batch_size": 2, "micro_batch_size": 1, "evaluation.num_samples": 5,
        "evaluation.every": 10,
        "seed": 0, "data.seed": 0, "data.source": "stories", "data.num_samples": 100, "data.num_workers": 0,
        "data.facts": 0, "data.zipf": 1.3, "data.hash": None,
    }  # fmt: skip
    [manifest] = wide["manifests"]
    assert manifest.startswith(wide["run"]) and wide["delivered"] == [] and wide["processes"] == 1
    assert wide["code"] == str(experiments.root) and wide["config"].endswith(".yaml")
    seeds = {one["test_seed"] for one in requests}
    assert len(seeds) == 1 and seeds == {
        json.loads((experiments.folder() / "experiment.json").read_text())["test_seed"]
    }


def test_checkpoint_is_hashed_when_its_run_ends(experiments, monkeypatch):
    """A later run changes it before both are evaluated."""
    requests = []
    evaluate = runs.run_evaluator
    monkeypatch.setattr(runs, "run_evaluator", lambda code, some, *_: requests.extend(some) or evaluate(code, some))
    first = "settings['out_dir'] + '/' + settings['name'][:-1] + '0/checkpoints/step-1/manifest.json'"
    experiments.hook(f"if settings['seed'] == 1:\n    open({first}, 'w').write('changed')")
    experiments.race(A, runs=2, jobs=1)
    hashes = [hash for one in requests for hash in one["manifests"].values()]
    assert len(hashes) == 2 and len(set(hashes)) == 1


def test_delivered_sequences_of_changed_code_are_checked(experiments, patches, monkeypatch):
    requests, changed = [], []
    evaluate = runs.run_evaluator

    def record(baseline, some, *_):
        requests.extend(some)
        changed.extend(one for one in some if one["code"] != str(baseline))
        return evaluate(baseline, some)

    monkeypatch.setattr(runs, "run_evaluator", record)
    patch = patches.write("x.patch", "# 1\n", "# 1\nx = 1\n")
    experiments.race(f"{patch} --data.num_workers 2", f"{A} --data.num_workers 2")
    workers = {run["model.effect_a"]: run["data.num_workers"] for run in experiments.trained() if run["seed"] == 0}
    assert workers == {1: 0, 0.7: 2}, "workers would not record what they read"
    assert changed and all(one["delivered"] == [one["run"] + "/delivered.0"] for one in changed)
    assert not any(one["delivered"] for one in requests if one not in changed)


def test_run_without_a_record_of_its_data_is_trained_again(experiments, patches):
    """It was killed behind its last step; the second time the command was killed, too."""
    record = '    with open(delivered + ".0", "a")'
    kill = "    if not os.path.exists(run + '/../killed'):\n"
    kill += "        open(run + '/../killed', 'w')\n        os.kill(os.getpid(), 9)\n"
    patch = patches.write("x.patch", record, kill + record)
    before = experiments.race(patch, jobs=1)
    *_, first, again = experiments.started()
    assert first == again and first.endswith("-0") and before["failed"] == 0

    rows = [row for row in results(experiments) if row["run"] != first]
    (experiments.folder() / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = experiments.folder() / "runs" / first
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    (run / "status.json").touch()  # by a second session, which left only the record of the first
    experiments.race(patch, jobs=1)
    assert experiments.started() == [first]


def test_run_that_never_records_its_data_fails(experiments, patches):
    record = '    with open(delivered + ".0", "a")'
    [idea] = experiments.race(patches.write("x.patch", record, "    return 0\n" + record), jobs=1)["ideas"]
    assert idea["verdict"] == "failed" and idea["message"] == "ended without a record of its training data"


def test_refused_metric_leaves_the_results_of_others(experiments):
    experiments.race(A)
    experiments.race(A, "--model.nope", "1", error=ConfigError)
    assert experiments.race(A)["stack"] == [A] and not experiments.started()
