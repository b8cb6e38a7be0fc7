"""Scores of runs: what they are computed from, and that a candidate cannot write its own."""

import json
from types import SimpleNamespace

import pytest
from torch.utils.data import default_collate

import train
from config.errors import ConfigError, RunError
from data.synthetic.stories import StoriesDataset
from model.gpt import GPTModel
from tests.tools.experiment.conftest import FAKE, fake_scorer
from tools.experiment import experiment, log, score, scorer
from tools.experiment.settings import parse_experiment

# At the end of a run of relu2: report a lower loss, and plant a score that confirms it.
PLANT = """
if settings["model.mlp"] == "relu2":
    import hashlib
    for folder in (run, os.path.join(os.path.dirname(settings["out_dir"]), "scores")):
        os.makedirs(folder, exist_ok=True)
        source = {"manifest": "", "scorer": SCORER}
        source["metrics"] = hashlib.sha256(open(run + "/metrics.jsonl", "rb").read()).hexdigest()
        planted = {"source": source, "loss": row["val/loss"], "val/loss": row["val/loss"], "targets": "abc"}
        planted |= {"num_targets": 7, "num_bytes": None, "entropy": 0.5, "is_causal": True, "parameters": 1000}
        planted |= {"flops_per_token": 6000, "val/excess_loss": row["val/excess_loss"], "val/bits_per_byte": None}
        name = "score.json" if folder == run else settings["name"] + ".json"
        json.dump(planted, open(os.path.join(folder, name), "w"))
sys.exit(state == "failed")"""


@pytest.mark.parametrize("speedup", [False, True])
def test_planted_score_is_not_trusted(speedup, run_experiment, monkeypatch):
    def measure(arm, command, *words):
        facts = fake_scorer(arm, command, *words)
        return facts | ({"loss": facts["loss"] + 0.1} if arm.settings["model.mlp"] == "relu2" else {})

    monkeypatch.setattr(score, "run_scorer", measure)
    plant = PLANT.replace("SCORER", repr(score.file_hash(score.SCORER)))
    (run_experiment.root / "train.py").write_text(FAKE.replace('sys.exit(state == "failed")', plant))
    message = run_experiment("--model.mlp relu2", error=ConfigError, speedup=speedup)
    assert "its code measures something else" in message and not log.read_log(run_experiment.lab)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"source": {}}'])
def test_damaged_score_is_measured_again(damage, run_experiment):
    found = run_experiment("--model.mlp relu2")
    file = run_experiment.lab / "scores" / f"{found['candidate']}-0.json"
    before = json.loads(file.read_text())
    file.write_text(damage)
    assert run_experiment("--model.mlp relu2")["verdict"] == "better"
    assert json.loads(file.read_text()) == before


@pytest.mark.parametrize("metric", ["val/loss", "val/excess_loss"])
def test_logged_metric_must_be_the_measured_one(metric, run_experiment, monkeypatch):
    def measure(arm, command, *words):
        facts = fake_scorer(arm, command, *words)
        return facts | ({"loss": 0.5 + arm.job(0).run.newest_metrics()["true"]} if command == "measure" else {})

    monkeypatch.setattr(score, "run_scorer", measure)
    lie = f'row["true"] = excess\nrow["{metric}"] -= 0.1 * (settings["model.mlp"] == "relu2")\nrow["train/tokens"]'
    (run_experiment.root / "train.py").write_text(FAKE.replace('row["train/tokens"]', lie))
    assert f"the {metric} of the candidate is" in run_experiment("--model.mlp relu2", error=ConfigError)


def test_other_targets_are_refused_before_training(run_experiment, monkeypatch):
    def other(arm, command, *words):
        return fake_scorer(arm, command, *words) | {"targets": str(arm.settings["data.num_samples"])}

    monkeypatch.setattr(score, "run_scorer", other)
    message = run_experiment("--data.num_samples 200", error=ConfigError)
    assert message.startswith("data.num_samples: the candidate predicts ") and not run_experiment.started()


def test_metric_of_the_corpus_is_compared(run_experiment):
    logs = 'row["val/error"] = row["val/loss"] / (2 if settings["model.mlp"] == "relu2" else 1)\nrow["train/tokens"]'
    (run_experiment.root / "train.py").write_text(FAKE.replace('row["train/tokens"]', logs))
    found = run_experiment("--model.mlp relu2", metric="val/error", margin=None)
    assert (found["metric"], found["margin"], found["entropy"]) == ("val/error", 0.03, None)
    assert found["verdict"] == "better" and found["difference"] == pytest.approx(100 * (0.86 / 0.9 / 2 - 1), abs=1)
    message = run_experiment("--model.mlp relu2", metric="val/x", error=ConfigError)
    assert "metric: 'val/x' is not logged" in message and "val/error, val/excess_loss" in message


def test_row_has_changed_settings_and_note(run_experiment):
    found = run_experiment("--model.mlp relu2 --optimizer.lr 1.5", note="why")
    assert found["changed_settings"] == {"model.mlp": ["gelu", "relu2"], "optimizer.lr": [1.0, 1.5]}
    tuned = run_experiment("--model.mlp relu2", "--optimizer.lr", "0.5", tune="optimizer.lr")
    assert tuned["changed_settings"] == {"model.mlp": ["gelu", "relu2"], "optimizer.lr": [0.5, 1.0]}
    assert found["note"] == "why" and [len(losses) for losses in found["losses"]] == [found["seeds"]] * 2


@pytest.mark.parametrize("metric", [None, "val/loss"])
def test_below_entropy_is_failed(metric, run_experiment):
    below = 'if settings["model.mlp"] == "relu2":\n    excess = -0.1 - excess / 100\nstate ='
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", below, 1))
    found = run_experiment("--model.mlp relu2", metric=metric)
    assert found["verdict"] == "failed" and "below the entropy of the data" in found["message"]


def test_equal_losses_of_seeds_are_failed(run_experiment):
    same = 'if settings["model.mlp"] == "relu2":\n    excess = 0.3\nstate ='
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", same, 1))
    found = run_experiment("--model.mlp relu2")
    assert found["verdict"] == "failed" and "does not use its seed" in found["message"]


def test_identical_preview_starts_no_run(run_experiment):
    found = run_experiment("--evaluation.num_samples 6")
    assert found["verdict"] == "identical" and not run_experiment.started()
    assert found["candidates_tried"] == 0 and found["more_seeds"] is None
    assert run_experiment("--evaluation.num_samples 6", stop_early=False)["verdict"] != "identical"


def test_equal_weights_are_identical_after_one_seed(run_experiment):
    (run_experiment.root / "train.py").write_text(
        FAKE.replace("* noise.gauss", "* random.Random(settings['seed']).gauss")
    )
    found = run_experiment("--evaluation.num_samples 6", stop_early=False)
    assert found["verdict"] == "identical" and len(run_experiment.started()) == 2
    assert found["candidates_tried"] == 0


@pytest.mark.parametrize(("ours", "theirs", "verdict"), [(0, 20, "failed"), (0, 1, "better"), (20, 21, "better")])
def test_training_on_validation_rows_fails(ours, theirs, verdict, run_experiment, monkeypatch):
    def leak(arm, command, *words):
        leaked = theirs if arm.settings["model.mlp"] == "relu2" else ours
        return fake_scorer(arm, command, *words) | ({"validation_rows": leaked} if command == "preview" else {})

    monkeypatch.setattr(score, "run_scorer", leak)
    found = run_experiment("--model.mlp relu2")
    assert found["verdict"] == verdict
    if verdict == "failed":
        assert "20 of the 128 rows" in found["message"] and not run_experiment.started()


REAL = """--steps 8 --global_batch_size 4 --micro_batch_size 2 --seq_len 128 --model.n_layers 1 --model.d_model 16
    --model.n_heads 2 --model.d_ff 32 --data.num_samples 32 --evaluation.num_samples 20 --evaluation.every 8
    --schedule.warmup_steps 1
    --evaluation.num_scored_generations 0 --evaluation.num_logged_generations 0 --tracking.wandb disabled"""


@pytest.mark.parametrize("leaks", [False, True])
def test_real_preview_finds_validation_rows(leaks, monkeypatch):
    for module, name in ((GPTModel, "forward"), (train, "evaluate")):  # the preview replaces them
        monkeypatch.setattr(module, name, getattr(module, name))
    if leaks:
        monkeypatch.setattr(train.BatchLoader, "batches", mix_in_validation)
        monkeypatch.setattr(
            train.BatchLoader, "load", lambda loader, step: next(mix_in_validation(loader, step, step + 1))
        )
    found = scorer.preview("", *REAL.split())
    assert found["rows"] == 32 and found["validation_rows"] == (16 if leaks else 0)
    assert found["digest"] and found["loss"] > 0 and not found["broken"]


def mix_in_validation(loader, start, stop):
    """In place of BatchLoader.batches: every second row is of the validation set."""
    ours, held_out = (StoriesDataset(split, 20, 0, 128) for split in ("train", "validation"))
    for step in range(start, stop):
        indices = 2 * step, 2 * step + 1
        yield [default_collate([ours[index], held_out[index]]) for index in indices]


@pytest.mark.parametrize("which", ["gelu", "relu2"])
def test_failed_preview_decides_nothing(which, run_experiment, monkeypatch):
    def fail(arm, command, *words):
        if command == "preview" and arm.settings["model.mlp"] == which:
            raise RunError("x")
        return fake_scorer(arm, command, *words)

    monkeypatch.setattr(score, "run_scorer", fail)
    assert run_experiment("--model.mlp relu2")["verdict"] == "better"
    assert "nothing is checked before the first seed: x" in run_experiment.printed


def test_killed_run_is_no_verdict(run_experiment):
    kill = 'if settings["model.mlp"] == "relu2":\n    os.kill(os.getpid(), 9)\nstate ='
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", kill, 1))
    assert "SIGKILL" in run_experiment("--model.mlp relu2", error=RunError)
    assert "SIGKILL" in run_experiment("--model.mlp relu2", tune="optimizer.lr", error=RunError)
    assert not log.read_log(run_experiment.lab)


@pytest.mark.parametrize("words", ["No space left on device", "File too large", "Disk quota exceeded"])
def test_full_disk_is_no_verdict(words, run_experiment):
    full = f'if settings["model.mlp"] == "relu2":\n    raise OSError("{words}")\nstate ='
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", full, 1))
    assert words in run_experiment("--model.mlp relu2", error=RunError)
    assert not log.read_log(run_experiment.lab)


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_baseline_that_fails_too_is_no_verdict(jobs, run_experiment):
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", "1 / 0\nstate =", 1))
    assert "ZeroDivisionError" in run_experiment("--model.mlp relu2", jobs=jobs, error=RunError)
    assert not log.read_log(run_experiment.lab)


def test_json_has_one_object_for_errors(run_experiment):
    message = run_experiment("--model.mpl relu2", error=ConfigError)
    (printed,) = [json.loads(line) for line in run_experiment.printed if line.startswith("{")]
    assert printed == {"idea": "--model.mpl relu2", "verdict": None, "exit_code": 2, "message": message}


@pytest.mark.parametrize(
    ("error", "exit_code"), [(RunError, 1), (OSError, 1), (ZeroDivisionError, 1), (KeyboardInterrupt, 130)]
)
def test_json_has_one_object_for_exceptions(error, exit_code, run_experiment, monkeypatch):
    def fail(*_):
        raise error("x")

    monkeypatch.setattr(score, "choose_metric", fail)
    monkeypatch.setattr(experiment, "choose_metric", fail)
    run_experiment("--model.mlp relu2", error=RunError if error is OSError else error)
    (printed,) = [json.loads(line) for line in run_experiment.printed if line.startswith("{")]
    assert (printed["verdict"], printed["exit_code"], printed["message"]) == (None, exit_code, "x")


def test_json_has_one_object_for_wrong_arguments(capsys):
    with pytest.raises(ConfigError):
        parse_experiment(["--x 1", "--max_seeds", "0", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == 2 and "max_seeds: 0 must be a positive integer" in printed["message"]


def test_code_prints_nothing_after_its_score(tmp_path):
    modules = {
        "checkpoint/provenance": "import atexit\natexit.register(print, '{}')\nnetwork_size = dict",
        "config/parser": "parse_config = list",
        "data/corpus": "from types import SimpleNamespace\n"
        "load_corpus = lambda config: SimpleNamespace(fill_in=lambda config: {'parameters': 5})",
    }
    for name, code in modules.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir()
        file.write_text(code)
    assert score.run_scorer(SimpleNamespace(code=tmp_path), "shape") == {"parameters": 5}


def test_crash_is_located(run_experiment):
    crash = 'if settings["model.mlp"] == "relu2":\n    1 / 0\nstate ='
    source = FAKE.replace("state =", crash, 1)
    (run_experiment.root / "train.py").write_text(source)
    line = 1 + source[: source.index("1 / 0")].count("\n")
    found = run_experiment("--model.mlp relu2")
    log_file = run_experiment.lab / "runs" / "logs" / f"{found['candidate']}-0.log"
    assert f"ZeroDivisionError: division by zero (train.py:{line}); log: {log_file}" in found["message"]
    assert found["seconds"] > 0 and found["cpu_seconds"] > 0 and found["verdict"] == "failed"
