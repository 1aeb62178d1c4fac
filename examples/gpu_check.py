"""What the objective can only show on a GPU: that it is right there, and how fast it is.

First the tests that need a GPU (`pytest -m gpu`), then time, memory over the inputs and share of the bf16 matrix peak
of both kernels at the size of a large run: 512 anchors x 7 slots, vocabulary 151,936, hidden 2560 and 4096, bf16.

    python examples/gpu_check.py
    python examples/gpu_check.py --json

Without a GPU it says so and measures nothing.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
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


def main(
    rows: Annotated[int, typer.Option(help="Supervised rows.")] = 512 * 7,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 151_936,
    hidden: Annotated[list[int], typer.Option(help="Width; may be given several times.")] = [2560, 4096],  # noqa: B006
    markov_rank: Annotated[int, typer.Option(help="Width of the latent that meets W2; 0: no sequential head.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of the table.")] = False,
) -> None:
    """Test and measure the objective on a GPU."""
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here, so nothing was tested and nothing measured.")
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
    failed = subprocess.run(tests, cwd=ROOT, stdout=sys.stderr).returncode != 0
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
        table = Table(title=f"{rows:,} rows x {vocab:,}, bf16, {name}; a large product reaches {reached:.0f} TFLOP/s")
        columns = {"kernel": "kernel", "hidden": "hidden", "gpu_s": "seconds", "peak_gib_over_inputs": "peak GiB"}
        columns |= {"share_of_large_product": "of a large product", "share_of_bf16_peak": "of the bf16 peak"}
        for title in columns.values():
            table.add_column(title, justify="right")
        for result in results:
            table.add_row(*(str(result[key]) for key in columns))
        Console().print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
