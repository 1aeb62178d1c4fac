"""Each reduction and each mark of a parallel run is needed: without it the run no longer equals one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import RankPool
from tests.parallel_support import Record, assert_equal_runs, run, save_conversations, save_target, settings
from tests.removals import GRADIENTS, REMOVALS
from tests.test_parallel_matrix import CELLS

LAYOUTS = {cell.name: cell for cell in CELLS}


def run_without(rank: int, size: int, values: dict[str, Any], removal: str) -> Record:
    with REMOVALS[removal][2]():
        return run(rank, size, values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("removals")
    save_target(folder / "target")
    save_conversations(folder / "data.jsonl")
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Record:
    return run(0, 1, settings(folder, folder / "reference").as_dict())


@pytest.mark.parametrize("removal", REMOVALS)
def test_removal_is_noticed(removal: str, folder: Path, reference: Record, two_ranks: RankPool, tmp_path: Path) -> None:
    layout, moved, _ = REMOVALS[removal]
    cell = LAYOUTS[layout]
    records = two_ranks.run(run_without, settings(folder, tmp_path / "run", **cell.settings()).as_dict(), removal)
    # A wrong norm shows after the first update: the first step's gradients were right.
    with pytest.raises(AssertionError, match=rf"step {0 if moved == GRADIENTS else 1}, .* differs by"):
        assert_equal_runs(records, reference)
