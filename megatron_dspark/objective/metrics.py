"""What a step is judged by, every metric as a [numerator, denominator] that adds up over steps and ranks.

Accept rates and agreement are plain means over supervised slots; losses and the confidence head's errors are weighted
with the slot weights, as in DeepSpec. tau is the expected number of tokens per verification, bonus token included.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dspark.errors import DSparkError

if TYPE_CHECKING:
    from megatron_dspark.objective.fused import VocabTerms
    from megatron_dspark.objective.loss import SupervisedRows


def build_report(
    rows: "SupervisedRows", terms: "VocabTerms", weight: Tensor, block_size: int, confidence: Tensor | None
) -> dict[str, Tensor]:
    """Metrics of one micro-batch, except the loss itself.

    The names depend on `block_size` and on whether there is a confidence head, never on the data, so that ranks and
    steps can be added up.

    Args:
        rows: the supervised slots.
        terms: their CE, L1, accept probability and agreement.
        weight: [R] float64 slot weights.
        block_size: slots of a block.
        confidence: [R] cross-entropy of the confidence head, None without one.

    Returns:
        name -> float64 [numerator, denominator]:
        ce_loss, l1_loss, confidence_loss: means weighted with `weight`.
        accept_rate, top1_agreement and both with @k: means over supervised slots, all or those at slot k.
        tau: over blocks with a supervised slot, 1 + sum_k prod_{j<=k} accept_j.
        confidence_abs_error, confidence_bias: |c - accept| and c - accept, with c = sigmoid(confidence logit).
        confidence_prefix_bias: the same for the products over the block up to the slot.
        supervised_slots_per_block, anchors_per_sample: means over all blocks, over all samples.
    """
    accept = terms.accept.detach().to(torch.float64)
    agree = terms.top1_agree.to(torch.float64)
    total_weight = weight.sum()
    count = torch.full((), accept.numel(), dtype=torch.float64, device=accept.device)
    slot, ones = rows.slot.long(), torch.ones_like(accept)

    def by_slot(values: Tensor) -> Tensor:
        return values.new_zeros(block_size).index_add_(0, slot, values)

    def by_block(values: Tensor) -> Tensor:
        """[num_blocks, block_size] with 0 where no slot is supervised, which ends the products below."""
        return values.new_zeros(rows.num_blocks, block_size).index_put_((rows.block.long(), slot), values)

    def weighted(values: Tensor) -> Tensor:
        return torch.stack([(weight * values.detach()).sum(), total_weight])

    slots = by_slot(ones)
    prefix = by_block(accept).cumprod(-1)
    used_blocks = by_block(ones).amax(-1).sum() if rows.num_blocks else count
    report = {
        "ce_loss": weighted(terms.ce),
        "l1_loss": weighted(terms.l1),
        "accept_rate": torch.stack([accept.sum(), count]),
        "top1_agreement": torch.stack([agree.sum(), count]),
        "tau": torch.stack([used_blocks + prefix.sum(), used_blocks]),
        "supervised_slots_per_block": torch.stack([count, torch.full_like(count, rows.num_blocks)]),
        "anchors_per_sample": torch.stack(
            [torch.full_like(count, rows.num_blocks), torch.full_like(count, rows.num_anchor_samples)]
        ),
    }
    for name, values in (("accept_rate", accept), ("top1_agreement", agree)):
        report |= {f"{name}@{k}": pair for k, pair in enumerate(torch.stack([by_slot(values), slots], 1).unbind())}
    if confidence is not None and rows.confidence_logits is not None:
        error = rows.confidence_logits.detach().to(torch.float64).sigmoid() - accept
        prefix_error = by_block(error + accept).cumprod(-1) - prefix
        report["confidence_loss"] = weighted(confidence)
        report["confidence_abs_error"] = weighted(error.abs())
        report["confidence_bias"] = weighted(error)
        report["confidence_prefix_bias"] = weighted(prefix_error[rows.block.long(), slot])
    return report


def reduce_report(reports: Iterable[dict[str, Tensor]], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Metrics of a log window over all its micro-batches and data-parallel ranks, with one all-reduce.

    Args:
        reports: what `dspark_loss` returned for each micro-batch of the window, on this rank.
        group: data-parallel ranks (with context parallelism: both); None when there is one rank only.

    Returns:
        name -> sum of numerators / sum of denominators. NaN where nothing was measured (a slot that no block reached).

    Raises:
        DSparkError: no reports, or reports of different metrics.
    """
    reports = list(reports)
    if not reports:
        raise DSparkError("there are 0 reports to reduce and at least 1 is needed: log after a micro-batch has run.")
    names = sorted(reports[0])
    for report in reports:
        if sorted(report) != names:
            raise DSparkError(
                f"one report has the metrics {names} and another {sorted(report)}: reduce reports of one objective."
            )
    sums = torch.stack([torch.stack([report[name] for name in names]) for report in reports]).sum(0)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return dict(zip(names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
