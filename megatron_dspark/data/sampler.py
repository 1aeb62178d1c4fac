"""Which sample stands where: a pure function of seed and position, so that the data position alone is state.

Position n of the endless stream is sample permutation(seed, n // N)[n % N]. It does not depend on ranks, micro-batches
or what was read before, so a run resumes anywhere, at any number of ranks, with the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dspark.blocks import NO_ANCHOR, draw_anchors, keyed_generator
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.errors import DSparkError


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, padded at the end of each row.

    Attributes:
        sample_ids: B identifiers.
        input_ids: [B, S] int64.
        loss_mask: [B, S] bool, False on padding.
        anchors: [B, A] int64, increasing in each row, −1 for padding.
        lengths: tokens of each row without padding.
    """

    sample_ids: list[str]
    input_ids: Tensor
    loss_mask: Tensor
    anchors: Tensor
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


class Sampler:
    """Deals the samples of each global batch to data-parallel ranks and micro-batches."""

    def __init__(
        self,
        samples: Sequence[ChatSample],
        *,
        num_anchors: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        """Args as named; `global_batch_size` samples make one optimizer step over all ranks.

        Raises:
            DSparkError: the global batch does not divide into micro-batches over the ranks, or there are no samples.
        """
        if not samples:
            raise DSparkError("there is no training sample; prepare data first")
        per_pass = micro_batch_size * data_parallel_size
        if global_batch_size % per_pass:
            raise DSparkError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} × "
                f"{data_parallel_size} data-parallel ranks; choose a multiple of {per_pass}"
            )
        self.samples = samples
        self.num_anchors = num_anchors
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.rank, self.ranks = data_parallel_rank, data_parallel_size
        self._permutation: tuple[int, Tensor] | None = None

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.ranks)

    def sample_at(self, position: int) -> tuple[int, ChatSample]:
        """Return (epoch, sample) at `position` of the stream."""
        epoch, index = divmod(position, len(self.samples))
        if self._permutation is None or self._permutation[0] != epoch:
            generator = keyed_generator("order", self.seed, epoch)
            self._permutation = (epoch, torch.randperm(len(self.samples), generator=generator))
        return epoch, self.samples[int(self._permutation[1][index])]

    def step_batches(self, consumed: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the optimizer step that starts at position `consumed`."""
        for micro_batch in range(self.num_micro_batches):
            start = consumed + (micro_batch * self.ranks + self.rank) * self.micro_batch_size
            yield self._collate([self.sample_at(start + offset) for offset in range(self.micro_batch_size)])

    def _collate(self, drawn: list[tuple[int, ChatSample]]) -> MicroBatch:
        anchors = [
            draw_anchors(sample.loss_mask, self.num_anchors, seed=self.seed, epoch=epoch, sample_id=sample.sample_id)
            for epoch, sample in drawn
        ]
        return collate([sample for _, sample in drawn], anchors)


def collate(samples: Sequence[ChatSample], anchors: Sequence[Tensor]) -> MicroBatch:
    """Pad `samples` and their `anchors` into one micro-batch, of at least one anchor column."""
    length = max(len(sample.input_ids) for sample in samples)
    count = max(1, *(len(drawn) for drawn in anchors))
    input_ids = torch.zeros(len(samples), length, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), length, dtype=torch.bool)
    padded_anchors = torch.full((len(samples), count), NO_ANCHOR, dtype=torch.int64)
    for row, (sample, drawn) in enumerate(zip(samples, anchors, strict=True)):
        input_ids[row, : len(sample.input_ids)] = sample.input_ids
        loss_mask[row, : len(sample.loss_mask)] = sample.loss_mask
        padded_anchors[row, : len(drawn)] = drawn
    return MicroBatch(
        sample_ids=[sample.sample_id for sample in samples],
        input_ids=input_ids,
        loss_mask=loss_mask,
        anchors=padded_anchors,
        lengths=[len(sample.input_ids) for sample in samples],
    )


def validation_batches(
    samples: Sequence[ChatSample],
    *,
    num_anchors: int,
    micro_batch_size: int,
    seed: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
) -> list[MicroBatch]:
    """Return this rank's validation micro-batches with fixed anchors, the same at every validation.

    Every rank gets the same number of micro-batches (some without any anchor when samples run out), so that collective
    calls match. Anchors are drawn at epoch −1, which training never reaches.
    """
    per_pass = micro_batch_size * data_parallel_size
    batches = []
    for start in range(0, len(samples), per_pass):
        first = start + data_parallel_rank * micro_batch_size
        mine = list(samples[first : first + micro_batch_size])
        anchors = [
            draw_anchors(sample.loss_mask, num_anchors, seed=seed, epoch=-1, sample_id=sample.sample_id)
            for sample in mine
        ]
        if not mine:
            mine, anchors = [samples[0]], [torch.empty(0, dtype=torch.int64)]
        batches.append(collate(mine, anchors))
    return batches
