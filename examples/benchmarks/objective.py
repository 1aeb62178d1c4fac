"""Time and memory of the objective, forward and backward from hidden states, against two ways without fusion.

fused         megatron_dspark.objective: gradients made chunk by chunk in the forward pass, no [rows, vocab] tensor.
materialized  the formula written down with plain PyTorch: every intermediate is a [rows, vocab] tensor.
sliced        both logits and the cross-entropy materialized, L1 in checkpointed slices of `--slice-rows` rows, 128 as
              in NeMo AutoModel. A slice's backward fills and adds a whole [rows, vocab] gradient, nearly all of it
              zeros: the time grows with the square of the rows.

Every measurement has its own process and one thread. On a CPU the time is CPU seconds (the smallest of `--repeat`
runs) and the peak is that of resident memory over what it was with the inputs in place; on a GPU, seconds and
allocated memory. Examples:

    python examples/benchmarks/objective.py
    python examples/benchmarks/objective.py --rows 3584 --vocab 32000 --hidden 256 --impl fused --json
    python examples/benchmarks/objective.py --rows 448 --rows 896 --rows 1792 --rows 3584 --plot scaling.png
    python examples/benchmarks/objective.py --impl fused --tp 1 --tp 2
    python examples/benchmarks/objective.py --results lines.jsonl --plot scaling.png
"""

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_dspark.objective.fused import vocab_parallel_ce_l1

BLOCK_SIZE = 7


class Implementation(StrEnum):
    FUSED = "fused"
    MATERIALIZED = "materialized"
    SLICED = "sliced"


class Precision(StrEnum):
    FP32 = "float32"
    BF16 = "bfloat16"


class Kernel(StrEnum):
    EAGER = "eager"
    COMPILED = "compiled"


@dataclass(frozen=True)
class Case:
    impl: Implementation
    rows: int
    vocab: int
    hidden: int
    markov_rank: int
    tp: int
    dtype: str
    repeat: int
    device: str
    slice_rows: int
    kernel: str


@dataclass
class Problem:
    """Inputs of one rank; `lm_head` is frozen and also the teacher's, as in training."""

    hidden: Tensor
    latent: Tensor | None
    lm_head: Tensor
    markov_w2: Tensor | None
    teacher_hidden: Tensor
    labels: Tensor
    ce_weight: Tensor
    l1_weight: Tensor

    @classmethod
    def random(cls, case: Case, rank: int) -> "Problem":
        generator = torch.Generator().manual_seed(0)
        dtype, shard = getattr(torch, case.dtype), -(-case.vocab // case.tp)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator).mul_(scale).to(case.device, dtype)

        def share(matrix: Tensor) -> Tensor:
            # Padded like Megatron-Core pads, so that every rank has equally many rows.
            mine = matrix[rank * shard : (rank + 1) * shard]
            return torch.cat([mine, mine.new_zeros(shard - len(mine), mine.shape[1])]) if len(mine) < shard else mine

        hidden, teacher_hidden = normal(case.rows, case.hidden), normal(case.rows, case.hidden)
        lm_head = share(normal(case.vocab, case.hidden, scale=case.hidden**-0.5)).clone()
        latent = markov_w2 = None
        if case.markov_rank:
            latent = normal(case.rows, case.markov_rank).requires_grad_()
            markov_w2 = share(normal(case.vocab, case.markov_rank, scale=0.1 * case.markov_rank**-0.5)).clone()
            markov_w2.requires_grad_()
        labels = torch.randint(case.vocab, (case.rows,), generator=generator).to(case.device)
        weight = torch.exp(-(torch.arange(case.rows, device=case.device) % BLOCK_SIZE) / 4.0)
        return cls(
            hidden.requires_grad_(), latent, lm_head, markov_w2, teacher_hidden, labels, 0.1 * weight, 0.9 * weight
        )


def fused(problem: Problem, case: Case, group: dist.ProcessGroup | None) -> Tensor:
    return vocab_parallel_ce_l1(
        problem.hidden,
        problem.latent,
        problem.lm_head,
        problem.markov_w2,
        problem.teacher_hidden,
        problem.lm_head,
        problem.labels,
        problem.ce_weight,
        problem.l1_weight,
        vocab_size=case.vocab,
        tp_group=group,
        kernel=case.kernel,
    ).loss


def both_logits(problem: Problem) -> tuple[Tensor, Tensor]:
    draft = problem.hidden @ problem.lm_head.t()
    if problem.latent is not None and problem.markov_w2 is not None:
        draft = draft + problem.latent @ problem.markov_w2.t()
    with torch.no_grad():
        teacher = problem.teacher_hidden @ problem.lm_head.t()
    return draft, teacher


def l1_distance(draft: Tensor, teacher: Tensor) -> Tensor:
    return (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs().sum(-1)


def weighted_sum(problem: Problem, draft: Tensor, l1: Tensor) -> Tensor:
    ce = F.cross_entropy(draft.float(), problem.labels, reduction="none")
    return (problem.ce_weight * ce + problem.l1_weight * l1).sum()


def materialized(problem: Problem, case: Case) -> Tensor:
    draft, teacher = both_logits(problem)
    return weighted_sum(problem, draft, l1_distance(draft, teacher))


def sliced(problem: Problem, case: Case) -> Tensor:
    draft, teacher = both_logits(problem)
    slices = [slice(first, first + case.slice_rows) for first in range(0, len(draft), case.slice_rows)]
    l1 = [checkpoint(l1_distance, draft[rows], teacher[rows], use_reentrant=False) for rows in slices]
    return weighted_sum(problem, draft, torch.cat(l1))


class PeakMemory:
    """Peak memory since construction, in bytes over what was in use then."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of resident memory
            self.before = self._status("VmRSS")

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")

    def peak(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() - self.before
        return self._status("VmHWM") - self.before


def step(case: Case, problem: Problem, group: dist.ProcessGroup | None) -> float:
    if case.impl == Implementation.FUSED:
        loss = fused(problem, case, group)
    else:
        loss = {Implementation.MATERIALIZED: materialized, Implementation.SLICED: sliced}[case.impl](problem, case)
    loss.backward()
    for tensor in (problem.hidden, problem.latent, problem.markov_w2):
        if tensor is not None:
            tensor.grad = None
    return loss.item()


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(rank: int, case: Case, folder: str) -> None:
    """Body of a rank's process: warm up on a small problem, measure, leave the numbers in a file."""
    torch.set_num_threads(1)
    group = None
    if case.tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.tp)
        group = dist.group.WORLD
    small = Case(**{**asdict(case), "rows": 8, "vocab": 512, "hidden": 64, "markov_rank": min(8, case.markov_rank)})
    step(small, Problem.random(small, rank), group)
    problem = Problem.random(case, rank)
    if case.kernel == Kernel.COMPILED and case.impl == Implementation.FUSED:
        step(case, problem, group)  # compiles for this vocabulary, which is no part of a step
    memory, seconds, loss = PeakMemory(case.device), [], 0.0
    for _ in range(case.repeat):
        start = clock(case.device)
        loss = step(case, problem, group)
        seconds.append(clock(case.device) - start)
    result = {"seconds": min(seconds), "peak": memory.peak(), "loss": loss}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    if case.tp > 1:
        dist.destroy_process_group()


def run(case: Case) -> dict[str, Any]:
    """Measure one case in fresh processes; with several ranks, time and memory are those of the costliest one."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (case, folder), nprocs=case.tp)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.tp)]
    return {
        "impl": str(case.impl),
        "rows": case.rows,
        "vocab": case.vocab,
        "hidden": case.hidden,
        "markov_rank": case.markov_rank,
        "tp": case.tp,
        "dtype": case.dtype,
        "device": case.device,
        "cpu_s" if case.device == "cpu" else "gpu_s": round(max(r["seconds"] for r in ranks), 4),
        "peak_gib_over_inputs": round(max(r["peak"] for r in ranks) / 2**30, 4),
        "loss": ranks[0]["loss"],
        "kernel": case.kernel if case.impl == Implementation.FUSED else None,
        "matrix_tflops": round(matrix_flops(case) / max(r["seconds"] for r in ranks) / 1e12, 3),
    }


def matrix_flops(case: Case) -> float:
    """Operations that the matrix products of one rank need: both logits, and the gradients of hidden, latent and W2."""
    return 2.0 * case.rows * -(-case.vocab // case.tp) * (3 * case.hidden + 3 * case.markov_rank)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lines: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for result in results:
        lines.setdefault((result["impl"], result["vocab"], result["tp"]), []).append(result)
    for (impl, vocab, tp), points in sorted(lines.items()):
        points = sorted(points, key=lambda r: r["rows"])
        label = f"{impl}, vocabulary {vocab:,}" + (f", TP={tp}" if tp > 1 else "")
        for axis, value in zip(axes, (seconds_of, lambda r: r["peak_gib_over_inputs"]), strict=True):
            axis.plot([r["rows"] for r in points], [value(r) for r in points], marker="o", label=label)
    for axis, title in zip(axes, ("seconds, forward and backward", "peak GiB over the inputs"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="supervised rows", title=title)
        axis.set_xticks(sorted({r["rows"] for r in results}), minor=False)
        axis.set_xticks([], minor=True)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def seconds_of(result: dict[str, Any]) -> float:
    return result.get("cpu_s", result.get("gpu_s"))


def show(results: list[dict[str, Any]], console: Console) -> None:
    device = results[0]["device"]
    table = Table(title=f"Objective, forward + backward, hidden {results[0]['hidden']}, {device}")
    seconds = "CPU s" if device == "cpu" else "s"
    for column in ("", "rows", "vocab", "TP", seconds, "relative", "peak GiB", "loss"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    plain = {(r["rows"], r["vocab"]): seconds_of(r) for r in results if r["impl"] == Implementation.MATERIALIZED}
    for r in results:
        base = plain.get((r["rows"], r["vocab"]))
        table.add_row(
            r["impl"],
            f"{r['rows']:,}",
            f"{r['vocab']:,}",
            str(r["tp"]),
            f"{seconds_of(r):.3f}",
            f"{seconds_of(r) / base:.2f}" if base else "",
            f"{r['peak_gib_over_inputs']:.3f}",
            f"{r['loss']:.4f}",
        )
    console.print(table)
    console.print("relative: to the materialized version; peak: resident or allocated memory over the inputs")


def main(
    rows: Annotated[list[int], typer.Option(help="Supervised rows; may be given several times.")] = [448, 3584],  # noqa: B006
    vocab: Annotated[list[int], typer.Option(help="Vocabulary size; may be given several times.")] = [32000],  # noqa: B006
    hidden: Annotated[int, typer.Option(help="Width of draft and teacher hidden states.")] = 256,
    impl: Annotated[list[Implementation], typer.Option(help="May be given several times.")] = list(Implementation),  # noqa: B006
    markov_rank: Annotated[int, typer.Option(help="Width of the latent that meets W2; 0: no sequential head.")] = 0,
    tp: Annotated[list[int], typer.Option(help="Ranks that share the vocabulary (fused only).")] = [1],  # noqa: B006
    dtype: Annotated[Precision, typer.Option(help="Type of hidden states and heads.")] = Precision.FP32,
    repeat: Annotated[int, typer.Option(help="Runs of each case; the fastest counts.", min=1)] = 3,
    slice_rows: Annotated[int, typer.Option(help="Rows of a checkpointed slice (sliced only).", min=1)] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kernel: Annotated[Kernel, typer.Option(help="Kernel of the fused objective.")] = Kernel.EAGER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of the table.")] = False,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Also draw the results into this file.")] = None,
    earlier: Annotated[
        Path | None, typer.Option("--results", help="Show and draw these JSON lines instead of measuring.")
    ] = None,
) -> None:
    """Measure the fused objective against materialized and sliced logits."""
    console = Console()
    if earlier is not None:
        results = [json.loads(line) for line in earlier.read_text().splitlines()]
        show(results, console)
        if plot_path is not None:
            plot(results, plot_path)
        return
    cases = [
        Case(i, r, v, hidden, markov_rank, t, str(dtype), repeat, device, slice_rows, str(kernel))
        for v in vocab
        for r in rows
        for i in impl
        for t in tp
        if t == 1 or i == Implementation.FUSED
    ]
    results = []
    for case in track(cases, "Measuring", console=Console(stderr=True), disable=not console.is_terminal or as_json):
        results.append(run(case))
        if as_json:
            print(json.dumps(results[-1]), flush=True)
    if not as_json:
        show(results, console)
    if plot_path is not None:
        plot(results, plot_path)


if __name__ == "__main__":
    typer.run(main)
