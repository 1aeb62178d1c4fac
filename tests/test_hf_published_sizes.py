"""What export would write at the sizes of the published drafters: a whole draft on the meta device, no weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dspark.config import DSparkModelConfig, draft_transformer_config
from megatron_dspark.hf.layouts import safetensors_bytes
from tests.test_hf_layouts import PUBLISHED, expanded


def published_config(instance: dict[str, Any], **changes: Any) -> DSparkModelConfig:
    values = {**instance, **changes}
    return DSparkModelConfig(
        transformer=draft_transformer_config(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            num_attention_heads=values["num_attention_heads"],
            num_query_groups=values["num_key_value_heads"],
            kv_channels=values["head_dim"],
            ffn_hidden_size=values["intermediate_size"],
            layernorm_epsilon=1e-6,
            add_qkv_bias=values["attention_bias"],
            perform_initialization=False,
            params_dtype=torch.bfloat16,
        ),
        rotary_base=1000000,
        **{
            key: values[key]
            for key in (
                "vocab_size",
                "num_target_layers",
                "target_layer_ids",
                "block_size",
                "mask_token_id",
                "markov_rank",
                "markov_head_type",
                "enable_confidence_head",
                "confidence_head_with_markov",
            )
        },
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("changes", [{}, {"markov_head_type": "rnn", "attention_bias": True}], ids=str)
def test_export_would_write_the_published_names_shapes_types_and_bytes(
    fixtures: Path, name: str, changes: dict[str, Any]
) -> None:
    from megatron_dspark.builder import padded_vocab_size
    from megatron_dspark.hf.config import draft_hf_config, settings_from_model
    from megatron_dspark.hf.mapping import stream_tensors
    from megatron_dspark.model.draft import DSparkDraft
    from tests.megatron import process_groups

    schema = json.loads((fixtures / "dense_qwen3_dspark.json").read_text())
    instance = schema["instances"][name]
    config = published_config(instance["config"], **changes)
    config.finalize()
    # Megatron's own padding of the vocabulary, which no file may show.
    assert padded_vocab_size(config) >= config.vocab_size
    with torch.device("meta"):
        # Megatron-Core names the CPU for some tables itself; empty memory that nothing touches costs nothing.
        draft = DSparkDraft(config, padded_vocab_size(config) + 128, process_groups(1)).to("meta")
    target = {
        "hidden_size": config.transformer.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
        "max_position_embeddings": 40960,
    }
    written = draft_hf_config(target, settings_from_model(config, "bfloat16"))
    tensors = dict(stream_tensors(draft, written))
    wanted = expanded(schema, {**instance["config"], **changes})
    assert {tensor: tuple(value.shape) for tensor, value in tensors.items()} == {
        tensor: shape for tensor, (_, shape) in wanted.items()
    }
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert all(value.is_meta for value in tensors.values())
    if not changes:
        assert len(tensors) == instance["expected_tensor_count"]
        size = safetensors_bytes(
            {key: tuple(value.shape) for key, value in tensors.items()}, "bfloat16", {"format": "pt"}
        )
        assert size == instance.get("published_file_bytes", size)
    for key, value in instance["config"].items():
        assert written[key] == {**instance["config"], **changes}[key], (key, value)
