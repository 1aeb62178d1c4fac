"""The precompute job on the tiny target: ranks, interruptions, refusals, sources, and fingerprints."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache import precompute as job
from megatron_dspark.features.cache import shard as shard_files
from megatron_dspark.features.cache.options import PrecomputeOptions
from megatron_dspark.features.cache.precompute import precompute
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.verify import show_cache, verify_cache
from megatron_dspark.targets.fingerprint import weights_fingerprint
from megatron_dspark.targets.folder import read_target_config
from tests.cache_support import ROOT, TINY, RandomCache, precompute_options, precompute_rank, small_data, tree
from tests.distributed import RankPool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))[0]


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "cache"
    report = precompute(PrecomputeOptions(**precompute_options(data, output)))
    assert report.state == "written" and report.samples == 10 and report.shards > 2
    assert report.bytes_per_token == 6 * 128 * 4 + 5
    return output


def test_cache_is_whole_and_belongs_to_its_target(made: Path) -> None:
    assert verify_cache(made, TINY / "model").problems == []
    cache = FeatureCache(made)
    target = cache.target()
    assert target.fingerprint() == read_target_config(TINY / "model").fingerprint()
    assert show_cache(made).as_dict()["bytes_per_token"] == 6 * 128 * 4 + 5
    # Every file is readable by whom the folder's other files are.
    assert {oct(path.stat().st_mode & 0o777) for path in made.rglob("*") if path.is_file()} == {
        oct((made / "manifest.json").stat().st_mode & 0o777)
    }


def test_ranks_write_the_same_bytes(made: Path, data: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    reports = two_ranks.run(precompute_rank, precompute_options(data, tmp_path / "two"))
    assert reports[0]["total_bytes"] == reports[1]["total_bytes"] and reports[0]["state"] == "written"
    assert tree(tmp_path / "two") == tree(made)
    # More ranks than shards: one of the two has nothing to do.
    two_ranks.run(precompute_rank, precompute_options(data, tmp_path / "idle", shard_mib=64))
    assert len(list((tmp_path / "idle").glob("shard-*"))) == 1 and verify_cache(tmp_path / "idle").problems == []


def test_three_ranks_write_the_same_bytes(made: Path, data: Path, tmp_path: Path) -> None:
    pool = RankPool(3)
    try:
        pool.run(precompute_rank, precompute_options(data, tmp_path / "three"))
    finally:
        pool.close()
    assert tree(tmp_path / "three") == tree(made)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_split_targets_give_the_same_features(
    tensor: int, pipeline: int, made: Path, data: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[tensor * pipeline])
    options = precompute_options(data, tmp_path / "cache", tensor=tensor, pipeline=pipeline)
    reports = pool.run(precompute_rank, options)
    assert all(report["state"] == "written" and report["tokens_per_second"] > 0 for report in reports)
    if tensor == 1:
        # Stages compute what one rank computes, bit for bit; tensor-parallel sums are rounded in another order.
        assert tree(tmp_path / "cache") == tree(made)
    else:
        ours, theirs = FeatureCache(tmp_path / "cache"), FeatureCache(made)
        assert ours.sample_ids == theirs.sample_ids
        for sample_id in ours.sample_ids:
            for mine, other in zip(ours.features(sample_id), theirs.features(sample_id), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def full_disk_rank(rank: int, size: int, options: dict[str, Any]) -> str:
    """Precompute on a disk that is full at the second shard; return the sentence."""
    original, left = shard_files.save_tensors, [1]

    def full(tensors: Any, path: Path, **keywords: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path, **keywords)

    shard_files.save_tensors = full
    try:
        precompute_rank(rank, size, options)
    except DSparkError as error:
        return str(error)
    finally:
        shard_files.save_tensors = original
    return "nothing was said"


def refused_rank(rank: int, size: int, options: dict[str, Any]) -> str:
    """Return the sentence with which a rank's precompute is refused."""
    with pytest.raises(DSparkError) as refusal:
        precompute_rank(rank, size, options)
    return str(refusal.value)


def test_a_second_job_is_refused_and_a_killed_one_holds_nothing(
    made: Path, data: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    output = tmp_path / "cache"
    hold = "import sys, time; from megatron_dspark.lock import folder_lock\n"
    hold += "with folder_lock(sys.argv[1]): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(output)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        (output / ".shard-000000.safetensors.1-elsewhere.partial").mkdir()
        said = two_ranks.run(refused_rank, precompute_options(data, output))
        assert said[0] == said[1] and f"{output} is being written by process {holder.pid} on" in said[0]
        # Nothing was written, and nothing of the running job taken away.
        assert sorted(path.name for path in output.iterdir()) == [
            ".lock",
            ".shard-000000.safetensors.1-elsewhere.partial",
        ]
    finally:
        holder.kill()
        holder.communicate()
    two_ranks.run(precompute_rank, precompute_options(data, output))
    assert tree(output) == tree(made)


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "make its folder writable")]
)
@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_what_a_disk_refuses_is_named(
    number: int, advice: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        reason = os.strerror(number)
        raise OSError(number, reason) if kind is OSError else SafetensorError(f"{reason} (os error {number})")

    monkeypatch.setattr(shard_files, "save_tensors", refuse)
    with pytest.raises(DSparkError, match=f"could not be written .*{os.strerror(number)}.*; {advice} and run"):
        RandomCache(tmp_path / "cache").write()


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_full_disk_ends_every_rank_of_a_split_target(
    axis: str, data: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    """The rank that does not write learns of it, and neither waits for the other."""
    said = two_ranks.run(full_disk_rank, precompute_options(data, tmp_path / "cache", **{axis: 2}))
    assert said[0] == said[1] and "could not be written" in said[0]


def test_interrupted_job_goes_on(made: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PrecomputeOptions(**precompute_options(data, tmp_path / "cache"))
    original, left = job.megatron_source, [5]

    def failing(*arguments: Any) -> Any:
        capture = original(*arguments)

        def limited(ids: torch.Tensor) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return capture(ids)

        return limited

    monkeypatch.setattr(job, "megatron_source", failing)
    with pytest.raises(KeyboardInterrupt):
        precompute(options)
    shards = {path.name for path in (tmp_path / "cache").glob("shard-*")}
    assert 0 < len(shards) < 4
    with pytest.raises(DSparkError, match=r"complete of the feature cache .* is False and must be True"):
        FeatureCache(tmp_path / "cache")
    # A whole shard that was damaged meanwhile is made again.
    (damaged,) = sorted((tmp_path / "cache").glob("shard-*"))[:1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    left[0] = 1000
    report = precompute(options)
    assert tree(tmp_path / "cache") == tree(made)
    # Five were captured before, in one whole shard and a part of the next, and the whole one was damaged.
    assert 1000 - left[0] == 10 and report.state == "written"
    assert precompute(options).state == "already complete" and tree(tmp_path / "cache") == tree(made)


def test_full_disk_leaves_whole_shards(made: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, original, left = PrecomputeOptions(**precompute_options(data, tmp_path / "cache")), save_file, [1]

    def full(tensors: Any, path: Path, **keywords: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path, **keywords)

    monkeypatch.setattr(shard_files, "save_tensors", full)
    with pytest.raises(DSparkError, match=r"shard-000001.safetensors could not be written .*No space left"):
        precompute(options)
    assert {path.name for path in (tmp_path / "cache").glob("*shard*")} >= {"shard-000000.safetensors"}
    assert not list((tmp_path / "cache").rglob("*.partial"))
    left[0] = 1000
    precompute(options)
    assert tree(tmp_path / "cache") == tree(made)


def test_dry_run_and_refusals(made: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**changes: Any) -> Any:
        output = changes.pop("output", tmp_path / "cache")
        return precompute(PrecomputeOptions(**precompute_options(data, output, **changes)))

    dry = run(dry_run=True, output=tmp_path / "cache")
    actual = sum(path.stat().st_size for path in made.rglob("*.safetensors"))
    assert dry.state == "dry run" and dry.total_bytes == pytest.approx(actual, rel=0.02)
    for changes, sentence in (
        (
            {"output": made, "dtype": "bfloat16"},
            "was made with features.hidden_dtype 'float32' and is now",
        ),
        ({"output": made, "max_length": 64}, "was made with data.fingerprint|was made with data.max_length"),
        ({"output": made, "shard_mib": 2}, "was made with .* shards"),
        ({"output": data.parent}, "is not empty and no precompute began there"),
        ({"dtype": "int8"}, "dtype is 'int8' and must be one of"),
        ({"target_layer_ids": [5, 2]}, "must strictly increase"),
        ({"target_layer_ids": [1, 8]}, "leave the 8 layers of the target"),
        ({"target_layer_ids": [1, 7]}, "name layer 7, which no serving engine can capture"),
        ({"tensor": 2}, "1 ranks, which is no multiple of the 2 × 1"),
        ({"source": "hf", "pipeline": 2}, "1 ranks, which is no multiple of the 1 × 2"),
        ({"source": "hf", "tensor": 1, "compute_dtype": "int8"}, "compute_dtype is 'int8'"),
        ({"data": tmp_path / "nowhere"}, "does not exist"),
    ):
        changes = dict(changes)
        with pytest.raises(DSparkError, match=sentence):
            if "data" in changes:
                precompute(PrecomputeOptions(**precompute_options(changes["data"], tmp_path / "cache")))
            run(**changes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(DSparkError, match=r"cannot be written: .* refuses that \(permission denied\); choose"):
            run()
    with pytest.raises(DSparkError, match=r"train.jsonl refuses that \(it is no folder\)"):
        run(output=data / "cache")
    monkeypatch.setattr(job, "_free_bytes", lambda _: 1000)
    with pytest.raises(DSparkError, match=r"the cache needs .* MB \(3,077 bytes for each of .* tokens\) and the disk"):
        run(dry_run=True)
    assert not (tmp_path / "cache").exists()


def test_transformers_as_the_source(made: Path, data: Path, tmp_path: Path) -> None:
    precompute(PrecomputeOptions(**precompute_options(data, tmp_path / "hf", source="hf")))
    ours, theirs = FeatureCache(tmp_path / "hf"), FeatureCache(made)
    for sample_id in ours.sample_ids[::4]:
        for mine, other in zip(ours.features(sample_id), theirs.features(sample_id), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert tree(tmp_path / "hf" / "target") == tree(made / "target")


def foreign_target(folder: Path, softcap: float | None) -> Path:
    """A Gemma 2 of random weights with the tiny target's tokenizer, which the Megatron-Core source refuses."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, head_dim=16)
    shape |= dict(num_key_value_heads=2, vocab_size=1000, final_logit_softcapping=softcap, query_pre_attn_scalar=16)
    Gemma2ForCausalLM(Gemma2Config(**shape, max_position_embeddings=256)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / name, folder / name)
    return folder


def test_other_architectures(data: Path, tmp_path: Path) -> None:
    target = foreign_target(tmp_path / "plain", None)
    options = precompute_options(
        data, tmp_path / "cache", target=target, target_layer_ids=[-1, 1, 4], allow_unservable_taps=True
    )
    with pytest.raises(DSparkError, match="is a Gemma2ForCausalLM"):
        precompute(PrecomputeOptions(**options))
    precompute(PrecomputeOptions(**options, source="hf"))
    from transformers import Gemma2ForCausalLM

    cache, model = FeatureCache(tmp_path / "cache"), Gemma2ForCausalLM.from_pretrained(target).eval()
    ids, taps, final_hidden = cache.features(cache.sample_ids[2])
    with torch.no_grad():
        expected = model(ids[None], output_hidden_states=True)
    states = [expected.hidden_states[index][0] for index in (0, 2, 5)]
    torch.testing.assert_close(taps, torch.cat(states, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final_hidden, expected.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    assert cache.target().hidden_size == 64 and cache.target().rms_norm_eps == 1e-6
    # A soft cap on the logits is nothing that a teacher made of hidden states and LM head could show.
    capped = foreign_target(tmp_path / "capped", 0.05)
    with pytest.raises(DSparkError, match="are not its LM head times its last hidden state"):
        precompute(PrecomputeOptions(**{**options, "target": capped, "output": tmp_path / "no"}, source="hf"))


def wait_for_another_time(file: Path, before: int) -> None:
    """Some file systems count time in ticks of the kernel's timer."""
    for _ in range(1000):
        file.write_bytes(b"")
        if file.stat().st_ctime_ns > before:
            return
        time.sleep(0.001)


def test_weights_fingerprint_reads_every_byte_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    tensors = load_file(TINY / "model" / "model.safetensors")
    whole = weights_fingerprint(TINY / "model")
    names = sorted(tensors, reverse=True)
    (tmp_path / "split").mkdir()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"split/{1 - number}.safetensors")
    assert weights_fingerprint(tmp_path / "split") == whole == weights_fingerprint(tmp_path / "split", remember=False)
    file = tmp_path / "split" / "0.safetensors"
    content = bytearray(file.read_bytes())
    for place in (len(content) // 2, len(content) - 1):
        content[place] ^= 1
        times = file.stat()
        wait_for_another_time(tmp_path / "tick", times.st_ctime_ns)
        file.write_bytes(content)
        # Restored times of change do not hide it: the inode's own is compared too.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert weights_fingerprint(tmp_path / "split") != whole
        content[place] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(tmp_path / "split") == whole
    remembered = json.loads((tmp_path / "home/megatron_dspark/fingerprints.json").read_text())
    assert len(remembered) == 3
    file.write_bytes(content[:-1])
    with pytest.raises(DSparkError, match="is not a whole safetensors file"):
        weights_fingerprint(tmp_path / "split")


def test_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache_kills", "--random", "--kills", "5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["written_equal"] and result["read_unchanged"] and result["kills_writing"] == 5
