"""A file encoded once: what is kept is what encoding gives, in order, and is made anew when anything differs."""

import json
import os
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets.exceptions import DatasetGenerationError

from megatron_dspark.data import encoded
from megatron_dspark.data.chat import encode_messages, load_tokenizer
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.messages import read_messages
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.schema import samples_fingerprint
from tests.data_support import save_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "target")


def conversations(path: Path, count: int, seed: int) -> Path:
    """Conversations of very different lengths, with blank lines in between."""
    chosen, lines = random.Random(seed), []
    for number in range(count):
        words = " ".join(str(chosen.random()) for _ in range(chosen.choice([1, 1, 2, 40])))
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{number} {words}"}]
        lines += [json.dumps({"id": f"{seed}-{number}", "messages": turns})] + [""] * chosen.choice([0, 0, 1])
    path.write_text("\n".join(lines))
    return path


def never(*_: Any) -> None:
    raise AssertionError("encoded again")


@pytest.mark.parametrize("processes", [1, 3])
def test_kept_samples_are_the_encoded_ones(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    path = conversations(tmp_path / "chat.jsonl", 40, seed=processes)
    monkeypatch.setattr(encoded, "_BYTES_PER_PROCESS", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processes))
    assert len(encoded._parts(path, processes)) == processes
    samples, tokenizer = load_samples(path, target, 300), load_tokenizer(target)
    expected = [encode_messages(tokenizer, record, 300) for record in read_messages(path)]
    assert len(samples) == len(expected) == 40
    for found, wanted in zip(samples, expected, strict=True):
        assert found.sample_id == wanted.sample_id
        assert torch.equal(found.input_ids, wanted.input_ids) and found.input_ids.dtype == torch.int64
        assert torch.equal(found.loss_mask, wanted.loss_mask) and found.loss_mask.dtype == torch.bool
    assert samples.lengths == [len(sample.input_ids) for sample in expected]
    assert samples.loss_tokens == sum(int(sample.loss_mask.sum()) for sample in expected)
    assert samples.fingerprint == samples_fingerprint(expected)
    part = samples[5:20:3]
    assert [sample.sample_id for sample in part] == [sample.sample_id for sample in expected[5:20:3]]
    assert (part.lengths, part.fingerprint) == (samples.lengths[5:20:3], samples_fingerprint(expected[5:20:3]))

    monkeypatch.setattr(encoded, "_encode_part", never)
    assert load_samples(path, target, 300).fingerprint == samples.fingerprint
    for changed in ("length", "data", "tokenizer"):
        other = tmp_path / changed
        if changed == "data":
            other.write_text(path.read_text() + "\n")
        if changed == "tokenizer":
            other = save_tiny_target(other)
            (other / "chat_template.jinja").write_text((target / "chat_template.jinja").read_text() + " ")
        with pytest.raises(DatasetGenerationError):
            load_samples(
                other if changed == "data" else path,
                other if changed == "tokenizer" else target,
                301 if changed == "length" else 300,
            )


@pytest.mark.parametrize("processes", [1, 2])
def test_refusals_name_the_line_whatever_process_meets_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(encoded, "_BYTES_PER_PROCESS", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processes))
    path = conversations(tmp_path / "chat.jsonl", 20, seed=7)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, '{"messages": 3}', "{"]))
    with pytest.raises(DSparkError, match=rf"chat.jsonl line {len(lines) + 1} has no list of `messages`"):
        load_samples(path, target, 300)
    path.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(DSparkError, match=rf"has the id '7-0' on line 1 and again on line {len(lines) + 1}; make"):
        load_samples(path, target, 300)


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(DSparkError, match=r"could not be kept in .*file .*set HF_DATASETS_CACHE"):
        load_samples(conversations(tmp_path / "chat.jsonl", 3, seed=9), target, 300)


def test_a_damaged_file_is_not_used(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = conversations(tmp_path / "chat.jsonl", 30, seed=11)
    whole = load_samples(data, target, 300)
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    content = file.read_bytes()
    ids = whole[7].input_ids.numpy().astype("<i4").tobytes()
    file.write_bytes(content.replace(ids, ids[:-4] + b"\1\0\0\0"))
    samples = load_samples(data, target, 300)
    assert samples[6].sample_id == "11-6"
    with pytest.raises(DSparkError, match=r"are damaged \(the sample '11-7' is not what was encoded\); remove"):
        samples[7]
    info = file.with_name("dataset_info.json")
    for path, damaged in ((file, content[: len(content) // 2]), (info, b'{"a'), (file, None)):
        whole = path.read_bytes()
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(
            DSparkError, match=rf"encoded conversations in {file.parents[1]} are damaged .* remove that"
        ):
            load_samples(data, target, 300)
        path.write_bytes(whole)
