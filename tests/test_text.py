"""Samples of a corpus are the windows of its tokens, wherever they lie, and a mixture has exactly its shares."""

import json
import math
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader

import data.prepare
from benchmarks.growth import sparse_corpus
from config import ConfigError, parse_config
from data.corpus import load_corpus
from data.order import MIX_BLOCK, GlobalBatches, MixedBatches, StepSampler, mix_quotas
from data.text import TextCorpus, TextDataset
from data.tokenizer import save_tokenizer
from model.config import GPTConfig
from model.gpt import GPTModel
from tests.conftest import ROOT, metrics, tensors, train
from tests.test_prepare import END, make, make_documents, rows, write_jsonl

TINY_MODEL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "dropout": 0.0, "max_position_embeddings": 64}
TINY = {
    "steps": 4,
    "micro_batch_size": 2,
    "seq_len": 32,
    "model": TINY_MODEL,
    "data": {"source": "text"},
    "evaluation": {"every": 4, "num_samples": None, "micro_batch_size": 7},
    "checkpoint": {"every": 2, "keep": 9},
    "tracking": {"wandb": "disabled", "log_every": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora `a` (of several files), `b` and `bpe` (of another tokenizer), and a recipe for them, tiny.yaml."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare, "PART", 2000)
        make(write_jsonl(folder / "a.jsonl", make_documents(60)), folder / "a", validation="hash:0.2")
    other = write_jsonl(folder / "b.jsonl", make_documents(30, seed=5))
    make(other, folder / "b", validation="hash:0.2")
    make(other, folder / "bpe", "train:400", validation="hash:0.2")
    return folder


def open_split(path, split="train", seq_len=32, documents="concat", num_samples=None):
    return TextDataset(TextCorpus(str(path)), split, seq_len, documents, num_samples)


def stream_of(path, split="train"):
    return sum(rows(path, split), [])


def settings(folder, *arguments):
    return parse_config(["--config", str(folder / "tiny.yaml"), *map(str, arguments)])


# Windows


def test_the_windows_are_those_of_the_stream(folder):
    stream, dataset = stream_of(folder / "a"), open_split(folder / "a")
    assert len(list((folder / "a" / "train").glob("*.arrow"))) > 2, "windows cross from file to file"
    assert len(dataset) == (len(stream) - 1) // 31
    for i, sample in enumerate(dataset[i] for i in range(len(dataset))):
        assert sample["input_ids"].tolist() == sample["labels"].tolist() == stream[31 * i : 31 * i + 32]
        assert sample["input_ids"].dtype == torch.int64
    targets = [token for i in range(len(dataset)) for token in dataset[i]["labels"][1:].tolist()]
    assert targets == stream[1 : len(targets) + 1], "every token but the first is a target once"


def test_a_part_of_the_windows_is_spread_over_all(folder):
    dataset, some = open_split(folder / "a"), open_split(folder / "a", num_samples=5)
    assert len(some) == 5 and len(open_split(folder / "a", num_samples=10**6)) == len(dataset)
    for i in range(5):
        assert torch.equal(some[i]["input_ids"], dataset[i * len(dataset) // 5]["input_ids"])


def test_loader_processes_read_the_same(folder):
    dataset = open_split(folder / "a", documents="isolated")
    again = pickle.loads(pickle.dumps(dataset))
    assert dataset.tokens[0].tobytes() not in pickle.dumps(dataset), "the tokens are not sent, but opened again"
    sampler = StepSampler(GlobalBatches(len(dataset), 4, seed=1), 0, 5, 0, 1)
    for workers in (0, 2):
        for ours, theirs in zip(DataLoader(dataset, batch_sampler=sampler, num_workers=workers), sampler, strict=True):
            for name in ("input_ids", "labels", "position_ids"):
                assert torch.equal(ours[name], torch.stack([again[i][name] for i in theirs]))


def test_ten_billion_tokens_open_without_memory(tmp_path, folder):
    """Sparse files, as many as data.prepare would make of so much English text."""
    sparse_corpus(tmp_path / "corpus", 10**10, 4_000_000, folder / "a" / "tokenizer")
    first = tmp_path / "corpus" / "train" / "000000.arrow"
    assert first.stat().st_blocks * 512 < 100_000 and first.stat().st_size > 8_000_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    dataset = open_split(tmp_path / "corpus", seq_len=1025)
    sample = dataset[len(dataset) - 1]
    peak_bytes = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before
    tracemalloc.stop()
    assert len(dataset) == (10**10 - 1) // 1024 and sample["input_ids"].shape == (1025,)
    assert peak_bytes < 50_000_000


# Mixtures


@pytest.mark.parametrize(
    "weights, quotas",
    [([1], [1000]), ([3, 1], [750, 250]), ([1, 1, 1], [333, 334, 333]), ([0.7, 0.2, 0.1], [700, 200, 100])],
)
def test_quotas_are_whole_and_complete(weights, quotas):
    assert mix_quotas(weights) == quotas


def test_every_block_has_its_quotas_and_every_corpus_its_epochs():
    sizes, quotas = [37, 500, 10_000], [100, 300, 600]
    batches = MixedBatches(sizes, quotas, global_batch_size=8, seed=3)
    order = batches.at(np.arange(5 * MIX_BLOCK))
    corpus = np.searchsorted(np.cumsum(sizes), order, side="right")
    for block in corpus.reshape(5, MIX_BLOCK):
        assert np.bincount(block).tolist() == quotas
        runs = np.sum(block[1:] != block[:-1])
        assert abs(runs - 999 * (1 - 0.1**2 - 0.3**2 - 0.6**2)) < 80, "well mixed within the block"
    assert corpus[:MIX_BLOCK].tolist() != corpus[MIX_BLOCK : 2 * MIX_BLOCK].tolist()
    firsts = np.cumsum([0, *sizes[:-1]])
    for c, size in enumerate(sizes):
        visits = np.bincount(order[corpus == c] - firsts[c], minlength=size)
        assert visits.min() == 5 * quotas[c] // size and visits.max() <= visits.min() + 1, "in epochs of its own"


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_a_mixed_batch_is_a_function_of_the_seed_and_the_step(num_processes):
    batches = MixedBatches([50, 70], [400, 600], global_batch_size=16, seed=3)
    for step in (0, 62, 10**7):  # step 62 holds the end of one block and the beginning of the next
        shares = [batches.indices(step, rank, num_processes) for rank in range(num_processes)]
        positions = np.arange(step * 16, (step + 1) * 16)
        assert sum(shares, []) == [int(batches.at(np.array([p]))[0]) for p in positions]
    assert batches.indices(0) != MixedBatches([50, 70], [400, 600], 16, seed=4).indices(0)


def test_a_mixture_is_of_its_corpora(folder):
    mix = json.dumps({str(folder / "a"): 3, str(folder / "b"): 1})
    corpus = load_corpus(settings(folder, "--data.mix", mix, "--evaluation.num_samples", 8))
    a, b = open_split(folder / "a"), open_split(folder / "b")
    assert corpus.quotas == [750, 250] and len(corpus.train) == len(a) + len(b)
    assert torch.equal(corpus.train[len(a) + 3]["input_ids"], b[3]["input_ids"])
    drawn = Counter(i >= len(a) for i in corpus.order(MIX_BLOCK, seed=0).indices(7))
    assert drawn == {False: 750, True: 250}
    assert [len(part) for part in corpus.validation.datasets] == [6, 2]


# Boundaries of documents


def lively_model(**settings):
    torch.manual_seed(0)
    model = GPTModel(GPTConfig(257, **{**TINY_MODEL, "max_position_embeddings": 256, **settings})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("settings", [{}, {"position": "rope", "qk_norm": True, "n_kv_heads": 1}], ids=["gpt2", "rope"])
def test_the_loss_of_a_document_in_a_window_is_its_loss_alone(folder, settings):
    """Alone it stands between two end-of-text tokens; so all its tokens and its end are predicted, from it alone."""
    model, dataset = lively_model(**settings), open_split(folder / "a", seq_len=256, documents="isolated")
    packed = torch.utils.data.default_collate([dataset[i] for i in range(6)])
    logits = model(packed["input_ids"], position_ids=packed["position_ids"])[0]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), packed["labels"][:, 1:], reduction="none")
    compared = 0
    for ids, loss in zip(packed["input_ids"], losses, strict=True):
        begins = [i for i, token in enumerate(ids.tolist()) if token == END]
        for begin, end in zip(begins, begins[1:], strict=False):
            alone = ids[None, begin : end + 1]
            _, expected = model(alone, labels=alone, num_items_in_batch=1)
            torch.testing.assert_close(loss[begin:end].sum(), expected, rtol=1e-9, atol=0)
            compared += 1
    assert compared >= 5
    together = model(packed["input_ids"])[0]
    assert not torch.allclose(together, logits), "without boundaries it is another loss"


def test_isolated_documents_train_as_if_each_were_a_row(folder):
    """Loss and gradients of a packed window equal those of its documents as rows of their own."""
    model = lively_model()
    documents = [[END, *b"one"], [END, *b"two of them"], [END, *b"x"], [END]]
    ids = torch.tensor([sum(documents, [])])
    positions = torch.tensor([[i for document in documents for i in range(len(document))]])
    model(ids, labels=ids, position_ids=positions, num_items_in_batch=1)[1].backward()
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for document in documents[:-1]:
        row = torch.tensor([[*document, END]])
        model(row, labels=row, num_items_in_batch=1)[1].backward()
    for ours, parameter in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_one_document_in_a_window_needs_no_mask(monkeypatch):
    calls, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(kwargs) or kernel(*args, **kwargs)
    )
    ids = torch.randint(256, (2, 12))
    lively_model()(ids, position_ids=torch.arange(12).expand(2, 12))
    assert len(calls) == 2 and all(call["attn_mask"] is None and call["is_causal"] for call in calls)


def test_a_padded_row_is_a_document(folder):
    documents, dataset = rows(folder / "a"), open_split(folder / "a", seq_len=64, documents="padded")
    assert len(dataset) == len(documents)
    assert min(map(len, documents)) < 62 < max(map(len, documents)), "some are padded and some are cut off"
    for i, document in enumerate(documents):
        sample, framed = dataset[i], [*document, END][:64]
        assert sample["input_ids"][: len(framed)].tolist() == framed
        assert sample["labels"].tolist() == framed + [-100] * (64 - len(framed))
        assert sample["attention_mask"].tolist() == [1] * len(framed) + [0] * (64 - len(framed))


# Refusals


def refusal(folder, *arguments):
    with pytest.raises(ValueError) as error:
        load_corpus(settings(folder, *arguments))
    return str(error.value)


def test_what_does_not_fit_a_corpus_is_refused(folder, tmp_path):
    a = ["--data.path", folder / "a"]
    message = refusal(folder, *a, "--model.vocab_size", 256)
    assert all(word in message for word in ("model.vocab_size", "256", "257", "null"))
    assert load_corpus(settings(folder, *a, "--model.vocab_size", 300)).vocab_size == 300
    assert load_corpus(settings(folder, *a)).vocab_size == 257
    assert "data.prepare" in refusal(folder, "--data.path", tmp_path)
    mix = json.dumps({str(folder / "a"): 1, str(folder / "bpe"): 1})
    assert "different tokenizers" in refusal(folder, "--data.mix", mix)
    mix = json.dumps({str(folder / "a"): 1e-4, str(folder / "b"): 1})
    assert "one sample in 1,000" in refusal(folder, "--data.mix", mix)
    (tmp_path / "a.txt").write_text("short")
    make(tmp_path / "a.txt", tmp_path / "short", validation="tail:0.1")
    assert "seq_len 32" in refusal(folder, "--data.path", tmp_path / "short")


def test_a_corpus_without_validation_trains_without_evaluation(folder, tmp_path):
    make(write_jsonl(tmp_path / "a.jsonl", make_documents(9)), tmp_path / "a", validation="hash:0.00001")
    assert "validation split" in refusal(folder, "--data.path", tmp_path / "a")
    load_corpus(settings(folder, "--data.path", tmp_path / "a", "--evaluation.every", 0))


def test_a_corpus_that_is_not_what_it_was_is_refused(folder, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    make(source, tmp_path / "a", validation="hash:0.2")
    file = next((tmp_path / "a" / "train").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert file.name in refusal(folder, "--data.path", tmp_path / "a")
    file.unlink()
    assert file.name in refusal(folder, "--data.path", tmp_path / "a")
    file.write_bytes(whole)
    load_corpus(settings(folder, "--data.path", tmp_path / "a"))
    save_tokenizer("train:300", tmp_path / "a" / "tokenizer", ["another"])
    assert "tokenizer" in refusal(folder, "--data.path", tmp_path / "a")


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], ["data.path", "data.prepare"]),
        (["--data.path", "x", "--data.mix", '{"y": 1}'], ["data.path", "data.mix"]),
        (["--data.mix", '{"y": -1}'], ["data.mix"]),
        (["--data.source", "stories"], ["evaluation.num_samples", "null"]),
    ],
)
def test_inconsistent_settings_are_refused(folder, arguments, named):
    with pytest.raises(ConfigError) as error:
        settings(folder, *arguments)
    assert all(word in str(error.value) for word in named), error.value


# Training


def train_text(folder, out_dir, *arguments, **kwargs):
    return train("--config", folder / "tiny.yaml", "--out_dir", out_dir, "--name", "run", *arguments, **kwargs)


@pytest.mark.parametrize("documents", ["isolated", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_mixture_trains_and_goes_on_exactly(folder, runs, documents):
    mix = json.dumps({str(folder / "a"): 2, str(folder / "b"): 1})
    arguments = ["--data.mix", mix, "--data.documents", documents]
    train_text(folder, runs, *arguments)
    rows_before, weights = metrics(runs / "run"), tensors(runs / "run", 4)
    for path in (runs / "run" / "checkpoints" / "step-00000004").iterdir():
        path.unlink()
    (runs / "run" / "checkpoints" / "step-00000004").rmdir()
    train_text(folder, runs, *arguments)
    assert metrics(runs / "run") == rows_before and len(rows_before) == 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors(runs / "run", 4).items())


def test_another_corpus_in_the_same_place_does_not_go_on(folder, runs, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    make(source, tmp_path / "a", validation="hash:0.2")
    train_text(folder, runs, "--data.path", tmp_path / "a", "--steps", 2)
    (tmp_path / "a").rename(tmp_path / "old")
    make(write_jsonl(source, make_documents(31)), tmp_path / "a", validation="hash:0.2")
    done = train_text(folder, runs, "--data.path", tmp_path / "a", exit_code=2)
    assert "data.hash" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["a", "bpe"])
def test_bits_per_byte_are_of_the_text_of_the_targets(folder, runs, name):
    """By hand: the loss of every target in nats, over the bytes that the targets stand for, over ln 2."""
    arguments = ["--steps", 1, "--optimizer.lr", 0, "--evaluation.every", 1, "--evaluation.num_samples", 9]
    train_text(folder, runs, "--data.path", folder / name, *arguments)
    corpus, dataset = TextCorpus(str(folder / name)), open_split(folder / name, "validation")
    model = GPTModel(GPTConfig(corpus.vocab_size, **TINY_MODEL)).double().eval()
    weights = tensors(runs / "run", 1)
    model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")})
    nats, num_bytes = [], 0
    for i in range(9):
        ids = dataset[i * len(dataset) // 9]["input_ids"]
        logits, _ = model(ids[None])
        nats += F.cross_entropy(logits[0, :-1], ids[1:], reduction="none").tolist()
        for token in ids[1:].tolist():
            if token != corpus.end_of_text:  # a byte-level token is written with a character a byte
                num_bytes += len(corpus.tokenizer.id_to_token(token))
    [row] = metrics(runs / "run")
    assert row["val/loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert row["val/bits_per_byte"] == pytest.approx(sum(nats) / num_bytes / math.log(2), rel=1e-5)


def test_bytes_of_all_windows_are_those_of_the_text(folder):
    for name in ("a", "bpe"):
        stream, dataset = stream_of(folder / name, "validation"), open_split(folder / name, "validation")
        corpus = TextCorpus(str(folder / name))
        targets = [token for token in stream[1 : 31 * len(dataset) + 1] if token != corpus.end_of_text]
        # Whole windows may end within a character: it is compared with the bytes that decoding can give.
        text = corpus.tokenizer.decode(targets)
        assert abs(dataset.num_bytes - len(text.encode())) <= 3
    counts = TextCorpus(str(folder / "a")).metadata["validation"]
    everything = open_split(folder / "a", "validation", seq_len=counts["tokens"])
    assert everything.num_bytes == counts["bytes"]


@pytest.mark.parametrize("recipe", ["shakespeare_char", "shakespeare_cpu", "tinystories", "gpt2_124m"])
def test_the_recipes_are_consistent(recipe):
    config = parse_config(["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--data.path", "corpora/x"])
    assert config.data.source == "text" and config.global_batch_size % config.micro_batch_size == 0
    if recipe == "gpt2_124m":
        assert config.global_batch_size * config.seq_len == 2**19
    if recipe == "shakespeare_char":
        model = GPTModel(GPTConfig(**{**vars(config.model), "vocab_size": 65}))
        assert 10.6e6 < model.num_parameters(lookups=False) < 10.8e6


SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not in ../shared/data")
def test_the_small_recipe_reaches_its_loss(tmp_path, runs):
    make(SHAKESPEARE, tmp_path / "corpus", validation="tail:0.1")
    recipe = ROOT / "configs" / "shakespeare_cpu.yaml"
    arguments = ["--tracking.wandb", "disabled", "--out_dir", runs, "--name", "run"]
    train("--config", recipe, "--data.path", tmp_path / "corpus", *arguments)
    last = metrics(runs / "run")[-1]
    assert last["val/loss"] < 1.88 and last["train/tokens"] <= 2000 * 12 * 64 / 2
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2), rel=1e-3)
