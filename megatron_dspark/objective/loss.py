"""The DSpark loss: weighted cross-entropy, L1 and confidence, as Megatron-Core's (numerator, num_tokens, report).

Paper (arXiv:2607.05147): slot k of a block weighs w_k = exp(-k / loss_decay_gamma), and its loss is
0.1 CE + 0.9 L1 + 1.0 BCE(confidence, accept). The mean is over supervised slots, or over their weights as in DeepSpec.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.fused import vocab_parallel_ce_l1
from megatron_dspark.objective.metrics import build_report

NORMALIZERS = ("tokens", "weights")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the loss weighs, and what it is divided by.

    Attributes:
        block_size: slots of a block (γ in the paper).
        vocab_size: true size of the vocabulary, without padding.
        ce_loss_weight: weight of the cross-entropy against the label.
        l1_loss_weight: weight of the L1 distance between draft and teacher (sum over the vocabulary, never halved).
        confidence_loss_weight: weight of the confidence head's cross-entropy against the accept probability; 0 when the
            draft has no confidence head.
        loss_decay_gamma: slot k weighs exp(-k / loss_decay_gamma); None weighs all slots alike.
        loss_normalizer: "tokens" divides by the number of supervised slots, "weights" by the sum of their weights.
    """

    block_size: int
    vocab_size: int
    ce_loss_weight: float = 0.1
    l1_loss_weight: float = 0.9
    confidence_loss_weight: float = 1.0
    loss_decay_gamma: float | None = 4.0
    loss_normalizer: str = "tokens"

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise DSparkError(f"{name} is {value!r} and the smallest possible value is 1: give a positive integer.")
        weights = {name: getattr(self, name) for name in ("ce_loss_weight", "l1_loss_weight", "confidence_loss_weight")}
        for name, value in weights.items():
            if not math.isfinite(value) or value < 0:
                raise DSparkError(f"{name} is {value} and must be at least 0 and finite: 0 switches that term off.")
        if not any(weights.values()):
            raise DSparkError(
                "ce_loss_weight, l1_loss_weight and confidence_loss_weight are all 0: raise one, or nothing is trained."
            )
        gamma = self.loss_decay_gamma
        if gamma is not None and not (math.isfinite(gamma) and gamma > 0):
            raise DSparkError(
                f"loss_decay_gamma is {gamma} and must be above 0 and finite: use None to weigh all slots alike."
            )
        if self.loss_normalizer not in NORMALIZERS:
            raise DSparkError(f"loss_normalizer is {self.loss_normalizer!r}: choose one of {', '.join(NORMALIZERS)}.")

    def slot_weights(self, slot: Tensor) -> Tensor:
        """w_k of every slot index, in float64."""
        slot = slot.to(torch.float64)
        return torch.ones_like(slot) if self.loss_decay_gamma is None else (-slot / self.loss_decay_gamma).exp()


@dataclass
class SupervisedRows:
    """The slots of a micro-batch that carry a label, one row each; padding anchors and unsupervised slots are absent.

    Attributes:
        hidden: [R, d] post-norm hidden states of the draft.
        latent: [R, r] what the sequential head hands to W2, or None without such a head.
        confidence_logits: [R] FP32, or None without a confidence head.
        teacher_hidden: [R, d_t] the target's last hidden state after its final norm.
        labels: [R] token ids.
        slot: [R] 0-based position in the block.
        block: [R] index of the row's block, from 0 to num_blocks - 1.
        num_blocks: blocks of the micro-batch, those without a supervised slot included.
        num_anchor_samples: samples that the blocks were drawn from.
    """

    hidden: Tensor
    latent: Tensor | None
    confidence_logits: Tensor | None
    teacher_hidden: Tensor
    labels: Tensor
    slot: Tensor
    block: Tensor
    num_blocks: int
    num_anchor_samples: int


def dspark_loss(
    rows: SupervisedRows,
    lm_head: Tensor,
    teacher_head: Tensor,
    markov_w2: Tensor | None,
    config: ObjectiveConfig,
    tp_group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
    kernel: str = "eager",
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch, not yet divided, with its divisor and its metrics.

    Gradients of the sum of numerators, divided by the sum of divisors over micro-batches and data-parallel ranks, are
    those of the full batch. The logged loss is the same quotient. Every rank of `tp_group` returns the same values,
    and complete gradients of hidden, latent and confidence logits.

    Args:
        rows: the supervised slots; there may be none.
        lm_head: [V_pad/tp, d] this rank's rows of the draft's LM head.
        teacher_head: [V_pad/tp, d_t] this rank's rows of the target's LM head, `lm_head` itself while that is frozen.
        markov_w2: [V_pad/tp, r], None without a sequential head.
        config: weights and normaliser.
        tp_group: ranks that share the vocabulary.
        chunk_bytes: memory for the logits in flight (see `vocab_parallel_ce_l1`).
        kernel: "eager" or "compiled" (see `vocab_parallel_ce_l1`).

    Returns:
        numerator: scalar with a gradient.
        num_tokens: the divisor. "tokens": int32, the number of supervised slots, which Megatron-Core's schedules take
            as it is. "weights": float64, the sum of their weights, which travels in a `FractionalDivisor`.
        report: metric name -> [numerator, denominator], float64, to be added up and divided at the end.

    Raises:
        DSparkError: shapes that do not belong together, a confidence weight without confidence logits, a teacher
            head that is being trained.
    """
    if rows.confidence_logits is None and config.confidence_loss_weight > 0:
        raise DSparkError(
            f"confidence_loss_weight is {config.confidence_loss_weight} but the draft has no confidence logits: "
            "set confidence_loss_weight to 0 or enable the confidence head."
        )
    if teacher_head.requires_grad and torch.is_grad_enabled() and teacher_head is lm_head:
        raise DSparkError(
            "teacher_head is the trained lm_head, but a teacher must not change: pass the target's own LM head."
        )
    weight = config.slot_weights(rows.slot)
    terms = vocab_parallel_ce_l1(
        rows.hidden,
        rows.latent,
        lm_head,
        markov_w2,
        rows.teacher_hidden,
        teacher_head,
        rows.labels,
        config.ce_loss_weight * weight,
        config.l1_loss_weight * weight,
        vocab_size=config.vocab_size,
        tp_group=tp_group,
        chunk_bytes=chunk_bytes,
        kernel=kernel,
    )
    numerator, confidence = terms.loss, None
    if rows.confidence_logits is not None:
        logits = rows.confidence_logits.to(terms.accept.dtype)
        confidence = F.binary_cross_entropy_with_logits(logits, terms.accept, reduction="none")
        numerator = numerator + config.confidence_loss_weight * (weight.to(confidence.dtype) * confidence).sum()
    if config.loss_normalizer == "tokens":
        num_tokens = torch.tensor(rows.labels.numel(), dtype=torch.int32, device=numerator.device)
    else:
        num_tokens = weight.sum()
    report = build_report(rows, terms, weight, config.block_size, confidence)
    report["loss"] = torch.stack([numerator.detach().to(torch.float64), num_tokens.to(torch.float64)])
    return numerator, num_tokens, report


class FractionalDivisor:
    """Carries a divisor that is no integer past Megatron-Core's token counter.

    Megatron-Core's schedules add `num_tokens` into an int32 counter and hand the sum to
    `config.finalize_model_grads_func`, which divides the gradients by it after summing it over the data-parallel
    group; only the counter is bound to integers. So the loss function returns `divisor.count(num_tokens)`, and the
    configuration gets `divisor` itself as `finalize_model_grads_func`, on every rank, those of earlier pipeline
    stages included.
    """

    def __init__(self, finalize_model_grads: Callable[..., Any]) -> None:
        self._finalize = finalize_model_grads
        self._total: Tensor | None = None

    def count(self, num_tokens: Tensor) -> Tensor:
        """Add a micro-batch's divisor to this step's; return the integer for Megatron-Core's counter.

        Evaluation (no gradients) changes nothing, since nothing is divided there.
        """
        if torch.is_grad_enabled():
            self._total = num_tokens if self._total is None else self._total + num_tokens
        return num_tokens.new_zeros((), dtype=torch.int32)

    def __call__(self, model: list[Any], num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Finish the gradients as Megatron-Core does, dividing by the collected sum instead of the counter."""
        if num_tokens is None:
            raise DSparkError("calculate_per_token_loss is False but the loss is a sum: set it to True.")
        total = num_tokens.new_zeros((), dtype=torch.float64) if self._total is None else self._total
        self._total = None
        return self._finalize(model, total, *args, **kwargs)
