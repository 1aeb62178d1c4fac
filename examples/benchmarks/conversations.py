"""How long a training job takes to get at its conversations, the first time and every other time.

    python examples/benchmarks/conversations.py --target data/target --data data/train.jsonl

Each measurement is a process of its own, as a rank of a job is, in a cache folder of its own.
"""

import json
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def read(target: Path, data: Path, max_length: int, folder: str, told: Any) -> None:
    """Get at every conversation once, as training does over an epoch, and say what that took."""
    os.environ["HF_DATASETS_CACHE"] = folder
    from megatron_dspark.data.chat import load_tokenizer
    from megatron_dspark.data.encoded import load_samples

    # Imports are the same in any way of doing it.
    load_tokenizer(target)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    samples = load_samples(data, target, max_length)
    opened = time.perf_counter()
    tokens = sum(len(sample.input_ids) for sample in samples)
    told.send(
        {
            "conversations": len(samples),
            "tokens": tokens,
            "seconds_to_open": opened - started,
            "microseconds_a_sample": (time.perf_counter() - opened) / len(samples) * 1e6,
            "mib_more_in_memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10,
            "mib_on_disk": sum(path.stat().st_size for path in Path(folder).rglob("*.arrow")) / 2**20,
        }
    )


def write(path: Path, data: Path, count: int, joined: int) -> None:
    """Make `count` conversations, each of `joined` ones of a file."""
    known = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    with open(path, "w") as file:
        for number in range(count):
            some = (known[(number * joined + turn) % len(known)] for turn in range(joined))
            messages = [message for conversation in some for message in conversation]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")


def main(
    target: Annotated[Path, typer.Option(help="Hugging Face folder with the tokenizer.")],
    data: Annotated[Path, typer.Option(help="JSONL of conversations to make longer ones of.")],
    count: Annotated[int, typer.Option(help="Conversations to encode.")] = 10_000,
    joined: Annotated[int, typer.Option(help="Conversations of the file in each of them.")] = 8,
    max_length: Annotated[int, typer.Option(help="Longest sample in tokens.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure and print."""
    context, results = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory(prefix="dspark-conversations-") as folder:
        made = Path(folder) / "conversations.jsonl"
        write(made, data, count, joined)
        for name in ("first start", "later start"):
            ours, theirs = context.Pipe()
            process = context.Process(target=read, args=(target, made, max_length, folder, theirs))
            process.start()
            theirs.close()
            results[name] = ours.recv()
            process.join()
    if as_json:
        print(json.dumps(results))
        return
    table = Table("", *results)
    for field in results["first start"]:
        table.add_row(field.replace("_", " "), *(f"{result[field]:,.1f}" for result in results.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
