"""data.prepare: a corpus holds exactly the text of its source and becomes visible only when complete."""

import bz2
import gzip
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import data.prepare.prepare
import data.prepare.sources
from data.prepare.prepare import PrepareConfig, cut_point, in_validation, prepare, show_document
from data.prepare.sources import NOT_EVERYWHERE, Source, find_files
from data.prepare.tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_tool
from tests.conftest import ROOT, environment, thinned
from tests.support import forked

END = 256  # the end-of-text token of the byte tokenizer
WORDS = "the a cat's dog’s 猫 食べる zoë 12345 3.14 x=y; \n\n \t  don't über 😀👍🏽 Ωμέγα { } // \r\n é́".split(" ")


def make_text(characters, seed=0):
    """Generate text in several scripts, with whitespace, digits and punctuation of all kinds."""
    generator = random.Random(seed)
    words = []
    while characters > 0:
        words.append(generator.choice(WORDS) + generator.choice(["", " ", " ", " ", "  ", "\n"]))
        characters -= len(words[-1])
    return "".join(words)


def make_documents(count, seed=0):
    return [make_text(50 + 7 * i % 90, seed=(seed, i).__hash__()) for i in range(count)]


def write_jsonl(path, documents, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(documents)))
    return path


def make(source, out, tokenizer="byte", **settings):
    return prepare(
        PrepareConfig(
            source=str(source),
            tokenizer=tokenizer,
            out=str(out),
            **{"num_workers": 1, "validation": "hash:0.0", **settings},
        )
    )


def rows(out, split="train"):
    """Read the rows of a split as lists of tokens, with pyarrow alone."""
    files = sorted((Path(out) / split).glob("*.arrow"))
    tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
    return [row for table in tables for row in table["input_ids"].to_pylist()]


def texts(out, split="train"):
    """Decode the documents of a byte corpus, split at its end-of-text tokens."""
    stream = [token for row in rows(out, split) for token in row]
    assert not stream or stream[0] == END
    starts = [i for i, token in enumerate(stream) if token == END]
    return [bytes(stream[i + 1 : j]).decode() for i, j in zip(starts, [*starts[1:], len(stream)], strict=False)]


def content(folder):
    """Read every file below a folder: {relative path: bytes}."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def tokens_of(out):
    return {name: data for name, data in content(out).items() if name.endswith(".arrow")}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder into which `datasets` copies what it reads."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def small_blocks(monkeypatch):
    """Small pieces, blocks and files, so that a short text fills many."""
    monkeypatch.setattr(data.prepare.prepare, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(data.prepare.sources, "CHUNK", 2000)
    monkeypatch.setattr(data.prepare.prepare, "BLOCK_CHARACTERS", 3000)
    monkeypatch.setattr(data.prepare.prepare, "FILE_BYTES", 5000)


def refusal(*arguments, **settings):
    with pytest.raises(ConfigError) as error:
        make(*arguments, **settings)
    return str(error.value)


def run(*arguments, exit_code=0, preamble=""):
    """Run the command in a forked process, after the code in `preamble`."""
    code = f"import sys, data.prepare.prepare as p\n{preamble}\nsys.exit(p.cli())"
    done = forked.run("-c", [code, *map(str, arguments)], 0, environment())
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "%|" not in done.stderr, "a progress bar in a log"
    return done


# Content of a corpus


def test_hash_split_assigns_each_document_independently(tmp_path):
    """Adding or repeating documents moves no other document to the other split."""
    documents = make_documents(60)
    metadata = make(write_jsonl(tmp_path / "a.jsonl", documents), tmp_path / "a", validation="hash:3e-1")
    train, validation = texts(tmp_path / "a"), texts(tmp_path / "a", "validation")
    assert train == [text for text in documents if text not in validation]
    assert sorted(train + validation) == sorted(documents) and 8 < len(validation) < 30
    for split, there in (("train", train), ("validation", validation)):
        counts = metadata[split]
        assert counts["documents"] == len(there)
        assert counts["bytes"] == sum(len(text.encode()) for text in there) == counts["tokens"] - len(there)
    more = [*make_documents(40, seed=1), *documents, documents[0]]
    make(write_jsonl(tmp_path / "b.jsonl", more), tmp_path / "b", validation="hash:0.3")
    assert set(validation) == set(texts(tmp_path / "b", "validation")) & set(documents)
    assert not set(texts(tmp_path / "b")) & set(texts(tmp_path / "b", "validation"))


def test_in_validation_keeps_the_fraction():
    fraction = sum(in_validation(f"document {i}", 0.05) for i in range(20_000)) / 20_000
    assert abs(fraction - 0.05) < 0.007  # standard error 0.0015


def test_prepare_gives_same_tokens_for_all_formats(tmp_path, small_blocks):
    documents = make_documents(50)
    # Line endings of txt files are read as \n.
    documents = [text.replace("\r\n", "\n").replace("\r", "\n") for text in documents]
    txt = "<|end|>\n".join(documents).encode()
    (tmp_path / "plain.txt").write_bytes(txt)
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbf" + txt.replace(b"\n", b"\r\n"))
    with gzip.open(tmp_path / "zipped.txt.gz", "wb") as file:
        file.write(txt)
    with pa.CompressedOutputStream(str(tmp_path / "zipped.txt.zst"), "zstd") as file:
        file.write(txt)
    jsonl = write_jsonl(tmp_path / "rows.jsonl", documents)
    with pa.CompressedOutputStream(str(tmp_path / "rows.jsonl.zst"), "zstd") as file:
        file.write(jsonl.read_bytes())
    pa.parquet.write_table(pa.table({"text": documents, "n": range(50)}), tmp_path / "rows.parquet")
    (tmp_path / "like_the_hub").mkdir()  # load_dataset reads it like a repository of the Hub
    write_jsonl(tmp_path / "like_the_hub" / "first.jsonl", documents[:30])
    write_jsonl(tmp_path / "like_the_hub" / "second.jsonl", documents[30:])
    (tmp_path / "like_the_hub" / "README.md").write_text(
        "---\nconfigs:\n- config_name: tiny\n  data_files:\n"
        "  - split: pages\n    path: ['first.jsonl', 'second.jsonl']\n---\n"
    )
    hub = f"{tmp_path / 'like_the_hub'}:tiny:pages"
    sources = ["plain.txt", "windows.txt", "zipped.txt.gz", "zipped.txt.zst", "rows.jsonl", "rows.jsonl.zst"]
    made = {}
    for source in [*(tmp_path / name for name in [*sources, "rows.parquet"]), tmp_path / "like_the_hub/*.jsonl", hub]:
        out = tmp_path / f"out{len(made)}"
        separator = r"<|end|>\n" if ".txt" in str(source) else None
        make(source, out, document_separator=separator, validation="hash:0.2")
        made[str(source)] = tokens_of(out)
    make(hub, tmp_path / "streamed", validation="hash:0.2", streaming=True)
    made["streamed"] = tokens_of(tmp_path / "streamed")
    assert texts(tmp_path / "out0") == [text for text in documents if not in_validation(text, 0.2)]
    assert len(made) == 10 and len(made["streamed"]) > 2
    for source, tokens in made.items():
        assert tokens == made[str(tmp_path / "plain.txt")], source


@pytest.mark.parametrize("piece", range(1, 30))
def test_source_finds_separator_across_chunks(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(data.prepare.sources, "CHUNK", piece)
    documents = ["one", "", "two <|en", "|end|>", "last"]
    (tmp_path / "a.txt").write_text("<|end|>".join(documents))
    found = [""]
    path = str(tmp_path / "a.txt")
    for text, ends in Source(path, document_separator="<|end|>"):
        found[-1] += text
        found.extend([""] * ends)
    assert found[:-1] == documents


@pytest.mark.parametrize("ending", ["", "\n", "\n\n \n"])
@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("separator", ["#", "<end>"])
def test_separator_may_end_the_last_document(tmp_path, monkeypatch, ending, piece, separator):
    """What is blank after it is no document; what is blank elsewhere is."""
    monkeypatch.setattr(data.prepare.sources, "CHUNK", piece)
    documents = ["one\n", "", "\n\n", "two <end  \n"]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(text + separator for text in documents) + ending)
    (tmp_path / "c.txt").write_text(" ")
    found = [""]
    for text, ends in Source(f"{tmp_path}/*.txt", document_separator=separator):
        found[-1] += text
        found.extend([""] * ends)
    assert found == [*documents, *documents, " ", ""]


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_row_is_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(data.prepare.sources, "CHUNK", piece)
    rows = ["", "a \U0001f600 b", "half \ud83d of a pair", "longer than all other rows"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = [""]
    for text, ends in Source(str(tmp_path / "a.jsonl")):
        assert len(text) <= piece or "\ufffd" in text
        found[-1] += text
        found.extend([""] * ends)
    assert found[:-1] == [row.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for row in rows]
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert len([*Source(str(tmp_path / "chat.jsonl"))]) == 1, "a conversation is one piece"


def test_prepare_reads_each_txt_file_as_document(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\n")
    (tmp_path / "a.txt").write_text("first")
    make(tmp_path / "*.txt", tmp_path / "out")
    assert texts(tmp_path / "out") + texts(tmp_path / "out", "validation") == ["first", "second\n\n"]


def test_python_library_is_its_modules_by_name(tmp_path, monkeypatch):
    """A document each, without tests, what a site adds, and what distributions leave out; the same in any folder."""
    kept = {"ast.py": "a", "json/__init__.py": "b", "json/tool.py": "c\r\n", "json.py": "d", "_weakrefset.py": "e"}
    kept |= {"zipfile.py": "f"}
    others = "site-packages/numpy.py json/tests/x.py test/ast.py sitecustomize.py _sysconfigdata_x.py tkinter/ast.py"
    others += " idlelib/idle_test/ast.py json/__pycache__/tool.pyc config-3.11/ast.py turtle.py json/grammar.txt"
    for folder, names in (("one", [*kept]), ("another", sorted(kept, reverse=True))):
        for name in [*others.split(), *names]:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(kept.get(name, "x").encode())
        monkeypatch.setattr(data.prepare.sources, "LIBRARY_FOLDER", tmp_path / folder)
        metadata = make("python-library", tmp_path / f"out-{folder}")
        assert texts(tmp_path / f"out-{folder}") == ["e", "a", "d", "b", "c\n", "f"]
        assert metadata["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert tokens_of(tmp_path / "out-one") == tokens_of(tmp_path / "out-another")
    message = refusal("python-library", tmp_path / "x", document_separator="a")
    assert "document_separator: 'a'" in message and "each module is a document" in message
    monkeypatch.setattr(data.prepare.sources, "LIBRARY_FOLDER", tmp_path / "python311.zip")
    assert "python311.zip has no modules" in refusal("python-library", tmp_path / "x")


def test_documents_of_python_library_are_the_modules_that_python_finds():
    """All that pkgutil finds below the modules that Python lists as its own, except some by name."""
    stdlib = Path(os.__file__).parent

    def walk(folder):
        for module in pkgutil.iter_modules([str(folder)]):
            if module.name not in NOT_EVERYWHERE:
                path = folder / module.name
                if module.ispkg:
                    yield path / "__init__.py"
                    yield from walk(path)
                elif path.with_suffix(".py").exists():  # it may be compiled C
                    yield path.with_suffix(".py")

    expected = {
        file
        for file in walk(stdlib)
        if file.relative_to(stdlib).parts[0].removesuffix(".py") in sys.stdlib_module_names
    }
    source = Source("python-library")
    assert {*map(Path, source.files)} == expected and len(expected) > 400
    text = "".join(text for text, _ in source)
    assert text == "".join(Path(file).read_text("utf-8") for file in source.files) and len(text) > 7_000_000


def test_prepare_accepts_validation_file_in_another_format(tmp_path):
    (tmp_path / "val.txt").write_text("to judge")
    write_jsonl(tmp_path / "train.jsonl", ["to learn"])
    for source, held_out in (("train.jsonl", "val.txt"), ("val.txt", "train.jsonl")):
        out = tmp_path / f"out-{source}"
        make(tmp_path / source, out, validation=str(tmp_path / held_out))
        assert sorted(texts(out) + texts(out, "validation")) == ["to judge", "to learn"]


def test_prepare_reads_split_of_dataset_on_disk(tmp_path):
    of = {"train": ["to learn"], "validation": ["to judge"]}
    splits = {name: datasets.Dataset.from_dict({"text": text}) for name, text in of.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    source = tmp_path / "set"
    message = refusal(source, tmp_path / "out", validation=f"{source}:validation")
    assert f"two colons: {source}::validation\n" in message
    make(source, tmp_path / "out", validation=f"{source}::validation")
    assert texts(tmp_path / "out") == ["to learn"] and texts(tmp_path / "out", "validation") == ["to judge"]


def test_max_tokens_does_not_cut_separate_validation_file(tmp_path, small_blocks):
    write_jsonl(tmp_path / "train.jsonl", make_documents(100))
    held_out = make_documents(60, seed=1)
    write_jsonl(tmp_path / "val.jsonl", held_out)
    metadata = make(tmp_path / "train.jsonl", tmp_path / "out", validation=str(tmp_path / "val.jsonl"), max_tokens=50)
    assert texts(tmp_path / "out", "validation") == held_out
    assert 50 <= metadata["train"]["tokens"] < 50 + 3500 and metadata["validation"]["documents"] == 60


@pytest.mark.parametrize("length", [2, 10, 999, 1000, 4000, 4001, 30_000])
def test_tail_split_takes_last_tenth_of_characters(tmp_path, small_blocks, length):
    text = make_text(length)[:length].replace("\r", " ")
    (tmp_path / "a.txt").write_text(text)
    make(tmp_path / "a.txt", tmp_path / "out", validation="tail:0.1")
    cut = int(length * 0.9)
    assert "".join(texts(tmp_path / "out")) == text[:cut]
    assert "".join(texts(tmp_path / "out", "validation")) == text[cut:]


def test_tail_split_cuts_each_document(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["0123456789", "", "abcdefghijklmnopqrst"])
    make(tmp_path / "a.jsonl", tmp_path / "out", validation="tail:0.1")
    assert texts(tmp_path / "out") == ["012345678", "abcdefghijklmnopqr"]
    assert texts(tmp_path / "out", "validation") == ["9", "st"]


def test_find_files_sorts_and_enters_folders(tmp_path, monkeypatch):
    (tmp_path / "texts" / "deep" / ".hidden").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/.hidden/d.txt"):
        (tmp_path / "texts" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    for pattern in ("texts/**/*.txt", "texts/**", "t*/**/**/?.txt"):
        assert find_files(pattern) == ["texts/a.txt", "texts/b.txt", "texts/deep/c.txt"], pattern
    assert find_files("**/deep/*.txt") == find_files("texts/*/c.txt") == ["texts/deep/c.txt"]


def test_find_files_ignores_apple_double_files(tmp_path):
    for name in ("a.txt", "._a.txt"):
        (tmp_path / name).write_text(name)
    assert find_files(f"{tmp_path}/*.txt") == find_files(f"{tmp_path}/**") == [str(tmp_path / "a.txt")]


def test_prepare_refuses_broken_link(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    for source in ("*.jsonl", "b.jsonl"):
        with pytest.raises(FileNotFoundError, match=r"b\.jsonl"):
            make(tmp_path / source, tmp_path / "out", validation="hash:0.0")


def test_prepare_refuses_file_in_both_splits(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl", [name])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "texts" / "b.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "texts" / "b.jsonl")
    texts = tmp_path / "texts"
    for validation in (texts / "b*", tmp_path / "link.jsonl", tmp_path / "hard.jsonl", texts):
        message = refusal(texts / "*.jsonl", tmp_path / "out", validation=str(validation))
        assert "in common" in message and "validation" in message and "source" in message, message
    assert "in common" in refusal(texts, tmp_path / "out", validation=str(texts))
    for overlapping in ("train[1:]", "train[:1]+train[1:]", "train"):
        message = refusal(f"{texts}::train[-50%:]", tmp_path / "out", validation=f"{texts}::{overlapping}")
        assert "in common" in message, message
    metadata = make(f"{texts}::train[:50%]", tmp_path / "out", validation=f"{texts}::train[50%:]")
    assert metadata["train"]["documents"] == metadata["validation"]["documents"] == 1


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.jsonl": ["a"], "more.jsonl": ["b"]}, "more.jsonl' would be in no split"),
        ({"train.jsonl": ["a"], "b.parquet": ["b"]}, "b.parquet' would be in no split"),
        ({"a.jsonl": ["a"], "b.jsonl": ["b"]}, "column names don't match"),
    ],
)
def test_prepare_refuses_folder_that_datasets_reads_in_part(tmp_path, files, message):
    """It reads one format, files with names of splits if there are any, and columns that all files have."""
    (tmp_path / "texts").mkdir()
    for name, texts in files.items():
        write_jsonl(tmp_path / "texts" / name, texts, key="body" if name == "b.jsonl" else "text")
    assert message in refusal(tmp_path / "texts", tmp_path / "out")


def test_prepare_refuses_folder_of_txt_files(tmp_path, monkeypatch):
    """`datasets` would read each line as a document."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ndocument")
    message = refusal(tmp_path / "texts", tmp_path / "out")
    assert "line" in message and f"{tmp_path / 'texts'}/*.txt" in message, message
    monkeypatch.setenv("HOME", str(tmp_path))
    make("~/texts/*.txt", tmp_path / "out", validation="hash:0.0")
    assert texts(tmp_path / "out") == ["one\ndocument"]


def test_prepare_encodes_spelled_special_token_as_text(tmp_path):
    documents = ["before <|endoftext|> after", "another"]
    make(write_jsonl(tmp_path / "a.jsonl", documents), tmp_path / "out", tokenizer="train:300", validation="hash:0.0")
    tokenizer, facts = load_tokenizer(tmp_path / "out" / "tokenizer")
    made = rows(tmp_path / "out")
    assert [row.count(facts["end_of_text"]) for row in made] == [1, 1]
    assert [tokenizer.decode(row[1:]) for row in made] == documents


def test_prepare_skips_and_counts_empty_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n\n{"text": null}\n{"text": "b"}\n')
    metadata = make(path, tmp_path / "out", validation="hash:0.0")
    assert texts(tmp_path / "out") == ["a", "b"]
    assert metadata["train"]["documents"] == 2
    assert metadata["train"]["empty_documents"] + metadata["validation"]["empty_documents"] == 2


def test_corpus_opens_in_datasets(tmp_path):
    from datasets import load_dataset

    documents = make_documents(20)
    make(write_jsonl(tmp_path / "a.jsonl", documents), tmp_path / "out", validation="hash:0.2")
    files = str(tmp_path / "out" / "train" / "*.arrow")
    opened = load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert opened["input_ids"][:] == rows(tmp_path / "out")


@pytest.mark.parametrize("separator", [r"<|end|>\r\n", r"<|end|>\r", "<|end|>\r\n", r"<|end|>\n", "<|end|>"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_separator_matches_any_line_ending(tmp_path, separator, line_end):
    (tmp_path / "a.txt").write_bytes(f"one<|end|>{line_end}two<|end|>{line_end}three".encode())
    make(tmp_path / "a.txt", tmp_path / "out", document_separator=separator)
    assert [text.strip("\n") for text in texts(tmp_path / "out")] == ["one", "two", "three"]


@pytest.mark.parametrize(
    "documents, validation, named",
    [
        ([], "hash:0.5", ["source: ", "no text"]),
        (["", ""], "hash:0.5", ["source: ", "no text"]),
        (["a"], "tail:0.5", ["all 1 documents are for validation"]),
        (["a", "b", "c"], "hash:0.00001", ["'hash:0.00001' keeps none of the 3 documents", "hash:0.1", "tail:0.1"]),
        (["a", "b"], "nothing", ["keeps none of the 2 documents"]),
    ],
)
def test_prepare_refuses_empty_split(tmp_path, documents, validation, named):
    """The refused command does not block a corrected one."""
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    if validation == "nothing":
        validation = tmp_path / "nothing.txt"
        validation.write_text("")
    command = ["--source", source, "--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(*command, "--validation", validation, exit_code=2)
    assert all(word in done.stderr for word in named) and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
    write_jsonl(source, ["one", "two"])
    make(source, tmp_path / "out")
    assert texts(tmp_path / "out") == ["one", "two"] and not (tmp_path / "out.partial").exists()


# Tokenizers and pieces


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Byte-level BPE with the pre-tokenizer of GPT-2, trained on text like that of the tests."""
    folder = tmp_path_factory.mktemp("bpe")
    save_tokenizer("train:700", folder, [make_text(100_000, seed=9)])
    return folder


@pytest.mark.parametrize("requested, expected_size", [(400, 263), (260, 260)])
def test_prepare_reports_smaller_trained_vocabulary(requested, expected_size, tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["the cat" * 9] * 20)
    words = ["--source", source, "--tokenizer", f"train:{requested}", "--out", tmp_path / "out", "--num_workers", 1]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, words), "--validation", "hash:0.0"])
    assert data.prepare.prepare.cli() == 0
    vocab_size = load_tokenizer(tmp_path / "out" / "tokenizer")[1]["vocab_size"]
    num_messages = capsys.readouterr().out.count(f"train:{requested} became train:{vocab_size}: ")
    assert (vocab_size, num_messages) == (expected_size, requested != expected_size)


@pytest.mark.slow
def test_tokenizer_is_trained_on_long_text_without_spaces(tmp_path):
    """The time grows with the square of a word's length, so words are cut."""
    generator = random.Random(0)
    save_tokenizer("train:300", tmp_path, ["".join(generator.choices("acgt", k=3_000_000))])
    tokenizer, facts = load_tokenizer(tmp_path)
    assert facts["vocab_size"] == 300 and len(tokenizer.encode("acgtacgtacgt").ids) < 8
    assert "FixedLength" not in tokenizer.to_str()


def test_byte_tokenizer_maps_bytes_to_themselves(tmp_path):
    save_tokenizer("byte", tmp_path, [])
    tokenizer, facts = load_tokenizer(tmp_path)
    text = "".join(map(chr, range(256))) + "漢字 😀\r\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert (facts["vocab_size"], facts["end_of_text"]) == (257, END)


@pytest.mark.slow
def test_trained_tokenizer_is_lossless_and_deterministic(tmp_path, bpe):
    env = {**environment(), "RAYON_NUM_THREADS": "1" if os.cpu_count() > 1 else "2"}
    (tmp_path / "text").write_bytes(make_text(100_000, seed=9).encode())
    code = (
        "import sys; from pathlib import Path; from data.prepare.tokenizer import save_tokenizer;"
        "folder = Path(sys.argv[1]);"
        "save_tokenizer('train:700', folder, [(folder / 'text').read_bytes().decode()])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, check=True)
    assert (tmp_path / "tokenizer.json").read_bytes() == (bpe / "tokenizer.json").read_bytes()
    tokenizer, facts = load_tokenizer(bpe)
    assert facts["vocab_size"] == 700
    text = make_text(20_000)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(text).ids) < len(text.encode()) / 2


@pytest.mark.parametrize("seed", thinned(range(5), 3))
def test_document_in_pieces_has_same_tokens(tmp_path, small_blocks, bpe, seed):
    document = make_text(40_000, seed)
    make(write_jsonl(tmp_path / "a.jsonl", [document, "next"]), tmp_path / "out", str(bpe), validation="hash:0.0")
    tokenizer, facts = load_tokenizer(bpe)
    made = rows(tmp_path / "out")
    starts = [i for i, row in enumerate(made) if row[0] == facts["end_of_text"]]
    assert len(starts) == 2 and starts[1] > 10, "the document is cut into many pieces, of which the first begins it"
    whole = [facts["end_of_text"], *tokenizer.encode(document).ids]
    assert sum(made[: starts[1]], []) == whole
    assert max(map(len, made)) <= 2 * data.prepare.prepare.PIECE_CHARACTERS


def test_cut_point_does_not_change_tokens(bpe):
    tokenizer, _ = load_tokenizer(bpe)
    for seed in range(20):
        text = make_text(6000, seed)
        cut = cut_point(text, tokenizer, limit=4000)
        assert 3000 < cut <= 4000
        ids = [tokenizer.encode(part).ids for part in (text[:cut], text[cut:], text)]
        assert ids[0] + ids[1] == ids[2]
    assert cut_point("a" * 6000, tokenizer, limit=4000) <= 4000


def test_prepare_refuses_missing_tokenizer_folder(tmp_path, monkeypatch):
    """A path in an existing folder is never looked up on the Hub."""
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda name, **_: pytest.fail(f"looked up {name}")
    )
    source = write_jsonl(tmp_path / "a.jsonl", ["hello there"])
    message = refusal(source, tmp_path / "out", f"{tmp_path}/english", validation="hash:0.0")
    assert message.startswith(f"tokenizer: '{tmp_path}/english' is not a directory; use byte, ")
    assert list(tmp_path.iterdir()) == [source], "nothing is written"


# Deterministic and resumable


def test_prepare_is_independent_of_worker_count(tmp_path, small_blocks, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [*make_documents(80), make_text(50_000)])
    monkeypatch.setattr(data.prepare.prepare, "BATCH_ROWS", 4)
    for workers in (1, 3):
        make(source, tmp_path / str(workers), "train:400", validation="hash:0.1", num_workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(tokens_of(tmp_path / "1")) > 10


@pytest.mark.linux_only
def test_default_worker_count_is_that_of_usable_cores():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import data.prepare.prepare as p\n"
    code += "print(p.PrepareConfig.model_fields['num_workers'].default)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


SMALL_BLOCKS = "p.BLOCK_CHARACTERS, p.FILE_BYTES, p.PIECE_CHARACTERS, p.BATCH_ROWS = 20_000, 20_000, 2000, 16"
KILL = {
    "encoding": """
import datasets
map_block = datasets.Dataset.map
def map_and_stop(*args, new_fingerprint, **settings):
    if new_fingerprint == "000002":
        p.os.kill(p.os.getpid(), 9)
    return map_block(*args, new_fingerprint=new_fingerprint, **settings)
datasets.Dataset.map = map_and_stop
""",
    "saving": """
import datasets
datasets.Dataset.save_to_disk = lambda *args, **settings: p.os.kill(p.os.getpid(), 9)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment, streaming", [("encoding", False), ("encoding", True), ("saving", False)])
def test_prepare_resumes_after_kill(tmp_path, moment, streaming):
    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_documents(900))
    write_jsonl(folder / "b.jsonl", [*make_documents(900, seed=2), make_text(10_000)])
    arguments = ["--source", folder if streaming else folder / "*.jsonl", "--tokenizer", "byte"]
    arguments += ["--validation", "hash:0.1", "--num_workers", 2, *["--streaming"] * streaming]
    out, whole, work = tmp_path / "out", tmp_path / "whole", tmp_path / "out.partial"
    run(*arguments, "--out", whole, preamble=SMALL_BLOCKS)
    command = [*arguments, "--out", out]
    run(*command, preamble=SMALL_BLOCKS + KILL[moment], exit_code=-signal.SIGKILL)
    assert not out.exists() and work.exists()
    run(*command, preamble=SMALL_BLOCKS)
    assert tokens_of(out) == tokens_of(whole) and len(tokens_of(out)) > 10
    assert not work.exists() and content(out).keys() == content(whole).keys()


INTERRUPT = """
import os, signal, sys, threading, time
main = os.getpid()
def stop(*args):
    try:
        open(sys.argv[2] + ".pid", "x").write(str(os.getpid()))
        threading.Timer(0.2, os.kill, (main, signal.SIGINT)).start()
    except FileExistsError:
        pass  # the other process sends the signal, once
    time.sleep(60)  # as long as a block in a thread or a process, or training the tokenizer
    print("not interrupted", file=sys.stderr)
p.encode_text = stop
"""


@pytest.mark.parametrize("num_workers", thinned([2, 1], 2))
def test_prepare_stops_at_ctrl_c_and_resumes(tmp_path, num_workers):
    source, out = write_jsonl(tmp_path / "a.jsonl", make_documents(400)), tmp_path / "out"
    command = ["--source", source, "--tokenizer", "byte", "--num_workers", num_workers, "--out", out]
    command += ["--validation", "hash:0.1"]
    stopped = run(*command, preamble=SMALL_BLOCKS + INTERRUPT, exit_code=130)
    assert "Traceback" not in stopped.stderr and "not interrupted" not in stopped.stderr
    assert stopped.stderr.endswith("\ndata.prepare: interrupted; run the same command again to resume\n")
    pid = int((tmp_path / "a.jsonl.pid").read_text())
    deadline = time.monotonic() + 300
    with suppress(psutil.NoSuchProcess):
        encoding = psutil.Process(pid)
        while encoding.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the process that encodes is left"
            time.sleep(0.1)
    assert (tmp_path / "out.partial" / "cache").exists() and not out.exists()
    run(*command, preamble=SMALL_BLOCKS)
    assert "".join(texts(out)) and not (out / "cache").exists()


def test_prepare_encodes_only_missing_blocks(tmp_path, small_blocks, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    make(source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare.prepare, "metadata_digest", lambda *_: 1 / 0)  # fail just before the end
        with pytest.raises(ZeroDivisionError):
            make(source, tmp_path / "out")
    (tmp_path / "out.partial" / "cache" / "000001.arrow").unlink()
    encoded, encode = [], data.prepare.prepare.encode_text
    monkeypatch.setattr(data.prepare.prepare, "encode_text", lambda *args: encoded.append(args) or encode(*args))
    make(source, tmp_path / "out")
    assert 5 < len(encoded) < 50
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    make(source, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_max_tokens_is_independent_of_worker_count(tmp_path, small_blocks, workers):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(200))
    make(source, tmp_path / "all")
    metadata = make(source, tmp_path / "out", max_tokens=9000, num_workers=workers)
    some, everything = rows(tmp_path / "out"), rows(tmp_path / "all")
    assert 9000 <= metadata["train"]["tokens"] < 9000 + 3500 and some == everything[: len(some)] != everything
    for split in ("train", "validation"):
        assert metadata[split]["tokens"] == sum(len(row) for row in rows(tmp_path / "out", split))


# Invalid input and failures


def test_invalid_utf8_is_replaced_or_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff\xfe bad \xe4\xb8")
    metadata = make(tmp_path / "a.txt", tmp_path / "out", validation="hash:0.0")
    assert texts(tmp_path / "out") == ["good \ufffd\ufffd bad \ufffd"]
    assert metadata["train"]["replacement_characters"] == 3
    message = refusal(tmp_path / "a.txt", tmp_path / "refused", invalid_utf8="refuse")
    assert str(tmp_path / "a.txt") in message and "0xff in position 5" in message
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d of a pair"}\n')
    assert make(tmp_path / "a.jsonl", tmp_path / "surrogate")["train"]["replacement_characters"] > 0
    assert "0xed in position 5" in refusal(tmp_path / "a.jsonl", tmp_path / "other", invalid_utf8="refuse")
    assert not (tmp_path / "refused").exists()


GERMAN = "Größe, Übermut und süße Äpfel: so fängt der schöne Tag für müde Schüler an.\n" * 40
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему.\n" * 40
CHINESE = "人之初，性本善。性相近，习相远。\n" * 40


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8"])
@pytest.mark.parametrize("ending", thinned(["txt", "jsonl", "txt.gz"], 3))
def test_byte_order_mark_sets_encoding(tmp_path, encoding, ending):
    text = GERMAN[:500] + RUSSIAN[:500] + CHINESE
    written = text if "txt" in ending else json.dumps({"text": text}, ensure_ascii=False) + "\r\n"
    content = (("" if encoding in ("utf-16", "utf-32") else "\ufeff") + written).encode(encoding)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(content) if "gz" in ending else content)
    metadata = make(path, tmp_path / "out", invalid_utf8="refuse")
    assert texts(tmp_path / "out") == [text] and metadata["train"]["replacement_characters"] == 0


@pytest.mark.parametrize(
    "text, encoding, found",
    [
        (GERMAN, "utf-16-le", "there is a NUL in it"),
        (CHINESE, "utf-16-be", ""),
        (GERMAN, "utf-32-be", "there is a NUL in it"),
        (GERMAN, "latin-1", "characters are not UTF-8"),
        (RUSSIAN, "cp1251", "characters are not UTF-8"),
        (CHINESE, "gb18030", "characters are not UTF-8"),
    ],
)
@pytest.mark.parametrize("ending", ["txt", "jsonl", "jsonl.gz"])
def test_prepare_refuses_text_in_another_encoding(tmp_path, text, encoding, found, ending):
    content = text if ending == "txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n"
    content = content.encode(encoding)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(content) if "gz" in ending else content)
    message = refusal(path, tmp_path / "out")
    assert f"source: '{path}', document " in message and found in message, message
    assert f"make it UTF-8, as by iconv -f ENCODING -t UTF-8 '{path}'" in message
    assert not (tmp_path / "out").exists()


def test_prepare_tolerates_few_invalid_bytes(tmp_path, monkeypatch):
    """The limit is a fraction of the text, also when the invalid bytes come first."""
    monkeypatch.setattr(data.prepare.sources, "CHUNK", 200)
    (tmp_path / "a.txt").write_bytes(b"\xff" * 11 + b"good " * 1200)
    assert make(tmp_path / "a.txt", tmp_path / "out")["train"]["replacement_characters"] == 11
    (tmp_path / "a.txt").write_bytes(b"\xff" * 11 + b"good " * 1000)
    assert "11 of its first 5,011 characters are not UTF-8" in refusal(tmp_path / "a.txt", tmp_path / "refused")
    (tmp_path / "a.txt").write_bytes(b"good " * 100_000 + b"\0")
    assert "NUL" in refusal(tmp_path / "a.txt", tmp_path / "nul")


def test_source_detects_file_changed_while_read(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, make_documents(100))
    reading = iter(Source(str(path)))
    next(reading)
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ConfigError, match=f"{path.name}.*changed while it was read"):
        list(reading)


def test_prepare_refuses_to_resume_with_changed_source(tmp_path, small_blocks, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare.prepare, "metadata_digest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(source, tmp_path / "out")
    write_jsonl(source, make_documents(101))
    assert f"{tmp_path / 'out'}.partial was begun" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize("what", ["source", "tokenizer"])
def test_prepare_detects_changed_folder(tmp_path, bpe, what):
    (tmp_path / "texts").mkdir()
    source = write_jsonl(tmp_path / "texts" / "a.jsonl", make_documents(20))
    shutil.copytree(bpe, tmp_path / "bpe")
    arguments = (tmp_path / "texts", tmp_path / "out", str(tmp_path / "bpe"))
    assert make(*arguments) == make(*arguments)
    if what == "source":
        write_jsonl(source, make_documents(21))
    else:
        save_tokenizer("train:500", tmp_path / "bpe", [make_text(10_000)])
    assert "is not what this command would make" in refusal(*arguments)


@pytest.mark.linux_only
def test_prepare_syncs_files_before_renaming(tmp_path, monkeypatch):
    """Every file and folder of a corpus is synced before it gets its name."""
    events, originals = [], {name: getattr(os, name) for name in ("fsync", "rename")}
    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")) or originals["fsync"](fd)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: events.append((str(a), str(b))) or originals["rename"](a, b))
    make(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out")
    renamed = events.index((f"{tmp_path}/out.partial", f"{tmp_path}/out"))
    made = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    expected = {f"{tmp_path}/out.partial/{path}" for path in made} | {f"{tmp_path}/out.partial"}
    temporary = re.compile(r"(tokenizer|metadata\.json)\.(\S*-\d+-\d+\.)?tmp")
    assert {temporary.sub(r"\1", event) for event in events[:renamed] if isinstance(event, str)} >= expected
    assert events[renamed + 1] == str(tmp_path)


def test_prepare_refuses_text_unknown_to_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, "known": 1}))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(tmp_path / "words")
    source = write_jsonl(tmp_path / "a.jsonl", ["known", "unheard of"])
    message = refusal(source, tmp_path / "out", str(tmp_path / "words"))
    assert "tokenizer" in message and "unheard of" in message
    write_jsonl(tmp_path / "b.jsonl", ["known", "<|end|>"])
    message = refusal(tmp_path / "b.jsonl", tmp_path / "out2", str(tmp_path / "words"))
    assert "encodes characters as its end of text" in message and "'<|end|>' as document_separator" in message


def save_words(folder, name):
    """Save a tokenizer for the letters of "abc"; one that has no token for others gives <unk> or leaves them out."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<end>", "<unk>", "a", "b", "c"])}
    model: Any = {
        "Unigram": lambda: models.Unigram([(token, -1.0) for token in vocab], unk_id=1),
        "WordPiece": lambda: models.WordPiece(vocab, unk_token="<unk>", continuing_subword_prefix=""),
        "BPE with <unk>": lambda: models.BPE(vocab, [], unk_token="<unk>"),
        "BPE": lambda: models.BPE(vocab, []),
        "bytes without all bytes": lambda: models.BPE(vocab, []),
    }[name]()
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if "bytes" in name:
        tokenizer.pre_tokenizer = byte_level
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["Unigram", "WordPiece", "BPE with <unk>", "BPE", "bytes without all bytes"])
def test_text_without_a_token_is_counted_and_limited(tmp_path, name):
    words, source = save_words(tmp_path / "words", name), tmp_path / "a.jsonl"
    write_jsonl(source, ["abc" * 30] * 99 + ["z"] * 10)
    assert make(source, tmp_path / "few", words)["train"]["unknown_tokens"] == 10
    write_jsonl(source, ["abc" * 30] * 99 + ["z"] * 20)
    message = refusal(source, tmp_path / "out", words)
    assert "max_unknown: 0.002, but in 20 places" in message and "has no token for the text" in message
    metadata = make(source, tmp_path / "out", words, max_unknown=0.01)
    assert metadata["train"]["unknown_tokens"] == 20 and metadata["train"]["documents"] == 119


def test_unknown_token_that_a_text_names_is_not_lost(tmp_path):
    """As in texts whose rare words were replaced before."""
    words, text = save_words(tmp_path / "words", "Unigram"), "abc<unk>" * 20
    metadata = make(write_jsonl(tmp_path / "a.jsonl", [text]), tmp_path / "out", words)
    assert rows(tmp_path / "out")[0].count(1) == 20 and metadata["train"]["unknown_tokens"] == 0


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("missing.txt", None, ["missing.txt", "no file", "folder/*.parquet"]),
        ("a.csv", b"a,b", ["a.csv", ".jsonl"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"', ["a.jsonl", "document 2", "JSON"]),
        ("a.jsonl", b'{"txt": "a"}\n', ["text_column", "'text'", "txt"]),
        ("a.jsonl", b"[1]\n", ["a.jsonl", "document 1"]),
        ("a.jsonl", b'{"text": 3}\n', ["a.jsonl", "document 1"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": 0}\n', ["a.jsonl", "document 2", "'text' is 0"]),
        ("a.jsonl", b'{"text": false}\n', ["a.jsonl", "document 1", "False"]),
        ("a.jsonl", b'{"text": []}\n', ["a.jsonl", "document 1", "[]"]),
        ("a.jsonl", b'"the text is here"\n', ["a.jsonl", "document 1", "not an object"]),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["a.jsonl", "document 1", "RecursionError"]),
        ("a.parquet", b"PAR1 no more", ["a.parquet"]),
        ("a.txt.gz", b"\x1f\x8b\x08 no more", ["a.txt.gz"]),
    ],
)
def test_prepare_names_unreadable_source(tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name, tmp_path / "out")
    assert all(word in message for word in named), message
    assert not (tmp_path / "out").exists()


def test_unreadable_compression_names_the_program_that_reads_it(tmp_path):
    content = gzip.compress(b"a text")
    path = tmp_path / "padded.txt.gz"
    path.write_bytes(content + bytes(512))
    assert refusal(path, tmp_path / "out").endswith(f"; decompress it first: gzip -dk '{path}'")
    for name, damaged in {"cut": content[:-9], "flipped": content[:-8] + bytes(4) + content[-4:]}.items():
        path = tmp_path / f"{name}.txt.gz"
        path.write_bytes(damaged)
        assert refusal(path, tmp_path / "out").endswith("; it is incomplete or damaged: download or copy it again")
    path = tmp_path / "a.jsonl.zst"
    # A frame (RFC 8878) whose window is 1 GiB, as zstd --long=30 writes it, with an empty last block.
    path.write_bytes(bytes.fromhex("28b52ffd 00 a0 010000"))
    assert refusal(path, tmp_path / "out").endswith(f"; decompress it first: zstd -d --long=31 '{path}'")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": 3}'))
    assert "decompress" not in refusal(tmp_path / "b.jsonl.gz", tmp_path / "out")


def test_binary_column_names_remedy(tmp_path):
    pa.parquet.write_table(pa.table({"text": [b"a"]}), tmp_path / "a.parquet")
    message = refusal(tmp_path / "a.parquet", tmp_path / "out")
    assert "'text' is b'a', which is not a text" in message and "cast('string')" in message


def test_prepare_lists_columns_of_parquet_file(tmp_path):
    pa.parquet.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    message = refusal(tmp_path / "a.parquet", tmp_path / "out")
    assert all(word in message for word in ("a.parquet", "text_column 'text'", "body", "n")), message
    assert "'n' is 1" in refusal(tmp_path / "a.parquet", tmp_path / "other", text_column="n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_prepare_names_file_without_permission(tmp_path):
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    assert "a.txt" in refusal(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"validation": "hash:1.5"}, ["validation", "hash:1.5", "hash:0.1"]),
        ({"validation": "tail:"}, ["validation", "tail:0.1"]),
        ({"validation": "missing.txt"}, ["validation: ", "missing.txt"]),
        ({"validation": "0.1"}, ["validation: ", "'0.1'"]),
        ({"validation": "hash:0.005"}, ["validation: 'hash:0.005' chooses among documents, and", "tail:0.1"]),
        ({"out": "/"}, ["out: / exists"]),
        ({"out": __file__ + "/corpus"}, ["out: ", "/corpus cannot be written: Not a directory; name another"]),
        ({"validation": "tail:0.1", "max_tokens": 10}, ["max_tokens", "10", "tail:0.1", "hash:0.005"]),
        ({"tokenizer": "train:200"}, ["tokenizer", "train:200", "train:8192"]),
        ({"tokenizer": "train:"}, ["'train:'", "257 to 1,000,000"]),
        # This size would abort the process for lack of memory.
        ({"tokenizer": "train:2147483648"}, ["'train:2147483648'", "257 to 1,000,000"]),
        ({"tokenizer": "train:" + "9" * 20}, ["9" * 20, "257 to 1,000,000"]),
        ({"tokenizer": "train:" + "9" * 5000}, ["9" * 20, "257 to 1,000,000"]),
        ({"tokenizer": "train:٣٠٠"}, ["'train:٣٠٠'", "257 to 1,000,000"]),
        ({"tokenizer": "no/such-tokenizer"}, ["tokenizer", "no/such-tokenizer", "byte"]),
        ({"streaming": True}, ["streaming", "a.txt"]),
    ],
)
def test_prepare_names_invalid_setting_and_remedy(tmp_path, settings, named):
    (tmp_path / "a.txt").write_text("text")
    message = refusal(tmp_path / "a.txt", **{"out": tmp_path / "out", **settings})
    assert "~nouser" in refusal(tmp_path / "a.txt", "~nouser/x")
    assert all(word in message for word in named), message
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_prepare_removes_partial_files_of_refused_source(tmp_path, small_blocks):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    source.write_text(source.read_text() + "{")
    assert "a.jsonl" in refusal(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_prepare_escapes_names_stdout_cannot_encode(tmp_path):
    screen = 'import io; sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="ascii")'
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    command = ["--source", tmp_path / "a.jsonl", "--tokenizer", "byte", "--validation", "hash:0.0"]
    done = run(*command, "--out", tmp_path / "Müll", preamble=screen)
    assert "M\\xfcll/train: 1 documents" in done.stdout
    assert (tmp_path / "Müll" / "metadata.json").exists()
    done = run("--source", tmp_path / "\x1b[31mred.txt", *command[2:], "--out", tmp_path / "none", exit_code=2)
    assert "\x1b" not in done.stderr and "\\x1b[31mred.txt" in done.stderr


def test_prepare_refuses_existing_folder(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    command = ["--source", tmp_path / "a.txt", "--tokenizer", "byte", "--validation", "tail:0.1", "--out"]
    done = run(*command, tmp_path / "out", exit_code=2)
    assert done.stderr.count("\n") == 1 and f"out: {tmp_path / 'out'} exists" in done.stderr
    assert content(tmp_path / "out") == {"mine": b"precious"}
    done = run(*command, tmp_path / "a.txt" / "x", exit_code=2)
    assert str(tmp_path / "a.txt") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("path", ["mine", "cache/mine", "train/data-00000-of-00001.arrow", "cache/folder/"])
@pytest.mark.parametrize("validation", ["hash:0.0", "hash:0.00001"])  # the second is refused
def test_prepare_refuses_partial_folder_of_somebody_else(tmp_path, path, validation):
    source, work = write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out.partial"
    if path.endswith("/"):
        (work / path).mkdir(parents=True)
    else:
        (work / path).parent.mkdir(parents=True)
        (work / path).write_text("precious")
    before = sorted(work.rglob("*"))
    assert f"out: {work} is needed" in refusal(source, tmp_path / "out", validation=validation)
    assert sorted(work.rglob("*")) == before and not (tmp_path / "out").exists()


def test_prepare_uses_empty_partial_folder(tmp_path):
    """A process that was killed before it wrote the first file leaves one."""
    (tmp_path / "out.partial" / "cache").mkdir(parents=True)
    (tmp_path / "out.partial" / "cache" / "lock").touch()
    (tmp_path / "out.partial" / "cache" / "request.tmp").touch()
    make(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out")
    assert texts(tmp_path / "out") == ["one", "two"]


def test_refused_prepare_leaves_no_folders(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    refusal(source, tmp_path / "new" / "deep" / "out", validation="hash:0.00001")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_prepare_refuses_panicking_tokenizer(tmp_path, monkeypatch):
    """A panic in Rust is not an `Exception` in Python."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({"<|end|>": 0, "a": 1, "b": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a)+$"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(tmp_path / "panics")
    source = write_jsonl(tmp_path / "a.jsonl", ["a" * 40 + "b"])
    command = ["--source", source, "--out", tmp_path / "out", "--validation", "hash:0.0", "--tokenizer"]
    done = run(*command, tmp_path / "panics", exit_code=2)
    assert f"tokenizer: it has no tokens for a text that begins '{'a' * 40}'" in done.stderr
    assert "retry-limit" in done.stderr and "Traceback" not in done.stderr
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare.prepare, "PIECE_CHARACTERS", 19)  # panics at the cut of a document
        assert "a text that has 'aaaa" in refusal(source, tmp_path / "out", str(tmp_path / "panics"))
    make(source, tmp_path / "out")
    assert texts(tmp_path / "out") == ["a" * 40 + "b"]


@pytest.mark.parametrize(
    "name", ["a.txt", "texts/a.jsonl", "new/a.parquet.zst", "texts/*", "./new", "a/b/c", "texts/x"]
)
def test_missing_file_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    """The Hub's client tries for half a minute if there is no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name, _: pytest.fail(f"looked up {name}"))
    (tmp_path / "texts").mkdir()
    assert refusal(name, tmp_path / "out").startswith(f"source: there is no file {name!r}\n")


@pytest.mark.linux_only
def test_prepare_names_home_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/sys/nobody")
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts" / "a.jsonl", ["one"])
    message = refusal(tmp_path / "texts", tmp_path / "out")
    remedy = "Set HF_HOME in the environment to a folder where datasets can write its cache"
    assert "'/sys/nobody" in message and message.endswith(remedy)


def test_prepare_names_local_files_without_network(tmp_path):
    done = run("--source", "nobody/nothing:tiny", "--tokenizer", "byte", "--out", tmp_path / "out", exit_code=2)
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in ("nobody/nothing:tiny", "folder/*.parquet", "network"))


@pytest.mark.slow
def test_prepare_resumes_after_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        source = write_jsonl(tmp_path / "a.jsonl", make_documents(3000))
        arguments = ["--source", source, "--tokenizer", "byte", "--out", disk / "out", "--num_workers", 2]
        setting = "p.BLOCK_CHARACTERS = 20_000"
        done = run(*arguments, exit_code=2, preamble=setting)
        assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
        remedy = "is full, or your quota on it is used up; make room and run the same command again"
        assert done.stderr.startswith("data.prepare: error: ") and f"{disk / 'out'} {remedy}" in done.stderr
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        run(*arguments, preamble=setting)
        run(*arguments[:-4], "--out", tmp_path / "whole", preamble=setting)
        assert tokens_of(disk / "out") == tokens_of(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


FULL_DISKS = {
    "quota": "def fail(*args): raise OSError(122, 'Disk quota exceeded')\np.fsync = fail",
    "tokenizer": """
import transformers
def fail(*args): raise Exception("No space left on device (os error 28)")
transformers.PreTrainedTokenizerFast.save_pretrained = fail
""",
    "closed": """
import datasets
def fail(*args, **settings):
    try:
        raise OSError(28, "No space left on device")
    finally:
        raise ValueError("I/O operation on closed file")
datasets.Dataset.map = fail
""",
}


@pytest.mark.parametrize("kind", FULL_DISKS)
def test_prepare_names_remedy_for_full_disk(tmp_path, kind):
    """Whatever the library that wrote makes of the error."""
    source, out = write_jsonl(tmp_path / "a.jsonl", make_documents(9)), tmp_path / "out"
    command = ["--source", source, "--tokenizer", "byte", "--validation", "hash:0.0", "--out", out]
    done = run(*command, preamble=FULL_DISKS[kind], exit_code=2)
    cause = "[Errno 122] Disk quota exceeded" if kind == "quota" else "[Errno 28] No space left on device"
    remedy = f"The disk of {out} is full, or your quota on it is used up; make room and run the same command again"
    assert done.stderr == f"data.prepare: error: {cause}\n{remedy}\n"
    run(*command)
    assert texts(out) == make_documents(9)


# Memory


@pytest.mark.parametrize("rows_of_group", [3, 40])
def test_parquet_rows_of_megabytes_are_read_few_at_once(tmp_path, monkeypatch, rows_of_group):
    monkeypatch.setattr(data.prepare.sources, "BATCH_BYTES", 4_000_000)
    table, path = pa.table({"text": [f"{i:010}" * 100_000 for i in range(40)]}), tmp_path / "a.parquet"
    pages = {"use_dictionary": False, "write_batch_size": 1}  # a page for each row: Arrow reads pages as a whole
    pa.parquet.write_table(table, path, row_group_size=rows_of_group, **pages)
    del table
    before, most, num_characters = pa.total_allocated_bytes(), 0, 0
    for text, _ in Source(str(path)):
        num_characters += len(text)
        most = max(most, pa.total_allocated_bytes() - before)
    assert (num_characters, most < 12_000_000) == (40_000_000, True), most
    small = pa.table({"text": ["a"] * 1000})
    pa.parquet.write_table(small, path)
    assert len([*Source(str(path))]) == 1000


# The peak of this process; ru_maxrss would include that of its parent.
REPORT_MEMORY = """
cli = p.cli
def reporting():
    code = cli()
    print("peak", *(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
    return code
p.cli = reporting
"""


@pytest.mark.slow
@pytest.mark.linux_only
@pytest.mark.parametrize("megabytes", [2, 300])
def test_prepare_bounds_memory_for_long_line(tmp_path, megabytes):
    """Peak memory stays far below the size of the text and its tokens."""
    line = make_text(1_000_000).replace("\r", "").replace("\n", " ").encode()[:1_000_000]
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(megabytes):
            file.write(line)
    arguments = ["--source", tmp_path / "a.txt", "--tokenizer", "byte", "--out", tmp_path / "out", "--num_workers", 1]
    done = run(*arguments, "--validation", "tail:0.1", preamble=REPORT_MEMORY)
    assert int(done.stdout.split("peak ")[1]) * 1024 < 2e9
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    counts = [metadata[split]["tokens"] for split in ("train", "validation")]
    assert sum(counts) > 1_000_000 * megabytes


def test_file_that_several_links_lead_to_is_read_once(tmp_path):
    """A link to a parent folder would read each file about forty times."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.txt"):
        (tmp_path / "texts" / name).write_text(f"a document, {name}")
    (tmp_path / "texts" / "more" / "loop").symlink_to(tmp_path / "texts")
    (tmp_path / "texts" / "c.txt").symlink_to(tmp_path / "texts" / "a.txt")
    metadata = make(tmp_path / "texts" / "**" / "*.txt", tmp_path / "out")
    assert metadata["train"]["documents"] == 2


def test_validation_documents_in_training_are_counted_or_refused(tmp_path):
    """By content: the files may have different names and forms."""
    texts = [f"document {i}" for i in range(20)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    copied = write_jsonl(tmp_path / "b.jsonl", texts[:5])
    message = refusal(source, tmp_path / "out", validation=str(copied))
    assert "are in" in message and "so a loss on them says nothing about new text" in message
    some = write_jsonl(tmp_path / "c.jsonl", [texts[0], texts[1] + "\n", "another document"])
    metadata = make(source, tmp_path / "out", validation=str(some))
    assert metadata["train"]["in_validation"] == 2
    assert "in_validation" not in make(source, tmp_path / "none", validation="hash:0.2")["train"]


def test_many_skipped_documents_are_refused(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [*(f"document {i}" for i in range(94)), *[""] * 6])
    message = refusal(source, tmp_path / "out")
    assert "max_skipped: 0.01, but of 100 documents 6 were skipped (6 empty documents)" in message
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:  # what was encoded is still there
        patch.setattr(data.prepare.prepare, "encode_text", lambda *_: 1 / 0)
        assert make(source, tmp_path / "out", max_skipped=0.06)["train"]["empty_documents"] == 6
    few = write_jsonl(tmp_path / "b.jsonl", ["a document", *[""] * 5])
    assert make(few, tmp_path / "few")["train"]["empty_documents"] == 5


@pytest.mark.parametrize(
    ("value", "named"), [("0.1", "0.1"), (".05", ".05"), ("1", "0.1"), ("10%", "0.1"), ("1e-2", "1e-2"), ("0,1", "0.1")]
)
def test_validation_that_is_a_number_is_refused_at_once(value, named, tmp_path):
    """Not by asking the Hub, for a minute, whether it is a data set."""
    message = refusal(write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out", validation=value)
    assert f"use hash:{named} for a fraction of them, or tail:{named} for the end of each" in message


def test_validation_that_says_none_names_its_form(tmp_path):
    message = refusal(write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out", validation="None")
    assert message == "validation: 'None' is not a source; use hash:0.0 for no validation"


def test_null_rows_are_counted_apart_from_empty_texts(tmp_path, monkeypatch, capsys):
    """A table that two sets were joined to has nulls where the text is in another column."""
    rows = [{"text": f"document {i}"} for i in range(20)] + [{"text": ""}] + [{"text": None, "content": "a"}] * 3
    pa.parquet.write_table(pa.table({k: [row.get(k) for row in rows] for k in rows[-1]}), tmp_path / "a.parquet")
    words = ["--source", tmp_path / "a.parquet", "--tokenizer", "byte", "--out", tmp_path / "out", "--num_workers", 1]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, words), "--validation", "hash:0.0"])
    assert data.prepare.prepare.cli() == 0
    output, named = capsys.readouterr().out, "3 of the empty documents are rows without a value in 'text'"
    assert "20 documents" in output and "4 empty documents" in output and named in output
    pa.parquet.write_table(pa.table({"text": ["a"] * 8 + [None] * 8}), tmp_path / "b.parquet")
    assert "8 of the empty documents are rows without" in refusal(tmp_path / "b.parquet", tmp_path / "other")


def test_targets_after_a_long_prompt_are_shown(tmp_path):
    row = {"prompt": "a question " * 90, "response": "the answer " * 20}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    make(tmp_path / "a.jsonl", tmp_path / "out")
    shown = show_document(tmp_path / "out")
    assert shown.startswith("<|user|>\na question a") and shown.endswith(" ...") and len(shown) < 300
    assert re.search(
        r" \.\.\. .*question <\|endoftext\|>\n<\|assistant\|>\n\[\[the answer the.*\]\] \.\.\.$", shown, re.DOTALL
    )


def test_first_document_is_shown_as_the_model_gets_it(tmp_path):
    make(write_jsonl(tmp_path / "a.jsonl", ["a text\nof two lines\x1b"]), tmp_path / "out")
    assert show_document(tmp_path / "out") == "<|endoftext|>[[a text\nof two lines\\x1b]]"


def compress(kind, content):
    return gzip.compress(content) if kind == "gzip" else pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("kind", [None, "gzip", "zstd"])
def test_first_bytes_decide_the_compression(tmp_path, name, kind):
    (tmp_path / name).write_bytes(compress(kind, GERMAN.encode()) if kind else GERMAN.encode())
    make(tmp_path / name, tmp_path / "out")
    assert texts(tmp_path / "out") == [GERMAN]


def test_other_formats_are_named(tmp_path):
    for content, kind in ((b"PK\3\4 a", "zip"), (b"%PDF-1.7 a", "PDF"), (bz2.compress(b"a"), "bzip2")):
        (tmp_path / "a.txt").write_bytes(content)
        assert f"it is not text but {kind}" in refusal(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_bytes(gzip.compress(gzip.compress(b"a")))
    assert "it is not text but gzip" in refusal(tmp_path / "a.txt", tmp_path / "out")
    remedies = {gzip.compress(b"PAR1"): " but gzip; decompress it first: gzip -dk", b"{}": "; give it the name of its"}
    for content, remedy in remedies.items():
        (tmp_path / "a.parquet").write_bytes(content)
        assert f"it is not Parquet{remedy}" in refusal(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((CHINESE, "hz"), (CHINESE, "iso2022_jp_2"), (GERMAN, "utf-7"), (RUSSIAN, "utf-7")),
        ("Привет мир, это тест кодировки!\n" * 40, "utf-7"),  # the ends of its words are not marked
        ("日本語のテキスト。\n" * 40, "utf-7"),
        ("안녕하세요 테스트\n" * 40, "iso2022_kr"),
    ],
)
def test_encodings_of_ascii_bytes_are_refused(tmp_path, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding, "ignore"))
    assert "escapes of ISO-2022, HZ or UTF-7" in refusal(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "encoding", "found"), [(GERMAN, "latin-1", "are not UTF-8"), (CHINESE, "hz", "escapes of ISO-2022, HZ or")]
)
@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_small_files_in_another_encoding_are_refused(tmp_path, text, encoding, found, ending):
    """Each has no more than a file is allowed, the first none at all."""
    for index in range(20):
        line = "plain ASCII" if index == 0 else text[:60]
        line = line if ending == "txt" else json.dumps({"text": line}, ensure_ascii=False)
        (tmp_path / f"{index:02d}.{ending}").write_bytes(line.encode(encoding))
    message = refusal(tmp_path / "*", tmp_path / "out")
    assert "in all files: " in message and found in message, message
    assert f"iconv -f ENCODING -t UTF-8 '{tmp_path}/01.{ending}' and others" in message, message
    [*Source(f"{tmp_path}/0[01]*")]  # two such files are too few to tell


def test_escapes_of_terminals_and_code_are_text(tmp_path):
    text = "\x1b[1mbold\x1b(B a+bcd-e x = ~{mask} +1234- +AGE- ~{} C+base-2 +14155552671 +100 +Lst+Dst+zst+Fst+\n" * 99
    (tmp_path / "a.txt").write_text(text)
    make(tmp_path / "a.txt", tmp_path / "out")
    assert texts(tmp_path / "out") == [text]


@pytest.mark.parametrize(("separator", "name"), [("\\t", "a.txt"), ("<end>", "a.jsonl"), ("<other>", "a.txt")])
def test_separator_without_effect_is_refused(tmp_path, separator, name):
    (tmp_path / name).write_text("one<end>two" if name == "a.txt" else '{"text": "one<end>two"}')
    message = refusal(tmp_path / name, tmp_path / "out", document_separator=separator)
    assert message.startswith("document_separator: ") and ("does not occur" if name == "a.txt" else "row") in message
    assert not (tmp_path / "out.partial").exists()


def test_column_of_text_without_columns_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for source in (tmp_path / "a.txt", "python-library"):
        message = refusal(source, tmp_path / "out", text_column="content")
        assert message == f"text_column: 'content' has no effect on {str(source)!r}, which has no columns; leave it out"


def test_tokenizer_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    make(tmp_path / "a.txt", tmp_path / "first")
    make(tmp_path / "a.txt", tmp_path / "second", tokenizer="~/first/tokenizer")
    assert texts(tmp_path / "second") == ["one"]
    with pytest.raises(ConfigError, match="^tokenizer: '~nouser/x' names a user that this machine does not have"):
        parse_tool(PrepareConfig, "data.prepare", ["--source", "a.txt", "--tokenizer=~nouser/x", "--out", "third"])


def test_separator_may_be_a_tab(tmp_path):
    (tmp_path / "a.txt").write_text("one\ttwo")
    make(tmp_path / "a.txt", tmp_path / "out", document_separator="\\t")
    assert texts(tmp_path / "out") == ["one", "two"]


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"text": "b"}]', '[\n {"text": "a"},\n {"text": "b"}\n]\n'])
def test_json_array_of_rows_names_remedy(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    message = refusal(tmp_path / "a.jsonl", tmp_path / "out")
    assert f"jq -c '.[]' '{tmp_path / 'a.jsonl'}'" in message


def test_message_counts_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n\n{"text": 3}\n')
    assert "document 2 (line 4): " in refusal(tmp_path / "a.jsonl", tmp_path / "out")


def test_jsonl_files_with_byte_order_marks_may_be_concatenated(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n' * 2 + b'{"text": "b"}\r{"text": "c"}\n')
    make(tmp_path / "a.jsonl", tmp_path / "out")
    assert texts(tmp_path / "out") == ["a", "a", "b", "c"]


def test_nul_in_json_is_text_and_does_not_confuse_the_hash(tmp_path):
    hashes = set()
    for name, documents in {"one": ["a\0b"], "two": ["a", "b"]}.items():
        source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
        train = write_jsonl(tmp_path / f"{name}_train.jsonl", ["c"])
        hashes.add(make(train, tmp_path / name, validation=str(source))["validation"]["text"])
        assert texts(tmp_path / name, "validation") == documents
    assert len(hashes) == 2
