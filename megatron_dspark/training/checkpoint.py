"""What a checkpoint holds, the newest one found again, and a damaged one refused.

A run keeps `checkpoints/step-0000040/`: Megatron-Core's `torch_dist` files (parameters, optimizer, scheduler, which
load at another parallel layout, and what every rank alone has), and `run.json` (settings, model config, progress).
`saving.py` writes them.
"""

import json
import os
import pickle
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, sha256
from megatron_dspark.training.no_code import refuse_code
from megatron_dspark.training.optimizer_state import (
    begin_moments,
    prepare_to_load,
    restore_step_count_of_zero,
    separate_step_counts,
    take_schedule,
)

RUN_FILE, LATEST_FILE, BEST_FILE = "run.json", "latest.json", "best.json"
FORMAT_VERSION = 2
_STEP_FOLDER = re.compile(r"step-(\d{7,})")


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its folder, optimizer step and `run.json`."""

    folder: Path
    step: int
    run: dict[str, Any]


def checkpoints_folder(output: str | Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return Path(output) / "checkpoints"


def load_checkpoint(
    checkpoint: Checkpoint,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    stages: torch.distributed.ProcessGroup,
    layout: dict[str, int],
) -> dict[str, Any] | None:
    """Load parameters, optimizer and scheduler in place; every rank calls it, in any layout.

    Args:
        checkpoint: where from.
        model: the model inside its wrappers; None on pipeline stages without the draft.
        optimizer: Megatron-Core optimizer.
        scheduler: Megatron-Core parameter scheduler.
        stages: the pipeline stages' group.
        layout: how this job is laid out.

    Returns:
        What this rank alone had at the save; None in another layout than `layout`, where no rank is its successor.

    Raises:
        DSparkError: a file is missing or altered, or the checkpoint holds other tensors than this model.
    """
    if model is not None:
        prepare_to_load(optimizer)
    wanted = sharded_state(model, optimizer, scheduler, stages, loading=True)
    if checkpoint.run["layout"] == layout:
        wanted["rank"] = _of_this_rank(None)
    state = _read(checkpoint.folder, wanted)
    if model is not None:
        model.load_state_dict(state["model"])
        # The optimizer's FP32 masters come from the checkpoint, some of them in place already: making them anew from
        # the parameters would round them.
        take_schedule(state["optimizer"], optimizer.param_groups)
        restore_step_count_of_zero(state["optimizer"], optimizer)
        optimizer.load_state_dict(state["optimizer"])
        separate_step_counts(optimizer)
    scheduler.load_state_dict(state["scheduler"])
    return state.get("rank")


def load_draft_weights(
    checkpoint: Checkpoint, model: Any | None, optimizer: Any = None, keep: Collection[str] = ()
) -> None:
    """Load the draft's parameters alone into a model of any layout; every rank calls it.

    Args:
        checkpoint: where from.
        model: the model inside its wrappers; None on pipeline stages without the draft.
        optimizer: Megatron-Core's optimizer of a run that starts from these weights: its FP32 masters are made anew,
            or its first step would write the masters' old values back.
        keep: parameters that stay what they are, whatever the checkpoint holds.

    Raises:
        DSparkError: see `load_checkpoint`.
    """
    wanted = {} if model is None else model.sharded_state_dict()
    state = _read(checkpoint.folder, {"model": {name: part for name, part in wanted.items() if name not in keep}})
    if model is not None:
        own = model.state_dict() if keep else {}
        model.load_state_dict({**{name: own[name] for name in keep if name in own}, **state["model"]})
    if optimizer is not None:
        optimizer.reload_model_params()


def find_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint | None:
    """Return the checkpoint named by `path`, or a run's newest (or given) one; None when a run has none yet.

    Args:
        path: a run's output folder, its `checkpoints` folder, or one `step-…` folder.
        step: optimizer step to take; None for the newest.

    Raises:
        DSparkError: the asked step does not exist, or the newest is damaged (the newest whole one is named).
    """
    path = Path(path)
    if _STEP_FOLDER.fullmatch(path.name):
        return _open(path)
    folder = path if path.name == "checkpoints" else checkpoints_folder(path)
    if step is not None:
        found = published(folder)
        if step not in found:
            there = f"it has {', '.join(map(str, found))}" if found else "it has none at all"
            raise DSparkError(f"{folder} has no checkpoint of step {step}; {there}")
        return _open_in(folder, found[step])
    # The pointer before the folders: a job that is running publishes a folder first, then points at it.
    newest = _pointed_at(folder)
    while True:
        try:
            return _open_newest(folder, newest)
        except DSparkError:
            # It may have published another one meanwhile, and removed the one that was read.
            before, newest = newest, _pointed_at(folder)
            if newest == before:
                raise


def _open_newest(folder: Path, newest: int | None) -> Checkpoint | None:
    found = published(folder)
    if newest is None:
        if not found:
            return None
        newest = max(found)
    if newest not in found:
        raise DSparkError(f"the newest checkpoint of {folder} is of step {newest} and is gone{newest_whole(folder)}")
    return _open_in(folder, found[newest])


def _open_in(folder: Path, path: Path) -> Checkpoint:
    try:
        return _open(path)
    except DSparkError as error:
        raise DSparkError(f"{error}{newest_whole(folder, path)}") from None


def _pointed_at(folder: Path) -> int | None:
    path = folder / LATEST_FILE
    if not path.exists():
        return None
    try:
        return read_json(path, "the pointer to the newest checkpoint")["step"]
    except (DSparkError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, DSparkError) else f"{path} names no step"
        raise DSparkError(reason + newest_whole(folder)) from None


def published(folder: Path) -> dict[int, Path]:
    """Return step → folder of the checkpoints in `folder`, by step."""
    matches = ((_STEP_FOLDER.fullmatch(item.name), item) for item in folder.glob("step-*"))
    return dict(sorted((int(match.group(1)), item) for match, item in matches if match))


def newest_whole(folder: Path, but: Path | None = None) -> str:
    """Return the end of a sentence that names the newest whole checkpoint of a run's `folder`.

    Every file is read again for that, by the first rank alone, which is the one that speaks.

    Args:
        folder: the run's `checkpoints` folder.
        but: one that is known to be damaged.
    """
    if os.environ.get("RANK", "0") != "0":
        return ""
    for step, path in reversed(published(folder).items()):
        if path != but and damage(path) is None:
            return f"; step {step} is the newest whole one, resume from it with --resume-from {step}"
    return "; no other one is whole"


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, None when every file is as it was written and none would run code."""
    try:
        _open(folder)
        _verify_files(folder)
        refuse_code(folder)
    except _UNREADABLE as error:
        return _reason(error, folder)
    return None


_UNREADABLE = (
    *(DSparkError, CheckpointingException, CheckpointException, pickle.UnpicklingError),
    *(OSError, EOFError, RuntimeError, KeyError, ValueError, AttributeError, TypeError, IndexError, AssertionError),
)


def _verify_files(folder: Path) -> None:
    with open(folder / "integrity.json", encoding="utf-8") as file:
        listed = json.load(file)["files"]
    unlisted = {item.name for item in folder.iterdir()} - set(listed) - {"integrity.json", RUN_FILE}
    if unlisted:
        raise CheckpointingException(f"{min(unlisted)} is not among the files that were written")
    for name, expected in listed.items():
        if not (folder / name).is_file():
            raise CheckpointingException(f"{name} is missing")
        if sha256(folder / name) != expected:
            raise CheckpointingException(f"{name} is not as it was written")


def _reason(error: BaseException, folder: Path) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].replace(f"{folder}/", "")


def _open(folder: Path) -> Checkpoint:
    run = read_json(folder / RUN_FILE, "the checkpoint's run description")
    if not isinstance(run, dict) or run.get("format") != FORMAT_VERSION:
        written = run.get("format") if isinstance(run, dict) else None
        raise DSparkError(
            f"the checkpoint {folder} has format {written!r} and this version reads {FORMAT_VERSION}; use the version "
            "that wrote it, or train anew"
        )
    return Checkpoint(folder, run["step"], run)


def sharded_state(
    model: Any | None,
    optimizer: Any,
    scheduler: Any,
    stages: torch.distributed.ProcessGroup,
    loading: bool,
) -> dict[str, Any]:
    """Return Megatron-Core's sharded state of a run: the same files load in another layout.

    Args:
        model: None on pipeline stages without the draft, which have no optimizer state either.
        optimizer: Megatron-Core optimizer.
        scheduler: Megatron-Core parameter scheduler.
        stages: the pipeline stages' group.
        loading: whether the state is to be loaded into.
    """
    # Without empty parts: Megatron-Core would warn that ranks differ in them.
    state: dict[str, Any] = {"scheduler": scheduler.state_dict()}
    if model is not None:
        if not loading:
            begin_moments(optimizer)
        state["model"] = model.sharded_state_dict()
        # The layout of a distributed optimizer's state that loads at another data-parallel size; others ignore it.
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"], is_loading=loading, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
        )
    if stages.size() > 1 and not loading:
        # Megatron-Core stores what is no tensor (parameter groups, the step count) from the first rank, and it is the
        # last stage that has the optimizer.
        plain, _ = extract_matching_values(state.get("optimizer", {}), lambda value: not isinstance(value, ShardedBase))
        told = [plain]
        torch.distributed.broadcast_object_list(told, get_pp_last_rank(stages), stages, device=platform.device())
        if model is None:
            state["optimizer"] = told[0]
    return state


def rank_state(values: dict[str, Any]) -> dict[str, ShardedObject]:
    """Return the part of a checkpoint that this rank alone has, to be put beside `sharded_state`."""
    return {"rank": _of_this_rank(values)}


def _of_this_rank(values: dict[str, Any] | None) -> ShardedObject:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("rank_state", values, (world,), (rank,))


def _read(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    # One rank reads every byte, and all say the same: a rank that failed alone would leave the others waiting.
    problem = [damage(folder) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(problem, device=platform.device())
    if problem[0] is None:
        try:
            with warnings.catch_warnings():
                # About how Megatron-Core calls PyTorch: its common state is read by every rank on its own, as intended.
                for sentence in ("torch.distributed is disabled", "The argument order of load has been changed"):
                    warnings.filterwarnings("ignore", message=sentence, module=r"torch\.distributed\.checkpoint")
                loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
        except _UNREADABLE as error:
            problem = [_reason(error, folder)]
        problems: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem[0])
        problem = [next((problem for problem in problems if problem is not None), None)]
    if problem[0] is not None:
        raise DSparkError(f"the checkpoint {folder} cannot be read ({problem[0]}){newest_whole(folder.parent, folder)}")
    return loaded
