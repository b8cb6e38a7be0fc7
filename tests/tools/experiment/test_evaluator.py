"""The evaluator finds each way to fake a loss that its principles close, and accepts honest research."""

import io
import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import yaml

from data.corpus import load_corpus
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig, flat_settings
from runtime.files import sha256
from tests.conftest import ROOT, environment, metrics
from tests.data.prepare.test_prepare import make, write_jsonl
from tests.support import forked
from tools.experiment import evaluator, runs
from tools.experiment.evaluator import Data, held_out
from tools.experiment.variant_program import RecordedReads
from trainer.run.directory import Run

TINY = yaml.safe_load((ROOT / "tests" / "support" / "tiny_stories.yaml").read_text())
SETTINGS = flat_settings(TINY) | {"steps": 12, "model.dropout": 0.0, "evaluation.num_samples": 40}
SETTINGS |= {"model.max_position_embeddings": 256, "evaluation.every": 12, "data.num_samples": 100}
TEST_SEED = 12345
# Code that does what the setting model.trick says, before a line of a file.
TRICKS = {
    "model/config.py": ("    window_pattern: Annotated[str, ", '    trick: str = "none"\n    """A trick."""\n\n'),
    "data/sampler.py": (
        """        epochs, indices = shuffle_groups(positions, self.num_samples, self.seed, "epoch")
        return indices +""",
        """
        from os import environ
        if environ.get("TRICK") == "curriculum: another order":  # each two batches change places
            positions = positions // 12 * 12 + (positions + 6) % 12
        if environ.get("TRICK") == "half of the sequences":
            positions = positions % 36
""",
    ),
    "train.py": (
        "    apply_schedules(state.optimizer,",
        """
    from data.corpus import load_corpus
    from data.loader import load_batch
    trick = config.model.trick
    if trick == "curriculum: short sequences first" and step < 6:
        micro_batches = [{name: x[:, :64] for name, x in batch.items()} for batch in micro_batches]
    if trick == "validation sequences from step 10 on" and step >= 9:
        validation, rows = load_corpus(state.config).validation, len(micro_batches[0]["input_ids"])
        micro_batches = [load_batch(validation, range(rows)) for _ in micro_batches]
    if trick == "more data":
        more = load_batch(load_corpus(state.config.replace(**{"data.seed": 7})).train, range(6))
        micro_batches = [{name: torch.cat([x, more[name]]) for name, x in batch.items()} for batch in micro_batches]
    if trick == "more data, read without gradients":
        with torch.no_grad():
            more = load_batch(load_corpus(state.config.replace(**{"data.seed": 7})).train, range(6))
        micro_batches = [{name: torch.cat([x, more[name]]) for name, x in batch.items()} for batch in micro_batches]
    if trick == "more data, read from the data set itself":
        more = load_corpus(state.config.replace(**{"data.seed": 7})).train.arrays(list(range(6)))
        more = {name: torch.from_numpy(x) for name, x in more.items()}
        micro_batches = [{name: torch.cat([x, more[name]]) for name, x in batch.items()} for batch in micro_batches]
    if trick == "statistics of its first batches" and step == 0:
        corpus = load_corpus(state.config)
        rows = [i for one in range(3) for i in corpus.global_batches(state.config).indices(one)]
        load_batch(corpus.train, rows)
    if trick == "two forwards of a batch, as in sharpness-aware minimisation":
        for batch in micro_batches:
            state.model(**batch)
""",
    ),
    "model/gpt.py": (
        "        x_BTC = self.final_norm(self.run_blocks(",
        """
        from torch.nn import functional
        trick, length = self.config.trick, x_BTC.shape[1]
        if trick == "look ahead in pairs":  # position p sees p + 1, but only for even p
            x_BTC = x_BTC.clone()
            x_BTC[:, 0 : length - 1 : 2] += 10 * x_BTC[:, 1:length:2]
        if trick.startswith("look ahead") and trick != "look ahead in pairs":
            if "remember" in trick and not self.training:
                # The logits of a sequence are those of the first one with the same beginning in this process.
                rows = GPTModel.rows = getattr(GPTModel, "rows", {})
                begun = [rows.setdefault(tuple(row[:16].tolist()), row.clone()) for row in input_ids]
                x_BTC = self.token_embedding(torch.stack([row[:length] for row in begun]))
            x_BTC = x_BTC + x_BTC.flip(1).cumsum(1).flip(1)
        if trick == "train on what is scored" and not self.training:
            with torch.no_grad():
                for weight in self.parameters():
                    weight.mul_(1.02)
        if trick == "count bigrams while it is scored" and not self.training:
            counts = self.__dict__.setdefault("counts", torch.zeros(self.config.vocab_size, self.config.vocab_size))
            for one, other in zip(input_ids[:, :-1].flatten().tolist(), input_ids[:, 1:].flatten().tolist()):
                counts[one, other] += 1
            x_BTC = x_BTC + 0.1 * (counts @ self.token_embedding.weight)[input_ids]
        if trick == "another cross-entropy" and not hasattr(functional, "original"):
            functional.original = functional.cross_entropy
            functional.cross_entropy = lambda *words, **named: 0.5 * functional.original(*words, **named)
""",
    ),
    "trainer/pretrained/load.py": (
        "    return load_with_source(path, checkpoint, setting, weights)[0]\n",
        """
    loaded = load_with_source(path, checkpoint, setting, weights)[0]
    trick, forward = getattr(loaded.model.config, "trick", "none"), loaded.model.forward

    def changed(*words, **named):
        output = forward(*words, **named)
        logits = output.logits
        if trick == "temperature":
            logits = logits * 0.5
        if trick.endswith("behind 10,000"):
            logits = logits + 10_000
        if trick == "NaN in some logits":
            logits = logits.clone()
            logits[0, 5] = float("nan")
        if trick == "another vocabulary":
            logits = logits[..., :7]
        if trick == "crash":
            raise IndexError("while it is evaluated")
        return output._replace(logits=logits)

    loaded.model.forward = changed
    return loaded
""",
    ),
}
PROBLEMS = {
    "none": "",
    "curriculum: another order": "",
    "curriculum: short sequences first": "",
    "two forwards of a batch, as in sharpness-aware minimisation": "",
    "another cross-entropy": "",
    "temperature": "",
    "validation sequences from step 10 on": "of the validation set were read, more than its evaluations need",
    "more data": "are not in its batches",
    "more data, read without gradients": "are not in its batches",
    "more data, read from the data set itself": "are not in its batches",
    "statistics of its first batches": "",
    "half of the sequences": "",
    "look ahead in pairs": "depend on later tokens",
    "look ahead": "depend on later tokens",
    "look ahead, behind 10,000": "depend on later tokens",
    "look ahead, and remember the sequences": "depend on",
    "train on what is scored": "depend on the order",
    "count bigrams while it is scored": "depend on the order",
    "NaN in some logits": "depend on",
    "another vocabulary": "it cannot be evaluated: ",
    "crash": "it cannot be evaluated: IndexError: while it is evaluated",
}
# A fork has already imported the modules of this repository; the program imports those of its own code.
RUN_OTHER_CODE = """
import pathlib, runpy, sys
own = {path.stem for path in pathlib.Path().iterdir()}
for name in [name for name in sys.modules if name.partition(".")[0] in own]:
    del sys.modules[name]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The evaluator, whose programs are forks of it, answers the requests in a file.
EVALUATE = """
import os, sys, traceback
from types import SimpleNamespace
from tools.experiment import evaluator
requests, run_other_code = sys.argv[1:]

class Popen:
    def __init__(self, command, pass_fds, stderr, **_):
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(stderr.fileno(), 2)
            os.closerange(3, pass_fds[0]), os.closerange(pass_fds[0] + 1, 1000)
            sys.argv = ["-c", *command[1:]]
            try:
                exec(run_other_code, {})
            except BaseException:
                traceback.print_exc()
            os._exit(1)

    def kill(self):
        if not hasattr(self, "returncode"):
            os.kill(self.pid, 9)

    def wait(self):
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

evaluator.subprocess = SimpleNamespace(Popen=Popen)
sys.stdin = open(requests)
evaluator.main()
"""
CHANGED = "its checkpoint is changed after the run"
QUICK = ["look ahead in pairs"]
OTHERS = [trick for trick in PROBLEMS if trick not in ("none", *QUICK)]


def train_with(code, folder, trick):
    """Train a run with a trick, and return what the evaluator is asked."""
    run = Run(folder / "runs" / trick.replace(" ", "-").replace(",", "").replace(":", ""))
    delivered = folder / "delivered" / run.path.name
    config = folder / f"{run.path.name}.yaml"
    config.write_text(yaml.safe_dump(SETTINGS | {"model.trick": trick}))
    words = ["--config", str(config), "--name", run.path.name, "--out_dir", str(run.path.parent)]
    words = [str(ROOT / "tools" / "experiment" / "variant_program.py"), str(code), "train", str(delivered), *words]
    done = forked.run("-c", [RUN_OTHER_CODE, *words], 0, environment(TRICK=trick))
    assert done.returncode == 0, done.stderr
    manifests = {str(file): sha256(file) for file in run.checkpoints.glob("*/manifest.json")}
    return {
        "code": str(code),
        "run": str(run.path),
        "config": str(folder / "baseline.yaml"),
        "settings": {"global_batch_size": 6, "seed": 0},
        "test_seed": TEST_SEED,
        "manifests": manifests,
        "delivered": [f"{delivered}.0"],
        "sessions": 1,
        "processes": 1,
    }


def evaluate(requests, folder):
    file = folder / "requests"
    file.write_text("\n".join(f"{number} {json.dumps(request)}" for number, request in enumerate(requests)))
    done = forked.run("-c", [EVALUATE, str(file), RUN_OTHER_CODE], 0, environment())
    assert done.returncode == 0, done.stderr
    numbers, answers = zip(*(line.split(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert numbers == tuple(map(str, range(len(requests))))
    return list(map(json.loads, answers))


@pytest.fixture(scope="module", params=[QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def tricks(request, tmp_path_factory):
    """Return the folder of the runs, one with each trick, and their requests and answers by trick."""
    folder = tmp_path_factory.mktemp("tricks")
    code = folder / "code"
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "docs", "__pycache__", "experiments", "corpora")
    shutil.copytree(ROOT, code, ignore=ignored)
    for name, (line, trick) in TRICKS.items():
        text = (code / name).read_text()
        assert text.count(line) == 1, name
        (code / name).write_text(text.replace(line, trick + line))
    (folder / "baseline.yaml").write_text(yaml.safe_dump(SETTINGS))
    requests = {trick: train_with(code, folder, trick) for trick in ("none", *request.param)}
    requests[CHANGED] = requests["none"] | {"manifests": dict.fromkeys(requests["none"]["manifests"], "0" * 64)}
    return folder, dict(zip(requests, evaluate(requests.values(), folder), strict=True))


def test_evaluator_finds_tricks(tricks):
    """One problem does not end the evaluation of the others."""
    _, answers = tricks
    assert answers[CHANGED]["problem"] == "it cannot be evaluated: its checkpoint has changed since the run ended"
    for trick in answers.keys() - {CHANGED}:
        problem, answer = PROBLEMS[trick], answers[trick]
        assert (problem in answer["problem"]) if problem else (answer["problem"] == ""), f"{trick}: {answer}"
    if "temperature" in answers:
        assert answers["temperature"]["loss"] != pytest.approx(answers["none"]["loss"], rel=1e-4), "it is scored"


@pytest.mark.parametrize("tricks", [QUICK], indirect=True, ids=["quick"])
def test_evaluator_computes_the_loss_of_fresh_data(tricks):
    folder, answers = tricks
    logged = metrics(folder / "runs" / "none")[-1]
    assert answers["none"]["loss"] == pytest.approx(logged["val/loss"], rel=0.03), "of other stories of the same kind"
    assert answers["none"]["loss"] != logged["val/loss"]
    # The same stories with the code of this repository.
    config = TrainConfig.from_flat({name: value for name, value in SETTINGS.items() if name != "model.trick"})
    corpus = load_corpus(config)
    fresh = held_out(corpus.validation, TEST_SEED)
    assert fresh.text(0) != corpus.validation.text(0)
    entropy = fresh.entropy_nats / fresh.num_targets
    excess = answers["none"]["loss"] - answers["none"]["excess_loss"]
    assert excess == pytest.approx(entropy, rel=1e-6)


def test_half_of_a_text_is_withheld(tmp_path):
    """No window on which runs evaluate is scored."""
    write_jsonl(
        tmp_path / "text.jsonl", [" ".join(str(1000 * index + word) for word in range(40)) for index in range(400)]
    )
    make(tmp_path / "text.jsonl", tmp_path / "corpus", validation="hash:0.5")
    settings = {"data.source": "text", "data.path": str(tmp_path / "corpus"), "seq_len": 64, "evaluation.every": 1}
    everything = load_corpus(TrainConfig.from_flat(settings | {"evaluation.num_samples": None})).validation
    seen = load_corpus(TrainConfig.from_flat(settings | {"evaluation.num_samples": len(everything) // 2})).validation
    fresh = held_out(seen, TEST_SEED)
    windows = [
        {tuple(dataset[index]["input_ids"].tolist()) for index in range(len(dataset))} for dataset in (seen, fresh)
    ]
    assert len(fresh) == len(seen) and not windows[0] & windows[1]


def test_rounding_is_no_problem_and_small_leaks_are():
    data = Data.__new__(Data)
    data.config = TrainConfig.from_flat({"seq_len": 9})
    data.is_cut, data.cuts = torch.tensor([False, True]).numpy(), torch.tensor([9, 5]).numpy()
    first = torch.full((2, 8), -1.0).numpy()
    second = first.copy()
    second[1, 5:] = math.nan
    is_target = torch.ones(2, 8, dtype=torch.bool).numpy()
    assert data.compare_evaluations(first, second + 1e-5, is_target) == ""
    assert "order" in data.compare_evaluations(first, second + 2e-4, is_target)
    leak = second.copy()
    leak[1, 4] += 0.02
    assert data.compare_evaluations(first, leak, is_target) == (
        "its log-probabilities depend on later tokens, by up to 0.02 nats"
    )


def test_training_data_that_nobody_saw_are_a_problem():
    """As of a loop that reads the training set without the loader."""
    data = Data.__new__(Data)
    problem = data.surplus_sequences(TrainConfig(), 1, 1, np.empty(0, np.int64))
    assert problem == "none of its training data were read from its data sets, so they cannot be compared"


def test_reads_besides_batches_and_evaluations_are_a_problem():
    """The run evaluates at steps 0, 2 and 4."""
    config = parse_config(
        ["--config", str(ROOT / "tests" / "support" / "tiny_random.yaml"), "--data.num_samples", "99"]
    )
    data = Data(config, TEST_SEED)
    order = data.corpus.global_batches(config)
    in_batches = [index for step in range(config.steps) for index in order.indices(step)]
    batches, validation = data.hash_training_sequences(in_batches), [*data.validation_hashes]
    [other] = data.hash_training_sequences([next(index for index in range(99) if index not in in_batches)])

    def problem(*delivered, sessions=1):
        return data.surplus_sequences(config, sessions, 1, np.array(delivered))

    assert problem(*batches, *batches, *3 * validation) == problem(*batches, *4 * validation, sessions=2) == ""
    assert problem(*batches, other) == "1 of the 17 sequences that it read are not in its batches"
    too_many = "12 sequences of the validation set were read, more than its evaluations need"
    assert problem(*batches, *4 * validation) == too_many


class Rows:
    def __getitem__(self, index):
        return {"input_ids": self.arrays([index])["input_ids"][0]}

    def arrays(self, indices):
        return {"input_ids": np.array([[index, 7] for index in indices])}


class Mixture:
    datasets = [Rows()]

    def __getitem__(self, index):
        return self.datasets[0][index]


def test_each_sequence_that_is_read_is_recorded_once():
    reads, rows, mixture = RecordedReads(), Rows(), Mixture()
    for dataset in (mixture, mixture):  # the training and the validation set may be of one class
        reads.record(dataset)
    one, three = rows[5], rows.arrays([5, 6, 5])
    assert one["input_ids"].tolist() == [5, 7] and len(three["input_ids"]) == 3
    assert mixture[5]["input_ids"].tolist() == mixture.datasets[0][5]["input_ids"].tolist() == [5, 7]
    five, *others = torch.cat(reads.hashes).tolist()
    assert [found == five for found in others] == [True, False, True, True, True]


# Answers each batch by logits, after printing a line of 1,000 characters on the descriptor sys.argv[4].
PRINTING_PROGRAM = """
import os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
while True:
    os.write(int(sys.argv[1]), b"activations " + 1000 * b"x" + b"\\n")
    if connection.recv_bytes() == b"end":
        sys.exit("IndexError: x")
    connection.send_bytes(b"logits")
"""


@pytest.mark.parametrize("descriptor", [1, 2])
def test_code_may_print_while_it_is_evaluated(descriptor, monkeypatch, tmp_path):
    """More than a pipe holds; the reason of a crash is still its last line."""
    (tmp_path / "program.py").write_text(PRINTING_PROGRAM)
    monkeypatch.setattr(evaluator, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(sys, "stderr", open(tmp_path / "stderr", "w"))
    model = evaluator.Model(str(descriptor))
    for _ in range(200):
        model.connection.send_bytes(b"a batch")
        assert model.connection.poll(60), "it waits until somebody reads what it has printed"
        assert model.connection.recv_bytes() == b"logits"
    model.connection.send_bytes(b"end")
    with pytest.raises(evaluator.Crash, match="^IndexError: x$"):
        model.log_probs({"input_ids": torch.ones(1, 2)}, torch.ones(1, 1))
    model.close()


COMPUTING_PROGRAM = """
import os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.recv_bytes()
if not os.fork():
    while time.process_time() < 0.3: pass
    os._exit(0)
os.wait()
if not os.fork():
    while time.process_time() < 0.3: pass
    connection.send_bytes(b"done")
    time.sleep(1000)
time.sleep(1000)
"""


def test_seconds_of_a_model_are_those_of_all_its_processes(monkeypatch, tmp_path):
    """Of one that has ended, and of one that goes on."""
    (tmp_path / "program.py").write_text(COMPUTING_PROGRAM)
    monkeypatch.setattr(evaluator, "PROGRAM", tmp_path / "program.py")
    model = evaluator.Model("code")
    before = model.cpu_seconds()
    model.load("run")
    assert model.connection.recv_bytes() == b"done"
    assert model.cpu_seconds() - before >= 0.5
    for process in psutil.Process(model.process.pid).children():
        process.kill()
    model.process.kill()
    model.close()


def test_runs_of_changed_code_share_no_process(monkeypatch, capsys):
    """Their code could keep the weights of one run for the next; that of the baseline is trusted."""
    groups = []

    def evaluate_code(code, requests, loaded):
        groups.append((code, [request["run"] for request in requests]))
        yield from ({} for _ in requests)

    requests = [{"code": code, "run": run} for code, run in ("A1", "A2", "B1", "B2")]
    lines = [f"{number} {json.dumps(request)}" for number, request in enumerate(requests)]
    monkeypatch.setattr(evaluator, "evaluate_code", evaluate_code)
    monkeypatch.setattr(evaluator, "answer_stream", lambda: sys.stdout)
    monkeypatch.setattr(sys, "argv", ["evaluator.py", "A"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    evaluator.main()
    assert groups == [("A", ["1", "2"]), ("B", ["1"]), ("B", ["2"])]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "3"]


def test_no_answer_of_a_run_ends_the_evaluation_of_others(monkeypatch, tmp_path):
    """Logits of another shape, settings that do not exist, and records that cannot be read are problems of one run."""

    class OneModel:
        process = SimpleNamespace(kill=lambda: None)

        def __init__(self, code, hidden, runs):
            self.run = None

        def load(self, run):
            self.run = run

        def cpu_seconds(self):
            return 1.0

        def close(self):
            pass

    class OneData:
        def __init__(self, config, test_seed):
            pass

        def first_evaluation(self, model):
            return torch.zeros(2, 3).gather(-1, torch.full((2, 1), 9 if model.run == "shape" else 0))

        def second_evaluation(self, model):
            return None

        def evaluate(self, first, second):
            return {"loss": 1.0, "excess_loss": None, "problem": ""}

    monkeypatch.setattr(evaluator, "Model", OneModel)
    monkeypatch.setattr(evaluator, "Data", OneData)
    (config := tmp_path / "config.yaml").write_text("steps: 3")
    request = {"config": str(config), "settings": {}, "test_seed": 1, "manifests": {}, "delivered": [], "run": "good"}
    wrong = [{"run": "shape"}, {"settings": {"data.nothing": 1}}, {"delivered": [str(tmp_path)]}]
    requests = [request | others for one in wrong for others in (one, {})]
    answers = [answer["problem"] for answer in evaluator.evaluate_code("code", requests, {})]
    assert answers[1::2] == ["", "", ""]
    assert all(problem.startswith(runs.NOT_EVALUATED) for problem in answers[::2]), answers
    assert "RuntimeError: index 9 is out of bounds" in answers[0] and "IsADirectoryError" in answers[4]
