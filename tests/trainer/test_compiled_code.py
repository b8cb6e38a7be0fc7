"""Code compiled for one kind of processor is not used on another."""

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY_STORIES, metrics, train
from trainer.prepare_model import separate_compilation_caches


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """Return a function: the cache folder of a process with these variables, started by the process before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))

    def folder(**environment):
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        separate_compilation_caches()
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    return folder


def test_each_processor_kind_has_its_own_folder(folder_of, tmp_path, monkeypatch):
    here, narrow, again = folder_of(), folder_of(ATEN_CPU_CAPABILITY="avx2"), folder_of()
    features = torch.cpu.get_capabilities()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features | {"avx512_f": not features["avx512_f"]})
    other = folder_of()
    assert here == again and len({here, narrow, other}) == 3
    assert {folder.parent for folder in (here, narrow, other)} == {tmp_path / "mine"}


def test_number_of_cores_changes_no_folder(folder_of, monkeypatch):
    here, features = folder_of(), torch.cpu.get_capabilities()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features | {"num_logical_cores": 96})
    assert folder_of() == here


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="a processor without wider registers")
def test_narrow_and_wide_vector_code_is_separate(tmp_path):
    """With a shared folder, a wide start after a narrow one aborts ("double free or corruption").

    verify.py is a narrow start: it restricts itself to instructions that every processor has.
    """

    def digest(cache, name, **environment):
        words = "--steps 6 --compile true --resume never --tracking.wandb disabled".split()
        train(
            *TINY_STORIES, *words, "--out_dir", tmp_path, "--name", name, TORCHINDUCTOR_CACHE_DIR=cache, **environment
        )
        return metrics(tmp_path / name)[-1]["state/digest"]

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    wide, narrow = digest(first, "wide"), digest(second, "narrow", ATEN_CPU_CAPABILITY="avx2")
    assert digest(second, "wide_after_narrow") == wide
    assert digest(first, "narrow_after_wide", ATEN_CPU_CAPABILITY="avx2") == narrow != wide
