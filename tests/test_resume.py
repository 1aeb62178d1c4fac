"""A resumed run is the uninterrupted one: bit for bit in its layout, to rounding in another; stopping and choosing."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_dspark.cli import app
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.precompute import precompute
from megatron_dspark.training import run as run_module
from megatron_dspark.training.checkpoint import checkpoints_folder, find_checkpoint, published
from megatron_dspark.training.run import train
from megatron_dspark.training.settings import TrainSettings
from tests.cache_support import precompute_options
from tests.distributed import RankPool
from tests.resume_support import (
    TINY,
    assert_same,
    contents,
    metrics_without_times,
    rank_that_is_told_to_stop,
    resume_settings,
)

STOP = 5
# Step 5 ends at sample 20, and a logging window is open.
MIDDLE, EDGE = 30, 20
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2-mid-epoch": (MIDDLE, {"micro_batch_size": 2}),
    "DP2-epoch-edge": (EDGE, {"micro_batch_size": 2}),
    "TP2-mid-epoch": (MIDDLE, {"parallel.tensor": 2}),
    "TP2-epoch-edge": (EDGE, {"parallel.tensor": 2}),
    "DP2-bf16": (MIDDLE, {"micro_batch_size": 2, "precision": "bf16"}),
    "DP2-sharded-bf16": (MIDDLE, {"micro_batch_size": 1, "optimizer.distributed": True, "precision": "bf16"}),
    "PP2": (MIDDLE, {"micro_batch_size": 1, "parallel.pipeline": 2}),
    "CP2": (MIDDLE, {"parallel.context": 2}),
    "DP2-packed": (MIDDLE, {"micro_batch_size": 1, "packing": True, "packed_length": 200}),
    "DP2-cache": (MIDDLE, {"micro_batch_size": 2}),
}


def from_cache(settings: TrainSettings) -> dict[str, Any]:
    """Precompute the features of a run's data; return the settings that read them instead."""
    folder = Path(settings.data).parent
    for name, data in (("train", settings.data), ("heldout", settings.validation)):
        precompute(PrecomputeOptions(**precompute_options(Path(str(data)), folder / f"{name}-features")))
    cached = {"features": folder / "train-features", "validation_features": folder / "heldout-features"}
    return {**cached, "validation": "null", "data": "''", "target": "''"}


@pytest.mark.parametrize("name", CASES)
def test_stop_and_resume_change_nothing(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """12 steps in one go, saved at once, against 5, a signal to one rank, and 7, saved in the background."""
    samples, layout = CASES[name]
    if "cache" in name:
        layout = {**layout, **from_cache(resume_settings(tmp_path, samples))}
    whole = resume_settings(tmp_path / "whole", samples, **layout)
    expected = two_ranks.run(rank_that_is_told_to_stop, whole.as_dict(), None)
    parts = resume_settings(tmp_path / "parts", samples, **layout, **{"checkpoint.asynchronous": True})
    first = two_ranks.run(rank_that_is_told_to_stop, parts.as_dict(), STOP)
    assert {report["stopped"] for report, _ in first} == {"SIGUSR1"}
    assert {report["steps"] for report, _ in first} == {STOP}
    assert find_checkpoint(parts.output).step == STOP
    middle = contents(parts.output, STOP, tmp_path)
    second = two_ranks.run(rank_that_is_told_to_stop, parts.as_dict(), None)
    for rank in range(2):
        # The order of the data, and every generator's numbers.
        assert first[rank][1] + second[rank][1] == expected[rank][1]
        assert second[rank][0]["stopped"] is None and second[rank][0]["steps"] == 12
    assert metrics_without_times(parts.output) == metrics_without_times(whole.output)
    ours, theirs = contents(parts.output, 12, tmp_path), contents(whole.output, 12, tmp_path)
    assert_same(ours, theirs)
    # What was compared has moved since the stop, and none of it is empty.
    moments = [name for name in ours if "exp_avg" in name]
    assert len(moments) > 20 and {"exp_avg", "exp_avg_sq"} <= {name.split(".")[-1] for name in moments} | {
        part for name in moments for part in name.split(".")
    }
    for name in moments:
        assert not torch.equal(ours[name], middle[name]), name
        assert ours[name].abs().sum() > 0, name
    assert any("rank_state" in name for name in ours)
    run = json.loads((checkpoints_folder(parts.output) / "step-0000012" / "run.json").read_text())
    assert run["progress"] == {"step": 12, "consumed_samples": 48}


# Ranks, what the layout changes, and the step after which the next one takes over: always inside a logging window.
CHAINS: dict[str, list[tuple[int, dict[str, Any], int | None]]] = {
    "TP 2, one rank, DP 2, PP 2, CP 2": [
        (2, {"parallel.tensor": 2}, 2),
        (1, {}, 5),
        (2, {"micro_batch_size": 2}, 7),
        (2, {"micro_batch_size": 1, "parallel.pipeline": 2}, 10),
        (2, {"parallel.context": 2}, None),
    ],
    # Its shards are cut anew for another number of data-parallel ranks.
    "distributed optimizer: DP 2, one rank, TP 2, CP 2, DP 2": [
        (2, {"micro_batch_size": 2}, 2),
        (1, {}, 5),
        (2, {"parallel.tensor": 2}, 7),
        (2, {"parallel.context": 2}, 10),
        (2, {"micro_batch_size": 2}, None),
    ],
}


def dealt(reports: list[tuple[dict[str, Any], list[Any]]]) -> list[dict[str, Any]]:
    """Return of every step: sample → its anchors, over all ranks; those of one sample must agree."""
    steps = []
    for ranks in zip(*(seen for _, seen in reports), strict=True):
        samples: dict[str, Any] = {}
        for names, *_ in ranks:
            for identities, anchors in names:
                for identity, own in zip(identities, anchors, strict=True):
                    assert samples.setdefault(identity, own) == own, identity
        steps.append(samples)
    return steps


@pytest.mark.parametrize("name", CHAINS)
def test_layouts_follow_each_other(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """The samples, anchors and losses of an uninterrupted run of one rank."""
    # Anchors that suit two context-parallel ranks, in every layout.
    common = {"anchor_context_parallel": 2, "optimizer.distributed": name.startswith("distributed")}
    whole = resume_settings(tmp_path / "whole", **common)
    expected = dealt([rank_that_is_told_to_stop(0, 1, whole.as_dict(), None)])
    seen = []
    for ranks, layout, stop in CHAINS[name]:
        settings = resume_settings(tmp_path, **common, **layout).as_dict()
        if ranks == 1:
            reports = [rank_that_is_told_to_stop(0, 1, settings, stop)]
        else:
            reports = two_ranks.run(rank_that_is_told_to_stop, settings, stop)
        assert {report["steps"] for report, _ in reports} == {stop or 12}
        seen += dealt(reports)
    assert seen == expected and all(len(samples) == 4 for samples in seen)
    output = tmp_path / "run"
    layouts = [
        json.loads((path / "run.json").read_text())["layout"] for path in published(output / "checkpoints").values()
    ]
    assert [(each["tensor"], each["pipeline"], each["context"], each["world_size"]) for each in layouts] == [
        (*(changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context")), ranks)
        for ranks, changes, _ in CHAINS[name]
    ]
    ours, theirs = metrics_without_times(output), metrics_without_times(whole.output)
    assert [(line["split"], line["step"]) for line in ours] == [(line["split"], line["step"]) for line in theirs]
    for line, expected_line in zip(ours, theirs, strict=True):
        assert math.isclose(line["loss"], expected_line["loss"], rel_tol=1e-6), (line["split"], line["step"])
        for metric in {"supervised_slots_per_block", "learning_rate"} & expected_line.keys():
            assert line[metric] == pytest.approx(expected_line[metric], rel=1e-12), (metric, line["step"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of one rank with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    train(resume_settings(folder, steps=4, save_interval=1, log_interval=1, validation_interval=2))
    return folder


def copy_of(finished: Path, folder: Path, **changes: Any) -> Any:
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    return resume_settings(folder, **{"steps": 4, "save_interval": 1, "log_interval": 1, **changes})


def test_resumes_from_a_named_step(finished: Path, tmp_path: Path) -> None:
    settings = copy_of(finished, tmp_path, **{"checkpoint.resume_from": 2, "validation_interval": 2})
    before = metrics_without_times(settings.output)
    with pytest.raises(DSparkError, match=r"has no checkpoint of step 7; it has 1, 2, 3, 4"):
        train(resume_settings(tmp_path, **{"checkpoint.resume_from": 7}))
    lines = []
    original = run_module._Run.optimizer_step

    def killed(self: Any) -> Any:
        lines.extend(metrics_without_times(settings.output))
        raise KeyboardInterrupt

    run_module._Run.optimizer_step = killed
    try:
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    finally:
        run_module._Run.optimizer_step = original
    # From here on the run is at step 2, whatever happens: pointer and metrics agree.
    assert max(line["step"] for line in lines) == 2 and find_checkpoint(settings.output).step == 2
    settings.checkpoint.resume_from = None
    assert train(settings).steps == 4
    assert metrics_without_times(settings.output) == before


def test_differences_are_refused_by_name_and_allowed_by_name(finished: Path, tmp_path: Path) -> None:
    for change, name in (
        ({"optimizer.learning_rate": 1e-3}, "optimizer.learning_rate was 0.005 .* is now 0.001"),
        ({"seed": 7}, "seed was 1234 .* is now 7"),
        ({"global_batch_size": 8}, "global_batch_size was 4 .* is now 8"),
        ({"objective.ce_weight": 0.5}, "objective.ce_weight was 0.1 .* is now 0.5"),
    ):
        settings = copy_of(finished, tmp_path, **change)
        with pytest.raises(DSparkError, match=rf"{name}.*--allow {name.split()[0]}"):
            train(settings)
    settings = copy_of(finished, tmp_path, **{"checkpoint.allow": "[sed]", "seed": 7})
    with pytest.raises(DSparkError, match="allow names 'sed', which is no setting"):
        train(settings)
    for name, value in (("optimizer.distributed", True), ("precision", "bf16")):
        settings = copy_of(finished, tmp_path, **{name: value, "checkpoint.allow": f"[{name}]"})
        with pytest.raises(DSparkError, match=f"{name} was .* is now {value!r}, .* start another run from the weights"):
            train(settings)
    free = {"log_interval": 2, "save_interval": 3, "validation_samples": 1, "steps": 5, "checkpoint.keep_last": 9}
    settings = copy_of(finished, tmp_path, **free, **{"optimizer.learning_rate": 1e-3})
    settings.checkpoint.allow = ["optimizer.learning_rate"]
    assert train(settings).steps == 5
    assert metrics_without_times(settings.output)[-1]["step"] == 5


def test_keeps_the_last_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taus = {0: 1.0, 1: 1.1, 2: 3.0, 3: 2.0, 4: 3.0, 5: 1.5, 6: 1.2}
    monkeypatch.setattr(run_module._Run, "validate", lambda self: {"tau": taus[self.step]})
    keep = {"checkpoint.keep_last": 2, "checkpoint.keep_best": 1}
    settings = resume_settings(tmp_path, steps=6, save_interval=1, validation_interval=1, **keep)
    train(settings)
    folder = checkpoints_folder(settings.output)
    assert list(published(folder)) == [2, 5, 6]
    assert json.loads((folder / "best.json").read_text()) == {"step": 2, "folder": "step-0000002", "tau": 3.0}
    assert json.loads((folder / "latest.json").read_text())["step"] == 6
    assert not list(folder.glob(".*"))
    for change, sentence in (
        ({"checkpoint.keep_last": 0}, "keep_last must be at least 1"),
        ({"checkpoint.keep_best": 1}, "keep_last is not set"),
        ({**keep, "save_interval": 3, "validation_interval": 2}, "needs a validation at every save"),
        ({"time_limit_minutes": -1}, "time_limit_minutes must be positive"),
    ):
        with pytest.raises(DSparkError, match=sentence):
            train(resume_settings(tmp_path, **change))
    # A run from a cache validates on another setting.
    cached = {**keep, "features": "cache", "validation": "null", "save_interval": 4}
    resume_settings(tmp_path, **cached, validation_features="held-out").validate()
    with pytest.raises(DSparkError, match="validation_features is None, save_interval 4"):
        resume_settings(tmp_path, **cached).validate()


def test_a_time_limit_stops_with_its_own_exit_code(tmp_path: Path) -> None:
    settings = resume_settings(tmp_path)
    command = ["train", "--recipe", str(TINY.parent.parent / "recipes/tiny_target.py:debug"), "--json"]
    command += ["--target", settings.target, "--data", settings.data, "--output", settings.output]
    result = CliRunner().invoke(app, [*command, "--set", "time_limit_minutes=0.0001"])
    assert result.exit_code == 75, result.output
    assert find_checkpoint(settings.output).step == 1
    result = CliRunner().invoke(app, [*command, "--resume-from", "1"])
    assert result.exit_code == 0, result.output
    assert find_checkpoint(settings.output).step == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_with_the_same_exit_code(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, handlers = (
        resume_settings(tmp_path),
        [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)],
    )
    original = run_module._Run.optimizer_step

    def interrupted(self: Any) -> Any:
        if self.step == 1:
            os.kill(os.getpid(), number)
        return original(self)

    monkeypatch.setattr(run_module._Run, "optimizer_step", interrupted)
    command = ["train", "--recipe", str(TINY.parent.parent / "recipes/tiny_target.py:debug"), "--json"]
    command += ["--target", settings.target, "--data", settings.data, "--output", settings.output]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 75, result.output
    assert find_checkpoint(settings.output).step == 2
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_a_clock_that_goes_backwards_changes_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = copy_of(finished, tmp_path, steps=6, time_limit_minutes=60, validation_interval=2)
    os.utime(checkpoints_folder(settings.output) / "step-0000001", (4e9, 4e9))
    moments = iter(range(10**9, 0, -1))
    monkeypatch.setattr("time.time", lambda: float(next(moments)))
    report = train(settings)
    assert report.steps == 6 and report.stopped is None and report.train["step_seconds"] > 0
    assert find_checkpoint(settings.output).step == 6
