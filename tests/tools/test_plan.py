"""`python -m tools.plan` prints what a run needs and changes nothing."""

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from config.errors import RunError
from config.parser import parse_config
from config.resolve import require_consistent
from model.gpt import GPTModel
from run.resolve import Resolved
from tests.conftest import ROOT, TINY_STORIES, environment, train
from tools import plan
from training.optimizer import build_optimizer

# Runs a program and prints its peak memory; measured from outside, since a fork inherits the peak of its parent.
MEASURE = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
)
PAGE = (ROOT / "docs" / "performance.md").read_text()
ON_A_CPU = SimpleNamespace(device=torch.device("cpu"), num_processes=1, distributed_type="NO", autocast=nullcontext)


def planned_megabytes(text):
    found = re.findall(r"^(\S.*?|  \S.*?) +([\d,.]+) MB", text, re.MULTILINE)
    return {name.strip(): float(size.replace(",", "")) for name, size in found}


def files(directory):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in directory.rglob("*")}


@pytest.mark.parametrize("processes", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_plan_prints_requirements_and_writes_no_file(runs, tmp_path, processes):
    (temporary := tmp_path / "temporary").mkdir()
    run = [*TINY_STORIES, "--out_dir", runs, "--name", "run"]
    train(*run, "--steps", "2", "--schedule.warmup_steps", "1")
    before = files(runs)
    done = train(*run, "--checkpoint.every", "2", script="tools.plan", processes=processes, TMPDIR=str(temporary))
    assert files(runs) == before and not list(temporary.iterdir())
    assert "Training finished." not in done.stdout and done.stdout.count("the peak of a process") == 1
    settings = parse_config([*map(str, TINY_STORIES), "--model.vocab_size", "266"])
    network = GPTModel(settings.model)
    assert f"parameters              {network.num_parameters():,}\n" in done.stdout
    assert f"{6 * 128:,} a step x 8 steps = {6 * 128 * 8:,}" in done.stdout
    assert f"{max(1, processes)} on cpu, 1 per replica; " in done.stdout
    assert " tokens/s, measured over a few steps" in done.stdout
    sizes = planned_megabytes(done.stdout)
    assert sizes["checkpoint"] == pytest.approx(3 * 4e-6 * network.num_parameters(), abs=0.06)
    parts = list(sizes.values())[1 : list(sizes).index("checkpoint")]
    assert sizes["memory"] == pytest.approx(sum(parts), abs=1) and sizes["Python and torch"] > 100


def test_plan_makes_no_directory_and_refuses_wrong_settings(runs):
    train(*TINY_STORIES, "--out_dir", runs, script="tools.plan")
    assert not runs.exists()
    refused = train(*TINY_STORIES, "--model.n_heads", "3", script="tools.plan", exit_code=2)
    assert "model.d_model" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_tensor_bytes_match_bytes_allocated_in_a_step(optimizer):
    words = "--model.vocab_size 266 --model.d_model 64 --model.d_ff 256 --micro_batch_size 2 --global_batch_size 2"
    config = parse_config([*map(str, TINY_STORIES), *words.split(), "--optimizer.name", optimizer])
    counted, moments = plan.tensor_bytes(config, ON_A_CPU)
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        network = GPTModel(config.model)
        updates = build_optimizer(network, config.optimizer)
        for _ in range(2):
            network(tokens, labels=tokens, num_items_in_batch=1.0)[1].backward()
            updates.step()
            updates.zero_grad()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    kept_by_the_heap = counted.pop("update"), counted.pop("evaluation")
    assert sum(counted.values()) == pytest.approx(peak, rel=0.03)
    assert (kept_by_the_heap[0] > 0) == (optimizer == "muon")
    assert counted["weights"] == 4 * network.num_parameters()
    state = sum(
        value.nbytes for states in updates.state.values() for value in states.values() if torch.is_tensor(value)
    )
    assert moments == state


def test_tensor_bytes_use_chunked_loss_when_compiled(monkeypatch):
    words = "--model.vocab_size 5000 --micro_batch_size 8 --global_batch_size 8 --compile true".split()
    config = parse_config([*map(str, TINY_STORIES), *words])
    logits = {}
    for lack, chunked in (("", None), ("", True), ("no compiler", None), ("no compiler", True), ("", False)):
        monkeypatch.setattr(plan, "missing_compiler", lambda _device, lack=lack: lack)
        parts, _ = plan.tensor_bytes(replace(config, chunked_loss=chunked), ON_A_CPU)
        logits[lack, chunked] = parts["logits and loss"]
    assert logits["", None] == logits["", True] == logits["no compiler", True]
    assert logits["no compiler", None] == logits["", False] != logits["", True]


def test_tensor_bytes_count_logits_of_a_scoring_corpus(monkeypatch):
    words = "--model.vocab_size 5000 --global_batch_size 1 --evaluation.micro_batch_size 64 --evaluation.num_samples 64"
    config = parse_config([*map(str, TINY_STORIES), *words.split()])
    kept, left = (sum(plan.tensor_bytes(config, ON_A_CPU, scores)[0].values()) for scores in (True, False))
    assert kept - left > 64 * config.seq_len * 5000
    monkeypatch.setattr(plan, "start_accelerator", lambda config: ON_A_CPU)
    monkeypatch.setattr(plan, "resolve", lambda config: Resolved(config, SimpleNamespace(score_logits=None), None))
    monkeypatch.setattr(plan, "baseline_process_bytes", lambda *_: 0)
    monkeypatch.setattr(plan, "tensor_bytes", lambda config, accelerator, scores: 1 / 0 if scores else sys.exit("left"))
    with pytest.raises(SystemExit, match="left"):
        plan.main(config)
    monkeypatch.setattr(plan, "resolve", lambda config: Resolved(config, SimpleNamespace(score_logits=max), None))
    with pytest.raises(ZeroDivisionError):
        plan.main(config)


class Fork(GPTModel):
    """A model with an auxiliary metric and a loss term weighted by the targets."""

    def forward(self, *arguments, **named):
        logits, loss, _ = super().forward(*arguments, **named)
        return logits, loss + 1 / named["num_items_in_batch"], {"one": (1, 1)}


def test_tensor_bytes_of_fork_with_frozen_parameters(monkeypatch):
    def build_and_freeze(network, *arguments):
        network.token_embedding.requires_grad_(False)
        return build_optimizer(network, *arguments)

    config = parse_config([*map(str, TINY_STORIES), "--model.vocab_size", "266"])
    config = replace(config, global_batch_size=6)
    _, whole = plan.tensor_bytes(config, ON_A_CPU)
    monkeypatch.setattr(plan, "GPTModel", Fork)
    monkeypatch.setattr(plan, "build_optimizer", build_and_freeze)
    _, moments = plan.tensor_bytes(config, ON_A_CPU)
    assert whole - moments == 2 * 4 * 266 * config.model.d_model + 4  # two moments and a step


def test_plan_refuses_shapes_that_depend_on_data(monkeypatch):
    class Chooses(GPTModel):
        def forward(self, input_ids, **named):
            return super().forward(input_ids[input_ids[:, 0] == 0], **named)

    monkeypatch.setattr(plan, "GPTModel", Chooses)
    config = parse_config([*map(str, TINY_STORIES), "--model.vocab_size", "266"])
    config = replace(config, global_batch_size=6)
    with pytest.raises(RunError, match="depend on its data"):
        plan.memory(config, ON_A_CPU, None)


def test_memory_includes_exact_sums_and_gathered_parameters(monkeypatch):
    config = parse_config([*map(str, TINY_STORIES), "--model.vocab_size", "266", "--exact", "true"])
    config = replace(config, global_batch_size=16, micro_batch_size=2)
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=2, mixed_precision="no")
    monkeypatch.setattr(plan, "tensor_bytes", lambda *_: ({"weights": 400, "activations": 7}, 800))
    monkeypatch.setattr(plan, "num_shards", lambda _: 2)
    network = GPTModel(config.model)
    parts, _ = plan.memory(config, accelerator, network)
    count = network.num_parameters()
    # 8 micro-batches on 2 processes: 4 leaves each, so two sums wait for the third, and one is received.
    assert parts["sums of exact"] == 3 * 4 * count
    assert parts["weights"] == 200 and parts["activations"] == 7
    assert parts["gathered by FSDP2"] == 4 * count  # both of its two blocks, and what is outside them


def test_baseline_trial_evaluates_one_row(monkeypatch):
    """Logits stay in the heap, so the baseline must not include those of an evaluation batch."""
    config = parse_config([*map(str, TINY_STORIES), "--evaluation.micro_batch_size", "50", "--model.vocab_size", "266"])
    tried = []
    monkeypatch.setattr(plan, "run_trial", lambda config, *_: tried.append(config))
    plan.baseline_process_bytes(config, SimpleNamespace(num_processes=1))
    assert tried[0].evaluation.every and tried[0].evaluation.micro_batch_size == 1


def test_trial_run_has_consistent_settings(monkeypatch):
    class Begun(Exception):
        pass

    def begin(config):
        assert config.schedule.batch_warmup_from is None, "a step has one micro-batch"
        require_consistent(config, 1)
        raise Begun

    monkeypatch.setattr(plan.train, "main", begin)
    settings = "--schedule.batch_warmup_from 3 --schedule.batch_warmup_steps 2 --checkpoint.keep_every 2".split()
    with pytest.raises(Begun):
        plan.run_trial(parse_config([*map(str, TINY_STORIES), *settings]), ON_A_CPU)


RANDOM = (
    "--data.source random --tracking.wandb disabled --evaluation.num_samples 9 --evaluation.every 0 --steps 4 "
    "--checkpoint.every 2"
)
MODELS = {
    "stories": "--config configs/stories.yaml --tracking.wandb disabled --steps 6 --checkpoint.every 2 "
    "--schedule.warmup_steps 1 --evaluation.num_scored_generations 8",
    "wide": f"--config configs/gpt2_124m.yaml {RANDOM} --schedule.warmup_steps 1 --micro_batch_size 1 "
    "--global_batch_size 1 --seq_len 256 --model.n_layers 4 --compile false",
    "accumulating": f"--config configs/shakespeare_char.yaml {RANDOM} --schedule.warmup_steps 1 --model.vocab_size 256 "
    "--micro_batch_size 2 --global_batch_size 4 --optimizer.name muon --model.dropout 0",
}


@pytest.mark.slow  # real processes: a fork shares memory with its parent
@pytest.mark.parametrize("model", MODELS)
def test_plan_is_within_15_percent_of_measured_peak(model, runs):
    words = [*MODELS[model].split(), "--out_dir", runs]

    def output(*command):
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout

    predicted = planned_megabytes(output(sys.executable, "-m", "tools.plan", *words))["memory"]
    measured = int(output(sys.executable, "-c", MEASURE, sys.executable, "train.py", *words)) / 1e6
    print(f"{model}: planned {predicted:,.0f} MB, measured {measured:,.0f} MB")
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_plan_command_of_the_page_works(runs):
    (words,) = re.findall(r"^    python -m tools\.plan (.*)$", PAGE, re.MULTILINE)
    done = train(*words.split(), "--tracking.wandb", "disabled", "--out_dir", runs, script="tools.plan")
    assert "\nFLOPs " in done.stdout and not runs.exists()
