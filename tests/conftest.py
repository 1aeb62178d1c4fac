"""Shared fixtures: the golden files and pools of ranks."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when `datasets` is imported; removed again below.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="dspark-encoded-")

import pytest
import torch

from tests.distributed import RankPool

FIXTURES = Path(__file__).parent / "fixtures"


def pytest_collection_finish() -> None:
    # See tests/distributed.py: training looks for what earlier runs left, and imports are not that.
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def encoded_conversations() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of reference files."""
    return FIXTURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module's own folder with what `parallel_support.settings` names: a tiny target and its conversations."""
    from tests.parallel_support import save_inputs

    return save_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
