"""Unusual targets: what the draft of each is exported as, or the sentence with which it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import draft_hf_config, settings_from_model
from megatron_dspark.hf.layouts import DraftDimensions, tensor_shapes
from megatron_dspark.targets.folder import read_frozen_tables, read_target_config
from megatron_dspark.training.settings import TrainSettings
from tests.hf_support import TARGET


def write_target(folder: Path, rows: int = 128, lm_head: bool = True, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    tables = {"model.embed_tokens.weight": torch.arange(rows * 64.0).view(rows, 64)}
    if lm_head:
        tables["lm_head.weight"] = -tables["model.embed_tokens.weight"]
    save_file(tables, folder / "model.safetensors")
    return folder


def exported_config(folder: Path) -> dict[str, Any]:
    """What export writes of a draft with default sizes for this target."""
    target = read_target_config(folder)
    # From a cache: most of these are computed by transformers, see tests/test_target_computable.py.
    settings = TrainSettings(features="f", output="o")
    settings.draft.mask_token_id, settings.draft.num_layers = 127, 2
    settings.draft.target_layer_ids = [1, 3, 5]
    return draft_hf_config(target.raw, settings_from_model(settings.model_config(target)))


TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What is unusual, and what the exported config says about it.
    "tied embeddings": ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    "attention bias": ({"attention_bias": True}, {"attention_bias": False}),
    "wide heads": ({"head_dim": 32}, {"head_dim": 32, "num_attention_heads": 4}),
    "narrow heads": ({"head_dim": 8, "num_key_value_heads": 2}, {"head_dim": 8, "num_key_value_heads": 2}),
    "partial rotary": ({"partial_rotary_factor": 0.5}, {"rope_theta": 500000.0}),
    "RoPE scaling": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    ),
    "nested RoPE base": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ),
    "sliding window": ({"sliding_window": 128, "layer_types": ["sliding_attention"] * 8}, {}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_the_draft_says_what_it_is_and_copies_nothing_else(tmp_path: Path, case: str) -> None:
    changes, expected = TARGETS[case]
    config = exported_config(write_target(tmp_path / "target", **changes))
    assert {key: config[key] for key in expected} == expected
    assert config["layer_types"] == ["full_attention"] * 2
    for key in ("partial_rotary_factor", "rope_scaling", "sliding_window"):
        assert key not in config and key not in config["rope_parameters"]
    shapes = tensor_shapes(DraftDimensions.from_config(config))
    width = config["num_attention_heads"] * config["head_dim"]
    assert shapes["layers.0.self_attn.o_proj.weight"] == (64, width)
    assert ("layers.0.self_attn.q_proj.bias" in shapes) == config["attention_bias"]


def test_a_target_that_calls_its_sizes_otherwise(tmp_path: Path) -> None:
    names = {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 256, "vocab_size": 128}
    folder = tmp_path / "gpt2"
    folder.mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **names}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.zeros(128, 64)}, folder / "model.safetensors")
    target = read_target_config(folder, any_architecture=True)
    settings = TrainSettings(features="f", output="o")
    settings.draft.mask_token_id, settings.draft.target_layer_ids = 127, [1, 3, 5]
    written = draft_hf_config(target.described, settings_from_model(settings.model_config(target)))
    assert (written["hidden_size"], written["num_target_layers"], written["max_position_embeddings"]) == (64, 8, 256)


def test_a_tied_target_s_embedding_is_taken_twice(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", lm_head=False, tie_word_embeddings=True)
    tables = read_frozen_tables(read_target_config(folder))
    assert torch.equal(tables["lm_head"], tables["embed_tokens"])


def test_a_target_whose_tables_are_padded_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", rows=144)
    with pytest.raises(DSparkError, match=r"has shape \(144, 64\) and its config says \(128, 64\)"):
        read_frozen_tables(read_target_config(folder))
