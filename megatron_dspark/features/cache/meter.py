"""How far a precompute is, over all ranks: bytes, speed and the time that is left; nothing where no terminal is."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_dspark.features.cache.plan import ShardPlan
from megatron_dspark.features.cache.shard import shard_name

_LOOK_SECONDS = 2.0


class CacheMeter:
    """Counts this rank's samples as they come and the other ranks' shards as they appear."""

    def __init__(self, plan: ShardPlan, folder: Path, active: bool) -> None:
        """Args: the plan, the cache's folder, and whether this rank shows anything."""
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("precompute"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (active and console.is_terminal),
        )
        self._task = self._progress.add_task("precompute", total=plan.total_bytes)
        self._plan, self._folder, self._mine = plan, folder, set()
        self._bytes = self._others = 0
        self._looked = 0.0
        self.seconds, self._began = 0.0, time.perf_counter()

    def __enter__(self) -> "CacheMeter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self.seconds = time.perf_counter() - self._began

    def begin(self, mine: list[int]) -> None:
        """Start the clock; `mine` are the shards that this rank will write."""
        self._mine, self._began = set(mine), time.perf_counter()
        self._look()
        self._progress.reset(self._task, total=self._plan.total_bytes, completed=self._others)

    def sample(self, tokens: int) -> None:
        """One more sample of this rank was captured."""
        self._bytes += tokens * self._plan.bytes_per_token
        if not self._progress.disable:
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._look()
            self._progress.update(self._task, completed=self._bytes + self._others)

    def _look(self) -> None:
        self._looked = time.monotonic()
        there = {path.name for path in self._folder.glob("shard-*.safetensors")}
        others = (number for number in range(self._plan.num_shards) if number not in self._mine)
        self._others = sum(self._plan.shard_bytes(number) for number in others if shard_name(number) in there)
