"""state/digest: what changes it, what does not, and where it stands."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import TINY_STORIES, metrics, tensors, train
from training.fingerprint import VALUES_AT_ONCE, digests
from training.manifest import read_manifest

TENSORS = {
    "matrix": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
    "vector": torch.arange(6, dtype=torch.float32),
    "half": torch.ones(4, 2, dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


def changed(**tensors):
    return str(digests(TENSORS | tensors))


def test_any_bit_and_any_place_counts():
    digest, matrix = changed(), TENSORS["matrix"]
    assert digest == changed(matrix=matrix.clone()) and len(digest) == 16
    found = {digest}
    for row in range(5):
        for column in range(7):
            for bit in (0, 22, 31):
                other = matrix.clone()
                other.view(torch.int32)[row, column] ^= 2**bit - 2**32 * (bit == 31)
                found.add(changed(matrix=other))
    assert len(found) == 1 + 5 * 7 * 3
    permuted = [matrix.flip(0), matrix.flip(1), matrix[[1, 0, 2, 3, 4]], matrix[:, [1, 0, 2, 3, 4, 5, 6]], -matrix]
    found |= {changed(matrix=other) for other in permuted}
    found |= {changed(vector=TENSORS["vector"].flip(0)), changed(number=torch.tensor(-3.0))}
    found.add(changed(matrix=matrix.T.reshape(5, 7)))
    renamed = {("Matrix" if name == "matrix" else name): tensor for name, tensor in TENSORS.items()}
    found.add(str(digests(renamed)))
    assert len(found) == 1 + 5 * 7 * 3 + 5 + 2 + 2


def test_two_tensors_that_change_places_are_seen():
    a, b = torch.ones(3, 3), torch.zeros(3, 3)
    assert str(digests({"a": a, "b": b})) != str(digests({"a": b, "b": a}))


def test_a_large_tensor_is_the_same_however_it_is_cut(monkeypatch):
    large = torch.randn(3 * VALUES_AT_ONCE // 1000, 1000)
    whole = str(digests({"large": large}))
    monkeypatch.setattr("training.fingerprint.VALUES_AT_ONCE", 1)
    assert whole == str(digests({"large": large}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two processes, saved at steps 2, 4 and 5, logged at 3 and 5, evaluated at 4 and 5; stopped at 5."""
    out_dir = tmp_path_factory.mktemp("runs")
    every = "--checkpoint.every 2 --tracking.log_every 3 --evaluation.every 4 --check_replicas_every 0"
    train(*TINY_STORIES, *every.split(), "--steps", 5, "--out_dir", out_dir, "--name", "run", processes=2)
    return out_dir / "run"


def test_it_stands_in_every_row_and_is_that_of_the_files_of_a_checkpoint(run):
    rows = {row["step"]: row for row in metrics(run)}
    assert list(rows) == [2, 3, 4, 5] and len({row["state/digest"] for row in rows.values()}) == 4
    for step in (2, 4, 5):
        assert rows[step]["state/digest"] == str(digests(tensors(run, step)))


def test_a_state_that_was_not_read_as_it_was_saved_is_refused(run):
    checkpoint = run / "checkpoints" / "step-00000005"
    manifest = read_manifest(checkpoint)
    forged = {**manifest.metrics, "state/digest": "0123456789abcdef"}
    replace(manifest, metrics=forged).write(checkpoint)
    done = train(*TINY_STORIES, "--resume", checkpoint, "--name", "other", "--out_dir", run.parent, exit_code=1)
    assert "the state that was read has the digest" in done.stderr and "Traceback" not in done.stderr
