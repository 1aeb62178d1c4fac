"""Cross-entropy and L1 between draft and teacher, with both LM heads inside the loop and the vocabulary sharded.

For R supervised rows the logits of draft and teacher are [R, V] tensors, by far the largest of a training step.
They never exist here. The rows are taken a chunk at a time; a chunk forms its logits, both softmaxes, the losses
*and the gradients*, because the weight of every row is already known in the forward pass. What outlives a chunk is
what the caller's tensors have the shape of: gradients of hidden, latent, W2 and (when trained) the LM head.

Per row, with p the draft's and q the teacher's distribution, y the label and s = sign(p - q):

    CE = log(sum exp z) - z_y          L1 = sum_v |p_v - q_v|
    d(a CE + b L1)/dz_v = p_v (a - b D + b s_v) - a [v = y]          with D = sum_v p_v s_v

Tensor parallelism costs two small exchanges a chunk, whatever the vocabulary: first every rank's maximum, sum of
exponentials, label logit and arg-max (one gather of seven numbers a row; the shards' sums are put on one scale
afterwards, so that no round is spent on the maximum alone), then the sums L1 and D, which need the normalised p and
q. With two chunks in flight, the first exchange travels during the previous chunk's gradient products and the
second during the next chunk's logit products.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.chunk import Chunk
from megatron_dspark.objective.compiled import CompiledChunk, check_kernel

# Bytes for the two [rows, V/tp] buffers of the chunks in flight. Larger chunks make better matrix products: on a CPU
# 160 rows of 32,000 are within 10 % of the best, and fewer than 96 rows of 150,000 cost a fifth more; a GPU needs
# thousands of rows a product to be busy.
CHUNK_BYTES_CPU = 40 * 2**20
CHUNK_ROWS_CPU = 96
CHUNK_BYTES_GPU = 2 * 2**30
# On a CPU the element-wise work runs on a few rows at a time, so that they stay in the cache between the passes.
CACHE_BYTES = 3 * 2**20


@dataclass(frozen=True)
class VocabTerms:
    """What the objective needs to know about the vocabulary.

    Attributes:
        loss: scalar, sum over rows of ce_weight * CE + l1_weight * L1; the only one with a gradient.
        ce: [R], cross-entropy of the draft against the label, in nats.
        l1: [R], sum over the vocabulary of |p - q|, between 0 and 2.
        accept: [R], clamp(1 - l1 / 2, 0, 1): the probability that speculative sampling accepts a draft token.
        top1_agree: [R], 1 where the most probable token (the lowest id of equals) is the same, else 0.
        finite: bool scalar, False when any CE or L1 is NaN or infinite; reading it waits for the device.
    """

    loss: Tensor
    ce: Tensor
    l1: Tensor
    accept: Tensor
    top1_agree: Tensor
    finite: Tensor


def vocab_parallel_ce_l1(
    hidden: Tensor,
    latent: Tensor | None,
    lm_head: Tensor,
    markov_w2: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    ce_weight: Tensor,
    l1_weight: Tensor,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
    kernel: str = "eager",
) -> VocabTerms:
    """Weighted cross-entropy and L1 of draft logits `hidden lm_head^T + latent markov_w2^T` against a teacher.

    Every rank of `tp_group` passes the same rows and its own rows [rank * V_pad/tp, (rank + 1) * V_pad/tp) of the
    vocabulary-sized matrices. Rows from `vocab_size` on are padding: they are not read, and their gradient is zero.
    Gradients reach hidden, latent, markov_w2 and lm_head where these require one, never the teacher. Those of hidden
    and latent come back complete and equal on every rank. They are made in the forward pass, so one backward per
    forward is possible; the second one is refused by autograd. Statistics are FP32, or FP64 when an input is FP64.

    Args:
        hidden: [R, d] post-norm hidden states of the draft's supervised rows.
        latent: [R, r] what the sequential head hands to W2, or None when there is no such head.
        lm_head: [V_pad/tp, d] the draft's LM head.
        markov_w2: [V_pad/tp, r], or None together with `latent`.
        teacher_hidden: [R, d_t] the target's last hidden states, after its final norm.
        teacher_head: [V_pad/tp, d_t] the target's LM head; usually `lm_head` itself.
        labels: [R] token ids. One outside [0, vocab_size) makes its row, and so the loss, NaN.
        ce_weight: [R] weights of the rows' cross-entropy.
        l1_weight: [R] weights of the rows' L1.
        vocab_size: true size of the vocabulary, without padding.
        tp_group: ranks that share the vocabulary; None for one rank.
        chunk_bytes: memory for the logits in flight; the results do not depend on it. None: on a CPU 40 MiB, or what
            96 rows take where that is more; on a GPU 2 GiB.
        kernel: "eager", or "compiled" for the same work through torch.compile; the results agree to rounding.

    Returns:
        VocabTerms. R may be 0.

    Raises:
        DSparkError: shapes that do not belong together, a kernel that cannot run here.
    """
    check_kernel(kernel, hidden.is_cuda)
    _check_shapes(hidden, latent, lm_head, markov_w2, teacher_hidden, teacher_head, labels, ce_weight, l1_weight)
    tp_size = 1 if tp_group is None else tp_group.size()
    if not 0 < vocab_size <= lm_head.shape[0] * tp_size:
        raise DSparkError(
            f"vocab_size is {vocab_size} but the LM head holds {lm_head.shape[0]} rows on each of {tp_size} ranks: "
            "give the unpadded vocabulary size, at most their product."
        )
    loss, ce, l1, top1_agree = _FusedTerms.apply(
        hidden,
        latent,
        lm_head,
        markov_w2,
        teacher_hidden.detach(),
        teacher_head.detach(),
        labels,
        ce_weight.detach(),
        l1_weight.detach(),
        vocab_size,
        tp_group,
        chunk_bytes,
        kernel,
        torch.is_grad_enabled(),
    )
    finite = ce.isfinite().all() & l1.isfinite().all()
    return VocabTerms(loss, ce, l1, (1 - l1 / 2).clamp(0, 1), top1_agree, finite)


def _check_shapes(
    hidden: Tensor,
    latent: Tensor | None,
    lm_head: Tensor,
    markov_w2: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    ce_weight: Tensor,
    l1_weight: Tensor,
) -> None:
    if (latent is None) != (markov_w2 is None):
        given, missing = ("markov_w2", "latent") if latent is None else ("latent", "markov_w2")
        raise DSparkError(f"{given} is a tensor but {missing} is None: pass both, or neither when there is no W2.")
    pairs = [("hidden", hidden, "lm_head", lm_head), ("teacher_hidden", teacher_hidden, "teacher_head", teacher_head)]
    if latent is not None and markov_w2 is not None:
        pairs.append(("latent", latent, "markov_w2", markov_w2))
    for name, features, head_name, head in pairs:
        if features.dim() != 2 or head.dim() != 2 or features.shape[1] != head.shape[1]:
            raise DSparkError(
                f"{name} is {list(features.shape)} and {head_name} is {list(head.shape)}: "
                "both need two dimensions, the last one in common."
            )
        if head.shape[0] != lm_head.shape[0]:
            raise DSparkError(
                f"{head_name} has {head.shape[0]} vocabulary rows and lm_head has {lm_head.shape[0]}: "
                "shard and pad every vocabulary-sized matrix alike."
            )
        if features.shape[0] != hidden.shape[0]:
            raise DSparkError(f"{name} has {features.shape[0]} rows and hidden has {hidden.shape[0]}: they must agree.")
    for name, vector in (("labels", labels), ("ce_weight", ce_weight), ("l1_weight", l1_weight)):
        if vector.shape != hidden.shape[:1]:
            raise DSparkError(
                f"{name} is {list(vector.shape)} but hidden has {hidden.shape[0]} rows: give one entry per row."
            )


class _FusedTerms(torch.autograd.Function):
    """Runs the chunks in the forward pass and keeps only gradients that have the inputs' shapes."""

    @staticmethod
    def forward(ctx, hidden, latent, lm_head, markov_w2, *rest):
        *rest, grad_enabled = rest
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:4]]
        run = Run((hidden, latent, lm_head, markov_w2), wanted, *rest)
        run.all_chunks()
        ctx.save_for_backward(*run.grads)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, latent, lm_head, markov_w2)]
        ctx.mark_non_differentiable(run.ce, run.l1, run.agree)
        loss = (run.ce_weight * run.ce + run.l1_weight * run.l1).sum()
        return loss, run.ce, run.l1, run.agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        # In place: a second copy of a trained LM head's gradient would be the largest tensor of the step.
        grads = [
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, *[None] * 10)


class Run:
    """One pass over all rows: the operands in the type they are multiplied in, the results and the gradients."""

    def __init__(
        self,
        draft: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
        wanted: list[bool],
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        labels: Tensor,
        ce_weight: Tensor,
        l1_weight: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_bytes: int | None,
        kernel: str,
    ) -> None:
        """Prepare buffers and gradients; `draft` is hidden, latent, lm_head, markov_w2, `wanted` their gradients."""
        hidden, latent, lm_head, markov_w2 = draft
        self.group, self.chunk_type = group, CompiledChunk if kernel == "compiled" else Chunk
        self.tp_size, self.tp_rank = (1, 0) if group is None else (group.size(), group.rank())
        self.start = self.tp_rank * lm_head.shape[0]
        # This rank's true vocabulary: padding rows are cut off, so whatever they hold is never read.
        self.width = min(max(vocab_size - self.start, 0), lm_head.shape[0])
        operands = [t for t in (*draft, teacher_hidden, teacher_head) if t is not None]
        self.dtype = torch.float64 if any(t.dtype == torch.float64 for t in operands) else torch.float32
        self.on_cpu = hidden.device.type == "cpu"
        # Tensor cores multiply bf16 and add up in FP32. Elsewhere, and for fp16 whose range the gradients leave, the
        # operands are widened once: on a CPU that costs an FP32 copy of a bf16 head.
        tensor_cores = hidden.is_cuda and all(t.dtype == torch.bfloat16 for t in operands)
        self.product_dtype = torch.bfloat16 if tensor_cores else self.dtype

        def operand(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(self.product_dtype)

        def shard(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else operand(tensor[: self.width])

        self.hidden, self.latent, self.teacher_hidden = operand(hidden), operand(latent), operand(teacher_hidden)
        self.lm_head, self.markov_w2 = shard(lm_head), shard(markov_w2)
        same = teacher_head.data_ptr() == lm_head.data_ptr() and teacher_head.shape == lm_head.shape
        self.teacher_head = self.lm_head if same else shard(teacher_head)

        self.valid = (labels >= 0) & (labels < vocab_size)
        local = labels - self.start
        self.here = (local >= 0) & (local < self.width)
        self.local_label = local.clamp(0, max(self.width - 1, 0))
        self.ce_weight, self.l1_weight = ce_weight.to(self.dtype), l1_weight.to(self.dtype)

        rows = hidden.shape[0]
        self.ce, self.l1, self.agree = hidden.new_zeros(3, rows, dtype=self.dtype).unbind()
        self.grads = [
            torch.zeros_like(t, dtype=self.dtype, memory_format=torch.contiguous_format) if want else None
            for t, want in zip(draft, wanted, strict=True)
        ]
        self.wants_grad = any(wanted)

        in_flight = 2 if self.tp_size > 1 else 1
        row_bytes = lm_head.shape[0] * self.ce.element_size()
        default = max(CHUNK_BYTES_CPU, CHUNK_ROWS_CPU * 2 * in_flight * row_bytes) if self.on_cpu else CHUNK_BYTES_GPU
        self.chunk_rows = _chunk_rows(rows, (chunk_bytes or default) // (2 * in_flight * row_bytes))
        in_blocks = self.on_cpu and kernel == "eager"
        cached_rows = max(1, CACHE_BYTES // row_bytes) if in_blocks else self.chunk_rows
        self.block_rows = min(cached_rows, self.chunk_rows)
        chunk_entries = 2 * min(rows, self.chunk_rows) * self.width
        self.buffers = hidden.new_empty(in_flight, chunk_entries, dtype=self.dtype)
        scratch_rows = self.block_rows if in_blocks else 0
        self.scratch = hidden.new_empty(scratch_rows, self.width, dtype=self.dtype)

    def all_chunks(self) -> None:
        pending = None
        for number, first in enumerate(range(0, self.hidden.shape[0], self.chunk_rows)):
            rows = slice(first, min(first + self.chunk_rows, self.hidden.shape[0]))
            chunk = self.chunk_type(self, rows, self.buffers[number % len(self.buffers)])
            chunk.logits()
            if self.tp_size == 1:
                chunk.elementwise()
                chunk.products()
                continue
            chunk.send_statistics()
            if pending is not None:
                pending.products()
            chunk.send_sums()
            pending = chunk
        if pending is not None:
            pending.products()
        if self.tp_size > 1:
            for grad in self.grads[:2]:
                if grad is not None:
                    dist.all_reduce(grad, group=self.group)


def _chunk_rows(rows: int, affordable: int) -> int:
    """Equal chunks of at most `affordable` rows: a multiple of 32 suits the matrix products, a small rest does not."""
    affordable = max(1, affordable // 32 * 32 if affordable > 32 else affordable)
    chunks = max(1, -(-rows // affordable))
    return max(1, -(-rows // chunks))
