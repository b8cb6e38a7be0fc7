"""metrics.jsonl, trackers and the terminal, also after a rewind."""

import base64
import fcntl
import hashlib
import importlib
import io
import json
import os
import pty
import re
import socket
import struct
import sys
import termios
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from runtime.distributed.signals import Preempted
from tests.conftest import ROOT, TINY_STORIES, environment, metrics, rewind, shell, train
from tests.support import forked
from trainer.run import trackers
from trainer.run.directory import Run
from trainer.run.reporting import Reporter

STEPS = 4
WORDS = f"--steps {STEPS} --evaluation.every 2 --evaluation.num_scored_generations 4 --checkpoint.every 2"
SHORT = [*TINY_STORIES, *WORDS.split()]


def wandb_records(file):
    """Read the records of a .wandb file: a LevelDB log of protocol buffers after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the end of a block without space for another header
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def wandb_files(run):
    """List the .wandb files of a run, one for each start, oldest first."""
    return sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))


def select_records(files, kind):
    records = (record for file in files for record in wandb_records(file))
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def flat(items):
    """Parse W&B's items: JSON by keys or nested keys."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def train_offline(*arguments, **more):
    """Train on two processes with W&B offline."""
    return train(*arguments, "--tracking.wandb", "offline", processes=2, **more)


def md5_in_base64(path):
    return base64.b64encode(hashlib.md5(path.read_bytes()).digest()).decode()


@pytest.fixture(scope="module")
def rewound(tmp_path_factory):
    """A finished run with W&B that lost its last two checkpoints and was finished again from step 2."""
    runs = tmp_path_factory.mktemp("rewound")
    words = "--tracking.group depth --tracking.tags [deep,wide] --evaluation.num_logged_generations 2"
    arguments = [*words.split(), "--out_dir", runs, "--name", "a run"]
    train(*SHORT, *arguments, "--tracking.wandb", "offline")  # on one process, and the second session on two
    run = runs / "a run"
    rewind(run, 2)
    done = train_offline(*SHORT, *arguments, "--tracking.log_model", "true")
    assert "resumed at step 2" in done.stdout
    return run, done.stdout


def test_wandb_resumes_same_run_without_losing_rows(rewound):
    run, _ = rewound
    files = wandb_files(run)
    assert len(files) == 2, "one file a start, written by the main process alone"
    assert len({file.name for file in files}) == 1, "the same W&B run"
    rows = [flat(history.item) for history in select_records(files, "history")]
    logged_steps = Counter(row["step"] for row in rows if "train/loss" in row)
    assert logged_steps == {1: 1, 2: 1, 3: 2, 4: 2}, "the rewound steps are there again"
    last = [row for row in rows if row.get("step") == STEPS and "train/loss" in row][-1]
    ours = metrics(run)[-1]
    assert ours.items() <= last.items() and "perf/tokens_per_second" in last
    config = {}
    for updates in [*(run.config for run in select_records(files, "run")), *select_records(files, "config")]:
        config |= flat(updates.update)
    assert config["model"]["d_model"] == 16 and config["torch"] and "git_commit" in config
    assert (config["processes"], config["mixed_precision"]) == (2, "no")
    for started in select_records(files, "run"):
        assert (started.run_group, list(started.tags)) == ("depth", ["deep", "wide"])


def test_wandb_receives_texts_of_each_step(rewound):
    run, shown = rewound
    kept = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [2] * 2 + [STEPS] * 4, "rewound rows appear once"
    assert all("  | " + row["generation/stories"] + "\n" in shown for row in kept[2:5])
    tables = {}
    for file in wandb_files(run):
        for row in (flat(history.item) for history in select_records([file], "history")):
            if name := row.get("generation/stories.path"):
                tables[row["step"]] = json.loads((file.parent / "files" / name).read_text())
    for step, table in tables.items():
        rows = [[step, row["generation/stories"]] for row in kept if row["step"] == step]
        assert table == {"columns": ["step", "text"], "data": rows}
    assert tables.keys() == {2, STEPS}


def test_wandb_logs_export(rewound):
    run, _ = rewound
    [model] = (artifact for artifact in select_records(wandb_files(run), "artifact") if artifact.type == "model")
    files = {entry.path: entry for entry in model.manifest.contents}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    for entry in files.values():
        path = Path(entry.local_path)
        assert path.parent == run / "exports" / "step-00000004" and md5_in_base64(path) == entry.digest
    metadata = json.loads(model.metadata)
    assert model.name == "a_run" and metadata["step"] == STEPS and metadata["torch"]
    assert metrics(run)[-1].items() <= metadata.items(), "metrics belong to the exported weights"


def test_wandb_artifacts_are_inside_run_directory(rewound):
    """A run copied with its directory can be uploaded elsewhere, below the same path."""
    run, _ = rewound
    artifacts = select_records(wandb_files(run), "artifact")
    assert {artifact.type for artifact in artifacts} == {"run_table", "model"}
    for entry in (entry for artifact in artifacts for entry in artifact.manifest.contents):
        assert Path(entry.local_path).is_relative_to(run.resolve()) and Path(entry.local_path).exists()


def test_documented_wandb_sync_command_works(rewound):
    """The command runs where no folder wandb/ exists."""
    run, _ = rewound
    [command] = re.findall(r"`(wandb sync [^`]+)`", (ROOT / "docs" / "runs.md").read_text())
    done = shell(command.replace("runs/stories", f"'{run}'").replace("sync", "sync --dry-run", 1), run.parent)
    assert "Would sync 2 run(s)" in done.stdout + done.stderr


def test_wandb_finish_timeout_is_below_run_timeout(tracked, monkeypatch):
    init_options = {}
    monkeypatch.setattr("wandb.init", lambda **options: init_options.update(options) or MagicMock())
    with tracked("--tracking.wandb", "offline", "--timeout_seconds", "30"):
        pass
    assert 0 < init_options["settings"].finish_timeout < 30 and init_options["settings"].finish_timeout_raises


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """Build the tracker of a run's second start, after step 2, in this process, which sets WANDB_DATA_DIR."""
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")

    def start(*words):
        config = parse_config([*map(str, SHORT), "--out_dir", str(tmp_path), "--name", "run", *words])
        trackers.check(config)
        run = Run(tmp_path / "run")
        run.path.mkdir(exist_ok=True)
        (run.path / "sessions.jsonl").write_text(json.dumps({"step": 2, "config": {"seed": 0}}) + "\n")
        tracker = trackers.build_tracker(config, run)
        accelerator = Accelerator(cpu=True, log_with=tracker)
        accelerator.init_trackers("run")
        return Reporter(config, run, 2, accelerator)

    yield start
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_rewind(runs):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = [*SHORT, "--tracking.tracker", "tensorboard", "--out_dir", runs, "--name", "run"]
    train(*arguments, processes=2)
    rewind(runs / "run", 2)
    train(*arguments, processes=2)
    events = EventAccumulator(str(runs / "run" / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("train/loss", "train/grad_norm", "val/loss", "generation/valid"):
        ours = [(row["step"], pytest.approx(row[name])) for row in rows if name in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == ours
    assert not (runs / "run" / "wandb").exists() and "state/digest" not in events.Tags()["scalars"]
    shown, settings = events.Tensors("generation/stories/text_summary"), events.Tensors("settings/text_summary")
    kept = [json.loads(line) for line in (runs / "run" / "generations.jsonl").read_text().splitlines()]
    assert {event.step for event in shown} == {row["step"] for row in kept}
    for event in shown:
        text = event.tensor_proto.string_val[0].decode()
        assert all("    " + row["generation/stories"] in text for row in kept if row["step"] == event.step)
    assert '"d_model": 16' in (text := settings[-1].tensor_proto.string_val[0].decode()) and '"processes": 2' in text


def test_tensorboard_shows_step_0_once_after_an_early_kill(tracked, tmp_path):
    """Two sessions, of which the first ended before the first checkpoint, so that its row is removed."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (2.0, 1.0):
        with tracked("--tracking.tracker", "tensorboard") as reporter:
            reporter.trackers[0].log({"val/loss": loss}, step=0)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("val/loss")] == [(0, 1.0)]


def test_failing_tracker_does_not_stop_run(tracked, tmp_path, monkeypatch, capsys):
    def fail(**options):
        raise OSError("no such server")

    monkeypatch.setattr("wandb.init", fail)
    with tracked("--tracking.wandb", "offline") as reporter:
        for step, row in enumerate([{"train/loss": 1.5}, {"train/loss": 1.25}], start=3):
            reporter.log(step, row)
            reporter.trackers[0].log(row, step=step)
    message, shown = (
        "wandb has failed (OSError: no such server): metrics go to metrics.jsonl only.\n",
        capsys.readouterr().out,
    )
    assert shown.count("wandb has failed") == shown.count(message) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


class DyingWandbRun:
    """A W&B run whose process ends, with what it had not written, before the log of step 4."""

    sessions = ()

    def __init__(self, *arguments):
        self.steps = []
        DyingWandbRun.sessions += (self,)

    def log(self, step, row):
        if step == 4 and len(self.sessions) == 1:
            self.finish = self.log = None
            raise self.error
        self.steps.append((step, row["train/loss"]))

    def finish(self, failed):
        self.steps.append("finished")


@pytest.mark.parametrize("error", [ConnectionResetError, "HandleAbandonedError", "MailboxClosedError"])
def test_wandb_process_that_ends_is_started_again_with_all_rows(error, tracked, tmp_path, monkeypatch, capsys):
    """A scheduler's SIGTERM reaches it, too. Steps 1 and 2 are of an earlier session."""
    monkeypatch.setattr(DyingWandbRun, "sessions", ())
    monkeypatch.setattr(
        DyingWandbRun, "error", type(error, (Exception,), {}) if isinstance(error, str) else error, False
    )
    monkeypatch.setitem(trackers.TRACKERS, "wandb", DyingWandbRun)
    monkeypatch.setitem(sys.modules, "wandb", teardown := MagicMock())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "train/loss": 9.0}\n')
    with tracked("--tracking.wandb", "offline") as reporter:
        for step in (3, 4, 5):
            reporter.log(step, row := {"train/loss": 1.0 / step})
            reporter.trackers[0].log(row, step=step)
    second = DyingWandbRun.sessions[-1]
    assert len(DyingWandbRun.sessions) == 2 and teardown.teardown.called
    assert set(second.steps[:-1]) == {(step, 1.0 / step) for step in (3, 4, 5)} and second.steps[-1] == "finished"
    assert "has failed" not in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_has_all_rows_after_its_process_was_killed(tracked, tmp_path):
    with tracked("--tracking.wandb", "offline") as reporter:
        reporter.trackers[0].started.result()
        (core,) = (each for each in psutil.Process().children() if "wandb-core" in each.name())
        core.terminate()
        core.wait()
        time.sleep(1)  # the name of W&B's folder has the second in which it is made
        for step in range(3, 6):
            reporter.log(step, row := {"train/loss": 1.0 / step})
            reporter.trackers[0].log(row, step=step)
    importlib.import_module("wandb").teardown()  # waits until its process has written everything
    first, second = wandb_files(tmp_path / "run")
    assert not select_records([first], "exit") and select_records([second], "exit")
    rows = [flat(history.item) for history in select_records([second], "history")]
    assert {row["step"]: row["train/loss"] for row in rows} == {step: 1.0 / step for step in range(3, 6)}


@pytest.mark.parametrize("failure", [None, Preempted("stopped by a signal")])
def test_log_model_exports_at_end_and_tolerates_failure(failure, tracked, tmp_path, monkeypatch, capsys):
    """No checkpoint exists here, so an attempted export fails and is reported."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with suppress(Preempted), tracked("--tracking.wandb", "offline", "--tracking.log_model", "true"):
        if failure:
            raise failure
    message = f"The model is not logged: {tmp_path / 'run'} has no valid checkpoint\n"
    assert (message in capsys.readouterr().out) == (failure is None)


def test_export_and_tracker_share_the_time_limit(tracked, monkeypatch, capsys):
    """The other processes wait for both."""
    clock, blocked = [0.0], threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())
    monkeypatch.setattr(trackers.WandbRun, "finish", lambda *_: blocked.wait())
    monkeypatch.setattr(trackers, "monotonic", lambda: clock[0])
    monkeypatch.setattr(trackers, "sleep", lambda seconds: clock.append(clock.pop() + 1))
    monkeypatch.setattr(trackers.Tracker, "_log_model", lambda self: clock.append(clock.pop() + 14))
    with tracked("--tracking.wandb", "offline", "--tracking.log_model", "true", "--timeout_seconds", "30"):
        pass
    blocked.set()
    assert "wandb has not finished after 23 s; metrics.jsonl has everything.\n" in capsys.readouterr().out


@pytest.mark.parametrize("is_exporting", [False, True])
def test_signal_ends_the_wait_for_a_tracker_or_an_export(is_exporting, tracked, tmp_path, monkeypatch, capsys):
    """Both may take hundreds of seconds, and a scheduler kills a job after some."""
    blocked = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())
    monkeypatch.setattr(trackers.WandbRun, "finish", lambda *_: blocked.wait())
    monkeypatch.setattr(trackers, "STOPPING_SECONDS", 0.1)
    if is_exporting:
        (tmp_path / "export.py").write_text("import time; time.sleep(600)")
        monkeypatch.setattr(trackers, "ROOT", tmp_path)
        newest = {tmp_path / "step-00000002": None}
        monkeypatch.setattr(trackers.Run, "manifests", lambda _: newest)
    more = ["--tracking.log_model", "true"] * is_exporting
    with tracked("--tracking.wandb", "offline", "--timeout_seconds", "100000", *more):
        monkeypatch.setattr(trackers.StopSignal, "received", True)
    blocked.set()
    shown = capsys.readouterr().out
    assert "wandb has not finished after 0 s; metrics.jsonl has everything.\n" in shown
    assert ("The model is not logged: its export had not ended after 0 s\n" in shown) == is_exporting


@pytest.mark.parametrize(
    ("setting", "value"), [("group", "g"), ("tags", "[a]"), ("log_model", "true"), ("wandb", "online")]
)
def test_wandb_settings_are_refused_with_another_tracker(setting, value):
    with pytest.raises(ConfigError, match=f"tracking.{setting}: .* tracking.tracker: tensorboard"):
        parse_config([*map(str, SHORT), "--tracking.tracker", "tensorboard", f"--tracking.{setting}", value])


def test_missing_tracker_package_is_refused(tracked, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tracking.tracker: tensorboard .*pip install tensorboard"):
        tracked("--tracking.tracker", "tensorboard")


def test_log_model_refuses_unexportable_model(runs):
    words = "--tracking.log_model true --model.mlp relu2"
    refused = train(*SHORT, *words.split(), "--out_dir", runs, exit_code=2)
    assert "tracking.log_model: true" in refused.stderr and "model.mlp is relu2" in refused.stderr
    assert not runs.exists()


def test_run_reports_missing_wandb_package_once(runs, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('not installed')")
    words = [*TINY_STORIES, *"--steps 2 --evaluation.every 0 --tracking.wandb offline --name run --out_dir".split()]
    done = train(*words, runs, PYTHONPATH=str(tmp_path), processes=2)
    assert (done.stdout + done.stderr).count("wandb is not installed") == 1
    assert len(metrics(runs / "run")) == 2


def test_wandb_online_without_account_is_refused(runs, tmp_path):
    environment_without_key = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    done = train(*SHORT, "--tracking.wandb", "online", "--out_dir", runs, exit_code=2, **environment_without_key)
    assert "tracking.wandb: online" in done.stderr and "wandb login" in done.stderr
    assert not runs.exists()


@pytest.mark.slow
def test_wandb_online_without_server_logs_offline_for_later_sync(runs):
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40, "WANDB_PROJECT": "mine"}
    words = [*SHORT, "--tracking.wandb", "online", "--out_dir", runs, "--name", "run"]
    done = train(*words, **server)
    assert done.stdout.count("W&B cannot be used online (http://127.0.0.1:9: ") == 1
    assert f"wandb sync {runs}/run/wandb/offline-run-*\n" in done.stdout
    files = wandb_files(runs / "run")
    rows = [flat(history.item) for history in select_records(files, "history")]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert {started.project for started in select_records(files, "run")} == {"mine"}


def test_wandb_online_that_fails_is_started_offline(tracked, monkeypatch, capsys):
    modes, run = [], MagicMock()

    def init(mode, **options):
        modes.append(mode)
        if mode == "online":
            raise OSError("no such\nproject")
        return run

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(trackers, "connection_problem", lambda url: None)
    monkeypatch.setattr("wandb.init", init)
    with tracked("--tracking.wandb", "online") as reporter:
        reporter.trackers[0].log({"train/loss": 1.5}, step=3)
    assert modes == ["online", "offline"]
    assert run.log.call_args.args[0] == {"step": 3, "train/loss": 1.5}
    assert "W&B cannot be used online (OSError: no such project)" in capsys.readouterr().out


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_http_response_shows_that_the_server_is_there(status):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        problem = trackers.connection_problem(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert problem is None


def test_server_that_does_not_answer_is_a_problem(monkeypatch):
    monkeypatch.setattr(trackers, "CONNECTING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in (trackers.connection_problem(f"http://127.0.0.1:{silent.getsockname()[1]}") or "")


@pytest.mark.parametrize(
    ("setting", "variable", "project"),
    [
        (None, None, "mini-gpt"),
        (None, "of-the-environment", "of-the-environment"),
        ("own", "of-the-environment", "own"),
    ],
)
def test_wandb_project_is_the_setting_or_the_environment_variable(setting, variable, project, tracked, monkeypatch):
    init_options = {}
    monkeypatch.setattr("wandb.init", lambda **options: init_options.update(options) or MagicMock())
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    else:
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with tracked("--tracking.wandb", "offline", *(["--tracking.project", setting] if setting else [])):
        pass
    assert init_options["project"] == project


def test_metrics_file_has_documented_keys(runs):
    done = train(*SHORT, "--out_dir", runs, "--name", "run")
    assert "tokens/s = " in done.stdout and "memory" not in done.stdout
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    training = {"step", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "perf/tokens_per_second"}
    training |= {"perf/peak_memory_bytes"}
    validation = {"val/loss", "val/perplexity", "val/bits_per_byte", "val/entropy"}
    assert rows[0]["step"] == 0 and not training <= rows[0].keys(), "the initial evaluation"
    assert all(training <= row.keys() for row in rows[1:])
    assert [validation <= row.keys() for row in rows] == [True, False, True, False, True]
    assert ["generation/valid" in row for row in rows] == [False, False, False, False, True]
    assert rows[-1]["train/tokens"] == STEPS * 6 * 128
    assert rows[-1]["val/loss"] > rows[-1]["val/entropy"] > 0
    stored = parse_config(["--config", str(runs / "run" / "config.yaml")])
    filled_in = ["--model.vocab_size", str(stored.model.vocab_size), "--data.seed", str(stored.data.seed)]
    assert stored.model.vocab_size
    assert stored == parse_config([*map(str, SHORT), "--out_dir", str(runs), "--name", "run", *filled_in])


def run_on_terminal(runs, columns, processes):
    """Return everything that a run prints on a terminal of this width."""
    words = [str(word) for word in (*SHORT, "--out_dir", runs, "--name", "run")]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    launch = forked.Launch("train.py", words, processes, environment(), terminal=os.ttyname(theirs))
    threading.Thread(target=lambda: (launch.wait(300), os.close(theirs))).start()
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += chunk
    assert [process.exitcode for process in launch.processes] == [0] * processes, shown.decode(errors="replace")
    return shown.decode()


def test_terminal_shows_progress_bar(runs):
    """And above it, the lines that a file would have: the loss of each logged step, and the speed."""
    text = run_on_terminal(runs, columns=80, processes=2)
    assert "loading torch" in text and "waiting for all 2 processes" in text
    assert "4/4" in text and re.search(r"[\d?]step/s", text) and "train/loss" not in text
    for row in map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines()):
        line = rf"\[step {row['step']} / 4\] loss = {row.get('train/loss', 0):.4f} .* tokens/s = [\d,]+ ms/step = "
        assert bool(re.search(line, text)) == ("train/loss" in row)
    assert text.rstrip().endswith("Training finished.")
    assert text.count("run: ") == 1, "only the main process prints"
    assert re.search(r"[\r\n]The run is in ", text), "not at the end of the bar"


def test_terminal_without_width_shows_lines(runs):
    text = run_on_terminal(runs, columns=0, processes=1)
    assert "[step 4 / 4] loss = " in text and "step/s" not in text


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return -1


def test_progress_bar_advances_on_unlogged_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((80, 24)))
    config = parse_config(
        [*map(str, SHORT), "--out_dir", str(tmp_path), "--name", "run", "--tracking.wandb", "disabled"]
    )
    run = Run(tmp_path / "run")
    run.path.mkdir()
    with Reporter(config, run, 1, SimpleNamespace(is_main_process=True, trackers=[])) as tracker:
        tracker.log(3, {})
        assert tracker.bar.n == 3 and not (run.path / "metrics.jsonl").read_text()
