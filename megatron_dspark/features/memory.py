"""Captured features kept in memory, so that later epochs do not run the target again."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_dspark.blocks import document_starts
from megatron_dspark.features.colocated import TargetFeatures


class FeatureMemory:
    """Captures each sample once, alone, and keeps its features (of this rank's rows) while the limit allows.

    A sample's features do not depend on what it is batched with, so a resumed run sees the same numbers. Nothing is
    evicted: beyond the limit, samples are captured each time that they come.
    """

    def __init__(self, capture: Callable[[Tensor], TargetFeatures], limit_bytes: int) -> None:
        """Args: the target's capture of [1, S] ids, and the memory to fill at most."""
        self._capture = capture
        self._limit, self._used = limit_bytes, 0
        self._kept: dict[bytes, TargetFeatures] = {}

    def features(self, input_ids: Tensor, lengths: Sequence[int], documents: Tensor | None = None) -> TargetFeatures:
        """Return the features of a padded micro-batch; rows of padding are zero.

        Args:
            input_ids: [B, S], each row padded at its end.
            lengths: tokens of each sample without padding, row by row; used where a row is a sample.
            documents: [B, S] document of each row, −1 on padding; None where a row is a sample.
        """
        if documents is None:
            # A micro-batch without any sample (ranks that validate fewer than others) has one row of padding.
            rows = [[row[:length]] for row, length in zip(input_ids, lengths or [input_ids.shape[1]], strict=True)]
        else:
            starts, end = document_starts(documents), documents.shape[1]
            rows = []
            for ids, start, number in zip(input_ids, starts, documents, strict=True):
                parts = itertools.pairwise([*start.unique().tolist(), end])
                # A row of padding alone stands for itself, so that there is something of the right width.
                rows.append([ids[first:last] for first, last in parts if first == 0 or number[first] >= 0])
        features = [[self._of(ids) for ids in row] for row in rows]
        return TargetFeatures(
            taps=_padded([[single.taps for single in row] for row in features]),
            final_hidden=_padded([[single.final_hidden for single in row] for row in features]),
        )

    def _of(self, ids: Tensor) -> TargetFeatures:
        key = ids.cpu().numpy().tobytes()
        if key not in self._kept:
            batched = self._capture(ids[None])
            single = TargetFeatures(taps=batched.taps[:, 0], final_hidden=batched.final_hidden[:, 0])
            size = sum(part.numel() * part.element_size() for part in (single.taps, single.final_hidden))
            if self._used + size > self._limit:
                return single
            self._used += size
            self._kept[key] = single
        return self._kept[key]


def _padded(rows: list[list[Tensor]]) -> Tensor:
    """Join the samples of each row, and pad the rows: [S, B, …]."""
    return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows])
