"""A drafter for a real language model in minutes: prepare → train → export → verify, and the numbers that prove it.

Every stage is the command that you would type; it is printed before it runs.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
console = Console(highlight=False)
# Two OpenMP threads are one each for two ranks; more than the cores there are collapses on a busy machine.
CORES = min(2, len(os.sched_getaffinity(0)))


def megatron_dspark(*arguments: Any, ranks: int = 1, threads: int = 1, aside: bool = False) -> dict[str, Any]:
    """Run one verb of the command line and return its JSON result; one of several `aside` shows no progress."""
    words = [str(argument) for argument in arguments]
    launcher = [sys.executable, "-m"]
    shown = "megatron-dspark"
    if ranks > 1:
        launcher += ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"]
        shown = f"torchrun --nproc-per-node={ranks} -m megatron_dspark"
    console.print(f"\n[bold]$ {shown} {shlex.join(words)}[/]", soft_wrap=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*launcher, "megatron_dspark", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if aside else None,
        env=environment,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr or done.returncode)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(
    minutes: Annotated[float, typer.Option(help="About how long to take on two CPU cores, from 6 upwards.")] = 7,
    output: Annotated[
        Path, typer.Option(help="Folder for everything; an interrupted quickstart goes on in it.")
    ] = Path("quickstart"),
    general: Annotated[bool, typer.Option(help="Verify on general chat too.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Run the target once (precompute), then train without it: same numbers.")
    ] = False,
    features: Annotated[
        str, typer.Option(help="How --offline stores features: float32 (the same numbers), bfloat16, float8_e4m3fn.")
    ] = "float32",
    settings: Annotated[
        list[str], typer.Option("--set", help="Change a setting of the training run, e.g. parallel.context=2.")
    ] = [],  # noqa: B006
) -> None:
    """Train and verify a DSpark drafter for SmolLM2-135M-Instruct on cooking recipes."""
    started = time.time()
    # What a minute buys was measured on two cores.
    share = max(minutes - 3, 1)
    samples = steps = int(40 * share)
    data, run, draft = output / "data", output / "run", output / "draft"
    megatron_dspark(
        *("prepare", "--target", "smollm2", "--prompts", "recipes", "--output", data),
        *("--train-samples", samples, "--heldout-samples", 16, "--general-heldout-samples", 8 if general else 0),
        *("--max-new-tokens", 128),
        threads=CORES,
    )
    target = data / "target"
    recipe = ROOT / "recipes/smollm2.py:quickstart"
    source = ["--target", target, "--data", data / "train.jsonl", "--validation", data / "heldout.jsonl"]
    if offline:
        source = ["--features", data / "train-features", "--validation-features", data / "heldout-features"]
        for name in ("train", "heldout"):
            megatron_dspark(
                *("precompute", "--recipe", recipe, "--target", target, "--data", data / f"{name}.jsonl"),
                *("--dtype", features, "--output", data / f"{name}-features"),
                ranks=CORES,
            )
        if features != "float32":
            settings = [*settings, f"feature_dtype={features}"]
    changes = [word for setting in settings for word in ("--set", setting)]
    trained = megatron_dspark(
        *("train", "--recipe", recipe, *source, "--output", run, "--steps", steps, *changes), ranks=CORES
    )
    if not (draft / "config.json").exists():
        megatron_dspark("export", run, "--output", draft)
    # Side by side, one core each: a verification runs on one thread. One of them may write into the drafter's record.
    with console.status("verifying"), ThreadPoolExecutor(CORES) as pool:
        verifications = {
            name: pool.submit(
                megatron_dspark,
                *("verify", "--draft", draft, "--target", target, "--prompts", prompts, "--limit", 6),
                *("--temperature", temperature, "--max-new-tokens", 96),
                *["--record"] * (name == "greedy"),
                aside=True,
            )
            for name, prompts, temperature in ways(data, general)
        }
        verified = {name: verification.result() for name, verification in verifications.items()}
    from megatron_dspark.training.report import plot_curves

    picture = plot_curves(run, output / "curves.png")
    console.print(training_table(trained), verification_table(verified))
    console.print(f"drafter  {draft}\ncurves   {picture}\ntook     {(time.time() - started) / 60:.1f} minutes")


def ways(data: Path, general: bool) -> list[tuple[str, Path, float]]:
    """Return (name, prompts, temperature) of every verification."""
    held_out = data / "heldout.jsonl"
    found = [("greedy", held_out, 0.0), ("temperature 0.7", held_out, 0.7)]
    if general:
        found.append(("general chat, greedy", data / "general_heldout.jsonl", 0.0))
    return found


def training_table(trained: dict[str, Any]) -> Table:
    """Loss and tau on held-out recipes, before and after."""
    table = Table("held-out recipes", "start", "end", title=f"Training, {trained['steps']} steps")
    for name in ("loss", "tau", "accept_rate", "top1_agreement"):
        table.add_row(name, *(f"{trained[split][name]:.3f}" for split in ("first_validation", "validation")))
    return table


def verification_table(verified: dict[str, dict[str, Any]]) -> Table:
    """What the reference verifier measured."""
    table = Table("held-out prompts", *verified, title="Serving with the exported drafter")
    rows = {
        "accepted length (tokens an iteration)": lambda report: f"{report['accepted_length']:.2f}",
        "acceptance by slot": lambda report: " ".join(f"{slot['rate'] or 0:.2f}" for slot in report["slots"]),
        "same tokens as the target alone": exactness,
        "tokens/s with the drafter": lambda report: f"{report['tokens_per_second']:.1f}",
        "tokens/s of the target alone": lambda report: f"{report['tokens_per_second_target_only']:.1f}",
        "speedup": lambda report: f"{report['speedup']:.2f}x",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(report) for report in verified.values()))
    return table


def exactness(report: dict[str, Any]) -> str:
    """Token equality in words."""
    found = report["exactness"]
    if not found["applies"]:
        return "sampled: same distribution"
    return f"{found['prompts_equal']} of {found['prompts_compared']} prompts"


if __name__ == "__main__":
    typer.run(main)
