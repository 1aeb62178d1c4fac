"""Sharded checkpoints that appear whole, and the newest one found again.

A run keeps `checkpoints/step-0000040/`: Megatron-Core's `torch_dist` files (parameters, optimizer, scheduler), which
load at another tensor- or data-parallel size, and `run.json` (settings, model config, progress). A checkpoint is
written beside its final name and renamed when complete; `latest.json` is replaced after that.
"""

import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json

RUN_FILE, LATEST_FILE = "run.json", "latest.json"
FORMAT_VERSION = 1
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


def save_checkpoint(
    output: str | Path, step: int, model: Any, optimizer: Any, scheduler: Any, run: dict[str, Any]
) -> Path:
    """Write and publish the checkpoint of `step`; every rank calls it.

    Args:
        output: the run's folder.
        step: completed optimizer steps.
        model: the (wrapped) model chunk.
        optimizer: Megatron-Core optimizer.
        scheduler: Megatron-Core parameter scheduler.
        run: plain values for run.json; "step" and "format" are added.
    """
    folder = checkpoints_folder(output)
    final = folder / f"step-{step:07d}"
    partial = folder / f".step-{step:07d}.partial"
    if _is_first_rank():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    # Integrity: SHA-256 of every file is stored and checked again when the checkpoint is read.
    dist_checkpointing.save(
        _sharded_state(model, optimizer, scheduler, loading=False),
        str(partial),
        async_strategy="mcore",
        verify_integrity=True,
    )
    torch.distributed.barrier()
    if _is_first_rank():
        write_json(partial / RUN_FILE, {"format": FORMAT_VERSION, "step": step, **run})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        write_json(folder / LATEST_FILE, {"step": step, "folder": final.name})
    torch.distributed.barrier()
    return final


def load_checkpoint(checkpoint: Checkpoint, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Load parameters, optimizer and scheduler in place; every rank calls it, at any tensor- or data-parallel size.

    Raises:
        DSparkError: a file is missing or altered, or the checkpoint holds other tensors than this model.
    """
    state = _read(checkpoint.folder, _sharded_state(model, optimizer, scheduler, loading=True))
    model.load_state_dict(state["model"])
    # Before the optimizer's own state, whose FP32 masters hold more digits than the parameters.
    optimizer.reload_model_params()
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def load_draft_weights(checkpoint: Checkpoint, model: Any, optimizer: Any = None) -> None:
    """Load the draft's parameters alone into a model of any tensor-parallel size.

    Args:
        checkpoint: where from.
        model: the model inside its wrappers.
        optimizer: Megatron-Core's optimizer of a run that starts from these weights: its FP32 masters are made anew,
            or its first step would write the masters' old values back.

    Raises:
        DSparkError: see `load_checkpoint`.
    """
    state = _read(checkpoint.folder, {"model": model.sharded_state_dict()})
    model.load_state_dict(state["model"])
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
    found = published(folder)
    if not found:
        return None
    if step is not None:
        if step not in found:
            raise DSparkError(f"{folder} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
        return _open(found[step])
    newest = max(found)
    if (folder / LATEST_FILE).exists():
        newest = read_json(folder / LATEST_FILE, "the pointer to the newest checkpoint")["step"]
        if newest not in found:
            raise DSparkError(
                f"the newest checkpoint of {folder} is of step {newest} and is gone; name step {max(found)}, the "
                "newest whole one, to go on from there"
            )
    return _open(found[newest])


def published(folder: Path) -> dict[int, Path]:
    """Return step → folder of the checkpoints in `folder`, by step."""
    matches = ((_STEP_FOLDER.fullmatch(item.name), item) for item in folder.glob("step-*"))
    return dict(sorted((int(match.group(1)), item) for match, item in matches if match))


def _open(folder: Path) -> Checkpoint:
    run = read_json(folder / RUN_FILE, "the checkpoint's run description")
    if run.get("format") != FORMAT_VERSION:
        raise DSparkError(
            f"the checkpoint {folder} has format {run.get('format')!r} and this version reads {FORMAT_VERSION}"
        )
    return Checkpoint(folder, run["step"], run)


def _sharded_state(model: Any, optimizer: Any, scheduler: Any, loading: bool) -> dict[str, Any]:
    parameters = model.sharded_state_dict()
    return {
        "model": parameters,
        # The layout of a distributed optimizer's state that loads at another data-parallel size; others ignore it.
        "optimizer": optimizer.sharded_state_dict(
            parameters, is_loading=loading, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
        ),
        "scheduler": scheduler.state_dict(),
    }


def _read(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            # About how Megatron-Core calls PyTorch: its common state is read by every rank on its own, as intended.
            for sentence in ("torch.distributed is disabled", "The argument order of load has been changed"):
                warnings.filterwarnings("ignore", message=sentence, module=r"torch\.distributed\.checkpoint")
            return dist_checkpointing.load(
                state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED, verify_integrity=True
            )
    except (CheckpointingException, OSError, EOFError, RuntimeError, KeyError, ValueError) as error:
        others = [step for step, path in published(folder.parent).items() if path != folder]
        hint = f"; step {max(others)} is the newest other one" if others else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DSparkError(f"the checkpoint {folder} cannot be read ({reason}){hint}") from error


def _is_first_rank() -> bool:
    return torch.distributed.get_rank() == 0
