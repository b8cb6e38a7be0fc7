"""Tokenizer of a run: every reader checks it, and a start restores a damaged one."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256

import pytest
import yaml

from checkpoint.manifest import read_manifest
from config.errors import ConfigError
from run.load import load_run
from tests.conftest import environment, thinned, train
from tests.data.prepare.test_prepare import content, make, make_documents, write_jsonl
from tests.data.test_text import TINY
from tests.support import forked


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus with a trained tokenizer, and a run of two steps on it."""
    folder = tmp_path_factory.mktemp("made")
    recipe = TINY | {"schedule": {"name": "constant"}, "evaluation": {"every": 0}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    make(write_jsonl(folder / "texts.jsonl", make_documents(30)), folder / "corpus", "train:300", validation="hash:0.2")
    train_until(folder, 2)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """Copy of `made`, whose run refers to the copied corpus."""
    folder = shutil.copytree(made, tmp_path / "copy")
    manifest = read_manifest(folder / "run" / "checkpoints" / "step-00000002")
    manifest.config["data"]["path"] = str(folder / "corpus")
    manifest.write(folder / "run" / "checkpoints" / "step-00000002")
    return folder


def train_until(folder, steps):
    words = ["--config", folder / "tiny.yaml", "--data.path", folder / "corpus", "--out_dir", folder, "--name", "run"]
    return train(*words, "--steps", steps)


def permute(tokenizer):
    """Swap two tokens of the vocabulary."""
    file = tokenizer / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(stored))


def cut(tokenizer):
    file = tokenizer / "tokenizer.json"
    file.write_text(file.read_text()[:500])


DAMAGES = {
    "permuted": (permute, "tokenizer.json"),
    "cut": (cut, "tokenizer.json"),
    "lacks": (lambda tokenizer: (tokenizer / "tokenizer_config.json").unlink(), "tokenizer_config.json"),
    "new": (lambda tokenizer: (tokenizer / "chat_template.jinja").write_text("x"), "chat_template.jinja"),
}


def run_sample(folder, exit_code=0):
    """Run sample.py and return its stderr."""
    words = [str(folder / "run"), "--max_new_tokens", "2", "--prompt", "a"]
    done = forked.run("sample.py", words, 0, environment())
    assert done.returncode == exit_code and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


def test_checkpoint_records_hash_of_tokenizer_files(made):
    kept = read_manifest(made / "run" / "checkpoints" / "step-00000002").tokenizer
    files = (made / "corpus" / "tokenizer").iterdir()
    assert kept == {file.name: sha256(file.read_bytes()).hexdigest() for file in files} and len(kept) >= 2


@pytest.mark.parametrize("damage", thinned(DAMAGES, 3))
def test_damaged_tokenizer_is_skipped_then_restored(damage, folder):
    do, file = DAMAGES[damage]
    do(folder / "run" / "tokenizer")
    damaged = content(folder / "run" / "tokenizer")
    skipped = f"Tokenizer skipped: {folder / 'run' / 'tokenizer'} is not the tokenizer of this run ({file})"
    assert skipped in run_sample(folder)
    (folder / "corpus").rename(folder / "elsewhere")
    refused = run_sample(folder, exit_code=2)
    assert "the run restores its tokenizer from the corpus" in refused and f"of this run ({file})" in refused
    (folder / "elsewhere").rename(folder / "corpus")
    output = train_until(folder, 3).stdout
    assert output.count(f"{folder / 'run' / 'tokenizer'} was damaged ({file}): it is moved to") == 1
    assert content(folder / "run" / "tokenizer") == content(folder / "corpus" / "tokenizer")
    assert content(folder / "run" / "tokenizer.old-1") == damaged, "nothing is lost"
    assert "skipped" not in run_sample(folder)
    assert "restored" not in train_until(folder, 4).stdout


def test_tokenizer_is_not_restored_from_another_corpus(folder):
    """Later checkpoints still expect the first tokenizer."""
    expected = read_manifest(folder / "run" / "checkpoints" / "step-00000002").tokenizer
    for tokenizer in (folder / "run" / "tokenizer", folder / "corpus" / "tokenizer"):
        (tokenizer / "chat_template.jinja").write_text(str(tokenizer))
    output = train_until(folder, 3).stdout
    assert "cannot be restored" in output and output.count("(chat_template.jinja)") == 2
    assert read_manifest(folder / "run" / "checkpoints" / "step-00000003").tokenizer == expected
    run_sample(folder, exit_code=2)
    (folder / "run" / "tokenizer" / "chat_template.jinja").unlink()
    assert "skipped" not in run_sample(folder)


def test_tokenizer_that_cannot_be_parsed_is_one_message(folder):
    """The checkpoint has no hashes, so the damage appears only when the file is parsed."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000002"
    replace(read_manifest(checkpoint), tokenizer=None).write(checkpoint)
    (folder / "run" / "tokenizer" / "chat_template.jinja").write_text("x")
    assert load_run(checkpoint).tokenizer.chat_template == "x"
    cut(folder / "run" / "tokenizer")
    shutil.rmtree(folder / "corpus")
    with pytest.raises(ConfigError, match="tokenizer cannot be read: "):
        load_run(checkpoint)
