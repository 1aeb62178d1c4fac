"""Reading a cache: nothing is used that was not compared with what the manifest says."""

import bisect
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import numpy
import torch
from torch import Tensor

from megatron_dspark.data.chat import ChatSample
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import decode, stored_tensors
from megatron_dspark.features.cache.schema import (
    TARGET_FOLDER,
    Manifest,
    ShardEntry,
    read_manifest,
    require,
)
from megatron_dspark.features.cache.shard import ShardFile
from megatron_dspark.files import sha256
from megatron_dspark.targets.folder import TargetConfig, read_target_config


class FeatureCache:
    """A complete cache, open for reading any sample in any order.

    Opening compares the manifest with what is expected, every shard's size and index (header, offsets, digests of
    samples) with the manifest, and the small files' digests. Every sample that is read is compared with its digest, so
    that a cache is never hashed as a whole before training, and never trusted either.
    """

    def __init__(
        self,
        folder: str | Path,
        expected: Mapping[str, Any] | None = None,
        *,
        whose: str = "this run",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Open a cache.

        Args:
            folder: the cache.
            expected: dotted manifest field → value that it must have.
            whose: who expects that, for the sentence.
            dtype: in which features are returned.

        Raises:
            DSparkError: incomplete, another schema, an expectation is not met, or a file is missing, truncated or
                altered; one sentence naming the field and both values.
        """
        self.folder, self.dtype = Path(folder), dtype
        self.manifest: Manifest = read_manifest(self.folder)
        require(self.manifest, self.folder, expected or {}, whose)
        self._check_files()
        with ThreadPoolExecutor(16) as pool:
            self._shards = list(
                pool.map(lambda entry: open_checked(self.folder, entry, self.manifest), self.manifest.shards)
            )
        self._starts = list(itertools.accumulate(map(len, self._shards), initial=0))
        self.sample_ids = [name for shard in self._shards for name in shard.sample_ids]
        self._numbers = {name: number for number, name in enumerate(self.sample_ids)}
        if len(self._numbers) != len(self.sample_ids):
            raise DSparkError(f"the feature cache {self.folder} holds a sample twice; precompute it again")
        features = self.manifest.features
        self._hidden_size = self.manifest.target.hidden_size
        self._names = tuple(
            tensor.name
            for tensor in stored_tensors(features.hidden_dtype, len(features.target_layer_ids), self._hidden_size)
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._numbers

    def target(self) -> TargetConfig:
        """Return the config of the target; its folder holds the embedding, the LM head and the tokenizer."""
        config = read_target_config(self.folder / TARGET_FOLDER, any_architecture=True)
        target = self.manifest.target
        return dataclasses.replace(config, weights=target.weights_fingerprint, known_as=target.id)

    def samples(self) -> "CachedSamples":
        """Return ids and loss masks of all samples, read when they are asked for."""
        return CachedSamples(self)

    @property
    def lengths(self) -> numpy.ndarray:
        """Tokens of each sample [samples] int64; no sample is read."""
        return numpy.concatenate([shard.lengths for shard in self._shards])

    def sample(self, number: int) -> ChatSample:
        """Return ids and loss mask of a sample. Its features are not read, and the whole is not checked here."""
        found = self.stored(number, ("input_ids", "loss_mask"), check=False)
        return ChatSample(self.sample_ids[number], found["input_ids"].long(), found["loss_mask"])

    def features(self, sample_id: str) -> tuple[Tensor, Tensor, Tensor]:
        """Read a sample, compared with its digest.

        Returns:
            Token ids [S], taps [S, m·d] and final hidden state [S, d].

        Raises:
            DSparkError: there is no such sample, or its bytes were altered.
        """
        if sample_id not in self._numbers:
            raise DSparkError(f"the feature cache {self.folder} has no sample {sample_id!r}; precompute the same data")
        stored = self.stored(self._numbers[sample_id], self._names)
        taps, final_hidden = (
            decode(stored[name], stored.get(f"{name}_scale"), self.dtype, self._hidden_size)
            for name in ("taps", "final_hidden")
        )
        return stored["input_ids"].long(), taps, final_hidden

    def stored(self, number: int, names: tuple[str, ...], *, check: bool = True) -> dict[str, Tensor]:
        """Return tensors of sample `number` of the cache as they are stored, see `ShardFile.read`."""
        shard = bisect.bisect_right(self._starts, number) - 1
        return self._shards[shard].read(number - self._starts[shard], names, check=check)

    def _check_files(self) -> None:
        for entry in self.manifest.files:
            path = self.folder / entry.name
            check_size(path, entry.bytes, self.folder)
            found = sha256(path)
            if found != entry.sha256:
                raise _altered(self.folder, entry.name, "sha256", entry.sha256, found)


class CachedSamples(Sequence[ChatSample]):
    """The samples of a cache as a sequence that holds none of them."""

    def __init__(self, cache: FeatureCache, numbers: range | None = None) -> None:
        self._cache = cache
        self._numbers = range(len(cache)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> ChatSample: ...
    @overload
    def __getitem__(self, index: slice) -> "CachedSamples": ...
    def __getitem__(self, index: int | slice) -> "ChatSample | CachedSamples":
        if isinstance(index, slice):
            return CachedSamples(self._cache, self._numbers[index])
        return self._cache.sample(self._numbers[index])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, which the shards' indexes know."""
        return self._cache.lengths[list(self._numbers)].tolist()

    def __iter__(self) -> Iterator[ChatSample]:
        return (self._cache.sample(number) for number in self._numbers)


def open_checked(folder: Path, entry: ShardEntry, manifest: Manifest) -> ShardFile:
    """Open a shard whose size, identity and index are those of the manifest.

    Raises:
        DSparkError: names the shard, the field and both values.
    """
    path = folder / entry.name
    check_size(path, entry.bytes, folder)
    shard = ShardFile(path)
    if shard.identity != manifest.identity:
        raise _altered(folder, entry.name, "identity", manifest.identity, shard.identity, "belongs to another cache: ")
    for field, expected, found in (
        ("samples", entry.samples, len(shard)),
        ("tokens", entry.tokens, int(shard.lengths.sum())),
        ("index_sha256", entry.index_sha256, shard.index_sha256()),
    ):
        if expected != found:
            raise _altered(folder, entry.name, field, expected, found)
    return shard


def check_size(path: Path, expected: int, folder: Path) -> None:
    """Refuse a file that is missing or of another size.

    Raises:
        DSparkError: names it, and both sizes.
    """
    if not path.is_file():
        raise DSparkError(
            f"{path.relative_to(folder)} of the feature cache {folder} is missing and the manifest says {expected} "
            "bytes; restore it, or precompute again"
        )
    found = os.stat(path).st_size
    if found != expected:
        word = "truncated" if found < expected else "longer than it was"
        raise DSparkError(
            f"{path.relative_to(folder)} of the feature cache {folder} is {word}: bytes is {found} and the manifest "
            f"says {expected}; restore it, or precompute again"
        )


def _altered(folder: Path, name: str, field: str, expected: Any, found: Any, what: str = "") -> DSparkError:
    return DSparkError(
        f"{name} of the feature cache {folder} {what or 'is not the file that was written: '}{field} is {found} and "
        f"the manifest says {expected}; restore it, or precompute again"
    )
