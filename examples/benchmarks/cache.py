"""What the offline feature cache costs and saves, against a padded bfloat16 layout.

Three parts, one process and one thread each:

files    random features with the shape of the target's, for the lengths of the data: bytes a token, and tokens a second
         written (hashed, flushed to disk) and read in random order (every byte compared with its digest), for each
         stored type; beside them the same samples padded to full length, one `torch.save` file each, without digests.
capture  tokens a second of `precompute`, target included.
train    a training run from that cache: the share of its time that it waits for features; and the same run with the
         target in the job.

    python examples/benchmarks/cache.py --target data/target --data data/train.jsonl --max-length 320
    python examples/benchmarks/cache.py … --parts files --json
"""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.features.cache.encoding import stored_tensors
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.plan import plan_shards
from megatron_dspark.features.cache.precompute import precompute, store
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.schema import (
    LOSS_MASK_RULE,
    SCHEMA,
    DataIdentity,
    FeatureIdentity,
    Manifest,
    TargetIdentity,
    samples_fingerprint,
)
from megatron_dspark.features.cache.writer import CacheWriter
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.training.recipes import load_recipe
from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train

ROOT = Path(__file__).resolve().parents[2]


def main(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target.")],
    data: Annotated[Path, typer.Option(help="JSONL of conversations.")],
    recipe: Annotated[str, typer.Option(help="Recipe of the training run.")] = f"{ROOT}/recipes/smollm2.py:quickstart",
    max_length: Annotated[int, typer.Option(help="Length to which the padded layout pads.")] = 320,
    samples: Annotated[int, typer.Option(help="Conversations to use; 0 uses all.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the training runs.")] = 20,
    parts: Annotated[str, typer.Option(help="Which parts, by commas.")] = "files,capture,train",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the feature cache."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dspark-cache-", dir=os.environ.get("DSPARK_BENCHMARK_DISK")) as name:
        folder = Path(name)
        lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
        chosen = folder / "data.jsonl"
        chosen.write_text("".join(lines[: samples or None]), encoding="utf-8")
        result: dict[str, Any] = {}
        taps = load_recipe(recipe).draft.target_layer_ids
        if "files" in parts:
            result["files"] = files(
                folder, load_samples(chosen, target, max_length), target, len(taps or [0] * 5), max_length
            )
        if "capture" in parts or "train" in parts:
            options = PrecomputeOptions(
                target=target,
                data=chosen,
                output=folder / "features",
                max_length=max_length,
                target_layer_ids=taps,
                dtype="bfloat16",
                compute_dtype="float32",
            )
            made = precompute(options)
            result["capture"] = {"tokens": made.tokens, "tokens_per_second": made.tokens_per_second}
        if "train" in parts:
            result["train"] = training(folder, recipe, target, chosen, max_length, steps)
    print(json.dumps(result)) if as_json else show(result)


def files(
    folder: Path, samples: Sequence[ChatSample], target: Path, taps: int, max_length: int
) -> list[dict[str, Any]]:
    """Write and read random features in every stored type, and in a padded layout."""
    config = read_target_config(target)
    width, tokens = config.hidden_size, sum(len(sample.input_ids) for sample in samples)
    torch.manual_seed(0)
    rows = torch.randn(max_length, (taps + 1) * width)
    order = list(range(len(samples)))
    random.Random(0).shuffle(order)
    results = []
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        tensors = stored_tensors(dtype, taps, width)
        plan = plan_shards([len(sample.input_ids) for sample in samples], tensors)
        encoded = [
            store(sample, rows[: len(sample.input_ids), :-width], rows[: len(sample.input_ids), -width:], dtype, width)
            for sample in samples
        ]
        place = folder / dtype
        writer = CacheWriter(place, _manifest(dtype, taps, width, samples), plan, tensors)
        writer.begin({})

        def write(writer: CacheWriter = writer, encoded: list = encoded) -> None:
            for shard in range(writer.plan.num_shards):
                writer.write(shard, writer.gather(shard, (encoded[number] for number in writer.plan.samples(shard))))

        written = seconds(write)
        writer.finish()
        cache = FeatureCache(place)

        def read(cache: FeatureCache = cache) -> None:
            for number in order:
                cache.features(cache.sample_ids[number])

        size = sum(path.stat().st_size for path in place.glob("shard-*"))
        results.append(line(dtype, size, tokens, written, seconds(read)))
        shutil.rmtree(place)
    padded = folder / "padded"
    padded.mkdir()
    half = rows.to(torch.bfloat16)

    def write_padded() -> None:
        for number, sample in enumerate(samples):
            features = torch.zeros(max_length, rows.shape[1], dtype=torch.bfloat16)
            features[: len(sample.input_ids)] = half[: len(sample.input_ids)]
            with open(padded / f"{number}.pt", "wb") as file:
                torch.save({"features": features, "ids": sample.input_ids, "mask": sample.loss_mask}, file)
                file.flush()
                os.fsync(file.fileno())

    def read_padded() -> None:
        for number in order:
            torch.load(padded / f"{number}.pt")["features"].float()

    written = seconds(write_padded)
    size = sum(path.stat().st_size for path in padded.iterdir())
    results.append(line("padded bfloat16", size, tokens, written, seconds(read_padded)))
    shutil.rmtree(padded)
    return results


def _manifest(dtype: str, taps: int, width: int, samples: Sequence[ChatSample]) -> Manifest:
    """The manifest of features that come from nowhere."""
    tokens = sum(len(sample.input_ids) for sample in samples)
    learned = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Manifest(
        schema=SCHEMA,
        complete=False,
        target=TargetIdentity("random", None, "none", 1, width, taps, "", "", "", ""),
        features=FeatureIdentity(list(range(taps)), dtype, "float32", "megatron-core", "cpu", 1),
        data=DataIdentity(
            samples_fingerprint(samples), LOSS_MASK_RULE, 2**20, None, None, len(samples), tokens, learned
        ),
        created_with={},
        files=[],
        shards=[],
    )


def training(
    folder: Path, recipe: str, target: Path, data: Path, max_length: int, steps: int
) -> dict[str, dict[str, float]]:
    """Train the recipe from the cache, and with the target in the job, and return what its steps took."""
    results = {}
    for name in ("offline", "colocated"):
        settings = load_recipe(recipe)
        settings.output, settings.steps, settings.max_length = str(folder / name), steps, max_length
        settings.validation, settings.tensorboard, settings.log_interval = None, False, steps - 1
        settings.feature_memory_gib, settings.save_interval = 0.0, steps
        if name == "offline":
            settings.features, settings.feature_dtype = str(folder / "features"), "bfloat16"
        else:
            settings.target, settings.data = str(target), str(data)
        train(settings)
        # The first step is a window of its own: it pays for what happens once.
        found = read_metrics(settings.output, "train")[1]
        names = ("step_seconds", "tokens_per_second", "data_wait_share")
        results[name] = {key: found[key] for key in names if key in found}
    return results


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of `work`, once, and CPU seconds of it (which other work on the machine does not lengthen)."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def line(name: str, size: int, tokens: int, written: tuple[float, float], read: tuple[float, float]) -> dict[str, Any]:
    """One layout's figures."""
    return {
        "layout": name,
        "bytes_per_token": size / tokens,
        "tokens_per_second_written": tokens / written[0],
        "tokens_per_second_read": tokens / read[0],
        "tokens_per_cpu_second_written": tokens / written[1],
        "tokens_per_cpu_second_read": tokens / read[1],
    }


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    console = Console()
    for part, found in result.items():
        rows = found if isinstance(found, list) else [found] if part == "capture" else None
        rows = rows or [{"run": name, **values} for name, values in found.items()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(*names, title=part)
        for row in rows:
            table.add_row(
                *(
                    f"{row[name]:,.4g}" if isinstance(row.get(name), float) else str(row.get(name, "-"))
                    for name in names
                )
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
