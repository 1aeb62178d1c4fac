"""Block attention through FlexAttention, for CUDA: one fused kernel that skips the tiles of keys that nobody sees."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_dspark.errors import DSparkError

# Rows and columns of one tile; FlexAttention's own default.
TILE = 128


def flex_block_mask(starts: Tensor, ends: Tensor, block_size: int, context_length: int, tile: int = TILE) -> BlockMask:
    """Return FlexAttention's mask over [context, blocks], with its tables of tiles built from the blocks' spans.

    `create_block_mask` would evaluate the mask at every slot and key to find the same tiles.

    Args:
        starts: [B, A] first visible context row of each block.
        ends: [B, A] the row after the last visible one; not above `starts` where there is none.
        block_size: γ.
        context_length: S.
        tile: rows and columns of a tile.
    """
    blocks = starts.shape[1]
    slots, where = blocks * block_size, starts.device

    def visible(sample: Tensor, _head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        # Kernels may ask for slots beyond the last one, to fill a tile.
        block = (slot // block_size).clamp(max=blocks - 1)
        context = (key >= starts[sample, block]) & (key < ends[sample, block]) & (key < context_length)
        return context | ((key >= context_length) & ((key - context_length) // block_size == block))

    row_tiles, column_tiles = -(-slots // tile), -(-(context_length + slots) // tile)
    first_slot = torch.arange(row_tiles, device=where) * tile
    first_block = first_slot // block_size
    last_block = (first_slot + tile - 1).clamp(max=slots - 1) // block_size
    members = torch.arange(blocks, device=where)
    inside = (members >= first_block[:, None]) & (members <= last_block[:, None])
    seeing = (ends > starts)[:, None] & inside

    def least(values: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen, values[:, None], context_length).amin(-1, keepdim=True)

    def most(values: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen, values[:, None], 0).amax(-1, keepdim=True)

    low = torch.arange(column_tiles, device=where) * tile
    high = low + tile
    touched = (low < most(ends, seeing)) & (high > least(starts, seeing))
    own_first, own_last = context_length + first_block * block_size, context_length + (last_block + 1) * block_size
    touched = touched | ((low < own_last[:, None]) & (high > own_first[:, None]))
    # Blocks without context have ends ≤ starts, so that no tile is full for them.
    full = (low >= most(starts, inside)) & (high <= least(ends, inside))
    return BlockMask.from_kv_blocks(
        *_tile_table(touched & ~full),
        *_tile_table(full),
        BLOCK_SIZE=tile,
        mask_mod=visible,
        seq_lengths=(slots, context_length + slots),
    )


def _tile_table(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's (count, columns with the chosen ones first) for [B, rows, columns] bool."""
    counts = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[:, None].contiguous(), order[:, None].contiguous()


def fused_flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Run the compiled kernel.

    Args:
        query: [A·γ, B, heads, head_dim].
        key: [S + A·γ, B, key/value heads, head_dim].
        value: like `key`.
        mask: see `flex_block_mask`.

    Returns:
        [A·γ, B, heads, head_dim].

    Raises:
        DSparkError: the tensors are not on a CUDA device: elsewhere FlexAttention has no backward.
    """
    if not query.is_cuda:
        raise DSparkError(
            f"block_attention is 'flex', which needs a CUDA device, and the tensors are on {query.device}; use 'prefix'"
        )
    return flex_over_heads(_compiled(), query, key, value, mask)


def flex_over_heads(kernel: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Call FlexAttention, compiled or not, with this library's order of dimensions (see `fused_flex_attention`)."""
    query, key, value = (rows.permute(1, 2, 0, 3) for rows in (query, key, value))
    attended = kernel(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return attended.permute(2, 0, 1, 3)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
