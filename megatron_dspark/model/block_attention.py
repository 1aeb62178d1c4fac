"""The draft's attention: every slot sees the context rows before its anchor and its whole block.

Three implementations of the same mathematics, chosen by `DSparkModelConfig.block_attention`:

- "prefix" (default): plain PyTorch on any device, its cost follows what is visible.
- "flex": FlexAttention's fused kernel, CUDA only.
- "dense": one mask over slots × (context + slots); the reference that the others must equal.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_dspark.blocks import BlockLayout, attention_mask, context_spans
from megatron_dspark.model.flex_attention import flex_block_mask, fused_flex_attention
from megatron_dspark.model.prefix_attention import group_blocks, prefix_attention

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, context key, context value, block key, block value) to [A·γ, B, heads, head_dim].

Queries and block rows are [A·γ, B, heads, head_dim], context rows [S, B, heads, head_dim]; keys and values may have
fewer heads than queries (grouped-query attention).
"""


def block_attention(kind: str, layout: BlockLayout, length: int, documents: Tensor | None = None) -> Attend:
    """Prepare the attention of one micro-batch; every layer of the draft calls the result.

    Args:
        kind: "prefix", "flex" or "dense".
        layout: the micro-batch's blocks.
        length: S, context rows that the layers get.
        documents: [B, ≥ S] document of each row; None for one document a row.
    """
    if kind == "dense":
        mask = attention_mask(layout, length, documents)
        return lambda query, *rows: dense_attention(query, *_joined(*rows), mask)
    (starts, ends), size = context_spans(layout.padded_anchors, documents), layout.input_ids.shape[-1]
    if kind == "flex":
        tiles = flex_block_mask(starts, ends, size, length)
        return lambda query, *rows: fused_flex_attention(query, *_joined(*rows), tiles)
    return partial(prefix_attention, ends=ends, groups=group_blocks(starts, ends, size))


def _joined(
    context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.cat([context_key, block_key]), torch.cat([context_value, block_value])


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention under a dense mask.

    Args:
        query: [n, B, heads, head_dim].
        key: [rows, B, key/value heads, head_dim].
        value: like `key`.
        mask: [B, 1, n, rows] bool.

    Returns:
        [n, B, heads, head_dim].
    """
    query, key, value = (rows.permute(1, 2, 0, 3) for rows in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.permute(2, 0, 1, 3)
