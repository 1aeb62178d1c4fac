"""The target in pipeline stages: every tap arrives, checkpoints move, other loops' communicators are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.pipeline import join_payload, split_payload
from megatron_dspark.model.model import DSparkModel
from tests.distributed import RankPool
from tests.megatron import process_groups, tiny_config
from tests.parallel_support import Record, assert_equal_runs, run, save_conversations, save_target, settings

ONE: dict[str, Any] = {}
PIPELINES = {
    "PP2": {"micro_batch_size": 1, "parallel.pipeline": 2},
    "PP2-VPP2": {"micro_batch_size": 1, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2},
    "PP2-DO": {"micro_batch_size": 1, "parallel.pipeline": 2, "optimizer.distributed": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with tied embeddings, whose last stage has a copy of the first one's."""
    folder = tmp_path_factory.mktemp("pipeline")
    save_target(folder / "target", tied=True)
    save_conversations(folder / "data.jsonl")
    return folder


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


def test_another_communicator_is_refused() -> None:
    config = tiny_config(dtype=torch.float64)
    stage = DSparkModel(config, 128, process_groups(), post_process=False)
    assert list(stage.parameters()) == []
    with pytest.raises(DSparkError, match="send nothing backwards"):
        stage.set_input_tensor([None])


def test_payload_of_another_width_is_refused() -> None:
    hidden, *taps = torch.randn(3, 5, 2, 8)
    back, again = split_payload(join_payload(hidden, taps), 8, 2)
    assert torch.equal(back, hidden) and all(torch.equal(a, b) for a, b in zip(again, taps, strict=True))
    with pytest.raises(DSparkError, match=r"received 24 features a row and its taps imply 8 × \(1 \+ 1\)"):
        split_payload(join_payload(hidden, taps), 8, 1)
