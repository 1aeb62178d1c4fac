"""Captured features kept in memory, so that later epochs do not run the target again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_dspark.features.colocated import TargetFeatures


class FeatureMemory:
    """Captures each sample once, alone and unpadded, and keeps its features while the limit allows.

    A sample's features do not depend on what it is batched with, so a resumed run sees the same numbers. Nothing is
    evicted: beyond the limit, samples are captured each time that they come.
    """

    def __init__(self, capture: Callable[[Tensor], TargetFeatures], limit_bytes: int) -> None:
        """Args: the target's capture of [1, S] ids, and the memory to fill at most."""
        self._capture = capture
        self._limit, self._used = limit_bytes, 0
        self._kept: dict[bytes, TargetFeatures] = {}

    def features(self, input_ids: Tensor, lengths: Sequence[int]) -> TargetFeatures:
        """Return the features of a padded micro-batch; rows of padding are zero.

        Args:
            input_ids: [B, S], each row padded at its end.
            lengths: tokens of each row without padding.
        """
        singles = [self._of(row[:length]) for row, length in zip(input_ids, lengths, strict=True)]
        return TargetFeatures(
            taps=torch.nn.utils.rnn.pad_sequence([single.taps for single in singles]),
            final_hidden=torch.nn.utils.rnn.pad_sequence([single.final_hidden for single in singles]),
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
