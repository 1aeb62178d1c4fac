"""What Megatron-Core's optimizers need around saving and loading, so that a resumed run is the uninterrupted one."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer


def begin_moments(optimizer: Any) -> None:
    """Give an optimizer that has not stepped yet the moments that its first step would begin with.

    In fp16 the first steps may all be skipped; a checkpoint without moments could not be loaded.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None or part.optimizer.state:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if _counts_in_tensors(part.optimizer):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(0.0)


def restore_step_count_of_zero(state: dict[str, Any], optimizer: Any) -> None:
    """Put back the step count that Megatron-Core leaves out when it is 0, and PyTorch's Adam asks for."""
    inner = state.get("optimizer", state)
    if inner.get("state") and _counts_in_tensors(optimizer.optimizer):
        inner["state"].setdefault("common_step", torch.tensor(0.0))


def _counts_in_tensors(adam: Any) -> bool:
    # Others count in their parameter groups.
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)


def prepare_to_load(optimizer: Any) -> None:
    """Make a distributed optimizer over PyTorch's Adam ready to be loaded into.

    Megatron-Core 0.19 asks it for its step count before it has made any state, and looks for that count among the
    loaded tensors, where it is not. With Apex's or Transformer Engine's Adam neither happens.
    """
    for inner in _over_torch_adam(optimizer):
        if inner.optimizer.state:
            continue
        inner._init_optimizer_states_with_dummy_values()
        set_states = inner._set_main_param_and_optimizer_states

        def set_states_but_step(parameter: Any, tensors: dict[str, Any], set_states: Any = set_states) -> None:
            set_states(parameter, {"step": None, **tensors})

        inner._set_main_param_and_optimizer_states = set_states_but_step


def separate_step_counts(optimizer: Any) -> None:
    """Give every parameter a step count of its own after loading.

    Megatron-Core hands PyTorch's Adam one tensor as the step count of all parameters, and every step would then count
    once for each parameter.
    """
    for inner in _over_torch_adam(optimizer):
        for state in inner.optimizer.state.values():
            state["step"] = state["step"].clone()


def _over_torch_adam(optimizer: Any) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [] if HAVE_APEX_OR_TE else [part for part in parts if isinstance(part, DistributedOptimizer)]


def take_schedule(state: Any, groups: list[dict[str, Any]]) -> None:
    """Give saved parameter groups this run's learning rates and decays: Megatron-Core finds a group by them too."""
    if not isinstance(state, dict):
        return
    kind = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    for saved in state.get("param_groups", []):
        for group in groups:
            if all(saved.get(name) == group.get(name) for name in kind):
                saved.update(
                    {name: group[name] for name in ("max_lr", "min_lr", "start_wd", "end_wd") if name in group}
                )
    for value in state.values():
        take_schedule(value, groups)
