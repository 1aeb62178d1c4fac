"""Checkpoints that appear whole: written beside their final name, renamed when complete, then pointed at.

Whatever is killed when, a folder `step-…` is complete, and `latest.json` names one. Asynchronous saving copies the
state (on CPUs by forking the process), writes in another process and publishes between two later steps.
"""

import contextlib
import logging
import os
import pickle
import queue
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from rich.filesize import decimal
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json
from megatron_dspark.training.checkpoint import (
    BEST_FILE,
    FORMAT_VERSION,
    LATEST_FILE,
    RUN_FILE,
    checkpoints_folder,
    newest_whole,
    published,
)
from megatron_dspark.training.settings import CheckpointSettings


class CheckpointWriter:
    """Writes a run's checkpoints, at most one at a time; every rank makes every call."""

    def __init__(self, output: str | Path, settings: CheckpointSettings, before_publishing: Callable[[], None]) -> None:
        """Remove what killed jobs left unfinished; the caller holds the folder's lock.

        Args:
            output: the run's folder.
            settings: asynchronous or not, and which checkpoints are kept.
            before_publishing: brings to disk what must not be older than a checkpoint (the metrics file).
        """
        self.folder = checkpoints_folder(output)
        self.settings = settings
        self.before_publishing = before_publishing
        self.saved_step: int | None = None
        self._calls = AsyncCallsQueue(persistent=False)
        self._on_first_rank(self._remove_unfinished, "what an earlier job left could not be removed")

    def save(self, step: int, state: dict[str, Any], run: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`, and without asynchronous saving complete it.

        Args:
            step: completed optimizer steps.
            state: Megatron-Core's sharded state of all that is saved.
            run: plain values for run.json; "step" and "format" are added.

        Raises:
            DSparkError: it could not be written; the newest whole checkpoint is named.
        """
        self.finish()
        token = [secrets.token_hex(4)]
        torch.distributed.broadcast_object_list(token, device=platform.device())
        # A name of its own: what a killed job's writer still writes does not get between.
        partial = self.folder / f".step-{step:07d}.{token[0]}.partial"
        failure = f"the checkpoint of step {step} could not be written"
        self._on_first_rank(lambda: partial.mkdir(parents=True), failure)
        self._publishing = (step, partial, {"format": FORMAT_VERSION, "step": step, **run})
        with self._failures(failure, partial), _own_results(self.settings.asynchronous):
            # Integrity: SHA-256 of every file is stored and checked again when the checkpoint is read.
            request = dist_checkpointing.save(
                state,
                str(partial),
                async_sharded_save=self.settings.asynchronous,
                async_strategy="mcore",
                verify_integrity=True,
            )
            if request is not None:
                self._calls.schedule_async_request(request)
        if request is None:
            self._publish()

    def poll(self, blocking: bool = False) -> None:
        """Publish a checkpoint that has been written meanwhile; called between steps.

        Args:
            blocking: wait for it.

        Raises:
            DSparkError: it could not be written; the newest whole checkpoint is named.
        """
        if not self._calls.get_num_unfinalized_calls():
            return
        step, partial, _ = self._publishing
        with self._failures(f"the checkpoint of step {step} could not be written", partial):
            done = self._calls.maybe_finalize_async_calls(blocking=blocking)
        if done:
            self._publish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is published."""
        self.poll(blocking=True)

    def point_at(self, step: int) -> None:
        """Make the checkpoint of `step` the newest, after a resume from an older one."""
        self._on_first_rank(lambda: self._point(step), f"{LATEST_FILE} could not be written")
        self.saved_step = step

    def _publish(self) -> None:
        step, partial, run = self._publishing
        final = self.folder / f"step-{step:07d}"

        def publish() -> None:
            self.before_publishing()
            write_json(partial / RUN_FILE, run)
            for path in [*partial.iterdir(), partial]:
                _to_disk(path)
            if final.exists():
                os.replace(final, final.with_name(f".{final.name}.{secrets.token_hex(4)}.old"))
            os.replace(partial, final)
            _to_disk(self.folder)
            self._point(step)
            self._prune(step)

        self._on_first_rank(publish, f"the checkpoint of step {step} could not be written", partial)
        self.saved_step = step

    def _point(self, step: int) -> None:
        write_json(self.folder / LATEST_FILE, {"step": step, "folder": f"step-{step:07d}"})
        _to_disk(self.folder)

    def _prune(self, step: int) -> None:
        scores = {}
        for other, path in published(self.folder).items():
            with contextlib.suppress(DSparkError, AttributeError):
                scores[other] = read_json(path / RUN_FILE, "the checkpoint's run description").get("tau")
        # The earliest of equals is the best.
        best = sorted((other for other, tau in scores.items() if tau is not None), key=lambda it: (-scores[it], it))
        if best:
            found = {"step": best[0], "folder": f"step-{best[0]:07d}", "tau": scores[best[0]]}
            write_json(self.folder / BEST_FILE, found)
        if self.settings.keep_last is not None:
            # Later ones are of a history that this run left behind by resuming from an older step: not ours to delete.
            past = [other for other in scores if other <= step]
            kept = {*sorted(past)[-self.settings.keep_last :], *best[: self.settings.keep_best]}
            for other in set(past) - kept:
                folder = self.folder / f"step-{other:07d}"
                os.replace(folder, folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old"))
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        for pattern in (".step-*.partial", ".step-*.old"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _on_first_rank(self, action: Callable[[], Any], failure: str, partial: Path | None = None) -> None:
        told: list[str | None] = [None]
        if torch.distributed.get_rank() == 0:
            try:
                action()
            except OSError as error:
                told = [self._failed(f"{failure} ({error})", partial)]
        torch.distributed.broadcast_object_list(told, device=platform.device())
        if told[0] is not None:
            raise DSparkError(told[0])

    @contextlib.contextmanager
    def _failures(self, failure: str, partial: Path) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, CheckpointingException, OSError) as error:
            reason: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                reason = next(iter(error.failures.values()))[0]
            text = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            # Writers meet a full disk in the middle of a file, and not all of them say so.
            free = decimal(shutil.disk_usage(self.folder).free)
            raise DSparkError(self._failed(f"{failure} ({text}; its disk has {free} free)", partial)) from error

    def _failed(self, sentence: str, partial: Path | None) -> str:
        if torch.distributed.get_rank() == 0 and partial is not None:
            # Room for what comes next, above all on a full disk.
            shutil.rmtree(partial, ignore_errors=True)
        return sentence + newest_whole(self.folder)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _own_results(forked: bool) -> Iterator[None]:
    """Have Megatron-Core's writer hand its results back without a manager process, and say why it failed.

    It would start one, with all imports, in every rank, and a killed rank would leave it behind for ever.
    """
    results = _ForkedResults() if forked else _Results()
    filesystem_async._results_queue = results
    filesystem_async.logger.addHandler(results)
    try:
        yield
    finally:
        filesystem_async.logger.removeHandler(results)
        filesystem_async._results_queue = None


class _Results(logging.Handler):
    """What a writer in this process returns. Of a failure it returns the kind alone and logs the reason: kept here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._said: list[str] = []
        self._values: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def put(self, value: Any) -> None:
        if isinstance(value, Exception) and self._said:
            value = RuntimeError(self._said[0])
        self._store(value)

    def get_nowait(self) -> Any:
        if not self._values:
            raise queue.Empty
        return self._values.pop()

    def _store(self, value: Any) -> None:
        self._values.append(value)


class _ForkedResults(_Results):
    """What a forked writer returns, through a file without a name that both processes have open."""

    def __init__(self) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)

    def _store(self, value: Any) -> None:
        self._file.write(pickle.dumps(value))
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        content = self._file.read()
        if not content:
            raise queue.Empty
        return pickle.loads(content)
