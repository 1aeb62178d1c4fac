"""Ranks that were started with different commands or files end with one sentence, and make nothing."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dspark.errors import DSparkError
from tests.cache_support import precompute_options, precompute_rank, small_data
from tests.distributed import RankPool
from tests.test_training import run_rank, tiny_settings


def refused(rank: int, size: int, job: Any, values: list[dict[str, Any]]) -> str:
    with pytest.raises(DSparkError) as refusal:
        job(rank, size, values[rank])
    return str(refusal.value)


def test_training_ranks_with_other_settings(two_ranks: RankPool, tmp_path: Path) -> None:
    both = [tiny_settings(tmp_path / "run", seed=seed, micro_batch_size=2).as_dict() for seed in (1, 2)]
    said = two_ranks.run(refused, run_rank, both)
    assert said[0] == said[1] and said[0].startswith("seed is 1 on rank 0 and 2 on rank 1; start every rank")
    assert not (tmp_path / "run").exists()


def test_training_ranks_with_other_data_in_the_same_place(two_ranks: RankPool, tmp_path: Path) -> None:
    """Each machine's own disk, say: the places may differ, what they hold may not."""
    folders = [small_data(tmp_path / name, train)[0] for name, train in (("a", 10), ("b", 9))]
    both = [tiny_settings(tmp_path / "run", data=data, micro_batch_size=2).as_dict() for data in folders]
    said = two_ranks.run(refused, run_rank, both)
    assert said[0] == said[1] and said[0].startswith("the training data's SHA-256 is '")
    assert not (tmp_path / "run").exists()


def test_precompute_ranks_with_other_taps(two_ranks: RankPool, tmp_path: Path) -> None:
    data = small_data(tmp_path / "data")[0]
    both = [precompute_options(data, tmp_path / "cache", target_layer_ids=taps) for taps in ([1, 3], [1, 4])]
    said = two_ranks.run(refused, precompute_rank, both)
    assert said[0] == said[1]
    assert said[0].startswith("features.target_layer_ids is [1, 3] on rank 0 and [1, 4] on rank 1")
    assert not (tmp_path / "cache").exists()
