"""Each reduction, mask and mark of a run is needed: without it the run no longer equals one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import RankPool
from tests.parallel_support import (
    Record,
    assert_equal_metrics,
    assert_equal_runs,
    compared,
    run,
    settings,
)
from tests.removals import FAILS, METRICS, NORM, REFUSED, REMOVALS, Removal
from tests.test_parallel_matrix import CELLS

LAYOUTS = {cell.name: cell for cell in CELLS}


def run_without(rank: int, size: int, values: dict[str, Any], number: int) -> Record:
    with REMOVALS[number].without():
        return run(rank, size, values)


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, tuple[Record, list[dict[str, Any]]]]:
    return {}


@pytest.mark.parametrize("number", range(len(REMOVALS)), ids=lambda number: REMOVALS[number].what)
def test_removal_is_noticed(
    number: int, folder: Path, references: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    removal: Removal = REMOVALS[number]
    cell = LAYOUTS[removal.layout]
    rule = {"anchor_context_parallel": cell.context, **removal.settings}
    if str(rule) not in references:
        output = folder / f"reference-{len(references)}"
        references[str(rule)] = run(0, 1, settings(folder, output, **rule).as_dict()), compared(output)
    expected, lines = references[str(rule)]

    values = settings(folder, tmp_path / "run", **{**cell.settings(), **rule}).as_dict()

    def without() -> list[Record]:
        if cell.ranks == 1:
            return [run_without(0, 1, values, number)]
        pool: RankPool = request.getfixturevalue("two_ranks")
        return pool.run(run_without, values, number)

    if removal.moves in (REFUSED, FAILS):
        with pytest.raises(AssertionError, match="DSparkError: a block needs" if removal.moves == REFUSED else "Error"):
            without()
        return
    records = without()
    if removal.moves == METRICS:
        assert_equal_runs(records, expected)
        with pytest.raises(AssertionError, match="differs"):
            assert_equal_metrics(compared(tmp_path / "run"), lines)
    else:
        # A wrong norm shows after the first update: the first step's gradients were right.
        step = 1 if removal.moves == NORM else 0
        with pytest.raises(AssertionError, match=rf"step {step}, .* differs by"):
            assert_equal_runs(records, expected)
