"""Writing a cache: whole shards in a folder whose manifest says "complete" last of all; interrupted, it goes on."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import StoredTensor
from megatron_dspark.features.cache.plan import ShardPlan
from megatron_dspark.features.cache.schema import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    read_manifest,
    write_manifest,
)
from megatron_dspark.features.cache.shard import GatheredShard, StoredSample, gather_shard, shard_name, write_shard
from megatron_dspark.files import read_json, remove, sha256
from megatron_dspark.lock import LOCK_FILE, folder_lock

_PARTIAL = "*.partial"


class CacheWriter:
    """Writes the shards of a plan, on any number of ranks; the same bytes on all of them.

    The order of calls: `begin` on one rank; then on every rank `missing` and `write`; then `finish` on one rank. All
    of it inside `alone` of one rank.
    """

    def __init__(self, folder: Path, manifest: Manifest, plan: ShardPlan, tensors: list[StoredTensor]) -> None:
        """Args: the folder; what the manifest is to say, without shards; the plan; what is stored for each token."""
        self.folder, self.plan, self.tensors = folder, plan, tensors
        self.manifest = dataclasses.replace(manifest, complete=False, shards=[])

    def check(self) -> bool:
        """Look at what the folder holds, change nothing, and return whether the cache is already complete.

        Raises:
            DSparkError: it holds something else, or a cache made (or begun) from something else.
        """
        folder = self.folder
        if not folder.exists():
            return False
        if not (folder / MANIFEST_FILE).exists():
            if not folder.is_dir() or any(not _is_leftover(path) for path in folder.iterdir()):
                raise DSparkError(f"{folder} is not empty and no precompute began there; choose another folder")
            return False
        found = read_manifest(folder, complete=False)
        word = "made" if found.complete else "begun"
        ours = dataclasses.asdict(dataclasses.replace(self.manifest, complete=found.complete, shards=found.shards))
        difference = _first_difference(ours, dataclasses.asdict(found))
        if difference is not None:
            field, wanted, there = difference
            raise DSparkError(
                f"the feature cache {folder} was {word} with {field} {there!r} and is now to have {wanted!r}; restore "
                "that, choose another folder, or remove this one"
            )
        if found.complete and [entry.samples for entry in found.shards] != self._samples_by_shard():
            raise DSparkError(
                f"the feature cache {folder} was made with {len(found.shards)} shards and is now to have "
                f"{self.plan.num_shards}; restore shard_mib, or choose another folder"
            )
        return found.complete

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, made where it does not exist, against other jobs; a killed job holds nothing.

        Raises:
            DSparkError: another job is writing there, or did so since `check`.
        """
        with folder_lock(self.folder, keep_file=False) as held:
            if self.check():
                raise DSparkError(f"another job has just completed {self.folder}; there is nothing left to do")
            if held:
                # Nobody else writes here: these are a dead job's, whichever machine it ran on.
                self._remove_partials()
            else:
                print(
                    f"the file system of {self.folder} has no locks; see to it that no other job writes there",
                    file=sys.stderr,
                )
            yield

    def begin(self, files: dict[str, Any]) -> None:
        """Write the unfinished manifest and what travels with the shards.

        Args:
            files: file name → function that writes it to a path atomically, for what travels with the shards.
        """
        write_manifest(self.folder, self.manifest)
        entries = []
        for name, write in sorted(files.items()):
            path = self.folder / name
            write(path)
            entries.append(FileEntry(name, path.stat().st_size, sha256(path)))
        self._files = entries

    def missing(self, rank: int = 0, ranks: int = 1) -> list[int]:
        """Return this rank's shards that are not whole yet; every byte of those that are is read again."""
        return [number for number in range(rank, self.plan.num_shards, ranks) if not self._is_whole(number)]

    def gather(self, number: int, samples: Iterable[StoredSample]) -> GatheredShard:
        """Put a shard's samples together in memory."""
        lengths = [self.plan.lengths[index] for index in self.plan.samples(number)]
        return gather_shard(samples, lengths, self.tensors)

    def write(self, number: int, shard: GatheredShard) -> ShardEntry:
        """Write a shard whole.

        Raises:
            DSparkError: the disk is full, or cannot be written.
        """
        return write_shard(self.folder / shard_name(number), shard, self.manifest.identity, self._facts(number))

    def finish(self) -> Manifest:
        """Publish the manifest once every shard is whole, and return it.

        Raises:
            DSparkError: a shard is missing.
        """
        absent = [n for n in range(self.plan.num_shards) if not (self.folder / shard_name(n)).exists()]
        if absent:
            raise DSparkError(f"{self.folder / shard_name(absent[0])} is missing at the end; run the command again")
        shards = [self._entry(number) for number in range(self.plan.num_shards)]
        manifest = dataclasses.replace(self.manifest, complete=True, files=self._files, shards=shards)
        write_manifest(self.folder, manifest)
        self.tidy()
        return manifest

    def tidy(self) -> None:
        """Remove what only an unfinished cache needs; nobody writes to a complete one."""
        self._remove_partials()
        for path in (*map(self._facts, range(self.plan.num_shards)), self.folder / LOCK_FILE):
            # Looked for first: a folder that is read-only by now refuses to remove even what is not there.
            if path.exists():
                path.unlink(missing_ok=True)

    def present_bytes(self) -> int:
        """Return the size of the shards that are there, whole or not."""
        total = 0
        for number in range(self.plan.num_shards):
            # Another job may be writing there; it is refused later, by its lock.
            with contextlib.suppress(FileNotFoundError):
                total += (self.folder / shard_name(number)).stat().st_size
        return total

    def _remove_partials(self) -> None:
        for leftover in list(self.folder.rglob(f".{_PARTIAL}")):
            remove(leftover)

    def _is_whole(self, number: int) -> bool:
        path = self.folder / shard_name(number)
        if not path.exists() or not self._facts(number).exists():
            return False
        entry = self._entry(number)
        return path.stat().st_size == entry.bytes and sha256(path) == entry.sha256

    def _entry(self, number: int) -> ShardEntry:
        return ShardEntry(**read_json(self._facts(number), "what is known of a finished shard"))

    def _facts(self, number: int) -> Path:
        return self.folder / f".{shard_name(number)}.json"

    def _samples_by_shard(self) -> list[int]:
        return [len(self.plan.samples(number)) for number in range(self.plan.num_shards)]


class WriterBehind:
    """Writes one shard in the background while the next one is gathered: at most two of them are in memory.

    Shards appear in the order in which they are given. What goes wrong with one is raised when the next one is given,
    or at the end, which waits for what is being written.
    """

    def __init__(self, writer: CacheWriter) -> None:
        """Args: what writes."""
        self._writer = writer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._pending: Future[ShardEntry] | None = None

    def __enter__(self) -> "WriterBehind":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Of two problems the earlier shard's is told; an interruption is none of them.
            if kind is None or issubclass(kind, Exception):
                self._wait()
        finally:
            self._pool.shutdown()

    def write(self, number: int, shard: GatheredShard) -> None:
        """Write a shard once the one before is written.

        Raises:
            DSparkError: that one could not be written.
        """
        self._wait()
        self._pending = self._pool.submit(self._writer.write, number, shard)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _is_leftover(path: Path) -> bool:
    return path.match(_PARTIAL) or path.name == LOCK_FILE


def _first_difference(ours: Any, theirs: Any, where: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in ours:
            # Another version of a library would finish a cache with other bits; a finished one is what it is.
            if name in ("shards", "files") or (name == "created_with" and ours["complete"]):
                continue
            found = _first_difference(ours[name], theirs.get(name), f"{where}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if ours == theirs else (where, ours, theirs)
