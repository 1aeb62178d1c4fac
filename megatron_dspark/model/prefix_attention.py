"""Block attention in plain PyTorch that costs what is visible: a stretch of context rows per block, and the block.

Blocks whose stretches begin alike are taken together, so that a group is a few dense products over the rows that its
members see. The backward recomputes probabilities from the saved log-sum-exp (as FlashAttention does, arXiv:2205.14135,
Algorithm 4), so nothing of size slots × context is kept. Also as there, half-precision operands on a GPU meet in tensor
cores that add up in FP32, and probabilities are rounded for them; everything between two products is FP32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Slots of one group: enough for efficient products, few enough that its members see about the same rows.
GROUP_SLOTS = 128


class Group(NamedTuple):
    """Blocks of one sample that are computed together, over the context rows [first, last) that any of them sees.

    All of them see the rows [first, shared). These are numbers, not tensors: to ask a GPU for them is to wait for it.
    """

    sample: int
    blocks: Tensor
    first: int
    shared: int
    last: int


def prefix_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    ends: Tensor,
    groups: list[Group],
) -> Tensor:
    """Attend from every slot to the context rows [start, end) of its block and to the whole block.

    Context rows that no block sees are never read. Half-precision inputs are multiplied as they are on a GPU, with sums
    and softmax in FP32, and computed in FP32 throughout on a CPU.

    Args:
        query: [A·γ, B, heads, head_dim]; scores are scaled by 1/√head_dim here.
        context_key: [S, B, key/value heads, head_dim].
        context_value: like `context_key`.
        block_key: [A·γ, B, key/value heads, head_dim].
        block_value: like `block_key`.
        ends: [B, A] the context row after the last one that a block sees.
        groups: see `group_blocks`.

    Returns:
        [A·γ, B, heads, head_dim].
    """
    operand = query.dtype if query.is_cuda else _wide(query)
    tensors = (query, context_key, context_value, block_key, block_value)
    return _PrefixAttention.apply(*(tensor.to(operand) for tensor in tensors), ends, groups).to(query.dtype)


def group_blocks(starts: Tensor, ends: Tensor, block_size: int) -> list[Group]:
    """Return groups in which every block is once, those with the same start and near ends together.

    Args:
        starts: [B, A] first visible context row of each block.
        ends: [B, A] the row after the last visible one; not above `starts` where there is none.
        block_size: γ; a group has about `GROUP_SLOTS` slots at most.
    """
    groups, per_group = [], max(1, GROUP_SLOTS // block_size)
    for sample, (firsts, lasts) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        # Blocks that see nothing get a start of their own, so that they form groups without context.
        spans = sorted(
            (first, last, block) if last > first else (-1, -1, block)
            for block, (first, last) in enumerate(zip(firsts, lasts, strict=True))
        )
        begin = 0
        for stop in range(1, len(spans) + 1):
            if stop < len(spans) and stop - begin < per_group and spans[stop][0] == spans[begin][0]:
                continue
            blocks = torch.tensor([block for *_, block in spans[begin:stop]], device=starts.device)
            # Sorted by their ends.
            first, shared, last = spans[begin][0], spans[begin][1], spans[stop - 1][1]
            groups.append(Group(sample, blocks, max(first, 0), max(shared, 0), max(last, 0)))
            begin = stop
    return groups


class _PrefixAttention(torch.autograd.Function):
    """Inner shapes: G blocks, h key/value heads with q query heads each, head width w, L context rows of the group."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        ends: Tensor,
        groups: list[Group],
    ) -> Tensor:
        blocks, heads = ends.shape[1], context_key.shape[2]
        output = torch.empty_like(query)
        sums = []
        for group in groups:
            asked, key, value = (_take(rows, group, blocks, heads) for rows in (query, block_key, block_value))
            scores = _scores(asked, _rows(context_key, group), key, group, ends)
            sums.append(scores.logsumexp(-1, keepdim=True))
            far, near = _split(scores.sub_(sums[-1]).exp_(), group)
            _put(output, group, blocks, _over_context(far, _rows(context_value, group)) + _product(near, value))
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, ends, output, *sums)
        ctx.groups = groups
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, block_key, block_value, ends, output, *sums = ctx.saved_tensors
        blocks, heads = ends.shape[1], context_key.shape[2]
        # Every block is in one group, so that these are written whole; context rows may be in many or in none.
        grad_query, grad_key, grad_value = (torch.empty_like(rows) for rows in (query, block_key, block_value))
        grad_context_key, grad_context_value = (
            torch.zeros_like(rows, dtype=_wide(rows)) for rows in (context_key, context_value)
        )
        for group, log_sum in zip(ctx.groups, sums, strict=True):
            asked, key, value, grad, own = (
                _take(rows, group, blocks, heads) for rows in (query, block_key, block_value, grad_output, output)
            )
            context, values = _rows(context_key, group), _rows(context_value, group)
            probability = _scores(asked, context, key, group, ends).sub_(log_sum).exp_()
            far, near = _split(probability, group)
            _rows(grad_context_value, group).add_(_context_sum(far, grad))
            _put(grad_value, group, blocks, _product(near.mT, grad))
            grad_scores = torch.cat([_over_context(grad, values.mT), _product(grad, value.mT)], dim=-1)
            row_term = (grad.to(grad_scores.dtype) * own).sum(-1, keepdim=True)
            grad_scores.sub_(row_term).mul_(probability).mul_(_scale(query))
            far, near = _split(grad_scores, group)
            _rows(grad_context_key, group).add_(_context_sum(far, asked))
            _put(grad_key, group, blocks, _product(near.mT, asked))
            _put(grad_query, group, blocks, _over_context(far, context) + _product(near, key))
        of_context = (rows.to(query.dtype) for rows in (grad_context_key, grad_context_value))
        return grad_query, *of_context, grad_key, grad_value, None, None


def _wide(rows: Tensor) -> torch.dtype:
    """FP32 at least: the type of sums, scores and probabilities."""
    return torch.promote_types(rows.dtype, torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [..., n, x] with [..., x, y] in the type of `right`; the result is FP32 at least."""
    left, wide = left.to(right.dtype), _wide(right)
    if not right.is_cuda or wide == right.dtype:
        return left.to(wide) @ right.to(wide)
    return torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=wide).unflatten(0, left.shape[:-2])


def _scale(query: Tensor) -> float:
    return query.shape[-1] ** -0.5


def _rows(context: Tensor, group: Group) -> Tensor:
    """The group's context rows, a view: [h, L, w]."""
    return context[group.first : group.last, group.sample].transpose(0, 1)


def _take(rows: Tensor, group: Group, blocks: int, heads: int) -> Tensor:
    """The group's slots by key/value head: [h, G, q·γ, w] for queries, [h, G, γ, w] for keys and values (q = 1)."""
    slots = rows[:, group.sample].unflatten(0, (blocks, -1)).index_select(0, group.blocks)
    return slots.unflatten(2, (heads, -1)).permute(2, 0, 3, 1, 4).flatten(2, 3)


def _put(rows: Tensor, group: Group, blocks: int, values: Tensor) -> None:
    """Write what `_take` reads."""
    size = rows.shape[0] // blocks
    slots = values.unflatten(2, (-1, size)).permute(1, 3, 0, 2, 4).flatten(2, 3)
    rows.view(blocks, size, *rows.shape[1:])[:, :, group.sample].index_copy_(0, group.blocks, slots.to(rows.dtype))


def _over_context(slots: Tensor, context: Tensor) -> Tensor:
    """Multiply [h, G, n, x] with the group's context [h, x, y]."""
    return _product(slots.flatten(1, 2), context).unflatten(1, slots.shape[1:3])


def _context_sum(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [h, G, n, L] transposed with [h, G, n, w], summed over the group's slots: [h, L, w]."""
    return _product(left.flatten(1, 2).mT, right.flatten(1, 2))


def _scores(asked: Tensor, context_key: Tensor, key: Tensor, group: Group, ends: Tensor) -> Tensor:
    """Scaled scores over [context, block], −∞ where a block does not see that far: [h, G, q·γ, L + γ]."""
    # Scaled before the product, which is cheaper, unless that would round queries once more.
    rounds = asked.dtype != _wide(asked)
    asked = asked if rounds else asked * _scale(asked)
    far = _over_context(asked, context_key.mT)
    if group.last > group.first:
        reach = ends[group.sample, group.blocks] - group.first
        shortest = group.shared - group.first
        columns = torch.arange(shortest, far.shape[-1], device=far.device)
        far[..., shortest:].masked_fill_((columns >= reach[:, None])[:, None], -torch.inf)
    scores = torch.cat([far, _product(asked, key.mT)], dim=-1)
    return scores.mul_(_scale(asked)) if rounds else scores


def _split(scores: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The parts of a row over the context and over the block."""
    length = group.last - group.first
    return scores[..., :length], scores[..., length:]
