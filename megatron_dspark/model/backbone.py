"""The parallel backbone's layers, assembled from Megatron-Core's specs."""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dspark.model.attention import DraftAttention, DraftAttentionSubmodules
from megatron_dspark.model.norm import DraftRMSNorm


def linear_backend(config: TransformerConfig) -> BackendSpecProvider:
    """Return which linears the draft is built from: Transformer Engine's on request, else Megatron-Core's own."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return LocalSpecProvider()


def draft_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of one dense draft layer: attention over context and block, then a gated MLP.

    Norms stay separate modules under every backend, so that parameter names do not depend on it.
    """
    backend = linear_backend(config)
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=partial(DraftRMSNorm, split_rows=True),
            self_attention=ModuleSpec(
                module=DraftAttention,
                submodules=DraftAttentionSubmodules(
                    linear_q=column,
                    linear_k=column,
                    linear_v=column,
                    linear_proj=row,
                    q_layernorm=DraftRMSNorm,
                    k_layernorm=DraftRMSNorm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=partial(DraftRMSNorm, split_rows=True),
            mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
