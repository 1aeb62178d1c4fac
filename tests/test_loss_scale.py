"""fp16: an overflow skips the step, the loss scale is part of a checkpoint, and there is an end to lowering it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.training.checkpoint import checkpoints_folder, find_checkpoint
from megatron_dspark.training.loss_scale import update
from megatron_dspark.training.settings import TrainSettings
from tests.distributed import RankPool
from tests.megatron import process_groups
from tests.resume_support import (
    assert_same,
    contents,
    metrics_without_times,
    rank_that_is_told_to_stop,
    resume_settings,
)

# Overflows in the first steps; doubles after every step that did not, until it overflows again. Micro-batches of one
# sample in every layout, since what overflows is the gradient of a micro-batch.
FP16 = {"precision": "fp16", "optimizer.initial_loss_scale": 2**15, "optimizer.loss_scale_window": 1}
FP16["micro_batch_size"] = 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "DP2-sharded": (2, {"optimizer.distributed": True}),
    "PP2": (2, {"parallel.pipeline": 2}),
}


def run(ranks: int, pool: RankPool, settings: TrainSettings, stop: int | None = None) -> list[Any]:
    if ranks == 1:
        return [rank_that_is_told_to_stop(0, 1, settings.as_dict(), stop)]
    return pool.run(rank_that_is_told_to_stop, settings.as_dict(), stop)


def found(tree: Any, name: str) -> Iterator[Any]:
    """Yield every value called `name` in a tree of dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == name:
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from found(value, name)


def scale_and_skipped(output: str) -> list[tuple[float, int]]:
    return [
        (line["loss_scale"], line["skipped_steps"])
        for line in metrics_without_times(output)
        if line["split"] == "train"
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_skipped_steps_resume_bit_for_bit(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """Stopped before the optimizer ever stepped, and again between two overflows."""
    ranks, layout = LAYOUTS[name]
    whole = resume_settings(tmp_path / "whole", **FP16, **layout)
    run(ranks, two_ranks, whole)
    parts = resume_settings(tmp_path / "parts", **FP16, **layout)
    for stop in (2, 8, None):
        assert {report["steps"] for report, _ in run(ranks, two_ranks, parts, stop)} == {stop or 12}
    assert metrics_without_times(parts.output) == metrics_without_times(whole.output)
    assert_same(contents(parts.output, 12, tmp_path), contents(whole.output, 12, tmp_path))

    lines = [line for line in metrics_without_times(whole.output) if line["split"] == "train"]
    skipped = sum(line["skipped_steps"] for line in lines)
    assert lines[0]["skipped_steps"] == 1 and lines[0]["grad_norm"] is None and lines[0]["loss_scale"] == 2**15
    assert 4 <= skipped <= 9
    # Neither the schedule nor Adam counts a skipped step.
    first, last = (contents(parts.output, step, tmp_path) for step in (2, 12))
    assert [list(found(state, "num_steps")) for state in (first, last)] == [[0], [12 - skipped]]
    moments = {key: value for key, value in last.items() if "exp_avg" in key}
    assert moments and all(value.abs().sum() > 0 for value in moments.values())
    assert all(value.abs().sum() == 0 for key, value in first.items() if "exp_avg" in key)


def test_the_loss_scale_moves_to_another_layout(two_ranks: RankPool, tmp_path: Path) -> None:
    whole = resume_settings(tmp_path / "whole", **FP16)
    run(1, two_ranks, whole)
    moved = resume_settings(tmp_path / "moved", **FP16)
    for name, stop in (("PP2", 4), ("one rank", 8), ("DP2-sharded", None)):
        ranks, layout = LAYOUTS[name]
        layout = {key: value for key, value in layout.items() if key != "optimizer.distributed"}
        run(ranks, two_ranks, resume_settings(tmp_path / "moved", **FP16, **layout), stop)
    assert scale_and_skipped(moved.output) == scale_and_skipped(whole.output)


def refused(rank: int, size: int, settings: dict[str, Any]) -> str:
    with pytest.raises(DSparkError) as refusal:
        rank_that_is_told_to_stop(rank, size, settings, None)
    return str(refusal.value)


def test_overflow_at_the_lowest_scale_ends_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    lowest = {**FP16, "optimizer.min_loss_scale": 2**14, "save_interval": 1}
    settings = resume_settings(tmp_path, **lowest, **LAYOUTS["PP2"][1])
    said = two_ranks.run(refused, settings.as_dict())
    # Twice at the first scale, then at half of it.
    sentence = "the gradients of step 3 overflow fp16 at the lowest loss scale, 16384 (optimizer.min_loss_scale); train"
    assert all(each.startswith(sentence) for each in said)
    assert find_checkpoint(settings.output).step == 2
    # A stage without the draft begins with a fresh scaler, and the resumed job ends as one all the same.
    assert two_ranks.run(refused, settings.as_dict()) == said


class Stub:
    """Megatron-Core's optimizer after a step that went as told."""

    def __init__(self, updated: bool, grad_norm: float | None, scale: float | None = None) -> None:
        self.outcome = (updated, grad_norm, 0)
        scaler = None
        if scale is not None:
            scaler = DynamicGradScaler(
                scale, 1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, hysteresis=1
            )
        self.scaler = scaler
        self.chained_optimizers = [SimpleNamespace(grad_scaler=scaler)]

    def get_parameters(self) -> list[Any]:
        return [None]

    def step(self) -> Any:
        if self.scaler is not None:
            self.scaler.update(not self.outcome[0])
        return self.outcome


def test_what_becomes_of_a_step() -> None:
    platform.prepare()
    process_groups()
    assert update(Stub(True, 2.0), 1, []) == (2.0, None, None)
    assert update(Stub(True, 2.0, scale=4.0), 1, []) == (2.0, 4.0, 4.0)
    assert update(Stub(False, None, scale=4.0), 1, []) == (None, 4.0, 2.0)
    for stub in (Stub(True, math.inf), Stub(True, math.nan, scale=4.0), Stub(False, None)):
        with pytest.raises(DSparkError, match=r"step 3 has a gradient that is not finite; .*\(samples \['a'\]\)"):
            update(stub, 3, ["a"])
    with pytest.raises(DSparkError, match=r"gradients of step 3 overflow fp16 at the lowest loss scale, 1 .*\['a'\]"):
        update(Stub(False, None, scale=1.0), 3, ["a"])


def test_settings(tmp_path: Path) -> None:
    for change, sentence in (
        ({"min_loss_scale": 2**13}, "min_loss_scale 8192 must lie between 0 and initial_loss_scale 4096"),
        ({"min_loss_scale": 0}, "min_loss_scale 0 must lie"),
        ({"loss_scale_window": 0}, "loss_scale_window must be at least 1 step"),
    ):
        settings = resume_settings(tmp_path, **{f"optimizer.{name}": value for name, value in change.items()})
        with pytest.raises(DSparkError, match=sentence):
            settings.validate()
    # A checkpoint of a version that knew no loss scale goes on with the default.
    settings = resume_settings(tmp_path, steps=1)
    run(1, None, settings)  # type: ignore[arg-type]
    description = checkpoints_folder(settings.output) / "step-0000001" / "run.json"
    saved = json.loads(description.read_text())
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window"):
        del saved["settings"]["optimizer"][name]
    description.write_text(json.dumps(saved))
    with pytest.raises(DSparkError, match=r"loss_scale_window was 1000 in .* is now 5"):
        run(1, None, resume_settings(tmp_path, steps=2, **{"optimizer.loss_scale_window": 5}))  # type: ignore[arg-type]
    assert run(1, None, resume_settings(tmp_path, steps=2))[0][0]["steps"] == 2  # type: ignore[arg-type]
