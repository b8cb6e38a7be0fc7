"""The model of many GPUs: what must hold of it whatever the constants, and that docs/scaling.md has its tables."""

import re
from dataclasses import replace

import pytest
import yaml

from config.errors import ConfigError
from config.parser import parse_tool
from docs import scaling
from docs.scaling import SHAPES, STRATEGIES, Machines
from scaling import recipe
from tests.conftest import ROOT

MACHINES = Machines()
COUNTS = [1, 2, 4, 8, 16, 64, 256, 1024, 4096]
DOCS = (ROOT / "docs" / "scaling.md").read_text()
each = pytest.mark.parametrize


def test_the_page_has_the_tables_that_the_command_prints(capsys):
    scaling.main(MACHINES)
    tables = capsys.readouterr().out
    assert tables.count("|---|") > 5
    between = DOCS.split("<!-- python -m docs.scaling -->")[1].split("<!-- end -->")[0]
    assert between.strip() == tables.strip(), "run python -m benchmarks.page"


@each("command", re.findall(r"^python -m docs.scaling(.*)$", DOCS, re.MULTILINE))
def test_the_commands_of_the_page_run(command, capsys):
    scaling.main(parse_tool(Machines, "scaling", command.split()))
    assert capsys.readouterr().out.count("|---|") > 5


def test_what_nothing_can_be_divided_by_is_refused():
    for name in ("achieved_share", "gpus_per_machine", "tokens"):
        with pytest.raises(ConfigError, match=f"{name}: 0 must be"):
            parse_tool(Machines, "scaling", [f"--{name}", "0"])
    for name in ("nvlink_hop_seconds", "gradient_bytes"):
        with pytest.raises(ConfigError, match=f"{name}: -1 must be"):
            parse_tool(Machines, "scaling", [f"--{name}", "-1"])


@each("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_and_flops_are_those_of_the_literature(shape):
    multiplied = 12 * shape.layers * shape.d_model**2 + shape.vocab_size * shape.d_model  # norms are next to nothing
    looked_up = (shape.vocab_size if shape.name == "7B" else 0) + shape.context
    assert shape.parameters == pytest.approx(multiplied + looked_up * shape.d_model, rel=0.001)
    assert shape.layer_parameters == pytest.approx(12 * shape.d_model**2, rel=0.001)
    assert shape.root_parameters == shape.parameters - shape.layers * shape.layer_parameters
    attention = 12 * shape.layers * shape.d_model * shape.context
    assert shape.flops_per_token == pytest.approx(6 * multiplied + attention, rel=0.001)


def test_an_all_reduce_of_much_takes_its_bytes_over_the_bandwidth_and_one_of_nothing_its_hops():
    much = 1e13
    assert MACHINES.all_reduce_seconds(much, 8) == pytest.approx(1.75 * much / 450e9, rel=1e-3)
    assert MACHINES.all_reduce_seconds(much, 16) == pytest.approx(1.875 * much / 400e9, rel=1e-3)
    assert MACHINES.gather_or_scatter_seconds(much, 16) == pytest.approx(0.9375 * much / 400e9, rel=1e-3)
    two = MACHINES.all_reduce_seconds(0, 2)
    assert two == pytest.approx(MACHINES.launch_seconds + 2 * MACHINES.nvlink_hop_seconds)
    # Round a ring of 1024 GPUs it would be 2 x 1023 hops of at least 3.4 us; a tree of 128 machines has 7 levels.
    assert MACHINES.all_reduce_seconds(0, 1024) == pytest.approx(8.4e-6 + 2 * (7 * 3.4e-6 + 7 * 14e-6))
    assert MACHINES.gather_or_scatter_seconds(0, 1024) > 896 * 3.4e-6


@each("strategy", STRATEGIES)
@each("shape", SHAPES, ids=lambda shape: shape.name)
def test_one_gpu_loses_nothing_and_more_gpus_lose_more(strategy, shape):
    steps = [MACHINES.step(strategy, shape, gpus, MACHINES.tokens) for gpus in COUNTS]
    lost = [1 - step.efficiency for step in steps]
    assert lost[0] == 0
    assert all(0 < fewer <= more < 1 for fewer, more in zip(lost[1:], lost[2:], strict=False))
    assert all(step.efficiency_without_overlap <= step.efficiency for step in steps)


def test_what_the_backward_hides():
    shape, fast = SHAPES[0], replace(MACHINES, launch_seconds=0.0, nvlink_hop_seconds=0.0, nvlink_bytes_per_second=1e30)
    embedding = 4 * shape.vocab_size * shape.d_model
    buckets, remainder = divmod(4 * shape.parameters - embedding, MACHINES.bucket_bytes)
    for machines in (MACHINES, fast):
        each, last = (machines.all_reduce_seconds(size, 64) for size in (machines.bucket_bytes, remainder + embedding))
        for backward in (1e-3, 0.01, 0.1, 10.0):  # one bucket after the other, none before its gradients are there
            end, ready_every = 0.0, backward * machines.bucket_bytes / (4 * shape.parameters - embedding)
            for bucket in range(int(buckets)):
                end = max(end, (bucket + 1) * ready_every) + each
            communication, exposed = machines.ddp(shape, 64, backward)
            assert exposed == pytest.approx(max(end, backward) + last - backward)
            assert communication == pytest.approx(buckets * each + last)


def test_hybrid_on_one_machine_is_fsdp_and_beyond_has_no_ring_over_all():
    small = SHAPES[0]
    assert MACHINES.step("hybrid", small, 8, 16384) == MACHINES.step("FSDP", small, 8, 16384)
    assert MACHINES.step("hybrid", small, 1024, 16384).efficiency > 0.9
    assert MACHINES.step("FSDP", small, 1024, 16384).efficiency < 0.5


@each("strategy", STRATEGIES)
def test_the_tokens_that_pay_do_and_one_sequence_fewer_does_not(strategy):
    small = SHAPES[0]
    tokens = MACHINES.tokens_that_pay(strategy, small, 16)
    assert tokens > small.context
    assert MACHINES.step(strategy, small, 16, tokens).efficiency >= 0.9
    assert MACHINES.step(strategy, small, 16, tokens - small.context).efficiency < 0.9
    slow = replace(MACHINES, network_bytes_per_second=1e9)
    assert slow.tokens_that_pay(strategy, small, 16) > tokens


def test_gpus_whose_memory_is_too_small_share_no_batch():
    small, large = replace(MACHINES, memory_bytes=80e9), SHAPES[2]
    assert [small.gpus_that_pay(strategy, large) for strategy in STRATEGIES] == [0, 512, 512]
    assert "| - | 512 | 512 |\n\n" in scaling.tables(small)


def test_memory():
    def memory(strategy, gpus):
        return MACHINES.step(strategy, large, gpus, 4096).memory_bytes

    large, gathered = SHAPES[2], 2 * (SHAPES[2].root_parameters + 2 * SHAPES[2].layer_parameters)
    assert memory("FSDP", 64) - memory("FSDP", 2**30) == pytest.approx(16 * large.parameters / 64)
    assert memory("DDP", 64) - memory("FSDP", 2**30) == pytest.approx(16 * large.parameters - gathered)
    assert memory("hybrid", 64) == memory("FSDP", 8)


def test_numbers_in_the_text_of_the_page():
    small = SHAPES[0]
    assert "31% of all gradients" in DOCS and round(small.vocab_size * small.d_model / small.parameters, 2) == 0.31
    assert "that is 5 ms" in DOCS and round(MACHINES.ring(1024)[1] * 1e3) == 5
    assert "400 GB/s instead of NVLink's 450" in DOCS
    assert [MACHINES.ring(gpus)[0] for gpus in (16, 8)] == [400e9, 450e9]
    assert "which is 10 GB" in DOCS and round(12 * small.vocab_size * 16384 / 1e9) == 10


def test_a_whole_run_is_that_of_the_recipe_and_eight_gpus_are_no_more_than_eight_times_as_fast():
    for run in map(scaling.WholeRun, scaling.DEPTHS):
        printed = yaml.safe_load(recipe.as_yaml(recipe.recipe(int(run.shape.name), 20, "qwen3", "a", 32768)))
        assert run.tokens == printed["steps"] * printed["global_batch_size"] * printed["seq_len"]
        assert run.shape.layers == printed["model"]["n_layers"] and run.shape.d_model == printed["model"]["d_model"]
        one, eight = run.hours(MACHINES, 1), run.hours(MACHINES, 8)
        assert one * 3600 * 0.5 * 790e12 == pytest.approx(run.tokens * run.shape.flops_per_token)
        assert one / 8 < eight < one / 4


def test_what_others_report_is_set_against_the_same_arithmetic():
    """Their FLOPs by the other formula, 6 a parameter, and what one finds by hand."""
    nanogpt, nanochat = scaling.REPORTED
    assert nanogpt.flops == pytest.approx(6 * 124e6 * 3e11, rel=0.2)
    assert nanochat.flops / nanochat.seconds / 8 == pytest.approx(494e12, rel=0.01)
    assert "| 4.3e+19 | 3.04 | 494 | 50% | 3.81 |" in scaling.reported(MACHINES)
