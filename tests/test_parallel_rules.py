"""Layouts that do not compose are refused in a sentence, and the document says what the checks say."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.precompute import precompute
from megatron_dspark.parallel_rules import RANK_RULES, RULES, RUN_RULES, TARGET_RULES, Rule, render_tables
from megatron_dspark.training.run import train
from tests.megatron import tiny_config
from tests.parallel_support import settings
from tests.removals import REMOVALS
from tests.test_parallel_matrix import CELLS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "parallelism.md"

# What earns each rule's sentence. Changes of the model's config ("target" is its target's path):
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "TP that does not divide heads, key/value heads, MLP or hidden size": (
        {"tensor_model_parallel_size": 3},
        "tensor_model_parallel_size 3 does not divide the draft's num_attention_heads 4",
    ),
    "SP without TP": ({"sequence_parallel": True}, "sequence_parallel splits rows over tensor-parallel ranks"),
    "VPP without PP, or of one stage": (
        {"virtual_pipeline_model_parallel_size": 2},
        "leaves nothing to interleave",
    ),
    "PP without a target in the job": (
        {"pipeline_model_parallel_size": 2, "target": None},
        "no target runs in this job",
    ),
    "PP × VPP that does not divide the target's layers": (
        {"pipeline_model_parallel_size": 3},
        "3 pipeline stages do not divide the target's 8 layers",
    ),
    "PP with another payload type, fixed lengths or overlapped sends": (
        {"pipeline_model_parallel_size": 2, "variable_seq_lengths": False},
        "variable_seq_lengths is False",
    ),
    "expert parallelism": ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2 is not supported"),
    "FP8": ({"fp8": "hybrid"}, "fp8='hybrid' is not supported"),
    "FP4": ({"fp4": "e2m1"}, "fp4='e2m1' is not supported"),
    "multi-latent attention": ({"multi_latent_attention": True}, "multi_latent_attention=True is not supported"),
}
# Changes of a run's settings:
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "PP with `feature_memory_gib`": (
        {"parallel.pipeline": 2, "feature_memory_gib": 1.0},
        "a stage cannot keep what the others compute",
    ),
    "CP with anchors drawn for another CP size": (
        {"parallel.context": 2, "anchor_context_parallel": 3},
        "whose ranks would hold parts of blocks",
    ),
    "packed rows shorter than the longest sample": (
        {"packing": True, "packed_length": 8},
        "rows that hold the longest sample",
    ),
    "`block_attention=flex` without CUDA": ({"block_attention": "flex"}, "needs CUDA, and there is none here"),
    "TP that does not divide the target's heads, key/value heads or MLP": (
        {"parallel.tensor": 3},
        "num_attention_heads 4, which tensor_model_parallel_size 3 does not divide",
    ),
    "ranks that are no multiple of TP × CP × PP": (
        {"parallel.pipeline": 2},
        "need a multiple of 2 ranks and the job has 1",
    ),
}
PRECOMPUTES: dict[str, tuple[dict[str, Any], str]] = {
    "precompute: PP that does not divide the target's layers": (
        {"pipeline": 3},
        "3 pipeline stages do not divide the target's 4 layers",
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.refused)
def test_a_model_is_refused(rule: Rule) -> None:
    change, sentence = dict(CONFIGS[rule.refused][0]), CONFIGS[rule.refused][1]
    config = tiny_config(transformer=change, target_path=change.pop("target", "a target"))
    assert rule.violation(tiny_config(target_path="a target")) is None
    with pytest.raises(DSparkError, match=sentence):
        config.validate()
    assert rule.violation(config) is not None


def test_every_rule_has_an_example() -> None:
    every = (*RULES, *RUN_RULES, *RANK_RULES, *TARGET_RULES)
    assert {rule.refused for rule in every} == {*CONFIGS, *RUNS, *PRECOMPUTES} and len(every) == len(
        {rule.refused for rule in every}
    )


WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="it is refused without CUDA only")


@pytest.mark.parametrize(
    "refused", [pytest.param(name, marks=WITHOUT_CUDA if "without CUDA" in name else ()) for name in RUNS]
)
def test_a_run_is_refused_before_anything_is_made(refused: str, folder: Path) -> None:
    changes, sentence = RUNS[refused]
    with pytest.raises(DSparkError, match=sentence):
        train(settings(folder, folder / "run", **changes))
    assert not (folder / "run").exists()


@pytest.mark.parametrize("refused", PRECOMPUTES)
def test_a_precompute_is_refused_before_anything_is_made(
    refused: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = PRECOMPUTES[refused]
    monkeypatch.setenv("WORLD_SIZE", "3")
    data, cache = folder / "data.jsonl", folder / "cache"
    options = PrecomputeOptions(target=folder / "target", data=data, output=cache, target_layer_ids=[1], **changes)
    with pytest.raises(DSparkError, match=sentence):
        precompute(options)
    assert not cache.exists()


def section(name: str) -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]


def removals_table() -> str:
    lines = ["| removed | in | what then differs |", "|---|---|---|"]
    lines += [f"| {removal.what} | {removal.layout} | {removal.moves} |" for removal in REMOVALS]
    return "\n".join(lines) + "\n"


def test_document_says_what_the_checks_say() -> None:
    assert section("layouts") == render_tables([cell.name for cell in CELLS])


def test_document_lists_the_removals() -> None:
    assert section("removals") == removals_table()
