"""Colocated capture: the frozen target runs in the training job, without its LM head."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.blocks import document_positions
from megatron_dspark.context_shards import shard_context
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.target_attention import (
    DocumentRuns,
    PositionedRotary,
    document_runs,
    with_document_attention,
)
from megatron_dspark.targets.folder import read_target_config


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
    """A Megatron-Core GPTModel that only gives features: no gradient, no logits.

    Tap i is the residual stream after decoder layer i, before any final norm; tap −1 is the embedding output.
    """

    def __init__(self, model: MegatronModule, target_layer_ids: list[int], cp_group: Any = None) -> None:
        super().__init__(model.config)
        self.model = model.requires_grad_(False).eval()
        self.cp_group = cp_group
        model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb)
        self.target_layer_ids = list(target_layer_ids)
        self._captured: dict[int, Tensor] = {}
        for tap in self.target_layer_ids:
            module = model.embedding if tap == -1 else model.decoder.layers[tap]
            module.register_forward_hook(lambda _module, _inputs, output, tap=tap: self._keep(tap, output))

    def _keep(self, tap: int, output: Any) -> None:
        self._captured[tap] = output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def capture(
        self, input_ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> TargetFeatures:
        """Run the target over `input_ids` [B, S] and return its features, of this rank's rows alone under CP.

        Args:
            input_ids: [B, S]; padding stands at the end of a row, where causal attention keeps it from the rest.
            positions: [B, S] or None to count from the start of each document.
            documents: [B, S] documents of packed rows, −1 on padding; None for one document a row.
        """
        input_ids, positions, runs = self._lay_out(input_ids, positions, documents)
        self._captured.clear()
        final_hidden = self.model(input_ids, positions, runs, output_processor=lambda hidden_states, **_: hidden_states)
        taps = torch.cat([self._captured[tap] for tap in self.target_layer_ids], dim=-1)
        self._captured.clear()
        return TargetFeatures(taps=taps, final_hidden=final_hidden)

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
) -> FrozenTarget:
    """Load a Hugging Face Llama or Qwen3 dense folder into Megatron-Core through Megatron-Bridge.

    Args:
        folder: the target's folder.
        target_layer_ids: taps to capture.
        transformer: the draft's config: the target takes its precision, parallel sizes and implementation.
        pg_collection: this rank's groups (Megatron-Core's parallel state must be initialised to the same sizes).

    Raises:
        DSparkError: the target cannot be split over the tensor-parallel ranks, or is of another architecture.
    """
    config = read_target_config(folder)
    size = transformer.tensor_model_parallel_size
    for name, value in (
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
    ):
        if value % size:
            raise DSparkError(
                f"the target at {folder} has {name} {value}, which tensor_model_parallel_size {size} does not divide; "
                "choose a size that does, or train from features computed beforehand"
            )
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec

    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = size
    provider.sequence_parallel = False
    provider.params_dtype = transformer.params_dtype
    provider.bf16, provider.fp16 = transformer.bf16, transformer.fp16
    if transformer.transformer_impl == "local":
        _use_plain_modules(provider, local_layer_spec)
    layer_spec = provider.transformer_layer_spec
    provider.transformer_layer_spec = lambda config: with_document_attention(layer_spec(config))
    # Transformer Engine's fused kernel takes one table of angles for all rows, and packed rows have their own.
    provider.apply_rope_fusion = False
    provider.finalize()
    with _no_bar_in_a_pipe():
        (model,) = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=not platform.has_cuda(),
            mixed_precision_wrapper=None,
            pg_collection=pg_collection,
        )
    if transformer.bf16 or transformer.fp16:
        model = model.to(torch.bfloat16 if transformer.bf16 else torch.float16)
    elif transformer.params_dtype == torch.float64:
        model = model.double()
    return FrozenTarget(model, target_layer_ids, pg_collection.cp)


@contextlib.contextmanager
def _no_bar_in_a_pipe() -> Iterator[None]:
    """Bridge draws its loading bar on rich's global console, also where no terminal is."""
    console = rich.get_console()
    before, console.quiet = console.quiet, console.quiet or not console.is_terminal
    try:
        yield
    finally:
        console.quiet = before


def _use_plain_modules(provider: Any, layer_spec: Any) -> None:
    """Build the target without Transformer Engine and without fused kernels."""
    provider.transformer_layer_spec = layer_spec
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
