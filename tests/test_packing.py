"""Packed rows: who shares a row, and that a packed run is the unpacked run, gradient by gradient."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.packing import pack
from megatron_dspark.data.sampler import AnchorRule, Dealer, MicroBatch, Sampler
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from tests.distributed import RankPool
from tests.parallel_support import (
    Record,
    assert_equal_metrics,
    assert_equal_runs,
    compared,
    run,
    settings,
)


@pytest.mark.parametrize("capacity", (40, 100, 333))
def test_pack_holds_everything_once_and_wastes_little(capacity: int) -> None:
    generator = torch.Generator().manual_seed(capacity)
    lengths = torch.randint(1, 41, (200,), generator=generator).tolist()
    rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(200))
    totals = [sum(lengths[index] for index in row) for row in rows]
    assert max(totals) <= capacity and totals == sorted(totals, reverse=True)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // capacity) + 1
    assert rows == pack(lengths, capacity)


def sample(number: int, length: int) -> ChatSample:
    generator = torch.Generator().manual_seed(number)
    mask = torch.arange(length) >= length // 3
    return ChatSample(f"s{number}", torch.randint(1, 100, (length,), generator=generator), mask)


SAMPLES = [sample(number, 10 + 7 * number % 31) for number in range(11)]


def stream(ranks: int, rows: int, size: int, row_tokens: int | None) -> Iterator[list[MicroBatch]]:
    for step in range(3):
        for rank in range(ranks):
            dealer = Dealer(rows, rank, ranks, context_parallel_size=size, row_tokens=row_tokens)
            rule = AnchorRule(4, 7, block_size=3, context_parallel_size=2)
            yield list(Sampler(SAMPLES, anchors=rule, dealer=dealer, global_batch_size=8).step_batches(step * 8))


def contents(batches: list[MicroBatch]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(sample, its tokens, its anchors counted from its own start) of every document."""
    found = []
    for batch in batches:
        names = iter(batch.sample_ids)
        documents = torch.where(batch.loss_mask | (batch.input_ids > 0), 0, -1)
        documents = documents if batch.documents is None else batch.documents
        for row in range(len(batch.input_ids)):
            for number in range(int(documents[row].max()) + 1):
                places = (documents[row] == number).nonzero().flatten()
                start, stop = int(places[0]), int(places[-1]) + 1
                assert stop - start == len(places)
                tokens = batch.input_ids[row, start:stop]
                anchors = [int(a) - start for a in batch.anchors[row] if start <= a < stop]
                found.append((next(names), tuple(tokens[tokens > 0].tolist()), tuple(anchors)))
        assert next(names, None) is None
        if batch.documents is not None:
            assert not batch.loss_mask[batch.documents < 0].any()
    return sorted(found)


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("size", (1, 2))
def test_samples_and_anchors_are_the_same_however_they_are_dealt(ranks: int, rows: int, size: int) -> None:
    expected = [contents(batches) for batches in stream(1, 8, 1, None)]
    assert all(len(step) == 8 for step in expected)
    dealt = list(stream(ranks, rows, size, 64))
    for step in range(3):
        of_ranks = dealt[step * ranks : (step + 1) * ranks]
        assert len({len(batches) for batches in of_ranks}) == 1
        assert contents([batch for batches in of_ranks for batch in batches]) == expected[step]
        for batch in (batch for batches in of_ranks for batch in batches):
            assert batch.input_ids.shape[1] <= 64 and batch.input_ids.shape[1] % (2 * size if size > 1 else 1) == 0


class Reads(list):
    """Samples that know their lengths, as a cache's do, and remember which of them were read."""

    def __init__(self, samples: list[ChatSample]) -> None:
        super().__init__(samples)
        self.lengths = [len(sample.input_ids) for sample in samples]
        self.read: list[str] = []

    def __getitem__(self, index: int) -> ChatSample:
        self.read.append(super().__getitem__(index).sample_id)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[ChatSample]:
        raise AssertionError("all samples are read")


@pytest.mark.parametrize("row_tokens", (None, 64))
def test_a_rank_reads_its_own_samples_alone(row_tokens: int | None) -> None:
    samples, every = Reads(SAMPLES), []
    for rank in range(2):
        dealer = Dealer(2, rank, 2, row_tokens=row_tokens)
        sampler = Sampler(samples, anchors=AnchorRule(4, 7), dealer=dealer, global_batch_size=8)
        names = [name for batch in sampler.step_batches(8) for name in batch.sample_ids]
        assert samples.read == names and 0 < len(names) < 8
        samples.read = []
        every += names
    assert len(every) == 8


def test_packing_keeps_padding_under_five_percent() -> None:
    """Lengths like chat data (log-normal, the tail cut), 64 samples a step over two ranks, four rows a micro-batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((torch.randn(640, generator=generator) * 0.9).exp() * 500).round().clamp(16, 2048).int().tolist()
    samples = [
        ChatSample(str(number), torch.zeros(length, dtype=torch.int64), torch.arange(length) > 0)
        for number, length in enumerate(lengths)
    ]
    shares = {}
    for row_tokens in (None, 2048):
        tokens = places = 0
        for rank in range(2):
            dealer = Dealer(4, rank, 2, row_tokens=row_tokens)
            sampler = Sampler(samples, anchors=AnchorRule(1, 0), dealer=dealer, global_batch_size=64)
            for batch in (batch for step in range(10) for batch in sampler.step_batches(64 * step)):
                tokens, places = tokens + batch.num_tokens, places + batch.input_ids.numel()
        assert tokens == sum(lengths)
        shares[row_tokens] = 1 - tokens / places
    assert shares[2048] < 0.05 and shares[None] > 0.4


@pytest.fixture(scope="module")
def reference(folder: Path) -> Record:
    """One process, one sample a row."""
    return run(0, 1, settings(folder, folder / "reference").as_dict())


@pytest.mark.parametrize("packing", (False, True))
def test_padding_is_pointed_out_once(
    packing: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(settings(folder, tmp_path, packing=packing, packed_length=140 if packing else "null"))
    share = read_metrics(tmp_path, "train")[0]["padding_share"]
    assert share > 0.05
    assert capsys.readouterr().err.count(f"{share:.0%} of the micro-batches is padding") == (not packing)


@pytest.mark.parametrize("rows", (1, 4))
@pytest.mark.parametrize("memory", (0.0, 0.1))
def test_packed_run_equals_unpacked(rows: int, memory: float, folder: Path, reference: Record, tmp_path: Path) -> None:
    values = settings(
        folder, tmp_path, packing=True, packed_length=140, micro_batch_size=rows, feature_memory_gib=memory
    )
    assert_equal_runs([run(0, 1, values.as_dict())], reference)
    assert_equal_metrics(compared(tmp_path), compared(folder / "reference"))
    shares = [line["padding_share"] for split in ("train", "validation") for line in read_metrics(tmp_path, split)]
    assert all(0 <= share < 1 for share in shares)


@pytest.mark.parametrize("rows", (1, 4))
def test_packed_data_parallel_run_equals_unpacked(
    rows: int, folder: Path, reference: Record, two_ranks: RankPool, tmp_path: Path
) -> None:
    """With four rows a micro-batch the second rank has nothing at all, and takes part."""
    values = settings(folder, tmp_path, packing=True, packed_length=140, micro_batch_size=rows)
    assert_equal_runs(two_ranks.run(run, values.as_dict()), reference)
    assert_equal_metrics(compared(tmp_path), compared(folder / "reference"))
