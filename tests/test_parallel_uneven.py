"""Ranks and micro-batches with different amounts of supervision, or with none at all, train as one process does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.blocks import keyed_generator
from megatron_dspark.training.settings import TrainSettings
from tests.distributed import RankPool
from tests.parallel_support import (
    CONVERSATIONS,
    STEPS,
    Record,
    assert_equal_metrics,
    assert_equal_runs,
    compared,
    run,
    save_conversations,
    settings,
)
from tests.test_parallel_matrix import CELLS, Cell

NOTHING = CONVERSATIONS[2]
# Four conversations a step: with two ranks one of them always has nothing to train on, or both have.
DATA = {
    "one-of-four": (NOTHING, CONVERSATIONS[1], NOTHING, NOTHING),
    "none": (NOTHING, NOTHING, NOTHING, NOTHING),
}
NAMES = ("TP2-SP", "PP2", "PP2-VPP2", "PP4", "DP2", "DP2-DO", "DP2-packed", "CP2", "CP2-packed")
LAYOUTS = [(cell, "tokens") for cell in CELLS if cell.name in NAMES]
LAYOUTS += [(cell, "weights") for cell in CELLS if cell.name in ("TP2-SP", "PP2", "DP2", "CP2-packed")]
CASES = [("one-of-four", *layout) for layout in LAYOUTS]
# Without any work there is nothing that a packed row or a sharded optimizer could do otherwise.
CASES += [("none", cell, "tokens") for cell, _ in LAYOUTS[: len(NAMES)] if not (cell.packed or cell.distributed)]
CASES += [("none", cell, "weights") for cell in CELLS if cell.name in ("DP2", "PP2")]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    for name, conversations in {**DATA, "all": CONVERSATIONS}.items():
        save_conversations(folder / f"{name}.jsonl", conversations)
    # Data without any supervision at all is refused: the steps stop before the one sample that has some.
    drawn = STEPS * len(DATA["none"])
    order = torch.randperm(drawn + 1, generator=keyed_generator("order", TrainSettings().seed, 0)).tolist()
    with_one = [CONVERSATIONS[1] if number == order[drawn] else NOTHING for number in range(drawn + 1)]
    save_conversations(folder / "none-but-one.jsonl", with_one)
    return folder


class References:
    """What one process makes of each data set, once for every way in which that matters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._records = folder, {}

    def of(self, name: str, **changes: Any) -> tuple[Record, list[dict[str, Any]]]:
        key = str((name, sorted(changes.items())))
        if key not in self._records:
            output = self.folder / f"reference-{len(self._records)}"
            record = run(0, 1, settings(self.folder, output, **self.data(name), **changes).as_dict())
            self._records[key] = record, compared(output)
        return self._records[key]

    def data(self, name: str) -> dict[str, str]:
        data = "none-but-one" if name == "none" else name
        return {"data": str(self.folder / f"{data}.jsonl"), "validation": str(self.folder / f"{name}.jsonl")}


@pytest.fixture(scope="module")
def references(folder: Path) -> References:
    return References(folder)


@pytest.mark.parametrize(("name", "cell", "normalizer"), CASES, ids=lambda value: getattr(value, "name", value))
def test_uneven_work_equals_one_process(
    name: str, normalizer: str, cell: Cell, references: References, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[cell.ranks])
    changes = {"objective.normalizer": normalizer}
    expected, lines = references.of(name, anchor_context_parallel=cell.context, **changes)
    values = settings(references.folder, tmp_path / "run", **references.data(name), **changes, **cell.settings())
    assert_equal_runs(pool.run(run, values.as_dict()), expected)
    found = compared(tmp_path / "run")
    assert_equal_metrics(found, lines)
    for line in found:
        if line["split"] == "train":
            assert (line["grad_norm"] > 0) == (name != "none"), json.dumps(line)


@pytest.mark.parametrize("name", ["PP2", "PP2-VPP2"])
def test_micro_batches_that_the_stages_do_not_divide(
    name: str, references: References, two_ranks: RankPool, tmp_path: Path
) -> None:
    """The interleaved schedule takes a multiple of the stages: what is missing are micro-batches without a sample."""
    cell = next(cell for cell in CELLS if cell.name == name)
    expected, _ = references.of("all", global_batch_size=3, micro_batch_size=3)
    changes = {**references.data("all"), "global_batch_size": 3, **cell.settings()}
    records = two_ranks.run(run, settings(references.folder, tmp_path / "run", **changes).as_dict())
    assert_equal_runs(records, expected)


@pytest.mark.parametrize("name", DATA)
def test_the_metrics_are_those_of_the_samples_that_have_any(name: str, references: References) -> None:
    _, lines = references.of(name, anchor_context_parallel=1, **{"objective.normalizer": "tokens"})
    samples = 4
    assert lines[0]["anchors_per_sample"] == (3 / samples if name == "one-of-four" else 0.0)
