"""Answers are the target's own, depend on seed and id alone, and survive a kill byte for byte."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from megatron_dspark.data import generate
from megatron_dspark.data.chat import encode_messages, encode_prompt, load_tokenizer
from megatron_dspark.data.decode import Decoder, Request
from megatron_dspark.data.generate import GenerateSettings, _worker_count, generate_responses
from megatron_dspark.data.messages import read_messages
from megatron_dspark.data.partial import PartialFile
from megatron_dspark.data.workers import worker_device
from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, distribution
from megatron_dspark.targets.folder import read_target_config
from tests.data_support import save_tiny_target

PROMPTS = [
    {"id": f"p{index}", "messages": [{"role": "user", "content": f"word {index * index} " * (1 + index % 3)}]}
    for index in range(11)
]
# A fifth of the vocabulary ends an answer, so that rows end at many different steps.
STOPS = frozenset(range(0, 259, 5))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("data") / "target")


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return Decoder(str(target), "cpu", "float32", 1)


@pytest.fixture(scope="module")
def requests(target: Path) -> list[Request]:
    tokenizer = load_tokenizer(target)
    return [Request(prompt["id"], encode_prompt(tokenizer, prompt)) for prompt in PROMPTS]


def decode(decoder: Decoder, requests: list[Request], rows: int, **keys: Any) -> dict[str, list[int]]:
    arguments = {"max_new_tokens": 24, "stop_ids": STOPS, "sampling": SamplingSettings(), "seed": 0, **keys}
    answers = list(decoder.decode(requests, rows=rows, **arguments))
    assert sorted(answer.index for answer in answers) == list(range(len(requests)))
    assert all(answer.stopped == (answer.tokens[-1] in arguments["stop_ids"]) for answer in answers)
    return {requests[answer.index].key: answer.tokens for answer in answers}


def test_workers_share_the_cuda_devices_of_a_machine(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [worker_device("cuda", worker, 3) for worker in range(5)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"] and worker_device("cpu", 1, 0) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = read_target_config(target)
    assert _worker_count(GenerateSettings(device="cuda"), config, prompts=11) == 3
    assert _worker_count(GenerateSettings(device="cuda", workers=8), config, prompts=11) == 8


def run(target: Path, output: Path, **settings: Any) -> bytes:
    generate_responses(PROMPTS, target, output, GenerateSettings(**{"max_new_tokens": 24, "workers": 1, **settings}))
    return output.read_bytes()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_are_those_of_transformers_own_generate(requests, tmp_path: Path, family: str) -> None:
    folder = save_tiny_target(tmp_path / family, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = {}
    for request in requests:
        ids = torch.tensor([request.prompt])
        output = reference.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=sorted(STOPS), pad_token_id=0)
        expected[request.key] = output[0, len(request.prompt) :].tolist()
    assert len({len(tokens) for tokens in expected.values()}) > 3
    decoder = Decoder(str(folder), "cpu", "float32", 1)
    for rows in (1, 3, 16):
        assert decode(decoder, requests, rows) == expected


def test_sampled_answers_depend_on_seed_and_id_only(decoder: Decoder, requests: list[Request]) -> None:
    sampling = SamplingSettings(temperature=1.0, top_p=0.95)
    alone = decode(decoder, requests, 1, sampling=sampling)
    assert decode(decoder, requests, 4, sampling=sampling) == alone
    assert decode(decoder, requests[::-2], 2, sampling=sampling) == {r.key: alone[r.key] for r in requests[::-2]}
    assert decode(decoder, requests, 4, sampling=sampling, seed=1) != alone
    twins = [Request(f"twin {index}", requests[0].prompt) for index in range(6)]
    assert len({tuple(tokens) for tokens in decode(decoder, twins, 6, sampling=sampling).values()}) > 1


@pytest.mark.parametrize("sampling", [SamplingSettings(1.0), SamplingSettings(0.5, top_k=20, top_p=0.9)])
def test_sampled_tokens_follow_the_targets_distribution(decoder, requests, target: Path, sampling) -> None:
    prompt, draws = requests[0].prompt, 3000
    twins = [Request(str(index), prompt) for index in range(draws)]
    drawn = decode(decoder, twins, 500, sampling=sampling, max_new_tokens=1)
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = distribution(reference(torch.tensor([prompt])).logits[0, -1], sampling) * draws
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in drawn.values()]), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rest = torch.tensor([expected[~common].sum().clamp_min(1e-9), counts[~common].sum()])
    observed = torch.cat([counts[common], rest[1:]])
    assert chisquare(observed, torch.cat([expected[common], rest[:1]]), sum_check=False).pvalue > 1e-3


def test_file_holds_what_the_target_emitted_in_the_order_of_the_prompts(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path / "out.jsonl")
    records = read_messages(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [prompt["id"] for prompt in PROMPTS]
    assert [record["messages"][:-1] for record in records] == [prompt["messages"] for prompt in PROMPTS]
    assert {record["finish_reason"] for record in records} == {"stop", "length"}
    tokenizer = load_tokenizer(target)
    for record in records:
        sample = encode_messages(tokenizer, record, 1000)
        closed = int(sample.input_ids[sample.loss_mask][-1]) == tokenizer.eos_token_id
        assert closed == (record["finish_reason"] == "stop")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_report_counts(target: Path, tmp_path: Path) -> None:
    settings = GenerateSettings(max_new_tokens=24, workers=1)
    report = generate_responses(PROMPTS, target, tmp_path / "out.jsonl", settings)
    reasons = [record["finish_reason"] for record in read_messages(tmp_path / "out.jsonl")]
    assert (report.requested, report.samples, report.unfinished, report.resumed_samples) == (11, 11, 0, 0)
    assert report.cut_at_max_new_tokens == reasons.count("length")
    assert report.mean_response_tokens == report.response_tokens / 11 <= 24
    # Random bytes are seldom UTF-8, so most of this target's answers cannot be read back as they were.
    assert 0 < report.tokenised_differently <= 11


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_size_does_not_change_the_bytes(target: Path, tmp_path: Path, temperature: float) -> None:
    sizes = (1, 2, 3, 64)
    files = [run(target, tmp_path / f"{size}.jsonl", batch_size=size, temperature=temperature) for size in sizes]
    assert len(set(files)) == 1


def test_interrupted_anywhere_it_ends_with_the_same_bytes(target: Path, tmp_path: Path, monkeypatch) -> None:
    settings = {"batch_size": 2, "temperature": 1.0}
    whole = run(target, tmp_path / "whole.jsonl", **settings)
    append = PartialFile.append
    chance = random.Random(0)
    for attempt in range(8):
        output = tmp_path / f"{attempt}.jsonl"
        partial = output.with_name(output.name + ".partial")
        stop_after = chance.randrange(len(PROMPTS))
        written = 0

        def append_until_killed(self: PartialFile, unit: int, entry: dict, limit: int = stop_after) -> None:
            nonlocal written
            if written == limit:
                raise KeyboardInterrupt
            written += 1
            append(self, unit, entry)

        monkeypatch.setattr(PartialFile, "append", append_until_killed)
        with pytest.raises(KeyboardInterrupt):
            run(target, output, **settings)
        assert not output.exists()
        # A kill may also tear what was being written.
        with open(partial, "r+b") as file:
            file.truncate(chance.randrange(partial.stat().st_size + 1))
        monkeypatch.setattr(PartialFile, "append", append)
        assert run(target, output, **settings) == whole
        assert not partial.exists()


def test_resuming_keeps_whole_units(target: Path, tmp_path: Path, monkeypatch) -> None:
    output, append = tmp_path / "out.jsonl", PartialFile.append
    settings = GenerateSettings(max_new_tokens=24, workers=1, batch_size=4)

    def append_until_killed(self: PartialFile, unit: int, entry: dict) -> None:
        if unit == 2:
            raise KeyboardInterrupt
        append(self, unit, entry)

    monkeypatch.setattr(PartialFile, "append", append_until_killed)
    with pytest.raises(KeyboardInterrupt):
        generate_responses(PROMPTS, target, output, settings)
    monkeypatch.setattr(PartialFile, "append", append)
    report = generate_responses(PROMPTS, target, output, settings)
    assert report.resumed_samples == 8 and report.samples == 11


KILLED = """
import sys
from megatron_dspark.data.generate import GenerateSettings, generate_responses
from tests.test_data_generate import PROMPTS
if __name__ == "__main__":
    settings = GenerateSettings(max_new_tokens=24, workers=2, batch_size=2, temperature=1.0)
    generate_responses(PROMPTS, sys.argv[1], sys.argv[2], settings)
"""


def test_killed_job_takes_its_workers_along_and_continues(target: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(KILLED)
    output = tmp_path / "out.jsonl"
    partial = output.with_name("out.jsonl.partial")
    root = str(Path(__file__).parents[1])
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "job.py"), str(target), str(output)],
        env={**os.environ, "PYTHONPATH": root},
        cwd=root,
    )
    workers = []
    while job.poll() is None and not output.exists():
        workers = psutil.Process(job.pid).children(recursive=True) or workers
        with contextlib.suppress(FileNotFoundError):
            if partial.read_bytes().count(b"\n") > 3:
                job.send_signal(signal.SIGKILL)
                break
        time.sleep(0.01)
    job.wait()
    # Where the job was faster than the kill, its file must be right all the same.
    psutil.wait_procs(workers, timeout=60)
    assert not [process for process in workers if process.is_running() and "resource_tracker" not in _command(process)]
    settings = {"batch_size": 2, "temperature": 1.0}
    if not output.exists():
        run(target, output, **settings)
    assert output.read_bytes() == run(target, tmp_path / "whole.jsonl", **settings)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "resource_tracker"


def test_partial_file_of_other_settings_prompts_or_a_running_job_is_refused(
    target: Path, tmp_path, monkeypatch
) -> None:
    output = tmp_path / "out.jsonl"

    def killed(self: PartialFile, unit: int, entry: dict) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PartialFile, "append", killed)
        run(target, output)
    with pytest.raises(DSparkError, match=r"was begun with settings\.temperature 0\.0, now it is 0\.5"):
        run(target, output, temperature=0.5)
    with pytest.raises(DSparkError, match="was begun with prompts "):
        generate_responses(PROMPTS[:5], target, output, GenerateSettings(max_new_tokens=24, workers=1))
    with (
        PartialFile(tmp_path / "held.jsonl", {}, 1),
        pytest.raises(DSparkError, match="is being written by another process"),
    ):
        run(target, tmp_path / "held.jsonl")
    partial = output.with_name("out.jsonl.partial")
    partial.write_bytes(partial.read_bytes() + b"{torn}\n{}\n")
    with pytest.raises(DSparkError, match="line 2 is damaged"):
        run(target, output)


def test_time_limit_leaves_out_the_last_prompts(target: Path, tmp_path: Path) -> None:
    settings = GenerateSettings(max_new_tokens=24, workers=1, batch_size=3, time_limit_seconds=1e-3)
    report = generate_responses(PROMPTS, target, tmp_path / "out.jsonl", settings)
    names = [record["id"] for record in read_messages(tmp_path / "out.jsonl")]
    # The first batch always runs; nothing that would end too late begins.
    assert names == ["p0", "p1", "p2"] and (report.samples, report.unfinished) == (3, 8)


def test_nothing_is_written_for_what_cannot_work(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    long = {"id": "long", "messages": [{"role": "user", "content": "x" * 240}]}
    with pytest.raises(DSparkError, match=r"'long' has 2\d\d tokens, which with 160 new ones exceed the target's 256"):
        generate_responses([long], target, output)
    with pytest.raises(DSparkError, match="'p0' occurs more than once"):
        generate_responses([PROMPTS[0], PROMPTS[0]], target, output)
    with pytest.raises(DSparkError, match="there is no prompt"):
        generate_responses([], target, output)
    answered = {"id": "a", "messages": [*PROMPTS[0]["messages"], {"role": "assistant", "content": "b"}]}
    with pytest.raises(DSparkError, match="ends with an assistant message"):
        generate_responses([answered], target, output)
    assert not list(tmp_path.iterdir())
    output.write_text("mine")
    with pytest.raises(DSparkError, match="already exists"):
        run(target, output)
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be at least 1"),
        ("temperature", -1.0, "temperature is -1.0"),
        ("top_p", 0.0, "top_p is 0.0"),
        ("device", "tpu", "device is 'tpu'; choose one of auto, cpu, cuda"),
        ("time_limit_seconds", 0.0, "time_limit_seconds is 0.0"),
    ],
)
def test_settings_are_checked(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(DSparkError, match=sentence):
        GenerateSettings(**{field: value})


def test_weights_that_give_no_numbers_are_named(target: Path, requests: list[Request]) -> None:
    broken = Decoder(str(target), "cpu", "float32", 1)
    broken.model.get_output_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(DSparkError, match=r"gave a logit of nan for prompt 'p0'"):
        decode(broken, requests, 4)


@pytest.mark.parametrize(("prompts", "batch", "workers"), [(1, 64, 2), (200, 64, 2), (272, 64, 2), (5000, 32, 3)])
def test_units_share_the_work_evenly(prompts: int, batch: int, workers: int) -> None:
    unit = generate._unit_size(prompts, batch, workers)
    units = -(-prompts // unit)
    rows = generate._rows(unit, batch)
    assert rows <= 1.5 * batch and unit <= 2 * rows
    rounds = -(-units // workers)
    # The busiest worker does at most a tenth more than its share, plus the rounding of one unit's prompts.
    assert rounds * unit <= 1.1 * prompts / workers + rounds


def test_json_of_a_report_is_plain(target: Path, tmp_path: Path) -> None:
    report = generate_responses(
        PROMPTS[:2], target, tmp_path / "o.jsonl", GenerateSettings(max_new_tokens=3, workers=1)
    )
    assert json.loads(json.dumps(report.as_dict()))["samples"] == 2
