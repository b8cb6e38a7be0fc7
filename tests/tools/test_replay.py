"""Any step of a run is retrained bitwise, and an audit finds tampering."""

import json
import os
import re
import shutil
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import train as train_script
from checkpoint.manifest import File, read_manifest
from cli import scripts
from config.errors import ConfigError, RunError
from data.files import sha256
from distributed.signals import Preempted
from distributed.state_hash import digest_tensors
from tests.conftest import TINY_STORIES, assert_same_bits, environment, metrics, python, tensors, thinned, train
from tests.support import forked
from tests.training.test_schedule import FORK
from tools.replay.audit import audit, record_problems
from tools.replay.recorded_run import RecordedRun, Retrained
from tools.replay.settings import ReplayConfig

STEPS = 6
RECIPE = [*TINY_STORIES, *"--steps 6 --tracking.log_every 1 --evaluation.every 3 --checkpoint.every 2".split()]
RECIPE += "--evaluation.num_logged_generations 2 --evaluation.num_scored_generations 4".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints at steps 2, 4 and 6."""
    out_dir = tmp_path_factory.mktemp("runs")
    train(*RECIPE, "--out_dir", out_dir, "--name", "run")
    return out_dir / "run"


@pytest.fixture(scope="module")
def every_step(tmp_path_factory):
    """The same run, saved at every step."""
    out_dir = tmp_path_factory.mktemp("every_step")
    train(*RECIPE, "--checkpoint.every", 1, "--out_dir", out_dir, "--name", "run")
    return out_dir / "run"


# A step


def test_replay_shows_step_and_reproduces_it(run):
    shown = python(f"python -m tools.replay {run} 4 --num_sequences 3 --arithmetic false").stdout
    assert f"steps 3 to 3: retrained from {run / 'checkpoints' / 'step-00000002'}; reproduced bitwise (1" in shown
    assert "step 4: reproduced bitwise (1 digest(s))" in shown
    row = next(row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["step"] == 4)
    assert f"loss {row['train/loss']:.6g}, gradient norm {row['train/grad_norm']:.6g}" in shown
    losses = [float(loss) for loss in re.findall(r"sample \d+: loss ([\d.]+); '<\|endoftext\|>", shown)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert len(re.findall(r"^ +[01]  .*\d", shown, re.MULTILINE)) == 2, "a line for each of the two blocks"


@pytest.mark.slow
def test_replay_of_a_skipped_update(tmp_path):
    """The first update makes weights so large that the loss of the second step is not finite."""
    not_finite = "--steps 2 --evaluation.every 0 --optimizer.lr 1e30 --on_nonfinite skip --name run --out_dir".split()
    train(*TINY_STORIES, *not_finite, tmp_path)
    shown = python(f"python -m tools.replay {tmp_path / 'run'} 2 --arithmetic false").stdout
    assert "loss nan, gradient norm nan" in shown and "loss nan, training objective of this sequence alone nan" in shown


def test_replay_of_diverged_run_prints_the_cause_alone(tmp_path):
    """The loss of the second step is not finite; the suggested replay of the retrained run would be of no use."""
    diverges = "--steps 2 --evaluation.every 0 --optimizer.lr 1e30 --name run --out_dir".split()
    refused = train(*TINY_STORIES, *diverges, tmp_path, exit_code=1)
    cause, remedy, command = refused.stderr.strip().partition("; no checkpoint contains this step. To inspect")
    assert remedy and str(tmp_path) in command
    shown = python(f"python -m tools.replay {tmp_path / 'run'} 2 --arithmetic false").stdout
    assert cause.partition("step 2: ")[2] + "\n" in shown and "tools.replay" not in shown


@pytest.mark.slow
def test_replay_of_a_forked_schedule(tmp_path):
    """A replayed step has the scheduled clipping and dropout."""
    recipe = [*TINY_STORIES, "--optimizer.grad_clip", "0.3", "--out_dir", str(tmp_path), "--name", "run"]
    for words in (["train.py", *recipe], ["tools.replay", str(tmp_path / "run"), "4"]):
        done = forked.run("-c", [FORK, *words], 0, environment(CXX="/nonexistent"))
        assert done.returncode == 0, done
    row = metrics(tmp_path / "run")[3]
    assert "step 4: reproduced bitwise (1 digest(s))" in done.stdout
    fp32 = [float(figure) for figure in re.search(r"fp32 +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE).groups()]
    assert fp32 == pytest.approx([row["train/loss"], row["train/grad_norm"]], abs=1e-6)


@pytest.mark.slow
def test_replay_of_a_forked_step(tmp_path):
    """The gradient is that of the fork's training objective."""
    recipe = [*map(str, RECIPE), "--model.dropout", "0", "--out_dir", str(tmp_path), "--name", "fork"]
    for words in (["train", *recipe], ["replay", str(tmp_path / "fork"), "3"]):
        done = forked.run("tests/tools/freezing.py", words, 1, environment(CXX="/nonexistent"))
        assert done.returncode == 0, done.stdout + done.stderr
    row = next(row for row in map(json.loads, (tmp_path / "fork" / "metrics.jsonl").open()) if row["step"] == 3)
    assert "step 3: reproduced bitwise (1 digest(s))" in done.stdout
    norm = float(re.search(r"fp32 +[\d.]+ +([\d.]+)$", done.stdout, re.MULTILINE)[1])
    assert norm == pytest.approx(row["train/grad_norm"], abs=1e-6)


def test_replay_shows_sequences_and_precisions_of_step(run):
    """The mean loss of the sequences and the step recomputed in fp32 match the logged loss."""
    shown = python(f"python -m tools.replay {run} 3 --num_sequences 6", CXX="/nonexistent").stdout
    row = next(row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["step"] == 3)
    fp32 = [float(figure) for figure in re.search(r"fp32 +([\d.]+) +([\d.]+)$", shown, re.MULTILINE).groups()]
    assert fp32 == pytest.approx([row["train/loss"], row["train/grad_norm"]], abs=1e-6)
    bf16 = float(re.search(r"bf16 +([\d.]+)", shown)[1])
    assert bf16 != row["train/loss"] and bf16 == pytest.approx(row["train/loss"], rel=1e-2)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_replay_saves_checkpoint_of_any_step_bitwise(step, run, every_step, tmp_path):
    python(f"python -m tools.replay {run} {step} --save_to {tmp_path / f'step-{step:08d}'}")
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    assert_same_bits(tensors(tmp_path, step), tensors(every_step, step))


def test_replay_profile_overwrites_an_older_trace(run, tmp_path):
    trace = tmp_path / "trace-steps-1-1-rank-0.json"
    trace.touch()
    python(f"python -m tools.replay {run} 1 --num_sequences 1 --arithmetic false --profile {tmp_path}")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def branch(run):
    """Branch of the run after step 2, with more weight decay; saved at steps 4 and 6."""
    begin = ["--branch_from", run / "checkpoints" / "step-00000002", "--optimizer.weight_decay", 0.3]
    train(*RECIPE, *begin, "--out_dir", run.parent, "--name", "branch")
    return run.parent / "branch"


def test_replay_of_a_branch(run, branch):
    shown = python(f"python -m tools.replay {branch} 4 --num_sequences 1 --arithmetic false").stdout
    assert f"steps 3 to 3: retrained from {run / 'checkpoints' / 'step-00000002'}; reproduced bitwise (1" in shown
    assert "step 4: reproduced bitwise (1 digest(s))" in shown


@pytest.mark.slow
def test_run_with_init_from_is_replayed_and_audited(run, in_process, tmp_path, capsys):
    begin = ["--init_from", run, "--model.dropout", 0.2, "--checkpoint.keep_every", 2]
    train(*RECIPE, "--steps", 4, *begin, "--out_dir", tmp_path, "--name", "tuned")
    shown = python(f"python -m tools.replay {tmp_path / 'tuned'} 1 --num_sequences 6", CXX="/nonexistent").stdout
    assert "step 1: reproduced bitwise (2 digest(s))" in shown
    row = next(row for row in map(json.loads, (tmp_path / "tuned" / "metrics.jsonl").open()) if row["step"] == 1)
    assert float(re.search(r"fp32 +([\d.]+)", shown)[1]) == pytest.approx(row["train/loss"], abs=1e-6)
    audit(RecordedRun(tmp_path / "tuned"), 99, tmp_path)
    assert capsys.readouterr().out.count("bitwise identical\n") == 2


def test_replay_changes_no_file_of_the_run(run):
    before = {path: (path.stat().st_mtime_ns, sha256(path)) for path in run.rglob("*") if path.is_file()}
    python(f"python -m tools.replay {run} --audit 1")
    assert before == {path: (path.stat().st_mtime_ns, sha256(path)) for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{run} 7", "step: 7 is beyond the 6 steps of"),
        ("{run}", "step: name a step of the run to replay, or --audit N"),
        ("{run}/../branch 2", "step: 2 is in the run that"),
        ("{run} 2 --audit 3", "step: name a step of the run to replay, or --audit N"),
        ("{run}/checkpoints 2", "is not the directory of a run: it has no config.yaml"),
        ("{run} 4 --save_to {run}", "exists; name a new folder"),
        (
            "{run} 4 --save_to {run}/../file/step",
            "save_to: '{run}/../file/step': cannot write in {run}/../file: ",
        ),
        (
            "{run} 4 --profile {run}/../file",
            "profile: '{run}/../file': cannot write in {run}/../file: File exists",
        ),
        ("{run} 7 --num_sequences 9", "step: 7 is beyond the 6 steps of"),
        ("--num_sequences 8 {run} 7", "step: 7 is beyond the 6 steps of"),
        ("{run} 2 --audit 3 --profile x", "step: name a step of the run to replay, or --audit N"),
        ("--audit 3 nowhere", "run: 'nowhere' is not the directory of a run"),
        (
            "~no-such-user/run 3",
            "run: '~no-such-user/run' names a user that this machine does not have",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, run, branch, monkeypatch, capsys):
    (run.parent / "file").touch()
    before = sorted(run.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["tools.replay", *arguments.format(run=run).split()])
    assert scripts.run_script("tools.replay", ReplayConfig, module="tools.replay.replay") == 2
    assert message.format(run=run) in capsys.readouterr().err
    assert before == sorted(run.rglob("*"))


def test_run_with_empty_config_is_refused(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"config.yaml is damaged \(it is empty\)$"):
        RecordedRun(tmp_path)


# A run


@pytest.fixture(scope="module")
def retrained(tmp_path_factory):
    """Directories of retrained runs, by what determines their bits."""
    return defaultdict(lambda: tmp_path_factory.mktemp("retrained") / "run")


@pytest.fixture
def retrain_once(retrained, in_process, monkeypatch):
    """Copy a retrained run, instead of training it again, where settings, start and arithmetic are the same."""
    train_run = train_script.main

    def train_or_copy(config):
        place, start = Path(config.out_dir, config.name), config.branch_from and Path(config.branch_from)
        files = [sha256(file) for file in sorted(start.iterdir())] if start else []
        same = replace(config, out_dir="", name="", branch_from=None)
        arithmetic = os.environ["ACCELERATE_MIXED_PRECISION"], torch.get_num_threads()
        kept = retrained[repr((same, files, arithmetic))]
        if kept.exists():
            shutil.copytree(kept, place)
            return
        with suppress(Preempted):
            train_run(config)
        shutil.copytree(place, kept)

    monkeypatch.setattr(train_script, "main", train_or_copy)


def rewrite_rows(run, change):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if change(row) is not False]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def forge(run, step, tensors=None, into=None, **facts):
    """Change a checkpoint and its row, with every digest and checksum that can be recomputed."""
    checkpoint = run / "checkpoints" / f"step-{into or step:08d}"
    manifest = read_manifest(checkpoint)
    if tensors is not None:
        [name] = manifest.files
        save_file(tensors, checkpoint / name)
        metrics = {**manifest.metrics, "state/digest": str(digest_tensors(tensors))}
        facts = {"files": {name: File((checkpoint / name).stat().st_size, sha256(checkpoint / name))}, **facts}
        facts = {"metrics": metrics, **facts}
    replace(manifest, **facts).write(checkpoint)
    written = read_manifest(checkpoint)
    rewrite_rows(run, lambda row: row.update(written.metrics) if row["step"] == written.step else None)


def content(run, step):
    [file] = (run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return load_file(file)


def change_settings(run, **settings):
    """Change settings in config.yaml, in all manifests and in sessions.jsonl."""
    files = [read_manifest(path).config for path in (run / "checkpoints").iterdir()]
    starts = [json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines()]
    whole = yaml.safe_load((run / "config.yaml").read_text())
    for config in (*files, whole, *(start["config"] for start in starts)):
        for name, value in settings.items():
            section, _, key = name.rpartition("__")
            (config[section] if section else config)[key] = value
    (run / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    (run / "sessions.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    for path, config in zip((run / "checkpoints").iterdir(), files, strict=True):
        replace(read_manifest(path), config=config).write(path)


def a_weight(run):
    tensors = content(run, 4)
    tensors["model.blocks.1.mlp.down_proj.weight"][3, 5] += 1e-7
    forge(run, 4, tensors)


def a_moment(run):
    tensors = content(run, 6)
    tensors["optimizer.state.final_norm.weight.exp_avg_sq"][0] *= 2
    forge(run, 6, tensors)


def a_file_alone(run):
    [file] = (run / "checkpoints" / "step-00000004").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def a_manifest_alone(run):
    manifest = run / "checkpoints" / "step-00000006" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 6', '"step": 7'))


def a_training_loss(run):
    rewrite_rows(run, lambda row: row.update({"train/loss": row["train/loss"] - 0.01}) if row["step"] == 5 else None)


def a_validation_loss(run):
    metrics = {**read_manifest(run / "checkpoints" / "step-00000006").metrics, "val/loss": 1.0}
    forge(run, 6, metrics=metrics)


def a_digest(run):
    rewrite_rows(run, lambda row: row.update({"state/digest": "0" * 16}) if row["step"] == 3 else None)


def a_row_that_is_gone(run):
    rewrite_rows(run, lambda row: row["step"] != 3)


def a_number_that_is_gone(run, name="train/loss"):
    rewrite_rows(run, lambda row: row.pop(name) and None if row["step"] == 3 else None)


def a_count_of_tokens_that_is_gone(run):
    a_number_that_is_gone(run, "train/tokens")


def a_perplexity_that_is_gone(run):
    a_number_that_is_gone(run, "val/perplexity")


def a_loss_that_is_gone_from_the_manifest_alone(run):
    rows = (run / "metrics.jsonl").read_text()
    metrics = read_manifest(run / "checkpoints" / "step-00000006").metrics
    forge(run, 6, metrics={name: value for name, value in metrics.items() if name != "val/loss"})
    (run / "metrics.jsonl").write_text(rows)


def a_number_that_is_null(run):
    rewrite_rows(run, lambda row: row.update({"train/accuracy": None}) if row["step"] == 3 else None)


def rewrite_texts(run, change):
    path = run / "generations.jsonl"
    rows = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_text(run):
    rewrite_texts(run, lambda rows: [{**rows[0], "generation/stories": "Mia likes cats."}, *rows[1:]])


def a_text_that_is_gone(run):
    rewrite_texts(run, lambda rows: rows[1:])


def a_text_of_another_step(run):
    rewrite_texts(run, lambda rows: [*rows[:2], {**rows[0], "step": 4}, *rows[2:]])


def all_texts(run):
    (run / "generations.jsonl").unlink()


def a_gradient_norm_that_is_gone(run):
    a_number_that_is_gone(run, "train/grad_norm")


def a_digest_that_is_gone(run):
    a_number_that_is_gone(run, "state/digest")


def a_setting(run):
    change_settings(run, optimizer__weight_decay=0.2)


def a_setting_in_one_place(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["optimizer"]["betas"] = [0.8, 0.95]
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def how_it_is_evaluated(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["evaluation"]["num_samples"] += 1
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def another_seed(run):
    change_settings(run, seed=7)


def other_data(run):
    change_settings(run, data__num_samples=30)


def a_swapped_checkpoint(run):
    forge(run, 2, content(run, 2), into=4)


def a_checkpoint_that_claims_another_step(run):
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    shutil.copytree(run / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000004")
    replace(read_manifest_of(run, 4), step=4).write(run / "checkpoints" / "step-00000004")


def read_manifest_of(run, step):
    path = run / "checkpoints" / f"step-{step:08d}"
    copy = path.with_name("copy")
    path.rename(copy)
    manifest = read_manifest(copy)
    copy.rename(path)
    return manifest


def a_number_that_was_never_measured(run):
    rewrite_rows(run, lambda row: row.update({"val/loss": 0.1}) if row["step"] == 5 else None)


def a_step_that_was_never_done(run):
    with open(run / "metrics.jsonl", "a") as rows:
        rows.write('{"step": 7, "val/loss": 0.1}\n')


def a_step_before_the_first(run):
    path = run / "metrics.jsonl"
    path.write_text('{"step": 0, "val/loss": 0.1}\n' + path.read_text())


def a_step_that_is_logged_twice(run):
    path = run / "metrics.jsonl"
    path.write_text("".join(line.replace(': 3,', ': 3, "val/loss": 0.1,', 1) + line if '"step": 3,' in line else line
                            for line in path.read_text().splitlines(keepends=True)))  # fmt: skip


def a_weight_without_a_digest(run):
    tensors = content(run, 6)
    tensors["model.blocks.1.mlp.down_proj.weight"][3, 5] += 1e-7
    forge(run, 6, tensors, metrics={})
    rewrite_rows(run, lambda row: row.pop("state/digest") and None if row["step"] == 6 else None)


def the_whole_log(run):
    (run / "metrics.jsonl").unlink()


TAMPERINGS = [
    *(a_weight, a_moment, a_file_alone, a_manifest_alone, a_training_loss, a_validation_loss, a_digest),
    *(a_gradient_norm_that_is_gone, a_digest_that_is_gone),
    *(a_row_that_is_gone, a_number_that_is_gone, a_setting, a_setting_in_one_place, how_it_is_evaluated),
    *(another_seed, other_data, a_swapped_checkpoint, a_checkpoint_that_claims_another_step),
    *(
        a_number_that_was_never_measured,
        a_step_that_was_never_done,
        a_step_before_the_first,
        a_step_that_is_logged_twice,
    ),
    *(a_weight_without_a_digest, the_whole_log),
    *(a_count_of_tokens_that_is_gone, a_perplexity_that_is_gone),
    *(a_loss_that_is_gone_from_the_manifest_alone, a_number_that_is_null),
    *(a_text, a_text_that_is_gone, a_text_of_another_step, all_texts),
]


@pytest.mark.parametrize("tamper", thinned(TAMPERINGS, 4), ids=lambda tamper: tamper.__name__)
def test_audit_finds_tampering(tamper, run, retrain_once, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    tamper(copy)
    with pytest.raises((RunError, ConfigError)):
        audit(RecordedRun(copy), 99, tmp_path)
    assert "FAIL" in capsys.readouterr().out


def test_audit_continues_after_damaged_checkpoint(run, retrain_once, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "checkpoints" / "step-00000002" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"2 failure\(s\)"):
        audit(RecordedRun(copy), 99, tmp_path)
    shown = capsys.readouterr().out
    assert "FAIL  steps 3 to 4  the checkpoint before it is damaged: " in shown and "PASS  steps 5 to 6" in shown


@pytest.mark.slow
def test_audit_covers_final_evaluation_before_an_extension(in_process, tmp_path, capsys):
    words = [*RECIPE, *"--schedule.name constant --evaluation.every 9 --checkpoint.keep 9".split()]
    words += ["--out_dir", tmp_path, "--name", "run"]
    train(*words, "--steps", 3)
    train(*words, "--steps", 5)
    audit(RecordedRun(tmp_path / "run"), 99, tmp_path / "honest")
    forge(tmp_path / "run", 3, metrics={**read_manifest_of(tmp_path / "run", 3).metrics, "val/loss": 1.0})
    with pytest.raises(RunError):
        audit(RecordedRun(tmp_path / "run"), 99, tmp_path / "forged")
    assert "FAIL  steps 3 to 3  step 3: val/loss is 1.0 in the run" in capsys.readouterr().out


def test_audit_skips_checkpoint_removed_meanwhile(run, tmp_path, capsys):
    """train.py, still running, saves step 6 and deletes step 2 after the audit has listed the checkpoints."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    newest = copy / "checkpoints" / "step-00000006"
    newest.rename(tmp_path / newest.name)
    opened = RecordedRun(copy)
    (tmp_path / newest.name).rename(newest)
    shutil.rmtree(removed := copy / "checkpoints" / "step-00000002")
    with pytest.raises(RunError, match="no interval could be retrained; if the run is still training"):
        audit(opened, 99, tmp_path)
    shown = capsys.readouterr().out
    assert "FAIL" not in shown and shown.count(f"  {removed} was removed while the run was audited\n") == 2


def test_audit_reports_steps_after_last_checkpoint(run, retrain_once, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for step in (4, 6):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    audit(RecordedRun(copy), 99, tmp_path)
    verdicts = re.findall("PASS|FAIL|SKIP  steps.*", capsys.readouterr().out)
    assert verdicts == ["PASS", "SKIP  steps 3 to 6  not checked: no checkpoint follows them"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5], ids=["evaluated", "compared"])
def test_audit_misses_digest_without_a_logged_loss(step, in_process, tmp_path, capsys):
    words = "--tracking.log_every 6 --evaluation.every 3 --check_replicas_every 5 --checkpoint.every 6".split()
    train(*RECIPE, *words, "--out_dir", tmp_path, "--name", "run")
    audit(RecordedRun(tmp_path / "run"), 99, tmp_path / "honest")
    rewrite_rows(tmp_path / "run", lambda row: row["step"] != step or (row.pop("state/digest") and len(row) > 1))
    with pytest.raises(RunError):
        audit(RecordedRun(tmp_path / "run"), 99, tmp_path / "forged")
    assert f"FAIL  steps 1 to 6  metrics.jsonl has no state/digest at step {step}" in capsys.readouterr().out


def remove_metric_everywhere(run, name="generation/valid"):
    metrics = read_manifest(run / "checkpoints" / "step-00000006").metrics
    rewrite_rows(run, lambda row: row.pop(name, None) and None)
    forge(run, 6, metrics={other: value for other, value in metrics.items() if other != name})


def test_audit_misses_metric_removed_everywhere(run, retrain_once, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    remove_metric_everywhere(copy)
    with pytest.raises(RunError):
        audit(RecordedRun(copy), 99, tmp_path)
    assert "FAIL  steps 5 to 6  metrics.jsonl has no generation/valid at step 6" in capsys.readouterr().out


def test_audit_skips_metric_that_other_code_lacks(run, retrain_once, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    remove_metric_everywhere(copy)
    change_session(copy, code="0" * 12)
    for path in (copy / "checkpoints").iterdir():
        manifest = read_manifest(path)
        replace(manifest, provenance=manifest.provenance | {"code": "0" * 12}).write(path)
    audit(RecordedRun(copy), 99, tmp_path)
    shown = capsys.readouterr().out
    assert "SKIP  generation/valid  not checked: other code trained the run" in shown
    assert "SKIP  parameters and flops_per_token in sessions.jsonl  not checked: other code" in shown


def test_audit_names_what_it_cannot_check(run, retrain_once, tmp_path, capsys):
    audit(RecordedRun(run), 1, tmp_path)
    skipped = re.findall("SKIP  (.*)", capsys.readouterr().out)
    assert [line.partition("  not checked: ")[0] for line in skipped] == [
        "perf/*, versions and git_commit in sessions.jsonl"
    ]


def change_session(run, **facts):
    """Change facts in every row of sessions.jsonl."""
    path = run / "sessions.jsonl"
    rows = [json.loads(line) | facts for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_processes(run, processes):
    """Claim another number of processes, in sessions.jsonl and in every manifest."""
    change_session(run, processes=processes)
    for path in (run / "checkpoints").iterdir():
        replace(read_manifest(path), processes=processes).write(path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"parameters": 1}, "FAIL  sessions.jsonl: the session from step 0 has parameters 1, and config.yaml gives"),
        ({"flops_per_token": 1}, "the session from step 0 has flops_per_token 1, and config.yaml gives"),
        ({"processes": 2}, "FAIL  sessions.jsonl: processes is 2, and 1 in "),
        ({"mixed_precision": "bf16"}, "FAIL  sessions.jsonl: mixed_precision is bf16, and no in "),
        ({"torch": "1.0"}, "FAIL  sessions.jsonl: torch is 1.0, and "),
        ({"step": 1}, "FAIL  sessions.jsonl: the first session starts after step 1, and the run after step 0"),
        ({"uncommitted_changes": "code-12345678.diff"}, "names code-12345678.diff, which is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_record_problems_finds_changed_session(facts, message, run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    change_session(copy, **facts)
    assert message.removeprefix("FAIL  ") in "\n".join(record_problems(RecordedRun(copy)))


def test_record_problems_finds_deleted_sessions(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "sessions.jsonl").unlink()
    assert list(record_problems(RecordedRun(copy))) == ["sessions.jsonl: it is missing or empty, and every run has one"]


def test_record_problems_of_untouched_run_are_none(run):
    assert list(record_problems(RecordedRun(run))) == []


def test_audit_names_claimed_processes_as_unchecked(run, retrain_once, tmp_path, capsys):
    """A run that claims two processes is compared up to rounding only, and the audit reports it."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    change_processes(copy, 2)
    audit(RecordedRun(copy), 99, tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("equal up to rounding (2 processes in the run, 1 here)") == 3
    assert "SKIP  digests, texts and differences below 0.1% in 3 interval(s)  not checked: 2 processes in" in shown


def test_exact_run_is_audited_exactly_whatever_it_claims(tmp_path):
    train(*RECIPE, *"--exact true --steps 2 --checkpoint.keep 9 --name run --out_dir".split(), tmp_path)
    change_processes(tmp_path / "run", 2)
    rewrite_rows(tmp_path / "run", lambda row: row.update({"train/loss": row["train/loss"] * (1 + 1e-6)}))
    forge(tmp_path / "run", 2, metrics={**read_manifest_of(tmp_path / "run", 2).metrics, **last_row(tmp_path / "run")})
    done = forked.run("tools.replay", [str(tmp_path / "run"), "--audit", "99"], 0, environment())
    assert done.returncode == 1
    assert "FAIL  steps 1 to 2  step 1: train/loss is" in done.stdout


def last_row(run):
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    del row["step"]
    return row


def logged(row):
    """A run with this row as step 3."""
    return SimpleNamespace(rows={3: row}, missing_metrics=lambda step, names: [])


@pytest.mark.parametrize("value", [None, "low", 5.0])
def test_rounding_tolerance_applies_to_numbers_only(value):
    again = Retrained(Path(), {3: {"train/loss": 5.1, "state/digest": "b", "generation/valid": 0.5}}, {}, None)
    row = {"state/digest": "a", "generation/valid": 0.4, "train/loss": 5.1001}
    assert not again.difference(logged(row), "2 processes in the run, 1 here")
    row["train/loss"] = value
    assert "train/loss" in again.difference(logged(row), "2 processes in the run, 1 here")


def test_audit_passes_untouched_run(run, in_process, tmp_path, capsys):
    audit(RecordedRun(run), 99, tmp_path)
    assert re.findall(r"PASS  (.*)", capsys.readouterr().out) == [
        f"steps {step - 1} to {step}  bitwise identical" for step in (2, 4, 6)
    ]


@pytest.mark.slow
def test_audit_passes_resume_with_permitted_changes(in_process, tmp_path, capsys):
    """The first session logged fewer steps and evaluated other sequences."""
    words = [*RECIPE, "--checkpoint.every", 9, "--checkpoint.keep", 1, "--out_dir", tmp_path, "--name", "run"]
    train(*words, *"--tracking.log_every 2 --stop_after 4".split(), exit_code=75)
    train(*words, "--evaluation.num_samples", 5)
    audit(RecordedRun(tmp_path / "run"), 99, tmp_path)
    assert re.findall(r"PASS  (.*)", capsys.readouterr().out) == ["steps 1 to 6  bitwise identical"]


@pytest.mark.slow
def test_audit_of_branch_skips_missing_initial_checkpoint(branch, in_process, tmp_path, capsys):
    audit(RecordedRun(branch), 99, tmp_path)
    assert re.findall(r"PASS  (.*)", capsys.readouterr().out) == [
        f"steps {step - 1} to {step}  bitwise identical" for step in (4, 6)
    ]
    copy = Path(shutil.copytree(branch, tmp_path / "branch"))
    change_settings(copy, branch_from=str(tmp_path / "gone"))
    audit(RecordedRun(copy), 99, tmp_path / "again")
    shown = capsys.readouterr().out
    assert re.search("SKIP  steps 3 to 4  its initial checkpoint no longer exists: .*gone", shown)
    assert "PASS  steps 5 to 6  bitwise identical" in shown
    with pytest.raises(ConfigError, match="branch_from: .*gone' is not the directory of a checkpoint"):
        RecordedRun(copy).retrain(None, 4, tmp_path / "once more")


@pytest.mark.slow
def test_exact_run_of_two_processes_audits_on_one(tmp_path):
    train(*RECIPE, "--exact", "true", "--out_dir", tmp_path, "--name", "run", processes=2)
    assert python(f"python -m tools.replay {tmp_path / 'run'} --audit 3").stdout.count("bitwise identical\n") == 3


def test_audit_uses_the_threads_of_the_run(run, in_process, tmp_path, capsys):
    torch.set_num_threads(2)
    audit(RecordedRun(run), 1, tmp_path)
    assert capsys.readouterr().out.count("bitwise identical\n") == 1


@pytest.mark.slow
def test_inexact_run_of_two_replays_up_to_rounding(tmp_path):
    train(*RECIPE, "--out_dir", tmp_path, "--name", "run", processes=2)
    shown = python(f"python -m tools.replay {tmp_path / 'run'} 4 --arithmetic false").stdout
    assert "reproduced up to rounding (2 processes in the run, 1 here)" in shown


def test_why_inexact_names_device_and_missing_exact(run, monkeypatch):
    monkeypatch.setattr("tools.replay.recorded_run.uses_cpu", lambda environment: False)
    opened = RecordedRun(run)
    assert opened.why_inexact(3, 4) == "a CPU in the run, a GPU here"
    opened.sessions[0] = replace(opened.sessions[0], threads=None)
    assert "have no fixed order without exact: true" in opened.why_inexact(3, 4)
    opened.config = replace(opened.config, exact=True)
    assert opened.why_inexact(3, 4) == ""
    monkeypatch.setattr("tools.replay.recorded_run.uses_cpu", lambda environment: True)
    assert opened.why_inexact(3, 4) == "a GPU in the run, a CPU here"


def test_why_inexact_names_number_of_shards(run, monkeypatch):
    opened = RecordedRun(run)
    opened.sessions[0] = replace(opened.sessions[0], shards=2)
    assert opened.why_inexact(3, 4) == "2 shards in the run, 1 here"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "2 shards in the run" in opened.why_inexact(3, 4), "one process has no shards"
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert opened.why_inexact(3, 4) == ""


def test_two_processes_replay_and_audit_bitwise(tmp_path):
    """All digests are compared, and the shared temporary folder is left empty."""
    train(*RECIPE, "--out_dir", tmp_path, "--name", "run", processes=2)
    (temporary := tmp_path / "temporary").mkdir()
    replay = f"accelerate launch --config_file accelerate_configs/cpu.yaml -m tools.replay {tmp_path / 'run'}"
    shown = python(f"{replay} 4 --num_sequences 1 --arithmetic false", TMPDIR=str(temporary)).stdout
    assert "retrained from" in shown and shown.count("reproduced bitwise (1 digest(s))") == 2
    assert shown.count("sequences of step 4") == 1
    assert python(f"{replay} --audit 2", TMPDIR=str(temporary)).stdout.count("bitwise identical\n") == 2
    assert not list(temporary.iterdir())


def run_replay(monkeypatch, capsys, *words):
    """Return the exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["tools.replay", *map(str, words)])
    return scripts.run_script("tools.replay", ReplayConfig, module="tools.replay.replay"), capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "sessions.jsonl", "generations.jsonl"])
def test_audit_names_unreadable_log(name, run, in_process, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / name).unlink()
    (copy / name).mkdir()  # which root cannot read either
    exit_code, errors = run_replay(monkeypatch, capsys, copy, "--audit", 1)
    assert (
        exit_code == 2 and f"run: {copy / name} cannot be read: Is a directory" in errors and "Traceback" not in errors
    )


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"threads": "two"}, "run: {run}/sessions.jsonl is damaged: session.threads is 'two'"),
        ({"processes": [2]}, "run: {run}/sessions.jsonl is damaged: session.processes is"),
        ({"mixed_precision": 16}, "run: {run}/sessions.jsonl is damaged: session.mixed_precision is"),
        ({"config": []}, "run: {run}/sessions.jsonl is damaged: session.config is"),
    ],
)
def test_audit_names_damaged_session(facts, message, run, in_process, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    start = json.loads((copy / "sessions.jsonl").read_text())
    (copy / "sessions.jsonl").write_text(json.dumps(start | facts) + "\n")
    exit_code, errors = run_replay(monkeypatch, capsys, copy, "--audit", 1)
    assert exit_code == 2 and message.format(run=copy) in errors and "Traceback" not in errors


def test_huge_integer_is_not_a_rounding_difference():
    again = Retrained(Path(), {3: {"train/loss": 5.1}}, {}, None)
    assert again.difference(logged({"train/loss": 10**350}), "2 processes in the run, 1 here")
