"""Export publishes a complete, clean folder or nothing, and says who will load it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf import export as export_module
from megatron_dspark.hf.layouts import DraftDimensions, safetensors_bytes, tensor_shapes
from megatron_dspark.hf.lint import lint_folder
from megatron_dspark.hf.load import load_draft
from megatron_dspark.hf.local_paths import local_paths
from tests.distributed import RankPool
from tests.hf_support import SETTINGS, TARGET, tiny_config
from tests.test_hf_round_trip import VARIANTS, build, export


def nothing_left(parent: Path) -> bool:
    return not list(parent.iterdir())


def test_the_folder_is_complete_clean_and_recorded(tmp_path: Path) -> None:
    provenance = {
        "run": {"name": "debug", "command": f"train --output {tmp_path}/run"},
        "tau": 2.25,
        "accepted_length": {"greedy": 3.0, "measured_with": "megatron-dspark verify runs/draft"},
    }
    report = export(build({}, 1, torch.float32), tmp_path / "draft", provenance=provenance)
    assert set(report.files) == {"README.md", "config.json", "dspark_export.json", "model.safetensors"}
    assert report.files == {path.name: path.stat().st_size for path in (tmp_path / "draft").iterdir()}
    assert lint_folder(tmp_path / "draft").ok
    shapes = tensor_shapes(DraftDimensions.from_config(tiny_config()))
    assert report.files["model.safetensors"] == safetensors_bytes(shapes, "bfloat16", {"format": "pt"})
    assert report.tensors == len(shapes) and report.dtype == "bfloat16"
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}
    record = json.loads((tmp_path / "draft" / "dspark_export.json").read_text())
    assert record["tau"] == 2.25 and record["accepted_length"] == provenance["accepted_length"]
    assert record["run"] == {"name": "debug", "command": "train --output run"}
    assert report.shortened_paths == ("run > command",)
    assert record["data"] is None and record["conventions"] is None
    # Others may read it as they may read the files beside it.
    assert len({path.stat().st_mode for path in (tmp_path / "draft").iterdir()}) == 1
    weights = tmp_path / "draft" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (problem,) = lint_folder(tmp_path / "draft").problems
    assert problem.rule == "weights-sha256" and record["weights_sha256"][weights.name] in problem.sentence


def test_a_metric_that_was_not_measured_is_null_in_the_record(tmp_path: Path) -> None:
    nan = float("nan")
    provenance = {"run": {"metrics": {"validation": {"accept_rate@6": nan, "tau": 1.5}}}, "tau": nan}
    export(build({}, 1, torch.float32), tmp_path / "draft", provenance=provenance)
    text = (tmp_path / "draft" / "dspark_export.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["tau"] is None and record["run"]["metrics"]["validation"] == {"accept_rate@6": None, "tau": 1.5}


def test_no_file_names_a_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    target = {**TARGET, "_name_or_path": str(tmp_path), "rope_scaling": None}
    provenance = {"run": {"target": str(tmp_path / "target"), "log": [str(Path.home() / "log")]}}
    export_module.export_draft(build({}, 1, torch.float32), target, tmp_path / "draft", provenance=provenance)
    for file in ("config.json", "dspark_export.json", "README.md"):
        text = (tmp_path / "draft" / file).read_text()
        assert str(tmp_path) not in text and str(Path.home()) + "/" not in text
        assert file == "README.md" or not list(local_paths(json.loads(text)))


def test_values_are_rounded_once_to_bfloat16(tmp_path: Path) -> None:
    draft = build({}, 1, torch.float64)
    export(draft, tmp_path / "draft")
    _, tensors = load_draft(tmp_path / "draft")
    assert torch.equal(tensors["fc.weight"], draft.fc.weight.detach().to(torch.bfloat16))


def test_large_weights_are_split_with_an_index(tmp_path: Path) -> None:
    draft = build({"markov_head_type": "rnn"}, 1, torch.float32)
    export(draft, tmp_path / "whole")
    report = export(draft, tmp_path / "split", max_shard_bytes=60_000)
    parts = [name for name in report.files if name.endswith(".safetensors")]
    assert len(parts) > 2 and parts[0] == f"model-00001-of-0000{len(parts)}.safetensors"
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    whole, split = load_draft(tmp_path / "whole").tensors, load_draft(tmp_path / "split").tensors
    assert set(index["weight_map"]) == set(whole) == set(split)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_the_report_names_the_engines(tmp_path: Path) -> None:
    report = export(build({"markov_head_type": "gated"}, 1, torch.float32), tmp_path / "draft")
    assert {verdict.engine: verdict.loads for verdict in report.engines}["sglang_0.5.23"] is True
    assert sum(verdict.loads for verdict in report.engines) == 1
    assert json.loads(json.dumps(report.as_dict()))["files"] == report.files
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.render())
    assert "the vanilla Markov head" in console.export_text()


# ---- nothing is published unless all of it is right


def spoil_nan(draft: Any) -> None:
    draft.norm.weight.data[3] = float("nan")


def spoil_extra_parameter(draft: Any) -> None:
    draft.layers[0].extra = torch.nn.Parameter(torch.zeros(2))


def spoil_extra_buffer(draft: Any) -> None:
    draft.register_buffer("steps", torch.zeros(2))


def spoil_missing_parameter(draft: Any) -> None:
    draft.confidence_head = None


def spoil_shape(draft: Any) -> None:
    draft.norm.weight = torch.nn.Parameter(torch.ones(32))


def spoil_rotary(draft: Any) -> None:
    draft.dspark_config.rotary_percent = 0.5


SPOILT = {
    "not finite": (spoil_nan, "norm.weight holds values that are not finite"),
    "a parameter without a name": (spoil_extra_parameter, "layers.0.extra has no place"),
    "a saved buffer without a name": (spoil_extra_buffer, "steps has no place"),
    "a tensor without a parameter": (
        spoil_missing_parameter,
        "confidence_head.proj.bias and the draft has no parameter",
    ),
    "another shape": (spoil_shape, r"norm.weight has shape \[32\]"),
    "partial rotary": (spoil_rotary, "rotary_percent is 0.5, which the exported config"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_failing_export_leaves_nothing(tmp_path: Path, case: str) -> None:
    spoil, words = SPOILT[case]
    draft = build({}, 1, torch.float32)
    spoil(draft)
    with pytest.raises(DSparkError, match=words):
        export(draft, tmp_path / "draft")
    assert nothing_left(tmp_path)


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "save_tensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export(build({}, 1, torch.float32), tmp_path / "draft")
    assert nothing_left(tmp_path)


def test_lint_comes_before_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = export_module.draft_hf_config

    def careless(*arguments: Any) -> dict[str, Any]:
        return {**written(*arguments), "partial_rotary_factor": 0.5}

    monkeypatch.setattr(export_module, "draft_hf_config", careless)
    with pytest.raises(DSparkError, match=r"was not published: .*partial_rotary_factor"):
        export(build({}, 1, torch.float32), tmp_path / "draft")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        ({"weights_sha256": {}}, "'weights_sha256', which the export writes itself"),
        ({"run": Path("x")}, "cannot be written as JSON"),
    ],
    ids=str,
)
def test_a_record_that_cannot_be_kept_is_refused(tmp_path: Path, provenance: dict[str, Any], words: str) -> None:
    with pytest.raises(DSparkError, match=words):
        export(build({}, 1, torch.float32), tmp_path / "draft", provenance=provenance)
    assert nothing_left(tmp_path)


def test_a_taken_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "thesis.txt").write_text("mine")
    with pytest.raises(DSparkError, match="already exists and is not empty"):
        export(build({}, 1, torch.float32), tmp_path / "draft")
    assert [path.name for path in (tmp_path / "draft").iterdir()] == ["thesis.txt"]


def test_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="num_hidden_layers is 8, and this target's config says 30"):
        export_module.export_draft(build({}, 1, torch.float32), {**TARGET, "num_hidden_layers": 30}, tmp_path / "draft")
    assert nothing_left(tmp_path)


# ---- two ranks


def every_rank_learns_of_failures(rank: int, world_size: int, folder: Path) -> list[str]:
    """Failures seen by the writing rank alone, by the other alone, and in the middle; then a good export."""
    heard = []
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").write_text("x")
    draft = build({}, world_size, torch.float32)
    save_file = export_module.save_tensors

    def attempt(name: str) -> None:
        try:
            heard.append(f"{sum(export(draft, folder / name).files.values()) > 0}")
        except (DSparkError, OSError) as error:
            heard.append(str(error))

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    attempt("taken")
    draft.norm.weight.data[0] = float("inf")
    attempt("diverged")
    draft.norm.weight.data[0] = 1.0
    export_module.save_tensors = full_disk
    attempt("full")
    export_module.save_tensors = save_file
    if rank == 1:
        draft.extra = torch.nn.Parameter(torch.zeros(1))
    attempt("uneven")
    if rank == 1:
        del draft.extra
    norm, draft.norm.weight = draft.norm.weight, torch.nn.Parameter(torch.ones(32))
    attempt("misshapen")
    draft.norm.weight = norm
    attempt("good")
    return heard


def test_every_rank_learns_of_a_failure_and_none_hangs(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(every_rank_learns_of_failures, tmp_path)
    assert first == second
    expected = ("already exists", "not finite", "No space left", "extra has no place", "has shape [32]", "True")
    for heard, words in zip(first, expected, strict=True):
        assert words in heard
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "taken"]


def a_replica_exports_once(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Two data-parallel replicas: one writes, both return the report."""
    return export(build({}, 1, torch.float32), folder).files


def a_stage_without_the_draft(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """The first pipeline stage passes None; the draft's own stage writes."""
    draft = build({}, 1, torch.float32)
    return export(None if rank == 0 else draft, folder).files


def test_replicas_and_stages_agree(two_ranks: RankPool, tmp_path: Path) -> None:
    for function in (a_replica_exports_once, a_stage_without_the_draft):
        first, second = two_ranks.run(function, tmp_path / function.__name__)
        assert first == second and lint_folder(tmp_path / function.__name__).ok


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_verifier_s_own_reader_accepts_every_variant(tmp_path: Path, variant: str) -> None:
    from megatron_dspark.serving.draft import DraftModel

    draft = build(VARIANTS[variant], 1, torch.float32)
    export(draft, tmp_path / "draft", dtype="float32")
    served = DraftModel.load(tmp_path / "draft", torch.float32, torch.device("cpu"))
    assert torch.equal(served.markov_head.markov_w2.weight, draft.markov_head.markov_w2.weight[: SETTINGS.vocab_size])
    assert served.config.rope_parameters["rope_theta"] == draft.dspark_config.rotary_base
