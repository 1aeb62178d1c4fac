"""Tiny draft folders on disk, made without Megatron."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_dspark.hf.config import DraftExportSettings, draft_hf_config
from megatron_dspark.hf.layouts import DraftDimensions, tensor_shapes

Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], None]

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}

# The golden tiny draft's sizes.
SETTINGS = DraftExportSettings(
    hidden_size=64,
    intermediate_size=96,
    vocab_size=128,
    num_draft_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    num_target_layers=8,
    target_layer_ids=(1, 3, 5),
    block_size=5,
    mask_token_id=127,
    markov_rank=8,
    num_anchors=4,
)


def tiny_config(**settings: Any) -> dict[str, Any]:
    """config.json of a tiny draft; `settings` override `SETTINGS`."""
    return draft_hf_config(TARGET, replace(SETTINGS, **settings))


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """A random tensor for every name of the layout, in the config's dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in tensor_shapes(DraftDimensions.from_config(config)).items()
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors | None = None) -> Path:
    """Write a draft's folder as any other tool would; tensors are random when not given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config) if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# Ways to spoil a config and its tensors before they are written.


def remove(name: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


def rename(old: str, new: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def add(name: str, *shape: int) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)

    return change


def say(**values: Any) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config.update(values)

    return change


def forget(*keys: str) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for key in keys:
            del config[key]

    return change
