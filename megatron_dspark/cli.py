"""The command line: prepare data, train a drafter, export it, verify it."""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from megatron_dspark.cli_cache import cache, precompute
from megatron_dspark.cli_output import Json, is_first_rank, show, verb
from megatron_dspark.errors import DSparkError, LostRankError
from megatron_dspark.quiet import quiet_logs

app = typer.Typer(
    name="megatron-dspark",
    help="Train DSpark speculative-decoding drafters on Megatron-Core.\n\n"
    "The usual order is prepare → train → export → verify; each verb explains itself with --help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Layout = Literal["deepspec", "speculators"]
MaxFileGb = Annotated[float, typer.Option(help="Size of weight file, in GB, above which weights are split.", min=0.001)]


def main() -> None:
    """Run the command line.

    Results alone go to standard output; what a person did wrong is one sentence and exit code 2, never a traceback.
    """
    # Megatron-Core configures logging on import, down to INFO and on standard output, unless somebody has before.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    quiet_logs()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except DSparkError as error:
        _end_with(str(error), aloud=is_first_rank() or isinstance(error, LostRankError))
    except (OSError, SafetensorError) as error:
        # What the system refuses at a place that no check foresaw: a disk that is read-only or full, a damaged file.
        _end_with(f"{error}; see to the permissions, the free space and the file there, then start again", aloud=True)


def _end_with(sentence: str, aloud: bool) -> NoReturn:
    """Exit with 2 and one sentence; torchrun shows that of the rank that failed first, whichever it is."""
    if aloud:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
    sys.exit(2)


@verb(app)
def prepare(
    output: Annotated[Path, typer.Option(help="Folder to write: train.jsonl, heldout.jsonl, prepare.json.")],
    target: Annotated[
        str, typer.Option(help='Hugging Face folder of the target, or "smollm2" for the bundled demonstration model.')
    ] = "smollm2",
    prompts: Annotated[
        str, typer.Option(help='"recipes", "general", or a JSONL file of prompts or of whole conversations.')
    ] = "recipes",
    train_samples: Annotated[
        int | None, typer.Option(help="Conversations to train on; by default 400 built-in ones, or all of a file.")
    ] = None,
    heldout_samples: Annotated[int, typer.Option(help="Conversations kept for validation and verification.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 160,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the responses; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the responses' sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most probable tokens kept in sampling; 0 keeps all.")] = 0,
    general_heldout_samples: Annotated[
        int, typer.Option(help="Everyday questions to measure beside a narrow domain (general_heldout.jsonl).")
    ] = 0,
    batch_size: Annotated[int, typer.Option(help="Responses generated at once by each worker.")] = 64,
    workers: Annotated[
        int, typer.Option(help="Generating processes; 0 is one of one thread per core, or one per CUDA device.")
    ] = 0,
    device: Annotated[str, typer.Option(help='"auto", "cpu" or "cuda".')] = "auto",
    supervise: Annotated[str, typer.Option(help='Train on "all" replies of a conversation or on the "last".')] = "all",
    template_options: Annotated[
        str,
        typer.Option(help='JSON object for the target\'s chat template, for example {"enable_thinking": false}.'),
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of prompts and responses.")] = 0,
    keep_responses: Annotated[
        bool, typer.Option("--keep-responses", help="Train on the conversations of a JSONL file as they are.")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds in which to finish, with fewer conversations if need be."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make training conversations: prompts answered by the target itself (an interrupted job goes on)."""
    from megatron_dspark.data.prepare import PrepareOptions
    from megatron_dspark.data.prepare import prepare as run_prepare

    report = run_prepare(
        PrepareOptions(
            target=target,
            output=output,
            prompts=prompts,
            train_samples=train_samples,
            heldout_samples=heldout_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            general_heldout_samples=general_heldout_samples,
            batch_size=batch_size,
            workers=workers,
            device=device,
            supervise=supervise,
            template_options=_json_object("--template-options", template_options),
            seed=seed,
            keep_responses=keep_responses,
            time_limit_seconds=time_limit,
        )
    )
    show(report, as_json)


@verb(app)
def train(
    recipe: Annotated[str, typer.Option(help="A recipe function, as FILE.py:FUNCTION, that returns TrainSettings.")],
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder of the target.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL of training conversations.")] = None,
    validation: Annotated[Path | None, typer.Option(help="JSONL of held-out conversations.")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Feature cache to train from (see precompute); the target is not loaded.")
    ] = None,
    validation_features: Annotated[Path | None, typer.Option(help="Feature cache of held-out conversations.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; an existing one is resumed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as name=value, for example optimizer.learning_rate=1e-3."),
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Refuse a folder that has a checkpoint.")] = False,
    resume_from: Annotated[int | None, typer.Option(help="Go on from this step's checkpoint, not the newest.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A setting (or target, data) that may differ from the checkpoint's, though results change."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a drafter; start it under torchrun for several ranks (torchrun ... -m megatron_dspark train ...)."""
    from megatron_dspark.training.overrides import override
    from megatron_dspark.training.recipes import load_recipe

    settings = load_recipe(recipe)
    named = {"target": target, "data": data, "validation": validation, "output": output, "steps": steps}
    named |= {"features": features, "validation_features": validation_features}
    for name, value in named.items():
        if value is not None:
            setattr(settings, name, value if name == "steps" else str(value))
    settings = override(settings, setting or [])
    if resume_from is not None:
        settings.checkpoint.resume_from = resume_from
    settings.checkpoint.allow += allow or []
    from megatron_dspark.training.interruption import EXIT_STOPPED
    from megatron_dspark.training.run import train as run_train

    report = run_train(settings, resume=not no_resume)
    show(report, as_json)
    if report.stopped:
        raise typer.Exit(EXIT_STOPPED)


@verb(app)
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints/step-… folders.")],
    output: Annotated[Path, typer.Option(help="Hugging Face folder to write; it must not hold anything yet.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint of this step instead of the newest.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the exported weights.")] = "bfloat16",
    layout: Annotated[Layout, typer.Option(help="deepspec is read by every engine, speculators by vLLM.")] = "deepspec",
    target_name: Annotated[
        str | None, typer.Option(help="The target's Hugging Face id, for the model card and the speculators layout.")
    ] = None,
    max_file_gb: MaxFileGb = 5.0,
    as_json: Json = False,
) -> None:
    """Export a checkpoint to the Hugging Face layout that serving engines load (under torchrun: spread over ranks)."""
    from megatron_dspark.hf.from_checkpoint import export_checkpoint

    report = export_checkpoint(
        run,
        output,
        step=step,
        dtype=dtype,
        layout=layout,
        target_name=target_name,
        max_shard_bytes=_file_bytes(max_file_gb),
    )
    show(report, as_json)


@verb(app)
def import_(
    folder: Annotated[
        Path, typer.Argument(help="A draft of DeepSpec, NeMo AutoModel, SpecForge, ModelOpt, speculators.")
    ],
    output: Annotated[Path, typer.Option(help="Hugging Face folder to write; it must not hold anything yet.")],
    target: Annotated[
        Path | None, typer.Option(help="The target's folder, for embeddings and depth that the draft's files lack.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="Type of the weights; by default as they are.")
    ] = None,
    layout: Annotated[Layout, typer.Option(help="Layout to write.")] = "deepspec",
    max_file_gb: MaxFileGb = 5.0,
    as_json: Json = False,
) -> None:
    """Convert a draft of another tool, told by its content, to the layout that is exported and trained on here."""
    from megatron_dspark.hf.convert import import_draft

    report = import_draft(
        folder, output, target=target, dtype=dtype, layout=layout, max_shard_bytes=_file_bytes(max_file_gb)
    )
    show(report, as_json)


@verb(app)
def lint(
    folder: Annotated[Path, typer.Argument(help="A draft's Hugging Face folder.")],
    engine: Annotated[
        str | None, typer.Option(help="Serving engine (vllm, sglang, mlx, trtllm, llamacpp) that has to load it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a draft's folder against its layout, and say which engines will load it; exit code 1 on a problem."""
    from megatron_dspark.hf.lint import lint_folder

    report = lint_folder(folder)
    refusal = None if engine is None else report.engine(engine)
    show(report, as_json)
    if refusal is not None and not refusal.loads:
        raise DSparkError(f"{refusal.engine} will not load {folder.name}: {refusal.reasons[0]}")
    if not report.ok:
        raise typer.Exit(1)


@verb(app)
def verify(
    draft: Annotated[Path, typer.Option(help="The exported drafter's folder.")],
    target: Annotated[Path, typer.Option(help="The target's Hugging Face folder.")],
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts; a last assistant message is left out.")],
    limit: Annotated[int, typer.Option(help="Prompts to run; 0 runs all.", min=0)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily and checks token equality.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, applied to target and draft alike.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most probable tokens kept; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], typer.Option(help="Arithmetic.")] = "float32",
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    record: Annotated[
        bool, typer.Option("--record", help="Write the accepted length into the drafter's dspark_export.json.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve an exported drafter with the reference verifier, beside the target alone, and compare."""
    from megatron_dspark.data.messages import read_messages
    from megatron_dspark.hf.record import refuse_another_target
    from megatron_dspark.serving.harness import verify_drafter

    refuse_another_target(draft, target)
    records = [_without_answer(record_) for record_ in read_messages(prompts)]
    report = verify_drafter(
        draft,
        target,
        records[: limit or None],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    if record:
        from megatron_dspark.files import sha256
        from megatron_dspark.hf.record import record_accepted_length

        command = (
            f"megatron-dspark verify --draft DRAFT --target TARGET --prompts {prompts.name} --limit {limit} "
            f"--max-new-tokens {max_new_tokens} --temperature {temperature:g} --dtype {dtype}"
        )
        others = {"top-p": (top_p, 1.0), "top-k": (top_k, 0), "seed": (seed, 0), "device": (device, "cpu")}
        command += "".join(f" --{name} {value}" for name, (value, default) in others.items() if value != default)
        measured = {
            "tokens_per_iteration": report.accepted_length,
            "prompts": report.prompts,
            "prompts_sha256": sha256(prompts),
            "command": command,
        }
        record_accepted_length(draft, {report.rule: measured})
    show(report, as_json)
    if any(not mismatch.explained_by_rounding for mismatch in report.exactness.mismatches):
        raise typer.Exit(1)


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise DSparkError(f"{option} is {text!r}, which is no JSON object; write for example '{{\"name\": false}}'")
    return value


def _without_answer(record: dict[str, Any]) -> dict[str, Any]:
    messages = record["messages"]
    return {**record, "messages": messages[:-1] if messages[-1]["role"] == "assistant" else messages}


def _file_bytes(gigabytes: float) -> int:
    return int(gigabytes * 1e9)


verb(app)(precompute)
app.add_typer(cache, name="cache")
