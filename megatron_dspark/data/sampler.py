"""Which sample stands where: a pure function of seed and position, so that the data position alone is state.

Position n of the endless stream is sample permutation(seed, n // N)[n % N]. It does not depend on ranks, micro-batches
or what was read before, so a run resumes anywhere, at any number of ranks, with the same order.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dspark.blocks import NO_ANCHOR, draw_anchors, keyed_generator
from megatron_dspark.context_shards import blocks_within_shard, padded_length
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.packing import pack
from megatron_dspark.errors import DSparkError


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of B rows, padded at the end of each row.

    Attributes:
        sample_ids: identifiers, row by row.
        input_ids: [B, S] int64.
        loss_mask: [B, S] bool, False on padding.
        anchors: [B, A] int64, increasing in each row, −1 for padding.
        lengths: tokens of each sample without padding, row by row.
        documents: [B, S] int64 number of the sample in its row that each position belongs to, −1 on padding; None
            where every row is one sample and whole on this rank.
    """

    sample_ids: list[str]
    input_ids: Tensor
    loss_mask: Tensor
    anchors: Tensor
    lengths: list[int]
    documents: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


@dataclass(frozen=True)
class AnchorRule:
    """Which anchors a sample gets: a function of the sample, the epoch and these settings, never of its neighbours.

    Attributes:
        num_anchors: A, most anchors of a sample.
        seed: of the run.
        block_size: γ.
        context_parallel_size: draw only anchors whose whole block is on one of so many context-parallel ranks.
    """

    num_anchors: int
    seed: int
    block_size: int = 1
    context_parallel_size: int = 1

    def draw(self, sample: ChatSample, epoch: int) -> Tensor:
        """Return the anchors of `sample`, increasing."""
        within = None
        if self.context_parallel_size > 1:
            within = blocks_within_shard(len(sample.input_ids), self.block_size, self.context_parallel_size)
        return draw_anchors(
            sample.loss_mask, self.num_anchors, seed=self.seed, epoch=epoch, sample_id=sample.sample_id, within=within
        )


class Sampler:
    """Deals the samples of each global batch to data-parallel ranks and micro-batches."""

    def __init__(
        self,
        samples: Sequence[ChatSample],
        *,
        anchors: AnchorRule,
        dealer: "Dealer",
        global_batch_size: int,
    ) -> None:
        """Make a sampler.

        Args:
            samples: the training set.
            anchors: how anchors are drawn.
            dealer: how samples are dealt to rows, micro-batches and ranks.
            global_batch_size: samples of an optimizer step over all ranks.

        Raises:
            DSparkError: the global batch does not divide into micro-batches over the ranks, or there are no samples.
        """
        if not samples:
            raise DSparkError("there is no training sample; prepare data first")
        per_pass = dealer.micro_batch_size * dealer.ranks
        if dealer.row_tokens is None and global_batch_size % per_pass:
            raise DSparkError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
                f"{dealer.micro_batch_size} × {dealer.ranks} data-parallel ranks; choose a multiple of {per_pass}"
            )
        self.samples, self.anchors, self.dealer = samples, anchors, dealer
        self._lengths = array("q", lengths_of(samples))
        self.global_batch_size = global_batch_size
        self._permutation: tuple[int, Tensor] | None = None

    def number_at(self, position: int) -> tuple[int, int]:
        """Return (epoch, number of the sample) at `position` of the stream."""
        epoch, index = divmod(position, len(self.samples))
        if self._permutation is None or self._permutation[0] != epoch:
            generator = keyed_generator("order", self.anchors.seed, epoch)
            self._permutation = (epoch, torch.randperm(len(self.samples), generator=generator))
        return epoch, int(self._permutation[1][index])

    def step_batches(self, consumed: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the optimizer step that starts at position `consumed`."""
        drawn = [self.number_at(consumed + offset) for offset in range(self.global_batch_size)]
        # Dealt by length: another rank's samples are not read.
        for chosen in self.dealer.deal([self._lengths[number] for _, number in drawn]):
            yield self.dealer.collate([[self._with_anchors(*drawn[index]) for index in row] for row in chosen])

    def _with_anchors(self, epoch: int, number: int) -> tuple[ChatSample, Tensor]:
        sample = self.samples[number]
        return sample, self.anchors.draw(sample, epoch)


def lengths_of(samples: Sequence[ChatSample]) -> Sequence[int]:
    """Return the tokens of each sample: from the sequence's own `lengths` where it has them, so that none is read."""
    known = getattr(samples, "lengths", None)
    return [len(sample.input_ids) for sample in samples] if known is None else known


Row = Sequence[tuple[ChatSample, Tensor]]
"""Samples that stand one after another in a row, with their anchors counted from their own start."""


@dataclass(frozen=True)
class Dealer:
    """Puts samples into rows and rows into micro-batches, and says which of them are this rank's.

    Attributes:
        micro_batch_size: rows of a micro-batch.
        rank: this data-parallel rank.
        ranks: data-parallel ranks.
        context_parallel_size: ranks that share the rows of a sample.
        row_tokens: tokens of a packed row; None for one sample a row.
        multiple: the number of micro-batches is a multiple of it, for schedules that need that.
    """

    micro_batch_size: int
    rank: int = 0
    ranks: int = 1
    context_parallel_size: int = 1
    row_tokens: int | None = None
    multiple: int = 1

    def deal(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return this rank's micro-batches of rows of indices into samples of `lengths` tokens.

        Every rank gets the same number of micro-batches, so that collective calls match; the last ones have fewer
        rows, or none, where samples run out.
        """
        rows = [[index] for index in range(len(lengths))]
        if self.row_tokens is not None:
            size = self.context_parallel_size
            rows = pack([padded_length(length, size) for length in lengths], padded_length(self.row_tokens, size))
        per_pass = self.micro_batch_size * self.ranks
        passes = -(-len(rows) // (per_pass * self.multiple)) * self.multiple
        starts = range(self.rank * self.micro_batch_size, passes * per_pass, per_pass)
        return [rows[start : start + self.micro_batch_size] for start in starts]

    def collate(self, rows: Sequence[Row]) -> MicroBatch:
        """Pad rows into one micro-batch, of at least one row, one position on each rank and one anchor column."""
        size = self.context_parallel_size
        rows = rows or [[]]
        counts = [sum(padded_length(len(sample.input_ids), size) for sample, _ in row) for row in rows]
        shape = len(rows), max(padded_length(1, size), *counts)
        input_ids = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        documents = torch.full(shape, -1, dtype=torch.int64)
        columns = max(1, *(sum(len(drawn) for _, drawn in row) for row in rows))
        anchors = torch.full((len(rows), columns), NO_ANCHOR, dtype=torch.int64)
        for number, row in enumerate(rows):
            start = column = 0
            for document, (sample, drawn) in enumerate(row):
                stop = start + len(sample.input_ids)
                input_ids[number, start:stop] = sample.input_ids
                loss_mask[number, start:stop] = sample.loss_mask
                anchors[number, column : column + len(drawn)] = drawn + start
                column += len(drawn)
                # The rows that fill up a document's chunks belong to it: they come after all of its tokens.
                stop = start + padded_length(len(sample.input_ids), size)
                documents[number, start:stop] = document
                start = stop
        samples = [sample for row in rows for sample, _ in row]
        return MicroBatch(
            sample_ids=[sample.sample_id for sample in samples],
            input_ids=input_ids,
            loss_mask=loss_mask,
            anchors=anchors,
            lengths=[len(sample.input_ids) for sample in samples],
            documents=documents if size > 1 or self.row_tokens is not None else None,
        )


def validation_batches(samples: Sequence[ChatSample], dealer: Dealer, anchors: AnchorRule) -> list[MicroBatch]:
    """Return this rank's validation micro-batches with fixed anchors, the same at every validation.

    Anchors are drawn at epoch −1, which training never reaches.
    """
    return [
        dealer.collate([[(samples[index], anchors.draw(samples[index], -1)) for index in row] for row in chosen])
        for chosen in dealer.deal(lengths_of(samples))
    ]
