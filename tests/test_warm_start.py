"""A run starts from a draft that exists, whoever wrote it, and refuses one that means something else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.from_checkpoint import export_checkpoint
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from megatron_dspark.training.settings import TrainSettings
from megatron_dspark.training.warm_start import open_warm_start, start_from_draft
from tests.distributed import RankPool
from tests.hf_support import SETTINGS, Tensors, random_tensors, tiny_config, write_folder
from tests.test_hf_import import LAYOUTS, deepspec, specforge, write_target
from tests.test_hf_round_trip import build
from tests.test_training import run_rank, tiny_settings


def write_draft(folder: Path, tensors: Tensors, layout: Any = deepspec, **settings: Any) -> Path:
    config = tiny_config(**settings, dtype="bfloat16")
    return write_folder(folder, *layout(config, {name: tensor.bfloat16() for name, tensor in tensors.items()}))


def draft_of(target: Path, **settings: Any) -> Any:
    draft = build({}, 1, torch.float32, **settings)
    draft.dspark_config.target_path = str(target)
    return draft


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "speculators"])
def test_frozen_replicas_stay_the_target_s_to_the_last_bit(tmp_path: Path, layout: str) -> None:
    tensors = random_tensors(tiny_config(dtype="float32"))
    target = write_target(tmp_path / "target", tensors)
    folder = write_draft(tmp_path / "draft", tensors, LAYOUTS[layout])
    draft = draft_of(target)
    start_from_draft(draft, open_warm_start(str(folder), draft.dspark_config))
    rows = SETTINGS.vocab_size
    assert torch.equal(draft.lm_head.weight[:rows], tensors["lm_head.weight"])
    assert torch.equal(draft.embed_tokens.weight[:rows], tensors["embed_tokens.weight"])
    assert torch.equal(draft.fc.weight, tensors["fc.weight"].bfloat16().float())
    assert torch.equal(draft.markov_head.markov_w1.weight[:rows], tensors["markov_head.markov_w1.weight"].bfloat16())


def test_a_trained_head_is_kept_and_the_teacher_s_is_the_target_s(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(dtype="float32"))
    target = write_target(tmp_path / "target", tensors)
    trained = {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}
    folder = write_draft(tmp_path / "draft", trained)
    draft = draft_of(target, train_lm_head=True)
    teacher = draft.teacher_lm_head.weight.detach().clone()
    start_from_draft(draft, open_warm_start(str(folder), draft.dspark_config))
    rows = SETTINGS.vocab_size
    assert torch.equal(draft.lm_head.weight[:rows], trained["lm_head.weight"].bfloat16().float())
    assert torch.equal(draft.embed_tokens.weight[:rows], tensors["embed_tokens.weight"])
    assert torch.equal(draft.teacher_lm_head.weight, teacher)
    with pytest.raises(DSparkError, match=r"lm_head\.weight is not the target's.*draft\.train_lm_head=true"):
        open_warm_start(str(folder), draft_of(target).dspark_config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_draft_layers": 1}, "num_draft_layers = 1 .* 2"),
        ({"intermediate_size": 32}, "intermediate_size = 32 .* 96"),
        ({"markov_rank": 4}, "markov_rank = 4 .* 8"),
        ({"target_layer_ids": (0, 3, 5)}, r"target_layer_ids = \(0, 3, 5\)"),
        ({"markov_head_type": "gated"}, "markov_head_type = 'gated'"),
        ({"rope_theta": 5e5}, "rope_theta = 500000.0"),
    ],
    ids=str,
)
def test_another_draft_is_refused_by_the_name_of_what_differs(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    tensors = random_tensors(tiny_config(**settings, dtype="float32"))
    target = write_target(tmp_path / "target", tensors)
    folder = write_draft(tmp_path / "draft", tensors, specforge, **settings)
    with pytest.raises(DSparkError, match=rf"warm_start .*{words}"):
        open_warm_start(str(folder), draft_of(target).dspark_config)


def test_a_run_goes_on_from_an_export_where_the_other_ended(tmp_path: Path) -> None:
    train(tiny_settings(tmp_path / "first", steps=2, save_interval=2, validation_interval=2))
    export_checkpoint(tmp_path / "first", tmp_path / "draft", dtype="float32")
    second = tiny_settings(tmp_path / "second", steps=1, warm_start=tmp_path / "draft")
    train(second)
    ended, began = (read_metrics(tmp_path / name, "validation") for name in ("first", "second"))
    for name in ("loss", "tau", "accept_rate"):
        assert began[0][name] == pytest.approx(ended[-1][name], rel=1e-6), name
    assert began[0]["loss"] != pytest.approx(ended[0]["loss"], rel=1e-3)
    # The optimizer's first step starts from these weights too, not from the ones that it saw when it was made.
    assert read_metrics(tmp_path / "second", "train")[0]["loss"] < ended[0]["loss"]


@pytest.mark.parametrize("trained", [(False, False), (True, True), (False, True)], ids=["frozen", "trained", "thawed"])
def test_a_run_goes_on_from_a_checkpoint_where_the_other_ended(
    trained: tuple[bool, bool], two_ranks: RankPool, tmp_path: Path
) -> None:
    """Bit for bit in its layout, to rounding in another; frozen tables may be thawed, and not the other way round."""
    first, second = ({"draft.train_lm_head": each, "draft.train_embeddings": each} for each in trained)
    train(tiny_settings(tmp_path / "first", steps=2, save_interval=2, validation_interval=2, **first))
    run = {"steps": 1, "warm_start": tmp_path / "first", **second}
    train(tiny_settings(tmp_path / "second", **run))
    ended, began = (read_metrics(tmp_path / name, "validation") for name in ("first", "second"))
    for name in ("loss", "tau", "accept_rate", "ce_loss"):
        assert began[0][name] == ended[-1][name] != ended[0][name], name
    assert read_metrics(tmp_path / "second", "train")[0]["loss"] < ended[0]["loss"]
    step = {**run, "warm_start": tmp_path / "first" / "checkpoints" / "step-0000002"}
    layout = {"micro_batch_size": 1, "parallel.pipeline": 2} if trained[0] else {"parallel.tensor": 2}
    two_ranks.run(run_rank, tiny_settings(tmp_path / "two", **step, **layout).as_dict())
    assert read_metrics(tmp_path / "two", "validation")[0]["loss"] == pytest.approx(ended[-1]["loss"], rel=1e-6)
    if trained[0]:
        with pytest.raises(DSparkError, match=r"warm_start .*trained the embeddings .*draft\.train_embeddings=true"):
            train(tiny_settings(tmp_path / "third", steps=1, warm_start=tmp_path / "first"))
        assert not (tmp_path / "third").exists()


def test_the_other_run_s_kernels_need_not_be_on_this_machine(tmp_path: Path) -> None:
    train(tiny_settings(tmp_path / "first", steps=1, save_interval=1))
    (file,) = (tmp_path / "first/checkpoints").glob("step-*/run.json")
    content = json.loads(file.read_text())
    content["model"]["transformer"]["transformer_impl"] = "transformer_engine"
    file.write_text(json.dumps(content))
    settings = tiny_settings(tmp_path / "second", steps=1)
    config = settings.model_config(read_target_config(settings.target))
    assert open_warm_start(str(tmp_path / "first"), config).step == 1


def test_a_checkpoint_of_another_draft_or_target_is_refused(tmp_path: Path) -> None:
    train(tiny_settings(tmp_path / "first", steps=1, save_interval=1))
    start = {"steps": 1, "warm_start": tmp_path / "first"}
    with pytest.raises(DSparkError, match=r"warm_start .*the folder's draft has markov_rank = \d+ and .* 8"):
        train(tiny_settings(tmp_path / "second", **start, **{"draft.markov_rank": 8}))
    description = tmp_path / "first/checkpoints/step-0000001/run.json"
    run = json.loads(description.read_text())
    run["target"] |= {"name": "another", "fingerprint": "0"}
    description.write_text(json.dumps(run))
    with pytest.raises(DSparkError, match=r"warm_start .*trained against the target another and .*holds another one"):
        train(tiny_settings(tmp_path / "second", **start))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(DSparkError, match=r"warm_start .*empty: the run has no checkpoint yet"):
        train(tiny_settings(tmp_path / "second", steps=1, warm_start=tmp_path / "empty"))


def test_refused_before_any_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="is not a folder"):
        train(tiny_settings(tmp_path / "run", warm_start=tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()
    settings = replace(TrainSettings(target="t", data="d", output="o"), warm_start="somewhere")
    settings.draft.markov_start = "bigrams"
    with pytest.raises(DSparkError, match="'bigrams' and warm_start is somewhere"):
        settings.validate()
