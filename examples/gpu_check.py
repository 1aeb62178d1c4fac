"""What only GPUs can show: that training is right there, and how fast the objective is.

tests      the tests that need a GPU (`pytest -m gpu`).
training   five steps of the tiny target's debug recipe in bf16: the loss must fall. On one GPU; where there are more,
           on all of them under torchrun too, data parallel, and tensor and sequence parallel. With plain modules, with
           FlexAttention, and with Transformer Engine's linears where it is installed.
objective  time, memory over the inputs and share of the bf16 matrix peak of both kernels at the size of a large run:
           512 anchors x 7 slots, vocabulary 151,936, hidden 2560 and 4096, bf16.

    python examples/gpu_check.py
    python examples/gpu_check.py --part training --json

Without a GPU it says so and measures nothing.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from megatron_dspark import platform

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny_target"
# Dense bf16 peak in TFLOP/s as the vendor states it, by a part of the device's name.
PEAKS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}


def product_tflops(size: int = 8192, repeat: int = 20) -> float:
    """Rate of one large bf16 product: what this device reaches, whatever its data sheet says."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        left @ right
    end.record()
    torch.cuda.synchronize()
    return 2 * size**3 * repeat / (start.elapsed_time(end) * 1e-3) / 1e12


def measure(rows: int, vocab: int, hidden: int, markov_rank: int, kernel: str) -> dict[str, Any]:
    """One line of examples/benchmarks/objective.py on the GPU."""
    command = [sys.executable, str(ROOT / "examples/benchmarks/objective.py"), "--json", "--device", "cuda"]
    options = {"rows": rows, "vocab": vocab, "hidden": hidden, "markov-rank": markov_rank, "kernel": kernel}
    options |= {"impl": "fused", "dtype": "bfloat16", "repeat": 10}
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


class Part(StrEnum):
    TESTS = "tests"
    TRAINING = "training"
    OBJECTIVE = "objective"


@dataclass(frozen=True)
class TrainingRun:
    """A few training steps: `settings` beside the debug recipe's, on so many GPUs."""

    kernels: str
    layout: str
    gpus: int
    settings: dict[str, Any]

    def assignments(self) -> list[str]:
        """What the recipe is changed by, as `--set` takes it. Every rank gets a whole micro-batch."""
        values = {"precision": "bf16", "global_batch_size": 4 * self.gpus, "tensorboard": "false", **self.settings}
        return [f"{name}={value}" for name, value in values.items()]

    def command(self, output: Path) -> list[str]:
        """What to start; its result, as JSON, is the last line on standard output."""
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus), "-m"]
        words = [sys.executable, "-m", *(launcher if self.gpus > 1 else []), "megatron_dspark", "train", "--json"]
        words += ["--recipe", f"{ROOT / 'recipes/tiny_target.py'}:debug", "--target", str(TINY / "model")]
        words += ["--data", str(TINY / "data/train.jsonl"), "--validation", str(TINY / "data/heldout.jsonl")]
        words += ["--output", str(output)]
        return words + [word for value in self.assignments() for word in ("--set", value)]


def training_runs(gpus: int, transformer_engine: bool) -> list[TrainingRun]:
    """Return every run of a machine with so many GPUs, with or without Transformer Engine."""
    kernels: dict[str, dict[str, Any]] = {"plain": {}, "flex": {"block_attention": "flex"}}
    if transformer_engine:
        kernels["Transformer Engine"] = {"transformer_impl": "transformer_engine"}
    layouts: dict[str, tuple[int, dict[str, Any]]] = {"one GPU": (1, {})}
    if gpus > 1:
        layouts[f"DP {gpus}"] = gpus, {"optimizer.distributed": "true"}
    if gpus % 2 == 0:
        layouts[f"TP 2 SP, DP {gpus // 2}"] = gpus, {"parallel.tensor": 2, "parallel.sequence": "true"}
    return [
        TrainingRun(kernel, layout, used, {**settings, **laid_out})
        for layout, (used, laid_out) in layouts.items()
        for kernel, settings in kernels.items()
    ]


def train(run: TrainingRun) -> dict[str, Any]:
    """Run it; `passed` says whether it ended well and the held-out loss fell."""
    with tempfile.TemporaryDirectory(prefix="dspark-gpu-check-") as folder:
        done = subprocess.run(run.command(Path(folder) / "run"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = {"training": run.kernels, "layout": run.layout, "passed": False}
    if done.returncode != 0 or not done.stdout.strip():
        return result
    report = json.loads(done.stdout.strip().splitlines()[-1])
    before, after = (report[split].get("loss") for split in ("first_validation", "validation"))
    result |= {"loss_before": before, "loss_after": after}
    result |= {name: report["train"].get(name) for name in ("tokens_per_second", "peak_memory_gib")}
    # Not finite is null in the report.
    result["passed"] = None not in (before, after) and after < before
    return result


def show(results: list[dict[str, Any]], columns: dict[str, str], title: str) -> None:
    """Print results as a table with these columns."""
    table = Table(title=title)
    for name in columns.values():
        table.add_column(name, justify="right")
    for result in results:
        values = (result.get(key) for key in columns)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)


def main(
    part: Annotated[list[Part], typer.Option(help="What to do; may be given several times.")] = [*Part],  # noqa: B006
    rows: Annotated[int, typer.Option(help="Supervised rows.")] = 512 * 7,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 151_936,
    hidden: Annotated[list[int], typer.Option(help="Width; may be given several times.")] = [2560, 4096],  # noqa: B006
    markov_rank: Annotated[int, typer.Option(help="Width of the latent that meets W2; 0: no sequential head.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of the table.")] = False,
) -> None:
    """Test, train and measure on GPUs."""
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here, so nothing was tested and nothing measured.")
    passed = True
    if Part.TESTS in part:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
        passed &= subprocess.run(tests, cwd=ROOT, stdout=sys.stderr).returncode == 0
    if Part.TRAINING in part:
        passed &= check_training(as_json)
    if Part.OBJECTIVE in part:
        measure_objective(rows, vocab, hidden, markov_rank, as_json)
    sys.exit(0 if passed else 1)


def check_training(as_json: bool) -> bool:
    """Train a few steps in every way that this machine has; return whether all passed."""
    results = []
    for run in training_runs(torch.cuda.device_count(), platform.has_transformer_engine()):
        results.append(train(run))
        if as_json:
            print(json.dumps(results[-1]), flush=True)
    columns = {"training": "kernels", "layout": "layout", "loss_before": "loss before", "loss_after": "after"}
    columns |= {"tokens_per_second": "tokens/s", "peak_memory_gib": "peak GiB", "passed": "passed"}
    if not as_json:
        show(results, columns, "Five steps of the tiny target's debug recipe, bf16")
    return all(result["passed"] for result in results)


def measure_objective(rows: int, vocab: int, hidden: list[int], markov_rank: int, as_json: bool) -> None:
    """Measure both kernels of the objective."""
    name, reached = torch.cuda.get_device_name(), product_tflops()
    peak = next((tflops for part, tflops in PEAKS.items() if part in name), None)
    results = []
    for width in hidden:
        for kernel in ("eager", "compiled"):
            result = measure(rows, vocab, width, markov_rank, kernel)
            rate = result["matrix_tflops"]
            result |= {"gpu": name, "share_of_large_product": round(rate / reached, 3)}
            result["share_of_bf16_peak"] = None if peak is None else round(rate / peak, 3)
            results.append(result)
            if as_json:
                print(json.dumps(result), flush=True)
    if not as_json:
        title = f"{rows:,} rows x {vocab:,}, bf16, {name}; a large product reaches {reached:.0f} TFLOP/s"
        columns = {"kernel": "kernel", "hidden": "hidden", "gpu_s": "seconds", "peak_gib_over_inputs": "peak GiB"}
        columns |= {"share_of_large_product": "of a large product", "share_of_bf16_peak": "of the bf16 peak"}
        show(results, columns, title)


if __name__ == "__main__":
    typer.run(main)
