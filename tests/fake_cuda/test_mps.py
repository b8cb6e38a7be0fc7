"""Training on the emulated Apple GPU of README.md: losses are the CPU's, and a real one has every operation."""

import pytest

from tests.conftest import TINY_STORIES, environment, metrics, train
from tests.fake_cuda import device, mps
from tests.support import forked
from tests.support.golden import QWEN, corpus

pytestmark = [pytest.mark.slow, pytest.mark.linux_only]
RUNS = {
    "stories": [],
    "muon": [*QWEN, *"--optimizer.name muon --evaluation.ema_decay 0.9 --chunked_loss true".split()],
    "windows": """--model.window 16 --model.dropout 0 --activation_checkpointing true --tracking.block_stats true
        --evaluation.num_scored_generations 4""".split(),
    "documents": """--data.source text --data.packing isolated --seq_len 64
        --evaluation.num_logged_generations 2""".split(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory; skip the tests if the device cannot be compiled."""
    try:
        device.build("-DFAKE_MPS")
    except RuntimeError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("mps")


@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_cpu_and_mps_has_kernels(name, folder):
    """Of training, clipping, the optimizer, evaluation, generation and saving, by the real train.py."""
    words = [*TINY_STORIES, *RUNS[name], "--out_dir", str(folder), *"--checkpoint.every 4 --steps 4".split()]
    if name == "documents":
        words += ["--data.path", str(corpus(folder))]
    file = folder / "operations"
    env = environment(ACCELERATE_TORCH_DEVICE="mps", OPERATIONS=str(file))
    done = forked.run("tests/fake_cuda/mps_train.py", [*words, "--name", name], 0, env)
    assert done.returncode == 0 and "1 x mps" in done.stdout, done.stdout + done.stderr
    operations = file.read_text().split()
    assert {"aten::mm.out", "aten::_softmax.out", "aten::embedding_dense_backward"} <= {*operations}
    assert mps.without_kernel(operations) == []
    train(*words, "--name", f"{name}_on_cpu")
    gpu, cpu = (metrics(folder / run)[-1] for run in (name, f"{name}_on_cpu"))
    tolerance = 2e-3 if name == "muon" else 1e-5  # Muon multiplies in bfloat16 on a GPU
    assert gpu["train/loss"] == pytest.approx(cpu["train/loss"], rel=tolerance)
    assert gpu["val/loss"] == pytest.approx(cpu["val/loss"], rel=tolerance)


def test_without_kernel_names_operations_that_mps_lacks():
    assert mps.without_kernel(["aten::mm.out", "aten::linalg_eig"]) == ["aten::linalg_eig"]
