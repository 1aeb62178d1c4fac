"""A KV cache for transformers models whose rollback is free."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _FixedLayer(CacheLayerMixin):
    """Keys and values of one decoder layer in one buffer, of which the first `length` rows are valid.

    transformers' DynamicCache copies the whole history at every append; here an append writes only the new rows, and
    rejecting rows only lowers `length`: whatever is written next lands on top of them.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return self.capacity

    def crop(self, max_length: int) -> None:
        self.length = min(self.length, max_length)


class FixedCache(Cache):
    """One request's target KV cache.

    Args:
        layers: number of decoder layers.
        capacity: the most rows it will ever hold.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[_FixedLayer(capacity) for _ in range(layers)])

    @property
    def length(self) -> int:
        """Rows held, the same in every layer."""
        return self.layers[0].length

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid keys and values of one layer, each [1, kv_heads, length, head_dim]."""
        held = self.layers[layer]
        return held.keys[:, :, : held.length], held.values[:, :, : held.length]
