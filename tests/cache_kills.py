"""Kill a process at random moments, over and over, until it gets through: is what it leaves what it should be?

    python -m tests.cache_kills --kills 30          the tiny target's own features, and a training run that reads them
    python -m tests.cache_kills --kills 5 --random  random features (quick; the test suite runs this)

The parent only imports; every attempt is a fork of it. Prints one JSON object.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.cache_support import MAX_LENGTH, ROOT, TINY, RandomCache, precompute_options, small_data, tree


def attempt(work: Callable[[], None], patience: float | None) -> bool:
    """Run `work` in a fork, killed after `patience` seconds; returns whether it ended by itself."""
    child = os.fork()
    if child == 0:
        code, aloud = 1, os.fdopen(os.dup(2), "w")
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            work()
            code = 0
        except BaseException:
            traceback.print_exc(file=aloud)
        finally:
            aloud.flush()
            os._exit(code)
    deadline = None if patience is None else time.monotonic() + patience
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, f"the attempt failed with status {status}"
            return True
        if deadline is not None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.002)


def until_killed(work: Callable[[], None], kills: int, longest: float, fresh: Callable[[], None]) -> int:
    """Kill `work` `kills` times; where it ends earlier, start it from nothing again. Returns the completed attempts."""
    completed = done = 0
    while done < kills:
        if attempt(work, random.uniform(0, longest)):
            completed += 1
            fresh()
        else:
            done += 1
    attempt(work, None)
    return completed


def with_random_features(folder: Path, kills: int) -> dict[str, object]:
    def write(where: Path) -> None:
        RandomCache(where, count=24).write()

    def read() -> None:
        from megatron_dspark.features.cache.reader import FeatureCache

        cache = FeatureCache(folder / "whole")
        for sample_id in cache.sample_ids:
            cache.features(sample_id)

    import shutil

    started = time.monotonic()
    attempt(lambda: write(folder / "whole"), None)
    longest = 1.2 * (time.monotonic() - started)
    ours = folder / "killed"
    completed = until_killed(lambda: write(ours), kills, longest, lambda: shutil.rmtree(ours))
    reading = tree(folder / "whole")
    until_killed(read, kills, longest / 2, lambda: None)
    return {
        "kills_writing": kills,
        "kills_reading": kills,
        "completed_in_between": completed,
        **outcome(tree(ours), tree(folder / "whole"), reading),
    }


def outcome(written: dict[str, str], read: dict[str, str], expected: dict[str, str]) -> dict[str, object]:
    """Compare what killed jobs wrote and killed readers read with what is expected; name the files that differ."""
    differences = {name for found in (written, read) for name, _ in found.items() ^ expected.items()}
    return {
        "written_equal": written == expected,
        "read_unchanged": read == expected,
        "differing_files": sorted(differences),
    }


def with_the_tiny_target(folder: Path, kills: int) -> dict[str, object]:
    import shutil

    from megatron_dspark.features.cache.options import PrecomputeOptions
    from megatron_dspark.features.cache.precompute import precompute
    from megatron_dspark.training.recipes import load_recipe
    from megatron_dspark.training.report import read_metrics
    from megatron_dspark.training.run import train

    data, _ = small_data(folder / "data", train=24)

    def write(where: Path) -> None:
        precompute(PrecomputeOptions(**precompute_options(data, where)))

    def learn(where: Path) -> None:
        settings = load_recipe(f"{ROOT}/recipes/tiny_target.py:debug")
        settings.features, settings.output, settings.max_length = str(folder / "whole"), str(where), MAX_LENGTH
        settings.steps, settings.save_interval, settings.log_interval = 30, 3, 1
        settings.tensorboard = False
        train(settings)

    def metrics(where: Path) -> list[tuple[int, float, float]]:
        return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(where, "train")]

    def timed(work: Callable[[], None]) -> float:
        started = time.monotonic()
        attempt(work, None)
        return time.monotonic() - started

    longest = 1.1 * timed(lambda: write(folder / "whole"))
    ours = folder / "killed"
    completed = until_killed(lambda: write(ours), kills, longest, lambda: shutil.rmtree(ours))
    before = tree(folder / "whole")
    longest = 1.1 * timed(lambda: learn(folder / "run"))
    trained = folder / "killed-run"
    finished = until_killed(lambda: learn(trained), kills, longest, lambda: shutil.rmtree(trained))
    return {
        "kills_writing": kills,
        "kills_reading": kills,
        "completed_in_between": completed + finished,
        **outcome(tree(ours), tree(folder / "whole"), before),
        "training_equal": metrics(trained) == metrics(folder / "run"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--random", action="store_true", help="random features instead of a target's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    assert TINY.is_dir()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dspark-kills-") as folder:
        run = with_random_features if arguments.random else with_the_tiny_target
        result = run(Path(folder), arguments.kills)
    print(json.dumps(result))
    sys.exit(0 if all(value for name, value in result.items() if name.endswith(("equal", "unchanged"))) else 1)


if __name__ == "__main__":
    main()
