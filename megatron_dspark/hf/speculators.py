"""The config.json of a draft in the speculators layout, which vLLM and the speculators library read.

The tensors are the DeepSpec layout's, names and all. speculators itself takes embedding and LM head from the target and
ignores the draft's copies; they are written so that the file is complete.
"""

from collections.abc import Mapping
from typing import Any

# What describes the backbone alone, and is nested.
_BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "max_position_embeddings",
    "layer_types",
    "initializer_range",
    "tie_word_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Said in speculators' own words below.
_SAID_OTHERWISE = ("architectures", "model_type", "target_layer_ids", "torch_dtype")


def speculators_config(
    config: Mapping[str, Any], target_architectures: list[str], target_name: str | None = None
) -> dict[str, Any]:
    """Say a DeepSpec config in the speculators layout.

    Args:
        config: what `hf.config.draft_hf_config` writes.
        target_architectures: of the target's config.json.
        target_name: the target's Hugging Face id, from which vLLM and speculators load it; None leaves it unsaid.

    Returns:
        The config: tap ids count from 1 (the embedding is 0), `sample_from_anchor` is written because readers differ
        on its default.
    """
    own = {key: value for key, value in config.items() if key not in _BACKBONE and key not in _SAID_OTHERWISE}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"]}],
            "verifier": {"name_or_path": target_name, "architectures": target_architectures},
        },
        "transformer_layer_config": {
            "model_type": config["model_type"],
            **{key: config[key] for key in _BACKBONE if key in config},
        },
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
        "tie_word_embeddings": False,
        **own,
    }
