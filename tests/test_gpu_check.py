"""examples/gpu_check.py as far as a machine without a GPU can tell: its runs are ones that settings take."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from examples.gpu_check import TINY, main, train, training_runs
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.overrides import override
from megatron_dspark.training.recipes import load_recipe

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it goes to work")
@pytest.mark.parametrize(
    ("words", "code", "said"), [((), 1, "There is no CUDA device here"), (("--part", "all"), 2, "not one of 'tests'")]
)
def test_without_a_gpu_it_says_so(words: tuple[str, ...], code: int, said: str) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code and said in result.output


def test_more_gpus_and_transformer_engine_add_runs() -> None:
    def names(gpus: int, transformer_engine: bool) -> list[str]:
        return [f"{run.kernels}, {run.layout}" for run in training_runs(gpus, transformer_engine)]

    assert names(1, False) == ["plain, one GPU", "flex, one GPU"]
    assert names(1, True) == ["plain, one GPU", "flex, one GPU", "Transformer Engine, one GPU"]
    assert [name for name in names(8, True) if "flex" in name] == [
        "flex, one GPU", "flex, DP 8", "flex, TP 2 SP, DP 4",
    ]  # fmt: skip
    assert len(names(3, True)) == 6


def test_settings_take_what_the_runs_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_cuda", "has_transformer_engine"):
        monkeypatch.setattr(f"megatron_dspark.platform.{name}", lambda: True)
    target = read_target_config(TINY / "model")
    for run in training_runs(8, True):
        settings = override(load_recipe(f"{ROOT / 'recipes/tiny_target.py'}:debug"), run.assignments())
        settings.target, settings.data, settings.output = str(target.folder), "train.jsonl", str(tmp_path)
        settings.validate()
        settings.model_config(target).validate(run.gpus)
        ranks = run.gpus // settings.parallel.ranks
        assert settings.global_batch_size % (settings.micro_batch_size * ranks) == 0 and settings.precision == "bf16"
        words = run.command(tmp_path / "run")
        assert ("torch.distributed.run" in words) == (run.gpus > 1) and words[-1] in run.assignments()


@pytest.mark.parametrize(
    ("before", "after", "code", "passed"),
    [(2.0, 1.5, 0, True), (1.5, 2.0, 0, False), (2.0, None, 0, False), (2, 1, 1, False)],
)
def test_a_loss_that_does_not_fall_fails(
    before: float, after: float | None, code: int, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"first_validation": {"loss": before}, "validation": {"loss": after}, "train": {}}
    done = subprocess.CompletedProcess([], code, f"noise\n{json.dumps(report)}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert train(training_runs(1, False)[0])["passed"] == passed
