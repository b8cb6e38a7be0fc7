"""Starting in an existing run directory: what is checked, refused, recorded and written."""

import fcntl
import math
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from data.corpus import load_corpus
from data.sampler import BatchSizes
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import complete_settings, read_settings
from runtime.files import sha256
from runtime.machine.cpu import processor_name
from tests.conftest import ROOT, TINY_STORIES, environment, metrics, train, train_state
from tests.support import forked
from trainer.checkpoint.manifest import File, InvalidCheckpoint, read_manifest, validate
from trainer.checkpoint.saver import SaveError, Saver
from trainer.run import directory, resume
from trainer.run.directory import Run, Status
from trainer.run.metrics_log import RowWriter, read_rows, truncate_after_step
from trainer.run.start import check_run, lock_and_choose, record_outcome
from trainer.schedule import SCHEDULES

STEPS = 4
RECIPE = ["--config", ROOT / "tests" / "support" / "tiny_random.yaml", "--name", "run"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Directory of a finished run of 4 steps, to be copied."""
    train(*RECIPE, "--out_dir", runs := tmp_path_factory.mktemp("finished"))
    return runs / "run"


@pytest.fixture
def run(finished, runs):
    """Copy of the directory of a finished run."""
    return shutil.copytree(finished, runs / "run")


# Settings of a stored run


def stored(**changes):
    config = parse_config([*map(str, RECIPE)])
    settings = config.model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        settings[section].pop(name, None)
        if value is not ...:
            settings[section][name] = value
    return settings, config


def differences(settings, config):
    """The lines with which a resume would refuse this config."""
    return [*resume.differing_settings(complete_settings(settings), config).values()]


def checkpoint_of(settings, step):
    """The facts of a manifest that a resume compares."""
    return SimpleNamespace(config=settings, step=step)


def test_missing_stored_setting_is_current_default():
    settings, config = stored(optimizer__betas=..., model__zero_init=...)
    assert differences(settings, config) == []
    config = config.replace(**{"model.zero_init": True})
    assert differences(settings, config) == ["model.zero_init: False in the run, True now"]


@pytest.mark.parametrize(
    ("name", "value"), [("global_batch_size", 0), ("steps", "x"), ("schedule.batch_warmup_from", "two")]
)
def test_invalid_stored_number_is_named(name, value, tmp_path):
    settings = {"global_batch_size": 4, "data": {"seed": 0}, "schedule": {}}
    section, _, key = name.rpartition(".")
    (settings[section] if section else settings)[key] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=rf"is damaged \({name}: {value} must be "):
        read_settings(tmp_path / "config.yaml")


def test_stored_choice_of_other_code_is_read(tmp_path):
    settings = {"global_batch_size": 4, "data": {"seed": 0}, "optimizer": {"name": "sgd_of_a_fork"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert read_settings(tmp_path / "config.yaml")["optimizer.name"] == "sgd_of_a_fork"


@pytest.mark.parametrize("name", ["batch_warmup_from", "batch_warmup_steps"])
def test_resume_refuses_changed_batch_warmup(name):
    settings, config = stored(schedule__batch_warmup_from=2, schedule__batch_warmup_steps=4)
    config = config.replace(**{"schedule.batch_warmup_from": 2, "schedule.batch_warmup_steps": 4})
    assert differences(settings, config) == []
    config = config.replace(**{f"schedule.{name}": 3})
    assert differences(settings, config) == [f"schedule.{name}: {settings['schedule'][name]} in the run, 3 now"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("seed", 7), ("seq_len", 64), ("micro_batch_size", 6), ("exact", True), ("optimizer.name", "muon")),
        *(("optimizer.lr", 0.5), ("optimizer.weight_decay", 0.5), ("optimizer.betas", (0.5, 0.6))),
        *(("optimizer.grad_clip", 7.0), ("model.dropout", 0.3), ("data.num_samples", 7), ("data.facts", 7)),
        ("evaluation.ema_decay", 0.7),
    ],
)
def test_resume_refuses_changed_setting_of_training(setting, value):
    settings, config = stored()
    lines = resume.differing_settings(complete_settings(settings), config.replace(**{setting: value}))
    assert [*lines] == [setting]


@pytest.mark.parametrize("changed", [0, 3])
def test_resume_refuses_changed_scheduled_values(changed, tmp_path, monkeypatch):
    """A fork may schedule a value by the length of the run; here it changes in the first or the last completed step."""
    monkeypatch.setitem(
        SCHEDULES, "weight_decay", lambda value, config, step: value * config.steps ** (step == changed)
    )
    settings, config = stored(optimizer__weight_decay=0.5)
    changes = {"schedule.name": "constant", "schedule.warmup_steps": 0, "steps": 8, "optimizer.weight_decay": 0.5}
    config = config.replace(**changes)
    settings |= {"schedule": config.schedule.model_dump(), "steps": 4}
    with pytest.raises(
        ConfigError, match=f"4 in the run, 8 now: in step {changed}, weight_decay was 2.0 and would be 4.0"
    ):
        resume.check_resume(Run(tmp_path), config, checkpoint_of(settings, 4))


def half_of_the_run(monkeypatch):
    """Train on sequences of half the length in the first half of the steps."""
    count = BatchSizes.tokens_before

    def count_cut(self, step, seq_len):
        return count(self, step, seq_len) - seq_len // 2 * self.sequences_before(min(step, self.steps // 2))

    monkeypatch.setattr(BatchSizes, "tokens_before", count_cut)


def size_at_the_end(monkeypatch):
    """Train on a larger batch in the last step of the run, whose tokens a fork forgets to count."""
    size = BatchSizes.size
    monkeypatch.setattr(BatchSizes, "size", lambda self, step: size(self, step) * (1 + (step == self.steps - 1)))


def named_schedule(monkeypatch):
    """Name a dependence that no batch shows."""
    monkeypatch.setitem(SCHEDULES, "seq_len", lambda value, config, step: value * (1 + step) // config.steps)


@pytest.mark.parametrize("curriculum", [half_of_the_run, size_at_the_end, named_schedule])
def test_resume_refuses_other_batches_of_completed_steps(curriculum, tmp_path, monkeypatch):
    curriculum(monkeypatch)
    settings, config = stored()
    config = config.replace(**{"schedule.name": "constant", "schedule.warmup_steps": 0, "steps": 8})
    settings |= {"schedule": config.schedule.model_dump(), "steps": 4}
    with pytest.raises(ConfigError, match=r"steps: 4 in the run, 8 now: (until|in) step \d, "):
        resume.check_resume(Run(tmp_path), config, checkpoint_of(settings, 4))
    monkeypatch.undo()
    resume.check_resume(Run(tmp_path), config, checkpoint_of(settings, 4))


def test_refused_resume_on_other_processes_names_micro_batch_size(tmp_path):
    settings, config = stored()
    with pytest.raises(ConfigError, match=f"to resume, give --micro_batch_size {config.micro_batch_size}; "):
        resume.check_resume(Run(tmp_path), config.replace(micro_batch_size=1), checkpoint_of(settings, 4))


def test_data_path_may_change_with_equal_hash():
    settings, config = stored(data__path="a.csv")
    config = config.replace(**{"data.path": "b.csv"})
    assert differences(settings, config) == ["data.path: a.csv in the run, b.csv now"]
    settings["data"]["hash"] = "0123"
    config = config.replace(**{"data.hash": "0123"})
    assert differences(settings, config) == []


def test_mixture_paths_may_change_but_not_weights():
    settings, config = stored(data__mix={"a": 2.0, "b": 1.0}, data__hash="01+23")
    config = config.replace(**{"data.mix": {"c": 2.0, "d": 1.0}, "data.hash": "01+23"})
    assert differences(settings, config) == []
    for mix, digest in ({"c": 1.0, "d": 2.0}, "01+23"), ({"c": 2.0, "d": 1.0}, None):
        settings["data"]["hash"] = digest
        config = config.replace(**{"data.mix": mix, "data.hash": digest})
        assert differences(settings, config) == [f"data.mix: {settings['data']['mix']} in the run, {mix} now"]


def test_removed_stored_setting_is_named():
    settings, config = stored(optimizer__nesterov=True, schedule__cycles=3, tracking__colour="red")
    assert differences(settings, config) == [
        "optimizer.nesterov: True in the run, but this code has no such setting",
        "schedule.cycles: 3 in the run, but this code has no such setting",
    ]


@pytest.mark.slow
def test_data_seed_comes_from_run_or_parent(run):
    arguments = [*RECIPE, "--seed", 5, "--out_dir", run.parent]
    train(*arguments, "--data.seed", 3, "--name", "other")
    checkpoint = run.with_name("other") / "checkpoints" / "step-00000005"
    done = train(*arguments, "--steps", 5, "--name", "other", "--data.seed", 0, exit_code=2)
    assert "data.seed: 3 in the run, 0 now" in done.stderr
    train(*arguments, "--steps", 5, "--name", "other")
    train(*arguments, "--steps", 6, "--name", "branch", "--branch_from", checkpoint)
    train(*arguments, "--steps", 1, "--name", "new")
    for name, expected in (("other", 3), ("branch", 3), ("new", 0)):
        config = yaml.safe_load((run.with_name(name) / "config.yaml").read_text())
        assert config["data"]["seed"] == expected, name


@pytest.mark.parametrize("source", ["random", "stories"])
def test_data_is_independent_of_training_seed(source):
    def corpus(*arguments):
        small = "--seq_len 96 --model.vocab_size 300 --data.num_samples 2 --evaluation.num_samples 2".split()
        return load_corpus(parse_config([*small, "--data.source", source, *arguments]))

    def rows(dataset):
        return [row["input_ids"].tolist() for row in (dataset[0], dataset[1])]

    one, other, third = corpus("--seed", "1"), corpus("--seed", "2"), corpus("--data.seed", "1")
    for split in ("train", "validation"):
        one_rows, other_rows, third_rows = (rows(getattr(corpus, split)) for corpus in (one, other, third))
        assert one_rows == other_rows != third_rows


# Refused starts


def test_branch_refuses_another_optimizer(run):
    start = run / "checkpoints" / "step-00000004"
    arguments = [*RECIPE, "--out_dir", run.parent, "--name", "new", "--steps", 6, "--branch_from", start]
    done = train(*arguments, "--optimizer.name", "muon", exit_code=2)
    assert "optimizer.name: adamw in the run, muon now" in done.stderr and "Traceback" not in done.stderr
    done = train(*RECIPE, "--out_dir", run.parent, "--steps", 6, "--optimizer.name", "muon", exit_code=2)
    assert "optimizer.name: adamw in the run, muon now" in done.stderr and "--branch_from" not in done.stderr


def test_branch_resumes_and_refuses_another_parent(run):
    begin = run / "checkpoints" / "step-00000004"
    branch = [*RECIPE, "--out_dir", run.parent, "--name", "new", "--steps", 5]
    train(*branch, "--branch_from", begin)
    assert "is complete: all 5 steps are done" in train(*branch).stdout
    for name, other in (("new", run.parent / "new" / "checkpoints" / "step-00000005"), ("run", begin)):
        done = train(*branch, "--name", name, "--branch_from", other, exit_code=2)
        assert f"branch_from: {begin if name == 'new' else None} in the run, {other} now" in done.stderr
        assert "--name NEW" not in done.stderr, "a branch would be refused, too"


def test_resume_refuses_changed_learning_rates(run):
    arguments = [*RECIPE, "--out_dir", run.parent, "--steps"]
    checkpoint = run / "checkpoints" / "step-00000004"
    done = train(*arguments, 6, "--schedule.name", "linear", exit_code=2)
    assert "schedule.name: constant in the run, linear now" in done.stderr
    assert f"branch: --name NEW --branch_from {checkpoint}; or choose another name" in done.stderr
    train(*arguments, 6, "--schedule.name", "linear", "--name", "new", "--branch_from", checkpoint)
    done = train(*arguments, 8, "--schedule.name", "linear", "--name", "new", exit_code=2)
    assert "steps: 6 in the run, 8 now: in step 4, the learning rate was" in done.stderr, done.stderr
    assert f"--branch_from {run.with_name('new')}" in done.stderr and "constant" not in done.stderr
    done = train(*arguments, 3, exit_code=2)
    assert "steps: 3 is less than the 4 completed steps\nchoose another name" in done.stderr


def test_unchanged_resume_compares_no_learning_rates(tmp_path, monkeypatch):
    """Comparing them would take time proportional to the completed steps."""
    config = parse_config([*map(str, RECIPE), "--steps", str(2**40)])
    monkeypatch.delattr(resume, "scheduled_value")
    resume.check_resume(Run(tmp_path), config, checkpoint_of(config.model_dump(mode="json"), 2**39))


@pytest.mark.parametrize("length", [("--epochs", 3), ("--tokens", 300)])
def test_branch_of_other_batches_refuses_length_in_other_unit(run, length):
    """The steps of the parent are another part of the epochs than as many steps of the branch."""
    begin = run / "checkpoints" / "step-00000004"
    words = [*RECIPE, "--out_dir", run.parent, "--name", "new", "--branch_from", begin, *length]
    done = train(*words, "--global_batch_size", 8, exit_code=2)
    problem = f"{length[0][2:]}: {length[1]} includes those of {begin}, which has another global_batch_size; give steps"
    assert problem in done.stderr and not run.with_name("new").exists()
    train(*words)


def test_branch_refuses_zero_remaining_steps(run):
    begin = run / "checkpoints" / "step-00000004"
    done = train(*RECIPE, "--out_dir", run.parent, "--name", "new", "--branch_from", begin, "--steps", 4, exit_code=2)
    assert f"steps: 4 leaves no step to train after the 4 steps of {begin}" in done.stderr


def test_resume_never_without_run_moves_nothing(runs):
    train(*RECIPE, "--out_dir", runs, "--steps", 1, "--resume", "never")
    assert [path.name for path in runs.iterdir()] == ["run"]


def test_validate_refuses_run_as_checkpoint(run):
    with pytest.raises(InvalidCheckpoint, match="is a run; name one of its checkpoints, such as .*/step-00000004$"):
        validate(run)


@pytest.mark.parametrize("change", ["shape", "name", "dtype", "header"])
def test_resume_refuses_checkpoint_with_other_tensors(change, run):
    checkpoint = run / "checkpoints" / "step-00000004"
    (file,) = checkpoint.glob("*.safetensors")
    content, name = load_file(file), "model.final_norm.weight"
    if change == "shape":
        content[name] = torch.zeros(4)
    if change == "name":
        content["model.zzz"] = content.pop(name)
    if change == "dtype":
        content[name] = content[name].to(torch.float16)
    save_file(content, file, {"DCP_SHARDING_INFO": "{" if change == "header" else ""})
    replace(read_manifest(checkpoint), files={file.name: File(file.stat().st_size, sha256(file))}).write(checkpoint)
    done = train(*RECIPE, "--out_dir", run.parent, "--steps", 6, exit_code=2)
    assert done.stderr.count("train.py: error:") == 1 and "Traceback" not in done.stderr
    if change == "header":
        assert "cannot be read" in done.stderr and str(checkpoint) in done.stderr
        return
    assert "has other tensors than this model and optimizer" in done.stderr and name in done.stderr


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "edited"])
def test_resume_without_config_uses_checkpoint_settings(deleted, run):
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").unlink()
    if not deleted:
        (run / "config.yaml").write_text(settings.replace("\nseed: 0", "\nseed: 5"))
    done = train(*RECIPE, "--out_dir", run.parent, "--steps", 6, "--seed", 5, exit_code=2)
    assert f"{run} has a run with other settings" in done.stderr and "seed: 0 in the run, 5 now" in done.stderr
    (run / "config.yaml").unlink(missing_ok=True)
    train(*RECIPE, "--out_dir", run.parent, "--steps", 6)


# Status of a refused start


FP16 = {"ACCELERATE_MIXED_PRECISION": "fp16"}  # refused before the directory is read
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}  # refused when the checkpoint is read


def test_refused_start_is_recorded_in_status(run):
    assert Run(run).status() == Status("finished", STEPS)
    train(*RECIPE, "--out_dir", run.parent, exit_code=2, **BF16)
    status = Run(run).status()
    assert (status.state, status.step) == ("failed", STEPS) and "mixed_precision" in status.reason
    train(*RECIPE, "--out_dir", run.parent)
    assert Run(run).status() == Status("finished", STEPS)


@pytest.mark.parametrize("arguments", [["--seed", 5], ["--resume", "never"], ["--branch_from", "elsewhere"]], ids=str)
def test_refused_start_of_another_run_keeps_status(arguments, run):
    train(*RECIPE, "--out_dir", run.parent, *arguments, exit_code=2, **FP16)
    assert Run(run).status() == Status("finished", STEPS)
    assert not [path for path in run.parent.iterdir() if path != run]


def test_refused_other_corpus_keeps_status(run):
    """Its hash is known only when the config is resolved."""
    config = parse_config([*map(str, RECIPE), "--out_dir", str(run.parent)])
    directory = Run.from_config(config)
    with pytest.raises(ConfigError, match="data.hash: None in the run, 00ff now"), record_outcome(directory):
        lock_and_choose(directory, config.replace(**{"data.hash": "00ff"}), {})
    assert Run(run).status() == Status("finished", STEPS)


def test_lock_applies_through_symbolic_link(run):
    (run.parent / "link").symlink_to("run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with open(run / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in ("run", "link"):
            done = train(*RECIPE, "--out_dir", run.parent, "--name", name, "--steps", 6, exit_code=2)
            assert "in use" in done.stderr
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    train(*RECIPE, "--out_dir", run.parent, "--name", "link", "--steps", 6)


@pytest.mark.parametrize(
    ("name", "problem"), [("link", "is a link to nowhere, which does not exist"), ("x" * 300, "File name too long")]
)
def test_unusable_directory_is_refused(name, problem, runs):
    runs.mkdir()
    (runs / "link").symlink_to("nowhere")
    done = train(*RECIPE, "--out_dir", runs, "--name", name, exit_code=2)
    assert problem in done.stderr and "Traceback" not in done.stderr and "damaged" not in done.stderr


def test_lock_of_moved_run_is_released(tmp_path):
    run, moved = Run(tmp_path / "run"), Run(tmp_path / "moved")
    assert run.lock()
    run.path.rename(moved.path)
    assert run.lock() and run.is_locked() and not moved.is_locked()
    run.unlock()


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked"])
def test_run_moved_aside_while_it_is_locked_is_in_use(when, tmp_path, monkeypatch):
    """Another training that starts afresh renames the directory and makes a new one."""
    run, moved = Run(tmp_path / "run"), tmp_path / "moved"

    def move_then(call):
        def changed(*arguments, **named):
            run.path.rename(moved)
            return call(*arguments, **named)

        return changed

    name = "open_no_link" if when == "before it is opened" else "lock"
    monkeypatch.setattr(directory, name, move_then(getattr(directory, name)))
    assert not run.lock() and not run.has_lock()
    assert moved.exists()


# Non-finite losses


def test_run_fails_on_nonfinite_final_validation_loss(runs):
    arguments = [*TINY_STORIES, "--name", "run", "--out_dir", runs, "--steps", 1, "--evaluation.every", 1]
    arguments += ["--optimizer.lr", "1e30", "--schedule.warmup_steps", 0]
    arguments += ["--evaluation.num_scored_generations", 50]  # which cannot be sampled
    for _ in range(2):  # the second start has no steps left
        done = train(*arguments, exit_code=1)
        assert "step 1: the validation loss is" in done.stderr and "Training finished." not in done.stdout
        status = Run(runs / "run").status()
        assert (status.state, status.step) == ("failed", 1) and "validation loss" in status.reason
    (row,) = metrics(runs / "run")
    assert row["val/loss"] is None and math.isfinite(row["train/loss"])


# Threads and processes


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_reports_changed_threads_and_processes(exact, runs):
    arguments = [*RECIPE, "--out_dir", runs, "--exact", str(exact).lower()]
    train(*arguments, "--steps", 2)
    checkpoint = runs / "run" / "checkpoints" / "step-00000002"
    manifest = read_manifest(checkpoint)
    assert (manifest.processes, manifest.threads) == (1, 1)
    assert manifest.processor == processor_name()
    replace(manifest, threads=7, processor="Cray-1").write(checkpoint)
    assert "Resumed with" not in train(*arguments, "--steps", 2, processes=2).stdout, "no step is left to train"
    done = train(*arguments, "--steps", 3, processes=2)
    changes = f"{processor_name()} processor instead of Cray-1, 2 processes instead of 1, 1 threads instead of 7"
    message = f"Resumed with {changes}: from here on the bits may differ by rounding."
    assert done.stdout.splitlines().count(message) == (0 if exact else 1)


# metrics.jsonl


def test_damaged_metrics_rows_are_skipped(run):
    file = run / "metrics.jsonl"
    rows = file.read_bytes()
    file.write_bytes(b'{"train/loss": 1.0}\n[1]\nnull\n\xff\n{"step": "3"}\n' + rows + b'{"step": 4, "train/lo')
    done = train(*RECIPE, "--out_dir", run.parent)
    assert "Training finished." in done.stdout
    assert file.read_bytes() == rows
    file.unlink()
    done = train(*RECIPE, "--out_dir", run.parent)
    assert "Training finished." in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "sessions.jsonl"])
def test_unreadable_run_file_is_one_message(name, run):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    done = train(*RECIPE, "--out_dir", run.parent, exit_code=1)
    printed = done.stderr + done.stdout
    assert "Traceback" not in done.stderr and str(run) in printed and "Is a directory" in printed


def test_session_after_truncated_line_is_read(run):
    train(*RECIPE, "--out_dir", run.parent, "--steps", 5)
    before = (run / "sessions.jsonl").read_text()
    (run / "sessions.jsonl").write_text(before + '{"step": 5, "proc')
    train(*RECIPE, "--out_dir", run.parent, "--steps", 6)
    assert [row["step"] for row in read_rows(run / "sessions.jsonl")] == [0, 4, 5]


def test_row_writer_retries_after_full_disk(tmp_path, monkeypatch):
    file = RowWriter(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            file.append({"step": step})
    with pytest.raises(OSError, match="No space left"):
        file.sync()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n', "no partial row remains"
    monkeypatch.undo()
    file.append({"step": 4})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    file.close()


def test_metrics_are_synced_before_checkpoint_appears(tmp_path):
    """Otherwise a power failure could leave a checkpoint whose metrics are lost."""
    accelerator = SimpleNamespace(
        process_index=0,
        num_processes=1,
        distributed_type="NO",
        mixed_precision="no",
        device=torch.device("cpu"),
        is_main_process=True,
    )
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    there_already, faults = [], [OSError(5, "Input/output error"), None]

    def sync():
        there_already.append([path.name for path in tmp_path.glob("step-*")])
        if fault := faults.pop():
            raise fault

    saver = Saver(tmp_path, TrainConfig(), accelerator, lambda step: 0, sync, lambda step: None)
    for step in (1, 2):
        saver.save(step, train_state(network, optimizer), {})
    with pytest.raises(SaveError, match="Input/output error"):
        saver.wait()
    assert there_already == [[], ["step-00000001"]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_truncate_after_step_drops_later_rows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}')
    truncate_after_step(file, 3)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    truncate_after_step(file, 1)
    assert file.read_text() == '{"step": 1}\n'
    truncate_after_step(tmp_path / "none", 1)


# status.json


def test_write_status_in_place_on_full_disk(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path)
    run.write_status(Status("running", 3))
    monkeypatch.setattr("trainer.run.directory.write_atomically", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    run.write_outcome("failed", "x" * 10_000, "disk_full")
    assert run.status() == Status("failed", 3, "x" * 1000, "disk_full")
    run.write_status(Status("failed", 3))
    assert run.status() == Status("failed", 3)
    shutil.rmtree(tmp_path)
    run.write_status(Status("failed", 4))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"state": 1, "step": 2}', b'{"state": "finished"}', b"\xff"])
def test_damaged_status_is_none(content, tmp_path):
    (tmp_path / "status.json").write_bytes(content)
    assert Run(tmp_path).status() is None


# Config, output, defaults


@pytest.mark.parametrize("content", ["", "[]", "a: b: c", "{[", "steps: x", "\0", "&a [*a]"])
def test_damaged_run_config_is_reported(content, run):
    (run / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="config.yaml is damaged"):
        check_run(Run(run), parse_config([*map(str, RECIPE)]))


def test_training_continues_after_stdout_pipe_closes(runs):
    """As in `train.py | head`: the pipe closes after the first line."""
    os.mkfifo(pipe := runs.with_name("pipe"))
    words = [str(word) for word in (*RECIPE, "--out_dir", runs)]
    launch = forked.Launch("train.py", words, 0, environment(), terminal=str(pipe))
    with open(pipe) as reader:
        assert "loading torch" in reader.readline()
    assert launch.wait(120) == 0
    assert Run(runs / "run").status() == Status("finished", STEPS)


FULL_STDOUT = "import os, runpy, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); del sys.argv[0]\n"


@pytest.mark.linux_only
@pytest.mark.parametrize(("words", "exit_code"), [(["--print_config"], 1), ([], 0)])
def test_full_stdout_fails_results_but_not_training(words, exit_code, runs):
    words = ["train.py", *words, *RECIPE, "--out_dir", runs]
    code = f"{FULL_STDOUT}runpy.run_path(sys.argv[0], run_name='__main__')"
    done = forked.run("-c", [code, *map(str, words)], 0, environment())
    lost = "train.py: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr.endswith(lost)) == (exit_code, exit_code == 1), done.stderr


def test_null_settings_are_resolved_before_comparison():
    settings, config = stored()
    settings["model"]["vocab_size"] = 17
    assert differences(settings, config) == ["model.vocab_size: 17 in the run, 16 now"]
    config = config.replace(**{"model.vocab_size": None})
    assert differences(settings, config) == []


def test_complete_settings_of_nothing_are_defaults():
    assert complete_settings({}) == TrainConfig().flat()
