"""Every script of examples/ in real processes, against the others, train.py and plain torch.

Each command of examples/README.md is run, shortened, by the test of its script.
"""

import contextlib
import difflib
import gzip
import importlib
import inspect
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.synthetic.stories import StoriesDataset
from examples import common, data_parallel, mnist_allreduce, mnist_spawn_ddp, model_parallel, python_questions
from model.gpt import GPTModel
from tests.conftest import (
    OWN_SESSION,
    ROOT,
    TINY_STORIES,
    commands,
    environment,
    interrupt_after,
    metrics,
    python,
    shell,
    tensors,
    train,
)
from tests.support import forked

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = commands(README)
RUNGS = [
    "mnist_spawn_ddp", "data_parallel", "mnist_allreduce", "gpt_allreduce", "gpt_ddp", "gpt_accelerate", "gpt_buckets",
    "ring_allreduce", "model_parallel",
]  # fmt: skip
GPT_STEPS = 3
# Names in a profile. An all-reduce is started by the thread of the backward, so the order of both is no chance.
REDUCE = "c10d::allreduce_"
ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
PIPELINE_BATCH = 8  # of 32
MORE_THAN_AN_EPOCH = 66  # it has 63 on two ranks


MNIST = ROOT.parent / "shared" / "data" / "mnist"
AVERAGES = [command for command in COMMANDS if command.startswith("python -m examples.mnist_allreduce --epochs 3")]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with 400 noisy images of ten patterns in MNIST's format: one file packed, the other not."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=400).astype(np.uint8)
    patterns = generator.integers(256, size=(10, 28, 28)) // 2
    images = (patterns[labels] + generator.integers(128, size=(400, 28, 28))).astype(np.uint8)
    header = np.array([0x803, 400, 28, 28], dtype=">i4").tobytes()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(np.array([0x801, 400], dtype=">i4").tobytes() + labels.tobytes())
    return folder


@pytest.fixture(scope="module")
def run(digits):
    """Return a function that runs a shortened command of the README once and returns its output."""
    outputs = {}
    shortened = {
        "mnist": f" --data {digits} --epochs 3",
        "gpt": f" --steps {GPT_STEPS}",
        "model_parallel": " --steps 2",
        "data_parallel": " --steps 2",
        "ring": " --elements 7",
    }

    def run(command, more=""):
        assert command in COMMANDS, "the README shows another command"
        if command + more not in outputs:
            extra = next(extra for word, extra in shortened.items() if f"examples.{word}" in command or word in command)
            # Its ranks are forks; test_readme_command_works_with_real_launchers has real ones.
            if "model_parallel" in command:
                extra = f"'from examples import model_parallel as m; m.BATCH_SIZE = {PIPELINE_BATCH}; m.main()'{extra}"
                done = python(f"python -c {extra}")
            else:
                done = (shell if command.startswith("torchrun") else python)(command + extra + more)
            assert "arning" not in done.stdout + done.stderr
            outputs[command + more] = done.stdout
        return outputs[command + more]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("python ")])
def test_readme_command_works_with_real_launchers(command, run, digits):
    """By real mp.spawn and torchrun it ends with the losses of the forked ranks."""
    more = f" --data {digits} --epochs 3" if "mnist" in command else " --elements 7" if "ring" in command else ""
    more += " --steps 3" if "mnist" not in command and "ring" not in command else ""
    done = shell(command + more)
    if "mnist" in command:
        assert losses_of_ranks(done.stdout) == losses_of_ranks(run(command))


def load_digits(folder):
    return common.load_mnist(folder, common.Parser("test", ""))


def digests(output):
    """What each rank prints when it has finished, in order of the ranks: {name: hash} of bits."""
    lines = re.findall(r"^Rank (\d+) finished: (.*)$", output, re.MULTILINE)
    return [dict(re.findall(r"(\w+) (\w{16})", hashes)) for _, hashes in sorted(lines)]


def losses_of_ranks(output):
    """{(rank, epoch): loss} of the lines that a rung on MNIST prints."""
    lines = re.findall(r"^Rank (\d+), epoch (\d+), loss: (\d+\.\d{4})$", output, re.MULTILINE)
    return {(int(rank), int(epoch)): float(loss) for rank, epoch, loss in lines}


def test_ddp_equals_one_process_with_both_batches(run, digits):
    output = run("python -m examples.mnist_spawn_ddp")
    printed = losses_of_ranks(output)
    assert output.count("trains on 200 of 400 images in each epoch\n") == 2
    first, second = digests(output)
    assert first == second and first.keys() == {"weights"}
    data = TensorDataset(*load_digits(digits))
    samplers = [DistributedSampler(data, 2, rank) for rank in (0, 1)]
    model = mnist_spawn_ddp.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = {}
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        losses = []
        for batches in zip(*(DataLoader(data, 64, sampler=sampler) for sampler in samplers), strict=True):
            of_ranks = torch.stack([F.cross_entropy(model(images), labels) for images, labels in batches])
            optimizer.zero_grad()
            of_ranks.mean().backward()
            optimizer.step()
            losses.append(of_ranks.detach())
        for rank, loss in enumerate(torch.stack(losses).mean(0).tolist()):
            expected[rank, epoch] = loss
    assert printed == pytest.approx(expected, abs=2e-4)
    assert expected[0, 2] < 0.9 * expected[0, 0]


def test_allreduce_example_equals_sequential_ranks(run, digits):
    output = run("python -m examples.mnist_allreduce")
    data = TensorDataset(*load_digits(digits))
    partitioner = mnist_allreduce.DataPartitioner(data, [0.5, 0.5])
    torch.manual_seed(1234)
    model = mnist_allreduce.Net()
    loaders = [DataLoader(partitioner.use(rank), 64, shuffle=True) for rank in (0, 1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    random_states = [torch.get_rng_state()] * 2
    expected = {}
    for epoch in range(3):
        iterators, losses = [], []
        for rank in (0, 1):
            torch.set_rng_state(random_states[rank])
            iterators.append(iter(loaders[rank]))
            random_states[rank] = torch.get_rng_state()
        for _ in range(len(loaders[0])):
            optimizer.zero_grad()
            losses.append([])
            for rank, iterator in enumerate(iterators):
                torch.set_rng_state(random_states[rank])
                images, labels = next(iterator)
                loss = F.nll_loss(model(images), labels)
                (loss / 2).backward()
                losses[-1].append(loss.item())
                random_states[rank] = torch.get_rng_state()
            optimizer.step()
        expected |= {(rank, epoch): loss for rank, loss in enumerate(np.mean(losses, axis=0))}
    assert losses_of_ranks(output) == pytest.approx(expected, abs=2e-4)
    assert output.count("trains on 200 of 400 images\n") == 2
    first, second = digests(output)
    assert first == second and first.keys() == {"weights", "moments"}


@pytest.mark.slow
def test_averaging_weights_equals_averaging_gradients_only_with_sgd_in_each_step(run):
    """Not with Adam; nor if the weights are averaged after every 10 steps, of which three epochs have 12."""
    outputs = [run(command) for command in AVERAGES]
    sgd, sgd_weights, every_10, adam, adam_weights = [losses_of_ranks(output) for output in outputs]
    assert sgd_weights == pytest.approx(sgd, abs=2e-4)
    assert every_10 != pytest.approx(sgd, abs=2e-3) and adam_weights != pytest.approx(adam, abs=2e-3)
    pairs = [digests(output) for output in outputs]
    assert [first["weights"] == second["weights"] for first, second in pairs] == [True, True, False, True, True]
    assert [first["moments"] == second["moments"] for first, second in pairs] == [True, False, False, True, False]
    assert "--every 2 needs --average parameters" in refusal("mnist_allreduce", "--every", 2)


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.exists(), reason="the images are not in ../shared/data")
def test_readme_table_of_averages_shows_losses_on_mnist():
    shown = re.findall(r"^\| (\d) \| (.*) \|$", README, re.MULTILINE)
    for column, command in enumerate(AVERAGES):
        losses = losses_of_ranks(python(f"{command} --data {MNIST}").stdout)
        expected = {epoch: losses[0, epoch] for epoch in range(3)}
        assert {int(epoch): float(cells.split(" | ")[column]) for epoch, cells in shown} == pytest.approx(
            expected, abs=2e-3
        )


def test_data_partitioner_splits_data_by_seed():
    data = list(range(1000, 1100))
    partitioner = mnist_allreduce.DataPartitioner(data, [0.7, 0.2, 0.1])
    parts = [partitioner.use(part) for part in range(3)]
    assert [len(part) for part in parts] == [70, 20, 10]
    values = [part[i] for part in parts for i in range(len(part))]
    assert sorted(values) == data and values != data
    again = mnist_allreduce.DataPartitioner(data, [1.0], seed=1234).use(0)
    assert [again[i] for i in range(100)] == values
    other = mnist_allreduce.DataPartitioner(data, [1.0], seed=1).use(0)
    assert [other[i] for i in range(100)] != values


def test_allreduce_network_matches_tutorial():
    shapes = [tuple(parameter.shape) for parameter in mnist_allreduce.Net().parameters()]
    convolutions = [(10, 1, 5, 5), (10,), (20, 10, 5, 5), (20,)]
    assert shapes == [*convolutions, (50, 320), (50,), (10, 50), (10,)]
    outputs = mnist_allreduce.Net()(torch.randn(3, 1, 28, 28))
    assert torch.allclose(outputs.exp().sum(1), torch.ones(3))


def test_mnist_from_files_and_hub_is_identical(digits, tmp_path, monkeypatch):
    images, labels = load_digits(digits)
    assert images.shape == (400, 1, 28, 28) and images.dtype == torch.float32 and labels.dtype == torch.int64
    raw = gzip.decompress((digits / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    pixel = raw[5 * 784 + 3 * 28 + 7]
    assert images[5, 0, 3, 7].item() == pytest.approx((pixel / 255 - 0.1307) / 0.3081, rel=1e-5)

    for file in digits.iterdir():
        shutil.copy(file, tmp_path / file.name)
        shutil.copy(file, tmp_path / file.name.replace("t10k", "train"))
    flipped = bytearray((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    flipped[8] = (flipped[8] + 1) % 10
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(flipped)
    assert load_digits(tmp_path)[1][0] == flipped[8], "the training images come first"

    import datasets
    from PIL import Image

    pictures = [Image.fromarray(np.frombuffer(raw, np.uint8, 784, 784 * i).reshape(28, 28)) for i in range(20)]
    columns = {"image": pictures, "label": labels[:20].tolist()}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    requested = []

    def load_dataset(name, split):
        requested.append((name, split))
        return datasets.Dataset.from_dict(columns, features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    from_hub = load_digits(None)
    assert requested == [("ylecun/mnist", "train")]
    assert torch.equal(from_hub[0], images[:20]) and torch.equal(from_hub[1], labels[:20])


@pytest.mark.parametrize("steps", [GPT_STEPS, pytest.param(MORE_THAN_AN_EPOCH, marks=pytest.mark.slow)])
def test_gpt_examples_have_identical_bits(run, steps):
    """gpt_buckets trains three times, with buckets of other sizes."""
    commands = [f"python -m examples.gpt_{way}" for way in ("buckets", "allreduce", "accelerate")]
    if steps == MORE_THAN_AN_EPOCH:
        commands.append("python -m examples.gpt_ddp")
        commands.append("torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m examples.gpt_ddp")
    outputs = [run(command, f" --steps {steps}") for command in commands]
    found = [digests(output) for output in outputs]
    assert [len(ranks) for ranks in found] == [6] + [2] * (len(commands) - 1)
    assert all(ranks == found[0][:1] * len(ranks) for ranks in found)
    assert found[0][0].keys() == {"weights", "moments", "losses"}
    lines = re.findall(rf"^\[step (\d+) / {steps}\] loss = (\d\.\d{{4}})$", outputs[1], re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(10, steps + 1, 10))
    assert all(abs(float(loss) - math.log(10_000)) < 0.15 for _, loss in lines)


def test_bucket_timelines_show_overlap_with_backward(run):
    """All-reduces begin during the backward with several buckets, and after the last gradient with one."""
    line = r"^(.+): (\d+) of (\d+) all-reduces start during the backward; backward .* of waiting; timeline in (.*)$"
    found = re.findall(line, run("python -m examples.gpt_buckets", f" --steps {GPT_STEPS}"), re.MULTILINE)
    assert [counts for *counts, _ in found] == [
        ["one bucket", "0", "1"], ["default sizes", "1", "2"], ["one bucket per parameter", "36", "37"]
    ]  # fmt: skip
    for _, early, count, file in found:
        events = json.loads(Path(file).read_text())["traceEvents"]
        begins = {
            name: [event["ts"] for event in events if event.get("name") == name and "dur" in event]
            for name in (ACCUMULATE, REDUCE)
        }
        assert len(begins[REDUCE]) == int(count)
        assert sum(begin < max(begins[ACCUMULATE]) for begin in begins[REDUCE]) == int(early)


@pytest.mark.slow
def test_data_parallel_and_ddp_train_alike(run):
    output = run("python -m examples.data_parallel")
    losses = re.findall(r"^(.*), \d process.*: last loss (\d\.\d{4})$", output, re.MULTILINE)
    assert [name for name, _ in losses] == ["DataParallel by hand", "DistributedDataParallel"]
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=2e-4) != math.log(10)
    copied = sum(parameter.nbytes for parameter in data_parallel.new_model().parameters()) / 1e6
    exchanged = re.findall(r"^  exchanged in each step: (.*)$", output, re.MULTILINE)
    assert exchanged == [f"{copied:.1f} MB of weights, {copied:.1f} MB of gradients", f"{copied:.1f} MB of gradients"]
    assert re.findall(r"the first device computes: (\d+) of 256", output) == ["256", "128"]


def test_data_parallel_by_hand_computes_in_threads_of_one_process():
    """Weights are copied to all devices but the first, and the gradients are those of the whole batch."""
    torch.manual_seed(0)
    model, inputs, threads, num_bytes = torch.nn.Linear(3, 2), torch.randn(6, 3), set(), Counter()
    together = threading.Barrier(3)
    by_hand = data_parallel.DataParallelByHand(model, [torch.device("cpu")] * 3, num_bytes)
    for replica in by_hand.replicas:
        replica.register_forward_hook(lambda *_: (threads.add(threading.get_ident()), together.wait(300)) and None)
    outputs = by_hand(inputs)
    assert torch.equal(outputs, model(inputs)) and len(threads) == 3 and threading.get_ident() not in threads
    gradients = [torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in (outputs, model(inputs))]
    torch.testing.assert_close(*gradients)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes == {"weights": 2 * size, "gradients": 2 * size}


@pytest.mark.slow
@pytest.mark.linux_only
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_examples_run_without_resolvable_host_name():
    """As on many Macs, where torchrun asked for the address of the machine's name and waited for minutes."""
    env = {name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"}
    for rung, words in (("gpt_ddp", "--steps 3"), ("ring_allreduce", "--elements 7")):
        run = f"hostname no-such-host.invalid; exec {sys.executable} -m examples.{rung} {words}"
        done = subprocess.run(
            ["unshare", "--uts", "bash", "-c", run],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0 and "resolve" not in done.stderr, done.stderr


@pytest.mark.slow
def test_example_and_train_agree_on_same_batches(tmp_path):
    steps = 20
    words = ["gpt", str(tmp_path / "rung.pt"), str(steps)]
    done = forked.run("tests/support/reference_examples.py", words, 2, environment())
    assert done.returncode == 0, done.stderr
    losses, weights = torch.load(tmp_path / "rung.pt")
    settings = f"--steps {steps} --model.dropout 0 --optimizer.weight_decay 0 --optimizer.betas [0.9,0.999]"
    settings += " --optimizer.grad_clip null --tracking.log_every 1 --tracking.wandb disabled --name run"
    train("--config", "configs/random_tokens.yaml", *settings.split(), "--out_dir", tmp_path, processes=2)
    rows, of_train = metrics(tmp_path / "run"), tensors(tmp_path / "run", steps)
    assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    torch.manual_seed(0)
    before = GPTModel(model_parallel.GPTConfig(vocab_size=10_000)).state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(of_train[f"model.{name}"], weight, rtol=0, atol=5e-5)
        if weight.dim() == 2:  # some biases, as those of the keys, have next to no gradient
            assert (weight - before[name]).abs().max() > 1e-3, "the bound would mean nothing"


def test_readme_shows_diffs_between_examples():
    blocks = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    expected = []
    for before, after in (("gpt_allreduce.py", "gpt_ddp.py"), ("gpt_ddp.py", "gpt_accelerate.py")):
        lines = [(EXAMPLES / name).read_text().splitlines(keepends=True) for name in (before, after)]
        expected.append("".join(difflib.unified_diff(*lines, before, after, n=0)))
    assert blocks == expected


@pytest.mark.slow
def test_model_and_pipeline_parallel_equal_whole_model(run):
    output = run("python -m examples.model_parallel")
    torch.manual_seed(0)
    model = GPTModel(model_parallel.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(2):
        torch.manual_seed(step)
        tokens = torch.randint(256, (PIPELINE_BATCH, model_parallel.SEQ_LEN))
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens)[1]
        loss.backward()
        optimizer.step()
    last = re.findall(r"^(\w.*): last loss (\d\.\d{6})(?: \(difference from one device (.*)\))?$", output, re.MULTILINE)
    assert [name for name, *_ in last] == ["One device", "Split in one process", "ScheduleGPipe", "Schedule1F1B"]
    assert [float(value) for _, value, _ in last] == pytest.approx([loss.item()] * 4, abs=3e-6)
    assert last[0][2] == "" and all(float(difference) < 3e-6 for *_, difference in last[1:])
    idle = re.findall(r"idle in (\d+)% of the slots; the first one stores activations of (\d)", output)
    assert idle == [("50", "1"), ("20", "4"), ("20", "2")]
    rows = re.findall(r"^  stage (\d): ([FB.]+)$", output, re.MULTILINE)
    assert [row for _, row in rows[:4]] == ["F..B", ".FB.", "FFFF..BBBB", ".FFFFBBBB."]


@pytest.mark.parametrize(("stages", "micro_batches", "idle"), [(2, 2, 1 / 3), (2, 8, 1 / 9), (4, 4, 3 / 7)])
def test_bubble_of_gpipe(stages, micro_batches, idle):
    rows = model_parallel.timetable(["F" * micro_batches + "B" * micro_batches] * stages)
    assert [row.count(".") / len(row) for row in rows] == pytest.approx([idle] * stages)
    assert rows[0].startswith("F" * micro_batches) and rows[-1].startswith(
        "." * (stages - 1) + "F" * micro_batches + "B"
    )


@pytest.mark.slow
def test_readme_shows_what_scripts_print(run):
    """Line by line, with any digits and hashes."""

    def general(line):
        return re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?(e[-+]\d+)?", "#", line)

    shown = re.findall(r"```bash\n(python -m [^\n]*)\n(?:(?!```bash).)*?```text\n(.*?)```", README, re.DOTALL)
    assert len(shown) == 5
    for command, lines in shown:
        if "gpt" in command:
            output = run(command, " --steps 10")  # the scripts print the loss of every tenth step
        else:
            output = run(command)
        printed = {general(line).partition("; backward")[0] for line in output.splitlines()}
        assert not [line for line in lines.splitlines() if general(line) not in printed], output


@pytest.mark.slow
def test_ring_allreduce_is_correct_and_bandwidth_optimal(tmp_path, run):
    output = run("python -m examples.ring_allreduce --ranks 3")
    assert output.count("int64: sent 1.") == 3 and output.count("largest difference from dist.all_reduce 0\n") >= 3
    done = forked.run("tests/support/reference_examples.py", ["ring", str(tmp_path / "rows")], 0, environment())
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == 4 * 9 * 3
    for row in rows:
        n, element = row["ranks"], row["nbytes"] // max(row["numel"], 1)
        assert row["alike"] and row["error"] <= (0 if row["dtype"] == "torch.int64" else 1e-3), row
        assert sum(row["sent"]) == 2 * (n - 1) * row["nbytes"], row
        assert max(row["sent"]) - 2 * (n - 1) / n * row["nbytes"] <= 2 * element, row
        assert row["sent"] == row["returned"] and row["neighbours"] == [[(r + 1) % n] for r in range(n)]


def refusal(rung, *arguments):
    """Return the one line with which a script refuses its arguments, with exit code 2."""
    module = importlib.import_module(f"examples.{rung}")
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", [rung, *map(str, arguments)])
        module.main()
    assert exit.value.code == 2 and errors.getvalue().count("\n") == 1, errors.getvalue()
    assert errors.getvalue().startswith(f"python -m examples.{rung}: error: ")
    return errors.getvalue()


@pytest.mark.parametrize("rung", RUNGS)
def test_wrong_arguments_are_refused_in_one_line(rung):
    assert "--ranks" in refusal(rung, "--ranks", 0)
    assert "two" in refusal(rung, "--ranks", "two")
    assert "carrier_pigeon" in refusal(rung, "--backend", "carrier_pigeon")
    if torch.cuda.device_count() < 2:
        assert re.search("nccl needs a GPU for each of the 2 ranks, but . are here", refusal(rung, "--backend", "nccl"))
    number = "--epochs" if "mnist" in rung else "--elements" if "ring" in rung else "--steps"
    assert number in refusal(rung, number, 0)


def test_other_wrong_arguments_are_refused():
    assert "--micro-batches" in refusal("model_parallel", "--micro-batches", 2, "--ranks", 4)
    assert "--micro-batches" in refusal("model_parallel", "--micro-batches", 5)
    assert "--dropout" in refusal("gpt_ddp", "--dropout", 1)
    assert "--ranks" in refusal("mnist_allreduce", "--ranks", 129)


def test_missing_or_damaged_images_are_refused(digits, tmp_path, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("no network\nand a second line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for rung in ("mnist_spawn_ddp", "mnist_allreduce"):
        assert re.search(r"--data: .*ylecun/mnist.*ConnectionError: no network", refusal(rung))
        assert "t10k-images-idx3-ubyte.gz'" in refusal(rung, "--data", tmp_path)
    packed = (digits / "t10k-images-idx3-ubyte.gz").read_bytes()
    labels = (digits / "t10k-labels-idx1-ubyte").read_bytes()
    plain = gzip.decompress(packed)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(packed[: len(packed) // 2])
    assert "EOFError" in refusal("mnist_allreduce", "--data", tmp_path)
    for damaged in (plain[:-1], plain[:10], labels):
        (tmp_path / "t10k-images-idx3-ubyte").write_bytes(damaged)
        assert "ValueError" in refusal("mnist_allreduce", "--data", tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(np.array([0x803, 399, 28, 28], ">i4").tobytes() + plain[16:-784])
    assert "399 images, but 400 labels" in refusal("mnist_allreduce", "--data", tmp_path)


@pytest.mark.parametrize("rung", ["mnist_spawn_ddp", pytest.param("gpt_ddp", marks=pytest.mark.slow)])
def test_dead_rank_ends_all_ranks(rung, digits):
    """One started by mp.spawn and one by torchrun, both long enough to run for minutes."""
    arguments = ["--data", digits, "--epochs", 10**6] if rung.startswith("mnist") else ["--steps", 10**6]
    words = [f"examples.{rung}", *map(str, arguments)]
    if rung == "gpt_ddp":
        command = [sys.executable, "-m", *words]
        started = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        pid, first_line, wait = started.pid, started.stdout.readline, lambda: started.wait(timeout=100)
    else:
        started = forked.Launch(words[0], words[1:], 0, environment())
        pid, wait = started.processes[0].pid, lambda: started.wait(100)

        def first_line():
            while not started.output()[0]:
                assert started.processes[0].is_alive(), started.output()[1]
                time.sleep(0.05)

    first_line()  # they train
    ranks = [child for child in psutil.Process(pid).children(recursive=True) if child.num_threads() > 1]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    assert wait() == 1
    deadline = time.monotonic() + 300
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "a rank has outlived the others"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["mnist_spawn_ddp", "gpt_ddp"])
def test_ctrl_c_ends_without_traceback(rung, digits):
    """A terminal sends SIGINT to all processes."""
    more = ["--data", digits, "--epochs", 10**6] if rung.startswith("mnist") else ["--steps", 10**6]
    command = [sys.executable, "-m", f"examples.{rung}", *map(str, more)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **OWN_SESSION)
    output = interrupt_after("loss", process, timeout=200)
    assert process.returncode == 130 and "Traceback" not in output, output


def test_readme_python_prints_the_shown_output():
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    assert output.getvalue() == printed
    assert "unequal, weighted by rows: relative error 0%" in printed and "divided twice: relative error 50%" in printed


@pytest.mark.parametrize("name", RUNGS)
def test_example_says_that_it_loads_torch_before_it_does(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    command = [sys.executable, "-m", f"examples.{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True)
    assert done.stderr.splitlines() in (["Loading torch ...", "torch is imported"], ["Loading torch ..."])
    ranks = environment(PYTHONPATH=str(tmp_path), RANK="0")
    assert "Loading" not in subprocess.run(command, cwd=ROOT, env=ranks, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_grpo_trains_an_export(tmp_path):
    """TRL's trainer with the grammar as a reward; sample.py reads what it writes."""
    pytest.importorskip("trl", reason="TRL is not a requirement of this repository: pip install trl")
    train(*TINY_STORIES, "--out_dir", tmp_path, "--name", "run")
    shell(f"python export.py {tmp_path}/run {tmp_path}/export")
    output = shell(f"python -m examples.grpo_stories {tmp_path}/export {tmp_path}/red --updates 1").stdout
    assert "rewards/accepted_and_red/mean" in output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "red"))
    assert before.keys() == after.keys()
    shell(f"python sample.py {tmp_path}/red --prompt Meet --num_samples 1")


def test_grpo_rewards_accepted_stories_with_a_red_thing(monkeypatch):
    """Stories with red things get 1, stories without them and texts that the grammar rejects 0."""
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=None, GRPOTrainer=None))
    rewards = importlib.import_module("examples.grpo_stories")
    dataset = StoriesDataset("train", 60, 0, 96)
    stories = [dataset.text(index) for index in range(60)]
    red = [" red " in story for story in stories]
    assert any(red) and not all(red)
    assert rewards.accepted_and_red(stories) == [float(is_red) for is_red in red]
    broken = [story.replace(".", " red.", 1) for story in stories]
    assert rewards.accepted(broken) == rewards.accepted_and_red(broken) == [0.0] * 60


def test_python_questions_are_answered_by_docstrings(tmp_path, monkeypatch):
    """As pydoc finds them, by importing the modules."""
    files = [inspect.getsourcefile(module) for module in (json, threading)]
    monkeypatch.setattr(python_questions, "find_library_files", lambda: files)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        python_questions.main(["--help"])
    assert not [*tmp_path.glob("*help*")], "it is no name of a file"
    python_questions.main(["questions.jsonl"])
    rows = [json.loads(line)["messages"] for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert all([message["role"] for message in row] == ["user", "assistant"] for row in rows)
    answers = {question["content"]: answer["content"] for question, answer in rows}
    assert len(answers) == len(rows) and all(answers.values()), "each question once, with an answer"
    documented = {
        "What is the module json for?": json,
        "What does the function loads of json do?": json.loads,
        "What does the class Thread of threading do?": threading.Thread,
        "What does the function is_alive of threading do?": threading.Thread.is_alive,
    }
    for question, thing in documented.items():
        assert answers[question] == " ".join(inspect.getdoc(thing).split("\n\n")[0].split())
    assert answers['What is "while" in Python?'].startswith('The "while" statement is used for repeated execution')


@pytest.mark.slow
def test_text_to_chat_is_a_model_that_answers(tmp_path):
    """The whole script, with few steps, and again: what is done stays as it is."""
    command = f"bash {EXAMPLES}/text_to_chat.sh {tmp_path}/chat"
    shown = shell(command, STEPS="30").stdout
    assert shown.count("Training finished.") == 2 and "def read_" in shown
    chat = tmp_path / "chat" / "runs" / "chat"
    assert metrics(chat)[-1]["step"] == 15 and metrics(chat)[-1]["val/loss"] < 7, "ln 2048 is 7.6"
    written = {path: path.stat().st_mtime_ns for path in chat.glob("checkpoints/*/*")}
    export = tmp_path / "chat" / "export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    question = [{"role": "user", "content": "What is the module json for?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
    again = shell(command, STEPS="30").stdout
    assert again.count(" is complete: ") == 2
    assert written == {path: path.stat().st_mtime_ns for path in chat.glob("checkpoints/*/*")}
