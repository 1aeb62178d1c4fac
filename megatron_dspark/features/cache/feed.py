"""Features for training: threads read ahead what the sampler will ask for."""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_dspark import platform
from megatron_dspark.context_shards import shard_context
from megatron_dspark.data.sampler import MicroBatch
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.colocated import TargetFeatures


class FeatureFeed:
    """Pairs micro-batches with their features, read in the background.

    It has no position: what comes next is what the sampler says of a position, so that a resumed run reads on exactly
    where it stopped. Order and bytes do not depend on the number of threads.
    """

    def __init__(
        self, caches: Sequence[FeatureCache], workers: int, context_rank: int = 0, context_size: int = 1
    ) -> None:
        """Set up.

        Args:
            caches: where to look for a sample (training and held-out ones).
            workers: threads that read; hashing and copying leave the interpreter to others. Twice as many
                micro-batches are held ahead, in page-locked memory where they go to a GPU.
            context_rank: this context-parallel rank, which gets its own rows of every sample alone.
            context_size: context-parallel ranks.
        """
        self._caches = list(caches)
        manifest = self._caches[0].manifest
        self._hidden_size = manifest.target.hidden_size
        self._tap_width = len(manifest.features.target_layer_ids) * self._hidden_size
        self._context_rank, self._context_size = context_rank, context_size
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="features")
        self._ahead = 2 * workers
        self._pending: dict[tuple[str, ...], Future[TargetFeatures]] = {}
        self._waited = 0.0

    def over(
        self, batches: Sequence[MicroBatch], upcoming: Iterable[MicroBatch] = (), *, count: bool = True
    ) -> Iterator[tuple[MicroBatch, TargetFeatures]]:
        """Yield every batch with its features, on this rank's device.

        Args:
            batches: to yield now.
            upcoming: what will be asked for afterwards; only as many are looked at as are read ahead.
            count: add all time from asking for a batch to getting it to that of `lap`.
        """
        with self.waiting(count):
            following = list(itertools.islice(upcoming, self._ahead))
        for index, batch in enumerate(batches):
            with self.waiting(count):
                for near in itertools.islice(itertools.chain(batches[index:], following), self._ahead + 1):
                    self._submit(near)
                features = self._pending.pop(tuple(batch.sample_ids)).result()
                # From page-locked memory the copy runs beside the host; what computes on it is queued behind it.
                taps, final_hidden = (
                    part.to(platform.device(), non_blocking=part.is_pinned())
                    for part in (features.taps, features.final_hidden)
                )
            yield batch, TargetFeatures(taps, final_hidden)

    @contextlib.contextmanager
    def waiting(self, count: bool = True) -> Iterator[None]:
        """Add the time inside to that of `lap`, for what training does about its data outside of `over`."""
        started = time.perf_counter()
        yield
        self._waited += (time.perf_counter() - started) * count

    def lap(self) -> float:
        """Return the seconds that training stood still for data since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """Forget what was read ahead and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, batch: MicroBatch) -> None:
        key = tuple(batch.sample_ids)
        if key not in self._pending:
            self._pending[key] = self._pool.submit(self._read, batch)

    def _read(self, batch: MicroBatch) -> TargetFeatures:
        rows, length = batch.input_ids.shape
        taps = torch.zeros(length, rows, self._tap_width, dtype=self._caches[0].dtype)
        final_hidden = torch.zeros(length, rows, self._hidden_size, dtype=taps.dtype)
        for sample_id, row, start in zip(batch.sample_ids, *_places(batch), strict=True):
            ids, sample_taps, sample_hidden = self._find(sample_id).features(sample_id)
            here = slice(start, start + len(ids))
            if not torch.equal(ids, batch.input_ids[row, here]):
                raise DSparkError(f"the cached sample {sample_id!r} has other tokens than the batch; precompute again")
            taps[here, row], final_hidden[here, row] = sample_taps, sample_hidden
        if self._context_size > 1:
            shard = shard_context(batch.documents, self._context_size, self._context_rank)
            mine, column = shard.rows.t(), torch.arange(rows)
            taps, final_hidden = taps[mine, column], final_hidden[mine, column]
        if platform.has_cuda():
            # PyTorch keeps page-locked memory for the next one, and not before the copy out of it has ended.
            taps, final_hidden = taps.pin_memory(), final_hidden.pin_memory()
        return TargetFeatures(taps, final_hidden)

    def _find(self, sample_id: str) -> FeatureCache:
        for cache in self._caches[:-1]:
            if sample_id in cache:
                return cache
        return self._caches[-1]


def _places(batch: MicroBatch) -> tuple[list[int], list[int]]:
    """Row and first position of each sample of a micro-batch."""
    if batch.documents is None:
        return list(range(len(batch.sample_ids))), [0] * len(batch.sample_ids)
    rows, starts = [], []
    for row, documents in enumerate(batch.documents):
        for document in documents[documents >= 0].unique().tolist():
            rows.append(row)
            starts.append(int((documents == document).nonzero()[0]))
    return rows, starts
