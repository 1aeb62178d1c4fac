"""Drafters for SmolLM2-135M-Instruct, the bundled demonstration target (Llama architecture, tied embeddings)."""

from megatron_dspark.targets.smollm2 import SMOLLM2_MASK_TOKEN_ID
from megatron_dspark.training.settings import CheckpointSettings, DraftSettings, OptimizerSettings, TrainSettings


def quickstart() -> TrainSettings:
    """Two draft layers on one narrow domain: trains in minutes on two CPU cores.

    Blocks of five: on a CPU every row that the target verifies costs time.
    """
    return TrainSettings(
        steps=200,
        global_batch_size=4,
        micro_batch_size=2,
        max_length=320,
        num_anchors=12,
        precision="fp32",
        feature_memory_gib=2.0,
        log_interval=10,
        validation_interval=50,
        validation_samples=16,
        save_interval=50,
        checkpoint=CheckpointSettings(keep_last=2),
        draft=DraftSettings(
            num_layers=2,
            block_size=5,
            target_layer_ids=[1, 8, 14, 21, 27],
            mask_token_id=SMOLLM2_MASK_TOKEN_ID,
            markov_rank=64,
            markov_start="bigrams",
        ),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_share=0.1),
    )


def debug() -> TrainSettings:
    """The quickstart's draft for a handful of steps: does everything work?"""
    settings = quickstart()
    settings.steps = 4
    settings.max_length = 96
    settings.num_anchors = 4
    settings.log_interval = settings.validation_interval = settings.save_interval = 2
    settings.validation_samples = 2
    return settings
