"""The layout table names what the published drafters hold: names, shapes, dtypes and bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.layouts import DraftDimensions, dtype_names, foreign_name, safetensors_bytes, tensor_shapes

PUBLISHED = [f"deepseek-ai/dspark_qwen3_{size}_block7" for size in ("4b", "8b", "14b")]


def expanded(schema: dict[str, Any], config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The fixture's expressions, evaluated by the rules that it states itself: name to (dtype, shape)."""
    names = {**config, "n_taps": len(config["target_layer_ids"]), "ceil_div": lambda a, b: -(-a // b)}
    groups = ["always", "every_layer", "if_markov_rank_gt_0"]
    groups += ["every_layer_if_attention_bias"] if config["attention_bias"] else []
    groups += [f"if_markov_head_type_{config['markov_head_type']}"] if config["markov_head_type"] != "vanilla" else []
    groups += ["if_enable_confidence_head"] if config["enable_confidence_head"] else []
    result = {}
    for entry in (entry for group in groups for entry in schema["tensors"][group]):
        layers = range(config["num_hidden_layers"]) if "{n}" in entry["name"] else range(1)
        for layer in layers:
            shape = tuple(eval(expression, {"__builtins__": {}}, names) for expression in entry["shape"])
            result[entry["name"].format(n=layer)] = (entry["dtype"], shape)
    if config["enable_confidence_head"] and not config["confidence_head_with_markov"]:
        result["confidence_head.proj.weight"] = ("BF16", (1, config["hidden_size"]))  # the fixture's note
    return result


@pytest.fixture(scope="module")
def schema(fixtures: Path) -> dict[str, Any]:
    return json.loads((fixtures / "dense_qwen3_dspark.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_names_shapes_and_dtypes_are_the_schema_s(schema: dict[str, Any], name: str, changes: dict[str, Any]) -> None:
    config = {**schema["instances"][name]["config"], **changes}
    wanted = expanded(schema, config)
    shapes = tensor_shapes(DraftDimensions.from_config(config))
    assert shapes == {tensor: shape for tensor, (_, shape) in wanted.items()}
    assert {dtype_names("bfloat16")[0]} == {dtype for dtype, _ in wanted.values()}
    if not changes:
        assert len(shapes) == schema["instances"][name]["expected_tensor_count"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_on_the_meta_device(schema: dict[str, Any], name: str) -> None:
    shapes = tensor_shapes(DraftDimensions.from_config(schema["instances"][name]["config"]))
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes.values()]
    payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = safetensors_bytes(shapes, "bfloat16", {"format": "pt"})
    assert 0 < size - payload < 8192
    published = schema["instances"][name].get("published_file_bytes")
    assert published is None or size == published


def test_the_4b_file_s_published_bytes_are_in_the_fixture(schema: dict[str, Any]) -> None:
    assert schema["instances"][PUBLISHED[0]]["published_file_bytes"] == 2786273970


def test_layers_are_in_order_between_embedding_and_final_norm(schema: dict[str, Any]) -> None:
    names = list(tensor_shapes(DraftDimensions.from_config(schema["instances"][PUBLISHED[0]]["config"])))
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers) and set(layers) == set(range(5))
    assert (
        names.index("embed_tokens.weight") < names.index("layers.0.input_layernorm.weight") < names.index("norm.weight")
    )


def test_every_name_that_must_be_absent_is_explained(schema: dict[str, Any]) -> None:
    examples = {
        r"^model\.": "model.layers.0.mlp.up_proj.weight",
        r"^markov_w[12]\.": "markov_w2.weight",
        r"^confidence_proj\.": "confidence_proj.bias",
        r"^(d2t|t2d)$": "d2t",
        r"^verifier_": "verifier_lm_head.weight",
        r"^logit_head\.": "logit_head.weight",
        "rotary_emb": "layers.0.self_attn.rotary_emb.inv_freq",
        "^mask_embedding": "mask_embedding",
    }
    assert set(examples) == set(schema["must_be_absent"])
    for pattern, example in examples.items():
        assert re.search(pattern, example) and foreign_name(example)
    wanted = tensor_shapes(DraftDimensions.from_config(schema["instances"][PUBLISHED[0]]["config"]))
    assert not [name for name in wanted if foreign_name(name)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("markov_rank", 0, "markov_rank = 0"),
        ("hidden_size", "2560", "positive integer"),
        ("num_hidden_layers", True, "positive integer"),
        ("attention_bias", 0, "true or false"),
        ("markov_head_type", "lstm", "vanilla, gated, rnn"),
    ],
)
def test_a_size_of_the_wrong_kind_is_named(schema: dict[str, Any], key: str, value: Any, words: str) -> None:
    config = {**schema["instances"][PUBLISHED[0]]["config"], key: value}
    with pytest.raises(DSparkError, match=words):
        DraftDimensions.from_config(config)


def test_a_missing_size_is_named(schema: dict[str, Any]) -> None:
    config = dict(schema["instances"][PUBLISHED[0]]["config"])
    del config["head_dim"]
    with pytest.raises(DSparkError, match="head_dim"):
        DraftDimensions.from_config(config)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DSparkError, match=r"float16.*bfloat16 or float32"):
        dtype_names("float16")
