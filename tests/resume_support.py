"""Runs that are stopped, killed and resumed, and what is compared afterwards."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_dspark.errors import DSparkError
from megatron_dspark.training import run as run_module
from megatron_dspark.training.checkpoint import checkpoints_folder
from megatron_dspark.training.overrides import override, settings_from_dict
from megatron_dspark.training.run import train
from megatron_dspark.training.settings import TrainSettings

TINY = Path(__file__).resolve().parent.parent / "examples" / "tiny_target"
# Depends on the machine and its load alone.
TIMES = {"tokens_per_second", "step_seconds", "peak_memory_gib", "seconds", "data_wait_share"}

# A hook is called after every optimizer step with the run and its completed steps, this one not counted yet.
Hook = Callable[[Any, int], None]


def resume_settings(folder: Path, samples: int = 30, **changes: Any) -> TrainSettings:
    """Twelve steps of four samples in `folder/run`, logged every third step, never saved but at the end."""
    from megatron_dspark.training.recipes import load_recipe

    settings = load_recipe(f"{TINY.parent.parent}/recipes/tiny_target.py:debug")
    settings.target, settings.output = str(TINY / "model"), str(folder / "run")
    data = folder / f"train-{samples}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    lines = (TINY / "data/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(lines[:samples]), encoding="utf-8")
    settings.data, settings.validation = str(data), str(TINY / "data/heldout.jsonl")
    settings.steps, settings.log_interval, settings.save_interval, settings.validation_interval = 12, 3, 100, 4
    settings.max_length, settings.num_anchors, settings.validation_samples, settings.tensorboard = 96, 4, 2, False
    return override(settings, [f"{name}={value}" for name, value in changes.items()])


def with_hook(settings: TrainSettings, hook: Hook | None) -> tuple[dict[str, Any], list[Any]]:
    """Train; return the report, and of every step: the samples, the anchors, and a draw from each generator."""
    seen: list[Any] = []
    original = run_module._Run.optimizer_step

    def watched(self: Any) -> Any:
        batches = list(self.sampler.step_batches(self.step * self.settings.global_batch_size))
        names = [(batch.sample_ids, batch.anchors.tolist()) for batch in batches]
        seen.append((names, torch.rand(1).item(), random.random(), numpy.random.rand()))
        result = original(self)
        if hook is not None:
            hook(self, self.step + 1)
        return result

    run_module._Run.optimizer_step = watched
    try:
        return train(settings).as_dict(), seen
    finally:
        run_module._Run.optimizer_step = original


def signal_to_last_rank(number: int, step: int) -> Hook:
    """Return a hook that sends this process a signal in `step`, on the last rank alone."""

    def hook(run: Any, now: int) -> None:
        if now == step and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), number)

    return hook


def rank_that_is_told_to_stop(
    rank: int, size: int, settings: dict[str, Any], stop_at: int | None
) -> tuple[dict[str, Any], list[Any]]:
    """For a pool of ranks: train, with SIGUSR1 at `stop_at` to the last rank alone."""
    hook = None if stop_at is None else signal_to_last_rank(signal.SIGUSR1, stop_at)
    return with_hook(settings_from_dict(settings), hook)


def contents(output: str | Path, step: int, folder: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds, tensors and objects by name, read by PyTorch alone."""
    whole = folder / f"step-{step}.pt"
    dcp_to_torch_save(checkpoints_folder(output) / f"step-{step:07d}", whole)
    return torch.load(whole, weights_only=True)


def assert_same(ours: Any, theirs: Any, name: str = "") -> None:
    """Compare two trees of values bit for bit."""
    assert type(ours) is type(theirs), name
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), name
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            assert_same(ours[key], theirs[key], f"{name}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), name
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{name}/{index}")
    else:
        assert ours == theirs, name


def metrics_without_times(output: str | Path) -> list[dict[str, Any]]:
    """Return every line of a run's metrics, without what only measures the machine."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def fork_context() -> Any:
    """Return what starts processes from one that has imported everything; every user of it must come here first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_dspark.training.run", "tests.resume_support"])
    return context


class Job:
    """A training job of own processes, which may be killed; they are forked from one that has imported everything."""

    def __init__(self, settings: TrainSettings, ranks: int = 1, hook: Hook | None = None) -> None:
        context = fork_context()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.words = [Path(settings.data).parent / f"rank-{rank}-{port}.txt" for rank in range(ranks)]
        self.processes = [
            context.Process(target=_rank, args=(rank, ranks, port, settings.as_dict(), hook, self.words[rank]))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 240.0) -> list[int]:
        """Return the exit codes; a job that does not end in time fails the test."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not hanging, f"ranks {hanging} hang"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill every process that is left."""
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, rank: int) -> str:
        """Return the sentence that a rank ended with."""
        return self.words[rank].read_text() if self.words[rank].exists() else ""


def _rank(rank: int, ranks: int, port: int, settings: dict[str, Any], hook: Hook | None, words: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        with_hook(settings_from_dict(settings), hook)
    except DSparkError as error:
        words.write_text(f"{type(error).__name__}: {error}")
        os._exit(2)
