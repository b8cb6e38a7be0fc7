"""tracking.block_stats: logged statistics match the checkpoints, and no bit of the run changes."""

import pytest
import torch

from data.corpus import load_corpus
from model.gpt import GPTModel
from runtime.config.parser import parse_config
from tests.conftest import TINY_STORIES, metrics, tensors, train
from trainer.block_stats import BlockStatistics

WORDS = "--steps 3 --checkpoint.every 1 --schedule.warmup_steps 0 --model.dropout 0 --optimizer.grad_clip null"
SHORT = [*TINY_STORIES, *WORDS.split()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("layers")
    for name in ("true", "false"):
        train(*SHORT, "--tracking.block_stats", name, "--name", name, "--out_dir", out_dir, processes=2)
    return out_dir / "true"


def norm(tensors):
    return torch.cat([tensor.flatten().double() for tensor in tensors]).norm().item()


@pytest.mark.slow
def test_block_statistics_change_no_bit(run):
    without = metrics(run.with_name("false"))
    assert [{k: v for k, v in row.items() if not k.startswith("layers/")} for row in metrics(run)] == without
    assert len({row["state/digest"] for row in without}) == 3


@pytest.mark.parametrize("block", [0, 1])
def test_logged_norms_match_checkpoints(run, block):
    rows, states = metrics(run), [tensors(run, step) for step in (1, 2, 3)]
    weights = [{n: t for n, t in state.items() if n.startswith(f"model.blocks.{block}.")} for state in states]
    moments = [t for n, t in states[0].items() if f".blocks.{block}." in n and n.endswith("exp_avg")]
    assert rows[0][f"layers/gradient_norm/{block}"] == pytest.approx(norm(moments) / 0.1, rel=1e-4)
    for row, before, after in zip(rows[1:], weights, weights[1:], strict=False):
        assert row[f"layers/weight_norm/{block}"] == pytest.approx(norm(before.values()), rel=1e-5)
        moved = norm(after[name] - before[name] for name in before) / norm(before.values())
        assert row[f"layers/update_ratio/{block}"] == pytest.approx(moved, rel=1e-3)


def test_activation_rms_covers_the_global_batch(run):
    config = parse_config([*map(str, SHORT)])
    corpus = load_corpus(config)
    config = corpus.fill_in(config)
    model = GPTModel(config.model)
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors(run, 1).items() if n.startswith("model.")})
    outputs = {}
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, inputs, output, index=index: outputs.update({index: output}))
    rows = [corpus.train[i]["input_ids"] for i in corpus.global_batches(config).indices(1)]
    model(torch.stack(rows))
    for index, output in outputs.items():
        expected = output.double().square().mean().sqrt().item()
        assert metrics(run)[1][f"layers/activation_rms/{index}"] == pytest.approx(expected, rel=1e-5)


def recorded(blocks):
    """Statistics of blocks, and an optimizer that updates nothing."""
    optimizer = torch.optim.SGD([*torch.nn.ModuleList(blocks).parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.0)
    statistics = BlockStatistics(blocks, optimizer)
    return statistics, optimizer


def test_block_output_is_first_of_a_tuple():
    """A block with an auxiliary loss returns a tuple. Steps that are not logged are not recorded."""
    block = torch.nn.Identity()
    block.register_parameter("weight", torch.nn.Parameter(torch.ones(1)))
    statistics, optimizer = recorded([block])
    for enabled in (False, True):
        with statistics.record(enabled):
            block((torch.tensor([3.0, -3.0]), torch.tensor(99.0)))
            optimizer.step()
        assert bool(statistics.metrics) == enabled
    assert statistics.metrics["layers/activation_rms/0"] == 3.0


def test_block_statistics_handle_shared_and_skipped_blocks():
    """Blocks that share weights, and stochastic depth."""
    shared, left_out = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    statistics, optimizer = recorded([shared, left_out, shared])
    for weight, bias, left_out_now in ((1.0, 1.0, False), (1.0, 2.0, True)):  # from 1 to 2 and 3, then to 3 and 5
        torch.nn.init.constant_(shared.weight, weight), torch.nn.init.constant_(shared.bias, bias)
        with statistics.record(True):
            outputs = [shared(torch.ones(1))]
            outputs.append(shared(outputs[0]))
            if not left_out_now:
                left_out(torch.ones(1))
            optimizer.step()
        expected = torch.cat(outputs).square().mean().sqrt().item()
        seen = [statistics.metrics[f"layers/activation_rms/{block}"] for block in range(3)]
        assert seen[0] == seen[2] == pytest.approx(expected)
        assert (seen[1] == 0) is left_out_now


def test_skipped_update_has_no_statistics():
    block = torch.nn.Linear(1, 1)
    statistics, optimizer = recorded([block])
    with statistics.record(True):
        optimizer.step()
    assert statistics.metrics["layers/activation_rms/0"] == 0, "stochastic depth may skip the only block"
    with statistics.record(True):
        pass
    assert statistics.metrics == {}
