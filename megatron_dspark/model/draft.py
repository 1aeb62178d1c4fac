"""The DSpark draft: taps to context, blocks through the backbone, heads, supervised rows."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megatron_dspark.blocks import NO_ANCHOR, BlockLayout, count_samples, lay_out_blocks, visible_rows
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.context_shards import ContextShard, shard_context
from megatron_dspark.model.attention import DraftAttentionInputs, rotary_tables
from megatron_dspark.model.backbone import draft_layer_spec
from megatron_dspark.model.block_attention import block_attention
from megatron_dspark.model.heads import MARKOV_HEADS, ConfidenceHead, VocabParallelTable
from megatron_dspark.model.norm import DraftRMSNorm
from megatron_dspark.objective.loss import SupervisedRows


class DSparkDraft(MegatronModule):
    """The trainable draft with its frozen replicas of the target's embedding and LM head.

    Parameters are named as Megatron-Core names its own; `hf.mapping` relates them to the released checkpoints' names.
    """

    def __init__(
        self, config: DSparkModelConfig, padded_vocab_size: int, pg_collection: ProcessGroupCollection
    ) -> None:
        transformer = config.transformer
        super().__init__(transformer)
        self.dspark_config = config
        self.padded_vocab_size = padded_vocab_size
        self.pg_collection = pg_collection

        def table() -> VocabParallelTable:
            return VocabParallelTable(
                padded_vocab_size, transformer.hidden_size, config.vocab_size, transformer, pg_collection
            )

        self.embed_tokens = table()
        self.embed_tokens.weight.requires_grad_(config.train_embeddings)
        # fc reads whole rows and gives whole rows, under sequence parallelism too; Transformer Engine's column-parallel
        # linear cannot gather its output.
        whole_rows = copy.copy(transformer)
        whole_rows.sequence_parallel = False
        self.fc = build_module(
            LocalSpecProvider().column_parallel_linear(),
            config.tap_width,
            transformer.hidden_size,
            config=whole_rows,
            init_method=transformer.init_method,
            bias=False,
            gather_output=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        self.hidden_norm = DraftRMSNorm(transformer, transformer.hidden_size, transformer.layernorm_epsilon)
        self.layers = torch.nn.ModuleList(
            build_module(
                draft_layer_spec(transformer),
                config=transformer,
                layer_number=number,
                pg_collection=pg_collection,
                # The draft lives on one pipeline stage: its layers are numbered from 1 there.
                add_layer_offset=False,
            )
            for number in range(1, transformer.num_layers + 1)
        )
        self.norm = DraftRMSNorm(transformer, transformer.hidden_size, transformer.layernorm_epsilon)
        self.lm_head = table()
        self.lm_head.weight.requires_grad_(config.train_lm_head)
        if config.train_lm_head:
            # A head that is trained drifts from the target's, and the teacher must not follow it.
            self.teacher_lm_head = table()
            self.teacher_lm_head.weight.requires_grad_(False)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](
            transformer, padded_vocab_size, config.vocab_size, config.markov_rank, pg_collection
        )
        self.confidence_head = (
            ConfidenceHead(transformer, config.confidence_width) if config.enable_confidence_head else None
        )

    @property
    def teacher_head_weight(self) -> Tensor:
        """This rank's rows of the target's LM head: [V/tp, d]."""
        head = self.teacher_lm_head if self.dspark_config.train_lm_head else self.lm_head
        return head.weight.detach()

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        anchors: Tensor,
        taps: Tensor,
        final_hidden: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> SupervisedRows:
        """Run every block of a micro-batch and return its supervised rows.

        Args:
            input_ids: [B, S].
            loss_mask: [B, S] bool.
            anchors: [B, A], −1 for padding.
            taps: [S, B, m·d] outputs of the target layers, in tap order; under context parallelism this rank's rows.
            final_hidden: [S, B, d] the target's last hidden state after its final norm; like `taps`.
            positions: [B, S] rotary positions; None for 0 … S − 1.
            documents: [B, S] documents of packed rows, −1 on padding; None for one document a row.

        Returns:
            The R supervised slots, as `objective.loss.SupervisedRows`: those of this rank's anchors.

        Raises:
            DSparkError: under context parallelism, a block's teacher is on another rank than its anchor.
        """
        shard = None
        seen = visible_rows(anchors, input_ids.shape[1], documents)
        if self.pg_collection.cp.size() > 1:
            documents = torch.zeros_like(input_ids) if documents is None else documents
            shard = shard_context(documents, self.pg_collection.cp.size(), self.pg_collection.cp.rank())
        # Sequence-parallel ranks hold equally many slots.
        multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        layout = lay_out_blocks(
            input_ids,
            loss_mask,
            pad_to_multiple(anchors, multiple, dim=1, value=NO_ANCHOR),
            block_size=self.dspark_config.block_size,
            mask_token_id=self.dspark_config.mask_token_id,
            positions=positions,
            documents=documents,
        )
        if shard is not None:
            layout = shard.own_blocks(layout, multiple)
        hidden = self.block_hidden(layout, taps, positions, documents, shard, seen)
        rows = self.supervised_rows(layout, hidden, final_hidden)
        # Every context-parallel rank has the sample, and metrics are summed over them: one counts it.
        rows.num_anchor_samples = count_samples(loss_mask, documents) if self.pg_collection.cp.rank() == 0 else 0
        return rows

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return every part's sharded state, layer by layer.

        Megatron-Core asks a plain ModuleList for nothing and would take its whole contents for replicated tensors.
        """
        state: dict = {}
        for name, child in self.named_children():
            parts = {f"{name}.{number}.": layer for number, layer in child.named_children()}
            for part, module in (parts if child is self.layers else {f"{name}.": child}).items():
                state.update(
                    sharded_state_dict_default(
                        module, f"{prefix}{part}", sharded_offsets, metadata, tp_group=self.pg_collection.tp
                    )
                )
        return state

    def context_features(self, taps: Tensor) -> Tensor:
        """Return c = RMSNorm(W_fc · taps), [S, B, d], for `taps` [S, B, m·d]."""
        fused, _ = self.fc(taps)
        return self.hidden_norm(fused)

    def block_hidden(
        self,
        layout: BlockLayout,
        taps: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        shard: ContextShard | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the post-norm hidden state of every slot, [B, A, γ, d].

        Args:
            layout: this rank's blocks.
            taps: [S, B, m·d], this rank's rows under context parallelism.
            positions: see `forward`.
            documents: see `forward`.
            shard: which rows those are; None for all.
            seen: [B, S] rows that a block of any rank sees; None to take this rank's blocks.
        """
        batch, blocks, size = layout.input_ids.shape
        # Rows at or after the last anchor are context of no block. Rows that no block sees are cleared, so that
        # whatever stands there (even NaN) stays away from the keys: a masked NaN still spoils a product.
        length = max(int(layout.anchors.max()), 1)
        # Sequence-parallel ranks hold equally many rows: a few that no block sees fill up the last one's.
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        held = length + -length % ranks
        row_positions = torch.arange(held, device=taps.device).expand(batch, -1)
        if positions is not None:
            row_positions = pad_to_multiple(positions, ranks, dim=1, value=0)[:, :held]
        if seen is None:
            seen = visible_rows(layout.padded_anchors, length, documents)
        if shard is None:
            context = self.context_features(torch.where(seen[:, :length].t()[..., None], taps[:length], 0))
        else:
            # Rows of every rank, before any is left out: each takes part, with anchors or without.
            own = self.context_features(torch.where(shard.select(seen).t()[..., None], taps, 0))
            context = shard.gather(own, self.pg_collection.cp)[:length]

        context = pad_to_multiple(context, ranks, dim=0, value=0)
        if documents is not None:
            documents = pad_to_multiple(documents, ranks, dim=1, value=-1)

        embedded = self.embed_tokens(layout.input_ids.view(batch, blocks * size)).transpose(0, 1).contiguous()

        def rotation(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rotary_tables(rows, self.config.kv_channels, self.dspark_config.rotary_base, embedded.dtype)

        inputs = DraftAttentionInputs(
            context=self._split_rows(context),
            attend=block_attention(self.dspark_config.block_attention, layout, held, documents),
            block_rotation=rotation(layout.positions.view(batch, blocks * size)),
            context_rotation=rotation(row_positions),
        )
        hidden = self._run_layers(self._split_rows(embedded), inputs)
        return self.norm(self._whole_rows(hidden)).transpose(0, 1).unflatten(1, (blocks, size))

    def _split_rows(self, rows: Tensor) -> Tensor:
        """Return this rank's share of `rows` under sequence parallelism; every rank's gradient of it is the whole's."""
        if not self.config.sequence_parallel:
            return rows
        return scatter_to_sequence_parallel_region(rows, group=self.pg_collection.tp)

    def _whole_rows(self, rows: Tensor) -> Tensor:
        """Undo `_split_rows`. What follows runs alike on every rank, so the gradient that comes back is split."""
        if not self.config.sequence_parallel:
            return rows
        return gather_from_sequence_parallel_region(
            rows, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )

    def _run_layers(self, hidden: Tensor, inputs: DraftAttentionInputs) -> Tensor:
        for layer in self.layers:
            if self.config.recompute_granularity == "full" and self.training:
                hidden = tensor_parallel.checkpoint(
                    partial(_recomputed_layer, layer, inputs), False, hidden, inputs.context
                )
            else:
                hidden, _ = layer(hidden, attention_mask=inputs)
        return hidden

    def supervised_rows(self, layout: BlockLayout, hidden: Tensor, final_hidden: Tensor) -> SupervisedRows:
        """Run the heads and keep the supervised slots only: others cost nothing in the objective.

        Args:
            layout: the micro-batch's blocks.
            hidden: [B, A, γ, d] post-norm slots.
            final_hidden: [S, B, d] the target's last hidden state.
        """
        batch, blocks, size = layout.supervised.shape
        supervised = layout.supervised.view(batch * blocks, size)
        hidden = hidden.reshape(batch * blocks, size, -1)
        embedding = self.markov_head.embed(layout.previous_ids.view(batch * blocks, size))
        latent = self.markov_head.latent(hidden, embedding)
        block, slot = supervised.nonzero(as_tuple=True)
        rows = block * size + slot
        # Padding anchors are no blocks: metrics count the real ones alone.
        number = layout.valid.view(-1).long().cumsum(0) - 1

        def pick(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, rows)

        sample = block // blocks
        teacher_index = layout.label_rows.view(-1).index_select(0, rows) * batch + sample
        hidden, embedding = pick(hidden), pick(embedding)
        return SupervisedRows(
            hidden=hidden,
            latent=pick(latent),
            confidence_logits=self._confidence(hidden, embedding),
            teacher_hidden=final_hidden.detach().flatten(0, 1).index_select(0, teacher_index),
            labels=layout.labels.view(-1).index_select(0, rows),
            slot=slot,
            block=number.index_select(0, block),
            num_blocks=int(number[-1]) + 1,
            num_anchor_samples=batch,
        )

    def _confidence(self, hidden: Tensor, embedding: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        features = torch.cat([hidden, embedding], dim=-1) if self.dspark_config.confidence_head_with_markov else hidden
        return self.confidence_head(features.detach() if self.dspark_config.detach_confidence_features else features)


def pad_to_multiple(values: Tensor, size: int, dim: int, value: int) -> Tensor:
    """Return `values` with `value` appended along `dim` up to a multiple of `size`; itself when nothing is missing."""
    missing = -values.shape[dim] % size
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_full(shape, value)], dim=dim)


def _recomputed_layer(layer: Any, inputs: DraftAttentionInputs, hidden: Tensor, context: Tensor) -> Tensor:
    # The context is an argument of its own so that recomputation finds its gradient.
    inputs = replace(inputs, context=context)
    output, _ = layer(hidden, attention_mask=inputs)
    return output
