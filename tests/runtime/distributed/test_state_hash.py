"""state/digest: what changes it, what does not, and where it is stored."""

from dataclasses import replace

import pytest
import torch

from runtime.config.errors import ConfigError, RunError
from runtime.distributed.state_hash import VALUES_AT_ONCE, _factors, _hash_rows, digest_tensors, state_digest
from runtime.machine.cpu import prepare_exact
from tests.conftest import TINY_STORIES, environment, metrics, tensors, train
from tests.support import forked
from trainer.checkpoint.manifest import read_manifest

TENSORS = {
    "matrix": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
    "vector": torch.arange(6, dtype=torch.float32),
    "half": torch.ones(4, 2, dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


def changed(**tensors):
    return str(digest_tensors(TENSORS | tensors))


def test_digest_changes_with_any_bit_or_permutation():
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
    found.add(str(digest_tensors(renamed)))
    assert len(found) == 1 + 5 * 7 * 3 + 5 + 2 + 2


def test_digest_changes_when_tensors_swap():
    a, b = torch.ones(3, 3), torch.zeros(3, 3)
    assert str(digest_tensors({"a": a, "b": b})) != str(digest_tensors({"a": b, "b": a}))


def test_digest_does_not_depend_on_chunks(monkeypatch):
    """Hashed by numpy one by one, and as on a GPU: large tensors in chunks, small ones of one width together."""
    state = TENSORS | {"large": torch.randn(400, 7), "other": torch.randn(3, 7), "numbers": torch.randn(9)}
    whole = digest_tensors(state).values.tolist()
    for at_once in (1, 70, 2**24):
        monkeypatch.setitem(VALUES_AT_ONCE, "cpu", at_once)
        assert whole == digest_tensors(state).values.tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_hash_rows_matches_python_integers(dtype):
    """Python's integers do not overflow."""
    limits = torch.iinfo(dtype)
    rows = torch.randint(limits.min, limits.max, (3, 1000), dtype=dtype, generator=torch.Generator().manual_seed(1))
    factors = _factors(1000, rows.device).tolist()
    expected = [sum(map(int.__mul__, row, factors)) % 2**64 for row in rows.tolist()]
    assert [number % 2**64 for number in _hash_rows(rows).tolist()] == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two processes, saved at steps 2, 4 and 5, logged at 3 and 5, evaluated at 4 and 5; stopped at 5."""
    out_dir = tmp_path_factory.mktemp("runs")
    every = "--checkpoint.every 2 --tracking.log_every 3 --evaluation.every 4 --check_replicas_every 0"
    train(*TINY_STORIES, *every.split(), "--steps", 5, "--out_dir", out_dir, "--name", "run", processes=2)
    return out_dir / "run"


def test_logged_digest_equals_digest_of_checkpoint(run):
    rows = {row["step"]: row for row in metrics(run)}
    assert list(rows) == [2, 3, 4, 5] and len({row["state/digest"] for row in rows.values()}) == 4
    for step in (2, 4, 5):
        assert rows[step]["state/digest"] == str(digest_tensors(tensors(run, step)))


def test_loaded_state_must_match_the_manifest(run):
    checkpoint = run / "checkpoints" / "step-00000005"
    manifest = read_manifest(checkpoint)
    forged = {**manifest.metrics, "state/digest": "0123456789abcdef"}
    replace(manifest, metrics=forged).write(checkpoint)
    done = train(*TINY_STORIES, "--branch_from", checkpoint, "--name", "other", "--out_dir", run.parent, exit_code=1)
    assert "the loaded state has the digest" in done.stderr and "Traceback" not in done.stderr


# Bits on any x86-64 processor


def test_prepare_exact_refuses_other_instructions(monkeypatch):
    monkeypatch.setattr("runtime.machine.cpu.os.environ", {})
    for setter in ("use_deterministic_algorithms", "set_num_threads"):
        monkeypatch.setattr(torch, setter, lambda value: None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(ConfigError, match="exact: true needs AVX2, but torch computes with AVX512"):
        prepare_exact()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is without MKL")
@pytest.mark.parametrize("branch", ["", "COMPATIBLE"])
def test_exact_refuses_earlier_mkl_products(branch, tmp_path):
    """In a notebook, forked processes keep the code branch that MKL selected at the first product."""
    words = [*TINY_STORIES, *"--exact true --steps 2 --name run --out_dir".split(), str(tmp_path)]
    code = f"import runpy, sys, torch; torch.ones(9, 9) @ torch.ones(9, 9); sys.argv = {['train.py', *words]}\n"
    code += "runpy.run_path('train.py', run_name='__main__')"
    done = forked.run(
        "-c", [code], 0, environment(ATEN_CPU_CAPABILITY="avx2", **({"MKL_CBWR": branch} if branch else {}))
    )
    assert (done.returncode == 0) == (branch == "COMPATIBLE"), done.stderr
    if not branch:
        assert done.returncode == 2 and "this process has already multiplied matrices in another" in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("dimension", "placement"), [(None, "Replicate()"), (1, "Shard(dim=1)")])
def test_state_not_sharded_by_rows_is_refused(dimension, placement, mesh):
    """An optimizer that keeps gradient.T @ gradient has such state under FSDP2."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    network = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(network.parameters())
    placements = [Replicate() if dimension is None else Shard(dimension)]
    optimizer.state[network.weight]["basis"] = distribute_tensor(torch.eye(4), mesh, placements)
    with pytest.raises(RunError, match=r"^optimizer.state.weight.basis, which SGD keeps, is a DTensor of") as caught:
        state_digest(network, optimizer)
    assert placement in str(caught.value)
    optimizer.state[network.weight]["basis"] = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    state_digest(network, optimizer)
