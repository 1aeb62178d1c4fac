"""The target in pipeline stages: every tap arrives, checkpoints move, other loops' communicators are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.pipeline import join_payload, split_payload
from megatron_dspark.training.overrides import settings_from_dict
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from tests.distributed import RankPool
from tests.megatron import process_groups, tiny_config
from tests.parallel_support import Record, assert_equal_runs, run, save_inputs, settings

ONE: dict[str, Any] = {}
PIPELINES = {
    "PP2": {"micro_batch_size": 1, "parallel.pipeline": 2},
    "PP2-VPP2": {"micro_batch_size": 1, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2},
    "PP2-DO": {"micro_batch_size": 1, "parallel.pipeline": 2, "optimizer.distributed": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with tied embeddings, whose last stage has a copy of the first one's."""
    return save_inputs(tmp_path_factory.mktemp("pipeline"), tied=True)


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("taps", [[-1, 0, 2, 3], [0], [3], [1, 2]], ids=str)
def test_every_tap_reaches_the_draft(
    taps: list[int], layout: str, folder: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    """The embedding, the last layer, both sides of a stage's edge, taps on one stage alone."""
    changes = {"draft.target_layer_ids": taps, "draft.allow_unservable_taps": True}
    expected = run(0, 1, settings(folder, tmp_path / "one", **changes).as_dict())
    records = two_ranks.run(run, settings(folder, tmp_path / "two", **changes, **PIPELINES[layout]).as_dict())
    assert_equal_runs(records, expected)
    assert not records[0].held and records[1].held


def continued(source: Path, target: Path) -> None:
    """Copy a run as it was after its first step."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / "step-0000002")
    (target / "checkpoints" / "latest.json").write_text(json.dumps({"step": 1}))


@pytest.mark.parametrize("layout", PIPELINES)
def test_checkpoints_move_in_and_out_of_a_pipeline(
    layout: str, folder: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    """The second step after a move, with its optimizer state, equals that of a run that never moved."""
    pipeline = PIPELINES[layout]
    # How optimizer state is sharded is part of the run; the rest of the layout may change.
    every = {"save_interval": 1, "optimizer.distributed": pipeline.get("optimizer.distributed", False)}
    one = run(0, 1, settings(folder, tmp_path / "one", **every).as_dict())
    two_ranks.run(run, settings(folder, tmp_path / "two", **{**every, **pipeline}).as_dict())
    expected = Record(gradients=one.gradients[1:], parameters=one.parameters)

    continued(tmp_path / "one", tmp_path / "one-to-two")
    moved = two_ranks.run(run, settings(folder, tmp_path / "one-to-two", **{**every, **pipeline}).as_dict())
    assert_equal_runs(moved, expected)

    continued(tmp_path / "two", tmp_path / "two-to-one")
    assert_equal_runs([run(0, 1, settings(folder, tmp_path / "two-to-one", **every).as_dict())], expected)


def test_another_loop_is_refused() -> None:
    """Its schedule would wait for gradients, on every stage but the first without a word."""
    change = {"pipeline_model_parallel_size": 2}
    config = tiny_config(dtype=torch.float64, transformer=change, target_path="a target")
    with pytest.raises(DSparkError, match="send nothing backwards, which this loop's schedule would wait for"):
        DSparkModelBuilder(config).build_model(process_groups())


def losses(rank: int, size: int, values: dict[str, Any]) -> list[float]:
    train(settings_from_dict(values))
    return [line["loss"] for line in read_metrics(values["output"], "train")]


@pytest.mark.parametrize("layout", ["PP2", "PP2-VPP2", "PP2-DO", "TP2-SP"])
def test_half_precision_trains_in_layouts(layout: str, folder: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    """Payloads, wrappers and optimizers of stages without a draft in the type that real runs have."""
    changes = {**PIPELINES, "TP2-SP": {"parallel.tensor": 2, "parallel.sequence": True}}[layout]
    expected = losses(0, 1, settings(folder, tmp_path / "one", precision="bf16").as_dict())
    found = two_ranks.run(losses, settings(folder, tmp_path / "two", precision="bf16", **changes).as_dict())
    assert found[0] == pytest.approx(expected, rel=2e-2) and len(expected) == 2


def test_payload_of_another_width_is_refused() -> None:
    hidden, *taps = torch.randn(3, 5, 2, 8)
    back, again = split_payload(join_payload(hidden, taps), 8, 2)
    assert torch.equal(back, hidden) and all(torch.equal(a, b) for a, b in zip(again, taps, strict=True))
    with pytest.raises(DSparkError, match=r"received 24 features a row and its taps imply 8 × \(1 \+ 1\)"):
        split_payload(join_payload(hidden, taps), 8, 1)
