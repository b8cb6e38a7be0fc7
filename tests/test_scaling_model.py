"""The model of many GPUs: what must hold of it whatever the constants, and that docs/scaling.md has its tables."""

import re
from dataclasses import replace

import pytest

from benchmarks import scaling_model as scaling
from benchmarks.scaling_model import SHAPES, STRATEGIES, Constants

CONSTANTS = Constants()
COUNTS = [1, 2, 4, 8, 16, 64, 256, 1024, 4096]
DOCS = scaling.PAGE.read_text()
each = pytest.mark.parametrize


def printed(capsys, *arguments):
    scaling.main(list(arguments))
    return capsys.readouterr().out


def test_the_page_has_the_tables_that_the_command_prints(capsys):
    tables = printed(capsys)
    assert tables.count("|---|") > 5
    assert DOCS.split(f"<!-- {scaling.MARKER} -->")[1].split("<!-- end -->")[0].strip() == tables.strip()


@each("command", re.findall(r"^python -m benchmarks.scaling_model(.*)$", DOCS, re.MULTILINE))
def test_the_commands_of_the_page_run(command, capsys):
    assert printed(capsys, *command.split()).count("|---|") > 5


def test_write_replaces_only_what_is_between_the_markers(capsys, monkeypatch, tmp_path):
    page = tmp_path / "scaling.md"
    page.write_text(f"before\n<!-- {scaling.MARKER} -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(scaling, "PAGE", page)
    tables = printed(capsys, "--write")
    assert page.read_text() == f"before\n<!-- {scaling.MARKER} -->\n\n{tables}\n<!-- end -->\nafter\n"


@each("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_and_flops_are_those_of_the_literature(shape):
    multiplied = 12 * shape.layers * shape.d_model**2 + shape.vocab_size * shape.d_model  # norms are next to nothing
    looked_up = (shape.vocab_size if shape.name == "7B" else 0) + shape.context
    assert shape.parameters == pytest.approx(multiplied + looked_up * shape.d_model, rel=0.001)
    assert shape.root_parameters + shape.layers * shape.layer_parameters == shape.parameters
    assert shape.gathered_parameters == shape.root_parameters + 2 * shape.layer_parameters
    attention = 12 * shape.layers * shape.d_model * shape.context
    assert shape.flops_per_token == pytest.approx(6 * multiplied + attention, rel=0.001)


def test_an_all_reduce_of_much_takes_its_bytes_over_the_bandwidth_and_one_of_nothing_its_hops():
    much = 1e13
    assert CONSTANTS.all_reduce_seconds(much, 8) == pytest.approx(1.75 * much / 450e9, rel=1e-3)
    assert CONSTANTS.all_reduce_seconds(much, 16) == pytest.approx(1.875 * much / 400e9, rel=1e-3)
    assert CONSTANTS.gather_or_scatter_seconds(much, 16) == pytest.approx(0.9375 * much / 400e9, rel=1e-3)
    two = CONSTANTS.all_reduce_seconds(0, 2)
    assert two == pytest.approx(CONSTANTS.launch_seconds + 2 * CONSTANTS.nvlink_hop_seconds)
    # Round a ring of 1024 GPUs it would be 2 x 1023 hops of at least 3.4 us; a tree of 128 machines has 7 levels.
    assert CONSTANTS.all_reduce_seconds(0, 1024) == pytest.approx(8.4e-6 + 2 * (7 * 3.4e-6 + 7 * 14e-6))
    assert CONSTANTS.gather_or_scatter_seconds(0, 1024) > 896 * 3.4e-6


@each("strategy", STRATEGIES)
@each("shape", SHAPES, ids=lambda shape: shape.name)
def test_one_gpu_loses_nothing_and_more_gpus_lose_more(strategy, shape):
    lost = [1 - scaling.efficiency(strategy, shape, gpus, CONSTANTS.tokens, CONSTANTS) for gpus in COUNTS]
    assert lost[0] == 0
    assert all(0 < fewer <= more < 1 for fewer, more in zip(lost[1:], lost[2:], strict=False))
    step = STRATEGIES[strategy](shape, 64, CONSTANTS.tokens, CONSTANTS)
    assert 0 < step.exposed_seconds <= step.communication_seconds


def test_what_the_backward_hides():
    exposed = scaling.exposed_seconds
    assert exposed([(1.0, 0.5), (2.0, 0.5), (3.0, 0.5)], 3.0) == 0.5  # all but the last
    assert exposed([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], 3.0) == 4.0  # what exceeds the backward after the first
    assert exposed([], 3.0) == 0.0
    small, large = SHAPES[0], SHAPES[1]
    for shape in (small, large):  # the last bucket, however many tokens there are to hide the rest
        embedding = 4 * shape.vocab_size * shape.d_model
        remainder = (4 * shape.parameters - embedding) % CONSTANTS.bucket_bytes
        last = CONSTANTS.all_reduce_seconds(remainder + embedding, 64)
        assert scaling.ddp(shape, 64, 2**24, CONSTANTS).exposed_seconds == pytest.approx(last, rel=1e-6)


def test_hybrid_on_one_machine_is_fsdp_and_beyond_has_no_ring_over_all():
    small = SHAPES[0]
    assert scaling.hybrid(small, 8, 16384, CONSTANTS) == scaling.fsdp(small, 8, 16384, CONSTANTS)
    assert scaling.hybrid(small, 1024, 16384, CONSTANTS).efficiency > 0.9
    assert scaling.fsdp(small, 1024, 16384, CONSTANTS).efficiency < 0.5


@each("strategy", STRATEGIES)
def test_the_tokens_that_pay_do_and_one_sequence_fewer_does_not(strategy):
    small = SHAPES[0]
    tokens = scaling.tokens_that_pay(strategy, small, 16, CONSTANTS)
    assert tokens > small.context
    assert scaling.efficiency(strategy, small, 16, tokens, CONSTANTS) >= 0.9
    assert scaling.efficiency(strategy, small, 16, tokens - small.context, CONSTANTS) < 0.9
    slow = replace(CONSTANTS, network_bytes_per_second=1e9)
    assert scaling.tokens_that_pay(strategy, small, 16, slow) > tokens


def test_memory():
    large = SHAPES[2]
    assert scaling.state_bytes("DDP", large, 64, CONSTANTS) == 16 * large.parameters
    gathered = scaling.state_bytes("FSDP", large, 2**30, CONSTANTS)
    assert scaling.state_bytes("FSDP", large, 64, CONSTANTS) - gathered == pytest.approx(16 * large.parameters / 64)
    hybrid = scaling.state_bytes("hybrid", large, 64, CONSTANTS)
    assert hybrid == scaling.state_bytes("FSDP", large, 8, CONSTANTS)


def test_numbers_in_the_text_of_the_page():
    small = SHAPES[0]
    assert "31% of all gradients" in DOCS and round(small.vocab_size * small.d_model / small.parameters, 2) == 0.31
    assert "that is 5 ms" in DOCS and round(CONSTANTS.ring_hops_seconds(1, 1024) * 1e3) == 5
    assert "400 GB/s instead of NVLink's 450" in DOCS
    assert [CONSTANTS.ring_bytes_per_second(gpus) for gpus in (16, 8)] == [400e9, 450e9]
    assert "which is 10 GB" in DOCS and round(12 * small.vocab_size * 16384 / 1e9) == 10
