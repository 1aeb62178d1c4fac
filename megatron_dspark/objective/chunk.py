"""The arithmetic of one chunk of rows against this rank's part of the vocabulary.

The steps, in order: `logits` (two or three matrix products), `statistics` (maxima and sums of exponentials),
`probabilities` (p and q on the scale of the whole vocabulary, L1, sign), `slopes` (the gradient of the logits, in
place of p) and `products` (the gradients of what made the logits). The last two wait for sums over the vocabulary,
and with several ranks these are the two exchanges; `fused.py` says what travels when. The three element-wise steps
have a second form in `compiled.py`.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron_dspark.objective.fused import Run

# The arg-max is found through the maxima of runs of this many entries: torch.argmax is not vectorised on CPUs.
RUN = 500

# Lower exponents are raised to this one. Below it lie denormal numbers, which processors make and multiply some fifty
# times slower: 1.6 % of them among the gradients of logits doubled the time of the objective. A million such
# exponentials are still far below the last digit of a sum of probabilities.
LOWEST_EXPONENT = {torch.float32: -65.0, torch.float64: -650.0}

# Columns of the statistics: maximum, sum of exponentials below it and arg-max of the draft's logits, the same of the
# teacher's, and the draft's logit of the label.
DRAFT, TEACHER, LABEL, COLUMNS = slice(0, 3), slice(3, 6), 6, 7


class Chunk:
    """A slice of the rows of a Run, with two matrices [rows, width] in `buffer` that every step reuses."""

    def __init__(self, run: "Run", rows: slice, buffer: Tensor) -> None:
        self.run, self.rows = run, rows
        count = rows.stop - rows.start
        self.both = buffer[: 2 * count * run.width].view(2, count, run.width)
        self.draft, self.teacher = self.both
        self.own = self.draft.new_zeros(count, COLUMNS)
        self.every = self.own.unsqueeze(0)
        # L1 and D (see fused.py), summed over the vocabulary.
        self.sums = self.draft.new_zeros(count, 2)
        self.unit = self.draft.new_ones(count, 1)
        # The gradient of the logits, where it is not in `draft`.
        self.gradient: Tensor | None = None
        self.exchange: dist.Work | None = None
        step = max(1, run.block_rows)
        self.blocks = [slice(first, min(first + step, count)) for first in range(0, count, step)]

    def logits(self) -> None:
        """Draft and teacher logits, such that equal hidden states and heads give equal bits.

        Two products of one shape have that property. One product of all rows is a quarter faster on a CPU, because
        the head is read once, but does not: it is used where no row has its teacher's hidden state.
        """
        run = self.run
        hidden, teacher_hidden = run.hidden[self.rows], run.teacher_hidden[self.rows]
        stackable = run.teacher_head is run.lm_head and run.on_cpu
        if stackable and not (hidden == teacher_hidden).all(-1).any():
            product(torch.cat([hidden, teacher_hidden]), run.lm_head.t(), self.both.flatten(0, 1))
        else:
            product(hidden, run.lm_head.t(), self.draft)
            product(teacher_hidden, run.teacher_head.t(), self.teacher)
        if run.latent is not None:
            add_product(run.latent[self.rows], run.markov_w2.t(), self.draft)

    def elementwise(self) -> None:
        """Everything between the matrix products, where one rank holds the whole vocabulary."""
        for block in self.blocks:
            self.statistics(block)
            self.probabilities(block)
            self.slopes(block)

    def send_statistics(self) -> None:
        """Start the first exchange."""
        if self.run.width > 0:
            for block in self.blocks:
                self.statistics(block)
        else:
            # A rank with padding only: a maximum below every other and nothing summed under it.
            self.own[:, [DRAFT.start, TEACHER.start]] = -torch.inf
        self.every = self.own.new_empty(self.run.tp_size, *self.own.shape)
        self.exchange = dist.all_gather(list(self.every), self.own, group=self.run.group, async_op=True)

    def send_sums(self) -> None:
        """End the first exchange and start the second."""
        self.exchange.wait()
        for block in self.blocks:
            self.probabilities(block)
        self.exchange = dist.all_reduce(self.sums, group=self.run.group, async_op=True)

    def receive_sums(self) -> None:
        """End the second exchange."""
        self.exchange.wait()
        for block in self.blocks:
            self.slopes(block)

    def _place(self, block: slice) -> slice:
        return slice(self.rows.start + block.start, self.rows.start + block.stop)

    def statistics(self, block: slice) -> None:
        """Fill `own`, and leave exp(logit - this rank's maximum) in the buffers."""
        own, place = self.own[block], self._place(block)
        label_logit = self.draft[block].gather(1, self.run.local_label[place].unsqueeze(1)).squeeze(1)
        own[:, LABEL] = label_logit.where(self.run.here[place], 0)
        for logits, columns in ((self.draft[block], own[:, DRAFT]), (self.teacher[block], own[:, TEACHER])):
            top, index = first_max(logits)
            logits.sub_(top.unsqueeze(1)).clamp_(min=LOWEST_EXPONENT[logits.dtype]).exp_()
            columns[:, 0], columns[:, 1], columns[:, 2] = top, logits.sum(-1), index + self.run.start

    def losses(self, block: slice) -> "tuple[OverRanks, OverRanks]":
        """CE and top-1 agreement of these rows; return the statistics of draft and teacher over all ranks."""
        run, place, every = self.run, self._place(block), self.every[:, block]
        draft, teacher = (over_ranks(every[..., columns], run.tp_rank) for columns in (DRAFT, TEACHER))
        ce = draft.total.log() + (draft.top - every[..., LABEL].sum(0))
        run.ce[place] = ce.where(run.valid[place], torch.nan)
        run.agree[place] = (draft.first == teacher.first).to(run.dtype)
        return draft, teacher

    def probabilities(self, block: slice) -> None:
        """Losses; p in place of the draft's exponentials, sign(p - q) p in place of the teacher's; L1 and D.

        Both are in units of `unit`. One rank leaves the draft's exponentials as they are, which saves a pass; with
        several ranks the factor of one may be zero.
        """
        draft, teacher = self.losses(block)
        if self.run.width == 0:
            return
        p, q, unit = self.draft[block], self.teacher[block], self.unit[block]
        if self.run.tp_size == 1:
            unit.copy_(draft.factor)
            q.mul_(teacher.factor / draft.factor)
        else:
            unit.fill_(1)
            p.mul_(draft.factor)
            q.mul_(teacher.factor)
        difference = torch.sub(p, q, out=q)
        self.sums[block, 0] = self._absolute_sum(difference)
        if self.run.wants_grad:
            self.sums[block, 1] = difference.sign_().mul_(p).sum(-1)
        self.sums[block] *= unit

    def _absolute_sum(self, difference: Tensor) -> Tensor:
        if len(self.run.scratch) == 0:
            return torch.linalg.vector_norm(difference, ord=1, dim=-1)
        # On a CPU the norm takes three times as long as these two passes.
        return torch.abs(difference, out=self.run.scratch[: len(difference)]).sum(-1)

    def slopes(self, block: slice) -> None:
        """L1, and the gradient of the draft's logits in place of p."""
        run, place = self.run, self._place(block)
        l1, dot = self.sums[block].unbind(-1)
        run.l1[place] = l1
        if not run.wants_grad or run.width == 0:
            return
        a, b, unit = run.ce_weight[place], run.l1_weight[place], self.unit[block]
        gradient = self.draft[block].mul_((a - b * dot).unsqueeze(1) * unit)
        gradient.addcmul_(self.teacher[block], b.unsqueeze(1) * unit)
        gradient.scatter_add_(1, run.local_label[place].unsqueeze(1), -(a * run.here[place]).unsqueeze(1))

    def products(self) -> None:
        """Gradients of hidden and latent for these rows, and this chunk's share of those of W2 and the LM head."""
        run, rows = self.run, self.rows
        if self.exchange is not None:
            self.receive_sums()
        if not run.wants_grad or run.width == 0:
            return
        slopes = self.draft.to(run.product_dtype) if self.gradient is None else self.gradient
        hidden, latent, lm_head, markov_w2 = run.grads
        if hidden is not None:
            product(slopes, run.lm_head, hidden[rows])
        if latent is not None:
            product(slopes, run.markov_w2, latent[rows])
        if lm_head is not None:
            add_product(slopes.t(), run.hidden[rows], lm_head[: run.width])
        if markov_w2 is not None:
            add_product(slopes.t(), run.latent[rows], markov_w2[: run.width])


class OverRanks(NamedTuple):
    """Statistics of logits over the whole vocabulary.

    Attributes:
        top: [rows], the maximum.
        total: [rows], the sum of exp(logit - maximum).
        first: [rows], the lowest id that has the maximum.
        factor: [rows, 1], what turns this rank's exp(logit - its own maximum) into probabilities.
    """

    top: Tensor
    total: Tensor
    first: Tensor
    factor: Tensor


def over_ranks(statistics: Tensor, rank: int) -> OverRanks:
    """Put the shards' statistics, [ranks, rows, 3], on one scale; `rank` is the one whose factor is wanted."""
    tops, totals, indices = statistics.unbind(-1)
    top = tops.amax(0)
    shrink = (tops - top).exp()
    total = (totals * shrink).sum(0)
    first = indices.where(tops == top, torch.inf).amin(0)
    return OverRanks(top, total, first, (shrink[rank] / total).unsqueeze(1))


def first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and the lowest index that has it, of every row of [rows, width]."""
    width = logits.shape[1]
    whole = width // RUN * RUN
    if logits.device.type != "cpu" or whole < 4 * RUN:
        return tuple(logits.max(-1))
    tops = logits[:, :whole].unflatten(1, (-1, RUN)).amax(-1)
    if whole < width:
        tops = torch.cat([tops, logits[:, whole:].amax(-1, keepdim=True)], 1)
    top, run = tops.max(-1)
    # Past the end the last entry is repeated, which cannot come first.
    entries = (run.unsqueeze(1) * RUN + torch.arange(RUN)).clamp_(max=width - 1)
    return top, run * RUN + logits.gather(1, entries).argmax(-1)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left right, added up in the type of `out` also where the factors are narrower."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out += left right, added up in the type of `out` also where the factors are narrower."""
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        out.add_(torch.mm(left, right, out_dtype=out.dtype))
