"""The exported config: what it says, what it never takes from the target, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import draft_hf_config, refuse_another_draft, settings_from_config
from megatron_dspark.hf.local_paths import local_paths, without_local_paths
from megatron_dspark.hf.rules import TARGET_ONLY_FIELDS, config_problems
from tests.hf_support import SETTINGS, TARGET, tiny_config


def test_every_required_key_is_at_top_level(fixtures: Path) -> None:
    schema = json.loads((fixtures / "dense_qwen3_dspark.json").read_text())["config_json"]
    config = tiny_config()
    assert set(schema["required"]) <= set(config)
    for key in ("architectures", "model_type", "tie_word_embeddings"):
        assert config[key] == schema["required"][key]
    assert config["layer_types"] == ["full_attention"] * config["num_hidden_layers"]
    assert config["sample_from_anchor"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_the_draft_s_own_geometry_wins_over_the_target_s() -> None:
    config = tiny_config()
    assert (config["num_hidden_layers"], config["num_target_layers"]) == (2, TARGET["num_hidden_layers"])
    assert config["num_key_value_heads"] == 2 != TARGET["num_key_value_heads"]
    assert config["intermediate_size"] == 96 != TARGET["intermediate_size"]
    assert config["rope_theta"] == 10000.0 != TARGET["rope_theta"]
    assert config["eos_token_id"] == TARGET["eos_token_id"]


def test_nothing_that_only_the_target_has_is_copied() -> None:
    loaded = {
        **TARGET,
        **{key: 4 for key in TARGET_ONLY_FIELDS if key not in ("text_config", "vision_config")},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "_name_or_path": "/data/models/target",
        "transformers_version": "9.9",
        "something_new": 1,
    }
    assert draft_hf_config(loaded, SETTINGS) == tiny_config()
    assert draft_hf_config({"model_type": "multimodal", "text_config": loaded}, SETTINGS) == tiny_config()


def test_transformers_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "Qwen3Config"
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (config.head_dim, config.num_key_value_heads, config.block_size) == (16, 2, 5)
    assert config.layer_types == ["full_attention"] * 2 and config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"markov_rank": 0}, "markov_rank = 0"),
        ({"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
        ({"target_layer_ids": (-1, 3, 5)}, "tap -1 is the embedding output"),
        ({"target_layer_ids": (1, 3, 7)}, "tap 7 is the last of 8 layers"),
        ({"target_layer_ids": (1, 3, 9)}, "tap 9 is not a layer of a target of 8"),
        ({"target_layer_ids": (3, 1)}, "increase strictly"),
        ({"target_layer_ids": (3, 3)}, "increase strictly"),
        ({"target_layer_ids": ()}, "a list of target layer numbers"),
        ({"mask_token_id": 128}, "mask_token_id = 128, outside the vocabulary of 128"),
        ({"mask_token_id": -1}, "mask_token_id = -1"),
        ({"block_size": 0}, "block_size = 0"),
        ({"num_key_value_heads": 3}, "4 attention heads for 3"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling .*yarn.* cannot be exported"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"dtype": "float16"}, "bfloat16 or float32"),
        ({"hidden_size": 96}, "hidden_size is 96, and this target's config says 64"),
        ({"vocab_size": 256}, "vocab_size is 256, and this target's config says 128"),
        ({"num_target_layers": 12}, "num_hidden_layers is 12, and this target's config says 8"),
    ],
    ids=str,
)
def test_what_no_engine_could_serve_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DSparkError, match=words):
        tiny_config(**settings)


def test_a_plain_rope_type_is_allowed() -> None:
    assert tiny_config(rope_scaling={"rope_type": "default"}) == tiny_config()


def test_an_unknown_context_length_is_refused() -> None:
    target = {key: value for key, value in TARGET.items() if key != "max_position_embeddings"}
    with pytest.raises(DSparkError, match="max_position_embeddings"):
        draft_hf_config(target, SETTINGS)
    assert draft_hf_config(target, replace(SETTINGS, max_position_embeddings=77))["max_position_embeddings"] == 77


def test_settings_come_back_from_the_config() -> None:
    back = settings_from_config(tiny_config(markov_head_type="rnn", attention_bias=True))
    refuse_another_draft(replace(SETTINGS, markov_head_type="rnn", attention_bias=True), back)
    assert back.block_size == 5 and back.eos_token_id == [2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (1, 3, 6)}, r"target_layer_ids = \(1, 3, 5\) .* \(1, 3, 6\)"),
        ({"mask_token_id": 5}, "mask_token_id = 127 .* 5"),
        ({"rope_theta": 5e5}, "rope_theta = 10000.0 .* 500000.0"),
        ({"num_attention_heads": 2, "head_dim": 32}, "num_attention_heads = 4 .* 2"),
        ({"num_target_layers": 9}, "num_target_layers = 8 .* 9"),
    ],
    ids=str,
)
def test_weights_that_fit_but_mean_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DSparkError, match=words):
        refuse_another_draft(replace(SETTINGS, **changes), settings_from_config(tiny_config()))


def test_another_block_size_may_be_trained_on() -> None:
    refuse_another_draft(replace(SETTINGS, block_size=7, num_anchors=9), settings_from_config(tiny_config()))


def test_a_config_in_the_released_form_is_readable_but_not_exportable() -> None:
    released = {
        **tiny_config(),
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    for key in ("rope_parameters", "sample_from_anchor", "dtype"):
        del released[key]
    problems = config_problems(released)
    assert problems and all(problem.readable for problem in problems)
    assert settings_from_config(released).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("text", "path", "shortened"),
    [
        ("/home/someone/run 1", "/home/someone/run", "run 1"),
        ("train --out=/scratch/a/b/ --lr 1", "/scratch/a/b/", "train --out=b --lr 1"),
        ("~/models/x", "~/models/x", "x"),
        ("file:///data/x", "file:///data/x", "x"),
        (r"C:\models\x", r"C:\models\x", "x"),
        ("/model", "/model", "model"),
    ],
)
def test_local_paths_are_found_and_shortened(text: str, path: str, shortened: str) -> None:
    assert list(local_paths({"a": [text]})) == [("a > 0", path)]
    assert without_local_paths({"a": [text]}) == {"a": [shortened]}


@pytest.mark.parametrize(
    "text", ["Qwen/Qwen3-4B", "tokens/s", "12 /s", "./runs/a/b", "https://host/a/b", "and/or", "1 / 2", "a:b/c"]
)
def test_other_slashes_are_left_alone(text: str) -> None:
    assert not list(local_paths(text))
    assert without_local_paths(text) == text
