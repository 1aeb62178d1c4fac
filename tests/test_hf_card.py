"""The model card says what the record says, and nothing that was not measured."""

from pathlib import Path
from typing import Any

import torch

from megatron_dspark.files import read_json
from megatron_dspark.hf.export import export_draft
from megatron_dspark.hf.record import record_accepted_length
from tests.hf_support import TARGET
from tests.test_hf_round_trip import build

PROVENANCE: dict[str, Any] = {
    "run": {"step": 40},
    "target": {"name": "tiny", "fingerprint": "f" * 64},
    "data": {"file": "train.jsonl", "sha256": "d" * 64},
    "conventions": {"loss_normalizer": "tokens", "loss_decay_gamma": 4.0, "detach_confidence_features": False},
    "tau": 2.25,
}


def export(folder: Path, **settings: Any) -> str:
    export_draft(build(settings, 1, torch.float32), TARGET, folder, provenance=PROVENANCE, target_name="someone/tiny")
    return (folder / "README.md").read_text()


def test_the_card_holds_the_record_s_facts(tmp_path: Path) -> None:
    card = export(tmp_path / "draft")
    assert card.startswith("---\n") and "base_model: someone/tiny" in card.split("---")[1]
    for fact in (
        "# draft",
        "f" * 64,
        "d" * 64,
        "2.250",
        "1, 3, 5 of 8",
        "vanilla, rank 8",
        "tokens",
        "| optimizer steps | 40 |",
    ):
        assert fact in card, fact
    assert "accepted length: not measured yet" in card
    assert '"num_speculative_tokens":5' in card and "--speculative-algorithm DSPARK" in card
    assert "max_draft_len=5" in card and "--spec-draft-n-max 5" in card
    assert read_json(tmp_path / "draft" / "dspark_export.json", "")["target"]["hub_id"] == "someone/tiny"


def test_an_engine_that_refuses_gets_the_reason_and_no_launch_line(tmp_path: Path) -> None:
    card = export(tmp_path / "draft", markov_head_type="gated")
    assert "vllm serve" not in card and "**vllm_0.26_0.33** will not load it: it implements the vanilla Markov" in card
    assert "--speculative-algorithm DSPARK" in card


def test_a_measured_length_enters_the_card_unless_somebody_edited_it(tmp_path: Path) -> None:
    export(tmp_path / "draft")
    measured = {"greedy": {"tokens_per_iteration": 1.4821, "prompts": 6, "command": "megatron-dspark verify --limit 6"}}
    record_accepted_length(tmp_path / "draft", measured)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "**1.482** tokens an iteration over 6 prompts (`megatron-dspark verify --limit 6`)" in card
    assert "not measured yet" not in card
    (tmp_path / "draft" / "README.md").write_text("my own words")
    record_accepted_length(tmp_path / "draft", {"temperature 0.7": measured["greedy"]})
    assert (tmp_path / "draft" / "README.md").read_text() == "my own words"
    assert set(read_json(tmp_path / "draft" / "dspark_export.json", "")["accepted_length"]) == {
        "greedy",
        "temperature 0.7",
    }
