"""Which samples stand in which shard, and how many bytes that makes: a function of the samples' lengths alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dspark.features.cache.encoding import StoredTensor

# So many shards are wanted, that any number of ranks has work and an interruption costs little; as long as a shard
# stays between these sizes, in MiB.
_SHARDS = 64
_SMALLEST, _LARGEST = 4, 1024
# A sample's share of the offsets, digests and identifiers.
_INDEX_BYTES = 48


@dataclass(frozen=True)
class ShardPlan:
    """The shards of a cache before it exists.

    Attributes:
        lengths: tokens of each sample, in order.
        starts: number of the first sample of each shard, and at the end the number of samples.
        bytes_per_token: of everything that is stored for each token.
    """

    lengths: list[int]
    starts: list[int]
    bytes_per_token: int

    @property
    def num_shards(self) -> int:
        """Shards."""
        return len(self.starts) - 1

    def samples(self, shard: int) -> range:
        """Return the samples of a shard."""
        return range(self.starts[shard], self.starts[shard + 1])

    def shard_bytes(self, shard: int) -> int:
        """Return about how large a shard becomes."""
        samples = self.samples(shard)
        return sum(self.lengths[index] for index in samples) * self.bytes_per_token + len(samples) * _INDEX_BYTES

    @property
    def total_bytes(self) -> int:
        """About how large all shards become."""
        return sum(self.shard_bytes(shard) for shard in range(self.num_shards))


def plan_shards(lengths: Sequence[int], tensors: Sequence[StoredTensor], shard_mib: int | None = None) -> ShardPlan:
    """Cut samples into runs of about `shard_mib` (by default what suits the total), never through a sample."""
    per_token = sum(tensor.bytes_per_token for tensor in tensors)
    if shard_mib is None:
        mib = sum(lengths) * per_token / 2**20 / _SHARDS
        shard_mib = _SMALLEST
        while shard_mib < mib and shard_mib < _LARGEST:
            shard_mib *= 2
    limit, starts, filled = shard_mib * 2**20, [0], 0
    for index, length in enumerate(lengths):
        size = length * per_token
        if filled and filled + size > limit:
            starts.append(index)
            filled = 0
        filled += size
    return ShardPlan(list(lengths), [*starts, len(lengths)], per_token)
