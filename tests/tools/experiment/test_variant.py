"""Variants: what their digest covers, what they cost, and longer and larger ones."""

import io
import json
import os
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from model.config import GPTConfig
from model.gpt import GPTModel
from model.hf import to_transformers
from runtime.config.errors import ConfigError, RunError
from runtime.config.parser import parse_config
from tests.conftest import ROOT, TINY_STORIES
from tests.tools.experiment.conftest import FAKE
from tools.experiment import change, evaluator, runs, sandbox, variant_program
from tools.experiment.change import Checkouts, parse_idea
from tools.experiment.variant import (
    Recipe,
    Variant,
    check_targets,
    given_settings,
    read_config,
    scale_parameters,
    scale_steps,
)
from tools.jobs.launch import Launch
from trainer.checks.model import count_flops
from trainer.run.directory import Run

SETTINGS = {"name": "x", "steps": 400, "seq_len": 8, "global_batch_size": 4, "micro_batch_size": 4}
SETTINGS |= {"data.source": "text", "optimizer.lr": 1.0, "evaluation.num_samples": 9, "data.num_samples": 100}
SETTINGS |= {"model.d_model": 64, "model.d_ff": 64, "model.n_heads": 4, "model.n_kv_heads": None}
SETTINGS |= {"schedule.name": "wsd", "schedule.warmup_steps": 40, "schedule.decay_steps": None}
SETTINGS |= {"schedule.batch_warmup_from": None, "schedule.batch_warmup_steps": None}
ONE_PROCESS = Launch()


def make_variant(launch=ONE_PROCESS, **changes):
    return Variant(ROOT, "a", False, launch, {}, SETTINGS, 1000, 6000.0, ("a",)).changed(changes)


# Digests


def test_digest_covers_code_inputs_and_settings():
    variant = make_variant()
    for changes in ({"code_hash": "b"}, {"inputs": ("b",)}, {"settings": SETTINGS | {"steps": 5}}):
        assert replace(variant, **changes).digest != variant.digest
    others = {"tracking.wandb": "online", "checkpoint.every": 3, "seed": 3, "out_dir": "y", "resume": "never"}
    assert variant.changed(others).digest == variant.digest


def test_digest_covers_version_of_torch(monkeypatch):
    """An upgrade changes the bits of losses, so runs from before it are not those of the same variant."""
    before = make_variant().digest
    monkeypatch.setattr("tools.experiment.variant.version", lambda name: "1.0.0")
    assert make_variant().digest != before


def test_digest_covers_launch(tmp_path):
    script = tmp_path / "launch.sh"
    script.write_text("fp32")
    launches = [Launch(), Launch(precision="bf16"), Launch(processes=2), Launch(("bash", str(script)), None, None)]
    digests = [make_variant(launch).digest for launch in launches]
    script.write_text("bf16")
    digests.append(make_variant(launches[-1]).digest)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("setting", ["init_from", "branch_from", "teacher.path"])
@pytest.mark.parametrize("file", ["model.safetensors", "checkpoints/step-00000004/manifest.json", "manifest.json"])
def test_changed_initial_weights_are_another_variant(setting, file, experiments):
    weights = experiments.root / "base" / file
    weights.parent.mkdir(parents=True)
    weights.write_text("before")
    recipe = Recipe(None, [f"--{setting}", str(experiments.root / "base")], Launch(), Checkouts())
    before = recipe.variant()
    assert recipe.variant().digest == before.digest
    weights.write_text("after")
    assert recipe.variant().digest != before.digest


def test_changed_corpus_is_another_variant(experiments):
    """By its content, wherever and from whatever files it was prepared."""
    metadata = experiments.root / "corpus" / "metadata.json"
    metadata.parent.mkdir()
    digests = []
    for words in (["--data.path", str(metadata.parent)], ["--data.mix", f"{{{metadata.parent}: 1}}"]):
        for content, source in (("before", "a"), ("after", "a"), ("after", "b")):
            metadata.write_text(json.dumps({"hash": content, "request": {"source": source}}))
            digests.append(Recipe(None, words, Launch(), Checkouts()).variant().digest)
    assert len({*digests}) == 4 and digests[1::3] == digests[2::3]


# Resolving


def test_variants_of_one_code_are_resolved_together_and_each_has_its_result(experiments, patches):
    """In the order of the ideas."""
    head = patches.git("rev-parse", "HEAD").strip()
    one, other = patches.effect("one", 1, 0.7), patches.write("other.patch", "# 1\n", "# 1\nx = 1\n")
    texts = ["--steps 50", one, "--model.nope 1", "--model.crashes true", other, "--steps 70"]
    ideas = [parse_idea(text) for text in texts]
    with Checkouts() as checkouts:
        stacks = [[], *([idea] for idea in ideas), [ideas[0], ideas[1]], [ideas[1], ideas[4]]]
        found = Recipe(head, ["--steps", "60"], Launch(), checkouts).variants(stacks)
    baseline, short, patched, wrong, crash, changed, longer, both, conflict = found
    assert [one.settings["steps"] for one in (baseline, short, patched, changed, longer, both)] == [
        60,
        50,
        60,
        60,
        70,
        50,
    ]
    assert isinstance(wrong, ConfigError) and str(wrong) == "--model.nope is not a setting; --help lists all"
    assert isinstance(crash, RunError) and "does not start: ValueError" in str(crash)
    assert isinstance(conflict, ConfigError) and "git apply fails" in str(conflict)
    assert both.settings["model.effect_one"] == 0.7 and (baseline.tokens, baseline.flops) == (480, 480 * 6000)
    assert [one.changes_code for one in (baseline, short, patched, changed)] == [False, False, True, True]
    assert baseline.code_hash == short.code_hash and len({one.code_hash for one in (short, patched, changed)}) == 3


def test_check_of_an_idea_sees_no_experiment(experiments, patches, monkeypatch):
    """Its file has the seed of the test data, and the key of the results."""
    experiments.race("--model.effect_b 0.8")
    hidden = []

    def command(program, folders, *_, **__):
        hidden.extend(folders if "resolve" in program else [])
        return list(program)

    monkeypatch.setattr(sandbox, "problem", lambda: "")
    monkeypatch.setattr(sandbox, "command", command)
    experiments.race(patches.effect("a", 1, 0.7))
    assert experiments.folder() in hidden


def test_changed_code_has_a_network_only_where_a_run_needs_it():
    alone = Launch((sys.executable,))
    assert not make_variant(alone, **{"tracking.wandb": "disabled"}).needs_network
    for launch, settings in (
        (Launch(("torchrun",)), {"tracking.wandb": "disabled"}),
        (alone, {"tracking.wandb": "offline"}),
        (alone, {"tracking.wandb": "disabled", "init_from": "gpt2"}),
        (alone, {"tracking.wandb": "disabled", "teacher.path": "gpt2"}),
    ):
        assert make_variant(launch, **settings).needs_network


def test_whatever_an_idea_raises_others_have_their_results(experiments, patches):
    """A path with a zero byte, and a name of a file that is no text."""
    (experiments.root / "kernels").mkdir()
    for name in (b"__init__.py", b"\xff.cu"):
        Path(os.fsdecode(os.fsencode(experiments.root / "kernels") + b"/" + name)).write_text("")
    experiments.root.joinpath("train.py").write_text(FAKE + "import kernels\n")
    patches.git("checkout", "--quiet", "-b", "names")
    patches.git("add", ".")
    patches.git("commit", "--quiet", "--message", "x")
    patches.git("checkout", "--quiet", "main")
    nul = patches.write("nul.patch", "# 1\n", "# 1\nx = 1\n", header="Settings: --config a\0b\n\n")
    ideas = [parse_idea(text) for text in ("--steps 50", nul, "names", "names --steps 5")]
    with Checkouts() as checkouts:
        found = Recipe(change.head_commit(), [], Launch(), checkouts).variants([[], *([idea] for idea in ideas)])
    baseline, short, *failed = found
    assert (baseline.steps, short.steps) == (100, 50)
    assert [type(error) for error in failed] == [RunError] * 3
    assert all(str(error).startswith("does not start: ") for error in failed), failed


def test_stop_signal_is_seen_between_checkouts(monkeypatch):
    merged = []
    monkeypatch.setattr(change, "merge", lambda base, stack: merged.append(stack))
    recipe = Recipe(None, [], Launch(), Checkouts(), is_stopped=lambda: len(merged) == 2)
    with pytest.raises(SystemExit):
        recipe.variants([()] * 9)
    assert len(merged) == 2


def prints(result):
    """Return a function that prints what looks like answers, as Python and as a library in C do; it returns these."""

    def function(*_):
        print('{"debug": "the model is built"}\n0 {"debug": 1}')
        os.write(1, b'{"loss": 0}\n')
        os.system("""echo '0 {"loss": 0}'""")
        return result

    return function


@pytest.mark.parametrize("program", ["resolve", "evaluate"])
def test_prints_of_code_are_no_answers(program, monkeypatch, tmp_path):
    """Neither those of a model while it is checked, nor those of the data of the baseline in an evaluation."""
    monkeypatch.setattr(variant_program, "describe", prints({"warnings": []}))
    monkeypatch.setattr(evaluator, "evaluate_code", lambda _, requests, __: map(prints({"warnings": []}), requests))
    if not (child := os.fork()):
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT), descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
        sys.stdin = io.StringIO("".join(f'{number} {{"code": "x"}}\n' for number in (3, 4, 5)))
        sys.path[0], sys.argv = str(ROOT), ["evaluator.py", "x"]
        try:
            variant_program.resolve(str(ROOT)) if program == "resolve" else evaluator.main()
        except Exception:
            traceback.print_exc()
        print("the reason", file=sys.stderr, flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    answers = (tmp_path / "stdout").read_text().splitlines()
    assert answers == [f'{number} {{"warnings": []}}' for number in (3, 4, 5)]
    assert (tmp_path / "stderr").read_text().endswith("\nthe reason\n"), "the last line is what is reported"


def test_tokens_of_a_run_count_all_processes():
    """An unset global batch is a micro-batch of each."""
    variant = make_variant(Launch(processes=2), global_batch_size=None)
    assert variant.tokens == 400 * 2 * 4 * 8 and variant.flops == variant.tokens * 6000


def test_tokens_of_a_run_count_the_smaller_batches_of_a_warmup():
    """Two sequences in each of the first 100 steps, then four."""
    warmup = {"schedule.batch_warmup_from": 2, "schedule.batch_warmup_steps": 100}
    assert make_variant(**warmup).tokens == (100 * 2 + 300 * 4) * 8


def test_given_settings(tmp_path):
    file, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text("steps: 3\nmodel: {d_ff: 4, bias: true}\noptimizer.betas: [0.9, 0.99]\nname: null\n")
    other.write_text("steps: 5")
    words = [
        "--model.d_ff",
        "7",
        "--config",
        str(file),
        f"--config={other}",
        "--model.bias=null",
        "--data.mix",
        "{a: 1}",
    ]
    assert given_settings(words, ROOT, {}) == {
        "model.d_ff": "4", "steps": "5", "model.bias": None, "optimizer.betas": ["0.9", "0.99"], "name": None,
        "data.mix": {"a": "1"},
    }  # fmt: skip
    for wrong, message in (("x", "x: not an option"), ("--x", "x: has no value"), ("--config=/no", "No such file")):
        with pytest.raises(ConfigError, match=message):
            given_settings([wrong], ROOT, {})
    for text, message in (("- 1", "no line has the form"), ("a: [", "line 1"), ("a: 1\na: 2", "a is set twice")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(str(file), ROOT, {})


@pytest.mark.parametrize("name", ["seq_len", "evaluation.num_samples", "data.source", "data.new"])
def test_settings_that_change_the_targets_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: 3 changes which tokens are predicted"):
        check_targets(make_variant(), make_variant(**{name: 3}))
    for allowed in ("data.num_samples", "data.num_workers", "data.crops", "steps"):
        check_targets(make_variant(), make_variant(**{allowed: 3}))


def test_model_of_another_kind_is_refused_before_it_is_trained(monkeypatch):
    monkeypatch.setattr(GPTModel, "predicts_next_token", False)
    with pytest.raises(ConfigError, match="predicts_next_token: .*tools.compare"):
        variant_program.describe(TINY_STORIES[1])


# Counted work


def test_work_is_counted_whatever_asks_for_it(monkeypatch):
    """Forwards of any caller that keep a graph, and updates of the optimizer with the most."""
    config = GPTConfig(vocab_size=16, max_position_embeddings=8, n_layers=1, n_heads=1, d_model=8, d_ff=8)
    monkeypatch.setattr(GPTModel, "forward", GPTModel.forward)  # is restored afterwards
    model = GPTModel(config)
    count = variant_program.count_work()
    tokens = torch.ones(2, 8, dtype=torch.int64)
    optimizers = [torch.optim.SGD([weight], 0.1) for weight in model.parameters()]
    for _ in range(3):
        model(tokens)[0].sum().backward()
        model(input_ids=tokens)
        optimizers[0].step()
    optimizers[1].step()
    with torch.no_grad():
        model(tokens)
    assert count() == {"tokens": 6 * 16, "updates": 3}


def test_what_is_counted_of_a_run(tmp_path):
    """Of all processes; the newest checkpoint; without what was counted of one of several sessions."""
    run = Run(tmp_path)
    for step, size in ((2, 9), (10, 3)):
        for rank in (1, 2):
            folder = run.checkpoints / f"step-{step:08}"
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {f"model.{rank}": np.ones((size, rank)), f"optimizer.{rank}": np.ones(99)}
            save_file(tensors, folder / f"shard-{rank:05}-model.safetensors")
    for rank in (0, 1):
        (tmp_path / f"counts.{rank}").write_text('{"tokens": 40, "updates": 5}\n')
    assert runs.count_work(run) == {"parameters": 3 + 6, "forward_tokens": 80, "updates": 5}
    for rank in (0, 1):
        (tmp_path / f"counts.{rank}").write_text('{"tokens": 40, "updates": 5}\n' * 2)
    assert runs.count_work(run) == {"parameters": 9}


def test_costs_are_those_of_the_initial_model(tmp_path):
    """Its sizes are not those of the config file."""
    initial = GPTModel(GPTConfig(vocab_size=16, max_position_embeddings=8, n_layers=3, n_heads=2, d_model=24, d_ff=40))
    to_transformers(initial).save_pretrained(tmp_path / "initial")
    settings = yaml.safe_load((ROOT / "tests" / "support" / "tiny_random.yaml").read_text())
    settings |= {"init_from": str(tmp_path / "initial"), "model": {"dropout": 0.1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    found = variant_program.describe(str(tmp_path / "config.yaml"))
    assert found["parameters"] == initial.num_parameters()
    assert found["flops_per_token"] == count_flops(initial.train(), 8) and not found["warnings"]


def test_model_whose_flops_cannot_be_counted_has_a_warning(monkeypatch):
    """Its own estimate counts in their place, and the race starts."""
    forward = GPTModel.forward

    def refuse_short(self, input_ids, **named):
        if input_ids.shape[1] < 256:
            raise ValueError("input_ids: fewer than 256 tokens")
        return forward(self, input_ids, **named)

    monkeypatch.setattr(GPTModel, "forward", refuse_short)
    config = parse_config([*TINY_STORIES, "--seq_len", "256", "--model.max_position_embeddings", "256"])
    config = config.replace(model=config.model.replace(vocab_size=16))
    flops, [warning] = variant_program.flops_per_token(config)
    assert flops == GPTModel(config.model).flops_per_token(128)
    assert warning.startswith("FLOPs cannot be counted on 128 positions, so its flops_per_token is taken instead")
    assert warning.endswith(": ValueError: input_ids: fewer than 256 tokens")


# Scaling


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 2), (12, 4, 2), (16, 4, 2), (4, None, 2), (4, 1, 4)])
def test_scale_parameters_keeps_queries_per_key(heads, kv_heads, size):
    baseline = make_variant(**{"model.n_heads": heads, "model.n_kv_heads": kv_heads})
    larger = scale_parameters(baseline, size, baseline).settings
    kv = larger["model.n_kv_heads"]
    assert (kv is None) == (kv_heads is None) and larger["model.n_heads"] % (kv or 1) == 0
    assert kv is None or larger["model.n_heads"] // kv == heads // kv_heads
    assert larger["model.n_heads"] == pytest.approx(heads * size**0.5, abs=2)
    assert larger["model.d_model"] // larger["model.n_heads"] == 64 // heads
    assert larger["model.d_ff"] == pytest.approx(64 * size**0.5, abs=4) and larger["model.d_ff"] % 8 == 0
    assert larger["optimizer.lr"] == pytest.approx(1 / size**0.5), "inversely proportional to the width"
    assert larger["steps"] == 400 * size


@pytest.mark.parametrize(
    ("size", "idea", "expected"),
    [
        (2, {}, (96, 6, None)),
        (3, {}, (112, 7, None)),
        (2, {"n_kv_heads": 2}, (96, 6, 3)),
        (2, {"n_kv_heads": 1}, "model.n_kv_heads: 1 cannot grow 1.5 times"),
        (2, {"n_heads": 2}, (96, 3, None)),
        (3, {"n_heads": 2}, "model.n_heads: 2 cannot grow 1.75 times"),
        (3, {"n_heads": 1}, "model.n_heads: 1 cannot grow 1.75 times"),
        (4, {"n_heads": 1}, (128, 2, None)),
        (4, {"n_heads": 6, "head_dim": 16}, (128, 12, None)),
        (2, {"n_heads": 6, "head_dim": 16}, (96, 9, None)),
        (2, {"d_model": 96}, (144, 6, None)),
        (2, {"d_model": 96, "n_heads": 12}, (144, 18, None)),
        (3, {"d_model": 66, "n_heads": 6, "head_dim": 11}, "model.d_model: 66 cannot grow 1.75 times"),
    ],
)
def test_scale_parameters_widens_all_variants_as_the_baseline(size, idea, expected):
    """The baseline is 64 wide with 4 heads of 16; heads of all variants keep their size."""
    baseline = make_variant(**{"model.head_dim": None})
    variant = baseline.changed({f"model.{name}": value for name, value in idea.items()})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            scale_parameters(variant, size, baseline)
        return
    larger = {
        name: scale_parameters(variant, size, baseline).settings[f"model.{name}"]
        for name in ("d_model", "n_heads", "n_kv_heads", "head_dim")
    }
    assert (larger["d_model"], larger["n_heads"], larger["n_kv_heads"]) == expected
    before = GPTConfig(vocab_size=16, **{"d_model": 64, "n_heads": 4} | idea)
    assert GPTConfig(vocab_size=16, **larger).resolved_head_dim == before.resolved_head_dim


def test_scale_parameters_of_a_width_that_is_no_multiple_of_the_heads():
    baseline = make_variant(**{"model.d_model": 60, "model.n_heads": 8, "model.head_dim": 16})
    larger = scale_parameters(baseline, 2, baseline).settings
    assert (larger["model.d_model"], larger["model.n_heads"], larger["model.head_dim"]) == (77, 11, 16)


def test_scale_steps_scales_schedule_samples_and_tokens():
    stories = {"data.source": "stories", "data.num_samples": 1000, "schedule.decay_steps": 80}
    variant = make_variant(**stories)
    longer = scale_steps(variant, 2.5)
    names = ("steps", "schedule.warmup_steps", "schedule.decay_steps", "data.num_samples")
    assert [longer.settings[name] for name in names] == [longer.given[name] for name in names] == [1000, 100, 200, 2500]
    assert longer.tokens == 2.5 * variant.tokens and longer.steps == 1000
    assert "data.num_samples" not in scale_steps(make_variant(), 2.5).given, "a text has as many as it has"
    assert scale_steps(variant, 1) == variant


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule.decay_steps": 160},
        {"schedule.name": "constant", "schedule.decay_steps": 200},
        {"schedule.batch_warmup_from": 1, "schedule.batch_warmup_steps": 200},
        {"schedule.name": "linear", "steps": 600, "schedule.warmup_steps": 100, "schedule.decay_steps": 500},
        {"schedule.name": "linear", "global_batch_size": None, "data.source": "random", "data.num_samples": 9},
    ],
)
def test_scale_steps_keeps_schedules_valid(changes):
    variant = make_variant(**changes)
    for factor in (0.01, 0.5, 0.5**0.5, 2):
        scaled = scale_steps(variant, factor).settings
        assert scaled["steps"] == max(1, round(factor * variant.settings["steps"]))
        assert scaled["schedule.warmup_steps"] + (scaled["schedule.decay_steps"] or 0) <= scaled["steps"], scaled
        assert (scaled.get("schedule.batch_warmup_steps") or 0) <= scaled["steps"]


def test_checks_are_those_of_the_baseline(monkeypatch):
    """A variant cannot change the checks that it must pass."""
    monkeypatch.setitem(sys.modules, "trainer.checks", None)  # is restored afterwards
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(variant_program, "answer_stream", io.StringIO)
    assert variant_program.resolve(str(ROOT)) == 0
    (folder,) = sys.modules["trainer.checks"].__path__
    assert (Path(folder) / "verification.py").samefile(ROOT / "trainer" / "checks" / "verification.py")
