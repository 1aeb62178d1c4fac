"""The module that a training job wraps: the frozen target beside the trainable draft, with the loss folded in."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_dspark.blocks import document_positions
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.features.colocated import FrozenTarget
from megatron_dspark.model.draft import DSparkDraft
from megatron_dspark.objective.loss import dspark_loss


class DSparkModel(MegatronModule):
    """One pipeline stage: the frozen target's layers of that stage, and on the last stage the draft.

    Only the draft is in checkpoints: the target's weights never change and are loaded from its own folder. Stages
    without the draft hold no parameter of it.
    """

    # Megatron-Core's gradient finalisation asks every language model for it.
    share_embeddings_and_output_weights = False

    def __init__(
        self,
        config: DSparkModelConfig,
        padded_vocab_size: int,
        pg_collection: ProcessGroupCollection,
        target: FrozenTarget | None = None,
        vp_stage: int | None = None,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        """Args: `target` is None when features come with the batch; `pre_process` and `post_process` as in GPTModel."""
        super().__init__(config.transformer)
        self.dspark_config = config
        self.pg_collection = pg_collection
        self.vp_stage = vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        self.target = target
        self.draft = DSparkDraft(config, padded_vocab_size, pg_collection) if post_process else None
        self._received: Tensor | None = None
        self.objective_config = config.objective_config()

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        anchors: Tensor,
        taps: Tensor | None = None,
        final_hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Capture features if they did not come with the batch, run the draft, return Megatron-Core's loss triple.

        A stage without the draft runs the target's layers alone and returns the payload of `features.pipeline`.

        Args:
            input_ids: [B, S].
            loss_mask: [B, S] bool.
            anchors: [B, A], −1 for padding.
            taps: [S, B, m·d] when features come with the batch; this rank's rows under context parallelism.
            final_hidden: [S, B, d] when features come with the batch.
            positions: [B, S] rotary positions; None counts from the start of each document.
            documents: [B, S] or None, see `DSparkDraft.forward`.

        Returns:
            (unnormalised numerator, num_tokens, report of [numerator, denominator] pairs).
        """
        if positions is None and documents is not None:
            positions = document_positions(documents)
        if taps is None:
            received, self._received = self._received, None
            features = self.target.run_stage(input_ids, positions, documents, received)
            if isinstance(features, Tensor):
                return features
            taps, final_hidden = features.taps, features.final_hidden
        rows = self.draft(input_ids, loss_mask, anchors, taps, final_hidden, positions, documents)
        return dspark_loss(
            rows,
            lm_head=self.draft.lm_head.weight,
            teacher_head=self.draft.teacher_head_weight,
            markov_w2=self.draft.markov_head.markov_w2.weight,
            config=self.objective_config,
            tp_group=self.pg_collection.tp,
            chunk_bytes=self.dspark_config.objective_chunk_bytes,
            kernel=self.dspark_config.objective_kernel,
        )

    def train(self, mode: bool = True) -> "DSparkModel":
        """Switch the draft between training and evaluation; the target always evaluates."""
        super().train(mode)
        if self.target is not None:
            self.target.eval()
        return self

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous pipeline stage's payload; the schedules call it on the first stage too, with None."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the draft's sharded state alone, nothing on a stage without it."""
        return {} if self.draft is None else self.draft.sharded_state_dict(f"{prefix}draft.", sharded_offsets, metadata)

    def state_dict(self, *args: Any, prefix: str = "", **keywords: Any) -> dict:
        """Return the draft's state alone, so that plain and sharded states name the same tensors."""
        return {} if self.draft is None else self.draft.state_dict(*args, prefix=f"{prefix}draft.", **keywords)

    def load_state_dict(self, state_dict: dict, strict: bool = True, assign: bool = False) -> Any:
        """Load the draft's state; the target is not part of it."""
        if self.draft is None:
            return None
        own = {name.removeprefix("draft."): value for name, value in state_dict.items()}
        return self.draft.load_state_dict(own, strict=strict, assign=assign)
