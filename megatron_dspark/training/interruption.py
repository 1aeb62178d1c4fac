"""Being told to stop: by a signal that may reach one rank only, or by a limit on the run's time."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed

from megatron_dspark import platform

EXIT_STOPPED = 75
"""Exit code of a run that saved and stopped before its end (EX_TEMPFAIL: start it again)."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TIME_LIMIT = 1 << 16


class Interruption:
    """Notes SIGTERM, SIGUSR1 and the time limit; between two steps all ranks agree whether to stop.

    As a context manager it handles the signals; outside the main thread, where Python cannot, the time limit alone
    counts. Time is measured by a clock that nobody sets, since the machine's may be set back.
    """

    def __init__(self, limit_minutes: float | None) -> None:
        """Args: minutes from now after which to stop; None has no limit."""
        self._until = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
        self._noted = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = max(self._noted, number)

    def agreed(self) -> str | None:
        """Return why to stop now ("SIGTERM", "SIGUSR1", "time limit"), the same on all ranks; every rank calls it."""
        noted = self._noted
        if self._until is not None and time.monotonic() >= self._until:
            noted = max(noted, _TIME_LIMIT)
        highest = torch.tensor([noted], dtype=torch.int64, device=platform.device())
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
        noted = int(highest)
        if noted == _TIME_LIMIT:
            return "time limit"
        return signal.Signals(noted).name if noted else None
