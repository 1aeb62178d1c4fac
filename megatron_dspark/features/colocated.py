"""Colocated capture: the frozen target runs in the training job, without its LM head."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.blocks import document_positions
from megatron_dspark.context_shards import shard_context
from megatron_dspark.features.pipeline import join_payload, split_payload
from megatron_dspark.features.target_attention import (
    DocumentRuns,
    PositionedRotary,
    document_runs,
    with_document_attention,
)


@dataclass(frozen=True)
class TargetFeatures:
    """Features of a micro-batch.

    Attributes:
        taps: [S, B, m·d] outputs of the tapped layers, concatenated in tap order.
        final_hidden: [S, B, d] last hidden state after the target's final norm.
    """

    taps: Tensor
    final_hidden: Tensor


class FrozenTarget(MegatronModule):
    """This rank's part of a Megatron-Core GPTModel that only gives features: no gradient, no logits.

    Tap i is the residual stream after decoder layer i, before any final norm; tap −1 is the embedding output. Ids are
    the whole target's on every pipeline stage: a stage captures those of its own layers and hands the earlier ones on.
    """

    def __init__(
        self,
        model: MegatronModule,
        target_layer_ids: list[int],
        tp_group: torch.distributed.ProcessGroup | None = None,
        cp_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model.config)
        self.model = model.requires_grad_(False).eval()
        self.tp_group, self.cp_group = tp_group, cp_group
        model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb)
        # Megatron-Core numbers layers from 1, over all stages.
        modules = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        self.earlier_taps = 0 if model.pre_process else sum(tap < min(modules) for tap in target_layer_ids)
        if model.pre_process:
            modules[-1] = model.embedding
        self.own_taps = [tap for tap in target_layer_ids if tap in modules]
        self._captured: dict[int, Tensor] = {}
        for tap in self.own_taps:
            modules[tap].register_forward_hook(lambda _module, _inputs, output, tap=tap: self._keep(tap, output))

    def _keep(self, tap: int, output: Any) -> None:
        self._captured[tap] = output[0] if isinstance(output, tuple) else output

    def capture(
        self, input_ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> TargetFeatures:
        """Run a target of one pipeline stage over `input_ids` [B, S]; under CP give the features of this rank's rows.

        Args:
            input_ids: [B, S]; padding stands at the end of a row, where causal attention keeps it from the rest.
            positions: [B, S] or None to count from the start of each document.
            documents: [B, S] documents of packed rows, −1 on padding; None for one document a row.
        """
        features = self.run_stage(input_ids, positions, documents)
        assert isinstance(features, TargetFeatures)
        return features

    @torch.no_grad()
    def run_stage(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor | TargetFeatures:
        """Run this pipeline stage's layers over a micro-batch.

        Args:
            input_ids: [B, S], the same on every stage.
            positions: see `capture`.
            documents: see `capture`.
            received: the previous stage's payload (see `features.pipeline`), None on the first stage.

        Returns:
            The features on the last stage, the next stage's payload on the others.
        """
        input_ids, positions, runs = self._lay_out(input_ids, positions, documents)
        length = input_ids.shape[1]
        if self.config.sequence_parallel:
            # Sequence-parallel ranks hold equally many rows.
            missing = -length % self.config.tensor_model_parallel_size
            input_ids, positions = (torch.nn.functional.pad(rows, (0, missing)) for rows in (input_ids, positions))
            if self.model.rotary_pos_emb.positions is not None:
                self.model.rotary_pos_emb.positions = positions
        taps: list[Tensor] = []
        if received is not None:
            hidden, taps = split_payload(received, self.config.hidden_size, self.earlier_taps)
            self.model.set_input_tensor(hidden)
        self._captured.clear()
        hidden = self.model(input_ids, positions, runs, output_processor=lambda hidden_states, **_: hidden_states)
        taps += [self._captured[tap] for tap in self.own_taps]
        self._captured.clear()
        if not self.model.post_process:
            return join_payload(hidden, taps)
        return TargetFeatures(
            taps=self._whole_rows(torch.cat(taps, dim=-1), length), final_hidden=self._whole_rows(hidden, length)
        )

    def _whole_rows(self, rows: Tensor, length: int) -> Tensor:
        """Return [S, B, …] from this rank's rows: the draft indexes any row, whichever rank computed it."""
        if not self.config.sequence_parallel:
            return rows
        whole = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=self.tp_group)
        return whole[:length]

    def _lay_out(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, DocumentRuns | None]:
        """Return this rank's ids and positions, and what attention needs to know about documents and other ranks."""
        rotary, split = self.model.rotary_pos_emb, self.cp_group is not None and self.cp_group.size() > 1
        if documents is None and positions is None and not split:
            rotary.positions = None
            return input_ids, torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids), None
        documents = torch.zeros_like(input_ids) if documents is None else documents
        positions = document_positions(documents) if positions is None else positions
        rotary.length, shard = input_ids.shape[1], None
        if split:
            shard = shard_context(documents, self.cp_group.size(), self.cp_group.rank())
            input_ids, positions = shard.select(input_ids), shard.select(positions)
        rotary.positions = positions
        return input_ids, positions, document_runs(documents, shard, self.cp_group)


def load_target(
    folder: str | Path,
    target_layer_ids: list[int],
    transformer: TransformerConfig,
    pg_collection: ProcessGroupCollection,
) -> list[FrozenTarget]:
    """Load a Hugging Face Llama or Qwen3 dense folder into Megatron-Core through Megatron-Bridge.

    Every rank loads the layers of its own pipeline stages alone, one `FrozenTarget` for each.

    Args:
        folder: the target's folder, read and checked by the caller (`targets.folder.read_target_config`,
            `targets.computable.check_computable`, `parallel_rules.check_target_split`): a job refuses before it has
            process groups.
        target_layer_ids: taps to capture.
        transformer: the draft's config: the target takes its precision, parallel sizes and implementation.
        pg_collection: this rank's groups (Megatron-Core's parallel state must be initialised to the same sizes).
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec

    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = transformer.tensor_model_parallel_size
    provider.sequence_parallel = transformer.sequence_parallel
    provider.pipeline_model_parallel_size = transformer.pipeline_model_parallel_size
    provider.virtual_pipeline_model_parallel_size = transformer.virtual_pipeline_model_parallel_size
    provider.pipeline_dtype = transformer.params_dtype
    # Tensor-parallel ranks hold equally many rows of the vocabulary, the last one's filled up with padding.
    provider.should_pad_vocab = bool(provider.vocab_size % transformer.tensor_model_parallel_size)
    provider.make_vocab_size_divisible_by = 1
    provider.params_dtype = transformer.params_dtype
    provider.bf16, provider.fp16 = transformer.bf16, transformer.fp16
    local = transformer.transformer_impl == "local"
    if local:
        _use_plain_modules(provider)
    if local and transformer.sequence_parallel:
        provider.transformer_layer_spec = plain_block_spec
    else:
        layer_spec = local_layer_spec if local else provider.transformer_layer_spec
        provider.transformer_layer_spec = lambda config: with_document_attention(layer_spec(config))
    # Transformer Engine's fused kernel takes one table of angles for all rows, and packed rows have their own.
    provider.apply_rope_fusion = False
    provider.finalize()
    with _no_bar_in_a_pipe():
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=not platform.has_cuda(),
            mixed_precision_wrapper=None,
            pg_collection=pg_collection,
        )
    dtype = transformer.params_dtype
    return [FrozenTarget(model.to(dtype), target_layer_ids, pg_collection.tp, pg_collection.cp) for model in chunks]


@contextlib.contextmanager
def _no_bar_in_a_pipe() -> Iterator[None]:
    """Bridge draws its loading bar on rich's global console, also where no terminal is."""
    console = rich.get_console()
    before, console.quiet = console.quiet, console.quiet or not console.is_terminal
    try:
        yield
    finally:
        console.quiet = before


def _use_plain_modules(provider: Any) -> None:
    """Build the target without Transformer Engine and without fused kernels."""
    provider.transformer_impl = "local"
    for fusion in (
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "apply_rope_fusion",
    ):
        setattr(provider, fusion, False)


class PlainNorm:
    """Makes the norm that Megatron-Core's own wrapper makes, and refuses under sequence parallelism.

    A frozen norm needs nothing for it but to be applied to the rows at hand.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:  # type: ignore[misc]
        """Return a norm over the last `hidden_size` features."""
        return torch.nn.RMSNorm(hidden_size, eps=eps)


def plain_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return one stage's layers, with norms that work under sequence parallelism."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    layer = with_document_attention(local_layer_spec(config))
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = PlainNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = PlainNorm
        parts.self_attention.submodules.k_layernorm = PlainNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=PlainNorm
    )
