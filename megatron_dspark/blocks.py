"""Anchors, block layout, supervision and visibility: index arithmetic only, no modules.

Shapes: B samples, S context length, A anchors a sample (padded with −1), γ block size. A *document* is a stretch of a
row that belongs to one conversation; `documents` numbers them, with −1 on padding.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ANCHOR = -1


def keyed_generator(*key: object) -> torch.Generator:
    """Return a CPU generator that depends on `key` alone: not on the rank, the world size or what was drawn before."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def eligible_anchors(loss_mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return which positions may be anchors: both a and a + 1 are supervised and lie in one document.

    Args:
        loss_mask: [S] bool.
        documents: [S] document of each position; None for one document.

    Returns:
        [S] bool.
    """
    mask = loss_mask.bool()
    eligible = torch.zeros_like(mask)
    eligible[:-1] = mask[:-1] & mask[1:]
    if documents is not None:
        eligible[:-1] &= (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    return eligible


def draw_anchors(
    loss_mask: Tensor,
    num_anchors: int,
    *,
    seed: int,
    epoch: int,
    sample_id: str,
    documents: Tensor | None = None,
    within: Tensor | None = None,
) -> Tensor:
    """Draw up to `num_anchors` eligible anchors without replacement, from a generator keyed by the arguments.

    Args:
        loss_mask: [S] bool.
        num_anchors: most anchors to draw.
        seed: of the run.
        epoch: of the draw.
        sample_id: of the sample.
        documents: see `eligible_anchors`.
        within: [S] bool positions to draw from, see `context_shards.blocks_within_shard`; None for all.

    Returns:
        [≤ num_anchors] int64, increasing; empty when nothing is eligible.
    """
    eligible = eligible_anchors(loss_mask, documents)
    candidates = (eligible if within is None else eligible & within).nonzero().flatten()
    order = torch.randperm(len(candidates), generator=keyed_generator("anchors", seed, epoch, sample_id))
    return candidates[order[:num_anchors]].sort().values


@dataclass(frozen=True)
class BlockLayout:
    """Where every slot of every block stands and what it predicts.

    Attributes:
        anchors: [B, A] int64 anchor positions, 0 where there is none.
        valid: [B, A] bool, False for padding anchors.
        input_ids: [B, A, γ] the anchor's token, then masks.
        positions: [B, A, γ] rotary positions: the anchor's own, then onwards.
        labels: [B, A, γ] token at a + k + 1; a harmless in-vocabulary id where the slot is unsupervised.
        previous_ids: [B, A, γ] token at a + k, which conditions the sequential head (teacher forcing).
        label_rows: [B, A, γ] row a + k whose target output is the teacher's distribution for the slot.
        supervised: [B, A, γ] bool: every label up to and including the slot's is supervised and inside the document.
    """

    anchors: Tensor
    valid: Tensor
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    previous_ids: Tensor
    label_rows: Tensor
    supervised: Tensor

    @property
    def padded_anchors(self) -> Tensor:
        """[B, A] anchor positions, `NO_ANCHOR` where there is none."""
        return torch.where(self.valid, self.anchors, NO_ANCHOR)

    def keep(self, blocks: Tensor, multiple: int = 1) -> "BlockLayout":
        """Return some of the blocks, in the same order, with padding at the end.

        Args:
            blocks: [B, A] bool, which ones.
            multiple: of which the number of blocks is one; A has to be a multiple of it too.

        Returns:
            [B, ≥ 1] blocks, as many as the sample with the most of them has. What fills up the others' is marked as
            padding, and holds any valid ids.
        """
        count = max(1, int(blocks.sum(1).max()))
        order = torch.argsort((~blocks).to(torch.int8), dim=1, stable=True)[:, : count + -count % multiple]
        slots = order[..., None].expand(-1, -1, self.input_ids.shape[-1])
        valid = blocks.gather(1, order)
        return BlockLayout(
            anchors=torch.where(valid, self.anchors.gather(1, order), 0),
            valid=valid,
            input_ids=self.input_ids.gather(1, slots),
            positions=self.positions.gather(1, slots),
            labels=self.labels.gather(1, slots),
            previous_ids=self.previous_ids.gather(1, slots),
            label_rows=self.label_rows.gather(1, slots),
            supervised=self.supervised.gather(1, slots) & valid[..., None],
        )


def lay_out_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> BlockLayout:
    """Lay out the blocks of a micro-batch.

    Args:
        input_ids: [B, S] tokens; ids at unsupervised places may be anything, −1 included.
        loss_mask: [B, S] bool.
        anchors: [B, A] with `NO_ANCHOR` for padding.
        block_size: γ.
        mask_token_id: token of the undecided slots.
        positions: [B, S] rotary position of each row; None for 0 … S − 1.
        documents: [B, S] document of each row, −1 on padding; None for one document a row.
    """
    batch, length = input_ids.shape
    valid = anchors >= 0
    safe_anchors = anchors.clamp(min=0)
    offsets = torch.arange(block_size, device=input_ids.device)
    rows = safe_anchors[..., None] + offsets
    label_index = rows + 1
    inside = label_index < length
    label_index = label_index.clamp(max=length - 1)
    rows = rows.clamp(max=length - 1)

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(1, index.reshape(batch, -1)).view(index.shape)

    supervised = valid[..., None] & inside & at(loss_mask.bool(), label_index)
    if documents is not None:
        supervised &= at(documents, label_index) == at(documents, safe_anchors)[..., None]
    supervised = supervised.long().cumprod(-1).bool()

    labels = torch.where(supervised, at(input_ids, label_index), mask_token_id)
    # The token before a supervised label is known; elsewhere any valid id serves, for nothing reads its result.
    previous_ids = torch.where(supervised, at(input_ids, rows), mask_token_id)
    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = torch.where(valid, at(input_ids, safe_anchors), mask_token_id)
    anchor_positions = safe_anchors if positions is None else at(positions, safe_anchors)
    return BlockLayout(
        anchors=safe_anchors,
        valid=valid,
        input_ids=block_ids,
        positions=anchor_positions[..., None] + offsets,
        labels=labels,
        previous_ids=previous_ids,
        label_rows=rows,
        supervised=supervised,
    )


def context_visibility(layout: BlockLayout, context_length: int, documents: Tensor | None = None) -> Tensor:
    """Return which context rows each block sees: rows strictly before the anchor, in the anchor's document.

    Returns:
        [B, A, S] bool; all False for padding anchors.
    """
    rows = torch.arange(context_length, device=layout.anchors.device)
    visible = (rows < layout.anchors[..., None]) & layout.valid[..., None]
    if documents is not None:
        own = documents.gather(1, layout.anchors)
        visible &= documents[:, None, :context_length] == own[..., None]
    return visible


def document_starts(documents: Tensor) -> Tensor:
    """Return the first row of the document that each row of `documents` [B, S] belongs to, documents in one piece."""
    rows = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, rows, 0).cummax(dim=1).values


def document_positions(documents: Tensor) -> Tensor:
    """Return rotary positions [B, S] that start at 0 in every document."""
    return torch.arange(documents.shape[1], device=documents.device) - document_starts(documents)


def count_samples(loss_mask: Tensor, documents: Tensor | None = None) -> int:
    """Return how many samples with a supervised token a micro-batch has: rows, or documents of packed rows.

    A row without any only fills up a micro-batch.
    """
    if documents is None:
        return int(loss_mask.any(dim=1).sum())
    row, place = (loss_mask & (documents >= 0)).nonzero(as_tuple=True)
    return len(torch.stack([row, documents[row, place]]).unique(dim=1).t())


def context_spans(anchors: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what `context_visibility` says as one span of rows a block: from the document's start to the anchor.

    Args:
        anchors: [B, A] with `NO_ANCHOR` for padding.
        documents: [B, S] document of each row, each document in one piece; None for one document a row.

    Returns:
        starts, ends: [B, A] the first visible row and the row after the last; equal where there is none.
    """
    safe_anchors = anchors.clamp(min=0)
    starts = torch.zeros_like(anchors)
    if documents is not None:
        starts = document_starts(documents).gather(1, safe_anchors)
    return starts, torch.where(anchors >= 0, safe_anchors, starts)


def visible_rows(anchors: Tensor, length: int, documents: Tensor | None = None) -> Tensor:
    """Return which of the first `length` context rows at least one block sees: [B, length] bool.

    Args:
        anchors: [B, A] with `NO_ANCHOR` for padding, none above `length`.
        length: rows.
        documents: see `context_spans`.
    """
    starts, ends = context_spans(anchors, documents)
    changes = torch.zeros(len(starts), length + 1, dtype=torch.int64, device=starts.device)
    ones = torch.ones_like(starts)
    changes.scatter_add_(1, starts, ones).scatter_add_(1, ends, -ones)
    return changes.cumsum(1)[:, :length] > 0


def attention_mask(layout: BlockLayout, context_length: int, documents: Tensor | None = None) -> Tensor:
    """Return the dense mask over [context rows, block rows]: the context a block may see, and its whole self.

    Returns:
        [B, 1, A·γ, S + A·γ] bool, True where a query attends. It is what any other attention backend must equal.
    """
    batch, blocks, size = layout.input_ids.shape
    context = context_visibility(layout, context_length, documents)
    context = context[:, :, None].expand(-1, -1, size, -1).reshape(batch, blocks * size, context_length)
    owner = torch.arange(blocks * size, device=context.device) // size
    same_block = (owner[:, None] == owner[None, :]).expand(batch, -1, -1)
    return torch.cat([context, same_block], dim=-1)[:, None]
