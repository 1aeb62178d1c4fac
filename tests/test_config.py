"""DSparkModelConfig: it serialises, comes back, and refuses in a sentence."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from megatron_dspark import platform
from megatron_dspark.config import DSparkModelConfig, default_target_layer_ids
from megatron_dspark.errors import DSparkError
from tests.megatron import tiny_config


def test_comes_back_from_json() -> None:
    config = tiny_config(markov_head_type="gated", loss_decay_gamma=None, train_lm_head=True)
    stored = json.loads(json.dumps(config.as_dict()))
    back = DSparkModelConfig.from_dict(stored)
    assert back.as_dict() == config.as_dict()
    assert back.transformer.activation_func is torch.nn.functional.silu
    assert back.transformer.params_dtype is torch.float64
    for item in dataclasses.fields(DSparkModelConfig):
        if item.name != "transformer":
            assert getattr(back, item.name) == getattr(config, item.name), item.name
    back.finalize()
    assert back.get_builder_cls().__name__ == "DSparkModelBuilder"


def test_bridge_brings_it_back_by_its_target() -> None:
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    assert target_allowlist.is_allowed("megatron_dspark.config.DSparkModelConfig")


def test_unknown_settings_are_refused() -> None:
    stored = tiny_config().as_dict()
    with pytest.raises(DSparkError, match="no setting 'blok_size'"):
        DSparkModelConfig.from_dict({**stored, "blok_size": 5})
    with pytest.raises(DSparkError, match="TransformerConfig has no setting 'hiden_size'"):
        DSparkModelConfig.from_dict({**stored, "transformer": {**stored["transformer"], "hiden_size": 5}})
    config = tiny_config()
    with pytest.raises(DSparkError, match="no setting 'markov_rnak'"):
        config.markov_rnak = 4
    with pytest.raises(TypeError):
        tiny_config(markov_rnak=4)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"transformer": {"calculate_per_token_loss": False}}, "calculate_per_token_loss is False"),
    ({"target_layer_ids": [3, 1]}, r"must strictly increase, and they are \[3, 1\]"),
    ({"target_layer_ids": [1, 1]}, "must strictly increase"),
    ({"target_layer_ids": []}, "target_layer_ids is empty"),
    ({"target_layer_ids": [1, 8]}, "leave the 8 layers of the target; name layers inside 0 … 6"),
    ({"target_layer_ids": [-2, 1]}, "leave the 8 layers"),
    ({"target_layer_ids": [-1, 1]}, "name layer -1, which no serving engine can capture"),
    ({"target_layer_ids": [1, 7]}, "name layer 7, which no serving engine can capture"),
    ({"mask_token_id": 128}, "mask_token_id 128 is outside the vocabulary of 128"),
    ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
    ({"block_attention": "sparse"}, "block_attention is 'sparse' and must be one of prefix, flex, dense"),
    ({"markov_rank": 0}, "markov_rank is 0 while markov_head_type names a vanilla head"),
    ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm' and must be one of vanilla, gated, rnn"),
    ({"block_size": 0}, "block_size is 0"),
    ({"num_anchors": 0}, "num_anchors must be at least 1"),
    ({"loss_normalizer": "mean"}, "loss_normalizer is 'mean'"),
    ({"loss_decay_gamma": 0.0}, "loss_decay_gamma is 0.0 and must be above 0"),
    ({"ce_loss_weight": -1.0}, "ce_loss_weight is -1.0 and must be at least 0"),
    ({"ce_loss_weight": 0.0, "l1_loss_weight": 0.0}, "are both 0"),
    ({"enable_confidence_head": False}, "confidence_loss_weight is 1.0 and enable_confidence_head is False"),
    ({"vocab_size": None}, "vocab_size must be the target's true vocabulary"),
    ({"num_target_layers": 0}, "num_target_layers must be the target's depth"),
    ({"transformer": {"num_layers": 0}}, "num_layers of the draft must be a positive"),
    ({"transformer": {"num_query_groups": 3}}, "is not a multiple of num_query_groups 3"),
    ({"transformer": {"kv_channels": 15}}, "must be even"),
    ({"transformer": {"hidden_dropout": 0.1}}, "trained without dropout"),
    ({"transformer": {"normalization": "LayerNorm"}}, "normalization is 'LayerNorm', which the exported config"),
    ({"transformer": {"qk_layernorm": False}}, "qk_layernorm is False, which the exported config"),
    ({"transformer": {"num_moe_experts": 4}}, "num_moe_experts is 4, which the exported config"),
    ({"transformer": {"add_bias_linear": True}}, "add_bias_linear is True, which the exported config"),
    ({"transformer": {"window_size": (8, 0)}}, r"window_size is \(8, 0\), which the exported config"),
    ({"transformer": {"softmax_scale": 0.5}}, "softmax_scale is 0.5, which .* set it to None"),
    (
        {"transformer": {"recompute_granularity": "selective"}},
        "recompute_granularity is 'selective' .* set it to 'full' or None",
    ),
    ({"transformer": {"transformer_impl": "inference_optimized"}}, "transformer_impl is 'inference_optimized'"),
    ({"rotary_percent": 0.5}, "rotary_percent is 0.5, which the exported config"),
    ({"rope_scaling": True}, "rope_scaling is True, which the exported config"),
    (
        {"share_embeddings_and_output_weights": True},
        "share_embeddings_and_output_weights is True, which the draft does not read; set it to False",
    ),
    ({"position_embedding_type": "none"}, "position_embedding_type is 'none' .* set it to 'rope'"),
    ({"transformer": {"activation_func": torch.nn.functional.gelu}}, "uses SiLU"),
    ({"transformer": {"tensor_model_parallel_size": 4}}, "4 does not divide the draft's num_query_groups 2"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS, ids=[str(sorted(change)) for change, _ in REFUSALS])
def test_refuses(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DSparkError, match=sentence) as refusal:
        tiny_config(**change).finalize()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("installed", [False, True])
def test_transformer_engine_must_be_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_transformer_engine", lambda: installed)
    config = tiny_config(transformer={"transformer_impl": "transformer_engine"})
    if installed:
        config.validate()
    else:
        with pytest.raises(DSparkError, match="Transformer Engine is not installed here; install it"):
            config.validate()


def test_world_size_must_fit() -> None:
    with pytest.raises(DSparkError, match="need a multiple of 2 ranks and the job has 3"):
        tiny_config(2).validate(world_size=3)


def test_unservable_taps_can_be_asked_for() -> None:
    tiny_config(target_layer_ids=[-1, 7], allow_unservable_taps=True).finalize()


def test_default_taps() -> None:
    # The published 4B/8B (36 layers) and 14B (40 layers) drafters' own.
    assert default_target_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(40) == [1, 10, 19, 28, 37]
    assert default_target_layer_ids(8, 3) == [1, 3, 5]
    with pytest.raises(DSparkError, match="fewer than the 5 taps"):
        default_target_layer_ids(6)
