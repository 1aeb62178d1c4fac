"""What a run tells: a line a logging step (or a progress bar in a terminal), a JSONL file, TensorBoard, a plot."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import atomic_file, json_text

METRICS_FILE = "metrics.jsonl"


class Reporter:
    """Writes a run's metrics on the first rank; on the others every call does nothing."""

    def __init__(self, output: Path, steps: int, done: int, active: bool, tensorboard: bool) -> None:
        """Open the run's files; `done` optimizer steps are already in them and later lines are dropped, 0 drops all.

        Args:
            output: the run's folder.
            steps: optimizer steps of the whole run.
            done: steps completed before this start.
            active: whether this rank reports.
            tensorboard: whether to write TensorBoard files too.
        """
        self.active = active
        if not active:
            return
        self.steps = steps
        self.path = output / METRICS_FILE
        output.mkdir(parents=True, exist_ok=True)
        self._keep_lines_until(done)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=done + 1)
        self.console = Console(stderr=True)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("train", total=steps, completed=done, note="")
            self._bar.start()

    def _keep_lines_until(self, done: int) -> None:
        if not self.path.exists():
            return
        # A run that was killed after its last checkpoint logged steps that are about to be run again; without a
        # checkpoint that is all of them, the validation before the first step included.
        text = self.path.read_text(encoding="utf-8", errors="replace") if done else ""
        kept = [line for line in text.splitlines() if 0 <= _step(line) <= done]
        with atomic_file(self.path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def to_disk(self) -> None:
        """Have the lines so far survive the machine, which a checkpoint of their step relies on."""
        if self.active:
            os.fsync(self._file.fileno())

    def advance(self, step: int) -> None:
        """Move the progress bar to `step` completed steps."""
        if self.active and self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(self, split: str, step: int, metrics: dict[str, float], seconds_left: float | None = None) -> None:
        """Record `metrics` of `split` ("train" or "validation") after `step` completed steps."""
        if not self.active:
            return
        # A metric that was not measured (a slot that no block reached) is NaN here and null in the file.
        self._file.write(json_text({"split": split, "step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{split}/{name}", value, step)
            self._board.flush()
        line = summary_line(split, step, self.steps, metrics, seconds_left)
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print one line."""
        if self.active:
            print(text, file=sys.stderr, flush=True) if self._bar is None else self._bar.console.print(text)

    def close(self) -> None:
        """Flush and close everything."""
        if not self.active:
            return
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()


def _step(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        # The torn end of a file whose writer was killed.
        return -1


def summary_line(
    split: str, step: int, steps: int, metrics: dict[str, float], seconds_left: float | None = None
) -> str:
    """Return the one line that a person reads; the JSONL has every metric."""
    parts = [f"{split:<10} {step:>{len(str(steps))}}/{steps}"]
    shown = (
        ("loss", "loss {:.4f}"),
        ("tau", "tau {:.3f}"),
        ("accept_rate", "accept {:.3f}"),
        ("top1_agreement", "top-1 {:.3f}"),
        ("grad_norm", "grad {:.2f}"),
        ("learning_rate", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tok/s"),
    )
    parts += [pattern.format(metrics[name]) for name, pattern in shown if name in metrics]
    if seconds_left is not None:
        parts.append(f"{int(seconds_left) // 60}m{int(seconds_left) % 60:02d}s left")
    return "  ".join(parts)


def peak_memory_bytes() -> int:
    """Return the most memory this rank has held: device memory with CUDA, else resident memory."""
    if platform.has_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def last_logged_step(output: str | Path) -> int:
    """Return the last step of a run's metrics file; 0 without one."""
    path = Path(output) / METRICS_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return max((_step(line) for line in text.splitlines()), default=0)


def read_metrics(output: str | Path, split: str) -> list[dict[str, Any]]:
    """Return the logged lines of `split`, in order.

    Raises:
        DSparkError: the run has no metrics file.
    """
    path = Path(output) / METRICS_FILE
    if not path.exists():
        raise DSparkError(f"{path} does not exist; train a run into {output} first")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["split"] == split]


def plot_curves(output: str | Path, picture: str | Path) -> Path:
    """Draw loss, tau and acceptance by slot of a run (training and validation) into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train, validation = read_metrics(output, "train"), read_metrics(output, "validation")
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    for axis, name, title in ((axes[0], "loss", "loss"), (axes[1], "tau", "tau (expected accepted length)")):
        for lines, label in ((train, "train"), (validation, "held-out")):
            axis.plot([line["step"] for line in lines], [line[name] for line in lines], marker=".", label=label)
        axis.set(title=title, xlabel="optimizer step")
        axis.legend()
        axis.grid(alpha=0.3)
    for lines, label in ((validation[:1], "start"), (validation[-1:], "end")):
        for line in lines:
            slots = sorted((int(key.split("@")[1]), value) for key, value in line.items() if "accept_rate@" in key)
            axes[2].plot([slot for slot, _ in slots], [value for _, value in slots], marker="o", label=label)
    axes[2].set(title="held-out accept rate by slot", xlabel="slot", ylim=(0, 1))
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].legend()
    axes[2].grid(alpha=0.3)
    picture = Path(picture)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture
