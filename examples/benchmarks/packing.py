"""How much of a micro-batch is padding, packed and one sample a row, as training logs it (`padding_share`).

Lengths of real conversations (`--target`, `--data`), and drawn ones: log-normal like chat data, many short and a few
that `max_length` cuts. Nothing is trained: the micro-batches of an epoch are made, and their places counted.

    python examples/benchmarks/packing.py
    python examples/benchmarks/packing.py --target data/target --data data/train.jsonl --max-length 320 --global-batch 4
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.sampler import AnchorRule, Dealer, Sampler


def main(
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder, for its tokenizer.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL of conversations; without it lengths are drawn.")] = None,
    max_length: Annotated[int, typer.Option(help="Where samples are cut; also the tokens of a packed row.")] = 2048,
    median: Annotated[float, typer.Option(help="Median of drawn lengths.")] = 500.0,
    sigma: Annotated[float, typer.Option(help="Standard deviation of their logarithms.")] = 0.9,
    count: Annotated[int, typer.Option(help="Lengths to draw.")] = 8192,
    global_batch: Annotated[list[int] | None, typer.Option(help="Samples of an optimizer step.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a micro-batch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the padding."""
    if data is None:
        samples: Sequence[ChatSample] = drawn(count, median, sigma, max_length)
    else:
        samples = load_samples(data, target, max_length)
    results = [
        {
            "global batch": batch,
            "rows": width,
            "one sample a row": padding_share(samples, batch, width, None),
            "packed": padding_share(samples, batch, width, max_length),
        }
        for batch in global_batch or [16, 64, 128, 512]
        for width in rows or [2, 4, 8]
    ]
    print(json.dumps(results)) if as_json else show(results)


def drawn(count: int, median: float, sigma: float, longest: int) -> list[ChatSample]:
    """Samples of log-normal lengths, at least 16 and at most `longest` tokens; only their lengths mean anything."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=generator) * sigma).exp() * median
    return [
        ChatSample(str(number), torch.zeros(length, dtype=torch.int64), torch.arange(length) > 0)
        for number, length in enumerate(lengths.round().clamp(16, longest).int().tolist())
    ]


def padding_share(samples: Sequence[ChatSample], global_batch: int, rows: int, row_tokens: int | None) -> float:
    """Padding in all places of an epoch's whole optimizer steps."""
    sampler = Sampler(
        samples,
        anchors=AnchorRule(1, 0),
        dealer=Dealer(rows, row_tokens=row_tokens),
        global_batch_size=global_batch,
    )
    tokens = places = 0
    for start in range(0, len(samples) - global_batch + 1, global_batch):
        for batch in sampler.step_batches(start):
            tokens += batch.num_tokens
            places += batch.input_ids.numel()
    return 1 - tokens / places


def show(results: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(*results[0])
    for row in results:
        table.add_row(*(f"{value:.1%}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
