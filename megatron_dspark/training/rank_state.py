"""The state of one rank that no other rank has: its random number generators."""

import random
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_dspark import platform


def rng_state() -> dict[str, Any]:
    """Return the states of every random number generator of this rank: PyTorch, Python, NumPy, Megatron-Core.

    Plain values and tensors only, so that a checkpoint of them is read without running code.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if platform.has_cuda() else None,
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(numpy.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring back what `rng_state` returned, on a rank of the same place in the same layout."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and platform.has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["megatron"]))
    python, array = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy.random.set_state(
        (
            array["name"],
            array["keys"].numpy().astype(numpy.uint32),
            array["position"],
            array["has_gauss"],
            array["cached"],
        )
    )
