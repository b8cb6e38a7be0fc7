"""Fixtures of the tests on fake devices."""

import pytest

from tests.data.prepare.test_prepare import make, make_documents, write_jsonl
from tests.fake_cuda import device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory; skip the tests if the fake devices cannot be compiled."""
    try:
        device.build()
    except RuntimeError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("fake_cuda")


@pytest.fixture(scope="module")
def corpus(folder):
    source = write_jsonl(folder / "documents.jsonl", make_documents(60))
    make(source, folder / "corpus", validation="hash:0.2")
    return folder / "corpus"
