"""Every supported layout of at most four ranks equals one process in float64: two steps, exported files included.

All of them train a gated head and leave the tables frozen; a few train the RNN head and both tables.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dspark.hf.from_checkpoint import export_checkpoint
from tests.distributed import RankPool
from tests.parallel_support import (
    MAX_LENGTH,
    Record,
    assert_equal_metrics,
    assert_equal_runs,
    compared,
    run,
    settings,
)

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Cell:
    """One layout; the ranks that it needs are the product of its sizes."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    data: int = 1
    distributed: bool = False
    packed: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        parts = [
            f"TP{self.tensor}" if self.tensor > 1 else "",
            "SP" if self.sequence else "",
            f"PP{self.pipeline}" if self.pipeline > 1 else "",
            f"VPP{self.virtual}" if self.virtual else "",
            f"CP{self.context}" if self.context > 1 else "",
            f"DP{self.data}" if self.data > 1 else "",
            "DO" if self.distributed else "",
            "packed" if self.packed else "",
        ]
        return "-".join(part for part in parts if part) or "one"

    def settings(self) -> dict[str, object]:
        return {
            "micro_batch_size": 1,
            "parallel.tensor": self.tensor,
            "parallel.sequence": self.sequence,
            "parallel.pipeline": self.pipeline,
            "parallel.virtual_pipeline": self.virtual or "null",
            "parallel.context": self.context,
            "optimizer.distributed": self.distributed,
            "packing": self.packed,
            "packed_length": 2 * MAX_LENGTH if self.packed else "null",
        }


def cells() -> list[Cell]:
    """Every supported layout of at most four ranks."""
    every = (
        Cell(tensor, sequence, pipeline, virtual, context, data, distributed, packed)
        for tensor, sequence, pipeline, virtual, context, data, distributed, packed in itertools.product(
            (1, 2, 4), (False, True), (1, 2, 4), (None, 2), (1, 2), (1, 2), (False, True), (False, True)
        )
        # The target has four layers: four stages leave nothing to interleave.
        if (tensor > 1 or not sequence) and (data > 1 or not distributed) and (pipeline == 2 or not virtual)
        # These two do not see rows.
        if not (packed and (virtual or distributed))
    )
    return sorted((cell for cell in every if cell.ranks <= 4), key=lambda cell: cell.ranks)


CELLS = cells()


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[int, Record]:
    """One process, one micro-batch with everything, for each way in which anchors are drawn (see `AnchorRule`)."""
    records = {}
    for context in (1, 2):
        output = folder / f"reference-{context}"
        records[context] = run(0, 1, settings(folder, output, anchor_context_parallel=context).as_dict())
        export_checkpoint(output, folder / f"export-{context}")
    return records


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_layout_equals_one_process(
    cell: Cell, folder: Path, references: dict[int, Record], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    values = settings(folder, tmp_path / "run", **cell.settings()).as_dict()
    if cell.ranks == 1:
        records = [run(0, 1, values)]
    else:
        pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[cell.ranks])
        records = pool.run(run, values)
    assert_equal_runs(records, references[cell.context], TOLERANCE)

    assert_equal_metrics(compared(tmp_path / "run"), compared(folder / f"reference-{cell.context}"), TOLERANCE)
    for record in records:
        # Metrics of every rank, but the last stage alone holds the draft.
        assert record.report == records[0].report
    assert [bool(record.held) for record in records].count(True) == cell.ranks // cell.pipeline

    export_checkpoint(tmp_path / "run", tmp_path / "export")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "export" / file).read_bytes() == (folder / f"export-{cell.context}" / file).read_bytes(), (
            file
        )


# What the other cells do not move: a head with a recurrence, the draft's own embedding, and its LM head beside the
# teacher's copy.
TRAINED_TABLES = {"draft.markov_head_type": "rnn", "draft.train_embeddings": True, "draft.train_lm_head": True}


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[int, Record]:
    """What `references` are, with the RNN head and both tables trained."""
    return {
        context: run(
            0,
            1,
            settings(
                folder, folder / f"trained-{context}", anchor_context_parallel=context, **TRAINED_TABLES
            ).as_dict(),
        )
        for context in (1, 2)
    }


@pytest.mark.parametrize(
    "cell",
    [Cell(tensor=2, sequence=True), Cell(context=2), Cell(data=2, distributed=True), Cell(pipeline=2)],
    ids=lambda cell: cell.name,
)
def test_rnn_head_and_trained_tables_equal_one_process(
    cell: Cell, folder: Path, trained: dict[int, Record], two_ranks: RankPool, tmp_path: Path
) -> None:
    moved = trained[cell.context].parameters.keys()
    assert {"draft.embed_tokens.weight", "draft.lm_head.weight"} <= moved and any(
        "joint_proj" in name for name in moved
    )
    records = two_ranks.run(run, settings(folder, tmp_path / "run", **TRAINED_TABLES, **cell.settings()).as_dict())
    assert_equal_runs(records, trained[cell.context], TOLERANCE)
    assert_equal_metrics(compared(tmp_path / "run"), compared(folder / f"trained-{cell.context}"), TOLERANCE)
