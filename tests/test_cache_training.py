"""Training from a cache: bit-equal to colocated training, without the target, at one and two ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.precompute import precompute
from megatron_dspark.features.cache.reshape import subset_cache
from megatron_dspark.training.overrides import override
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from megatron_dspark.training.settings import TrainSettings
from tests.cache_support import MAX_LENGTH, ROOT, TINY, precompute_options, small_data
from tests.distributed import RankPool
from tests.test_training import run_rank

# What a step computed; speeds and waiting times differ.
EXACT = ("loss", "ce_loss", "l1_loss", "confidence_loss", "tau", "accept_rate@0", "top1_agreement@0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and the FP32 caches of both parts of it."""
    folder = tmp_path_factory.mktemp("offline")
    for name, path in zip(("train", "heldout"), small_data(folder), strict=True):
        precompute(PrecomputeOptions(**precompute_options(path, folder / f"{name}-features")))
    return folder


def settings(folder: Path, output: Path, *, offline: bool, **changes: Any) -> TrainSettings:
    from megatron_dspark.training.recipes import load_recipe

    result = load_recipe(f"{ROOT}/recipes/tiny_target.py:debug")
    result.output, result.max_length, result.tensorboard = str(output), MAX_LENGTH, False
    result.micro_batch_size, result.log_interval, result.validation_samples = 2, 1, 3
    if offline:
        result.features = str(folder / "train-features")
        result.validation_features = str(folder / "heldout-features")
    else:
        result.target, result.feature_memory_gib = str(TINY / "model"), 1.0
        result.data, result.validation = str(folder / "train.jsonl"), str(folder / "heldout.jsonl")
    return override(result, [f"{name}={value}" for name, value in changes.items()])


def steps(output: Path) -> list[tuple]:
    names = {"train": (*EXACT, "grad_norm", "learning_rate"), "validation": EXACT}
    return [
        (split, line["step"], *(line[name] for name in names[split]))
        for split in names
        for line in read_metrics(output, split)
    ]


@pytest.fixture(scope="module")
def colocated(folder: Path) -> Path:
    train(settings(folder, folder / "colocated", offline=False))
    return folder / "colocated"


def test_offline_equals_colocated_bit_for_bit(
    folder: Path, colocated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a draft-only job loaded the target")

    monkeypatch.setattr("megatron_dspark.builder.load_target", refuse)
    report = train(settings(folder, tmp_path / "run", offline=True))
    assert len(steps(tmp_path / "run")) == 5 + 3
    assert steps(tmp_path / "run") == steps(colocated)
    assert 0 <= report.train["data_wait_share"] < 1
    # Resumed in the middle of an epoch (10 samples, 4 a step), with another number of threads and a moved cache; then
    # from the conversations themselves, which are the same samples.
    shutil.copytree(folder / "train-features", tmp_path / "moved")
    for offline, changes in ((True, {"features": tmp_path / "moved", "feature_workers": 5}), (False, {})):
        if not offline:
            monkeypatch.undo()
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000005")
        (tmp_path / "run" / "checkpoints" / "latest.json").write_text(json.dumps({"step": 3}))
        assert train(settings(folder, tmp_path / "run", offline=offline, **changes)).steps == 5
        assert steps(tmp_path / "run") == steps(colocated)


def test_without_feature_memory_padded_rows_differ_by_rounding(folder: Path, colocated: Path, tmp_path: Path) -> None:
    """The target then runs over whole micro-batches, in matrix products of other shapes than one sample's."""
    train(settings(folder, tmp_path / "run", offline=False, feature_memory_gib=0.0))
    ours, theirs = steps(tmp_path / "run"), steps(colocated)
    assert [line[:2] for line in ours] == [line[:2] for line in theirs]
    for line, expected in zip(ours, theirs, strict=True):
        assert line[2:5] == pytest.approx(expected[2:5], rel=1e-5)


def test_two_ranks_offline_equal_two_ranks_colocated(folder: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    for name in ("colocated", "offline"):
        # With two held-out samples one of the ranks has none to validate.
        run = settings(folder, tmp_path / name, offline=name == "offline", validation_samples=2)
        two_ranks.run(run_rank, run.as_dict())
    assert steps(tmp_path / "offline") == steps(tmp_path / "colocated")


def test_packed_rows_offline_equal_colocated(folder: Path, tmp_path: Path) -> None:
    packed = {"packing": "true", "packed_length": 200}
    for name in ("colocated", "offline"):
        train(settings(folder, tmp_path / name, offline=name == "offline", **packed))
    assert steps(tmp_path / "offline") == steps(tmp_path / "colocated")


def test_context_parallel_ranks_get_their_rows(folder: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    train(settings(folder, tmp_path / "one", offline=True, anchor_context_parallel=2))
    run = settings(folder, tmp_path / "two", offline=True, **{"parallel.context": 2})
    two_ranks.run(run_rank, run.as_dict())
    for ours, theirs in zip(steps(tmp_path / "two"), steps(tmp_path / "one"), strict=True):
        assert ours[:2] == theirs[:2] and ours[2:] == pytest.approx(theirs[2:], rel=2e-4)


def test_rounded_features_train_too(folder: Path, tmp_path: Path) -> None:
    options = precompute_options(folder / "train.jsonl", tmp_path / "fp8", dtype="float8_e4m3fn")
    precompute(PrecomputeOptions(**options, compute_dtype="float32"))
    run = settings(folder, tmp_path / "run", offline=True, features=tmp_path / "fp8", validation_features="null")
    with pytest.raises(DSparkError, match=r"features.hidden_dtype .* is 'float8_e4m3fn' and this run has 'float32'"):
        train(run)
    run.feature_dtype = "float8_e4m3fn"
    rounded = train(run).train["loss"]
    exact = train(settings(folder, tmp_path / "exact", offline=True, validation_features="null")).train["loss"]
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.02)


def test_what_does_not_fit_is_refused(folder: Path, colocated: Path, tmp_path: Path) -> None:
    subset_cache(folder / "train-features", tmp_path / "taps", taps=[1, 2])
    other = tmp_path / "target"
    shutil.copytree(TINY / "model", other)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    template = tmp_path / "template"
    shutil.copytree(TINY / "model", template)
    text = (template / "chat_template.jinja").read_text()
    (template / "chat_template.jinja").write_text(text + "{# other #}")
    (tmp_path / "other.jsonl").write_text((TINY / "data/heldout.jsonl").read_text())
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"draft.target_layer_ids": "[1,3]"}, r"features.target_layer_ids .* is \[1, 2, 3, 4, 5\] .* has \[1, 3\]"),
        ({"max_length": 64}, "data.max_length .* is 96 and this run has 64"),
        ({"precision": "bf16"}, "features.hidden_dtype .* is 'float32' and this run has 'bfloat16'"),
        ({"target": other}, "target.weights_fingerprint of the feature cache .* and this run has"),
        ({"target": template}, "target.chat_template_fingerprint of the feature cache .* and this run has"),
        ({"data": tmp_path / "other.jsonl"}, r"data.fingerprint .* and .*other.jsonl has"),
        (
            {"validation_features": tmp_path / "taps"},
            r"target_layer_ids .*taps is \[1, 2\] and .* has \[1, 2, 3",
        ),
        ({"features": tmp_path / "nowhere"}, "is no feature cache"),
        ({"validation_features": "null", "validation": "x.jsonl"}, "has no target to capture its features"),
        ({"features": "null"}, "features is not set|target is not set"),
        ({"feature_workers": 0}, "feature_workers must be at least 1"),
    ]
    for change, sentence in refusals:
        with pytest.raises(DSparkError, match=sentence) as refusal:
            train(settings(folder, tmp_path / "run", offline=True, **change))
        assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()
    # The same target, data and held-out data may be named and are compared.
    named = {"target": TINY / "model", "data": folder / "train.jsonl", "validation": folder / "heldout.jsonl"}
    train(settings(folder, tmp_path / "run", offline=True, **named, steps=1))
