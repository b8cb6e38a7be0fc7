"""The guarantees of docs/reliability.md on GPUs: `make test-gpu`. First what tests/fake_cuda cannot show.

They passed on one H200 with torch 2.11; those for two GPUs have passed on an emulated device only.
This file needs torch, accelerate, transformers and pydantic, but no datasets, wandb or matplotlib.
"""

import shutil

import pytest
import torch
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.corpus import load_corpus
from data.loader import BatchLoader
from model.config import GPTConfig
from model.gpt import GPTModel
from model.loss import NextTokenLoss
from runtime.config.parser import parse_config
from runtime.distributed.state_hash import VALUES_AT_ONCE, digest_tensors
from runtime.distributed.tree_reduce import TreeSum
from tests.conftest import TINY_STORIES, assert_same_bits, assert_same_run, metrics, rewind, tensors, train
from tests.runtime.distributed.test_sharding import launcher_environment
from train import build_state, train_step, warm_up
from trainer.checkpoint.tensor_files import copy_to_cpu
from trainer.gradients import trainable_parameters
from trainer.run.directory import Run
from trainer.run.resolve import PretrainedModels

WITHOUT = "no GPU is here, or hidden without -m cuda"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason=WITHOUT)]
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 8
RUN = [*TINY_STORIES, "--checkpoint.every", 1, "--name", "run"]
EXACT = [*RUN, "--exact", "true"]
# configs/shakespeare_char.yaml on random bytes.
CHAR_11M = f"""--config configs/shakespeare_char.yaml --name run --exact true --steps {STEPS} --data.source random
    --data.num_samples 1000 --model.vocab_size 256 --schedule.name constant --schedule.min_lr_ratio 0
    --schedule.warmup_steps 2 --evaluation.every 0 --evaluation.num_logged_generations 0
    --tracking.wandb disabled""".split()
BATCHES_AND_MUON = ["", "--micro_batch_size 16", "--optimizer.name muon"]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs")


def precision(name):
    return {"ACCELERATE_MIXED_PRECISION": name}


def losses(run):
    return [row["train/loss"] for row in metrics(run)]


def small_model(**settings):
    torch.manual_seed(0)
    shape = dict(vocab_size=97, max_position_embeddings=256, n_layers=2, n_heads=4, d_model=64, d_ff=128, dropout=0.0)
    return GPTModel(GPTConfig(**shape | settings)).to(GPU)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """The directory of an exact run in bf16."""
    out_dir = tmp_path_factory.mktemp("exact")
    train(*EXACT, "--out_dir", out_dir, **precision("bf16"))
    return out_dir / "run"


def goes_on_with_the_same_bits(finished, runs, step, *arguments, **env):
    rewind(shutil.copytree(finished, runs / "again" / "run"), step)
    done = train(*arguments, "--out_dir", runs / "again", **env)
    assert f"resumed at step {step} from" in done.stdout
    assert_same_run(runs / "again" / "run", finished, STEPS)


# Kernels


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
def test_chunked_loss_equals_whole_loss_on_gpu(cast, softcap, monkeypatch):
    monkeypatch.setattr("model.loss.CHUNK_BYTES", {GPU.type: 4 * 301 * 7})
    monkeypatch.setattr("model.loss.MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr("model.loss.TILE_ROWS", {GPU.type: 1})
    labels = torch.randint(301, (3, 40), generator=torch.Generator().manual_seed(2)).to(GPU)
    labels[0, 3:6] = -100
    results = []
    for chunked, compiled in ((False, False), (True, False), (True, True)):
        loss_function = NextTokenLoss(GPTConfig(logit_softcap=softcap), chunked)
        if compiled:
            loss_function.compile()
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(3, 40, 64, generator=generator).to(GPU).requires_grad_()
        weight = torch.randn(301, 64, generator=generator).to(GPU).requires_grad_()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=cast):
            loss, _ = loss_function(hidden, weight, labels, 11.0)
        loss.backward()
        results.append((loss, hidden.grad, weight.grad))
    for whole, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(whole, other, rtol=2e-2 if cast else 1e-4, atol=2e-2 if cast else 1e-5)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
def test_isolated_documents_equal_separate_forward_passes(cast):
    """Forward and backward of flex attention."""
    lengths = [50, 7, 71]
    tokens = torch.randint(97, (1, 128), generator=torch.Generator().manual_seed(4)).to(GPU)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(GPU)
    network, results = small_model(position="rope"), []
    for pieces in ([(tokens, positions)], [(part, None) for part in tokens.split(lengths, dim=1)]):
        network.zero_grad()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=cast):
            logits = torch.cat([network(ids, position_ids=at)[0] for ids, at in pieces], dim=1).float()
        logits.square().sum().backward()
        results.append((logits.detach(), network.blocks[0].attention.k_proj.weight.grad.clone()))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < (2e-2 if cast else 1e-4) * other.norm()


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("with_documents", [False, True])
def test_sliding_window_equals_cpu_mask(cast, with_documents):
    """Flex attention, forward and backward, against a mask on a CPU in float32."""
    tokens = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in (90, 110)]).expand(2, -1) if with_documents else None
    network, results = small_model(position="rope", window=70, n_layers=3), []
    for device in (GPU, torch.device("cpu")):
        network.to(device).zero_grad()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=cast and device == GPU):
            at = None if positions is None else positions.to(device)
            logits = network(tokens.to(device), position_ids=at)[0].float()
        logits.square().sum().backward()
        results.append((logits.detach().cpu(), network.blocks[0].attention.k_proj.weight.grad.cpu()))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < (2e-2 if cast else 1e-4) * other.norm()


def test_causal_attention_runs_as_flash_attention():
    """No other kernel is allowed, forward or backward."""
    network, tokens = small_model(), torch.randint(97, (2, 128)).to(GPU)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast(GPU.type, torch.bfloat16):
        network(tokens, labels=tokens)[1].backward()


@pytest.mark.parametrize("recomputed", ["false", "true"])
@pytest.mark.parametrize("name, rel", [("no", 1e-4), ("bf16", 1e-2)])
def test_compiled_blocks_train_alike(name, rel, recomputed, runs):
    """Without casts, closely enough to detect other dropout masks, which change the loss by a few 0.1%."""
    for compiled in ("false", "true"):
        arguments = [*RUN, "--model.dropout", 0.2, "--compile", compiled, "--out_dir", runs / compiled]
        arguments += ["--activation_checkpointing", recomputed]
        done = train(*arguments, **precision(name))
    assert "compile: each block" in done.stdout
    assert losses(runs / "true" / "run") == pytest.approx(losses(runs / "false" / "run"), rel=rel)


def test_tree_sum_equals_sum_of_two_processes(runs):
    """Eight micro-batches on one process, and as two processes would add them up: four each, then their sums."""
    network = small_model()
    tokens = torch.randint(97, (8, 32), generator=torch.Generator().manual_seed(1)).to(GPU)

    def gradients(rows):
        tree_sum = TreeSum(trainable_parameters(network), 0, 1)
        for row in rows:
            network(row[None], labels=row[None], num_items_in_batch=8 * 31)[1].backward()
            tree_sum.add_micro_batch(len(rows))
        found = [parameter.grad for parameter in network.parameters()]
        network.zero_grad()
        return found

    torch.use_deterministic_algorithms(True)
    whole, halves = gradients(tokens), zip(gradients(tokens[:4]), gradients(tokens[4:]), strict=True)
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, first + second) for one, (first, second) in zip(whole, halves, strict=True))


def test_gpu_digest_equals_cpu_digest(monkeypatch):
    monkeypatch.setitem(VALUES_AT_ONCE, GPU.type, 1000)
    state = small_model().state_dict()
    assert str(digest_tensors(state)) == str(digest_tensors({name: tensor.cpu() for name, tensor in state.items()}))


# Determinism


def test_exact_run_repeats_and_resumes_bitwise(exact, runs):
    train(*EXACT, "--out_dir", runs, **precision("bf16"))
    assert_same_bits(tensors(runs / "run", STEPS), tensors(exact, STEPS))
    goes_on_with_the_same_bits(exact, runs, 5, *EXACT, **precision("bf16"))


def test_fp16_resumes_with_the_same_bits(runs):
    arguments = [*EXACT, "--on_nonfinite", "skip"]
    train(*arguments, "--out_dir", runs, faults="nan:0:3", **precision("fp16"))
    assert metrics(runs / "run")[-1]["train/skipped"] >= 1
    goes_on_with_the_same_bits(runs / "run", runs, 5, *arguments, **precision("fp16"))


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name, settings", [("stories", ""), *(("11M", settings) for settings in BATCHES_AND_MUON)])
def test_cuda_graph_trains_and_resumes_with_same_bits(name, settings, compiled, runs):
    """A run with a graph, and its second half without."""
    arguments = [*(EXACT if name == "stories" else CHAR_11M), *settings.split(), "--compile", compiled]
    arguments += ["--checkpoint.every", 4, "--tracking.log_every", 4]
    for graph in ("false", "true"):
        train(*arguments, "--cuda_graph", graph, "--out_dir", runs / graph, **precision("bf16"))
    without, graphed = (runs / graph / "run" for graph in ("false", "true"))
    assert_same_run(graphed, without, STEPS)
    rewind(graphed, 4)
    done = train(*arguments, "--out_dir", runs / "true", **precision("bf16"))
    assert "resumed at step 4 from" in done.stdout
    assert_same_run(graphed, without, STEPS)


def test_step_does_not_synchronise(runs):
    """The host launches the next step while the device computes this one."""
    config = parse_config([*RUN, "--out_dir", str(runs)])
    corpus = load_corpus(config)
    config = corpus.fill_in(config)
    state = build_state(config, Run.from_config(config), Accelerator(), PretrainedModels(None, None))
    loader = BatchLoader(corpus.train, corpus.global_batches(config), config.micro_batch_size, GPU)
    batches = [loader.load(step) for step in range(6)]
    warm_up(state, batches[0][0])
    for step in range(3):
        train_step(state, step, batches[step])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            train_step(state, step, batches[step])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Numerics


@pytest.mark.parametrize("name, rel", [("no", 1e-4), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_gpu_losses_match_cpu(name, rel, runs):
    arguments = [*RUN, "--model.dropout", 0, "--on_nonfinite", "skip"]
    train(*arguments, "--out_dir", runs / "gpu", **precision(name))
    train(*arguments, "--out_dir", runs / "cpu", ACCELERATE_USE_CPU="true")
    assert losses(runs / "gpu" / "run") == pytest.approx(losses(runs / "cpu" / "run"), rel=rel)


# NCCL, on two GPUs or more


@two_gpus
def test_exact_run_has_same_bits_on_two_gpus(exact, runs):
    train(*EXACT, "--out_dir", runs, processes=2, **precision("bf16"))
    assert_same_bits(tensors(runs / "run", STEPS), tensors(exact, STEPS))


@two_gpus
@pytest.mark.parametrize("kind", ["multi_gpu", "fsdp2"])
def test_two_gpus_train_as_one(kind, runs):
    train(*RUN, "--out_dir", runs / "one")
    env = launcher_environment(kind, "--mixed_precision", "no", "--num_processes", "2")
    done = train(*RUN, "--out_dir", runs / "two", processes=2, **env)
    assert "2 x " in done.stdout
    assert losses(runs / "two" / "run") == pytest.approx(losses(runs / "one" / "run"), rel=1e-4)


# What an emulated device shows too


def test_background_save_changes_no_bit(exact, runs):
    train(*EXACT, "--out_dir", runs, "--checkpoint.asynchronous", "false", **precision("bf16"))
    for step in range(1, STEPS + 1):
        assert_same_bits(tensors(runs / "run", step), tensors(exact, step))


def test_copy_to_cpu_reuses_pinned_memory():
    tensors = {"large": torch.zeros(2**19, device=GPU), "small": torch.zeros(3, device=GPU)}
    places = set()
    for value in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.fill_(value)
        copies = copy_to_cpu(tensors)
        places.add(copies["large"].data_ptr())
        assert copies["large"].is_pinned() and all((copy == value).all() for copy in copies.values())
    assert len(places) == 1


def test_run_resumes_on_cpu_and_back(runs):
    arguments = [*RUN, "--model.dropout", 0, "--out_dir", runs]
    train(*arguments)
    whole = losses(runs / "run")
    for kept, env in ((3, {"ACCELERATE_USE_CPU": "true"}), (5, {})):
        rewind(runs / "run", kept)
        assert f"resumed at step {kept}" in train(*arguments, **env).stdout
    assert losses(runs / "run") == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("name", ["no", "bf16"])
def test_fsdp2_on_one_gpu_equals_unsharded(name, runs):
    """FSDP2 on one process still wraps, gathers and reduces."""
    env = launcher_environment("fsdp2", "--mixed_precision", name, "--num_processes", "1")
    done = train(*RUN, "--out_dir", runs / "sharded", processes=1, **env)
    assert "1 x " in done.stdout
    train(*RUN, "--out_dir", runs / "plain", **precision(name))
    rel = 1e-5 if name == "no" else 1e-2
    assert losses(runs / "sharded" / "run") == pytest.approx(losses(runs / "plain" / "run"), rel=rel)
