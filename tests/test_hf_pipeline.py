"""Drafts that a pipeline's last stage trained go to Hugging Face and into runs of any layout and back, bit for bit.

`test_hf_round_trip.py` moves weights between modules and files; here they pass a run's checkpoint and a warm start too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dspark.hf.from_checkpoint import export_checkpoint
from megatron_dspark.training.overrides import settings_from_dict
from megatron_dspark.training.run import _Run, train
from megatron_dspark.training.settings import TrainSettings
from tests.distributed import RankPool
from tests.megatron import megatron_tensors
from tests.parallel_support import save_target, settings

VOCABULARY = 259  # Megatron pads its tables to 384 rows.
TABLES = ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {"draft.markov_head_type": "vanilla"},
    "gated": {"draft.markov_head_type": "gated"},
    "rnn": {"draft.markov_head_type": "rnn"},
    "no confidence": {"draft.enable_confidence_head": "false", "objective.confidence_weight": 0.0},
    "trained tables": {"draft.train_embeddings": "true", "draft.train_lm_head": "true"},
    "tied target": {"target": "tied"},
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
PP2 = {"parallel.pipeline": 2, "micro_batch_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "TP2": {"parallel.tensor": 2},
    "PP2": PP2,
    "PP2-VPP2": {**PP2, "parallel.virtual_pipeline": 2},
}
FILES = ("model.safetensors", "config.json")


def held_when_saved(rank: int, size: int, values: dict[str, Any]) -> dict[str, Tensor]:
    """Train; return this rank's part of the draft as it was saved: nothing on a stage without it.

    Left out are the rows that Megatron added and the teacher's own head, which is the target's.
    """
    found: dict[str, Tensor] = {}
    save = _Run.save

    def recording(run: _Run) -> None:
        if run.draft_stage is not None:
            for name, value in run.draft_stage.draft.named_parameters():
                rows = value.shape[0] if name not in TABLES else max(0, VOCABULARY - run.groups.tp.rank() * len(value))
                found[name] = value[:rows].detach().clone()
        save(run)

    _Run.save = recording
    try:
        train(settings_from_dict(values))
    finally:
        _Run.save = save
    found.pop("teacher_lm_head.weight", None)
    return found


def export_on_rank(rank: int, size: int, run: Path, output: Path, dtype: str) -> None:
    export_checkpoint(run, output, dtype=dtype)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def assert_same_files(folder: Path, expected: Path) -> None:
    # By tensor first: a difference should name it.
    assert_same(load_file(folder / FILES[0]), load_file(expected / FILES[0]))
    for file in FILES:
        assert (folder / file).read_bytes() == (expected / file).read_bytes(), file


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    save_target(folder / "tied", tied=True)
    return folder


@dataclass(frozen=True)
class Trained:
    """A draft after two steps in two pipeline stages: its run, its export, what the last stage held at the end."""

    folder: Path
    variant: str
    dtype: str
    run: Path
    export: Path
    held: dict[str, Tensor]

    def settings(self, output: Path, **changes: Any) -> TrainSettings:
        changes = {"validation": "null", "precision": DTYPES[self.dtype], **VARIANTS[self.variant], **changes}
        if "target" in changes:
            changes["target"] = self.folder / changes["target"]
        return settings(self.folder, output, **changes)


CASES = [*((variant, "float32") for variant in VARIANTS), ("gated", "bfloat16"), ("trained tables", "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def trained(
    request: pytest.FixtureRequest, folder: Path, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    variant, dtype = request.param
    here = tmp_path_factory.mktemp("trained")
    made = Trained(folder, variant, dtype, here / "run", here / "export", {})
    first, last = two_ranks.run(held_when_saved, made.settings(here / "run", **PP2).as_dict())
    assert not first
    made.held.update(last)
    export_checkpoint(here / "run", here / "export", dtype=dtype)
    return made


def test_the_file_is_what_the_last_stage_held(trained: Trained, two_ranks: RankPool, tmp_path: Path) -> None:
    """By the tests' own table of names; and ranks that share the export write the same bytes."""
    assert_same(megatron_tensors(load_file(trained.export / FILES[0]), 0, 1), trained.held)
    two_ranks.run(export_on_rank, trained.run, tmp_path / "export", trained.dtype)
    assert_same_files(tmp_path / "export", trained.export)


# Two stages for every draft; the other layouts take in the same tensors, of which one draft is enough.
STARTS = [
    *((case, "PP2") for case in CASES),
    *((("gated", "float32"), layout) for layout in LAYOUTS if layout != "PP2"),
]


@pytest.mark.parametrize(("trained", "layout"), STARTS, indirect=["trained"], ids=str)
def test_a_run_starts_from_the_file_and_writes_it_again(
    layout: str, trained: Trained, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Megatron to Hugging Face to Megatron, and Hugging Face to Megatron to Hugging Face: every bit of every key."""
    # One step that leaves every weight as it is: what the run was filled with is what it saves.
    unchanged = {"steps": 1, "save_interval": 1, "optimizer.learning_rate": 0.0, "warm_start": trained.export}
    values = trained.settings(tmp_path / "run", **unchanged, **LAYOUTS[layout]).as_dict()
    held = [held_when_saved(0, 1, values)] if layout == "one" else two_ranks.run(held_when_saved, values)
    if layout != "TP2":  # whose parts `test_hf_round_trip.py` compares
        assert_same(held[-1], trained.held)
        assert not any(held[:-1])
    export_checkpoint(tmp_path / "run", tmp_path / "export", dtype=trained.dtype)
    assert_same_files(tmp_path / "export", trained.export)
