"""The runner, the tables of docs/performance.md, and every benchmark case in miniature."""

import argparse
import json
import re
import statistics
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from runtime.config.parser import parse_config
from runtime.machine.cores import available_cores
from tests.conftest import ROOT, environment, python
from tests.data.prepare.test_prepare import make_documents, write_jsonl
from tests.support import forked
from tools.benchmark import __main__ as command_line
from tools.benchmark import cpu, gpu, programs, tables
from tools.benchmark.__main__ import measure, run_interleaved
from tools.benchmark.programs import Program

# Tables


def test_page_is_up_to_date():
    assert tables.render_page() == tables.PAGE.read_text(), "run python -m tools.benchmark.tables"
    assert set(re.findall(r"<!-- (\w+) -->\n", tables.PAGE.read_text())) - {"end"} <= tables.TABLES.keys()


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
@pytest.mark.parametrize(
    ("name", "peer", "digits"),
    [
        ("time_to_loss", "nanoGPT", {"seconds": 0}),
        ("bits_per_byte", "nanochat", {"seconds": 0, "val/bits_per_byte": 3}),
    ],
)
def test_comparisons_of_readme_are_those_of_the_results(page, name, peer, digits):
    record = tables.read_result(name)
    assert record["machine"]["cpu"] == "AMD EPYC (family 25, model 17)", "Zen 4, as the page says"
    [row] = [line for line in (tables.ROOT / page).read_text().splitlines() if line.startswith("| ") and peer in line]
    [cases] = record["figures"].values()
    for case, quantity in product(("ours", peer), digits):
        assert f"{statistics.median(cases[case][quantity]):.{digits[quantity]}f}" in row, (case, quantity)


def test_changed_result_changes_page(monkeypatch, tmp_path):
    changed = tables.read_result("memory")
    (cases,) = changed["figures"].values()
    cases["loss in chunks"]["peak_mib"] = [123_456.0, 123_455.0, 123_457.0]
    for case in cases.values():
        case["others_cores"] = []
    cases["loss in chunks"]["others_cores"], cases["logits at once"]["others_cores"] = [0.25, 0.125], [0.0]
    (tmp_path / "memory.json").write_text(json.dumps(changed))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "|  | loss in chunks | 123,456 (123,455 to 123,457) |" in tables.render_page()
    assert "cores busy with other work: median 0.12, at most 0.25." in tables.render_page()


def test_table_shows_failed_case(monkeypatch, tmp_path):
    groups = {"a group": {"ours": {"error": "OSError: no", "against": ["theirs"]}}}
    (tmp_path / "memory.json").write_text(json.dumps(tables.read_result("memory") | {"figures": groups}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| a group | ours: OSError: no |" in tables.section("memory", tables.read_result("memory"))


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_names_machine_and_versions(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith("python ") and record["figures"]
    assert {"cpu", "cores", "memory_gib"} <= record["machine"].keys()
    assert {"python", "torch", "accelerate", "git_commit"} <= record["versions"].keys()
    for cases in record["figures"].values():
        for case in cases.values():
            assert any(isinstance(value, list) and value for name, value in case.items() if name != "against")
    assert tables.to_json(record) == path.read_text()


@pytest.mark.parametrize(
    "value, cell",
    [
        ([1.5, 1.25, 2.0], "1.5 (1.25 to 2)"),
        ([27801.0], "27,801 (one round)"),
        ([14.5, 15.0], "14.8 (14.5 to 15, 2 rounds)"),
        ([float(n) for n in range(1, 9)], "4.5 (2.25 to 6.75)"),
        ([2.0, 2.0, 2.0], "2"),
        (7, "7"),
    ],
)
def test_cell_shows_spread_of_rounds(value, cell):
    assert tables.format_value(value) == cell


def test_ratios_are_taken_round_by_round():
    cases = {
        "ours": {"seconds": [1.0, 20.0, 3.0], "against": ["theirs", "not measured"]},
        "theirs": {"seconds": [2.0, 80.0, 6.0]},
        "before": {"seconds": [4.0, 40.0], "against": ["theirs"], "error": "RuntimeError: in the third round"},
        "broken": {"error": "RuntimeError: it broke"},
    }
    header, ours, theirs, before, broken = tables.table_rows({"a group": cases}, {"seconds": "seconds"})
    assert header == ["", "", "seconds", "ratio"]
    assert ours == ["a group", "ours", "3 (1 to 20)", "0.5x theirs (0.25 to 0.5)"]
    assert theirs == ["", "theirs", "6 (2 to 80)", ""]
    assert before[3] == "1.25x theirs (0.5 to 2, 2 rounds)", "of the rounds that both have"
    assert broken == ["", "broken: RuntimeError: it broke", "", ""]


def test_overhead_of_page_is_that_of_the_results():
    groups = tables.read_result("overhead")["figures"]
    ratios, halves = [], []
    for cases in groups.values():
        for case in cases.values():
            for other in case.get("against", []):
                pairs = zip(case["seconds"], cases[other]["seconds"], strict=True)
                longer = [100 * (ours / theirs - 1) for ours, theirs in pairs]
                if other.startswith("bare loop"):
                    ratios.append((statistics.median(longer), statistics.quantiles(longer, n=4)))
                else:
                    ratio = tables.format_ratios({**case, "against": [other]}, cases, "tokens_per_second")
                    halves.append(re.search(r"\((.*)\)$", ratio)[1])
    medians = [middle for middle, _ in ratios]
    text = " ".join(tables.PAGE.read_text().split())
    assert f"takes {min(medians):.0f}% to {max(medians):.0f}% longer than a bare loop" in text
    lowest, highest = min(low for _, (low, *_) in ratios), max(high for _, (*_, high) in ratios)
    assert f"with quartiles from {lowest:.0f}% to {highest:.0f}%" in text
    assert f"at {halves[0]} times (0.46M parameters) and {halves[1]} times (3.4M parameters)" in text


# Runner


def test_cases_are_interleaved_and_fail_alone():
    called = []

    def case(name, *results):
        results = iter(results)

        def call():
            called.append(name)
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return {"seconds": result, "tokens": 7}

        return call

    broken = ValueError("out of luck\nand more")
    cases = {"a": case("a", 1.0, 2.0, 3.0), "b": case("b", 4.0, broken)}
    figures = run_interleaved(cases, {"a": ["a", "absent"], "b": ["a"]}, 3)
    assert called == ["a", "b", "a", "b", "a"]
    a, b = figures["a"], figures["b"]
    assert a["seconds"] == [1.0, 2.0, 3.0] and a["tokens"] == 7 and "against" not in a
    assert len(a["others_cores"]) == 3
    assert b["seconds"] == [4.0] and b["error"] == "ValueError: out of luck ... and more" and b["against"] == ["a"]


def test_program_returns_lines_or_reports_exit_code():
    [(seconds, line)] = Program([sys.executable, "-c", "print('done')"]).run()
    assert line == "done" and seconds > 0
    with pytest.raises(RuntimeError, match="exit code 3\nwhy"):
        Program([sys.executable, "-c", "print('why'); raise SystemExit(3)"]).run()


def test_speed_is_median_without_warm_up(monkeypatch):
    """Evaluations on the way and the first two intervals do not count; lines are of ten steps."""
    lines = [(0.0, "       tokens: 1,024 a step, 51,200 in 50 steps"), (1.0, "[step 0 / 60] val/loss = 9.0")]
    lines += [(seconds, f"[step {10 * step} / 60] loss = 1") for step, seconds in enumerate((2, 9, 30, 34, 38, 98), 1)]
    lines += [(99.0, "[step 60 / 60] val/loss = 1.5 val/perplexity = 4"), (99.0, "Training finished.")]
    monkeypatch.setattr(Program, "run", lambda self, *_: lines)
    figures = Program([]).train()
    assert figures["start_seconds"] == 2.0 and figures["seconds_a_step"] == 0.4 and figures["tokens_per_second"] == 2560


def test_both_programs_logs_are_read(monkeypatch):
    """The third interval contains an evaluation, so its seconds are not those of a step."""
    ours = [(8.0, "tokens: 100 a step, 4,000 in 40 steps"), (9.0, "[step 0 / 40] val/loss = 9.0 val/perplexity = 1")]
    ours += [(20.0, "[step 10 / 40] loss = 8.0 lr = 1"), (22.0, "[step 20 / 40] loss = 7.0")]
    ours += [(29.0, "[step 20 / 40] val/loss = 7.5 (of the data)"), (31.0, "[step 30 / 40] loss = 6.0")]
    ours += [(33.0, "[step 40 / 40] loss = 6.0"), (34.0, "[step 40 / 40] val/loss = 5.5 val/perplexity = 1")]
    theirs = [(8.0, "tokens per iteration will be: 100"), (9.0, "step 0: train loss 9.1, val loss 9.0000")]
    theirs += [(20.0, "iter 10: loss 8.0, time 1ms, mfu 1%"), (22.0, "iter 20: loss 7"), (31.0, "iter 30: loss 1")]
    theirs.insert(4, (29.0, "step 20: train loss 1.0, val loss 7.5000"))
    theirs += [(33.0, "iter 40: loss 6"), (34.0, "step 40: train loss 1.0, val loss 5.5000")]
    for lines in (ours, theirs):
        monkeypatch.setattr(Program, "run", lambda self, *_, lines=lines: lines)
        figures = Program([]).train()
        assert figures["curve"] == [(0, 9.0, 9.0), (20, 29.0, 7.5), (40, 34.0, 5.5)]
        assert figures["seconds_a_step"] == 0.2 and figures["tokens_per_second"] == 500
        assert (figures["seconds"], figures["val/loss"], figures["tokens"]) == (34.0, 5.5, 4000)
        reached = Program([]).train(target=8.0)
        assert (reached["seconds"], reached["val/loss"], reached["tokens"]) == (29.0, 7.5, 2000)
    growing = [(1.0, "tokens: 1,024 in step 1, 4,096 from step 9 on, 99,000 in 40 steps"), *ours[1:]]
    monkeypatch.setattr(Program, "run", lambda self, *_: growing)
    assert "tokens" not in Program([]).train(), "a batch that grows has no tokens a step"


def test_measure_counts_cores_of_other_work(monkeypatch):
    """Of 10 x cores CPU seconds, 21 were busy, 6 of them with the case."""
    busy_percent = iter([0.0, 210 / (psutil.cpu_count() or 1)])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: next(busy_percent))
    monkeypatch.setattr(tables, "cpu_seconds", iter([10.0, 16.0]).__next__)
    monkeypatch.setattr(command_line, "time", SimpleNamespace(perf_counter=iter([100.0, 110.0]).__next__))
    assert measure(lambda: None) == {"seconds": 10.0, "others_cores": pytest.approx(1.5)}


# Cases


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Return the programs that a case starts, [(group, case, Program)], as on a GPU and with nanoGPT."""

    def run(self, *more):
        running.append(self._replace(command=[*self.command, *more]))
        raise RuntimeError("it is enough to know what would be started")

    def programs_of(module, name):
        options = argparse.Namespace(quick=False, nanogpt=tmp_path, nanochat=tmp_path, text=tmp_path, scratch=tmp_path)
        found = []
        for group, cases, _ in getattr(module, name)(options):
            for case, call in cases.items():
                running.clear()
                with pytest.raises(RuntimeError, match="it is enough"):
                    call()
                found.append((group, case, running[0]))
        return found

    running = []
    monkeypatch.setattr(Program, "run", run)
    monkeypatch.setattr(programs, "corpus_tokens", lambda _: {"train": np.array([7, 9, 7]), "val": np.array([9, 40])})
    monkeypatch.setattr(programs, "write_documents", lambda corpus, folder: None)
    monkeypatch.setattr(gpu, "ON_GPU", True)
    return programs_of


def our_config(program, processes=1):
    """Return the config of a program of this repository, or None for another."""
    words = [word for word in program.command if not word.startswith("--out_dir=")]
    if "--config" not in words:
        return None
    script = "train.py" if "train.py" in words else "tools.benchmark.bare_loop"
    return parse_config(words[words.index(script) + 1 :], processes)


def peer_settings(program):
    """Return the settings of a command of nanoGPT."""
    return dict(word[2:].split("=") for word in program.command if word.startswith("--"))


WHOLE = [(cpu, name) for name in tables.TABLES if name != "generation" and name not in command_line.ON_GPU]
WHOLE += [(gpu, name) for name in ("cuda_graph", "gpu", "curve")]


@pytest.mark.parametrize("module, name", WHOLE, ids=[name for _, name in WHOLE])
def test_settings_of_cases_are_valid(module, name, started):
    """The real sizes, which the rehearsals do not train; nanoGPT trains on batches of the same size."""
    sizes, found = {}, started(module, name)
    for group, case, program in found:
        if config := our_config(program, 2 if "2 process" in f"{group}, {case}" else 1):
            batch = config.global_batch_size or config.micro_batch_size
            sizes[group] = config.steps, batch * config.seq_len
    assert sizes
    for group, case, program in found:
        if name in ("throughput", "curve") and "nanoGPT" in case + group:
            theirs = {"block_size": "1024", "gradient_accumulation_steps": "1"} | peer_settings(program)
            batch = int(theirs["batch_size"]) * int(theirs["gradient_accumulation_steps"])
            ours = sizes[group if name == "throughput" else "ours, its recipe"]
            assert (int(theirs["max_iters"]), batch * int(theirs["block_size"])) == ours


def test_overhead_compares_same_settings(started):
    found = started(cpu, "overhead")
    assert len(found) == 8
    for (group, ours, program), (same_group, bare, loop) in zip(found[::2], found[1::2], strict=True):
        processes = 2 if "2 processes" in ours else 1
        assert group == same_group and bare == f"bare loop, {ours.partition(', ')[2]}"
        assert our_config(program, processes) == our_config(loop, processes)
        assert "--tracking.log_every" in program.command
        assert program.env == loop.env == {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}


def test_throughput_compares_same_precision_and_compilation(started, monkeypatch):
    for _, case, program in started(cpu, "throughput"):
        compiled, in_bf16 = "compiled" in case, "bfloat16" in case
        if config := our_config(program):
            assert config.compile == compiled and ("ACCELERATE_MIXED_PRECISION" in program.env) == in_bf16
        else:
            theirs = peer_settings(program)
            assert theirs["compile"] == str(compiled) and theirs["dtype"] == ("bfloat16" if in_bf16 else "float32")
    for _, cases, baselines in cpu.throughput(argparse.Namespace(quick=False, nanogpt=None)):
        for case in cases:
            assert baselines[case][0] == case.replace("ours", "nanoGPT"), "compiled against compiled"


def test_nanogpt_trains_on_tokens_of_corpus(started, tmp_path):
    options = argparse.Namespace(quick=False, nanogpt=tmp_path, text=tmp_path, scratch=tmp_path)
    data = peer_settings(programs.nanogpt(options, "--dtype=float32", on_text=True))["dataset"]
    assert np.fromfile(f"{data}/train.bin", np.uint16).tolist() == [0, 1, 0]
    assert np.fromfile(f"{data}/val.bin", np.uint16).tolist() == [1, 2]
    programs.nanogpt(options, "--dtype=float32", on_text=True, vocab_size=64)
    assert np.fromfile(f"{data}/val.bin", np.uint16).tolist() == [9, 40]


def test_nanochat_trains_the_same_shape_on_as_many_tokens(started):
    (_, _, program), (_, name, peer) = started(cpu, "bits_per_byte")
    config, theirs = our_config(program), peer_settings(peer)
    assert config is not None and name == "nanochat"
    width = int(theirs["depth"]) * int(theirs["aspect-ratio"])
    shape = [config.model.n_layers, config.model.d_model, config.model.n_heads, config.seq_len, config.steps]
    assert shape == [int(theirs["depth"]), width, width // int(theirs["head-dim"]), 256, int(theirs["num-iterations"])]
    assert (config.global_batch_size or 0) * config.seq_len == int(theirs["total-batch-size"])
    assert config.steps * int(theirs["total-batch-size"]) == 614_400


# What nanochat's scripts/base_train.py does with its documents and its tokenizer.
FAKE_NANOCHAT = """
import json, os, sys
from pathlib import Path
import pyarrow.parquet as pq
from nanochat.common import get_base_dir
from nanochat.tokenizer import HuggingFaceTokenizer, get_token_bytes, get_tokenizer

*train, validation = sorted(Path(get_base_dir(), "base_data_climbmix").glob("*.parquet"))
texts = [pq.read_table(file)["text"].to_pylist() for file in (*train, validation)]
tokenizer = get_tokenizer()
ids = [tokenizer.encode(part, prepend=tokenizer.get_bos_token_id(), num_threads=4) for part in texts]
lengths = get_token_bytes(device="cpu")
assert len(lengths) == tokenizer.get_vocab_size()
sizes = [sum(lengths[index].item() for row in part for index in row) for part in ids]
print(json.dumps({"texts": texts, "ids": ids, "sizes": sizes, "arguments": sys.argv}))
print("Step 00000 | Validation bpb: 8.100000")
print("Step 00150 | Validation bpb: 2.250000")
print("Minimum validation bpb: 2.250000")
"""


@pytest.fixture
def nanochat(tmp_path):
    """A checkout with the names that the comparison relies on."""
    (tmp_path / "checkout/nanochat").mkdir(parents=True)
    (tmp_path / "checkout/scripts").mkdir()
    (tmp_path / "checkout/scripts/base_train.py").write_text(FAKE_NANOCHAT)
    common = "import os\nget_base_dir = lambda: os.environ['NANOCHAT_BASE_DIR']\n"
    (tmp_path / "checkout/nanochat/common.py").write_text(common)
    (tmp_path / "checkout/nanochat/tokenizer.py").write_text("import rustbpe\n")  # a package that is not installed
    return tmp_path / "checkout"


@pytest.mark.slow
def test_nanochat_reads_documents_and_tokens_of_corpus(tmp_path, nanochat):
    documents = [f"{text}\nna\u00efve {number}" for number, text in enumerate(make_documents(60))]
    write_jsonl(tmp_path / "documents.jsonl", documents)
    words = "--tokenizer train:512 --validation hash:0.2 --num_workers 1"
    python(f"python -m data.prepare --source {tmp_path / 'documents.jsonl'} {words} --out {tmp_path / 'corpus'}")
    options = argparse.Namespace(quick=False, nanochat=nanochat, text=tmp_path / "corpus", scratch=tmp_path)
    lines = programs.nanochat(options, "--depth=4").run()
    [found] = [json.loads(line) for _, line in lines if line.startswith("{")]
    read = [text for part in found["texts"] for text in part]
    assert sorted(read) == sorted(documents) and all(found["texts"])
    tokens = programs.corpus_tokens(tmp_path / "corpus")
    for split, ids, texts, size in zip(("train", "val"), found["ids"], found["texts"], found["sizes"], strict=True):
        assert [index for row in ids for index in row] == tokens[split].tolist()
        assert size == sum(len(text.encode()) for text in texts), "special tokens have no bytes"
    assert found["arguments"] == ["base_train", "--depth=4"]
    measured = programs.last_bits_per_byte(lines)
    assert measured["val/bits_per_byte"] == 2.25 and measured["seconds"] > 0
    assert programs.last_bits_per_byte([(1.5, "[step 9 / 9] val/loss = 1.2 val/bits_per_byte = 1.7 x = 3")]) == {
        "seconds": 1.5,
        "val/bits_per_byte": 1.7,
    }


@pytest.mark.parametrize("name, groups", [("gpu", gpu.LARGE_MODELS), ("cuda_graph", gpu.SMALL_MODELS)])
def test_ways_train_shape_of_group(name, groups, started, monkeypatch):
    """Both programs train the same model, without biases, in batches of the same size and for the same steps."""
    counted, count = [], gpu.build_on_meta_device
    monkeypatch.setattr(gpu, "build_on_meta_device", lambda config: counted.append(config) or count(config))
    for group, way, program in started(gpu, name):
        expected, config = groups[group], our_config(program)
        if config is None:
            theirs = {"gradient_accumulation_steps": "1"} | peer_settings(program)
            facts = [theirs["n_layer"], theirs["n_head"], theirs["n_embd"], theirs["block_size"], theirs["batch_size"]]
            assert [*map(int, facts)] == [*expected.shape, expected.batch]
            assert (float(theirs["dropout"]), int(theirs["max_iters"])) == (expected.dropout, 11 * expected.log_every)
        else:
            model = config.model
            assert model in counted, "MFU is that of the trained model"
            facts = [model.n_layers, model.n_heads, model.d_model, config.seq_len, config.micro_batch_size]
            assert facts == [*expected.shape, expected.batch] and not model.bias and model.mlp == "gelu_exact"
            assert (model.dropout, config.steps) == (expected.dropout, 11 * expected.log_every)
            assert bool(config.cuda_graph) == ("graph" in way) and config.compile == ("uncompiled" not in way)
            assert (config.optimizer.name, config.chunked_loss) == (
                "muon" if "muon" in way else "adamw",
                False if way == "whole loss" else None,
            )
    assert {group for group, way, _ in started(gpu, name)} == {*groups}


@pytest.mark.parametrize("processes", [0, 2])
def test_bare_loop_trains(processes):
    words = """--config configs/random_tokens.yaml --steps 8 --tracking.log_every 2 --micro_batch_size 4
        --optimizer.lr 1e-2 --model.dropout 0 --model.vocab_size 64"""
    done = forked.run("tools.benchmark.bare_loop", words.split(), processes, environment())
    tokens, *lines = done.stdout.splitlines()
    assert tokens == f"tokens: {4 * 32 * max(processes, 1)} a step", done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5, losses


@pytest.mark.slow  # each starts a handful of programs
@pytest.mark.parametrize("name", tables.TABLES)
def test_quick_run_measures(name, tmp_path):
    """Also with a GPU's Python, which may lack these packages: importing one of them is an error."""
    lacking = ["wandb", "matplotlib", *([] if name in command_line.TEXTS else ["datasets", "pyarrow"])]
    for package in lacking:  # a corpus of text is prepared elsewhere
        (tmp_path / f"{package}.py").write_text("raise ImportError(__name__)")
    path = {"PYTHONPATH": str(tmp_path)} if name in command_line.ON_GPU else {}
    command = [sys.executable, "-m", "tools.benchmark", name, "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment(**path), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for cases in json.loads(done.stdout)[name].values():
        for case in cases.values():
            assert case.keys() & tables.TABLES[name].keys()
            assert all(other in cases or "nano" in other for other in case.get("against", []))
