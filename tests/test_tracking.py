"""metrics.jsonl, Weights & Biases, the terminal and the picture show what happened, also after a rewind."""

import fcntl
import io
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections import Counter
from types import SimpleNamespace

from config import parse_config
from plot import save_loss_curve
from tests import forked
from tests.conftest import ROOT, TINY_STORIES, environment, metrics, train, train_command
from training.run_directory import RunDirectory
from training.tracking import Tracker

STEPS = 4
SHORT = [*TINY_STORIES, *f"--steps {STEPS} --evaluation.every 2 --evaluation.num_story_samples 4".split()]


def wandb_records(file):
    """The records of a .wandb file: a LevelDB log of protocol buffers after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the rest of a block that has no room for another header
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_wandb_offline_goes_on_in_the_same_run_and_drops_nothing(runs):
    arguments = [*SHORT, "--tracking.wandb", "offline", "--out_dir", runs, "--name", "run"]
    train(*arguments, processes=2)
    shutil.rmtree(runs / "run" / "checkpoints" / "step-00000004")
    shutil.rmtree(runs / "run" / "checkpoints" / "step-00000003")
    done = train(*arguments, processes=2)
    assert "resumed at step 2" in done.stdout
    files = sorted((runs / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one file a start, written by the main process alone"
    assert len({file.name for file in files}) == 1, "the same W&B run"
    records = [record for file in files for record in wandb_records(file)]
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    logged_steps = Counter(row["step"] for row in rows if "train/loss" in row)
    assert logged_steps == {1: 1, 2: 1, 3: 2, 4: 2}, "the rewound steps are there again"
    last = [row for row in rows if row.get("step") == STEPS and "train/loss" in row][-1]
    ours = metrics(runs / "run")[-1]
    assert ours.items() <= last.items() and "perf/tokens_per_second" in last
    assert any("sample/stories" in row or any("sample/stories" in key for key in row) for row in rows)
    config = {}
    for record in records:
        for item in [*record.run.config.update, *record.config.update]:
            config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    assert config["model"]["d_model"] == 16 and config["provenance"]["torch"] and "git_commit" in config["provenance"]


def test_without_wandb_installed_the_run_works_and_says_so_once(runs, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('not installed')")
    done = train(
        *[*SHORT, "--tracking.wandb", "offline", "--out_dir", runs, "--name", "run"],
        PYTHONPATH=str(tmp_path),
        processes=2,
    )
    assert (done.stdout + done.stderr).count("wandb is not installed") == 1
    assert len(metrics(runs / "run")) == STEPS


def test_online_without_an_account_asks_nothing(runs, tmp_path):
    environment_without_key = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    done = train(*SHORT, "--tracking.wandb", "online", "--out_dir", runs, exit_code=2, **environment_without_key)
    assert "tracking.wandb: online" in done.stderr and "wandb login" in done.stderr
    assert not runs.exists()


def test_every_metric_of_the_contract_is_there(runs):
    done = train(*SHORT, "--out_dir", runs, "--name", "run")
    assert "tokens/s = " in done.stdout and "memory" not in done.stdout
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    training = {"step", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "perf/tokens_per_second"}
    training |= {"perf/peak_memory_bytes"}
    validation = {"val/loss", "val/perplexity", "val/bits_per_byte", "val/floor"}
    assert all(training <= row.keys() for row in rows)
    assert [validation <= row.keys() for row in rows] == [False, True, False, True]
    assert ["sample/accepted" in row for row in rows] == [False, False, False, True]
    assert rows[-1]["train/tokens"] == STEPS * 6 * 128
    assert rows[-1]["val/loss"] > rows[-1]["val/floor"] > 0
    stored = parse_config(["--config", str(runs / "run" / "config.yaml")])
    filled_in = ["--model.vocab_size", str(stored.model.vocab_size), "--data.seed", str(stored.data.seed)]
    assert stored.model.vocab_size
    assert stored == parse_config([*map(str, SHORT), "--out_dir", str(runs), "--name", "run", *filled_in])


def test_a_terminal_shows_a_progress_bar(runs):
    arguments = [*SHORT, "--out_dir", runs, "--name", "run"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    words = [str(word) for word in arguments]
    launch = forked.Launch("train.py", words, 2, environment(), terminal=os.ttyname(theirs))
    threading.Thread(target=lambda: (launch.wait(120), os.close(theirs))).start()
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += chunk
    assert [process.exitcode for process in launch.processes] == [0, 0]
    text = shown.decode()
    assert "loading torch" in text and "waiting for all 2 processes" in text
    assert "4/4" in text and "tokens/s=" in text and "loss=" in text and "step/s" in text
    assert "train/loss" not in text and "] loss =" not in text, "the lines are for where there is no terminal"
    assert text.rstrip().endswith("Training finished.")
    assert text.count("run: ") == 1, "only the main process prints"


def test_the_picture_can_be_drawn_again_and_a_missing_run_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": 1.5, "val/loss": 1.6, "val/floor": 1.0}\n'
    )
    assert save_loss_curve(tmp_path).read_bytes().startswith(b"\x89PNG")
    done = subprocess.run([*train_command()[:1], "plot.py", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere" in done.stderr and "Traceback" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_moves_in_every_step_logged_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    config = parse_config([*map(str, SHORT), "--out_dir", str(tmp_path), "--name", "run"])
    run = RunDirectory(str(tmp_path), "run")
    run.path.mkdir()
    with Tracker(config, run, 1, SimpleNamespace(is_main_process=True)) as tracker:
        tracker.log(3, {})
        assert tracker.bar.n == 3 and not run.metrics_file.read_text()
