"""Attention of a draft layer: block slots ask, the target's context and the block itself answer."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_dspark.model.block_attention import Attend


@dataclass(frozen=True)
class DraftAttentionInputs:
    """What every draft layer attends to beside its own block.

    It travels through Megatron-Core's TransformerLayer in the place of the attention mask, which the layer hands on
    without looking inside.

    Attributes:
        context: [S, B, d] context features c, the same for every layer.
        attend: the attention of this micro-batch's blocks, see `block_attention`.
        block_rotation: cosine and sine, each [A·γ, B, 1, head_dim], at the slots' positions.
        context_rotation: cosine and sine, each [S, B, 1, head_dim], at the context rows' positions.
    """

    context: Tensor
    attend: Attend
    block_rotation: tuple[Tensor, Tensor]
    context_rotation: tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, each [n, B, 1, head_dim], for `positions` [B, n].

    Inverse frequencies are rounded to FP32, as every engine computes them; angles are formed in FP32 (float64 when
    `dtype` is), and both halves of the head repeat the same angles (Hugging Face's rotate-half convention).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    wide = torch.promote_types(dtype, torch.float32)
    inverse_frequencies = (1.0 / base**exponents).to(wide)
    angles = positions.t()[..., None, None].to(wide) * inverse_frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to `heads` [n, B, heads, head_dim]."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


@dataclass
class DraftAttentionSubmodules:
    """Parts of a draft attention: the column- and row-parallel linears and the norms over one head."""

    linear_q: Any
    linear_k: Any
    linear_v: Any
    linear_proj: Any
    q_layernorm: Any
    k_layernorm: Any


class DraftAttention(MegatronModule):
    """Grouped-query attention with keys and values from the context and from the block.

    Context rows pass through this layer's own key and value projections, key norm and rotary positions, but not
    through the layer's input norm (arXiv:2607.05147, section on the parallel backbone). Queries, keys and values
    are separate column-parallel linears because context rows need no queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DraftAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.head_dim = config.kv_channels
        shared = dict(config=config, bias=config.add_qkv_bias, is_expert=False, tp_group=pg_collection.tp)

        def column(spec: Any, heads: int) -> MegatronModule:
            return build_module(
                spec,
                config.hidden_size,
                heads * self.head_dim,
                init_method=config.init_method,
                gather_output=False,
                skip_bias_add=False,
                **shared,
            )

        self.linear_q = column(submodules.linear_q, config.num_attention_heads)
        self.linear_k = column(submodules.linear_k, config.num_query_groups)
        self.linear_v = column(submodules.linear_v, config.num_query_groups)
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )
        self.q_layernorm = build_module(submodules.q_layernorm, config, self.head_dim, config.layernorm_epsilon)
        self.k_layernorm = build_module(submodules.k_layernorm, config, self.head_dim, config.layernorm_epsilon)

    def forward(
        self, hidden_states: Tensor, attention_mask: DraftAttentionInputs, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the block's slots.

        Args:
            hidden_states: [A·γ, B, d] normed slots.
            attention_mask: the context, attention and rotary tables of this micro-batch.

        Returns:
            The output [A·γ, B, d] and the output bias (None without biases), added by the layer.
        """
        inputs = attention_mask
        attended = inputs.attend(
            rotate(self.q_layernorm(self._heads(self.linear_q, hidden_states)), inputs.block_rotation),
            rotate(self.k_layernorm(self._heads(self.linear_k, inputs.context)), inputs.context_rotation),
            self._heads(self.linear_v, inputs.context),
            rotate(self.k_layernorm(self._heads(self.linear_k, hidden_states)), inputs.block_rotation),
            self._heads(self.linear_v, hidden_states),
        )
        return self.linear_proj(attended.flatten(2))

    def _heads(self, linear: MegatronModule, rows: Tensor) -> Tensor:
        projected, _ = linear(rows)
        return projected.unflatten(-1, (-1, self.head_dim))
