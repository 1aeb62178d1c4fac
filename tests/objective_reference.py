"""The objective written down plainly, in float64 and with every logit in memory: what the fused one must equal."""

import torch
from torch import Tensor

from megatron_dspark.objective.loss import SupervisedRows


def reference_terms(
    hidden: Tensor,
    latent: Tensor | None,
    lm_head: Tensor,
    markov_w2: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """CE [R], L1 [R] and top-1 agreement [R] from unsharded matrices, in float64."""
    draft = hidden.double() @ lm_head[:vocab_size].double().t()
    if latent is not None and markov_w2 is not None:
        draft = draft + latent.double() @ markov_w2[:vocab_size].double().t()
    teacher = (teacher_hidden.double() @ teacher_head[:vocab_size].double().t()).detach()
    ce = -draft.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    l1 = (draft.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    return ce, l1, (draft.argmax(-1) == teacher.argmax(-1)).double()


def random_rows(
    seed: int,
    *,
    blocks: int = 9,
    block_size: int = 5,
    vocab_size: int = 37,
    padded: int = 40,
    hidden: int = 12,
    rank: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[SupervisedRows, dict[str, Tensor]]:
    """Blocks whose first 0 to block_size slots are supervised, and the unsharded matrices they meet."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lengths = torch.randint(0, block_size + 1, (blocks,), generator=generator)
    block = torch.arange(blocks).repeat_interleave(lengths)
    slot = torch.tensor([k for length in lengths.tolist() for k in range(length)], dtype=torch.long)
    count = len(block)
    rows = SupervisedRows(
        hidden=normal(count, hidden),
        latent=normal(count, rank),
        confidence_logits=normal(count),
        teacher_hidden=normal(count, hidden),
        labels=torch.randint(vocab_size, (count,), generator=generator),
        slot=slot,
        block=block,
        num_blocks=blocks,
        num_anchor_samples=3,
    )
    matrices = {name: normal(padded, width) for name, width in (("lm_head", hidden), ("teacher_head", hidden))}
    return rows, matrices | {"markov_w2": normal(padded, rank)}
