"""Ways to take one reduction, mark or mask out of a parallel run; each must move a result.

The imports are inside, since ranks are forked from a process that has imported the library once.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.parallel_support import trainable


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def before_optimizer(change: Callable[[dict[str, Any], Any], None]) -> Iterator[None]:
    """Apply `change(trainable parameters, model config)` between building the model and building its optimizer."""
    from megatron_dspark.training import setup

    original = setup.get_megatron_optimizer

    def build(config: Any, models: list[Any], **keywords: Any) -> Any:
        change(trainable(models), models[-1].config)
        return original(config, models, **keywords)

    with replaced(setup, "get_megatron_optimizer", build):
        yield


@contextmanager
def after_optimizer(change: Callable[[Any], None]) -> Iterator[None]:
    """Apply `change(optimizer)` right after it was built."""
    from megatron_dspark.training import setup

    original = setup.get_megatron_optimizer

    def build(*arguments: Any, **keywords: Any) -> Any:
        optimizer = original(*arguments, **keywords)
        change(optimizer)
        return optimizer

    with replaced(setup, "get_megatron_optimizer", build):
        yield


def mark(name: str, attribute: str, value: bool) -> Any:
    def change(parameters: dict[str, Any], config: Any) -> None:
        for parameter, tensor in parameters.items():
            if name in parameter:
                setattr(tensor, attribute, value)

    return before_optimizer(change)


def without_all_reduce(module: Any) -> Any:
    """Let `module`'s own `dist` do everything but all-reduce."""
    import torch.distributed

    done = types.SimpleNamespace(wait=lambda: None)
    stub = types.SimpleNamespace(**vars(torch.distributed))
    stub.all_reduce = lambda *_, **__: done
    return replaced(module, "dist", stub)


def objective_gradients() -> Any:
    from megatron_dspark.objective import fused

    return without_all_reduce(fused)


def objective_sums() -> Any:
    from megatron_dspark.objective import chunk

    return without_all_reduce(chunk)


def head_norms() -> Any:
    def change(_: dict[str, Any], config: Any) -> None:
        config.qk_layernorm = False

    return before_optimizer(change)


@contextmanager
def data_parallel_gradients() -> Iterator[None]:
    from megatron.core.distributed import DistributedDataParallel

    with replaced(DistributedDataParallel, "finish_grad_sync", lambda *_, **__: None):
        yield


def norm_over_shards() -> Any:
    def change(optimizer: Any) -> None:
        from megatron.core import parallel_state

        for part in optimizer.chained_optimizers:
            part.grad_stats_parallel_group = parallel_state.get_model_parallel_group()

    return after_optimizer(change)


@contextmanager
def consumers_summed() -> Iterator[None]:
    from megatron_dspark.model import draft

    original = draft.gather_from_sequence_parallel_region

    def gather(rows: Any, tensor_parallel_output_grad: bool = True, **keywords: Any) -> Any:
        return original(rows, tensor_parallel_output_grad=True, **keywords)

    with replaced(draft, "gather_from_sequence_parallel_region", gather):
        yield


@contextmanager
def target_rows() -> Iterator[None]:
    """The first rank's rows stand for everybody's."""
    from megatron_dspark.features import colocated

    original = colocated.gather_from_sequence_parallel_region

    def gather(rows: Any, **keywords: Any) -> Any:
        whole = original(rows, **keywords)
        return whole[: rows.shape[0]].repeat(whole.shape[0] // rows.shape[0], 1, 1)

    with replaced(colocated, "gather_from_sequence_parallel_region", gather):
        yield


@contextmanager
def tap_order() -> Iterator[None]:
    from megatron_dspark.features import colocated

    original = colocated.split_payload

    def split(*arguments: Any) -> Any:
        hidden, taps = original(*arguments)
        return hidden, taps[::-1]

    with replaced(colocated, "split_payload", split):
        yield


@contextmanager
def split_gradient() -> Iterator[None]:
    """Each rank keeps the gradient of its own share of the rows that the sharded layers read."""
    from megatron_dspark.model import draft

    def scatter(rows: Any, group: Any) -> Any:
        return rows.chunk(group.size())[group.rank()].contiguous()

    with replaced(draft, "scatter_to_sequence_parallel_region", scatter):
        yield


def shard_gather(change: Callable[..., Any]) -> Any:
    """Run context parallelism with `change(original, shard, rows, group)` in the place of its gather."""
    from megatron_dspark.context_shards import ContextShard

    original = ContextShard.gather
    return replaced(ContextShard, "gather", lambda shard, rows, group: change(original, shard, rows, group))


def own_keys() -> Any:
    """The target, which has no gradient, sees this rank's rows in the place of everybody's."""
    import torch

    def change(original: Any, shard: Any, rows: Any, group: Any) -> Any:
        whole = original(shard, rows, group)
        return whole if torch.is_grad_enabled() else rows.repeat(shard.size, *[1] * (rows.ndim - 1))[: len(whole)]

    return shard_gather(change)


def order_of_ranks() -> Any:
    from megatron_dspark.context_shards import gather_from_sequence_parallel_region

    return shard_gather(
        lambda original, shard, rows, group: gather_from_sequence_parallel_region(rows.contiguous(), group=group)
    )


@contextmanager
def context_gradients() -> Iterator[None]:
    from megatron_dspark import context_shards

    original = context_shards.gather_from_sequence_parallel_region

    def gather(rows: Any, group: Any) -> Any:
        return original(rows, tensor_parallel_output_grad=False, group=group)

    with replaced(context_shards, "gather_from_sequence_parallel_region", gather):
        yield


def all_anchors() -> Any:
    from megatron_dspark.blocks import BlockLayout

    return replaced(BlockLayout, "keep", lambda layout, *_: layout)


@contextmanager
def rows_of_other_ranks() -> Iterator[None]:
    """Context rows that only other ranks' blocks see are cleared before they are gathered."""
    from megatron_dspark.model import draft

    original = draft.DSparkDraft.block_hidden

    def hidden(module: Any, layout: Any, taps: Any, positions: Any, documents: Any, shard: Any, seen: Any) -> Any:
        seen = draft.visible_rows(layout.padded_anchors, seen.shape[1], documents)
        return original(module, layout, taps, positions, documents, shard, seen)

    with replaced(draft.DSparkDraft, "block_hidden", hidden):
        yield


def any_anchor() -> Any:
    import torch

    from megatron_dspark.data import sampler

    return replaced(sampler, "blocks_within_shard", lambda tokens, *_: torch.ones(tokens, dtype=torch.bool))


@contextmanager
def samples_counted_by_all() -> Iterator[None]:
    from megatron_dspark.model import draft

    original = draft.DSparkDraft.forward

    def forward(module: Any, input_ids: Any, loss_mask: Any, *arguments: Any) -> Any:
        rows = original(module, input_ids, loss_mask, *arguments)
        rows.num_anchor_samples = draft.count_samples(loss_mask, arguments[-1])
        return rows

    with replaced(draft.DSparkDraft, "forward", forward):
        yield


@contextmanager
def documents_of_the_target() -> Iterator[None]:
    from megatron_dspark.features import colocated

    original = colocated.document_runs

    def runs(documents: Any, *arguments: Any) -> Any:
        return original(documents.clamp(max=0), *arguments)

    with replaced(colocated, "document_runs", runs):
        yield


@contextmanager
def documents_of_the_draft() -> Iterator[None]:
    from megatron_dspark.model import block_attention

    original = block_attention.context_spans
    with replaced(block_attention, "context_spans", lambda anchors, documents=None: original(anchors)):
        yield


@contextmanager
def collective_of(module: Any, name: str) -> Iterator[None]:
    """Let a Megatron-Core module that calls `torch.distributed.<name>` do without."""
    import torch

    distributed = types.SimpleNamespace(**vars(torch.distributed))
    setattr(distributed, name, lambda *_, **__: None)
    with replaced(module, "torch", types.SimpleNamespace(**{**vars(torch), "distributed": distributed})):
        yield


def divisor() -> Any:
    import importlib

    return collective_of(importlib.import_module("megatron.core.distributed.finalize_model_grads"), "all_reduce")


@contextmanager
def fractional_divisor() -> Iterator[None]:
    """Divide by the whole number that Megatron-Core counted, which is zero."""
    from megatron_dspark.objective.loss import FractionalDivisor

    def call(self: Any, model: Any, num_tokens: Any = None, *arguments: Any, **keywords: Any) -> Any:
        return self._finalize(model, num_tokens, *arguments, **keywords)

    with replaced(FractionalDivisor, "__call__", call):
        yield


def metric_sums() -> Any:
    from megatron_dspark.objective import metrics

    return without_all_reduce(metrics)


def metrics_of_the_last_stage() -> Any:
    from megatron_dspark.training import run

    return collective_of(run, "broadcast_object_list")


@contextmanager
def vocabulary_width() -> Iterator[None]:
    """The row that fills up the last rank's part of the vocabulary counts as a token."""
    from megatron_dspark.objective import loss

    original = loss.vocab_parallel_ce_l1

    def wider(*arguments: Any, vocab_size: int, **keywords: Any) -> Any:
        return original(*arguments, vocab_size=vocab_size + 1, **keywords)

    with replaced(loss, "vocab_parallel_ce_l1", wider):
        yield


GRADIENTS, NORM, METRICS = "gradients", "gradient norm, so clipping", "metrics"
# The run ends with this.
REFUSED, FAILS = "refused", "an error"


@dataclass(frozen=True)
class Removal:
    """One part of a run to do without.

    Attributes:
        what: it, for the table.
        layout: where it matters.
        moves: what then differs from one process.
        without: a context in which to run the ranks.
        settings: further ones of the run and of its one-process twin.
    """

    what: str
    layout: str
    moves: str
    without: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)


WEIGHTS = {"objective.normalizer": "weights"}
REMOVALS = (
    Removal(
        "the mark `tensor_model_parallel` of a sharded weight (fc)",
        "TP2",
        NORM,
        lambda: mark("fc.weight", "tensor_model_parallel", False),
    ),
    Removal(
        "that a replicated weight (the final norm) has no such mark",
        "TP2",
        NORM,
        lambda: mark("draft.norm.weight", "tensor_model_parallel", True),
    ),
    Removal("the sum of q/k norm gradients over TP", "TP2", GRADIENTS, head_norms),
    Removal("the sum of the objective's gradients of hidden and latent over TP", "TP2", GRADIENTS, objective_gradients),
    Removal("the sums over the vocabulary's shards inside a chunk", "TP2", GRADIENTS, objective_sums),
    Removal("the cut at the vocabulary's true size", "TP2", GRADIENTS, vocabulary_width),
    Removal(
        "the mark `sequence_parallel` of a layer's norm",
        "TP2-SP",
        GRADIENTS,
        lambda: mark("input_layernorm.weight", "sequence_parallel", False),
    ),
    Removal(
        "that the final norm, which every rank applies to all rows, has no such mark",
        "TP2-SP",
        GRADIENTS,
        lambda: mark("draft.norm.weight", "sequence_parallel", True),
    ),
    Removal(
        "the split (not sum) of the gradient that the heads send back into the sharded rows",
        "TP2-SP",
        GRADIENTS,
        consumers_summed,
    ),
    Removal(
        "the gather of the gradient that the sharded layers send back into the whole rows",
        "TP2-SP",
        GRADIENTS,
        split_gradient,
    ),
    Removal("the gather of the target's rows", "TP2-SP", GRADIENTS, target_rows),
    Removal("the sum of gradients over DP", "DP2", GRADIENTS, data_parallel_gradients),
    Removal("the sum of the token count over DP", "DP2", GRADIENTS, divisor),
    Removal("the fractional divisor of normaliser `weights`", "DP2", GRADIENTS, fractional_divisor, WEIGHTS),
    Removal("the sum of the metrics over DP", "DP2", METRICS, metric_sums),
    Removal("the gradient norm's sum over the shards of a distributed optimizer", "DP2-DO", NORM, norm_over_shards),
    Removal("the order of the taps in the payload", "PP2", GRADIENTS, tap_order),
    Removal("the sharing of the metrics with earlier stages", "PP2", FAILS, metrics_of_the_last_stage),
    Removal("the target's keys and values of other ranks", "CP2", GRADIENTS, own_keys),
    Removal("the order of the sequence after a gather", "CP2", GRADIENTS, order_of_ranks),
    Removal("the sum of context gradients over CP", "CP2", GRADIENTS, context_gradients),
    Removal("the rows that only other ranks' blocks see", "CP2", GRADIENTS, rows_of_other_ranks),
    Removal("that a rank drafts at its own anchors alone", "CP2", GRADIENTS, all_anchors),
    Removal("that anchors are drawn where the whole block is on one rank", "CP2", REFUSED, any_anchor),
    Removal("that one rank counts the samples", "CP2", METRICS, samples_counted_by_all),
    Removal("the target's document borders", "packed", GRADIENTS, documents_of_the_target),
    Removal("the draft's document borders", "packed", GRADIENTS, documents_of_the_draft),
)
