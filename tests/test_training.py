"""Training runs on the tiny target: one rank, DP 2 and TP 2 agree; a run resumes; what cannot work is refused."""

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.from_checkpoint import export_checkpoint
from megatron_dspark.hf.load import load_into_module
from megatron_dspark.hf.mapping import unwrap_model
from megatron_dspark.parallel import process_groups
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.checkpoint import find_checkpoint, load_draft_weights
from megatron_dspark.training.overrides import override, settings_from_dict
from megatron_dspark.training.report import Reporter, plot_curves, read_metrics
from megatron_dspark.training.run import TrainReport, train
from megatron_dspark.training.settings import TrainSettings
from megatron_dspark.training.setup import build_training
from tests.distributed import RankPool

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny_target"


def tiny_settings(output: Path, **changes: Any) -> TrainSettings:
    from megatron_dspark.training.recipes import load_recipe

    settings = load_recipe(f"{ROOT}/recipes/tiny_target.py:debug")
    settings.target, settings.output = str(TINY / "model"), str(output)
    settings.data, settings.validation = str(TINY / "data/train.jsonl"), str(TINY / "data/heldout.jsonl")
    return override(settings, [f"{name}={value}" for name, value in changes.items()])


def run_rank(rank: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    return train(settings_from_dict(settings)).as_dict()


def exported(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    export_checkpoint(run, folder, dtype="float32")
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of one rank, and its exported weights."""
    folder = tmp_path_factory.mktemp("reference")
    train(tiny_settings(folder / "run"))
    return folder / "run", exported(folder / "run", folder / "export")


LAYOUTS = [
    pytest.param({"micro_batch_size": 2}, id="DP2"),
    pytest.param({"micro_batch_size": 2, "optimizer.distributed": True}, id="DP2-distributed-optimizer"),
    pytest.param({"parallel.tensor": 2}, id="TP2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(
    layout: dict[str, Any],
    reference: tuple[Path, dict[str, torch.Tensor]],
    two_ranks: RankPool,
    tmp_path: Path,
) -> None:
    settings = tiny_settings(tmp_path / "run", **layout)
    reports = two_ranks.run(run_rank, settings.as_dict())
    assert reports[0]["train"]["loss"] == reports[1]["train"]["loss"]
    for split in ("train", "validation"):
        ours, theirs = read_metrics(tmp_path / "run", split), read_metrics(reference[0], split)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for line, expected in zip(ours, theirs, strict=True):
            for name in ("loss", "tau", "ce_loss", "l1_loss", "confidence_loss", "supervised_slots_per_block"):
                assert line[name] == pytest.approx(expected[name], rel=2e-4), (name, line["step"])
            if split == "train":
                assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3)
    weights = exported(tmp_path / "run", tmp_path / "export")
    assert weights.keys() == reference[1].keys()
    for name, expected in reference[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=5e-4, msg=name)


def test_run_tells_what_happened(reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    run, _ = reference
    lines = read_metrics(run, "train")
    # Every second step by the recipe, the first, and the last although it is odd.
    assert [line["step"] for line in lines] == [1, 2, 4, 5]
    expected = (
        "loss",
        "ce_loss",
        "l1_loss",
        "confidence_loss",
        "accept_rate",
        "accept_rate@0",
        "tau",
        "top1_agreement@0",
    )
    expected += ("confidence_abs_error", "confidence_bias", "confidence_prefix_bias", "supervised_slots_per_block")
    expected += (
        "anchors_per_sample",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "step_seconds",
        "peak_memory_gib",
    )
    for name in expected:
        assert name in lines[-1], name
    validation = read_metrics(run, "validation")
    assert validation[0]["step"] == 0 and validation[-1]["step"] == 5
    assert validation[-1]["loss"] < validation[0]["loss"]
    assert list((run / "tensorboard").iterdir())
    assert plot_curves(run, tmp_path / "curves.png").stat().st_size > 10_000


def test_metrics_that_were_not_measured_are_null_in_the_file(tmp_path: Path) -> None:
    """A slot that no block reached: NaN in the report, null in metrics.jsonl, and the plot leaves it out."""
    reporter = Reporter(tmp_path, steps=1, done=0, active=True, tensorboard=True)
    metrics = {"loss": 1.0, "tau": 1.5, "accept_rate@0": 0.5, "accept_rate@1": math.nan}
    for split, step in (("validation", 0), ("train", 1), ("validation", 1)):
        reporter.log(split, step, metrics)
    reporter.close()
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["accept_rate@1"] is None
    assert [line["accept_rate@1"] for line in read_metrics(tmp_path, "validation")] == [None, None]
    assert plot_curves(tmp_path, tmp_path / "curves.png").stat().st_size > 10_000
    # A resumed run has what the file had, and shows it as absent.
    report = TrainReport(str(tmp_path), "step-0000001", 1, 2.0, {}, {"tau": 1.5, "accept_rate@1": None}, metrics)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.render())
    text = console.export_text()
    assert "nan" not in text and "None" not in text and "1.5" in text


@pytest.mark.parametrize("source", ["checkpoint", "export"])
def test_the_first_step_from_loaded_weights_keeps_them(
    source: str, reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """BF16 keeps FP32 masters: unless they are made anew, a step of zero gradient brings the old weights back."""
    settings = tiny_settings(tmp_path / "run", precision="bf16", seed=7)
    config = settings.model_config(read_target_config(settings.target))
    with process_groups(1, seed=7) as groups:
        (model,), optimizer, _ = build_training(settings, config, groups)
        module = unwrap_model(model)
        if source == "checkpoint":
            load_draft_weights(find_checkpoint(reference[0]), module, optimizer)
        else:
            load_into_module(reference[0].parent / "export", module.draft, optimizer)
        assert torch.equal(module.draft.norm.weight, reference[1]["norm.weight"].bfloat16())
        loaded = {name: parameter.detach().clone() for name, parameter in module.draft.named_parameters()}
        model.zero_grad_buffer()
        assert optimizer.step()[0]
        for name, parameter in module.draft.named_parameters():
            assert torch.equal(parameter, loaded[name]), name


def test_warm_up_follows_the_share() -> None:
    settings = TrainSettings(steps=20)
    settings.optimizer.warmup_share = 0.1
    assert settings.warmup_steps == 2
    settings.optimizer.warmup_share = 0.0001
    assert settings.warmup_steps == 1
    settings.optimizer.warmup_share = 0.0
    assert settings.warmup_steps == 0


def test_resume_equals_an_uninterrupted_run(reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    run, _ = reference
    again = tmp_path / "run"
    shutil.copytree(run, again)
    # As if the run had been killed after step 5 was logged but before it was saved.
    shutil.rmtree(again / "checkpoints" / "step-0000005")
    (again / "checkpoints" / "latest.json").write_text(json.dumps({"step": 3}))
    torn = '{"split": "train", "st'
    with open(again / "metrics.jsonl", "a") as file:
        file.write(torn)
    report = train(tiny_settings(again))
    assert report.steps == 5
    for split in ("train", "validation"):
        ours, theirs = read_metrics(again, split), read_metrics(run, split)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        last, expected = ours[-1], theirs[-1]
        for name in ("loss", "tau", "accept_rate@0") + (("grad_norm", "learning_rate") if split == "train" else ()):
            assert last[name] == expected[name], (split, name)
    assert find_checkpoint(again).step == 5
    ours, theirs = exported(again, tmp_path / "a"), reference[1]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_checkpoint_moves_between_layouts(
    reference: tuple[Path, dict[str, torch.Tensor]], two_ranks: RankPool, tmp_path: Path
) -> None:
    """One rank to TP 2: the loss of the next steps is that of one rank."""
    longer = {"steps": 7, "log_interval": 1}
    for name in ("one", "two"):
        shutil.copytree(reference[0], tmp_path / name)
    train(tiny_settings(tmp_path / "one", **longer))
    two_ranks.run(run_rank, tiny_settings(tmp_path / "two", **longer, **{"parallel.tensor": 2}).as_dict())
    ours, theirs = (read_metrics(tmp_path / name, "train")[-2:] for name in ("two", "one"))
    for line, expected in zip(ours, theirs, strict=True):
        assert line["step"] == expected["step"] and line["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_altered_checkpoint_is_refused(reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(reference[0], again)
    (data,) = sorted((again / "checkpoints" / "step-0000005").glob("*.distcp"))[:1]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data.write_bytes(content)
    with pytest.raises(DSparkError, match=r"step-0000005 cannot be read .* step 3 is the newest whole one"):
        train(tiny_settings(again, steps=6))


def test_refuses_before_any_file_is_made(reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        (
            {"global_batch_size": 3, "micro_batch_size": 2},
            "global_batch_size 3 is not a multiple of micro_batch_size 2",
        ),
        ({"draft.mask_token_id": "null"}, "draft.mask_token_id is not set"),
        ({"draft.mask_token_id": 10**6}, "outside the vocabulary"),
        ({"draft.mask_token_id": 202}, "draft.mask_token_id 202 stands in the sample 'train-0000', so it is"),
        ({"draft.target_layer_ids": "[5,2]"}, "must strictly increase"),
        ({"target": tmp_path / "nowhere"}, "does not exist"),
        ({"data": tmp_path / "nowhere.jsonl"}, r"training data .* does not exist"),
        ({"data": tmp_path}, r"training data .* is a folder; make it"),
        ({"target": Path(__file__)}, r"target folder .*\.py is no folder; name"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"block_attention": "flex"}, "block_attention is 'flex', which needs CUDA"),
        ({"packed_length": 5000}, "packed_length is 5000 with packing False"),
        ({"packing": True, "packed_length": 5}, "packed_length is 5 with packing True"),
        ({"parallel.context": 0}, "parallel.context must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"validation_samples": 0}, "validation_samples must be at least 1, and it is 0"),
        ({"parallel.tensor": 0}, "parallel.tensor must be at least 1, and it is 0"),
        ({"feature_memory_gib": math.nan}, "feature_memory_gib is nan and has to be a finite number"),
        ({"optimizer.learning_rate": math.nan}, "optimizer.learning_rate is nan and has to be a finite number"),
        ({"draft.head_dim": -2}, "kv_channels of the draft must be a positive whole number, and it is -2"),
        ({"optimizer.learning_rate": -1.0}, "optimizer.learning_rate must not be negative, and it is -1.0"),
        ({"optimizer.warmup_share": 1.5}, "warmup_share must be in"),
        ({"optimizer.adam_beta1": 2}, r"optimizer.adam_beta1 must be in \[0, 1\), and it is 2"),
        ({"optimizer.clip_grad": "nan"}, "optimizer.clip_grad is nan and has to be a finite number"),
        ({"optimizer.weight_decay": -5}, "optimizer.weight_decay must be at least 0, and it is -5"),
        ({"draft.initializer_std": -1}, "draft.initializer_std must be at least 0, and it is -1"),
        ({"seed": -1}, "seed must be at least 0 .* and it is -1"),
        ({"draft.enable_confidence_head": False}, "confidence_loss_weight is 1.0 and enable_confidence_head is False"),
    ]
    for change, sentence in refusals:
        with pytest.raises(DSparkError, match=sentence):
            train(tiny_settings(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()
    for name, hint in (
        ("draft.blok_size", "did you mean draft.block_size"),
        ("learning_rate", "did you mean optimizer.learning_rate"),
        ("xyz", "the settings are those of TrainSettings"),
    ):
        with pytest.raises(DSparkError, match=f"{name}=3' names no setting; {hint}"):
            tiny_settings(tmp_path / "run", **{name: 3})
    short, reply = tmp_path / "short.jsonl", {"role": "assistant", "content": "a"}
    record = {"messages": [{"role": "user", "content": "b"}, reply], "finish_reason": "length"}
    short.write_text(json.dumps(record) + "\n")
    with pytest.raises(DSparkError, match=r"none of the 1 training samples .* at most 1 are .* longer replies$"):
        train(tiny_settings(tmp_path / "run", data=short))
    short.write_text(json.dumps({**record, "finish_reason": "stop"}) + "\n")
    with pytest.raises(DSparkError, match=r"block of 7 rows inside one of the 2000 parts .* at most 2 .* lower"):
        train(tiny_settings(tmp_path / "run", data=short, anchor_context_parallel=1000))
    assert not (tmp_path / "run").exists()
    for name, value, takes in (
        ("steps", "many", "a whole number"),
        ("optimizer.clip_grad", "a=b", "a number"),
        ("recompute", "maybe", "true or false"),
        ("precision", "", "text"),
        ("objective.loss_decay_gamma", "[4]", "a number, or null"),
        ("draft.target_layer_ids", "[1", r"a list, each item a whole number, as \[1,2\], or null"),
        ("checkpoint.allow", "seed", r"a list, each item text, as \[one,two\]"),
        ("optimizer", "3", "settings of its own; set one of them, for example optimizer.learning_rate"),
    ):
        with pytest.raises(DSparkError, match=rf"^{name} was given '{re.escape(value)}' and takes {takes}$"):
            tiny_settings(tmp_path / "run", **{name: value})
    with pytest.raises(DSparkError, match="already has a checkpoint of step 5"):
        train(tiny_settings(reference[0]), resume=False)
    with pytest.raises(DSparkError, match=r"seed was .* and is now 7"):
        train(tiny_settings(reference[0], seed=7))
    other = tmp_path / "other.jsonl"
    other.write_text((TINY / "data/heldout.jsonl").read_text())
    with pytest.raises(DSparkError, match=r"was trained on train.jsonl and .*other.jsonl holds other samples"):
        train(tiny_settings(reference[0], data=other))
    retold = tmp_path / "retold"
    shutil.copytree(TINY / "model", retold)
    template = retold / "chat_template.jinja"
    template.write_text("Cook." + template.read_text())
    with pytest.raises(DSparkError, match=r"train.jsonl gives other tokens now, since .* chat template has changed"):
        train(tiny_settings(reference[0], target=retold))
