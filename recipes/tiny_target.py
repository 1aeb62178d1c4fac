"""Drafters for the tiny target of examples/tiny_target: for tests, and for trying tensor parallelism on a laptop."""

from megatron_dspark.training.settings import DraftSettings, OptimizerSettings, TrainSettings

MASK_TOKEN_ID = 3


def small() -> TrainSettings:
    """A drafter that learns the tiny target's recipes in a minute or two."""
    return TrainSettings(
        steps=300,
        global_batch_size=4,
        micro_batch_size=4,
        max_length=256,
        num_anchors=16,
        log_interval=10,
        validation_interval=50,
        validation_samples=16,
        save_interval=50,
        draft=DraftSettings(
            num_layers=2, block_size=7, mask_token_id=MASK_TOKEN_ID, markov_rank=32, initializer_std=0.06
        ),
        optimizer=OptimizerSettings(learning_rate=5e-3, warmup_share=0.1),
    )


def debug() -> TrainSettings:
    """Five steps: does everything work?"""
    settings = small()
    settings.steps, settings.global_batch_size, settings.micro_batch_size = 5, 4, 4
    settings.max_length, settings.num_anchors, settings.validation_samples = 128, 6, 4
    settings.log_interval, settings.validation_interval, settings.save_interval = 2, 3, 3
    return settings
