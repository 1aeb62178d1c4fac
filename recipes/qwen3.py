"""Drafters for dense Qwen3 targets in the shape of the released ones (DeepSpec's dspark_qwen3_4b, 8b and 14b)."""

from megatron_dspark.training.settings import DraftSettings, OptimizerSettings, TrainSettings

MASK_TOKEN_ID = 151669
"""The first id behind the tokenizer's, inside the padded vocabulary; the released drafters use it."""


def dense() -> TrainSettings:
    """Five layers, blocks of seven, five taps; every size that depends on the target is read from its folder.

    For GPUs: bf16, packed rows, optimizer state sharded over data-parallel ranks. It has never been run by us at this
    size: choose `steps` and `global_batch_size` for your data, and where a target does not fit beside its draft, split
    both with `parallel.tensor` and `parallel.sequence`.
    """
    return TrainSettings(
        steps=20_000,
        global_batch_size=256,
        micro_batch_size=2,
        max_length=4096,
        num_anchors=512,
        packing=True,
        precision="bf16",
        recompute=True,
        validation_interval=500,
        save_interval=500,
        draft=DraftSettings(num_layers=5, block_size=7, mask_token_id=MASK_TOKEN_ID, markov_rank=256),
        optimizer=OptimizerSettings(distributed=True),
    )
