"""Text corpora: samples are windows of the token stream, and mixtures keep exact quotas."""

import errno
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import data.prepare.prepare
from data.corpus import load_corpus
from data.integrity import content_hash, metadata_digest, open_columns, verify
from data.loader import BatchLoader
from data.prepare.prepare import in_validation
from data.prepare.tokenizer import save_tokenizer
from data.sampler import MIX_BLOCK, BatchSizes, GlobalBatches, MixedBatches, apportion, mix_quotas
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from tests.conftest import ROOT, assert_same_run, environment, metrics, python, rewind, tensors, train
from tests.data.prepare.test_prepare import END, content, make, make_documents, rows, texts, write_jsonl
from tests.support.forked import Launch, free_port

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
    """Corpora `a` (several files), `b` and `bpe` (another tokenizer), and a small config for them, tiny.yaml."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare.prepare, "FILE_BYTES", 4000)
        make(write_jsonl(folder / "a.jsonl", make_documents(60)), folder / "a", validation="hash:0.2")
    other = write_jsonl(folder / "b.jsonl", make_documents(30, seed=5))
    make(other, folder / "b", validation="hash:0.2")
    make(other, folder / "bpe", "train:400", validation="hash:0.2")
    return folder


def open_split(path, split="train", seq_len=32, packing="concat", num_samples=None):
    return TextDataset(TextCorpus(str(path)), split, seq_len, packing, num_samples)


def read_stream(path, split="train"):
    return sum(rows(path, split), [])


def settings(folder, *arguments):
    return parse_config(["--config", str(folder / "tiny.yaml"), *map(str, arguments)])


# Windows


def test_windows_cover_token_stream(folder):
    stream, dataset = read_stream(folder / "a"), open_split(folder / "a")
    assert len(list((folder / "a" / "train").glob("*.arrow"))) > 2, "windows span several files"
    assert len(dataset) == (len(stream) - 1) // 31
    for i, sample in enumerate(dataset[i] for i in range(len(dataset))):
        assert sample["input_ids"].tolist() == sample["labels"].tolist() == stream[31 * i : 31 * i + 32]
        assert sample["input_ids"].dtype == torch.int64
    targets = [token for i in range(len(dataset)) for token in dataset[i]["labels"][1:].tolist()]
    assert targets == stream[1 : len(targets) + 1], "every token but the first is a target once"


def test_num_samples_spreads_over_all_windows(folder):
    dataset, some = open_split(folder / "a"), open_split(folder / "a", num_samples=5)
    assert len(some) == 5 and len(open_split(folder / "a", num_samples=10**6)) == len(dataset)
    for i in range(5):
        assert torch.equal(some[i]["input_ids"], dataset[i * len(dataset) // 5]["input_ids"])


def test_loader_workers_read_same_samples(folder):
    dataset = open_split(folder / "a", packing="isolated")
    again = pickle.loads(pickle.dumps(dataset))
    assert dataset.values[0][0].tobytes() not in pickle.dumps(dataset), "tokens are not pickled, but mapped again"
    order = GlobalBatches(len(dataset), BatchSizes(4), seed=1)
    for workers in (0, 2):
        loader = BatchLoader(dataset, order, 4, torch.device("cpu"), num_workers=workers)
        for step, [batch] in enumerate(loader.batches(0, 5)):
            for name in ("input_ids", "labels", "position_ids"):
                assert torch.equal(batch[name], torch.stack([again[i][name] for i in order.indices(step)]))


def hashed(*parts):
    """Return derive_seed, computed by hand."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


@pytest.mark.parametrize("mix", [False, True])
def test_shifted_windows_begin_elsewhere_in_each_epoch(folder, mix):
    paths = [folder / "a", folder / "b"][: 1 + mix]
    source = ["--data.mix", json.dumps({str(paths[0]): 2, str(paths[-1]): 1})] if mix else ["--data.path", paths[0]]
    config = settings(folder, *source, "--data.packing", "isolated", "--seed", 3, "--global_batch_size", 20)
    fixed, config = load_corpus(config), config.replace(**{"data.crops": "shifted"})
    corpus = load_corpus(config)
    order, last_of_a = corpus.global_batches(config), len(open_split(paths[0])) - 1
    indices, windows = order.sample_indices(np.arange(MIX_BLOCK)).tolist(), [[] for _ in paths]
    for step in range(0, len(indices) // 20, 7):
        assert order.indices(step, 0, 2) + order.indices(step, 1, 2) == indices[20 * step : 20 * step + 20]
    for index in indices:
        sample = {name: tensor.tolist() for name, tensor in corpus.train[index].items()}
        assert sample["labels"] == sample["input_ids"]
        begins = [i for i, token in enumerate(sample["input_ids"]) if i and token == END]
        assert [i for i, position in enumerate(sample["position_ids"]) if not position] == [0, *begins]
        windows[index % len(corpus.train) > last_of_a].append(tuple(sample["input_ids"]))

    has_wrapped = False
    for c, path in enumerate(paths):
        stream, seed = read_stream(path), hashed(3, "corpus", c) if mix else 3
        count, rest = (len(stream) - 1) // 31, Counter(windows[c])
        num_epochs = rest.total() // count
        offsets = [hashed(seed, "offset", epoch) % 31 for epoch in range(num_epochs + 1)]
        assert num_epochs > 2 and len(set(offsets)) > 2
        for offset in offsets:
            # The windows of the text written twice in a row, so that the last one may end after the text.
            expected = Counter(tuple((stream * 2)[offset + 31 * i : offset + 31 * i + 32]) for i in range(count))
            is_whole = rest.total() >= count
            assert expected <= rest if is_whole else rest <= expected
            rest -= expected
            has_wrapped |= is_whole and offset + 31 * count + 1 > len(stream)
    assert has_wrapped
    same = [torch.equal(corpus.validation[i]["input_ids"], fixed.validation[i]["input_ids"]) for i in range(5)]
    assert all(same), "validation does not move"


def write_zeros_corpus(folder, tokens, tokens_per_file, tokenizer):
    """Write a corpus of zeros whose files are hard links to one file."""
    file, offsets = folder.with_name(f"{tokens_per_file}.arrow"), np.array([0, tokens_per_file], np.int32)
    values = pa.array(np.zeros(tokens_per_file, np.uint16))
    batch = pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    with pa.ipc.new_stream(str(file), batch.schema) as writer:
        writer.write_batch(batch)
    (folder / "train").mkdir(parents=True)
    hashes = {f"train/{index:06d}.arrow": "0" * 64 for index in range(tokens // tokens_per_file)}
    files = {name: {"bytes": file.stat().st_size, "sha256": sha} for name, sha in hashes.items()}
    for name in files:
        (folder / name).hardlink_to(file)
    (folder / "tokenizer").symlink_to(tokenizer)
    counts = {"train": {"tokens": tokens, "bytes": 0}, "validation": {"tokens": 0, "bytes": 0}}
    facts = load_tokenizer(tokenizer)[1]
    metadata = {"tokenizer": facts, **counts, "hash": content_hash(facts["hash"], hashes), "files": files}
    (folder / "metadata.json").write_text(damaged(metadata))


@pytest.mark.slow
def test_ten_billion_tokens_open_with_little_memory(tmp_path, folder):
    """The corpus has as many files as data.prepare makes of that much English text."""
    write_zeros_corpus(tmp_path / "corpus", 10**10, 4_000_000, folder / "a" / "tokenizer")
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
def test_mix_quotas_sum_to_block(weights, quotas):
    assert mix_quotas(weights) == quotas


def test_mixed_batches_keep_quotas_and_epochs():
    sizes, quotas = [37, 500, 10_000], [100, 300, 600]
    batches = MixedBatches(sizes, quotas, BatchSizes(8), seed=3)
    order = batches.sample_indices(np.arange(5 * MIX_BLOCK))
    corpus = np.searchsorted(np.cumsum(sizes), order, side="right")
    for block in corpus.reshape(5, MIX_BLOCK):
        assert np.bincount(block).tolist() == quotas
        runs = np.sum(block[1:] != block[:-1])
        assert abs(runs - 999 * (1 - 0.1**2 - 0.3**2 - 0.6**2)) < 80, "well mixed within the block"
    assert corpus[:MIX_BLOCK].tolist() != corpus[MIX_BLOCK : 2 * MIX_BLOCK].tolist()
    firsts = np.cumsum([0, *sizes[:-1]])
    for c, size in enumerate(sizes):
        visits = np.bincount(order[corpus == c] - firsts[c], minlength=size)
        assert visits.min() == 5 * quotas[c] // size and visits.max() <= visits.min() + 1, (
            "each corpus has its own epochs"
        )


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_mixed_batch_depends_only_on_seed_and_step(num_processes):
    batches = MixedBatches([50, 70], [400, 600], BatchSizes(16), seed=3)
    for step in (0, 62, 10**7):  # step 62 holds the end of one block and the beginning of the next
        local_batches = [batches.indices(step, rank, num_processes) for rank in range(num_processes)]
        positions = np.arange(step * 16, (step + 1) * 16)
        assert sum(local_batches, []) == [int(batches.sample_indices(np.array([p]))[0]) for p in positions]
    assert batches.indices(0) != MixedBatches([50, 70], [400, 600], BatchSizes(16), seed=4).indices(0)


def test_load_corpus_of_mixture(folder):
    mix = json.dumps({str(folder / "a"): 3, str(folder / "b"): 1})
    config = settings(folder, "--data.mix", mix, "--evaluation.num_samples", 8, "--global_batch_size", MIX_BLOCK)
    corpus = load_corpus(config)
    a, b = open_split(folder / "a"), open_split(folder / "b")
    assert corpus.quotas == [750, 250] and len(corpus.train) == len(a) + len(b)
    assert torch.equal(corpus.train[len(a) + 3]["input_ids"], b[3]["input_ids"])
    order = corpus.global_batches(config)
    assert order.dataset is corpus.train
    drawn = Counter(i >= len(a) for i in order.indices(7))
    assert drawn == {False: 750, True: 250}
    growth = {"schedule.batch_warmup_from": MIX_BLOCK // 2, "schedule.batch_warmup_steps": 3}
    config = config.replace(**growth)
    assert sum((corpus.global_batches(config).indices(step) for step in range(2)), []) == order.indices(0)
    assert [len(part) for part in corpus.validation.datasets] == [6, 2]
    corpus = load_corpus(settings(folder, "--data.mix", mix, "--evaluation.num_samples", 7))
    assert [len(part) for part in corpus.validation.datasets] == [5, 2]
    assert "evaluation.num_samples: 1 is fewer than the 2 corpora of data.mix" in refusal(
        folder, "--data.mix", mix, "--evaluation.num_samples", 1
    )


@pytest.mark.parametrize("seed", range(50))
def test_apportion_keeps_proportions_in_largest_set(seed):
    generator = random.Random(seed)
    quotas = mix_quotas([generator.uniform(0.02, 1) for _ in range(generator.randrange(1, 9))])
    number = generator.randrange(len(quotas), 200)
    sizes = [generator.randrange(1, 200) for _ in quotas]
    counts = apportion(number, quotas, sizes)
    assert min(counts) >= 1 and all(count <= size for count, size in zip(counts, sizes, strict=True))
    exact = [sum(counts) * quota / MIX_BLOCK for quota in quotas]
    assert min(exact) < 1 or all(abs(count - part) < 1 for count, part in zip(counts, exact, strict=True))
    too_many = [(sum(counts) + 1) * quota / MIX_BLOCK for quota in quotas]
    assert sum(counts) == number or any(part > size for part, size in zip(too_many, sizes, strict=True))
    assert sum(apportion(number, quotas, [number] * len(quotas))) == number


def test_small_validation_split_keeps_proportions(folder):
    """A corpus with fewer validation sequences than its part makes the part of the others smaller."""
    sizes = [len(open_split(folder / name, "validation")) for name in "ab"]

    def size_and_proportions(*weights):
        mix = json.dumps({str(folder / name): weight for name, weight in zip("ab", weights, strict=True)})
        corpus = load_corpus(settings(folder, "--data.mix", mix, "--evaluation.num_samples", 10**6))
        counts = [len(part) for part in corpus.validation.datasets]
        return sum(counts), abs(counts[0] - sum(counts) * weights[0] / sum(weights)) < 1

    assert sizes[0] < 3 * sizes[1] and sizes[1] < 3 * sizes[0], "the corpus of weight 3 is the short one"
    assert size_and_proportions(1, 3) == (sizes[1] * 4 // 3, True)
    assert size_and_proportions(3, 1) == (sizes[0] * 4 // 3, True)


# Document boundaries


def build_perturbed_model(**settings):
    torch.manual_seed(0)
    model = (
        GPTModel(GPTConfig(vocab_size=257, **{**TINY_MODEL, "max_position_embeddings": 256, **settings}))
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("settings", [{}, {"position": "rope", "qk_norm": True, "n_kv_heads": 1}], ids=["gpt2", "rope"])
def test_isolated_document_loss_equals_loss_alone(folder, settings):
    """A document between two end-of-text tokens: all its tokens and its end are predicted from it alone."""
    model, dataset = build_perturbed_model(**settings), open_split(folder / "a", seq_len=256, packing="isolated")
    packed = torch.utils.data.default_collate([dataset[i] for i in range(6)])
    logits = model(packed["input_ids"], position_ids=packed["position_ids"])[0]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), packed["labels"][:, 1:], reduction="none")
    compared = 0
    for ids, loss in zip(packed["input_ids"], losses, strict=True):
        begins = [i for i, token in enumerate(ids.tolist()) if token == END]
        for begin, end in zip(begins, begins[1:], strict=False):
            alone = ids[None, begin : end + 1]
            expected = model(alone, labels=alone, num_items_in_batch=1).loss
            torch.testing.assert_close(loss[begin:end].sum(), expected, rtol=1e-9, atol=0)
            compared += 1
    assert compared >= 5
    together = model(packed["input_ids"])[0]
    assert not torch.allclose(together, logits), "without boundaries the loss differs"


def test_isolated_gradients_equal_separate_rows(folder):
    """Loss and gradients of a packed window equal those of its documents as separate rows."""
    model = build_perturbed_model()
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


def test_single_document_uses_causal_kernel(monkeypatch):
    calls, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(kwargs) or kernel(*args, **kwargs)
    )
    ids = torch.randint(256, (2, 12))
    build_perturbed_model()(ids, position_ids=torch.arange(12).expand(2, 12))
    assert len(calls) == 2 and all(call["attn_mask"] is None and call["is_causal"] for call in calls)


def test_document_offsets_beyond_two_billion_tokens(folder):
    """Offsets within one file have 32 bits."""
    dataset = open_split(folder / "a", packing="padded")
    dataset.first_tokens = [0, 2**31 - 3, 2**32]
    dataset._find_rows([np.array(offsets, np.int32) for offsets in ([0, 2**31 - 3], [0, 5, 2**31 - 1])])
    assert dataset.begins.tolist() == [0, 2**31 - 3, 2**31 + 2, 2**32]


def test_padded_row_holds_one_document(folder):
    documents, dataset = rows(folder / "a"), open_split(folder / "a", seq_len=64, packing="padded")
    assert len(dataset) == len(documents)
    assert min(map(len, documents)) < 62 < max(map(len, documents)), "some rows are padded and some truncated"
    for i, document in enumerate(documents):
        sample, framed = dataset[i], [*document, END][:64]
        assert sample["input_ids"][: len(framed)].tolist() == framed
        assert sample["labels"].tolist() == framed + [-100] * (64 - len(framed))


@pytest.mark.parametrize("settings", [{}, {"position": "rope", "qk_norm": True, "n_kv_heads": 1}], ids=["gpt2", "rope"])
def test_padded_rows_need_no_attention_mask(folder, settings):
    """Padding on the right has no targets and changes neither loss nor gradients, whatever its tokens."""
    model, dataset = build_perturbed_model(**settings), open_split(folder / "a", seq_len=256, packing="padded")
    batch = torch.utils.data.default_collate([dataset[i] for i in range(6)])
    assert batch.keys() == {"input_ids", "labels"}
    padding = batch["labels"] == -100
    assert padding.any()
    junk = batch | {"input_ids": batch["input_ids"].masked_fill(padding, 7)}
    masked = batch | {"attention_mask": (~padding).long()}
    results = []
    for inputs in (batch, junk, masked):
        model.zero_grad()
        loss = model(**inputs)[1]
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for unmasked, of_junk, of_masked in zip(*results, strict=True):
        torch.testing.assert_close(unmasked, of_junk, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(unmasked, of_masked, rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0][0], results[1][0])


# Refusals


def refusal(folder, *arguments):
    with pytest.raises(ValueError) as error:
        load_corpus(settings(folder, *arguments))
    return str(error.value)


def test_load_corpus_refuses_mismatched_settings(folder, tmp_path):
    a = ["--data.path", folder / "a"]
    message = refusal(folder, *a, "--model.vocab_size", 256)
    assert all(word in message for word in ("model.vocab_size", "256", "257", "null"))
    assert load_corpus(settings(folder, *a, "--model.vocab_size", 300)).vocab_size == 300
    assert load_corpus(settings(folder, *a)).vocab_size == 257
    assert "data.prepare" in refusal(folder, "--data.path", tmp_path)
    mix = json.dumps({str(folder / "a"): 1, str(folder / "bpe"): 1})
    assert "different tokenizers" in refusal(folder, "--data.mix", mix)
    shutil.copytree(folder / "a", tmp_path / "copy")
    for other in (f"{folder}/./a", tmp_path / "copy"):
        mix = json.dumps({str(folder / "a"): 3, str(folder / "b"): 1, str(other): 1})
        assert f"data.mix: {folder / 'a'} and {other} are the same corpus" in refusal(folder, "--data.mix", mix)
    mix = json.dumps({str(folder / "a"): 1e-4, str(folder / "b"): 1})
    assert "none of 1,000 samples" in refusal(folder, "--data.mix", mix)
    (tmp_path / "a.txt").write_text("short")
    make(tmp_path / "a.txt", tmp_path / "short", validation="tail:0.1")
    assert "seq_len 32" in refusal(folder, "--data.path", tmp_path / "short")


def mix_notes(folder, tmp_path, documents, validations):
    """Prepare corpora of the lists of documents, with the values of --validation; return the notes of their mixture."""
    mix = {}
    for index, (texts_of_one, validation) in enumerate(zip(documents, validations, strict=True)):
        source = write_jsonl(tmp_path / f"{index}.jsonl", texts_of_one)
        make(source, tmp_path / str(index), validation=validation)
        mix[str(tmp_path / str(index))] = 1
    return load_corpus(settings(folder, "--data.mix", json.dumps(mix))).notes


@pytest.mark.parametrize("fractions", [(0.2, 0.2), (0.5, 0.1)])
def test_mixture_counts_validation_documents_that_another_corpus_trains_on(folder, tmp_path, fractions):
    common, alone = make_documents(60, seed=8), make_documents(40, seed=9)
    sources = [common + alone, common]
    notes = mix_notes(folder, tmp_path, sources, [f"hash:{fraction}" for fraction in fractions])
    splits = [[{*texts(tmp_path / str(i), split)} for split in ("train", "validation")] for i in range(2)]
    shared = len(splits[0][1] & splits[1][0]) + len(splits[1][1] & splits[0][0])
    held_out = sum(len(validation) for _, validation in splits)
    assert (shared > 0) == (fractions[0] != fractions[1])
    counted = f"{shared} of {held_out} validation documents are in the training data of another corpus"
    assert notes.get("shared", "").startswith(counted) == (shared > 0)


def test_mixture_whose_validation_is_all_trained_on_is_refused(folder, tmp_path):
    common = make_documents(60, seed=8)
    held_out = [document for document in common if not in_validation(document, 0.2)][:9]
    file = write_jsonl(tmp_path / "held_out.jsonl", held_out)
    sources = [common, [document for document in common if document not in held_out]]
    with pytest.raises(ConfigError, match=r"data\.mix: other corpora train on all .* --validation hash:FRACTION"):
        mix_notes(folder, tmp_path, sources, ["hash:0.2", str(file)])


def test_tokens_that_fill_no_sequence_are_said(folder):
    tokens = {split: len(read_stream(folder / "a", split)) for split in ("train", "validation")}
    unused = {split: (count - 1) % 31 for split, count in tokens.items()}  # sequences of 32 tokens share one
    assert any(unused.values())
    said = load_corpus(settings(folder, "--data.path", folder / "a")).notes["unused tokens"]
    counts = [f"{unused[split]} of {tokens[split]:,} in {split}" for split in tokens]
    assert said.startswith(", ".join(counts))


def test_load_corpus_without_validation_split(folder, tmp_path):
    make(write_jsonl(tmp_path / "a.jsonl", make_documents(9)), tmp_path / "a", validation="hash:0.0")
    assert "validation split" in refusal(folder, "--data.path", tmp_path / "a")
    load_corpus(settings(folder, "--data.path", tmp_path / "a", "--evaluation.every", 0))


def test_load_corpus_refuses_changed_files(folder, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(folder / "a", path)
    file = find_file(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert file.name in refusal(folder, "--data.path", path)
    file.unlink()
    assert file.name in refusal(folder, "--data.path", path)
    file.write_bytes(whole)
    load_corpus(settings(folder, "--data.path", path))
    config = path / "tokenizer" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|endoftext|>", "x"))
    assert "end_of_text" in refusal(folder, "--data.path", path)
    save_tokenizer("train:300", path / "tokenizer", ["another"])
    assert "tokenizer" in refusal(folder, "--data.path", path)


def damaged(metadata, **changes):
    """Serialise metadata.json with changes and a matching digest; None removes a key."""
    metadata = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    return json.dumps({**metadata, "digest": metadata_digest(metadata)})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"files": ["train/000000.arrow"]}, "AttributeError"),
        ({"files": None}, "'files'"),
        ({"files": {"train/000000.arrow": "x"}}, "TypeError"),
        ({"files": {"train/000000.arrow": {"bytes": 3}}}, "sha256"),
        ({"files": {"train/000000.arrow": {"bytes": -1}}}, "-1"),
        ({"files": {"../../etc/passwd": 3}}, "../../etc/passwd"),
        ({"hash": None}, "'hash'"),
        ({"hash": 3}, "digest"),
        ({"hash": "0" * 32}, "digest"),
        ({"tokenizer": 7}, "AttributeError"),
        ({"tokenizer": {"hash": "x"}}, "digest"),
        ({"tokenizer": {"hash": "x", "files": {"../../etc/passwd": "3"}}}, "../../etc/passwd"),
        ({"train": {"tokens": True, "bytes": 0}}, "True is not a count"),
        ({"validation": "none"}, "TypeError"),
    ],
    ids=str,
)
def test_damaged_metadata_is_one_message(folder, tmp_path, changes, named):
    shutil.copytree(folder / "a", tmp_path / "a")
    file = tmp_path / "a" / "metadata.json"
    metadata = json.loads(file.read_text())
    file.write_text(damaged(metadata))
    load_corpus(settings(folder, "--data.path", tmp_path / "a"))
    file.write_text(damaged(metadata, **changes))
    message = refusal(folder, "--data.path", tmp_path / "a")
    assert named in message and "metadata.json is damaged" in message and "\n" not in message


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"files": {}', "\xff"], ids=lambda text: text[:9])
def test_invalid_metadata_is_one_message(folder, tmp_path, text):
    (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
    message = refusal(folder, "--data.path", tmp_path)
    assert "metadata.json is damaged" in message or "data.prepare" in message
    assert "~nouser" in refusal(folder, "--data.path", "~nouser/x")


def test_metadata_digest_covers_counts(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "a")
    file = tmp_path / "a" / "metadata.json"
    text = file.read_text()
    bytes_of = f'"bytes": {json.loads(text)["validation"]["bytes"]}'
    file.write_text(text.replace(bytes_of, bytes_of + "0"))
    assert "digest" in refusal(folder, "--data.path", tmp_path / "a")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"decoder": None},
        {"decoder": {"type": "Sequence", "decoders": [BYTE_LEVEL]}, "pre_tokenizer": None},
        {"decoder": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}},
    ],
    ids=["plain", "no decoder", "a sequence of decoders", "a sequence before it"],
)
def test_num_bytes_for_byte_level_tokenizers(parts, folder):
    """The expected bytes come from GPT-2's byte-to-character table, for truncated rows."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    dataset = open_split(folder / "bpe", "validation", seq_len=12, packing="padded")
    tokenizer = dataset.corpus.tokenizer
    dataset.corpus.tokenizer = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | parts))
    found, none = b"", (-100, dataset.corpus.end_of_text)
    for index in range(len(dataset)):
        targets = [token for token in dataset[index]["labels"][1:].tolist() if token not in none]
        found += bytes(byte_of[letter] for token in targets for letter in tokenizer.id_to_token(token))
    assert dataset.num_bytes == len(found)


def test_num_bytes_are_those_of_the_text_if_the_tokenizer_changes_it(folder):
    """As a normalizer that removes accents, or a prefix space, does; metadata.json has the bytes of the text."""
    dataset = open_split(folder / "bpe", "validation", seq_len=12, packing="padded")
    plain = dataset.num_bytes
    changed = open_split(folder / "bpe", "validation", seq_len=12, packing="padded")
    changed.corpus.metadata["validation"]["bytes"] *= 1.25
    assert changed.num_bytes == pytest.approx(1.25 * plain)


def test_num_bytes_for_other_tokenizers_uses_mean(folder):
    dataset = open_split(folder / "bpe", "validation")
    plain = json.loads(dataset.corpus.tokenizer.to_str()) | {"decoder": None, "pre_tokenizer": {"type": "Whitespace"}}
    dataset.corpus.tokenizer = Tokenizer.from_str(json.dumps(plain))
    counts = dataset.corpus.metadata["validation"]
    assert dataset.num_bytes == pytest.approx(len(dataset) * 31 * counts["bytes"] / counts["tokens"])


def test_text_hash_is_independent_of_tokenizer(folder):
    documents = (b"\xff" + text.encode() for text in texts(folder / "b", "validation"))
    by_hand = blake2b(b"".join(documents), digest_size=16)
    metadata = {name: TextCorpus(str(folder / name)).metadata for name in ("a", "b", "bpe")}
    assert {name: each["validation"]["text"] for name, each in metadata.items() if name != "a"} == {
        "b": by_hand.hexdigest(),
        "bpe": by_hand.hexdigest(),
    }


# Contents of files


def find_file(corpus, split="train", index=0):
    return sorted((corpus / split).glob("*.arrow"))[index]


def flip(file, count):
    """Change `count` tokens but neither the length nor the times of the file."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    begin = len(content) // 4 * 2
    for place in range(begin, begin + 2 * count, 2):
        content[place] ^= content[place + 1] == 0  # changes text bytes only, not the end-of-text token
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def corpus(folder, tmp_path):
    return shutil.copytree(folder / "a", tmp_path / "a")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_check_names_changed_file(corpus, split, capsys, monkeypatch):
    """A corpus whose files have their sizes loads; --check compares the contents."""
    file = find_file(corpus, split)
    monkeypatch.setattr(sys, "argv", ["prepare", "--check", str(corpus)])
    assert data.prepare.prepare.cli() == 0
    assert (
        f"{corpus}: {len([*corpus.glob('*/*.arrow'), *corpus.glob('tokenizer/*')])} files have their recorded hashes"
        in capsys.readouterr().out
    )
    flip(file, 100)
    TextCorpus(str(corpus))
    assert data.prepare.prepare.cli() == 2
    assert f"{split}/{file.name}: it has another content than data.prepare wrote" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("change", ["another", "absent"])
def test_every_file_of_the_tokenizer_is_checked(corpus, name, change):
    """Also one that plain text does not need, and with the same tokens."""
    file = corpus / "tokenizer" / name
    metadata = json.loads((corpus / "metadata.json").read_text())
    if not file.exists():
        file.write_text("a template")
        metadata["tokenizer"]["files"][name] = sha256(b"a template").hexdigest()
        (corpus / "metadata.json").write_text(damaged(metadata))
    verify(corpus)
    file.unlink() if change == "absent" else file.write_text(file.read_text() + " ")
    for check in (verify, lambda folder: TextCorpus(str(folder))):
        with pytest.raises(ConfigError, match=f"tokenizer|{name}"):
            check(corpus)


def test_corpus_of_an_earlier_version_has_no_hashes_of_tokenizer_files(corpus):
    metadata = json.loads((corpus / "metadata.json").read_text())
    del metadata["tokenizer"]["files"]
    (corpus / "metadata.json").write_text(damaged(metadata))
    assert TextCorpus(str(corpus)).vocab_size == 257 and verify(corpus) == len(metadata["files"])


@pytest.mark.slow
def test_reading_a_corpus_does_not_import_pandas(corpus):
    """pyarrow imports pandas for many of its calls, which costs each process half a second and 35 MB."""
    code = "import sys; from data.text import TextCorpus, TextDataset\n"
    code += f"corpus = TextCorpus({str(corpus)!r}); TextDataset(corpus, 'train', 32, 'padded')[0]\n"
    code += "print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "False\n", done.stdout + done.stderr


def rewrite(corpus, change):
    """Apply `change` to the bytes of a file and update metadata.json to match, as a hostile author could."""
    metadata, file = json.loads((corpus / "metadata.json").read_text()), find_file(corpus)
    content = change(file.read_bytes())
    file.write_bytes(content)
    metadata["files"][f"train/{file.name}"] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    hashes = {file: facts["sha256"] for file, facts in metadata["files"].items()}
    whole = content_hash(metadata["tokenizer"]["hash"], hashes)
    (corpus / "metadata.json").write_text(damaged(metadata, hash=whole))


def test_hostile_arrow_file_is_read_within_bounds(corpus, folder):
    """Each byte of the Arrow metadata is changed; a read beyond the file would crash the test process."""
    original = find_file(corpus).read_bytes()
    describes = original.index(np.array(rows(corpus)[0][:8], np.uint16).tobytes())
    refused = 0
    for place in range(describes):
        for value in (0xFF, 0x01):
            mutated = bytearray(original)
            mutated[place] ^= value
            find_file(corpus).write_bytes(mutated)
            try:
                for [column] in open_columns(find_file(corpus)):
                    assert all(int(np.from_dlpack(part).sum()) >= -(2**40) for part in (column.values, column.offsets))
            except ConfigError:
                refused += 1
    assert refused > describes / 2


@pytest.mark.parametrize("packing", ["concat", "padded"])
def test_hostile_token_or_offset_is_detected(corpus, packing):
    def hostile(content):
        first_row = np.array(rows(corpus)[0][:8], np.uint16).tobytes()
        offsets = np.array([0, len(rows(corpus)[0])], np.int32).tobytes()
        if packing == "padded":
            return content.replace(offsets, np.array([0, 10**9], np.int32).tobytes())
        return content.replace(first_row, np.array([65535] * 8, np.uint16).tobytes())

    rewrite(corpus, hostile)
    with pytest.raises(ConfigError, match="damaged"):
        dataset = open_split(corpus, packing=packing)
        [dataset[i] for i in range(2)]


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], ["data.path", "data.prepare"]),
        (["--data.path", "x", "--data.mix", '{"y": 1}'], ["data.path", "data.mix"]),
        (["--data.mix", '{"y": -1}'], ["data.mix"]),
        (["--data.source", "stories"], ["evaluation.num_samples", "null"]),
        (["--data.source", "stories", "--data.packing", "padded"], ["data.packing: padded has no effect", "stories"]),
        (["--data.source", "random", "--data.path", "x"], ["data.path: x has no effect", "random"]),
        (["--data.source", "stories", "--data.crops", "shifted"], ["data.crops: shifted has no effect", "stories"]),
        (
            ["--data.path", "x", "--data.crops", "shifted", "--data.packing", "padded"],
            ["data.crops: shifted has no effect with data.packing: padded"],
        ),
    ],
)
def test_inconsistent_data_settings_are_refused(folder, arguments, named):
    with pytest.raises(ConfigError) as error:
        settings(folder, *arguments)
    assert all(word in str(error.value) for word in named), error.value


# Training


def train_text(folder, out_dir, *arguments, **kwargs):
    return train("--config", folder / "tiny.yaml", "--out_dir", out_dir, "--name", "run", *arguments, **kwargs)


@pytest.mark.parametrize("packing", ["isolated", pytest.param("padded", marks=pytest.mark.slow)])
def test_mixture_resumes_bitwise(folder, runs, packing):
    mix = json.dumps({str(folder / "a"): 2, str(folder / "b"): 1})
    arguments = ["--data.mix", mix, "--data.packing", packing]
    train_text(folder, runs, *arguments)
    rows_before, weights = metrics(runs / "run"), tensors(runs / "run", 4)
    rewind(runs / "run", 2)
    train_text(folder, runs, *arguments)
    assert metrics(runs / "run") == rows_before and len(rows_before) == 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors(runs / "run", 4).items())


@pytest.mark.slow
def test_shifted_windows_resume_in_an_epoch_and_are_replayed(folder, runs):
    """Steps 4 and 5 are within the second epoch."""
    arguments = ["--data.path", folder / "b", "--data.crops", "shifted", "--exact", "true", "--steps", 8]
    arguments += ["--global_batch_size", len(open_split(folder / "b")) // 3 // 2 * 2, "--checkpoint.every", 4]
    arguments += ["--micro_batch_size", 1]
    train_text(folder, runs, *arguments, processes=2)
    train_text(folder, runs, *arguments, "--name", "alone")
    assert_same_run(runs / "run", runs / "alone", 8)
    rewind(runs / "alone", 4)
    shown = python(f"python -m tools.replay {runs / 'alone'} 6").stdout
    assert "steps 5 to 6" in shown and "reproduced bitwise (2 digest(s))" in shown
    train_text(folder, runs, *arguments, "--name", "alone")
    assert_same_run(runs / "run", runs / "alone", 8)
    train_text(folder, runs, *arguments, "--name", "fixed", "--data.crops", "fixed")
    assert metrics(runs / "run")[0]["train/loss"] != metrics(runs / "fixed")[0]["train/loss"]
    done = train_text(folder, runs, *arguments, "--name", "alone", "--data.crops", "fixed", "--steps", 9, exit_code=2)
    assert "data.crops" in done.stderr


def test_truncated_corpus_ends_run_before_writing(corpus, folder, runs):
    file = find_file(corpus, "validation")
    os.truncate(file, file.stat().st_size - 8)
    done = train_text(folder, runs, "--data.path", corpus, processes=2, exit_code=1)
    [error] = [line for line in done.stderr.splitlines() if "train.py: error" in line]
    assert f"validation/{file.name}: its size has changed" in error
    assert not runs.exists()


def test_resume_refuses_changed_corpus(folder, runs, tmp_path):
    """Both a file of another size, and another corpus at the same path."""
    path, run = tmp_path / "a", runs / "run"
    shutil.copytree(folder / "a", path)
    arguments = ["--data.path", path, "--global_batch_size", 4, "--schedule.name", "constant"]
    done = train_text(folder, runs, *arguments, "--steps", 2)
    assert f"corpus: {len([*path.glob('*/*.arrow')])} files, " in done.stdout
    saved = content(run / "checkpoints")
    file = find_file(path)
    os.truncate(file, file.stat().st_size - 8)
    done = train_text(folder, runs, *arguments, exit_code=2)
    assert f"{file.name}: its size has changed" in done.stderr and "[step" not in done.stdout
    assert content(run / "checkpoints") == saved
    shutil.rmtree(path)
    make(write_jsonl(tmp_path / "a.jsonl", make_documents(31)), path, validation="hash:0.2")
    done = train_text(folder, runs, *arguments, exit_code=2)
    assert "data.hash" in done.stderr and "Traceback" not in done.stderr


def test_resume_compares_contents_of_modified_files(corpus, folder, runs):
    """A file that was written since the last start, even with its old length and time, is read and compared."""
    arguments = ["--data.path", corpus, "--global_batch_size", 4]
    assert "modified" not in train_text(folder, runs, *arguments, "--stop_after", 1, exit_code=75).stdout
    assert "modified" not in train_text(folder, runs, *arguments, "--stop_after", 2, exit_code=75).stdout
    file = find_file(corpus)
    copy = shutil.copyfile(file, corpus / "copy")
    os.replace(copy, file)
    done = train_text(folder, runs, *arguments, "--stop_after", 3, exit_code=75)
    assert done.stdout.count("The corpus was modified since the last start of this run; comparing") == 1
    before = content(runs / "run" / "checkpoints"), metrics(runs / "run")
    flip(file, 100)
    done = train_text(folder, runs, *arguments, exit_code=2)
    assert f"train/{file.name}: it has another content than data.prepare wrote" in done.stderr
    assert (content(runs / "run" / "checkpoints"), metrics(runs / "run")) == before
    status = json.loads((runs / "run" / "status.json").read_text())
    assert status["state"] == "failed" and file.name in status["reason"]


def test_branch_compares_contents_of_modified_files(corpus, folder, runs):
    """With the files that the run read from which it continues."""
    arguments = ["--data.path", corpus, "--global_batch_size", 4]
    train_text(folder, runs, *arguments, "--stop_after", 1, exit_code=75)
    branch = [*arguments, "--branch_from", runs / "run" / "checkpoints" / "step-00000001", "--steps", 2]
    assert "modified" not in train_text(folder, runs, *branch, "--name", "same").stdout
    flip(file := find_file(corpus), 100)
    done = train_text(folder, runs, *branch, "--name", "other", exit_code=2)
    assert f"The corpus was modified since the last start of {runs / 'run'}; comparing" in done.stdout
    assert f"train/{file.name}: it has another content than data.prepare wrote" in done.stderr


@pytest.mark.slow
def test_every_copy_of_a_corpus_is_compared(corpus, folder, runs, tmp_path):
    """Two machines with copies of their own; in one of them other tokens have the same size and the same metadata."""
    copies = [corpus, shutil.copytree(corpus, tmp_path / "b")]

    def start(*arguments, refused=""):
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words = ["--config", folder / "tiny.yaml", "--out_dir", runs, "--name", "run", *arguments]
        launches = [
            Launch("train.py", [*map(str, words), "--data.path", str(path)], 0, environment(RANK=str(rank), **common))
            for rank, path in enumerate(copies)
        ]
        codes = [launches[0].wait(120)]
        if not refused:  # otherwise it waits until the launcher ends it, so that the message is printed once
            codes.append(launches[1].wait(120))
        launches[1].end()
        output, errors = launches[0].output()
        assert errors.count(refused) == 1 or not refused, errors
        assert launches[1].output()[1].count("error") == 0
        return codes, output

    file = find_file(copies[1])
    content = file.read_bytes()
    flip(file, 100)
    problem = f"train/{file.name}: it has another content than data.prepare wrote"
    codes, output = start("--stop_after", 1, refused=problem)
    assert codes == [2] and "Process(es) [0, 1] have their own copies of the corpus; comparing" in output
    assert not (runs / "run" / "config.yaml").exists()
    file.write_bytes(content)
    assert start("--stop_after", 1)[0] == [75, 75]
    codes, output = start("--stop_after", 2)
    assert codes == [75, 75] and "comparing" not in output
    flip(file, 100)
    codes, output = start(refused=problem)
    assert codes == [2] and "Process(es) [1] have their own copies of the corpus; comparing" in output


@pytest.mark.parametrize("name", ["a", "bpe"])
def test_bits_per_byte_match_hand_calculation(folder, runs, name):
    """Sum of the target losses in nats, divided by the bytes of the targets and by ln 2."""
    arguments = ["--steps", 1, "--optimizer.lr", 0, "--evaluation.every", 1, "--evaluation.num_samples", 9]
    train_text(folder, runs, "--data.path", folder / name, *arguments)
    corpus, dataset = TextCorpus(str(folder / name)), open_split(folder / name, "validation")
    model = GPTModel(GPTConfig(vocab_size=corpus.vocab_size, **TINY_MODEL)).double().eval()
    weights = tensors(runs / "run", 1)
    model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")})
    nats, num_bytes = [], 0
    for i in range(9):
        ids = dataset[i * len(dataset) // 9]["input_ids"]
        logits = model(ids[None]).logits
        nats += F.cross_entropy(logits[0, :-1], ids[1:], reduction="none").tolist()
        for token in ids[1:].tolist():
            if token != corpus.end_of_text:  # a byte-level token has one character per byte
                num_bytes += len(corpus.tokenizer.id_to_token(token))
    [row] = metrics(runs / "run")
    assert row["val/loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert row["val/bits_per_byte"] == pytest.approx(sum(nats) / num_bytes / math.log(2), rel=1e-5)
    start = json.loads((runs / "run" / "sessions.jsonl").read_text())
    assert start["validation_text"] == corpus.metadata["validation"]["text"]


def test_num_bytes_of_windows_matches_text(folder):
    for name in ("a", "bpe"):
        stream, dataset = read_stream(folder / name, "validation"), open_split(folder / name, "validation")
        corpus = TextCorpus(str(folder / name))
        targets = [token for token in stream[1 : 31 * len(dataset) + 1] if token != corpus.end_of_text]
        # A window may end within a character, so decoding may add or lose up to 3 bytes.
        text = corpus.tokenizer.decode(targets)
        assert abs(dataset.num_bytes - len(text.encode())) <= 3
    counts = TextCorpus(str(folder / "a")).metadata["validation"]
    everything = open_split(folder / "a", "validation", seq_len=counts["tokens"])
    assert everything.num_bytes == counts["bytes"]


@pytest.mark.parametrize("recipe", ["shakespeare_char", "shakespeare_cpu", "tinystories", "gpt2_124m"])
def test_text_recipes_are_consistent(recipe):
    config = parse_config(["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--data.path", "corpora/x"])
    assert config.data.source == "text" and config.global_batch_size % config.micro_batch_size == 0
    if recipe == "gpt2_124m":
        assert config.global_batch_size * config.seq_len == 2**19
    if recipe == "shakespeare_char":
        model = GPTModel(GPTConfig(**{**vars(config.model), "vocab_size": 65}))
        assert 10.6e6 < model.num_matmul_parameters() < 10.8e6


SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not in ../shared/data")
def test_shakespeare_cpu_recipe_reaches_its_loss(tmp_path, runs):
    make(SHAKESPEARE, tmp_path / "corpus", validation="tail:0.1")
    recipe = ROOT / "configs" / "shakespeare_cpu.yaml"
    arguments = ["--tracking.wandb", "disabled", "--out_dir", runs, "--name", "run"]
    train("--config", recipe, "--data.path", tmp_path / "corpus", *arguments)
    last = metrics(runs / "run")[-1]
    assert last["val/loss"] < 1.88 and last["train/tokens"] <= 2000 * 12 * 64 / 2
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2), rel=1e-3)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE])
def test_file_that_cannot_be_read_is_not_called_damaged(code, corpus, monkeypatch):
    """Only a file that is absent or was read and is wrong is damaged: the remedy would remove an intact corpus."""
    file = find_file(corpus)
    why = f"cannot be read: {os.strerror(code)}"

    def refuse(*arguments, **options):
        raise OSError(code, os.strerror(code))

    def out_of_memory(*arguments, **options):
        raise OSError("Memory mapping file failed: Cannot allocate memory")  # as Arrow does under `ulimit -v`

    def full_memory(*arguments, **options):
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    with monkeypatch.context() as patch:
        patch.setattr("data.integrity.pa.ipc.open_stream", full_memory)
        with pytest.raises(ConfigError, match="cannot be read: out of memory: malloc .* the corpus may be intact"):
            open_split(corpus)
    with monkeypatch.context() as patch:
        patch.setattr("data.integrity.hash_files", lambda *_: map(refuse, [0]))
        with pytest.raises(ConfigError, match=f"{file} {why}; the corpus may be intact"):
            verify(corpus)
    with monkeypatch.context() as patch:
        patch.setattr("data.integrity.pa.memory_map", out_of_memory)
        with pytest.raises(ConfigError, match="cannot be read: .*Cannot allocate memory; the corpus may be intact"):
            open_split(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ConfigError, match=f"metadata.json {why}"):
            TextCorpus(str(corpus))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        with pytest.raises(ConfigError, match=rf"\.arrow {why}; the corpus may be intact"):
            TextCorpus(str(corpus))
    file.unlink()
    with pytest.raises(ConfigError, match=f"{file} is damaged: No such file or directory; restore it, or"):
        TextCorpus(str(corpus))
