"""What can go wrong with a run's files and ranks: one sentence, the newest whole checkpoint named, nothing lost."""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_dspark.errors import DSparkError
from megatron_dspark.lock import folder_lock
from megatron_dspark.training import saving
from megatron_dspark.training.checkpoint import checkpoints_folder, damage, find_checkpoint, published
from megatron_dspark.training.run import train
from tests.distributed import RankPool
from tests.resume_support import (
    Job,
    fork_context,
    metrics_without_times,
    rank_that_is_told_to_stop,
    resume_settings,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one rank with a checkpoint of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    train(resume_settings(folder, steps=6, save_interval=2))
    return folder


def copy_of(finished: Path, folder: Path, **changes: Any) -> Any:
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    return resume_settings(folder, **{"steps": 7, "save_interval": 2, **changes})


def truncate(folder: Path) -> None:
    (shard,) = folder.glob("*.distcp")
    os.truncate(shard, shard.stat().st_size // 2)


def alter(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(pattern)).unlink()


DAMAGES = {
    "truncated shard": (truncate, "__0_0.distcp is not as it was written"),
    "missing rank file": (remove("*.distcp"), "__0_0.distcp is missing"),
    "unreadable index": (alter(".metadata", b"\0" * 100), ".metadata is not as it was written"),
    "unreadable description": (alter("run.json", b'{"format": 2, "st'), "run.json is not valid JSON"),
    "empty description": (alter("run.json", b""), "run.json is not valid JSON"),
    "no description": (remove("run.json"), "there is no such file"),
    "unreadable format": (alter("metadata.json", b"{"), "metadata.json is not as it was written"),
    "no checksums": (remove("integrity.json"), "integrity.json"),
    "unreadable checksums": (alter("integrity.json", b"\xff\xfe"), "cannot be read"),
    "file too many": (alter("common.pt", b"x"), "common.pt is not among the files that were written"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_and_the_newest_whole_checkpoint_named(name: str, finished: Path, tmp_path: Path) -> None:
    settings = copy_of(finished, tmp_path)
    damage, sentence = DAMAGES[name]
    folder = checkpoints_folder(settings.output)
    damage(folder / "step-0000006")
    # Step 4 is damaged too, so that 2 is the newest whole one.
    truncate(folder / "step-0000004")
    before = metrics_without_times(settings.output)
    with pytest.raises(DSparkError, match=rf"step-0000006.*{sentence}.*; step 2 is the newest whole one") as refusal:
        train(settings)
    assert "\n" not in str(refusal.value)
    assert metrics_without_times(settings.output) == before


def test_an_unreadable_pointer_is_refused(finished: Path, tmp_path: Path) -> None:
    settings = copy_of(finished, tmp_path)
    folder = checkpoints_folder(settings.output)
    for content in (b"", b"[]", b'{"stp": 3}', b"\xff"):
        (folder / "latest.json").write_bytes(content)
        with pytest.raises(DSparkError, match=r"latest.json.*; step 6 is the newest whole one, resume from it with"):
            find_checkpoint(settings.output)
        # The way out that the sentence names.
        assert find_checkpoint(settings.output, 6).step == 6
    shutil.rmtree(folder / "step-0000006")
    (folder / "latest.json").write_text('{"step": 6}')
    with pytest.raises(DSparkError, match=r"is of step 6 and is gone; step 4 is the newest whole one"):
        find_checkpoint(settings.output)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["index", "object"])
def test_nothing_is_run_that_a_checkpoint_brings_along(place: str, finished: Path, tmp_path: Path) -> None:
    settings = copy_of(finished, tmp_path)
    folder, sprung = checkpoints_folder(settings.output) / "step-0000006", tmp_path / "sprung"
    index = pickle.loads((folder / ".metadata").read_bytes())
    if place == "index":
        index.planner_data = Bomb(sprung)
    else:
        key = next(key for key in index.storage_data if "common_state" in key.fqn)
        assert isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata)
        archive = io.BytesIO()
        torch.save([Bomb(sprung)], archive)
        (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes() + archive.getvalue())
        index.storage_data[key].length = len(archive.getvalue())
        index.storage_data[key].offset = (folder / "__0_0.distcp").stat().st_size - len(archive.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    # The one who sends a checkpoint sends its checksums too.
    listed = json.loads((folder / "integrity.json").read_text())
    for name in listed["files"]:
        listed["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "integrity.json").write_text(json.dumps(listed))
    with pytest.raises(DSparkError, match=r"step-0000006 cannot be read .*mkdir.*step 4 is the newest whole one"):
        train(settings)
    assert not sprung.exists()


def test_a_run_whose_checkpoints_are_not_there_does_not_start_anew(finished: Path, tmp_path: Path) -> None:
    """Not mounted: there is an empty folder, or none."""
    settings = copy_of(finished, tmp_path)
    folder, metrics = checkpoints_folder(settings.output), Path(settings.output) / "metrics.jsonl"
    before = metrics.read_bytes()
    shutil.rmtree(folder)
    with pytest.raises(DSparkError, match=r"has metrics of 6 steps and .*checkpoints does not exist: .* metrics.jsonl"):
        train(settings)
    folder.mkdir()
    with pytest.raises(DSparkError, match=r"has metrics of 6 steps and .*checkpoints holds nothing"):
        train(settings)
    assert metrics.read_bytes() == before
    metrics.unlink()
    assert train(settings).steps == 7


def test_a_folder_that_holds_something_else_is_not_written_to(tmp_path: Path) -> None:
    settings = resume_settings(tmp_path)
    for name, what in (("manifest.json", "a feature cache"), ("config.json", "a model"), ("prepare.json", "prepared")):
        settings.output = str(tmp_path / name / "out")
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out" / name).write_text("{}")
        with pytest.raises(DSparkError, match=f"out holds {what}.*choose another output"):
            train(settings)
    settings.output = str(tmp_path / "prepare.json/out/prepare.json")
    with pytest.raises(DSparkError, match=r"the run .*prepare.json cannot be written: .* \(it is no folder\)"):
        train(settings)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_full_disk_loses_nothing(
    background: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = copy_of(finished, tmp_path, steps=8, **{"checkpoint.asynchronous": background})
    # The shards of a rank, and what is written when all have written: the first write then is the pointer to step 6.
    calls = iter([saving.write_json])
    when_publishing = lambda *values: next(calls, full_disk)(*values)  # noqa: E731
    for place, name, fault in (
        (filesystem_async, "_write_item", full_disk),
        (saving, "write_json", when_publishing),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fault)
            with pytest.raises(DSparkError, match=r"step 8 could not be written.*No space.*step 6 is the newest whole"):
                train(settings)
        folder = checkpoints_folder(settings.output)
        assert list(published(folder)) == [2, 4, 6] and find_checkpoint(settings.output).step == 6
        assert not list(folder.glob(".step-*"))
    assert train(settings).steps == 8


def rank_with_a_full_disk(rank: int, size: int, settings: dict[str, Any]) -> str:
    original = filesystem_async._write_item
    if rank == 1:
        filesystem_async._write_item = full_disk
    try:
        rank_that_is_told_to_stop(rank, size, settings, None)
    except DSparkError as error:
        return str(error)
    finally:
        filesystem_async._write_item = original
    return ""


def test_a_disk_that_is_full_for_one_rank_stops_all(two_ranks: RankPool, tmp_path: Path) -> None:
    settings = resume_settings(tmp_path, steps=2, micro_batch_size=2, **{"optimizer.distributed": True})
    said = two_ranks.run(rank_with_a_full_disk, settings.as_dict())
    assert all("the checkpoint of step 2 could not be written" in sentence for sentence in said)
    assert "No space left" in said[0] and "no other one is whole" in said[0]
    assert find_checkpoint(settings.output) is None


def hold(folder: Path, ready: Any) -> None:
    with folder_lock(folder):
        # What is forked to write a checkpoint outlives a killed job, and must not hold its lock.
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        ready.set()
        time.sleep(600)


def test_two_jobs_do_not_write_to_one_folder_and_a_dead_one_holds_nothing(finished: Path, tmp_path: Path) -> None:
    settings = copy_of(finished, tmp_path)
    context = fork_context()
    ready = context.Event()
    holder = context.Process(target=hold, args=(Path(settings.output), ready))
    holder.start()
    try:
        assert ready.wait(120)
        with pytest.raises(DSparkError, match=rf"is being written by process {holder.pid} on .*; wait for its end"):
            train(settings)
    finally:
        holder.kill()
        holder.join()
    assert train(settings).steps == 7


def die_at_5(run: Any, now: int) -> None:
    if now == 5 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def freeze_at_5(run: Any, now: int) -> None:
    if now == 5 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def die_while_saving_6(run: Any, now: int) -> None:
    if now == 6 and torch.distributed.get_rank() == 1:
        filesystem_async._write_item = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fault", [die_at_5, freeze_at_5, die_while_saving_6])
def test_a_lost_rank_ends_the_job_in_time(fault: Any, finished: Path, tmp_path: Path) -> None:
    # A rank that is gone ends the wait at once; one that is frozen, after the time.
    minutes = 0.5 if fault is freeze_at_5 else 10
    settings = resume_settings(tmp_path, steps=6, save_interval=2, micro_batch_size=2, timeout_minutes=minutes)
    job = Job(settings, ranks=2, hook=fault)
    job.processes[0].join(240)
    codes = [process.exitcode for process in job.processes]
    job.kill()
    assert codes[0] == 2
    assert job.said(0).startswith("LostRankError: another rank of the job has ended or did not answer") or (
        fault is die_while_saving_6 and job.said(0).startswith("DSparkError: the checkpoint of step 6 could not be")
    )
    assert "step 4 is the newest whole one" in job.said(0)
    if fault is not freeze_at_5:
        # The same command once more: the metrics of a run that nobody disturbed.
        assert Job(settings, ranks=2).wait() == [0, 0]
        ours, theirs = metrics_without_times(settings.output), metrics_without_times(finished / "run")
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]


def test_random_kills_change_nothing(tmp_path: Path) -> None:
    """Killed at random moments of steps, saves and the start; examples/kill_and_resume.py does it 30 times."""
    save = {"save_interval": 1, "checkpoint.asynchronous": True, "checkpoint.keep_last": 2}
    whole, settings = resume_settings(tmp_path / "whole", **save), resume_settings(tmp_path / "killed", **save)
    assert Job(whole).wait() == [0]
    draw, newest = random.Random(0), 0
    for kill in range(4):
        job = Job(settings)
        # The second one hits the start.
        until = time.monotonic() + (draw.uniform(0, 1) if kill == 1 else 240)
        while job.processes[0].is_alive() and time.monotonic() < until and newest_step(settings.output) == newest:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        job.kill()
        newest = newest_step(settings.output)
        assert newest == 0 or damage(checkpoints_folder(settings.output) / f"step-{newest:07d}") is None
    assert newest >= 3
    assert Job(settings).wait() == [0]
    assert metrics_without_times(settings.output) == metrics_without_times(whole.output)
    assert list(published(checkpoints_folder(settings.output))) == [11, 12]


def newest_step(output: str) -> int:
    checkpoint = find_checkpoint(output)
    return 0 if checkpoint is None else checkpoint.step
