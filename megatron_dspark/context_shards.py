"""Which rows of a sequence each context-parallel rank holds, and how it sees the others'.

The layout is Megatron-Core's load-balanced one: a document is cut into 2·C equal chunks over C ranks, and rank r holds
chunks r and 2·C − 1 − r, so that early rows (which attend to little) and late ones are shared out evenly. It is applied
to every document of a row by itself, as Transformer Engine does for packed sequences: what a rank holds of a document
depends on the document's length and on C alone, not on its neighbours. Documents are padded to a multiple of 2·C.

Token ids, masks, anchors and documents are small and whole on every rank; features and keys are what is split.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.blocks import BlockLayout
from megatron_dspark.errors import DSparkError

platform.prepare()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402


def padded_length(tokens: int, size: int) -> int:
    """Return the rows that a document of `tokens` tokens takes over `size` context-parallel ranks."""
    return tokens if size == 1 else -(-tokens // (2 * size)) * 2 * size


def owners(length: int, size: int) -> Tensor:
    """Return the rank that holds each row of a document: [length] int64, for a padded `length`."""
    chunk = torch.arange(length) * (2 * size) // max(length, 1)
    return torch.minimum(chunk, 2 * size - 1 - chunk)


def blocks_within_shard(tokens: int, block_size: int, size: int) -> Tensor:
    """Return which positions of a document start a block whose rows are all on one rank.

    The rows of a block are a … a + γ − 1, as far as the document goes: those whose target output teaches it.

    Args:
        tokens: length of the document without padding.
        block_size: γ.
        size: context-parallel ranks.

    Returns:
        [tokens] bool.
    """
    owner = owners(padded_length(tokens, size), size)[:tokens]
    rows = (torch.arange(tokens)[:, None] + torch.arange(block_size)).clamp(max=tokens - 1)
    return (owner[rows] == owner[:, None]).all(-1)


@dataclass(frozen=True)
class ContextShard:
    """Where the rows of a micro-batch are.

    Attributes:
        size: context-parallel ranks.
        rank: this one.
        owner: [B, S] rank that holds each row.
        local: [B, S] place of each row among its owner's.
        rows: [B, S / size] rows that this rank holds, increasing.
    """

    size: int
    rank: int
    owner: Tensor
    local: Tensor
    rows: Tensor

    def own_blocks(self, layout: BlockLayout, multiple: int = 1) -> BlockLayout:
        """Return this rank's blocks, whose label rows are counted among the rows that this rank holds.

        Args:
            layout: the blocks of every rank, so that all ranks refuse and none waits for another.
            multiple: see `BlockLayout.keep`.

        Raises:
            DSparkError: a block's teacher rows are not all on the rank of its anchor, as of anchors that were drawn
                for another context-parallel size.
        """
        self._refuse_split_blocks(layout)
        own = layout.keep(layout.valid & (self.owner.gather(1, layout.anchors) == self.rank), multiple)
        rows = own.label_rows
        return replace(own, label_rows=self.local.gather(1, rows.flatten(1)).view_as(rows))

    def _refuse_split_blocks(self, layout: BlockLayout) -> None:
        owner = self.owner.gather(1, layout.label_rows.flatten(1)).view_as(layout.label_rows)
        split = layout.supervised & (owner != owner[..., :1])
        if bool(split.any()):
            raise DSparkError(
                f"a block needs the target's output at row {int(layout.label_rows[split][0])}, which another "
                f"context-parallel rank than its anchor's holds; draw anchors for context parallelism of size "
                f"{self.size} (anchor_context_parallel)"
            )

    def select(self, values: Tensor) -> Tensor:
        """Return this rank's part of `values` [B, S]: [B, S / size]."""
        return values.gather(1, self.rows)

    def gather(self, rows: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        """Bring all ranks' rows together in the order of the sequence: [n, B, …] of each rank to [S, B, …].

        The backward sums every rank's gradient and hands each rank its own rows (reduce-scatter), so every rank calls
        this the same number of times, whether or not it has anything to do with the result.

        Args:
            rows: this rank's rows in the order of `rows`; further ones at the end (n > S / size) are left out.
            group: the context-parallel ranks.
        """
        held, batch = rows.shape[:2]
        everyone = gather_from_sequence_parallel_region(rows.contiguous(), group=group)
        place = (self.owner * held + self.local).t() * batch + torch.arange(batch, device=rows.device)
        return everyone.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, place.shape)


def shard_context(documents: Tensor, size: int, rank: int) -> ContextShard:
    """Return where the rows of a micro-batch are.

    Args:
        documents: [B, S] document of each row, each in one piece; padding at the end of a row (−1) counts as one.
        size: context-parallel ranks.
        rank: this one.

    Raises:
        DSparkError: a document's rows are no multiple of 2·size.
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    borders = torch.ones_like(documents[:, :1], dtype=torch.bool)
    changes = documents[:, 1:] != documents[:, :-1]
    start = torch.where(torch.cat([borders, changes], 1), place, 0).cummax(1).values
    last = torch.where(torch.cat([changes, borders], 1), place, documents.shape[1]).flip(1).cummin(1).values.flip(1)
    length = last + 1 - start
    if bool((length % (2 * size)).any()):
        raise DSparkError(
            f"a document takes {int(length[length % (2 * size) > 0][0])} rows, which {size} context-parallel ranks "
            f"cannot share evenly; pad every document to a multiple of {2 * size} rows"
        )
    chunk = (place - start) * (2 * size) // length
    owner = torch.minimum(chunk, 2 * size - 1 - chunk)
    ranks = torch.arange(size, device=documents.device)[:, None, None]
    local = ((owner == ranks).cumsum(-1) - 1).gather(0, owner[None])[0]
    rows = torch.argsort((owner != rank).to(torch.int8), dim=1, stable=True)[:, : documents.shape[1] // size]
    return ContextShard(size=size, rank=rank, owner=owner, local=local, rows=rows)
