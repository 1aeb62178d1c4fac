"""Megatron-Core process groups and tiny drafts for tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file

from megatron_dspark import platform

platform.prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

from megatron_dspark.config import DSparkModelConfig, draft_transformer_config  # noqa: E402
from megatron_dspark.model.draft import DSparkDraft  # noqa: E402
from megatron_dspark.parallel import end_groups  # noqa: E402

GOLDEN = Path(__file__).parent / "fixtures" / "golden"


def process_groups(tensor_parallel_size: int = 1, seed: int = 1234) -> ProcessGroupCollection:
    """Return this process's groups for the given layout, starting a group of one rank where there is none."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    initialised = parallel_state.model_parallel_is_initialized()
    if initialised and parallel_state.get_tensor_model_parallel_world_size() != tensor_parallel_size:
        parallel_state.destroy_model_parallel()
        end_groups({torch.distributed.group.WORLD})
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def tiny_config(
    tensor_parallel_size: int = 1, dtype: torch.dtype = torch.float64, **settings: Any
) -> DSparkModelConfig:
    """Return the config of the golden tiny draft; `settings` override DSparkModelConfig's fields."""
    transformer = dict(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=96,
        layernorm_epsilon=1e-6,
        params_dtype=dtype,
        tensor_model_parallel_size=tensor_parallel_size,
    )
    transformer.update(settings.pop("transformer", {}))
    defaults: dict[str, Any] = dict(
        vocab_size=128,
        make_vocab_size_divisible_by=1,
        block_size=5,
        target_layer_ids=[1, 3, 5],
        num_target_layers=8,
        mask_token_id=127,
        markov_rank=8,
        num_anchors=4,
        rotary_base=10000,
    )
    defaults.update(settings)
    return DSparkModelConfig(transformer=draft_transformer_config(**transformer), **defaults)


def golden_draft(kind: str) -> dict[str, torch.Tensor]:
    """Return every tensor of golden/draft_{kind}.safetensors."""
    return load_file(GOLDEN / f"draft_{kind}.safetensors")


def shard(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return rank's equal part of `tensor` along `dim`."""
    return tensor.chunk(size, dim=dim)[rank]


# Released name -> (Megatron name, sharded dimension). MLP gate and up are one tensor in Megatron-Core.
LAYER_NAMES = {
    "self_attn.q_proj.weight": ("self_attention.linear_q.weight", 0),
    "self_attn.k_proj.weight": ("self_attention.linear_k.weight", 0),
    "self_attn.v_proj.weight": ("self_attention.linear_v.weight", 0),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", 1),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None),
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", 1),
}
SHARDED_ROWS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "fc.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
)


def megatron_tensors(released: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Translate released names and whole tensors to this rank's Megatron names and shards, independently of hf/."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in released.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            if rest == "mlp.up_proj.weight":
                continue
            if rest == "mlp.gate_proj.weight":
                up = released[name.replace("gate_proj", "up_proj")]
                result[f"layers.{number}.mlp.linear_fc1.weight"] = torch.cat(
                    [shard(tensor, 0, rank, size), shard(up, 0, rank, size)]
                )
                continue
            ours, dim = LAYER_NAMES[rest]
            name, tensor = f"layers.{number}.{ours}", tensor if dim is None else shard(tensor, dim, rank, size)
        elif name in SHARDED_ROWS:
            tensor = shard(tensor, 0, rank, size)
        result[name] = tensor
    return result


def load_released(draft: DSparkDraft, released: dict[str, torch.Tensor]) -> None:
    """Fill every parameter of `draft` from released tensors; a missing or unused one fails the test."""
    groups = draft.pg_collection.tp
    tensors = megatron_tensors(released, groups.rank(), groups.size())
    parameters = dict(draft.named_parameters())
    assert parameters.keys() == tensors.keys(), parameters.keys() ^ tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
