"""New caches out of finished ones: several joined, or a part of one."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.text import Text
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import StoredTensor, stored_tensors
from megatron_dspark.features.cache.plan import plan_shards
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.schema import DataIdentity, Manifest, samples_fingerprint, write_manifest
from megatron_dspark.features.cache.shard import StoredSample, shard_name
from megatron_dspark.features.cache.writer import CacheWriter
from megatron_dspark.files import atomic_file, atomic_folder


@dataclass(frozen=True)
class ReshapeReport:
    """The new cache."""

    output: str
    samples: int
    tokens: int
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(self.__dict__)

    def render(self) -> Text:
        """As text."""
        return Text(f"{self.output}: {self.samples:,} samples, {self.tokens:,} tokens, {decimal(self.bytes)}")


def merge_caches(folders: Sequence[str | Path], output: str | Path) -> ReshapeReport:
    """Join caches of one identity (target, taps, types, rules) and different samples, in the order given.

    Shards are hard links where the file system allows, else copies.

    Raises:
        DSparkError: fewer than two caches, one is not whole or of another identity, a sample is in two of them, or
            `output` holds something.
    """
    if len(folders) < 2:
        raise DSparkError(f"merging needs at least two caches, and {len(folders)} was named")
    output, caches = Path(output), [FeatureCache(folders[0])]
    for folder in folders[1:]:
        caches.append(FeatureCache(folder, _identity_fields(caches[0].manifest), whose=str(folders[0])))
    owner: dict[str, Path] = {}
    for cache in caches:
        for sample_id in cache.sample_ids:
            if sample_id in owner:
                raise DSparkError(
                    f"sample {sample_id!r} is in {owner[sample_id]} and in {cache.folder}; take it out of one of them "
                    "(cache subset)"
                )
            owner[sample_id] = cache.folder
    pairs = [(cache, entry) for cache in caches for entry in cache.manifest.shards]
    shards = [dataclasses.replace(entry, name=shard_name(number)) for number, (_, entry) in enumerate(pairs)]
    first = caches[0].manifest
    data = dataclasses.replace(
        first.data,
        fingerprint=samples_fingerprint(sample for cache in caches for sample in cache.samples()),
        **{
            name: sum(getattr(cache.manifest.data, name) for cache in caches)
            for name in ("samples", "tokens", "loss_tokens")
        },
    )
    manifest = dataclasses.replace(first, data=data, shards=shards)
    with atomic_folder(output) as folder:
        for (cache, entry), shard in zip(pairs, shards, strict=True):
            _link(cache.folder / entry.name, folder / shard.name)
        for file in first.files:
            _link(caches[0].folder / file.name, folder / file.name)
        write_manifest(folder, manifest)
    return _report(output, manifest)


def subset_cache(
    folder: str | Path,
    output: str | Path,
    *,
    first: int | None = None,
    ids: str | Path | None = None,
    taps: list[int] | None = None,
) -> ReshapeReport:
    """Write a cache of some of the samples (in the cache's order), some of the taps, or both.

    It is the cache that precompute would write for those samples and taps.

    Args:
        folder: the cache.
        output: folder of the new one; an interrupted one is gone on with.
        first: keep so many samples from the start.
        ids: file of identifiers, one a line.
        taps: target layers to keep.

    Raises:
        DSparkError: nothing is left out, a sample or tap is not there, or the cache is not whole.
    """
    cache = FeatureCache(folder)
    numbers = _chosen(cache, first, ids)
    there = cache.manifest.features.target_layer_ids
    kept = there if taps is None else taps
    if kept != sorted(set(kept)) or not kept or not set(kept) <= set(there):
        raise DSparkError(f"taps {kept} must strictly increase and be among those of {folder}, which are {there}")
    if len(numbers) == len(cache) and kept == there:
        raise DSparkError(f"the subset of {folder} would be all of it; name first, ids or taps")
    source = cache.manifest
    samples = [cache.sample(number) for number in numbers]
    lengths = [len(sample.input_ids) for sample in samples]
    tensors = stored_tensors(source.features.hidden_dtype, len(kept), source.target.hidden_size)
    data = DataIdentity(
        **{
            **vars(source.data),
            "fingerprint": samples_fingerprint(samples),
            "samples": len(samples),
            "tokens": sum(lengths),
            "loss_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        }
    )
    manifest = dataclasses.replace(
        source, data=data, features=dataclasses.replace(source.features, target_layer_ids=kept), files=[], shards=[]
    )
    plan = plan_shards(lengths, tensors)
    writer = CacheWriter(Path(output), manifest, plan, tensors)
    if not writer.check():
        with writer.alone():
            writer.begin({file.name: _copier(cache.folder / file.name) for file in source.files})
            columns = [there.index(tap) for tap in kept]
            for shard in writer.missing():
                chosen = [numbers[index] for index in plan.samples(shard)]
                writer.write(shard, writer.gather(shard, _read(cache, chosen, tensors, columns)))
            writer.finish()
    return _report(Path(output), FeatureCache(output).manifest)


def _chosen(cache: FeatureCache, first: int | None, ids: str | Path | None) -> list[int]:
    numbers = list(range(len(cache)))
    if ids is not None:
        try:
            wanted = {line for line in Path(ids).read_text(encoding="utf-8").splitlines() if line.strip()}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise DSparkError(f"the identifiers at {ids} cannot be read ({reason})") from None
        unknown = sorted(wanted - set(cache.sample_ids))
        if unknown:
            raise DSparkError(f"{cache.folder} has no sample {unknown[0]!r}, which {ids} names; correct the file")
        numbers = [number for number in numbers if cache.sample_ids[number] in wanted]
    if first is not None:
        if not 1 <= first <= len(numbers):
            raise DSparkError(f"first is {first} and there are {len(numbers)} samples to choose from")
        numbers = numbers[:first]
    if not numbers:
        raise DSparkError(f"{ids} names no sample; a cache needs one at least")
    return numbers


def _read(
    cache: FeatureCache, numbers: list[int], tensors: list[StoredTensor], columns: list[int]
) -> Iterator[StoredSample]:
    names = tuple(tensor.name for tensor in tensors)
    all_taps = len(cache.manifest.features.target_layer_ids)
    for number in numbers:
        stored = cache.stored(number, names)
        for name in ("taps", "taps_scale"):
            if name in stored and columns != list(range(all_taps)):
                stored[name] = _columns(stored[name], columns, all_taps)
        yield StoredSample(cache.sample_ids[number], stored)


def _columns(rows: Tensor, columns: list[int], count: int) -> Tensor:
    return rows.unflatten(1, (count, -1))[:, columns].flatten(1)


def _identity_fields(manifest: Manifest) -> dict[str, Any]:
    fields = {
        f"target.{name}": value for name, value in vars(manifest.target).items() if name not in ("id", "revision")
    }
    fields |= {f"features.{name}": value for name, value in vars(manifest.features).items()}
    return fields | {f"data.{name}": getattr(manifest.data, name) for name in ("loss_mask_rule", "max_length")}


def _link(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, path)
    except OSError:
        with atomic_file(path) as temporary:
            shutil.copyfile(source, temporary)


def _copier(source: Path) -> Callable[[Path], None]:
    def copy(path: Path) -> None:
        with atomic_file(path) as temporary:
            shutil.copyfile(source, temporary)

    return copy


def _report(output: Path, manifest: Manifest) -> ReshapeReport:
    size = sum(part.bytes for part in (*manifest.shards, *manifest.files))
    return ReshapeReport(str(output), manifest.data.samples, manifest.data.tokens, size)
