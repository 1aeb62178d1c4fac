"""The optimizer's step where it may be refused: a gradient that is not finite, and the loss scale of fp16.

In fp16 the loss is multiplied by a scale before the backward, so that small gradients do not vanish. Where the scaled
gradients overflow, Megatron-Core takes no step and lowers the scale: the samples are spent, the learning-rate schedule
stays. That is the scaler at work, and at its lowest scale the end of it.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError


class Update(NamedTuple):
    """What the optimizer did.

    Attributes:
        grad_norm: of the whole model before clipping; None when no step was taken.
        loss_scale: what the loss of this step was multiplied by; None without a loss scale.
        next_loss_scale: the same of the next step.
    """

    grad_norm: float | None
    loss_scale: float | None
    next_loss_scale: float | None


def update(optimizer: Any, step: int, samples: list[str]) -> Update:
    """Take Megatron-Core's optimizer step, or skip it where fp16 overflowed; every rank calls it.

    Args:
        optimizer: Megatron-Core's, its gradients ready.
        step: the number of this step, for the sentences.
        samples: this rank's samples of the step, for the sentences.

    Raises:
        DSparkError: on every rank, when a gradient is not finite and no lower loss scale is left to try.
    """
    scaler = loss_scaler(optimizer)
    before = None if scaler is None else float(scaler.scale)
    updated, grad_norm, _ = optimizer.step()
    after = None if scaler is None else float(scaler.scale)
    if updated and math.isfinite(grad_norm):
        return Update(float(grad_norm), before, after)
    if updated or scaler is None:
        raise DSparkError(
            f"step {step} has a gradient that is not finite; lower the learning rate or look at the data "
            f"(samples {samples})"
        )
    # Stages without the draft have scalers that no checkpoint keeps: those with it decide, and all end together.
    lowest = torch.tensor(
        [bool(optimizer.get_parameters()) and before <= float(scaler.min_scale)],
        dtype=torch.int32,
        device=platform.device(),
    )
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MAX)
    if lowest:
        raise DSparkError(
            f"the gradients of step {step} overflow fp16 at the lowest loss scale, {float(scaler.min_scale):g} "
            f"(optimizer.min_loss_scale); train in bf16 or fp32, lower the learning rate, or look at the data "
            f"(samples {samples})"
        )
    return Update(None, before, after)


def loss_scaler(optimizer: Any) -> DynamicGradScaler | None:
    """Return what scales the loss in fp16, None in every other precision."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scaler = getattr(part, "grad_scaler", None)
        if isinstance(scaler, DynamicGradScaler):
            return scaler
    return None
