"""The forward step of a training job."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dspark.data.sampler import MicroBatch
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.colocated import TargetFeatures
from megatron_dspark.objective.loss import FractionalDivisor
from megatron_dspark.platform import device


def forward_step_dspark(
    data_iterator: Iterator[MicroBatch | tuple[MicroBatch, TargetFeatures]],
    model: Any,
    return_schedule_plan: bool = False,
) -> tuple[Tensor, partial | None]:
    """Run one micro-batch; the function that Megatron-Core's schedules and Megatron-Bridge's `pretrain` call.

    Args:
        data_iterator: yields micro-batches, or pairs of a micro-batch and its features; without features the model
            captures them.
        model: `DSparkModel`, possibly wrapped in DDP and mixed precision.
        return_schedule_plan: Megatron-Core's overlapped mixture-of-experts schedule; the draft has none.

    Returns:
        The loss numerator (scalar, unnormalised) and a loss function that turns it into Megatron-Core's triple
        (numerator, num_tokens, report of [numerator, denominator] pairs). On a pipeline stage without the draft: the
        next stage's payload, and no loss function.
    """
    if return_schedule_plan:
        raise ValueError("return_schedule_plan is for mixture-of-experts overlap, which the draft has no use for")
    batch, features = next(data_iterator), None
    if isinstance(batch, tuple):
        batch, features = batch
    where = device()
    output = model(
        input_ids=batch.input_ids.to(where),
        loss_mask=batch.loss_mask.to(where),
        anchors=batch.anchors.to(where),
        taps=None if features is None else features.taps,
        final_hidden=None if features is None else features.final_hidden,
        documents=None if batch.documents is None else batch.documents.to(where),
    )
    if isinstance(output, Tensor):
        return output, None
    numerator, num_tokens, report = output
    if num_tokens.is_floating_point():
        # The sum of slot weights is no whole number, and Megatron-Core counts in whole numbers only.
        divisor = get_model_config(model).finalize_model_grads_func
        if not isinstance(divisor, FractionalDivisor):
            raise DSparkError(
                "loss_normalizer='weights' needs finalize_model_grads_func to be a FractionalDivisor; set it on the "
                "model's config, or use loss_normalizer='tokens'"
            )
        num_tokens = divisor.count(num_tokens)
    return numerator, partial(_loss_triple, num_tokens, report)


def _loss_triple(
    num_tokens: Tensor, report: dict[str, Tensor], numerator: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return numerator, num_tokens, report
