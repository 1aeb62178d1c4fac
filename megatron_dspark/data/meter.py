"""How far a generation is: a progress bar in a terminal, nothing elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Meter:
    """Counts answers and tokens, and shows the speed and the time that is left."""

    def __init__(self, title: str, total: int, done: int, longest: int, deadline: float) -> None:
        """Set up.

        Args:
            title: what the bar calls the job.
            total: answers to make.
            done: of these, made by an earlier run.
            longest: tokens of the longest possible answer: the estimate until the first one is complete.
            deadline: `time.time()` at which the job stops in any case.
        """
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("answers"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=total, completed=done, note="loading the target")
        self._left, self._longest, self._deadline = total - done, longest, deadline
        self._answered = self._answer_tokens = self._made = 0
        self._began: float | None = None

    def __enter__(self) -> "Meter":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def tokens(self, count: int) -> None:
        """`count` more tokens were made, of answers that may not be complete."""
        now = time.time()
        if self._began is None:  # the first report ends the loading; from here on the speed counts
            self._began = now
            return
        self._made += count
        rate = self._made / max(now - self._began, 1e-3)
        mean = self._answer_tokens / self._answered if self._answered else self._longest
        seconds = max(0.0, self._left * mean - self._made) / max(rate, 1e-3)
        seconds = int(min(seconds, max(0.0, self._deadline - now)))
        self._progress.update(self._task, note=f"{rate:.0f} tokens/s, {seconds // 60}:{seconds % 60:02d} left")

    def answered(self, tokens: int) -> None:
        """One more answer, of `tokens` tokens, is complete."""
        self._answered += 1
        self._answer_tokens += tokens
        self._progress.advance(self._task)
