"""Megatron-Bridge's own `pretrain` runs our forward step, and trains what our loop trains."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dspark.training.report import read_metrics
from megatron_dspark.training.run import train
from tests.test_training import tiny_settings

CONSTANT_RATE = {"optimizer.warmup_share": 0.0, "optimizer.decay_style": "constant"}


def test_pretrain_gives_the_losses_of_our_own_loop(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "ours", steps=2, micro_batch_size=2, log_interval=1, **CONSTANT_RATE)
    (tmp_path / "settings.json").write_text(json.dumps(settings.as_dict()))
    # Bridge listens on a port that is the same for every job by default, and reads what launchers set.
    launchers = ("SLURM_", "RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bridge_pretrain", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
        env={**inherited, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = json.loads((tmp_path / "result.json").read_text())
    # Bridge's checkpoint holds the draft and none of the frozen target.
    assert theirs["tensors"] and all("draft." in name for name in theirs["tensors"])
    train(settings)
    ours = read_metrics(tmp_path / "ours", "train")
    assert [line["step"] for line in ours] == [1, 2] and len(theirs["steps"]) == 2
    for line, reported in zip(ours, theirs["steps"], strict=True):
        assert "tau" in reported and "accept_rate@6" in reported
        for name, value in reported.items():
            assert value == pytest.approx(line[name], rel=1e-5, abs=1e-9), (name, line["step"])
    assert ours[1]["loss"] < ours[0]["loss"]
