"""What surrounds a run: its folder is written by one job only, and a rank that is gone ends the job with a sentence."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError, LostRankError
from megatron_dspark.lock import folder_lock
from megatron_dspark.training.checkpoint import Checkpoint, checkpoints_folder, find_checkpoint, newest_whole
from megatron_dspark.training.settings import TrainSettings


@contextlib.contextmanager
def sole_writer(settings: TrainSettings, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Hold the output folder; all ranks must have found the same checkpoint, and nobody a newer one since."""
    step = None if checkpoint is None else checkpoint.step
    told: list[Any] = [None]
    with contextlib.ExitStack() as held:
        if torch.distributed.get_rank() == 0:
            try:
                if not held.enter_context(folder_lock(settings.output)):
                    print(
                        f"the file system of {settings.output} has no locks; see to it that no other job writes there",
                        file=sys.stderr,
                    )
                now = find_checkpoint(settings.output, settings.checkpoint.resume_from)
                told = [("found", None if now is None else now.step)]
            except (DSparkError, OSError) as error:
                told = [("refused", str(error))]
        torch.distributed.broadcast_object_list(told, device=platform.device())
        word, value = told[0]
        if word == "refused":
            raise DSparkError(value)
        if value != step:
            raise DSparkError(
                f"rank {torch.distributed.get_rank()} found step {step} to be the newest checkpoint of "
                f"{settings.output} and the first rank, just now, step {value}; start again"
            )
        yield


def is_lost_rank(error: BaseException) -> bool:
    """Whether `error` is what a collective raises when another rank has ended or does not answer."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return any(sign in str(error) for sign in ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL"))


@contextlib.contextmanager
def lost_ranks(settings: TrainSettings) -> Iterator[None]:
    """Turn the error of a collective whose other end is gone into one sentence that names the newest checkpoint."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise LostRankError(
            f"another rank of the job has ended or did not answer within {settings.timeout_minutes:g} minutes, as rank "
            f"{torch.distributed.get_rank()} sees it ({reason}); start the same command again"
            f"{newest_whole(checkpoints_folder(settings.output))}"
        ) from error
