"""The Markov head's start from the training data: which token follows which.

A vanilla Markov head adds W2 · W1[x] to the logits after token x. Chosen as a low-rank factorisation of the positive
pointwise mutual information of the data's token pairs, it knows from the first step what many steps would teach it,
and leaves the rest (which token is likely here at all) to the backbone.
"""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.model.draft import DSparkDraft

_POWER_ITERATIONS = 4
_SAMPLES_AT_ONCE = 4096


def bigram_tables(samples: Sequence[ChatSample], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factorise the positive pointwise mutual information of (token, supervised next token).

    Args:
        samples: the training data; pairs count where the second token carries loss.
        rank: width of the factors at most.

    Returns:
        tokens [n] that occur, first [n, q] and second [n, q] with q = min(rank, n):
        first[i] · second[j] ≈ max(0, log P(j after i) / P(j)).
    """
    first, second, counts = _count_pairs(samples)
    tokens, index = torch.cat([first, second]).unique(return_inverse=True)
    pairs = index.view(2, -1)
    row, column = pairs
    counts = counts.double()
    size = len(tokens)
    row_sum = counts.new_zeros(size).index_add_(0, row, counts)
    column_sum = counts.new_zeros(size).index_add_(0, column, counts)
    information = (counts * counts.sum() / (row_sum[row] * column_sum[column])).log().clamp(min=0)
    matrix = torch.sparse_coo_tensor(pairs, information, (size, size), check_invariants=True).coalesce()
    # The range finder draws random numbers; a seed of its own leaves the run's stream alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(matrix, q=min(rank, size), niter=_POWER_ITERATIONS)
    return tokens, left * values.sqrt(), right * values.sqrt()


def _count_pairs(samples: Sequence[ChatSample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return first tokens, second tokens and counts of the different pairs, in memory for those and a few samples."""
    codes = counts = torch.zeros(0, dtype=torch.int64)
    for start in range(0, len(samples), _SAMPLES_AT_ONCE):
        some = [samples[number] for number in range(start, min(start + _SAMPLES_AT_ONCE, len(samples)))]
        found = [(sample.input_ids[:-1] << 32 | sample.input_ids[1:])[sample.loss_mask[1:]] for sample in some]
        new, new_counts = torch.cat(found).unique(return_counts=True)
        codes, index = torch.cat([codes, new]).unique(return_inverse=True)
        counts = codes.new_zeros(len(codes)).index_add_(0, index, torch.cat([counts, new_counts]))
    return codes >> 32, codes & 0xFFFFFFFF, counts


def start_from_bigrams(draft: DSparkDraft | None, samples: Sequence[ChatSample], rank: int) -> None:
    """Put the data's bigrams into a vanilla Markov head, the same on all ranks; unseen tokens keep their random rows.

    Every rank of the job calls this, since the first one computes the tables for all.

    Args:
        draft: this rank's draft, None on a pipeline stage without one.
        samples: the training data.
        rank: the head's width.
    """
    tables = list(bigram_tables(samples, rank)) if torch.distributed.get_rank() == 0 else [None, None, None]
    torch.distributed.broadcast_object_list(tables, device=platform.device())
    if draft is None:
        return
    tokens, first, second = tables
    head = draft.markov_head
    for table, rows in ((head.markov_w1, first), (head.markov_w2, second)):
        with torch.no_grad():
            mine = (tokens >= table.vocab_start_index) & (tokens < table.vocab_end_index)
            where = (tokens[mine] - table.vocab_start_index).to(table.weight.device)
            table.weight[where, : rows.shape[1]] = rows[mine].to(table.weight)
