"""A loss that is not finite ends the job on every rank, before the optimizer uses it, with step, rank and samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.colocated import FrozenTarget
from megatron_dspark.training import run
from megatron_dspark.training.checkpoint import find_checkpoint
from megatron_dspark.training.overrides import settings_from_dict
from tests.distributed import RankPool
from tests.test_training import tiny_settings


class Seen:
    """What a rank's run did: optimizer steps, and the samples of every batch in the order they were drawn."""

    def __init__(self) -> None:
        self.updates, self.validations = 0, 0
        self.batches: list[list[str]] = []


def spoiled_run(rank: int, size: int, settings: dict[str, Any], bad_rank: int, bad_capture: int) -> tuple[str, Seen]:
    """Train; on `bad_rank` the target's run number `bad_capture` gives NaN. Return the error and what happened."""
    seen = Seen()
    patch = pytest.MonkeyPatch()
    run_stage, step_batches = FrozenTarget.run_stage, run.Sampler.step_batches
    optimizer_step, validate = run._Run.optimizer_step, run._Run.validate
    calls = [0]

    def spoil(self: FrozenTarget, *arguments: Any) -> Any:
        features = run_stage(self, *arguments)
        calls[0] += 1
        if rank == bad_rank and calls[0] == bad_capture:
            features.final_hidden.fill_(torch.nan)
        return features

    def record(self: run.Sampler, *arguments: Any) -> Any:
        for batch in step_batches(self, *arguments):
            seen.batches.append(batch.sample_ids)
            yield batch

    def count_update(self: run._Run) -> Any:
        result = optimizer_step(self)
        seen.updates += 1
        return result

    def count_validation(self: run._Run) -> Any:
        result = validate(self)
        seen.validations += 1
        return result

    patch.setattr(FrozenTarget, "run_stage", spoil)
    patch.setattr(run.Sampler, "step_batches", record)
    patch.setattr(run._Run, "optimizer_step", count_update)
    patch.setattr(run._Run, "validate", count_validation)
    try:
        run.train(settings_from_dict(settings))
    except DSparkError as error:
        return str(error), seen
    finally:
        patch.undo()
    return "no error", seen


@pytest.mark.parametrize(
    "layout",
    [{}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}],
    ids=["DP2", "TP2", "PP2"],
)
def test_every_rank_stops_with_the_same_sentence(two_ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    settings = tiny_settings(tmp_path / "run", micro_batch_size=1, **layout)
    settings.validation = None
    # The second step's second micro-batch of rank 1: rank 0 has seen nothing wrong by then.
    per_step = settings.global_batch_size // settings.micro_batch_size // (1 if layout else 2)
    assert per_step >= 2
    results = two_ranks.run(spoiled_run, settings.as_dict(), 1, per_step + 2)
    samples = results[1][1].batches[per_step + 1]
    if "parallel.tensor" in layout:
        # The ranks share the rows, so both have the NaN after the objective's exchanges.
        assert "the loss of step 2 is not finite" in results[0][0]
        assert f"on rank 1 (samples {samples})" in results[0][0]
    else:
        expected = f"the loss of step 2 is not finite on rank 1 (samples {samples}): look at these samples"
        assert results[0][0].startswith(expected)
    assert results[0][0] == results[1][0]
    for _, seen in results:
        assert seen.updates == 1
    assert find_checkpoint(tmp_path / "run") is None


def test_one_rank_and_validation(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "run")
    message, seen = spoiled_run(0, 1, settings.as_dict(), 0, 1)
    assert message.startswith("the loss of the validation at step 0 is not finite on rank 0 (samples ['")
    assert (seen.updates, seen.validations) == (0, 0)
