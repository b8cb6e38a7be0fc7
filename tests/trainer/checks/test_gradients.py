"""A wrong backward is found anywhere in the model, and a correct one passes."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import model.loss
import trainer.prepare_model
from data.corpus import load_corpus
from model import gpt
from runtime.config.parser import parse_config
from tests.conftest import TINY_STORIES, thinned
from trainer import cpu_kernels
from trainer.checks.gradients import NoFloat64, gradient_errors

QWEN3 = "--model.position rope --model.norm rmsnorm --model.mlp swiglu --model.qk_norm true --model.bias false"
KINDS = [
    "",
    QWEN3,
    f"{QWEN3} --model.n_kv_heads 1 --model.logit_softcap 2",
    "--model.tie_embeddings true --model.zero_init true --model.window 96",
    "--data.source random --model.vocab_size 11 --seq_len 2",
]


def errors_of(*words, precision="no", teacher=None, make_initial=lambda config: None):
    config = parse_config([*TINY_STORIES, *words])
    corpus = load_corpus(config)
    config = corpus.fill_in(config)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if precision == "bf16" else nullcontext
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, mixed_precision=precision, autocast=autocast
    )
    teacher_config = None if teacher is None else config.model.replace(**teacher)
    return gradient_errors(config, corpus.train, accelerator, teacher_config, make_initial(config.model))


def wrong(errors):
    """Return the name of the worst gradient if it is wrong, else an empty string."""
    assert not any(map(math.isnan, errors.values()))
    worst = max(errors, key=errors.get)
    return worst if errors[worst] > 1e-3 else ""


@pytest.mark.parametrize("words", KINDS)
def test_correct_gradient_passes(words):
    errors = errors_of(*words.split())
    assert max(errors.values()) < 1e-5
    assert len({name.partition(", ")[2] for name in errors}) == 3


@pytest.mark.parametrize("words", KINDS)
def test_bf16_error_matches_its_precision(words):
    assert 1e-4 < max(errors_of(*words.split(), precision="bf16").values()) < 5e-2


@pytest.mark.slow
def test_compiled_gradient_passes():
    assert max(errors_of("--compile", "true").values()) < 1e-5


def change_gradients(function, change, monkeypatch):
    """Pass the gradients that a torch.autograd.Function returns through `change`."""
    backward = function.backward
    monkeypatch.setattr(function, "backward", staticmethod(lambda ctx, *given: change(*backward(ctx, *given))))


def test_wrong_sign_in_attention_is_found(monkeypatch):
    change_gradients(cpu_kernels.EagerAttention, lambda q, k, v, _: (q, -k, v, None), monkeypatch)
    errors = errors_of(precision="bf16")
    worst = wrong(errors)
    assert "attention.k_proj.weight, " in worst and errors[worst] > 0.2


def test_wrong_product_gradient_is_found(monkeypatch):
    change_gradients(cpu_kernels.OneDNNLinear, lambda x, weight, bias: (x, 2 * weight, bias), monkeypatch)
    monkeypatch.setattr(cpu_kernels, "mkl_is_slow", lambda: False)  # it is checked on any processor
    assert ".weight, with " in wrong(errors_of())


def squared_loss(logits_NV, targets_N, config):
    """The loss of a fork: cross-entropy and a term in the logits."""
    cross_entropy = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    return cross_entropy + 1e-3 * logits_NV.masked_fill((targets_N == -100)[:, None], 0).square().sum(), {}


def test_forked_loss_passes(monkeypatch):
    """One function defines the loss on all paths."""
    monkeypatch.setattr(model.loss, "loss_of_logits", squared_loss)
    assert wrong(errors_of()) == ""


def drop_squares_if_chunked(monkeypatch):
    """Let the loss be plain cross-entropy where chunks are a setting."""
    cross_entropy, compute = model.loss.loss_of_logits, model.loss.NextTokenLoss.__call__

    def compute_loss(self, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(model.loss, "loss_of_logits", cross_entropy if self.chunked else squared_loss)
            return compute(self, *arguments)

    monkeypatch.setattr(model.loss.NextTokenLoss, "__call__", compute_loss)


def test_missing_derivative_of_chunked_loss_is_found(monkeypatch):
    drop_squares_if_chunked(monkeypatch)
    assert wrong(errors_of()).endswith(", with a chunked loss")


def test_settings_that_a_fork_refuses_are_skipped(monkeypatch):
    drop_squares_if_chunked(monkeypatch)
    problems = trainer.prepare_model.TrainConfig.problems
    refuse = lambda self, *args, **named: problems(self, *args, **named) + ["no"] * bool(self.chunked_loss)  # noqa: E731
    monkeypatch.setattr(trainer.prepare_model.TrainConfig, "problems", refuse)
    assert not wrong(errors_of())


def test_wrong_recomputation_is_found(monkeypatch):
    def recomputed(forward):
        return lambda x, *inputs: trainer.prepare_model.checkpoint(forward, 1.01 * x, *inputs, use_reentrant=False)

    monkeypatch.setattr(trainer.prepare_model, "checkpointed", recomputed)
    assert wrong(errors_of()).endswith(", with recomputed blocks")


def test_model_without_float64_is_not_compared(monkeypatch):
    forward = gpt.MLP.forward
    monkeypatch.setattr(gpt.MLP, "forward", lambda self, x: forward(self, x.float()))
    with pytest.raises(NoFloat64, match="RuntimeError: .* dtype"):
        errors_of()


@pytest.mark.parametrize("block", [48, 5])
def test_model_may_refuse_shorter_sequences(block, monkeypatch):
    """One that computes in blocks of tokens is checked on sequences of the run, which it must accept."""
    embed = gpt.GPTModel.embed

    def embed_blocks(self, input_ids, positions):
        return embed(self, input_ids.unflatten(1, (-1, block)).flatten(1), positions)

    monkeypatch.setattr(gpt.GPTModel, "embed", embed_blocks)
    with nullcontext() if block == 48 else pytest.raises(RuntimeError, match="unflatten"):
        assert max(errors_of("--seq_len", "96").values()) < 1e-5


def make_large(config):
    """Make a model of three layers with weights that no random ones reach."""
    large = gpt.GPTModel(config.replace(n_layers=3))
    large.blocks[1].mlp.down_proj.weight.data.mul_(1e4)
    return large


def test_gradient_is_checked_at_the_initial_weights(monkeypatch):
    """A backward that is wrong where an activation is large."""

    def saturated(self, x):
        if (y := forward(self, x)).dtype == torch.float32:
            y.register_hook(lambda grad: grad * (y.detach().abs() < 30))
        return y

    forward = gpt.MLP.forward
    assert not wrong(errors_of(make_initial=make_large))
    monkeypatch.setattr(gpt.MLP, "forward", saturated)
    assert not wrong(errors_of())
    assert wrong(errors_of(make_initial=make_large))


TEACHER = {"n_layers": 1, "d_model": 24}
DISTILLATION = "the objective, against the definition of distillation"
LEARN = "--teacher.path any --teacher.weight 0.75 --teacher.temperature 2".split()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("teacher", [{}, TEACHER], ids=["same sizes", "others"])
@pytest.mark.parametrize(
    "words", thinned(["", "--teacher.weight 0", "--model.logit_softcap 2", "--teacher.weight 1"], 2)
)
def test_gradient_with_teacher_passes(words, teacher, precision):
    errors = errors_of(*LEARN, *words.split(), teacher=teacher, precision=precision)
    assert errors.pop(DISTILLATION) < 1e-12
    assert max(errors.values()) < (5e-2 if precision == "bf16" else 1e-5)


def reverse_rows(monkeypatch):
    """Let each sequence learn from what the teacher predicts for another one."""
    targets = gpt.Teacher.targets
    monkeypatch.setattr(gpt.Teacher, "targets", lambda self, input_ids, *rest: targets(self, input_ids.flip(0), *rest))


def drop_teacher(monkeypatch):
    objective = model.loss.objective_of_logits
    without = {"teacher_NV": None}
    monkeypatch.setattr(
        model.loss,
        "objective_of_logits",
        lambda logits, targets, config: objective(logits, targets._replace(**without), config),
    )


def swap_weights(monkeypatch):
    """Weigh the teacher with 1 - weight."""
    monkeypatch.setattr(
        trainer.prepare_model, "Teacher", lambda model, weight, *rest: SwappedTeacher(model, weight, *rest)
    )


class SwappedTeacher(gpt.Teacher):
    def targets(self, *inputs):
        return {**super().targets(*inputs), "teacher_weight": 1 - self.weight}


@pytest.mark.parametrize("fault", [reverse_rows, drop_teacher, swap_weights])
def test_wrong_objective_with_teacher_is_found(fault, monkeypatch):
    fault(monkeypatch)
    assert errors_of(*LEARN, teacher=TEACHER)[DISTILLATION] > 0.2


def test_nan_of_distillation_is_found(monkeypatch):
    objective = model.loss.objective_of_logits

    def with_nan(*arguments):
        value, metrics = objective(*arguments)
        return value, {name: metric * (math.nan if name == "teacher_kl" else 1) for name, metric in metrics.items()}

    monkeypatch.setattr(model.loss, "objective_of_logits", with_nan)
    assert math.isnan(errors_of(*LEARN, teacher=TEACHER)[DISTILLATION])


class Cube(torch.autograd.Function):
    """A custom function of a fork."""

    factor = 1

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return Cube.factor * gradient * 3 * ctx.saved_tensors[0] ** 2


@pytest.mark.parametrize("factor", [1, 0.9])
def test_custom_function_is_compared_with_differences(factor, monkeypatch):
    monkeypatch.setattr(Cube, "factor", factor)
    forward = gpt.MLP.forward
    monkeypatch.setattr(gpt.MLP, "forward", lambda self, x: forward(self, x + 0.1 * Cube.apply(x)))
    errors = errors_of()
    assert any("against finite differences, with Cube" in name for name in errors)
    assert bool(wrong(errors)) is (factor != 1), max(errors.values())
