"""`make quickstart` in small: every verb on the real target, with fewer conversations, steps and tokens."""

import contextlib
import importlib.util
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.main import get_command

from megatron_dspark import cli
from tests.smollm2_support import smollm2_folder

ROOT = Path(__file__).resolve().parent.parent
# A later option replaces an earlier one.
LESS = {
    "prepare": ["--train-samples", "4", "--heldout-samples", "2", "--max-new-tokens", "12", "--workers", "1"],
    "train": ["--steps", "2", "--set", "num_anchors=4", "--set", "max_length=64", "--set", "validation_samples=2"],
    "verify": ["--limit", "1", "--max-new-tokens", "8"],
}


def test_the_quickstart_ends_with_a_drafter_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2_folder()
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(cli, "show", lambda report, as_json: reports.append(report.as_dict()))
    # The two verifications are started side by side, and standard output is one.
    lock, typed = threading.Lock(), []

    def in_this_process(*arguments: Any, ranks: int = 1, threads: int = 1, aside: bool = False) -> dict[str, Any]:
        words = [str(argument) for argument in arguments]
        typed.append(words)
        with lock:
            get_command(cli.app)([*words, *LESS.get(words[0], [])], standalone_mode=False)
            return reports.pop()

    monkeypatch.setattr(quickstart, "megatron_dspark", in_this_process)
    screen = io.StringIO()
    monkeypatch.setattr(quickstart, "console", Console(file=screen, width=120))
    with contextlib.redirect_stderr(io.StringIO()):
        quickstart.main(output=tmp_path / "quickstart")
    assert [words[0] for words in typed] == ["prepare", "train", "export", "verify", "verify"]
    text = screen.getvalue()
    assert "1 of 1 prompts" in text and "sampled: same distribution" in text and "held-out recipes" in text
    draft = tmp_path / "quickstart/draft"
    record = json.loads((draft / "dspark_export.json").read_text())
    assert set(record["accepted_length"]) == {"greedy"} and record["run"]["step"] == 2
    assert (tmp_path / "quickstart/curves.png").stat().st_size > 10_000
    # The Markov head starts from bigrams, as the recipe says.
    from megatron_dspark.hf.load import load_draft

    _, tensors = load_draft(draft)
    assert tensors["markov_head.markov_w1.weight"].shape == (49152, 64) and all(
        torch.isfinite(tensor).all() for tensor in tensors.values()
    )
