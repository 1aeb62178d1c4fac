"""Time and memory of the draft's attention, forward and backward, against a dense mask.

prefix   megatron_dspark's default: groups of blocks, each over the context rows that it sees.
dense    one mask over slots × (context + slots), in PyTorch's fused kernel.
flex     FlexAttention's kernel (CUDA only).

A measurement is what one layer of one micro-batch costs: preparing the mask, then forward and backward. Each has its
own process and one thread. On a CPU the time is CPU seconds (the smallest of `--repeat` runs) and the peak is that of
resident memory over what it was with the inputs in place; on a GPU, seconds and allocated memory. Examples:

    python examples/benchmarks/attention.py
    python examples/benchmarks/attention.py --context 2048 --anchors 512 --documents 8 --json
    python examples/benchmarks/attention.py --plot attention.png
"""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from megatron_dspark.blocks import BlockLayout, lay_out_blocks
from megatron_dspark.model.block_attention import block_attention


class Implementation(StrEnum):
    PREFIX = "prefix"
    DENSE = "dense"
    FLEX = "flex"


@dataclass(frozen=True)
class Case:
    impl: Implementation
    context: int
    anchors: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int
    device: str
    repeat: int


def problem(case: Case) -> tuple[list[Tensor], BlockLayout, Tensor]:
    """Return query, keys and values, the blocks at random anchors, and equal documents."""
    torch.manual_seed(0)
    slots = case.anchors * case.block_size
    shapes = [(slots, case.heads)] + [(case.context, case.kv_heads)] * 2 + [(slots, case.kv_heads)] * 2
    rows = [torch.randn(n, 1, heads, case.head_dim, device=case.device, requires_grad=True) for n, heads in shapes]
    anchors = torch.randperm(case.context, device=case.device)[: case.anchors].sort().values[None]
    documents = (torch.arange(case.context, device=case.device) * case.documents // case.context)[None]
    layout = lay_out_blocks(
        torch.zeros_like(documents),
        torch.ones_like(documents, dtype=torch.bool),
        anchors,
        block_size=case.block_size,
        mask_token_id=0,
        documents=documents,
    )
    return rows, layout, documents


def step(case: Case, rows: list[Tensor], layout: BlockLayout, documents: Tensor) -> None:
    output = block_attention(case.impl, layout, case.context, documents)(*rows)
    output.sum().backward()
    for tensor in rows:
        tensor.grad = None


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")


def measure(_rank: int, case: Case, file: str) -> None:
    """Body of a measuring process: warm up on a small problem, measure, leave the numbers in a file."""
    torch.set_num_threads(1)
    small = replace(case, context=64, anchors=8, documents=1)
    step(small, *problem(small))
    inputs = problem(case)
    if case.device == "cuda":
        step(case, *inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    seconds = []
    for _ in range(case.repeat):
        start = clock(case.device)
        step(case, *inputs)
        seconds.append(clock(case.device) - start)
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else resident("VmHWM")
    Path(file).write_text(
        json.dumps({"seconds": round(min(seconds), 4), "peak_mib": round((peak - before) / 2**20, 1)})
    )


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/result.json"
        multiprocessing.spawn(measure, (case, file))
        return {**asdict(case), **json.loads(Path(file).read_text())}


def show(results: list[dict[str, Any]], console: Console) -> None:
    first = results[0]
    seconds = "CPU s" if first["device"] == "cpu" else "s"
    table = Table(
        title=f"Attention of one layer, forward + backward, {first['heads']} heads ({first['kv_heads']} key/value) × "
        f"{first['head_dim']}, blocks of {first['block_size']}"
    )
    for column in ("", "context", "anchors", "documents", seconds, "relative", "peak MiB", "relative"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    dense = {(r["context"], r["anchors"]): r for r in results if r["impl"] == Implementation.DENSE}
    for r in results:
        base = dense.get((r["context"], r["anchors"]))
        table.add_row(
            r["impl"],
            f"{r['context']:,}",
            str(r["anchors"]),
            str(r["documents"]),
            f"{r['seconds']:.3f}",
            f"{r['seconds'] / base['seconds']:.2f}" if base else "",
            f"{r['peak_mib']:.0f}",
            f"{r['peak_mib'] / base['peak_mib']:.2f}" if base else "",
        )
    console.print(table)
    console.print("relative: to the dense mask; peak: resident or allocated memory over the inputs")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = dict(zip(Implementation, ("-", "--", ":"), strict=True))
    for count, colour in zip(sorted({r["anchors"] for r in results}), plt.rcParams["axes.prop_cycle"], strict=False):
        for impl in dict.fromkeys(r["impl"] for r in results):
            points = [r for r in results if r["anchors"] == count and r["impl"] == impl]
            for axis, value in zip(axes, ("seconds", "peak_mib"), strict=True):
                axis.plot(
                    [r["context"] for r in points],
                    [r[value] for r in points],
                    styles[Implementation(impl)],
                    color=colour["color"],
                    marker="o",
                    label=f"{impl}, {count} anchors",
                )
    for axis, title in zip(axes, ("seconds, forward and backward", "peak MiB over the inputs"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="context rows", title=title)
        axis.set_xticks(sorted({r["context"] for r in results}), minor=False)
        axis.set_xticks([], minor=True)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    context: Annotated[list[int], typer.Option(help="Context rows, as often as wanted.")] = [512, 1024, 2048, 4096],  # noqa: B006
    anchors: Annotated[list[int], typer.Option(help="Blocks; may be given several times.")] = [64, 256, 512],  # noqa: B006
    impl: Annotated[list[Implementation] | None, typer.Option(help="May be given several times.")] = None,
    block_size: Annotated[int, typer.Option(help="Slots of a block.")] = 7,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    documents: Annotated[int, typer.Option(help="Packed documents in the row, of equal lengths.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeat: Annotated[int, typer.Option(help="Runs of each case; the fastest counts.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of the table.")] = False,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Also draw the results into this file.")] = None,
) -> None:
    """Measure the draft's attention."""
    console = Console()
    chosen = impl or [kind for kind in Implementation if device == "cuda" or kind != Implementation.FLEX]
    cases = [
        Case(kind, rows, count, block_size, heads, kv_heads, head_dim, documents, device, repeat)
        for rows in context
        for count in anchors
        if count <= rows
        for kind in chosen
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
