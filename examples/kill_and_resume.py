"""Kill a training job again and again, at random moments, and compare its metrics with those of an undisturbed run.

    python examples/kill_and_resume.py --kills 30

The tiny target, one rank, a checkpoint every step, written in the background. A kill is SIGKILL, at a random moment
of a step, of a save, or of the start. After each the newest checkpoint must be whole.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from megatron_dspark.training.checkpoint import checkpoints_folder, damage, find_checkpoint
from megatron_dspark.training.recipes import load_recipe
from megatron_dspark.training.settings import TrainSettings

ROOT = Path(__file__).resolve().parent.parent
TIMES = {"tokens_per_second", "step_seconds", "peak_memory_gib", "seconds"}


def settings_of(output: Path, steps: int) -> TrainSettings:
    """Return the tiny target's recipe with a save every step."""
    settings = load_recipe(f"{ROOT}/recipes/tiny_target.py:debug")
    tiny = ROOT / "examples" / "tiny_target"
    settings.target, settings.output = str(tiny / "model"), str(output)
    settings.data, settings.validation = str(tiny / "data/train.jsonl"), str(tiny / "data/heldout.jsonl")
    settings.steps, settings.log_interval, settings.validation_interval, settings.save_interval = steps, 3, 20, 1
    settings.max_length, settings.num_anchors, settings.tensorboard = 96, 4, False
    settings.checkpoint.asynchronous, settings.checkpoint.keep_last = True, 2
    return settings


def train(settings: TrainSettings) -> None:
    """Run in a process of its own."""
    from megatron_dspark.training.run import train as run

    # What Megatron-Core logs would get between the result, which alone goes to standard output.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    run(settings)


def newest(settings: TrainSettings) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    checkpoint = find_checkpoint(settings.output)
    return 0 if checkpoint is None else checkpoint.step


def metrics(output: Path) -> list[dict[str, float]]:
    """Return the metrics file, without what only measures the machine."""
    lines = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def main() -> None:
    """Run undisturbed, run with kills, compare; the exit code says whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_dspark.training.run"])
    draw, steps, started = random.Random(options.seed), 2 * options.kills + 6, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = settings_of(Path(folder) / "whole", steps), settings_of(Path(folder) / "killed", steps)
        job = context.Process(target=train, args=(whole,))
        job.start()
        job.join()
        at = []
        while len(at) < options.kills and newest(killed) < steps:
            before = newest(killed)
            job = context.Process(target=train, args=(killed,))
            job.start()
            # One kill in five hits the start; the others come once the job has got on.
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, 2))
            else:
                while job.is_alive() and newest(killed) == before:
                    time.sleep(0.01)
                time.sleep(draw.uniform(0, 1))
            job.kill()
            job.join()
            at.append(newest(killed))
            if at[-1]:
                whole_one = damage(checkpoints_folder(killed.output) / f"step-{at[-1]:07d}")
                if whole_one is not None:
                    sys.exit(f"after kill {len(at)} the newest checkpoint, of step {at[-1]}, is damaged: {whole_one}")
            print(f"kill {len(at)}: the newest checkpoint is of step {at[-1]} of {steps}", file=sys.stderr)
        job = context.Process(target=train, args=(killed,))
        job.start()
        job.join()
        same = metrics(Path(killed.output)) == metrics(Path(whole.output))
        report = {"kills": len(at), "newest_after_each": at, "steps": newest(killed), "metrics_identical": same}
        print(json.dumps({**report, "seconds": round(time.monotonic() - started)}))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
