"""The whole preparation: what it writes, that it continues, and what it refuses before writing."""

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_dspark.data import prepare as module
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.data.messages import read_messages
from megatron_dspark.data.partial import PartialFile
from megatron_dspark.data.prepare import PrepareOptions, prepare
from megatron_dspark.errors import DSparkError
from tests.data_support import save_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("prepare") / "target")


def options(target: Path, output: Path, /, **changed: Any) -> PrepareOptions:
    small = {"train_samples": 7, "heldout_samples": 3, "max_new_tokens": 6, "workers": 1, "batch_size": 4}
    return PrepareOptions(**{"target": target, "output": output, **small, **changed})


def conversations(path: Path, count: int, *, replies: bool = True) -> Path:
    def messages(index: int) -> list[dict[str, str]]:
        turns = [{"role": "user", "content": f"question {index}"}]
        return turns + [{"role": "assistant", "content": f"answer {index}"}] * replies

    lines = [json.dumps({"id": f"c{index}", "messages": messages(index)}) for index in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def test_built_in_prompts(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    # With this seed no answer ends at once, which would leave a conversation out.
    report = prepare(options(target, output, general_heldout_samples=2, temperature=1.0, seed=2))
    assert {path.name for path in output.iterdir()} == {
        "train.jsonl", "heldout.jsonl", "general_heldout.jsonl", "prepare.json",
    }  # fmt: skip
    written = json.loads((output / "prepare.json").read_text())
    assert report.as_dict() == {**written, "reused": False}
    for name, samples in (("train.jsonl", 7), ("heldout.jsonl", 3), ("general_heldout.jsonl", 2)):
        facts, encoded = written["files"][name], load_samples(output / name, target, 256)
        assert len(encoded) == facts["samples"] == samples
        assert facts["tokens"] == sum(len(sample.input_ids) for sample in encoded)
        assert facts["loss_tokens"] == sum(int(sample.loss_mask.sum()) for sample in encoded)
        assert facts["sha256"] == hashlib.sha256((output / name).read_bytes()).hexdigest()
    assert written["options"]["temperature"] == 1.0 and written["target"]["folder"] == str(target)
    prompts = {name: {r["messages"][0]["content"] for r in read_messages(output / name)} for name in written["files"]}
    assert not prompts["train.jsonl"] & prompts["heldout.jsonl"]


def test_again_is_done_and_other_options_are_refused(target: Path, tmp_path: Path) -> None:
    first = prepare(options(target, tmp_path / "out"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare(options(target, tmp_path / "out", workers=2))
    assert again.reused and again.content == first.content
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    for field, old, new in (("seed", "0", 1), ("train_samples", "7", 8), ("temperature", r"0\.0", 0.5)):
        with pytest.raises(DSparkError, match=f"was prepared with {field} {old} and now it is {new}"):
            prepare(options(target, tmp_path / "out", **{field: new}))
    (tmp_path / "out/heldout.jsonl").write_text("{}\n")
    with pytest.raises(DSparkError, match=r"heldout\.jsonl was changed after its preparation"):
        prepare(options(target, tmp_path / "out"))


@pytest.mark.parametrize("step", ["generating", "filling in", "writing", "reporting"])
def test_killed_at_any_step_it_continues_to_the_same_bytes(target: Path, tmp_path: Path, monkeypatch, step) -> None:
    prepare(options(target, tmp_path / "whole"))
    output = tmp_path / "out"
    write_json = module.write_json
    append, kept = PartialFile.append, []

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def killed_after_one_unit(self: PartialFile, unit: int, entry: dict) -> None:
        if unit == 1:
            raise KeyboardInterrupt
        kept.append(entry)
        append(self, unit, entry)

    def killed_at_report(path: Path, value: Any) -> None:
        if path.name == "prepare.json":
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "generating":
            patch.setattr(PartialFile, "append", killed_after_one_unit)
        elif step == "reporting":
            patch.setattr(module, "write_json", killed_at_report)
        else:
            patch.setattr(module, {"filling in": "_fill_in", "writing": "_write"}[step], killed)
        prepare(options(target, output))
    assert not (output / "prepare.json").exists()
    with pytest.raises(DSparkError, match="was begun with max_new_tokens 6 and now it is 5"):
        prepare(options(target, output, max_new_tokens=5))
    report = prepare(options(target, output))
    assert contents(output) == contents(tmp_path / "whole")
    assert {path.name for path in output.iterdir()} == {"train.jsonl", "heldout.jsonl", "prepare.json"}
    assert report.content["generation"]["resumed_samples"] == len(kept)
    assert not report.reused and prepare(options(target, output)).reused


def test_users_conversations_are_kept_or_answered_anew(target: Path, tmp_path: Path) -> None:
    file = conversations(tmp_path / "mine.jsonl", 12)
    prepare(options(target, tmp_path / "kept", prompts=file, keep_responses=True, train_samples=None))
    prepare(options(target, tmp_path / "anew", prompts=file, train_samples=None))
    mine = {record["id"]: record for record in read_messages(file)}
    for name, samples in (("train.jsonl", 9), ("heldout.jsonl", 3)):
        kept, anew = read_messages(tmp_path / "kept" / name), read_messages(tmp_path / "anew" / name)
        assert len(kept) == len(anew) == samples
        assert all(record == mine[record["id"]] for record in kept)
        assert [record["id"] for record in kept] == [record["id"] for record in anew]
        assert all(record["messages"][:1] == mine[record["id"]]["messages"][:1] for record in anew)
        assert all(record["messages"][1] != mine[record["id"]]["messages"][1] for record in anew)
        assert all(record["finish_reason"] in ("stop", "length") for record in anew)
    report = json.loads((tmp_path / "kept/prepare.json").read_text())
    assert report["generation"] is None and report["options"]["prompts_sha256"]


def test_any_decoder_s_conversations_are_kept_and_only_ours_are_answered(target: Path, tmp_path: Path) -> None:
    other = shutil.copytree(target, tmp_path / "mistral")
    config = json.loads((other / "config.json").read_text())
    config.update(architectures=["MistralForCausalLM"], model_type="mistral")
    (other / "config.json").write_text(json.dumps(config))
    mine = {"prompts": conversations(tmp_path / "mine.jsonl", 12), "train_samples": None}
    with pytest.raises(DSparkError, match="is a MistralForCausalLM"):
        prepare(options(other, tmp_path / "anew", **mine))
    assert not (tmp_path / "anew").exists()
    report = prepare(options(other, tmp_path / "kept", keep_responses=True, **mine))
    assert report.content["target"]["architecture"] == "MistralForCausalLM"


def test_split_depends_on_the_ids_not_on_the_order_of_lines(target: Path, tmp_path: Path) -> None:
    file = conversations(tmp_path / "a.jsonl", 20)
    lines = file.read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(lines)))
    heldout = []
    for name in ("a", "b"):
        mine = options(
            target, tmp_path / name, prompts=tmp_path / f"{name}.jsonl", keep_responses=True, train_samples=None
        )
        prepare(mine)
        heldout.append({record["id"] for record in read_messages(tmp_path / name / "heldout.jsonl")})
    assert heldout[0] == heldout[1] and len(heldout[0]) == 3


def test_a_prompt_that_occurs_twice_is_never_held_out(target: Path, tmp_path: Path) -> None:
    lines = conversations(tmp_path / "mine.jsonl", 4).read_text().splitlines()
    copies = [line.replace('"id": "c', '"id": "copy') for line in lines[1:]]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines + copies))
    mine = {"prompts": tmp_path / "mine.jsonl", "keep_responses": True, "train_samples": None}
    prepare(options(target, tmp_path / "out", heldout_samples=1, **mine))
    assert [record["id"] for record in read_messages(tmp_path / "out/heldout.jsonl")] == ["c0"]
    with pytest.raises(DSparkError, match=r"heldout_samples is 2, and .* has 1 prompts that occur once"):
        prepare(options(target, tmp_path / "more", heldout_samples=2, **mine))


def test_earlier_replies_that_are_not_the_targets_are_not_learned(target: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "human reply"},
        {"role": "user", "content": "b"},
    ]
    lines = [json.dumps({"id": str(i), "messages": [*messages, {"role": "user", "content": str(i)}]}) for i in range(5)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    prepare(options(target, tmp_path / "out", prompts=tmp_path / "mine.jsonl", train_samples=None))
    for sample in load_samples(tmp_path / "out/train.jsonl", target, 256):
        learned = sample.loss_mask.nonzero().flatten()
        # One stretch, at the end (before what the template writes after it).
        assert learned[-1] - learned[0] == len(learned) - 1 and len(sample.loss_mask) - learned[-1] <= 3


def test_time_limit_shortens_training_and_says_so(target: Path, tmp_path: Path) -> None:
    report = prepare(options(target, tmp_path / "out", time_limit_seconds=1e-3))
    # One batch of five in the order of the files: three held-out answers, then the first of training.
    assert {name: facts["samples"] for name, facts in report.content["files"].items()} == {
        "heldout.jsonl": 3, "train.jsonl": 2,
    }  # fmt: skip
    console = Console(width=100, file=io.StringIO())
    console.print(report.render())
    text = console.file.getvalue()
    assert "the time limit left 5 prompts unanswered" in text and "heldout.jsonl" in text
    with pytest.raises(DSparkError, match=r"no answer for train\.jsonl was ready within time_limit_seconds 0\.001"):
        prepare(options(target, tmp_path / "none", heldout_samples=5, time_limit_seconds=1e-3))
    report = prepare(options(target, tmp_path / "none", heldout_samples=5, time_limit_seconds=1e3))
    assert report.content["files"]["train.jsonl"]["samples"] == 7


def test_refusals_come_before_any_file(target: Path, tmp_path: Path) -> None:
    file = conversations(tmp_path / "mine.jsonl", 5)
    output = tmp_path / "out"
    refused = [
        ({"heldout_samples": 0}, "heldout_samples is 0; it must be at least 1"),
        ({"keep_responses": True}, "keep_responses needs a file of conversations, and prompts is 'recipes'"),
        ({"prompts": "cooking"}, "prompts is 'cooking', which is neither 'recipes' nor 'general' nor a file"),
        ({"prompts": "general", "general_heldout_samples": 5}, "set general_heldout_samples to 0"),
        ({"supervise": "first"}, "supervise is 'first'; choose one of all, last"),
        ({"train_samples": 10**6}, "1000000 recipes prompts were asked for"),
        ({"prompts": file}, "train_samples is 7, and .* has 2 conversations besides the 3 held out"),
        ({"prompts": file, "train_samples": None, "heldout_samples": 5}, "train_samples is all, and .* has 0"),
        ({"target": tmp_path / "no"}, "the target folder .* does not exist"),
        ({"target": tmp_path}, "config was expected at .* and there is no such file"),
        ({"top_p": 2.0}, "top_p is 2.0"),
    ]
    for changed, sentence in refused:
        with pytest.raises(DSparkError, match=sentence):
            prepare(options(target, output, **changed))
    prompts_only = conversations(tmp_path / "prompts.jsonl", 12, replies=False)
    with pytest.raises(DSparkError, match=r"prompts\.jsonl line 1 does not end with an assistant message"):
        prepare(options(target, output, prompts=prompts_only, keep_responses=True))
    long = {"id": "long", "messages": [{"role": "user", "content": "u" * 300}, {"role": "assistant", "content": "a"}]}
    file.write_text(conversations(file, 12).read_text() + json.dumps(long) + "\n")
    with pytest.raises(DSparkError, match=r"mine\.jsonl line 13: .*only its first 256 tokens are kept"):
        prepare(options(target, output, prompts=file, keep_responses=True, train_samples=None))
    assert not output.exists()
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(DSparkError, match="is not empty and no preparation began there"):
        prepare(options(target, output))
