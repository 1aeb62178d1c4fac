"""One shard: a safetensors file of whole samples behind each other, each with its own digest."""

import errno
import hashlib
import json
import mmap
import re
import resource
import struct
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import StoredTensor
from megatron_dspark.features.cache.schema import ShardEntry
from megatron_dspark.files import atomic_file, save_tensors, sha256, write_json

METADATA = "dspark"
_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
_DTYPES |= {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
_INDEX = ("offsets", "digests")


@dataclass(frozen=True)
class StoredSample:
    """A sample as it is stored: its identifier and one tensor for every name, a row for each token."""

    sample_id: str
    tensors: dict[str, Tensor]

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tensors["input_ids"])


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.safetensors"


@dataclass(frozen=True)
class GatheredShard:
    """A shard's content before it is a file: its samples behind each other.

    Attributes:
        sample_ids: identifiers.
        offsets: [samples + 1] int64, as stored.
        parts: tensor name → rows of all samples.
    """

    sample_ids: list[str]
    offsets: Tensor
    parts: dict[str, Tensor]


def gather_shard(samples: Iterable[StoredSample], lengths: list[int], tensors: list[StoredTensor]) -> GatheredShard:
    """Put samples behind each other.

    Args:
        samples: in order.
        lengths: tokens of each of them.
        tensors: what is stored.
    """
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    total = int(offsets[-1])
    parts = {
        tensor.name: torch.empty((total, tensor.width) if tensor.width else (total,), dtype=tensor.dtype)
        for tensor in tensors
    }
    names = []
    for index, sample in enumerate(samples):
        for name, part in parts.items():
            part[int(offsets[index]) : int(offsets[index + 1])] = sample.tensors[name]
        names.append(sample.sample_id)
    return GatheredShard(names, offsets, parts)


def write_shard(path: Path, shard: GatheredShard, identity: str, facts: Path | None = None) -> ShardEntry:
    """Write a shard that appears whole.

    Args:
        path: the file.
        shard: its content.
        identity: of the cache that it belongs to.
        facts: where to leave the returned entry as JSON, before the shard appears under its name.

    Raises:
        DSparkError: the file cannot be written (no space is left).
    """
    names = shard.sample_ids
    digests = b"".join(
        _digest(name, [_bytes_of(part[int(start) : int(stop)]) for part in shard.parts.values()])
        for name, start, stop in zip(names, shard.offsets[:-1], shard.offsets[1:], strict=True)
    )
    stored = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(len(names), 32)
    parts = {**shard.parts, "offsets": shard.offsets, "digests": stored}
    # One key of metadata: the order of several is not fixed by the library, and bytes must not differ.
    metadata = {METADATA: json.dumps({"identity": identity, "sample_ids": names}, ensure_ascii=False)}
    try:
        with atomic_file(path) as temporary:
            save_tensors(parts, temporary, metadata=metadata)
            entry = ShardEntry(
                path.name,
                len(names),
                int(shard.offsets[-1]),
                temporary.stat().st_size,
                sha256(temporary),
                ShardFile(temporary).index_sha256(),
            )
            if facts is not None:
                write_json(facts, vars(entry))
    except (OSError, SafetensorError) as error:
        raise DSparkError(
            f"{path} could not be written ({error}); {_advice(error)} and run the same command again, which goes on "
            "after the last whole shard"
        ) from error
    return entry


def _advice(error: Exception) -> str:
    """What helps against an error of writing; the library that writes tensors says its number in words alone."""
    said = re.search(r"os error (\d+)", str(error))
    number = getattr(error, "errno", None) or (int(said.group(1)) if said else None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make its folder writable"
    return "see to that"


class ShardFile:
    """A shard: reads any sample by itself, checked against its digest.

    It keeps what it takes to find a sample. The file is mapped into memory when one is read, see `_Maps`.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DSparkError: the file is missing, or no shard.
        """
        self.path = path
        content = _map(path)
        try:
            (self._start,) = struct.unpack("<Q", content[:8])
            self._start += 8
            if not 8 < self._start < 2**31:
                raise ValueError(f"its header would be {self._start} bytes long")
            header = json.loads(content[8 : self._start])
            described = json.loads(header.pop("__metadata__")[METADATA])
            self.identity, self.sample_ids = described["identity"], described["sample_ids"]
            self._tensors: dict[str, dict[str, Any]] = header
            self._size = max(entry["data_offsets"][1] for entry in header.values()) + self._start
            if self._size != len(content):
                raise ValueError(f"it has {len(content)} bytes and its header says {self._size}")
            # Eight bytes a sample: a cache keeps those of all its samples.
            self._offsets = numpy.frombuffer(content[slice(*self._range("offsets"))], dtype="<i8")
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise _not_whole(path, error) from None
        _maps.keep(self, content)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def index_sha256(self) -> str:
        """Digest of the header and of what it takes to find and check a sample."""
        content = _maps.of(self)
        state = hashlib.sha256(content[: self._start])
        for name in _INDEX:
            state.update(content[slice(*self._range(name))])
        return state.hexdigest()

    @property
    def lengths(self) -> numpy.ndarray:
        """Tokens of each sample [samples] int64."""
        return numpy.diff(self._offsets)

    def read(self, index: int, names: tuple[str, ...], *, check: bool = True) -> dict[str, Tensor]:
        """Return tensors of a sample, in memory of their own.

        Args:
            index: of the sample in this shard.
            names: tensors to return.
            check: compare all bytes of the sample with its digest.

        Raises:
            DSparkError: the sample's bytes are not those that were written, or the shard is gone.
        """
        content = _maps.of(self)
        if check:
            found = _digest(self.sample_ids[index], [self._rows(content, name, index) for name in self._stored()])
            start = self._range("digests")[0] + 32 * index
            expected = content[start : start + 32]
            if found != expected:
                raise DSparkError(
                    f"sample {self.sample_ids[index]!r} in {self.path} was altered: its SHA-256 is {found.hex()} and "
                    f"was {expected.hex()} when it was written; restore the shard, or precompute again"
                )
        return {name: self._as_tensor(name, self._rows(content, name, index)) for name in names}

    def map(self) -> mmap.mmap:
        """Map the file.

        Raises:
            DSparkError: it is gone, or another one took its place since the header was read.
        """
        content = _map(self.path)
        if len(content) != self._size:
            raise _not_whole(self.path, f"it has {len(content)} bytes and had {self._size} when it was opened")
        return content

    def _stored(self) -> list[str]:
        order = ("input_ids", "loss_mask", "taps", "final_hidden", "taps_scale", "final_hidden_scale")
        return [name for name in order if name in self._tensors]

    def _range(self, name: str) -> tuple[int, int]:
        start, stop = self._tensors[name]["data_offsets"]
        return self._start + start, self._start + stop

    def _rows(self, content: mmap.mmap, name: str, index: int) -> memoryview:
        shape = self._tensors[name]["shape"]
        row = _DTYPES[self._tensors[name]["dtype"]].itemsize * (shape[1] if len(shape) > 1 else 1)
        start = self._range(name)[0]
        first, last = int(self._offsets[index]), int(self._offsets[index + 1])
        return memoryview(content)[start + row * first : start + row * last]

    def _as_tensor(self, name: str, rows: memoryview) -> Tensor:
        entry = self._tensors[name]
        # This copy leaves the interpreter to other threads; one by bytes or bytearray would not.
        copied = numpy.frombuffer(rows, dtype=numpy.uint8).copy()
        return torch.from_numpy(copied).view(_DTYPES[entry["dtype"]]).view(-1, *entry["shape"][1:])


class _Maps:
    """The shards that this process has mapped, over all caches: not more than it may hold open beside other files."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[ShardFile, mmap.mmap] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, shard: ShardFile) -> mmap.mmap:
        """Return the shard's map. The least recently used ones are let go of; whoever still reads one keeps it."""
        with self._lock:
            content = self._open.pop(shard, None)
            if content is not None:
                self._open[shard] = content
                return content
        # A disk may take its time, and other threads read on meanwhile.
        content = shard.map()
        self.keep(shard, content)
        return content

    def keep(self, shard: ShardFile, content: mmap.mmap) -> None:
        """Take a map in, as the most recently used one."""
        with self._lock:
            self._open[shard] = content
            while len(self._open) > most_maps() and (oldest := next(iter(self._open), None)) is not None:
                del self._open[oldest]

    def __len__(self) -> int:
        return len(self._open)


_maps = _Maps()


def most_maps() -> int:
    """Return how many shards may be mapped: each holds a descriptor, and half of them stay for everything else.

    Linux also bounds the maps of a process (65,530 by default).
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16384 if soft == resource.RLIM_INFINITY else max(1, min(soft // 2, 16384))


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DSparkError(f"the shard {path} is missing; restore it, or precompute again") from None
    except OSError as error:
        raise DSparkError(f"the shard {path} cannot be read ({error.strerror}); see to that, or restore it") from None
    except ValueError as error:
        raise _not_whole(path, error) from None


def _not_whole(path: Path, reason: object) -> DSparkError:
    return DSparkError(f"{path} is not a whole shard ({reason}); restore it, or precompute again")


def _digest(sample_id: str, contents: list[Any]) -> bytes:
    """SHA-256 over the identifier's length and bytes, then every tensor's rows."""
    name = sample_id.encode()
    state = hashlib.sha256(struct.pack("<Q", len(name)) + name)
    for content in contents:
        state.update(content)
    return state.digest()


def _bytes_of(tensor: Tensor) -> Any:
    return memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy())
