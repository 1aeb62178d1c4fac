"""Process groups of 2 or 4 ranks for tests: started once, used by many cases.

Nearly all of the cost of a distributed test is imports, so a pool keeps its ranks alive between cases, and all ranks
of all pools are forked from one process that has imported the library once.
"""

import contextlib
import faulthandler
import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as multiprocessing

PRELOADED = ["megatron_dspark.training.run", "megatron_dspark.hf.from_checkpoint"]
PRELOADED += ["megatron_dspark.features.cache.precompute", "transformers"]


def _serve(rank: int, world_size: int, store: str, pipe: Any, timeout: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    # What is imported stays: each run of training looks through everything that is not frozen for earlier runs.
    gc.freeze()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        message = pipe.recv()
        if message is None:
            break
        function, arguments = message
        # A rank that hangs says where, before the pool gives it up.
        faulthandler.dump_traceback_later(0.8 * timeout)
        try:
            pipe.send(("ok", function(rank, world_size, *arguments)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()


class RankPool:
    """`world_size` processes in one Gloo group that run the functions they are sent."""

    def __init__(self, world_size: int, timeout: float = 300.0) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, store, theirs, self.timeout), daemon=False
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, world_size, *arguments)` on every rank; return the results in rank order.

        `function` is importable from a module; arguments and results are picklable (tensors are sent by value:
        return `tensor.clone()` or numpy). A failing or hanging rank ends the pool, and the next call starts anew.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
        except OSError as error:
            self.close(kill=True)
            raise AssertionError("a rank is gone since the test before") from error
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            # Once one rank has failed the others may wait for it for ever: give them a moment only.
            if not pipe.poll(5.0 if errors else self.timeout):
                errors.append(f"rank {rank}: no answer")
                continue
            try:
                status, value = pipe.recv()
            except EOFError:
                errors.append(f"rank {rank}: it is gone")
                continue
            (results if status == "ok" else errors).append(value if status == "ok" else f"rank {rank}:\n{value}")
        if errors:
            self.close(kill=True)
            raise AssertionError("\n".join(errors))
        return results

    def close(self, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True) if self._processes else ():
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
        if self._processes:
            self._folder.cleanup()
        self._processes = []
