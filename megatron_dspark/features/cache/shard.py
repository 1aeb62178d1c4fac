"""One shard: a safetensors file of whole samples behind each other, each with its own digest."""

import bisect
import hashlib
import json
import mmap
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import StoredTensor
from megatron_dspark.features.cache.schema import ShardEntry
from megatron_dspark.files import atomic_file, sha256, write_json

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


def write_shard(
    path: Path,
    samples: Iterable[StoredSample],
    lengths: list[int],
    tensors: list[StoredTensor],
    identity: str,
    facts: Path | None = None,
) -> ShardEntry:
    """Write a shard that appears whole.

    Args:
        path: the file.
        samples: in order.
        lengths: tokens of each of them.
        tensors: what is stored.
        identity: of the cache that it belongs to.
        facts: where to leave the returned entry as JSON, before the shard appears under its name.

    Raises:
        DSparkError: the file cannot be written (no space is left).
    """
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    total = int(offsets[-1])
    parts = {
        tensor.name: torch.empty((total, tensor.width) if tensor.width else (total,), dtype=tensor.dtype)
        for tensor in tensors
    }
    names, digests = [], []
    for index, sample in enumerate(samples):
        start, stop = int(offsets[index]), int(offsets[index + 1])
        for name, part in parts.items():
            part[start:stop] = sample.tensors[name]
        names.append(sample.sample_id)
        digests.append(_digest(sample.sample_id, [_bytes_of(part[start:stop]) for part in parts.values()]))
    parts["offsets"] = offsets
    parts["digests"] = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(names), 32)
    # One key of metadata: the order of several is not fixed by the library, and bytes must not differ.
    metadata = {METADATA: json.dumps({"identity": identity, "sample_ids": names}, ensure_ascii=False)}
    try:
        with atomic_file(path) as temporary:
            save_tensors(parts, temporary, metadata)
            entry = ShardEntry(
                path.name,
                len(names),
                total,
                temporary.stat().st_size,
                sha256(temporary),
                ShardFile(temporary).index_sha256(),
            )
            if facts is not None:
                write_json(facts, vars(entry))
    except (OSError, SafetensorError) as error:
        raise DSparkError(
            f"{path} could not be written ({error}); free some space and run the same command again, which goes on "
            "after the last whole shard"
        ) from error
    return entry


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors that others may read as they may read any new file here; the library would keep them out."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


class ShardFile:
    """A shard mapped into memory: reads any sample by itself, checked against its digest."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            DSparkError: it is missing, or no shard.
        """
        self.path = path
        try:
            with open(path, "rb") as handle:
                (self._start,) = struct.unpack("<Q", handle.read(8))
                self._start += 8
                if not 8 < self._start < 2**31:
                    raise ValueError(f"its header would be {self._start} bytes long")
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            header = json.loads(self._map[8 : self._start])
            described = json.loads(header.pop("__metadata__")[METADATA])
            self.identity, self.sample_ids = described["identity"], described["sample_ids"]
            self._tensors: dict[str, dict[str, Any]] = header
            end = max(entry["data_offsets"][1] for entry in header.values())
            if end + self._start != len(self._map):
                raise ValueError(f"it has {len(self._map)} bytes and its header says {end + self._start}")
            self._offsets = self._tensor("offsets").tolist()
        except FileNotFoundError:
            raise DSparkError(f"the shard {path} is missing; restore it, or precompute again") from None
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise DSparkError(f"{path} is not a whole shard ({error}); restore it, or precompute again") from None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def index_sha256(self) -> str:
        """Digest of the header and of what it takes to find and check a sample."""
        state = hashlib.sha256(self._map[: self._start])
        for name in _INDEX:
            state.update(self._map[slice(*self._range(name))])
        return state.hexdigest()

    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [stop - start for start, stop in zip(self._offsets, self._offsets[1:], strict=False)]

    def read(self, index: int, names: tuple[str, ...], *, check: bool = True) -> dict[str, Tensor]:
        """Return tensors of a sample, in memory of their own.

        Args:
            index: of the sample in this shard.
            names: tensors to return.
            check: compare all bytes of the sample with its digest.

        Raises:
            DSparkError: the sample's bytes are not those that were written.
        """
        slices = {name: self._rows(name, index) for name in self._stored()}
        if check:
            found = _digest(self.sample_ids[index], list(slices.values()))
            start = self._range("digests")[0] + 32 * index
            expected = self._map[start : start + 32]
            if found != expected:
                raise DSparkError(
                    f"sample {self.sample_ids[index]!r} in {self.path} was altered: its SHA-256 is {found.hex()} and "
                    f"was {expected.hex()} when it was written; restore the shard, or precompute again"
                )
        return {name: self._as_tensor(name, slices[name]) for name in names}

    def _stored(self) -> list[str]:
        order = ("input_ids", "loss_mask", "taps", "final_hidden", "taps_scale", "final_hidden_scale")
        return [name for name in order if name in self._tensors]

    def _range(self, name: str) -> tuple[int, int]:
        start, stop = self._tensors[name]["data_offsets"]
        return self._start + start, self._start + stop

    def _rows(self, name: str, index: int) -> memoryview:
        shape = self._tensors[name]["shape"]
        row = _DTYPES[self._tensors[name]["dtype"]].itemsize * (shape[1] if len(shape) > 1 else 1)
        start = self._range(name)[0]
        first, last = self._offsets[index], self._offsets[index + 1]
        return memoryview(self._map)[start + row * first : start + row * last]

    def _tensor(self, name: str) -> Tensor:
        return self._as_tensor(name, memoryview(self._map)[slice(*self._range(name))])

    def _as_tensor(self, name: str, content: memoryview) -> Tensor:
        entry = self._tensors[name]
        flat = torch.frombuffer(bytearray(content), dtype=_DTYPES[entry["dtype"]])
        return flat.view(-1, *entry["shape"][1:])


class ShardFiles:
    """Open shards, not more than a number at once."""

    def __init__(self, folder: Path, entries: list[ShardEntry], limit: int = 256) -> None:
        self._folder, self._entries, self._limit = folder, entries, limit
        self._open: dict[int, ShardFile] = {}
        self._lock = threading.Lock()
        self._starts = [0]
        for entry in entries:
            self._starts.append(self._starts[-1] + entry.samples)

    def locate(self, sample: int) -> tuple[ShardFile, int]:
        """Return the shard that holds sample number `sample` of the cache, and its number in there."""
        number = bisect.bisect_right(self._starts, sample) - 1
        with self._lock:
            shard = self._open.pop(number, None)
            if shard is None:
                shard = ShardFile(self._folder / self._entries[number].name)
            self._open[number] = shard
            if len(self._open) > self._limit:
                self._open.pop(next(iter(self._open)))
        return shard, sample - self._starts[number]


def _digest(sample_id: str, contents: list[Any]) -> bytes:
    """SHA-256 over the identifier's length and bytes, then every tensor's rows."""
    name = sample_id.encode()
    state = hashlib.sha256(struct.pack("<Q", len(name)) + name)
    for content in contents:
        state.update(content)
    return state.digest()


def _bytes_of(tensor: Tensor) -> Any:
    return memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy())
