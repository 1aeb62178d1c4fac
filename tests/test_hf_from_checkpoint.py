"""A checkpoint is exported by one process or by ranks that hold a part each: the same file, and its record."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dspark import cli
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import sha256
from megatron_dspark.hf.from_checkpoint import export_checkpoint
from megatron_dspark.hf.lint import lint_folder
from megatron_dspark.training.run import train
from tests.distributed import RankPool
from tests.test_training import TINY, tiny_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    train(tiny_settings(folder, steps=1, save_interval=1))
    return folder


def export_on_rank(rank: int, size: int, run: Path, output: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.tensor_parallel import layers

    built: list[int] = []
    original = layers.VocabParallelEmbedding.__init__

    def spy(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        built.append(self.weight.shape[0])

    layers.VocabParallelEmbedding.__init__ = spy
    try:
        report = export_checkpoint(run, output, **arguments).as_dict()
    finally:
        layers.VocabParallelEmbedding.__init__ = original
    return {**report, "rows": built}


def test_one_process_and_two_ranks_write_the_same_bytes(run: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"dtype": "float32", "max_shard_bytes": 200_000, "target_name": "someone/tiny"}
    one = export_on_rank(0, 1, run, tmp_path / "one" / "draft", arguments)
    first, second = two_ranks.run(export_on_rank, run, tmp_path / "two" / "draft", arguments)
    assert first["files"] == second["files"] == one["files"] and len(one["files"]) > 4
    for name in one["files"]:
        assert (tmp_path / "one" / "draft" / name).read_bytes() == (tmp_path / "two" / "draft" / name).read_bytes()
    # No rank of the two holds a whole table.
    assert max(first["rows"] + second["rows"]) < max(one["rows"])


def test_kernels_that_this_machine_lacks_do_not_matter(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (file,) = (tmp_path / "run/checkpoints").glob("step-*/run.json")
    content = json.loads(file.read_text())
    content["model"]["objective_kernel"] = "compiled"
    content["model"]["transformer"]["transformer_impl"] = "transformer_engine"
    file.write_text(json.dumps(content))
    for source, name in ((run, "local"), (tmp_path / "run", "elsewhere")):
        export_checkpoint(source, tmp_path / name)
    assert sha256(tmp_path / "local/model.safetensors") == sha256(tmp_path / "elsewhere/model.safetensors")


def test_the_record_says_where_the_weights_come_from(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "draft", layout="speculators")
    record = json.loads((tmp_path / "draft" / "dspark_export.json").read_text())
    assert record["layout"] == "speculators" and record["run"]["step"] == 1
    assert len(record["data"]["sha256"]) == len(record["target"]["fingerprint"]) == 64
    assert record["tau"] == record["run"]["metrics"]["validation"]["tau"]
    assert set(record["conventions"]) >= {"loss_normalizer", "loss_decay_gamma", "detach_confidence_features"}
    assert record["block_layout"]["predictions"] == "slot k predicts the token at anchor + k + 1"
    assert lint_folder(tmp_path / "draft").engine("vllm").loads
    with pytest.raises(DSparkError, match="layout 'gguf' cannot be written"):
        export_checkpoint(run, tmp_path / "other", layout="gguf")
    assert not (tmp_path / "other").exists()


def test_the_accepted_length_is_recorded_with_its_command(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export_checkpoint(run, tmp_path / "draft")
    prompts = TINY / "data" / "heldout.jsonl"
    capfd.readouterr()
    cli.verify(tmp_path / "draft", TINY / "model", prompts, limit=2, max_new_tokens=8, record=True, as_json=True)
    measured = json.loads(capfd.readouterr().out.splitlines()[-1])
    record = json.loads((tmp_path / "draft" / "dspark_export.json").read_text())
    assert record["accepted_length"] == {
        "greedy": {
            "tokens_per_iteration": measured["accepted_length"],
            "prompts": 2,
            "prompts_sha256": sha256(prompts),
            "command": "megatron-dspark verify --draft DRAFT --target TARGET "
            "--prompts heldout.jsonl --limit 2 --max-new-tokens 8 --temperature 0 "
            "--dtype float32",
        }
    }
    # Every way of sampling has its own entry, and its command all that decides the number.
    cli.verify(tmp_path / "draft", TINY / "model", prompts, 1, 4, 0.7, top_p=0.9, top_k=20, seed=3, record=True)
    record = json.loads((tmp_path / "draft" / "dspark_export.json").read_text())
    assert list(record["accepted_length"]) == ["greedy", "temperature 0.7, top-k 20, top-p 0.9"]
    assert record["accepted_length"]["temperature 0.7, top-k 20, top-p 0.9"]["command"] == (
        "megatron-dspark verify --draft DRAFT --target TARGET "
        "--prompts heldout.jsonl --limit 1 --max-new-tokens 4 --temperature 0.7 --dtype float32 "
        "--top-p 0.9 --top-k 20 --seed 3"
    )
    assert "greedy: **" in (tmp_path / "draft" / "README.md").read_text()
    assert lint_folder(tmp_path / "draft").ok

    # The same shapes and vocabulary, other weights.
    shutil.copytree(TINY / "model", tmp_path / "other")
    content = bytearray((tmp_path / "other" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "other" / "model.safetensors").write_bytes(content)
    with pytest.raises(DSparkError, match=r"was trained against the target model \(fingerprint .* holds another one"):
        cli.verify(tmp_path / "draft", tmp_path / "other", prompts, limit=1, record=True)
    assert json.loads((tmp_path / "draft" / "dspark_export.json").read_text()) == record
