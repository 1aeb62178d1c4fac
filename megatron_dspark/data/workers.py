"""Processes that answer units of prompts: one in this process, or several beside it.

Each worker loads the target once and is sent one unit after another; a worker that dies takes the job down with a
sentence, a job that dies takes its workers down within a second (their next message finds no reader).
"""

import dataclasses
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from megatron_dspark.data.decode import Decoder, Finished, Request
from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings

# How often a worker says how many tokens it has made.
_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """What every worker has to know; see `Decoder` and `Decoder.decode` for the fields."""

    target_folder: str
    device: str
    dtype: str
    threads: int
    rows: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingSettings
    seed: int
    deadline: float

    def load(self) -> Decoder:
        return Decoder(self.target_folder, self.device, self.dtype, self.threads)

    def decode(self, decoder: Decoder, requests: list[Request], on_tokens: Callable[[int], None]) -> Iterator[Finished]:
        return decoder.decode(
            requests,
            rows=self.rows,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            sampling=self.sampling,
            seed=self.seed,
            deadline=self.deadline,
            on_tokens=on_tokens,
        )


def answer_units(
    job: Job, units: Mapping[int, list[Request]], workers: int, on_tokens: Callable[[int], None]
) -> Iterator[tuple[int, Finished]]:
    """Answer every unit, `workers` at a time, in order of their numbers.

    Args:
        job: settings.
        units: requests by unit number.
        workers: 1 answers in this process; more start processes of their own.
        on_tokens: told of tokens as they are made.

    Yields:
        (unit, answer), as they come; fewer than asked when the job's deadline is near.

    Raises:
        DSparkError: a worker refused (its sentence) or ended unexpectedly.
    """
    if workers > 1:
        yield from _answer_in_processes(job, dict(units), workers, on_tokens)
        return
    threads = torch.get_num_threads()
    try:
        decoder = job.load()
        for unit, requests in units.items():
            for finished in job.decode(decoder, requests, on_tokens):
                yield unit, finished
    finally:
        torch.set_num_threads(threads)


def worker_device(device: str, worker: int, devices: int) -> str:
    """Return the device of a worker by its number: workers on CUDA take its `devices` in turn."""
    return f"cuda:{worker % devices}" if device == "cuda" else device


def _answer_in_processes(
    job: Job, units: dict[int, list[Request]], workers: int, on_tokens: Callable[[int], None]
) -> Iterator[tuple[int, Finished]]:
    # Spawned, not forked: a forked copy of a process with OpenMP or tokenizer threads can hang.
    context = multiprocessing.get_context("spawn")
    running: dict[Any, Any] = {}
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()
            device = worker_device(job.device, number, torch.cuda.device_count())
            own = dataclasses.replace(job, device=device)
            process = context.Process(target=_serve, args=(own, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = process
        open_connections = set(running)
        while open_connections:
            for connection in wait(open_connections):
                try:
                    kind, *content = connection.recv()
                except (EOFError, ConnectionResetError):
                    running[connection].join(timeout=10)
                    raise DSparkError(
                        f"a generation worker ended unexpectedly (exit code {running[connection].exitcode}; −9 usually "
                        "means too little memory); run again to continue, with fewer workers or a smaller batch"
                    ) from None
                if kind == "tokens":
                    on_tokens(*content)
                elif kind == "finished":
                    yield content[0], content[1]
                elif kind == "idle" and units and time.time() < job.deadline:
                    unit = next(iter(units))
                    connection.send((unit, units.pop(unit)))
                elif kind == "idle":
                    connection.send(None)
                    open_connections.discard(connection)
                elif kind == "refused":
                    raise DSparkError(content[0])
                else:
                    raise RuntimeError(f"a generation worker failed:\n{content[0]}")
    finally:
        for connection, process in running.items():
            connection.close()
            process.join(timeout=5 if not units else 0)
            if process.is_alive():
                process.terminate()
            process.join()


def _serve(job: Job, connection: Connection) -> None:
    """A worker process: say idle, get a unit, send its answers; until told to stop or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its workers
    unsent, last = 0, time.monotonic()

    def on_tokens(count: int) -> None:
        nonlocal unsent, last
        unsent += count
        if time.monotonic() - last >= _REPORT_SECONDS:
            connection.send(("tokens", unsent))
            unsent, last = 0, time.monotonic()

    try:
        decoder = job.load()
        while True:
            connection.send(("idle",))
            task = connection.recv()
            if task is None:
                return
            unit, requests = task
            for finished in job.decode(decoder, requests, on_tokens):
                connection.send(("finished", unit, finished))
            connection.send(("tokens", unsent))
            unsent = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return  # the parent is gone
    except DSparkError as error:
        connection.send(("refused", str(error)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))
