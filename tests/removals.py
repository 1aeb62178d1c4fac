"""Ways to take one reduction, mark or mask out of a parallel run; each must move a result.

A removal is (what it takes out, the layout in which that matters, a context manager to run the ranks in).
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


GRADIENTS, NORM = "gradients", "gradient norm, so clipping"
REMOVALS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "the mark `tensor_model_parallel` of a sharded weight (fc)": (
        "TP2",
        NORM,
        lambda: mark("fc.weight", "tensor_model_parallel", False),
    ),
    "that a replicated weight (the final norm) has no such mark": (
        "TP2",
        NORM,
        lambda: mark("draft.norm.weight", "tensor_model_parallel", True),
    ),
    "the sum of q/k norm gradients over TP": ("TP2", GRADIENTS, head_norms),
    "the sum of the objective's gradients of hidden and latent over TP": ("TP2", GRADIENTS, objective_gradients),
    "the sums over the vocabulary's shards inside a chunk": ("TP2", GRADIENTS, objective_sums),
    "the mark `sequence_parallel` of a layer's norm": (
        "TP2-SP",
        GRADIENTS,
        lambda: mark("input_layernorm.weight", "sequence_parallel", False),
    ),
    "that the final norm, which every rank applies to all rows, has no such mark": (
        "TP2-SP",
        GRADIENTS,
        lambda: mark("draft.norm.weight", "sequence_parallel", True),
    ),
    "the split (not sum) of the gradient that the heads send back into the sharded rows": (
        "TP2-SP",
        GRADIENTS,
        consumers_summed,
    ),
    "the gather of the target's rows": ("TP2-SP", GRADIENTS, target_rows),
    "the sum of gradients over DP": ("DP2", GRADIENTS, data_parallel_gradients),
    "the gradient norm's sum over the shards of a distributed optimizer": ("DP2-DO", NORM, norm_over_shards),
    "the order of the taps in the payload": ("PP2", GRADIENTS, tap_order),
}
