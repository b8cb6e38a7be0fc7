"""verify.py passes here, and fails where a fork has broken something."""

import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

import model.attention
import model.gpt
import train
from data.sampler import BatchSizes, GlobalBatches, MixedBatches
from data.synthetic.stories import StoriesDataset
from runtime.cli import scripts
from runtime.config.errors import ConfigError
from tests.conftest import CPU_LAUNCH, ROOT, TINY_STORIES, environment
from tests.support import forked
from trainer.checks import verification
from trainer.checks.gradients import NoFloat64
from trainer.checks.short_run import parse_short_run
from trainer.pretrained.load import LoadedModel
from trainer.run.resolve import PretrainedModels

CHECKS = [
    "order is a permutation in every epoch",
    "logits = transformers' gpt2",
    "logits = transformers' qwen3",
    "logits = transformers' llama",
    "generation with a cache = without",
    "isolated documents = each document alone",
    "masks of both kernels = their definition",
    "FLOPs per token = products that torch counts",
    "constant initial weights stay constant",
    "gradient = autograd of plain operations",
    "replicas are equal after every step",
    "gradient = hand-written all-reduce",
    "N processes = 1 process x N accumulation",
    "resuming is bitwise",
    "exact = bits of 1 process",
]
# Mutations and the check that must find each: (file, before, after, check).
MUTATIONS = {
    "loss_not_divided_by_processes": (
        "train.py", "scale * (1 if state.reducer else results.num_processes)", "scale",
        "gradient = hand-written all-reduce"),
    "shares_overlap": (
        "data/sampler.py", " + rank * local_size", "",
        "order is a permutation in every epoch"),
    "checkpoint_not_loaded": (
        "train.py", "    if start.checkpoint:", "    if False:", "resuming is bitwise"),
    "processes_not_added": (
        "runtime/distributed/tree_reduce.py", "foreach_add_(gradients, received)", "pass", "exact = bits of 1 process"),
    "another_place_in_the_cache": (
        "model/gpt.py", "torch.arange(num_cached, seq_len, device", "torch.arange(seq_len - num_cached, device",
        "generation with a cache = without"),
    "other_scores": (
        "model/attention.py", "is_causal=causal,", "is_causal=causal, scale=0.1,", "logits = transformers' gpt2"),
    "another_rotation": (
        "model/gpt.py", "torch.cat((-", "torch.cat((", "logits = transformers' qwen3"),
    "sign_of_the_gradient_of_an_input": (
        "trainer/cpu_kernels.py", "onednn_linear(grad_y_TN, weight.t())", "onednn_linear(grad_y_TN, -weight.t())",
        "gradient = autograd of plain operations"),
    "chunked_loss_scales_a_gradient": (
        "model/loss.py", "grad_hidden_NC * grad_loss", "grad_hidden_NC * grad_loss * 2",
        "gradient = autograd of plain operations"),
}  # fmt: skip


def verify(*arguments, cwd=ROOT, processes=2):
    launcher = [sys.executable, Path(sys.executable).parent / "accelerate", "launch", "--config_file", CPU_LAUNCH]
    command = [*launcher, "--num_processes", processes, "verify.py", *TINY_STORIES, *arguments]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=forked.HANG_SECONDS,
    )
    return done


def results(stdout):
    return {check.strip(): word for word, check in re.findall(r"^(PASS|FAIL|SKIP)  (.{44}) ", stdout, re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_verify_passes_on_this_machine(processes, runs):
    for name in ("verify-tiny_stories", "tiny_stories", "verify-"):
        (runs / name).mkdir(parents=True)
        (runs / name / "precious").touch()
    done = verify("--out_dir", runs, processes=processes)
    skipped = {1: "replicas are equal after every step", 3: "exact = bits of 1 process"}
    expected = {name: "SKIP" if name == skipped.get(processes) else "PASS" for name in CHECKS}
    assert results(done.stdout) == expected, done.stdout + done.stderr
    assert done.returncode == 0 and done.stdout.endswith("Everything holds.\n")
    assert len([*runs.rglob("*")]) == 6, "verify.py leaves no file and removes none"


AS_ONE_PROCESS = ["N processes = 1 process x N accumulation", "exact = bits of 1 process"]
SELECT_CHECKS = f"""
import runpy, sys
from trainer.checks.verification import Verification
checks = Verification.checks
Verification.checks = lambda self: {{name: checks(self)[name] for name in {AS_ONE_PROCESS}}}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_each_of_two_processes_trains_as_one(runs):
    """The number of target tokens and the gradient are those of one process, although the launch has two."""
    done = forked.run("-c", [SELECT_CHECKS, *verify_command(runs, "--verify_steps", "2")], 2, environment())
    assert results(done.stdout) == dict.fromkeys(AS_ONE_PROCESS, "PASS"), done.stdout + done.stderr


def test_verify_starts_from_step_0():
    given = ["--branch_from", "runs/stories/checkpoints/step-00000500", "--init_from", "runs/stories"]
    config = parse_short_run([*map(str, TINY_STORIES), *given])
    assert (config.branch_from, config.init_from) == (None, "runs/stories")


@pytest.mark.parametrize(("processes", "micro_batch_size"), [(1, 16), (2, 8), (4, 4)])
def test_verify_chooses_micro_batch_that_fits(processes, micro_batch_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    config = parse_short_run(["--config", str(ROOT / "configs" / "lab.yaml")])
    assert (config.global_batch_size, config.micro_batch_size) == (16, micro_batch_size)


def test_verify_refuses_indivisible_global_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="global_batch_size: 16 is not a multiple of micro_batch_size"):
        parse_short_run(["--config", str(ROOT / "configs" / "lab.yaml")])


PASSES = {
    "a thread for each core": "--global_batch_size 2 --chunked_loss true",  # their number changes the bits of sums
    "EMA and Muon": "--evaluation.ema_decay 0.9 --optimizer.name muon",
    "batch warm-up": "--schedule.batch_warmup_from 2 --schedule.batch_warmup_steps 4",
    "batch warm-up on two processes": "--schedule.batch_warmup_from 2 --schedule.batch_warmup_steps 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_verify_passes(name, runs):
    env = environment()
    if "thread" in name:
        del env["OMP_NUM_THREADS"]
    words = [*TINY_STORIES, *PASSES[name].split(), "--out_dir", str(runs)]
    done = forked.run("verify.py", words, 2 if "processes" in name else 1, env)
    assert done.returncode == 0 and results(done.stdout)[CHECKS[-1]] == "PASS", done.stdout + done.stderr


def test_mutations_apply_to_current_code():
    for file, before, *_ in MUTATIONS.values():
        assert (ROOT / file).read_text().count(before) == 1, (file, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_verify_finds_mutation(name, runs, tmp_path):
    file, before, after, check = MUTATIONS[name]
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "tests", "__pycache__"))
    (copy / file).write_text((copy / file).read_text().replace(before, after))
    done = verify("--out_dir", runs, cwd=copy)
    assert results(done.stdout)[check] == "FAIL", done.stdout + done.stderr
    assert done.returncode == 1 and check in done.stderr


def verify_command(out_dir, *words):
    return ["verify.py", *TINY_STORIES, "--out_dir", str(out_dir), *words]


def make_a_fork():
    """A fork: a Python number in the optimizer's state, an added parameter, and a check that raises."""

    class CountingSGD(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / state["count"])

    class ScaledMLP(model.gpt.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Linear(config.d_model, config.d_model, bias=False)
            torch.nn.init.ones_(self.scale.weight)

        def forward(self, x_BTC):
            return self.scale(super().forward(x_BTC))

    model.gpt.MLP = ScaledMLP
    train.build_optimizer = verification.build_optimizer = lambda model, *_: CountingSGD(model.parameters(), 0.1)
    verification.MAX_READ = "many"


def verify_edited(edit, file, words):
    """Run verify.py after an edit of its code, with its output in a file."""
    sys.stdout, sys.argv = open(file, "w"), words
    edit()
    scripts.exit_without_teardown(scripts.run_script("verify", parse_short_run))


def in_a_fork(edit, out_dir, file, *words):
    """Return the output and the exit code of verify.py after an edit of its code."""
    process = forked.server.Process(target=verify_edited, args=(edit, file, verify_command(out_dir, *words)))
    process.start()
    process.join(forked.HANG_SECONDS)
    return file.read_text(), process.exitcode


def test_checks_are_independent_and_give_reasons(runs, tmp_path):
    output, exit_code = in_a_fork(make_a_fork, runs, tmp_path / "out")
    words = "FAIL SKIP SKIP SKIP PASS PASS PASS PASS FAIL PASS SKIP FAIL FAIL FAIL FAIL".split()
    assert results(output) == dict(zip(CHECKS, words, strict=True)), output
    assert exit_code == 1
    line = dict(zip(CHECKS, output.splitlines()[1:], strict=False))
    assert re.search(r"TypeError: .*\(verification.py:\d+\)", line[CHECKS[0]])
    assert "it and its family differ in 2 tensors" in line[CHECKS[1]] and "blocks.0.mlp.scale" in line[CHECKS[1]]
    assert "init_weights draws blocks.0.mlp.scale.weight, which its module initialises to 1" in output
    assert "keeps state['count'] as numbers or objects" in line["gradient = hand-written all-reduce"]
    assert output.count("keeps state['count']") == 1 and line["resuming is bitwise"].endswith("the same error as above")


def test_verify_sets_cublas_workspace_before_first_matmul(monkeypatch):
    """torch reads the workspace setting of cuBLAS once, and the first check is not exact."""

    class Begun(Exception):
        pass

    def begin(config, script):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise Begun

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(verification, "check_launch", lambda config: None)
    monkeypatch.setattr(verification, "Verification", begin)
    with pytest.raises(Begun):
        verification.verify(SimpleNamespace(steps=6), train)


def keep_an_unsaved_mean():
    """A fork that evaluates a mean of the weights that no checkpoint holds."""
    evaluate, evaluations = train.evaluate, []

    def evaluate_twice(*arguments, **named):
        evaluations.append(evaluate(*arguments, **named))
        return evaluations[-1] | {"ema/loss": len(evaluations)}

    train.evaluate = evaluate_twice
    verification.Verification.checks = lambda self: {"resuming is bitwise": self.resuming_is_bitwise}


@pytest.mark.slow
def test_verify_finds_metric_changed_by_resume(runs, tmp_path):
    output, exit_code = in_a_fork(keep_an_unsaved_mean, runs, tmp_path / "out")
    assert results(output) == {"resuming is bitwise": "FAIL"} and exit_code == 1, output
    figure = "0 of 148 weights and moments differ after 6 steps, but logged metrics differ: ema/loss\n"
    assert output.endswith(figure), output


def test_undefined_metrics_and_zeros_are_compared():
    """A fork may log a metric that is 0, or a mean over no tokens."""
    equal = [(0.0, 0.0), (None, math.nan), (2.0, 2.0)]
    assert [verification.relative_error(*pair) for pair in equal] == [0, 0, 0]
    assert verification.relative_error(None, 1.0) == verification.relative_error(1.0, math.nan) == math.inf
    assert verification.relative_error(3.0, 2.0) == 0.5 and verification.relative_error(0.1, 0.0) > 1


@pytest.mark.parametrize(
    ("order", "holds"),
    [
        (lambda positions: positions % 9, True),
        (lambda positions: 0 * positions, False),
        (lambda positions: positions % 9 + 9 * (positions // 9 % 5), True),  # windows that are moved
        (lambda positions: 9 * (1 + positions // 9 % 4), False),
        (lambda positions: positions % 9 * 9, False),
    ],
)
def test_permutation_is_of_the_order_of_the_run(order, holds, monkeypatch):
    """Not of an order that the check builds: a curriculum may read sample 0 alone."""
    batches = GlobalBatches(9, BatchSizes(4), 0, num_offsets=5)
    monkeypatch.setattr(batches, "sample_indices", order)
    corpus = SimpleNamespace(train=range(9), quotas=None, global_batches=lambda config: batches)
    run = SimpleNamespace(corpus=corpus, config=None, num_processes=2)
    passed, figure = verification.Verification.order_is_a_permutation(run)
    assert passed is holds, figure
    assert holds or re.match(
        "sample 0 is read 9 times, and another 0 times, among the first 9 |sample 45 is read, but", figure
    )


@pytest.mark.parametrize("reads_twice", [False, True])
def test_permutation_of_a_mixture_is_of_each_corpus(reads_twice, monkeypatch):
    """An epoch of 5 or 700 samples ends within a block, which is in random order."""
    batches = MixedBatches([5, 700], [250, 750], BatchSizes(8), seed=0)
    drawn = batches.sample_indices
    if reads_twice:  # sample 7 in place of sample 8
        monkeypatch.setattr(batches, "sample_indices", lambda at: np.where(drawn(at) == 8, 7, drawn(at)))
    mixture = ConcatDataset([range(5), range(700)])
    corpus = SimpleNamespace(train=mixture, quotas=[250, 750], global_batches=lambda config: batches)
    run = SimpleNamespace(corpus=corpus, config=None, num_processes=2)
    passed, figure = verification.Verification.order_is_a_permutation(run)
    assert passed is not reads_twice, figure
    assert figure.startswith("sample 7 is read 2 times, and another 0") if reads_twice else "epochs of 5, 700" in figure


def test_gradient_that_float64_cannot_check_is_skipped(monkeypatch):
    gradient_errors = Mock(side_effect=NoFloat64("RuntimeError: float != double"))
    monkeypatch.setattr(verification, "gradient_errors", gradient_errors)
    models = PretrainedModels(LoadedModel(None, "the initial model", None), None)
    run = SimpleNamespace(models=models, config=None, corpus=Mock(), accelerator=None)
    passed, reason = verification.Verification.equals_autograd(run)
    assert passed is None and reason.startswith("the model does not run in float64")
    assert reason.endswith(": RuntimeError: float != double")
    assert gradient_errors.call_args.args[-1] == "the initial model"


STEPS = SimpleNamespace(config=SimpleNamespace(steps=6))


def test_tensor_of_one_run_alone_is_a_difference():
    both, one = ({name: torch.zeros(2) for name in names} for names in ("ab", "a"))
    for runs in ((both, one), (one, both)):
        result = verification.Verification.same_bits(STEPS, *(verification.Trained([], [], state) for state in runs))
        assert result == (False, "1 of 2 weights and moments differ after 6 steps; the first one is b")


@pytest.mark.parametrize("gradient", [[], [torch.zeros(3)]], ids=["not recorded", "zero"])
def test_gradients_that_say_nothing_are_no_agreement(gradient):
    """As of an optimizer of a fork whose updates torch does not see."""
    trained = verification.Trained([{"train/loss": 1.0}], gradient, {})
    verify = SimpleNamespace(uninterrupted=trained, train_without_ddp=lambda: trained, tolerance=1e-4)
    passed, reason = verification.Verification.equals_training_without_ddp(verify, all_reduce=False)
    assert passed is False and reason.startswith("the gradient of the first update is 0 or was not seen")


def test_bad_settings_are_refused(runs):
    words = [*TINY_STORIES, "--out_dir", str(runs), "--model.n_heads", "5"]
    done = forked.run("verify.py", words, 2, environment())
    assert done.returncode == 1 and done.stderr.count("verify.py: error:") == 1


def test_refused_data_or_model_leaves_no_folder(runs, tmp_path):
    """Of the data and other models only their files can tell that they do not fit."""
    words = [*TINY_STORIES, "--out_dir", str(runs / "new"), "--teacher.path", str(tmp_path / "absent")]
    done = forked.run("verify.py", words, 0, environment())
    assert done.returncode == 2 and "verify.py: error: teacher.path: " in done.stderr
    assert not (runs / "new").exists()


def shorten_rows():
    """A fork with rows of half the length, which counts twice the tokens that it trains on."""
    arrays = StoriesDataset.arrays
    StoriesDataset.arrays = lambda self, indices: {n: rows[:, :64] for n, rows in arrays(self, indices).items()}
    name = "gradient = hand-written all-reduce"
    verification.Verification.checks = lambda self: {name: partial(self.equals_training_without_ddp, all_reduce=True)}


def test_verify_finds_rows_of_wrong_length(runs, tmp_path):
    output, exit_code = in_a_fork(shorten_rows, runs, tmp_path / "out")
    assert "train/tokens within 1.0e+00" in output and exit_code == 1, output


def shorten_first_rows():
    """A fork with half of each sequence in the first three steps, cut and counted where forking.md says."""
    count = BatchSizes.tokens_before
    BatchSizes.length = lambda self, step: 64 if step < 3 else None
    BatchSizes.tokens_before = lambda self, step, seq_len: (
        count(self, step, seq_len) - 64 * self.sequences_before(min(step, 3))
    )


@pytest.mark.slow
def test_verify_passes_with_shorter_sequences_in_first_steps(runs, tmp_path):
    output, exit_code = in_a_fork(shorten_first_rows, runs, tmp_path / "out", "--verify_steps", "4")
    words = ["SKIP" if name.startswith("replicas") else "PASS" for name in CHECKS]
    assert results(output) == dict(zip(CHECKS, words, strict=True)) and exit_code == 0, output


def keep_an_arbitrary_basis():
    """An optimizer whose state is not unique, such as eigenvectors, whose sign is arbitrary."""
    sign = 1

    class Rotating(torch.optim.SGD):
        def step(self, closure=None):
            nonlocal sign
            sign = -sign
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["basis"] = torch.full_like(parameter, sign)
            super().step(closure)

    train.build_optimizer = verification.build_optimizer = lambda model, *_: Rotating(model.parameters(), 0.1)
    check = partial(verification.Verification.equals_training_without_ddp, all_reduce=True)
    verification.Verification.checks = lambda self: {"gradient = hand-written all-reduce": partial(check, self)}


def test_verify_compares_gradients_not_updates(runs, tmp_path):
    output, exit_code = in_a_fork(keep_an_arbitrary_basis, runs, tmp_path / "out")
    assert results(output) == {"gradient = hand-written all-reduce": "PASS"} and exit_code == 0, output


def change_late():
    """An optimizer that counts its updates and changes at the 10th."""

    class Later(torch.optim.SGD):
        _updates = 0

        def step(self, closure=None):
            self._updates += 1
            if self._updates >= 10:
                self.param_groups[0]["lr"] /= 2
            super().step(closure)

    train.build_optimizer = verification.build_optimizer = lambda model, *_: Later(model.parameters(), 0.1)
    verification.Verification.checks = lambda self: {"resuming is bitwise": self.resuming_is_bitwise}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "result"), [((), "PASS"), (("--verify_steps", "12"), "FAIL")])
def test_verify_steps_finds_later_fault(words, result, runs, tmp_path):
    output, _ = in_a_fork(change_late, runs, tmp_path / "out", *words)
    assert results(output) == {"resuming is bitwise": result}, output


@pytest.mark.parametrize(
    ("steps", "message"),
    [("1", "verify_steps: 1 leaves no step"), ("x", "error: verify_steps: x must be a positive integer")],
)
def test_wrong_number_of_verify_steps_is_refused(steps, message, runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", verify_command(runs, "--verify_steps", steps))
    assert scripts.run_script("verify", parse_short_run) == 2
    assert message in capsys.readouterr().err and not runs.exists()
