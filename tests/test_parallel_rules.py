"""Layouts that do not compose are refused in a sentence, and the document says what the checks say."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dspark.errors import DSparkError
from megatron_dspark.parallel_rules import RULES, render_tables
from megatron_dspark.training.run import train
from tests.megatron import tiny_config
from tests.parallel_support import save_conversations, save_target, settings
from tests.removals import REMOVALS
from tests.test_parallel_matrix import CELLS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "parallelism.md"

# A config for every rule, and the sentence that it earns.
VIOLATIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_model_parallel_size": 3},
        "tensor_model_parallel_size 3 does not divide the draft's num_attention_heads 4",
    ),
    ({"sequence_parallel": True}, "sequence_parallel splits rows over tensor-parallel ranks"),
    ({"virtual_pipeline_model_parallel_size": 2}, "leaves nothing to interleave"),
    ({"pipeline_model_parallel_size": 2, "target": None}, "no target runs in this job"),
    ({"pipeline_model_parallel_size": 3}, "3 pipeline stages do not divide the target's 8 layers"),
    ({"pipeline_model_parallel_size": 2, "variable_seq_lengths": False}, "variable_seq_lengths is False"),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2 is not supported"),
    ({"fp8": "hybrid"}, "fp8='hybrid' is not supported"),
    ({"fp4": "e2m1"}, "fp4='e2m1' is not supported"),
    ({"multi_latent_attention": True}, "multi_latent_attention=True is not supported"),
]


@pytest.mark.parametrize(("number", "rule"), list(enumerate(RULES)), ids=lambda value: getattr(value, "refused", ""))
def test_rule_refuses(number: int, rule: Any) -> None:
    change, sentence = dict(VIOLATIONS[number][0]), VIOLATIONS[number][1]
    config = tiny_config(transformer=change, target_path=change.pop("target", "a target"))
    assert rule.violation(tiny_config(target_path="a target")) is None
    with pytest.raises(DSparkError, match=sentence):
        config.validate()
    assert rule.violation(config) is not None


def test_every_rule_has_an_example() -> None:
    assert len(VIOLATIONS) == len(RULES)


def test_runs_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    save_conversations(tmp_path / "data.jsonl")
    for change, sentence in (
        ({"parallel.tensor": 3}, "num_attention_heads 4, which tensor_model_parallel_size 3 does not divide"),
        ({"parallel.pipeline": 2, "feature_memory_gib": 1.0}, "a stage cannot keep what the others compute"),
        ({"parallel.pipeline": 2}, "need a multiple of 2 ranks and the job has 1"),
        ({"parallel.context": 2, "anchor_context_parallel": 3}, "whose ranks would hold parts of blocks"),
    ):
        with pytest.raises(DSparkError, match=sentence):
            train(settings(tmp_path, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def section(name: str) -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]


def removals_table() -> str:
    lines = ["| removed | in | what then differs |", "|---|---|---|"]
    lines += [f"| {removed} | {layout} | {moved} |" for removed, (layout, moved, _) in REMOVALS.items()]
    return "\n".join(lines) + "\n"


def test_document_says_what_the_checks_say() -> None:
    assert section("layouts") == render_tables([cell.name for cell in CELLS])


def test_document_lists_the_removals() -> None:
    assert section("removals") == removals_table()
