"""The target's attention over packed documents and over context-parallel shards.

Megatron-Core's own attention without Transformer Engine knows neither; its layers take this one in its place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_dspark.context_shards import ContextShard


@dataclass(frozen=True)
class Run:
    """Query rows of one document that stand in one piece on this rank, and the keys up to the last of them."""

    sample: int
    first_query: int
    queries: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class DocumentRuns:
    """What the target attends to in a micro-batch: rides in the place of the attention mask through Megatron-Core.

    Attributes:
        runs: every piece of a document on this rank.
        shard: where the keys of other context-parallel ranks are; None without context parallelism.
        group: context-parallel ranks.
    """

    runs: list[Run]
    shard: ContextShard | None = None
    group: Any = None


def document_runs(documents: Tensor, shard: ContextShard | None = None, group: Any = None) -> DocumentRuns:
    """Lay out the attention within documents.

    Args:
        documents: [B, S] document of each row, −1 on padding, which attends to nothing.
        shard: this rank's rows; None when it holds all of them.
        group: context-parallel ranks.
    """
    runs = []
    for sample, row in enumerate(documents.cpu()):
        numbers, counts = row.unique_consecutive(return_counts=True)
        start = held = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            chunk = count if shard is None else count // (2 * shard.size)
            chunks = [0] if shard is None else [shard.rank, 2 * shard.size - 1 - shard.rank]
            for index in chunks:
                if number >= 0:
                    runs.append(Run(sample, held, chunk, start, (index + 1) * chunk))
                held += chunk
            start += count
    return DocumentRuns(runs, shard, group)


class DocumentAttention(MegatronModule):
    """Causal attention inside documents, at the cost of what each document sees.

    It takes the place of Megatron-Core's core attention: queries and keys arrive with their rotary positions applied.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: DocumentRuns | None, **_: Any
    ) -> Tensor:
        """Attend.

        Args:
            query: [n, B, heads, head_dim] this rank's rows.
            key: [n, B, key/value heads, head_dim].
            value: like `key`.
            attention_mask: the documents; None for one causal document a row.

        Returns:
            [n, B, heads · head_dim], zero on padding.
        """
        if attention_mask is None:
            return self._causal(query, key, value).flatten(2)
        shard, group = attention_mask.shard, attention_mask.group
        if shard is not None:
            key, value = shard.gather(torch.cat([key, value], dim=-1), group).split(key.shape[-1], dim=-1)
        output = torch.zeros_like(query)
        for run in attention_mask.runs:
            asked = slice(run.first_query, run.first_query + run.queries)
            seen = slice(run.first_key, run.first_key + run.keys)
            sample = slice(run.sample, run.sample + 1)
            output[asked, sample] = self._causal(query[asked, sample], key[seen, sample], value[seen, sample])
        return output.flatten(2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last rows of a document that has the rows of `key`."""
        queries, keys = query.shape[0], key.shape[0]
        # A bias object and no tensor: CUDA's flash kernel takes no mask, and the one that does holds every score.
        mask = causal_lower_right(queries, keys) if queries != keys else None
        query, key, value = (rows.permute(1, 2, 0, 3) for rows in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.permute(2, 0, 1, 3)


def with_document_attention(layer: ModuleSpec) -> ModuleSpec:
    """Return a Megatron-Core layer spec with its core attention replaced."""
    layer.submodules.self_attention.submodules.core_attention = DocumentAttention
    return layer


class PositionedRotary(torch.nn.Module):
    """Rotary angles at given positions, around a model's own rotary embedding, which counts rows from 0."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.positions: Tensor | None = None
        self.length = 0

    def forward(self, length: int, **keywords: Any) -> Tensor:
        """Return angles [n, B, 1, head_dim] at `positions` [B, n] when those are set, else the model's own."""
        if self.positions is None:
            return self.rotary(length, **keywords)
        angles = self.rotary.get_emb(self.length)
        return angles[:, 0, 0][self.positions.t()][:, :, None]

    def get_rotary_seq_len(self, *arguments: Any, **keywords: Any) -> int:
        """Ask the model's own."""
        return self.rotary.get_rotary_seq_len(*arguments, **keywords)
