"""Ranks and micro-batches with different amounts of supervision, or with none at all, train as one process does."""

import json
from pathlib import Path

import pytest

from tests.distributed import RankPool
from tests.parallel_support import (
    CONVERSATIONS,
    Record,
    assert_equal_runs,
    compared,
    run,
    save_conversations,
    save_target,
    settings,
)
from tests.test_parallel_matrix import CELLS

NOTHING = CONVERSATIONS[2]
# Four conversations a step: with two ranks one of them always has nothing to train on, or both have.
DATA = {
    "one-of-four": (NOTHING, CONVERSATIONS[1], NOTHING, NOTHING),
    "none": (NOTHING, NOTHING, NOTHING, NOTHING),
}
LAYOUTS = [cell for cell in CELLS if cell.name in ("TP2-SP", "PP2", "PP2-VPP2", "DP2", "DP2-DO")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    save_target(folder / "target")
    for name, conversations in DATA.items():
        save_conversations(folder / f"{name}.jsonl", conversations)
    return folder


@pytest.fixture(scope="module", params=DATA)
def reference(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Record]:
    data = str(folder / f"{request.param}.jsonl")
    changes = {"data": data, "validation": data}
    return request.param, run(0, 1, settings(folder, folder / request.param, **changes).as_dict())


@pytest.mark.parametrize("cell", LAYOUTS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("normalizer", ["tokens", "weights"])
def test_uneven_work_equals_one_process(
    cell: object,
    normalizer: str,
    folder: Path,
    reference: tuple[str, Record],
    two_ranks: RankPool,
    tmp_path: Path,
) -> None:
    name, expected = reference
    data = str(folder / f"{name}.jsonl")
    changes = {"data": data, "validation": data, "objective.normalizer": normalizer}
    if normalizer == "weights":
        expected = run(0, 1, settings(folder, tmp_path / "one", **changes).as_dict())
    records = two_ranks.run(run, settings(folder, tmp_path / "run", **changes, **cell.settings()).as_dict())
    assert_equal_runs(records, expected)
    for line in compared(tmp_path / "run"):
        if line["split"] == "train":
            assert (line["grad_norm"] > 0) == (name != "none"), json.dumps(line)


def test_the_metrics_are_those_of_the_samples_that_have_any(folder: Path, reference: tuple[str, Record]) -> None:
    name, _ = reference
    train = compared(folder / name)[0]
    samples = 4
    assert train["anchors_per_sample"] == (3 / samples if name == "one-of-four" else 0.0)
