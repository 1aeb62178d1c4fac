"""Context parallelism: who holds which rows, and that a run equals one process under the same rule for anchors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.blocks import BlockLayout, draw_anchors, lay_out_blocks
from megatron_dspark.context_shards import blocks_within_shard, owners, padded_length, shard_context
from megatron_dspark.errors import DSparkError
from tests.distributed import RankPool
from tests.parallel_support import (
    Record,
    assert_equal_metrics,
    assert_equal_runs,
    compared,
    run,
    settings,
)

TOLERANCE = 1e-10


def test_chunks_are_dealt_in_a_zigzag() -> None:
    assert owners(16, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    assert [padded_length(tokens, 4) for tokens in (1, 8, 9)] == [8, 8, 16]
    assert padded_length(9, 1) == 9


@pytest.mark.parametrize("size", (2, 4))
def test_shards_partition_every_document(size: int) -> None:
    lengths = ([16, 8, 24], [32, 16], [48])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    documents[1, 32:] = -1
    shards = [shard_context(documents, size, rank) for rank in range(size)]
    for row, parts in enumerate(lengths):
        held = torch.cat([shard.rows[row] for shard in shards])
        assert held.sort().values.tolist() == list(range(48))
        expected = torch.cat([owners(length, size) for length in parts])
        for shard in shards:
            assert torch.equal(shard.owner[row], expected)
            assert torch.equal(shard.local[row, shard.rows[row]], torch.arange(48 // size))
    with pytest.raises(DSparkError, match=f"takes 9 rows, which {size} context-parallel ranks cannot share evenly"):
        shard_context(torch.tensor([[0] * 9 + [1] * 39]), size, 0)


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("tokens", (5, 40, 61))
def test_anchors_have_their_whole_block_on_one_rank(size: int, tokens: int) -> None:
    block, owner = 4, owners(padded_length(tokens, size), size).tolist()
    allowed = blocks_within_shard(tokens, block, size)
    for anchor in range(tokens):
        rows = range(anchor, min(anchor + block, tokens))
        assert bool(allowed[anchor]) == (len({owner[row] for row in rows}) == 1)
    drawn = draw_anchors(torch.ones(tokens, dtype=torch.bool), tokens, seed=1, epoch=0, sample_id="s", within=allowed)
    assert set(drawn.tolist()) == set(allowed[:-1].nonzero().flatten().tolist())


def test_blocks_across_ranks_are_refused_by_every_rank() -> None:
    """Rows 4 … 7 of sixteen are the second rank's, and the label of slot 1 is taught by row 4."""
    documents, anchors = torch.zeros(1, 16, dtype=torch.int64), torch.tensor([[3, -1]])
    mask = torch.ones(1, 16, dtype=torch.bool)

    def blocks(last: int) -> BlockLayout:
        supervised = mask & (torch.arange(16) <= last)
        return lay_out_blocks(documents, supervised, anchors, block_size=4, mask_token_id=0, documents=documents)

    for rank in range(2):
        shard = shard_context(documents, 2, rank)
        own = shard.own_blocks(blocks(last=4))
        assert own.padded_anchors.tolist() == [[3 if rank == 0 else -1]] and bool(own.supervised.any()) == (rank == 0)
        with pytest.raises(DSparkError, match="the target's output at row 4, which another context-parallel rank"):
            shard.own_blocks(blocks(last=5))


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[int, Record]:
    """One process under the anchor rule of each size."""
    return {
        size: run(0, 1, settings(folder, folder / f"reference{size}", anchor_context_parallel=size).as_dict())
        for size in (2, 4)
    }


PACKED = {"packing": True, "packed_length": 144}
# What the matrix of layouts does not have.
TWO: dict[str, dict[str, Any]] = {
    "CP2-recompute-micro-batches": {"recompute": True, "micro_batch_size": 1},
    "CP2-packed-memory": {**PACKED, "feature_memory_gib": 0.1, "micro_batch_size": 1},
    "CP2-dense-distributed": {"block_attention": "dense", "optimizer.distributed": True},
}
FOUR: dict[str, dict[str, Any]] = {"CP4-packed": {**PACKED, "parallel.context": 4}}


def check(name: str, changes: dict[str, Any], pool: RankPool, folder: Path, references: Any, tmp_path: Path) -> None:
    changes = {"parallel.context": 2, **changes}
    values = settings(folder, tmp_path / "run", **changes)
    records = pool.run(run, values.as_dict())
    size = changes["parallel.context"]
    assert_equal_runs(records, references[size], TOLERANCE)
    assert_equal_metrics(compared(tmp_path / "run"), compared(folder / f"reference{size}"), TOLERANCE)
    for record in records:
        assert record.report == records[0].report, name


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(
    name: str, two_ranks: RankPool, folder: Path, references: dict[int, Record], tmp_path: Path
) -> None:
    check(name, TWO[name], two_ranks, folder, references, tmp_path)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(
    name: str, four_ranks: RankPool, folder: Path, references: dict[int, Record], tmp_path: Path
) -> None:
    check(name, FOUR[name], four_ranks, folder, references, tmp_path)


@pytest.mark.usefixtures("references")
def test_anchors_of_another_layout_are_refused(folder: Path, tmp_path: Path) -> None:
    values = settings(folder, tmp_path / "run", **{"parallel.context": 2}, anchor_context_parallel=4)
    with pytest.raises(DSparkError, match=r"anchor_context_parallel is 4 and parallel.context 2"):
        run(0, 1, values.as_dict())
    values = settings(folder, folder / "reference2", anchor_context_parallel=4)
    with pytest.raises(DSparkError, match=r"drawn for context parallelism of size 2 .* would now be for 4"):
        run(0, 1, values.as_dict())
