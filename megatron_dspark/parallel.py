"""Process groups of a job: torchrun's ranks, or one."""

import contextlib
import gc
import os
import random
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError

platform.prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402


@contextlib.contextmanager
def process_groups(
    tensor_parallel_size: int,
    seed: int,
    *,
    context_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_parallel_size: int | None = None,
    timeout_minutes: float = 30.0,
    agreed: dict[str, Any] | None = None,
) -> Iterator[ProcessGroupCollection]:
    """Start torch.distributed (torchrun's ranks, or one) and Megatron-Core's groups; end them afterwards.

    A job that already has a process group keeps it. A rank that waits longer than `timeout_minutes` for another one
    raises.

    Args:
        tensor_parallel_size: ranks that share each layer.
        seed: of every random number generator.
        context_parallel_size: ranks that share each sample's rows.
        pipeline_parallel_size: ranks that share the layers.
        virtual_pipeline_parallel_size: stages on each of them; None without.
        timeout_minutes: how long a rank waits for another one.
        agreed: what must be the same on every rank, by the name that people know it by.

    Raises:
        DSparkError: on every rank, when two of them differ in something of `agreed`.
    """
    ours = not torch.distributed.is_initialized()
    if not ours:
        # The modules of an earlier run are reference cycles, which hold its groups, and those threads and connections.
        gc.collect()
    if ours:
        if platform.has_cuda():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        alone = "WORLD_SIZE" not in os.environ
        torch.distributed.init_process_group(
            platform.communication_backend(),
            timeout=timedelta(minutes=timeout_minutes),
            **(dict(store=torch.distributed.HashStore(), rank=0, world_size=1) if alone else {}),
        )
    if agreed is not None:
        _refuse_disagreement(agreed)
    # A process that already had a layout (another run, a notebook) gets this one.
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    known = set(_groups())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        context_parallel_size=context_parallel_size,
        distributed_timeout_minutes=timeout_minutes,
        pipeline_model_parallel_size=pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            torch.distributed.destroy_process_group()
        else:
            end_groups(known)


def _refuse_disagreement(agreed: dict[str, Any]) -> None:
    """Ranks that mean different jobs would wait for each other for ever, or train something that nobody asked for."""
    every: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, agreed)
    for rank, theirs in enumerate(every):
        for name in sorted(every[0].keys() | theirs.keys()):
            if every[0].get(name) != theirs.get(name):
                raise DSparkError(
                    f"{name} is {every[0].get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}; start every "
                    "rank of a job with the same command and the same files"
                )


def end_groups(kept: Collection[torch.distributed.ProcessGroup]) -> None:
    """End every group but `kept`: Megatron-Core forgets its own without, and each keeps threads and connections."""
    for group in [group for group in _groups() if group not in kept]:
        torch.distributed.destroy_process_group(group)


def _groups() -> list[torch.distributed.ProcessGroup]:
    return list(torch.distributed.distributed_c10d._world.pg_map)
