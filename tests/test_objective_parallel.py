"""A sharded vocabulary changes nothing; uneven micro-batches and data-parallel ranks give the full-batch gradient."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dspark.objective import chunk, fused
from megatron_dspark.objective.fused import vocab_parallel_ce_l1
from megatron_dspark.objective.loss import FractionalDivisor, ObjectiveConfig, SupervisedRows, dspark_loss
from megatron_dspark.objective.metrics import reduce_report
from tests.distributed import RankPool
from tests.objective_reference import random_rows

VOCAB, BLOCK_SIZE = 37, 5
ROW_TENSORS = ("hidden", "latent", "confidence_logits")


def config(normalizer: str = "tokens") -> ObjectiveConfig:
    return ObjectiveConfig(block_size=BLOCK_SIZE, vocab_size=VOCAB, loss_normalizer=normalizer)


def sharded_loss(
    rank: int, ranks: int, seed: int, blocks: int, padded: int, junk: float, chunk_bytes: int | None, one_head: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and metrics of one rank that holds its rows of matrices padded to `padded` with `junk`."""
    rows, matrices = random_rows(seed, blocks=blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB, padded=padded)
    if one_head:
        matrices["teacher_head"] = matrices["lm_head"]
    shards = {}
    for name, matrix in matrices.items():
        matrix[VOCAB:] = junk
        shards[name] = matrix.chunk(ranks)[rank].clone().requires_grad_(name != "teacher_head" and not one_head)
    shards["markov_w2"].requires_grad_()
    for name in ROW_TENSORS:
        getattr(rows, name).requires_grad_()
    group = dist.group.WORLD if ranks > 1 else None
    # With several ranks, blocks of three rows: all would fit into the cache at this size.
    cache_bytes = 3 * len(shards["lm_head"]) * 8 if ranks > 1 else fused.CACHE_BYTES
    with mock.patch.object(fused, "CACHE_BYTES", cache_bytes):
        loss, _, report = dspark_loss(
            rows,
            shards["lm_head"],
            shards["lm_head"] if one_head else shards["teacher_head"],
            shards["markov_w2"],
            config(),
            group,
            chunk_bytes,
        )
    (loss * 3).backward()
    results = {"loss": loss.detach()} | {name: getattr(rows, name).grad for name in ROW_TENSORS}
    return results | {n: s.grad for n, s in shards.items() if s.grad is not None}, report


@pytest.mark.parametrize(
    ("blocks", "padded", "junk", "chunk_bytes", "one_head"),
    [
        (9, 40, float("nan"), None, False),
        (9, 40, 1e30, 1, False),  # one row a chunk: as many exchanges in flight as there are rows
        (9, 40, float("nan"), 2500, True),  # a few rows a chunk
        (9, 64, float("nan"), 2500, False),  # of four ranks the third holds 5 rows, the last padding only
        (9, 64, float("nan"), 2500, True),
        (0, 40, float("nan"), None, False),  # no rows at all
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_vocabulary_shards(
    request: pytest.FixtureRequest,
    ranks: int,
    blocks: int,
    padded: int,
    junk: float,
    chunk_bytes: int | None,
    one_head: bool,
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    arguments = (7, blocks, padded, junk, chunk_bytes, one_head)
    expected, metrics = sharded_loss(0, 1, *arguments)
    every = pool.run(sharded_loss, *arguments)
    for results, report in every:
        assert report.keys() == metrics.keys()
        for name, pair in report.items():
            torch.testing.assert_close(pair, metrics[name], rtol=1e-10, atol=1e-10, msg=name)
        for name in ("loss", *ROW_TENSORS):
            torch.testing.assert_close(results[name], expected[name], rtol=1e-10, atol=1e-10, msg=name)
            # Not just close: ranks that disagree in the last bit drift apart over a run.
            assert torch.equal(results[name], every[0][0][name])
    for name in expected.keys() & {"lm_head", "markov_w2"}:
        whole = torch.cat([results[name] for results, _ in every])
        torch.testing.assert_close(whole, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        assert not whole[VOCAB:].any()


def ties_across_shards(rank: int, ranks: int) -> tuple[list[float], list[float]]:
    """L1 and agreement of rows whose maximum appears in both shards, and of one row equal to its teacher's."""
    head = torch.eye(8).chunk(ranks)[rank]
    draft = torch.zeros(3, 8)
    draft[0, [2, 6]], draft[1, [3, 7]] = 5.0, 5.0
    teacher = torch.zeros(3, 8)
    teacher[0, [2, 5]], teacher[1, [6, 7]] = 5.0, 5.0
    teacher[2] = draft[2] = torch.linspace(-30, 30, 8)
    ones = torch.ones(3)
    terms = vocab_parallel_ce_l1(
        draft, None, head, None, teacher, head, torch.tensor([0, 4, 7]), ones, ones, vocab_size=8,
        tp_group=dist.group.WORLD,
    )  # fmt: skip
    return terms.l1.tolist(), terms.top1_agree.tolist()


def test_ties_and_equality_across_shards(two_ranks: RankPool) -> None:
    for l1, agree in two_ranks.run(ties_across_shards):
        assert l1[2] == 0.0 and min(l1[:2]) > 0.1
        assert agree == [1.0, 0.0, 1.0]  # the lowest id among equals decides, whichever rank has it


class Watched:
    """An exchange that notes when it is waited for."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


def watch_exchanges(rank: int, ranks: int, grad: bool) -> tuple[int, list[str]]:
    """Number of rows, and in their order: exchanges started and waited for, and matrix products."""
    rows, matrices = random_rows(1, vocab_size=VOCAB, padded=40)
    rows.hidden.requires_grad_(grad)
    shards = {name: matrix.chunk(ranks)[rank] for name, matrix in matrices.items()}
    events: list[str] = []
    patch = pytest.MonkeyPatch()

    def watch(name: str) -> None:
        original = getattr(dist, name)

        def started(*arguments: Any, async_op: bool = False, **keywords: Any) -> Any:
            events.append(name if async_op else f"blocking {name}")
            work = original(*arguments, async_op=async_op, **keywords)
            return Watched(work, name, events) if async_op else work

        patch.setattr(dist, name, started)

    def note(name: str) -> None:
        original = getattr(chunk, name)
        patch.setattr(chunk, name, lambda *arguments: (events.append("product"), original(*arguments))[1])

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
        watch(name)
    for name in ("product", "add_product"):
        note(name)
    try:
        vocab_parallel_ce_l1(
            rows.hidden, None, shards["lm_head"], None, rows.teacher_hidden, shards["teacher_head"], rows.labels,
            torch.ones(len(rows.labels)), torch.ones(len(rows.labels)), vocab_size=VOCAB, tp_group=dist.group.WORLD,
            chunk_bytes=4 * 8 * (40 // ranks) * 8,
        )  # fmt: skip
    finally:
        patch.undo()
    return len(rows.labels), events


@pytest.mark.parametrize("grad", [True, False], ids=["training", "validation"])
def test_two_exchanges_a_chunk_while_products_run(two_ranks: RankPool, grad: bool) -> None:
    for rows, events in two_ranks.run(watch_exchanges, grad):
        chunks = -(-rows // 8)
        assert chunks >= 3
        draft, teacher, gradient = "product", "product", ["product"] * grad
        first = [draft, teacher, "all_gather", "wait all_gather", "all_reduce"]
        # In between: while the sums of a chunk travel the next one's logits are made; while that one's statistics
        # travel, the gradients of the first.
        between = [draft, teacher, "all_gather", "wait all_reduce", *gradient, "wait all_gather", "all_reduce"]
        last = ["wait all_reduce", *gradient]
        end = ["blocking all_reduce"] * grad
        assert events == first + between * (chunks - 1) + last + end


def select(rows: SupervisedRows, first_block: int, last_block: int) -> SupervisedRows:
    """The rows of some blocks, as one micro-batch."""
    keep = (rows.block >= first_block) & (rows.block < last_block)
    tensors = ("hidden", "latent", "confidence_logits", "teacher_hidden", "labels", "slot", "block")
    part = replace(rows, **{name: getattr(rows, name)[keep] for name in tensors})
    return replace(part, block=part.block - first_block, num_blocks=last_block - first_block, num_anchor_samples=1)


def train_step(
    parameters: dict[str, Tensor],
    teacher_head: Tensor,
    micro_batches: list[SupervisedRows],
    normalizer: str,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """What Megatron-Core's schedule and gradient finalization do with the loss's three results."""

    def finalize(model: list[dict[str, Tensor]], num_tokens: Tensor) -> None:
        if group is not None:
            dist.all_reduce(num_tokens, group=group)
        for parameter in model[0].values():
            if group is not None:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad.mul_(1.0 / torch.clamp(num_tokens, min=1).double())

    divisor = FractionalDivisor(finalize)
    counter, reports = torch.zeros([], dtype=torch.int), []
    for rows in micro_batches:
        # A shared weight before the rows' hidden states stands for the backbone.
        moved = replace(
            rows,
            hidden=rows.hidden @ parameters["backbone"],
            confidence_logits=rows.hidden @ parameters["confidence"],
        )
        numerator, num_tokens, report = dspark_loss(
            moved, parameters["lm_head"], teacher_head, parameters["markov_w2"], config(normalizer)
        )
        counter += num_tokens if normalizer == "tokens" else divisor.count(num_tokens)
        numerator.backward()
        reports.append(report)
    (finalize if normalizer == "tokens" else divisor)([parameters], counter)
    return reduce_report(reports, group)


def parallel_step(rank: int, ranks: int, normalizer: str, cuts: list[list[int]]) -> Any:
    rows, matrices = random_rows(11, blocks=12, block_size=BLOCK_SIZE, vocab_size=VOCAB, padded=VOCAB)
    generator = torch.Generator().manual_seed(2)
    parameters = {
        "backbone": torch.randn(12, 12, generator=generator, dtype=torch.float64),
        "confidence": torch.randn(12, generator=generator, dtype=torch.float64),
        "lm_head": matrices["lm_head"],
        "markov_w2": matrices["markov_w2"],
    }
    for parameter in parameters.values():
        parameter.requires_grad_()
    mine = [select(rows, first, last) for first, last in zip(cuts[rank], cuts[rank][1:], strict=False)]
    group = dist.group.WORLD if ranks > 1 else None
    metrics = train_step(parameters, matrices["teacher_head"], mine, normalizer, group)
    return {name: parameter.grad for name, parameter in parameters.items()}, metrics, [len(r.labels) for r in mine]


@pytest.mark.parametrize("normalizer", ["tokens", "weights"])
def test_uneven_ranks_and_micro_batches_give_the_full_batch(two_ranks: RankPool, normalizer: str) -> None:
    expected, metrics, _ = parallel_step(0, 1, normalizer, [[0, 12]])
    results = two_ranks.run(parallel_step, normalizer, [[0, 1, 4], [4, 11, 12]])
    counts = [count for _, _, rank_counts in results for count in rank_counts]
    assert len(set(counts)) > 2, "the micro-batches were meant to be uneven"
    for gradients, reduced, _ in results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13, msg=name)
        for name, value in reduced.items():
            if name != "anchors_per_sample":  # the single process had all blocks in one sample of three
                assert value == pytest.approx(metrics[name], rel=1e-12, nan_ok=True), name


def test_the_normalisers_differ(two_ranks: RankPool) -> None:
    tokens, weights = (parallel_step(0, 1, normalizer, [[0, 12]]) for normalizer in ("tokens", "weights"))
    ratio = tokens[1]["loss"] / weights[1]["loss"]
    assert ratio < 0.95
    torch.testing.assert_close(tokens[0]["backbone"], weights[0]["backbone"] * ratio, rtol=1e-12, atol=1e-14)
