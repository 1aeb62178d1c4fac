"""How feature rows are stored: FP32, BF16, or FP8 with a scale for every row."""

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_FP8 = "float8_e4m3fn"
_FP8_LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a shard: `width` values of `dtype` for every token (width 0: one value, no second dimension)."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token."""
        return self.dtype.itemsize * max(self.width, 1)


def stored_tensors(hidden_dtype: str, num_taps: int, hidden_size: int) -> list[StoredTensor]:
    """Return the tensors with a row for each token, in the order in which a sample's digest reads them."""
    dtype = HIDDEN_DTYPES[hidden_dtype]
    tensors = [
        StoredTensor("input_ids", torch.int32, 0),
        StoredTensor("loss_mask", torch.bool, 0),
        StoredTensor("taps", dtype, num_taps * hidden_size),
        StoredTensor("final_hidden", dtype, hidden_size),
    ]
    if hidden_dtype == _FP8:
        tensors += [StoredTensor("taps_scale", torch.float32, num_taps)]
        tensors += [StoredTensor("final_hidden_scale", torch.float32, 1)]
    return tensors


def encode(name: str, rows: Tensor, hidden_dtype: str, hidden_size: int) -> dict[str, Tensor]:
    """Return what is stored of features [S, k·d]: `name`, and for FP8 `name`_scale [S, k].

    In FP8 every vector of d values has a scale of its own, that of its largest value: hidden states of different
    layers and tokens differ by orders of magnitude.
    """
    if hidden_dtype != _FP8:
        return {name: rows.to(HIDDEN_DTYPES[hidden_dtype])}
    vectors = rows.float().unflatten(-1, (-1, hidden_size))
    scale = vectors.abs().amax(dim=-1, keepdim=True) / _FP8_LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (vectors / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(HIDDEN_DTYPES[_FP8])
    return {name: values.flatten(1), f"{name}_scale": scale.squeeze(-1)}


def decode(rows: Tensor, scale: Tensor | None, dtype: torch.dtype, hidden_size: int) -> Tensor:
    """Return features [S, k·d] as `dtype` from what `encode` stored."""
    if scale is None:
        return rows.to(dtype)
    vectors = rows.float().unflatten(-1, (-1, hidden_size))
    return (vectors * scale.unsqueeze(-1)).flatten(1).to(dtype)
