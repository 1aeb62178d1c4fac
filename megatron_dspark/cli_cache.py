"""The command line of feature caches: precompute, and cache verify, show, merge, subset."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_dspark.cli_output import Json, show, verb

Folder = Annotated[Path, typer.Argument(help="A feature cache.")]
Output = Annotated[Path, typer.Option(help="Folder of the new cache.")]

cache = typer.Typer(help="Look after feature caches.", no_args_is_help=True)


def precompute(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target.")],
    data: Annotated[Path, typer.Option(help="JSONL of conversations.")],
    output: Annotated[Path, typer.Option(help="Folder of the cache; an unfinished one is gone on with.")],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe to compute for, as FILE.py:FUNCTION: its length, taps and precision.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longest sample in tokens, the same as in training; by default 2048.")
    ] = None,
    taps: Annotated[str | None, typer.Option(help="Target layers, e.g. 1,8,14; by default five, spread.")] = None,
    allow_unservable_taps: Annotated[
        bool, typer.Option("--allow-unservable-taps", help="Also tap -1 or the last layer, which no engine captures.")
    ] = False,
    dtype: Annotated[
        Literal["bfloat16", "float32", "float8_e4m3fn"] | None,
        typer.Option(
            help="How features are stored: by default as the recipe reads them, without one bfloat16; FP8 takes "
            "half of that, with a scale for every row."
        ),
    ] = None,
    compute_dtype: Annotated[
        Literal["bfloat16", "float32", "float16"] | None,
        typer.Option(help="In what the target runs; by default FP32 for float32 and BF16 for the others."),
    ] = None,
    source: Annotated[
        Literal["megatron-core", "hf"],
        typer.Option(help='Who runs the target; "hf" (transformers) for what Megatron-Core does not compute.'),
    ] = "megatron-core",
    tensor: Annotated[int, typer.Option(help="Tensor-parallel ranks of the target.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Pipeline stages of the target.")] = 1,
    shard_mib: Annotated[int | None, typer.Option(help="Size of a shard; by default what suits the total.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how large the cache becomes.")] = False,
    as_json: Json = False,
) -> None:
    """Run the target over every conversation once and keep its features, so that training need not.

    Start it under torchrun for several ranks; the bytes are the same. An interrupted job goes on.
    """
    from megatron_dspark.features.cache.options import PrecomputeOptions
    from megatron_dspark.features.cache.precompute import precompute as run

    layers = _numbers(taps)
    if recipe is not None:
        from megatron_dspark.training.recipes import load_recipe
        from megatron_dspark.training.settings import PRECISIONS

        settings = load_recipe(recipe)
        max_length, layers = max_length or settings.max_length, layers or settings.draft.target_layer_ids
        allow_unservable_taps = allow_unservable_taps or settings.draft.allow_unservable_taps
        precision = str(PRECISIONS[settings.precision]).removeprefix("torch.")
        dtype, compute_dtype = dtype or settings.feature_dtype or precision, compute_dtype or precision
    options = PrecomputeOptions(
        target=target,
        data=data,
        output=output,
        max_length=max_length or 2048,
        target_layer_ids=layers,
        allow_unservable_taps=allow_unservable_taps,
        dtype=dtype or "bfloat16",
        compute_dtype=compute_dtype,
        source=source,
        tensor=tensor,
        pipeline=pipeline,
        shard_mib=shard_mib,
        dry_run=dry_run,
    )
    show(run(options), as_json)


@verb(cache)
def verify(
    folder: Folder,
    target: Annotated[
        Path | None, typer.Option(help="Also compare with this target's weights, config and tokenizer.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every byte and say what is wrong; exit code 1 when something is."""
    from megatron_dspark.features.cache.verify import verify_cache

    report = verify_cache(folder, target)
    show(report, as_json)
    if report.problems:
        raise typer.Exit(1)


@verb(cache)
def show_(folder: Folder, as_json: Json = False) -> None:
    """Say what a cache was made from and how large it is; also of an unfinished one."""
    from megatron_dspark.features.cache.verify import show_cache

    show(show_cache(folder), as_json)


@verb(cache)
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Caches of one target, taps and types.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Join caches of different samples into one, sharing their files where the disk allows."""
    from megatron_dspark.features.cache.reshape import merge_caches

    show(merge_caches(folders, output), as_json)


@verb(cache)
def subset(
    folder: Folder,
    output: Output,
    first: Annotated[int | None, typer.Option(help="Keep so many samples from the start.")] = None,
    ids: Annotated[Path | None, typer.Option(help="Keep the samples named in this file, one a line.")] = None,
    taps: Annotated[str | None, typer.Option(help="Keep these target layers, e.g. 1,14.")] = None,
    as_json: Json = False,
) -> None:
    """Make a smaller cache of some samples, some taps, or both, without the target."""
    from megatron_dspark.features.cache.reshape import subset_cache

    show(subset_cache(folder, output, first=first, ids=ids, taps=_numbers(taps)), as_json)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of layer numbers like 1,8,14") from None
